//! The launch profile: which kernels processes launch, how often, how long they are waited for, and when that is unusual.
//!
//! Nothing here enforces anything, and nothing of it is there while nobody looks: programs, maps and probes come with a
//! look and go with it, at the latest with the daemon. The probes of launch budgets are others, and know nothing of these.
//!
//! Pure: [`book`] (what was seen, by tenant and symbol), [`anomaly`] (what is usual), [`histogram`], [`sampling`] (what it
//! may cost), [`calls`] (which calls). Shell: [`look`] (probes in and out, messages read), [`cost`] (what a hit costs).

pub mod anomaly;
pub mod book;
pub mod calls;
pub mod cost;
pub mod histogram;
pub mod look;
pub mod sampling;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use gpuquota_policy::{GpuSelector, HostGpu, Key, Policy};
use tracing::warn;

pub use self::look::{Look, LookError};
use crate::{
    control::{leaks::Target, profile::ProfileReport},
    insight::Watched,
};

/// Looks by command that are kept, those that are over among them.
const MOST_LOOKS: usize = 8;
/// Looks by policy at once: each has programs, maps and a thread of its own.
const MOST_ALWAYS: usize = 32;
/// Anomalies that are remembered so that each is told once.
const MOST_TOLD: usize = 1024;
/// A look by command may last so long.
pub const LONGEST: Duration = Duration::from_hours(24);

/// What holds for a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// The innermost tenant that it is in; empty for none.
    pub tenant: Arc<str>,
    /// How many times the usual is an anomaly.
    pub factor: f64,
    /// Part of its time that the probes may cost.
    pub budget: f64,
}

/// A kernel took unusually long.
#[derive(Clone, Debug, PartialEq)]
pub struct Unusual {
    /// Tenant; empty for none.
    pub tenant: Arc<str>,
    /// Process.
    pub pid: u32,
    /// The kernel, readable.
    pub kernel: String,
    /// From launch to the end of the wait.
    pub duration: Duration,
    /// What is usual.
    pub usual: Duration,
}

/// What a look has to know of the rest of the daemon.
pub trait Host: Watched {
    /// What holds for a process.
    fn rules(&self, pid: u32) -> Rules;
    /// An anomaly has begun.
    fn unusual(&self, found: Unusual);
}

/// Why the profile does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It cannot begin.
    #[error("launches of {target} cannot be profiled: {source}")]
    Start {
        /// Whose.
        target: Target,
        /// Why.
        source: Box<LookError>,
    },
    /// One at a time for each target.
    #[error(
        "launches of {0} are being profiled already; `gpuquotactl profile {0} --so-far` shows what was found so far"
    )]
    Running(Target),
    /// The policy has the last word.
    #[error(
        "launches of {0} are profiled by insight.profile = true; change the policy to end that"
    )]
    Always(Target),
    /// Too many.
    #[error("{MOST_LOOKS} looks are running already; end one of them first")]
    TooMany,
    /// Too long, or not at all.
    #[error("a look may last from 1 s to {} h", LONGEST.as_secs() / 3600)]
    Duration,
    /// The daemon is starting.
    #[error("the daemon is starting; try again in a moment")]
    NotYet,
    /// There is no such look.
    #[error("launches of {0} are not profiled and were not lately")]
    NoLook(Target),
}

#[derive(Default)]
struct Looks {
    by_command: BTreeMap<Target, Arc<Look>>,
    /// By tenant.
    always: BTreeMap<String, Arc<Look>>,
    /// Tenants whose policy asks for it and for whom there was no room, or no look could begin.
    left_out: BTreeMap<String, String>,
    /// Anomalies by tenant since the daemon runs.
    anomalies: BTreeMap<String, u64>,
    /// What was told lately: process and kernel.
    told: BTreeMap<(u32, String), Instant>,
}

/// All looks of the daemon.
#[derive(Default)]
pub struct Profiles {
    looks: Mutex<Looks>,
    /// Held while looks begin and end, which takes longer than other questions should wait.
    changing: Mutex<()>,
    /// Weak: the daemon has the looks.
    host: OnceLock<Weak<dyn Host>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Profiles {
    /// Says who knows the processes of tenants; the first word counts.
    pub fn ask(&self, host: &Arc<dyn Host>) {
        let _ = self.host.set(Arc::downgrade(host));
    }

    fn host(&self) -> Result<Weak<dyn Host>, ProfileError> {
        self.host.get().map(Weak::clone).ok_or(ProfileError::NotYet)
    }

    fn begin(&self, target: &Target, limit: Option<Duration>) -> Result<Arc<Look>, ProfileError> {
        Look::start(target.clone(), limit, self.host()?)
            .map(Arc::new)
            .map_err(|source| ProfileError::Start {
                target: target.clone(),
                source: Box::new(source),
            })
    }

    /// Begins to look. A look at the same target that is over makes place for it.
    pub fn start(&self, target: &Target, limit: Duration) -> Result<(), ProfileError> {
        if !(Duration::from_secs(1)..=LONGEST).contains(&limit) {
            return Err(ProfileError::Duration);
        }
        let _changing = lock(&self.changing);
        let over = {
            let mut looks = lock(&self.looks);
            if matches!(target, Target::Tenant(name) if looks.always.contains_key(name)) {
                return Err(ProfileError::Always(target.clone()));
            }
            let known = looks.by_command.get(target);
            if known.is_some_and(|look| !look.is_over()) {
                return Err(ProfileError::Running(target.clone()));
            }
            let mut over: Vec<Arc<Look>> = looks.by_command.remove(target).into_iter().collect();
            if looks.by_command.len() >= MOST_LOOKS {
                let ended = looks
                    .by_command
                    .iter()
                    .find(|(_, look)| look.is_over())
                    .map(|(target, _)| target.clone())
                    .ok_or(ProfileError::TooMany)?;
                over.extend(looks.by_command.remove(&ended));
            }
            over
        };
        drop(over);
        let look = self.begin(target, Some(limit))?;
        lock(&self.looks).by_command.insert(target.clone(), look);
        Ok(())
    }

    /// Looks at these tenants at all times, and at no others.
    pub fn follow(&self, wanted: &BTreeSet<String>) {
        if self.host.get().is_none() {
            // The daemon is starting, and says so again when it has.
            return;
        }
        let _changing = lock(&self.changing);
        let (ended, missing) = {
            let mut looks = lock(&self.looks);
            let gone: Vec<String> = looks
                .always
                .keys()
                .filter(|name| !wanted.contains(*name))
                .cloned()
                .collect();
            let ended: Vec<_> = gone
                .iter()
                .filter_map(|name| looks.always.remove(name))
                .collect();
            looks.left_out.clear();
            let missing: Vec<String> = wanted
                .iter()
                .filter(|name| !looks.always.contains_key(*name))
                .cloned()
                .collect();
            (ended, missing)
        };
        drop(ended);
        for name in missing {
            let begun = if lock(&self.looks).always.len() >= MOST_ALWAYS {
                Err(format!("{MOST_ALWAYS} tenants are profiled already"))
            } else {
                self.begin(&Target::Tenant(name.clone()), None)
                    .map_err(|error| error.to_string())
            };
            let mut looks = lock(&self.looks);
            match begun {
                Ok(look) => {
                    looks.always.insert(name, look);
                }
                Err(why) => {
                    warn!(tenant = name, why, "insight.profile has no effect");
                    looks.left_out.insert(name, why);
                }
            }
        }
    }

    fn get(&self, target: &Target) -> Result<Arc<Look>, ProfileError> {
        let looks = lock(&self.looks);
        let always = match target {
            Target::Tenant(name) => looks.always.get(name),
            Target::Process(_) => None,
        };
        always
            .or_else(|| looks.by_command.get(target))
            .map(Arc::clone)
            .ok_or_else(|| ProfileError::NoLook(target.clone()))
    }

    /// What a look has found.
    pub fn report(&self, target: &Target) -> Result<ProfileReport, ProfileError> {
        Ok(self.get(target)?.report())
    }

    /// Removes the probes of a look by command and returns what it found, which is kept for a while.
    pub fn stop(&self, target: &Target) -> Result<ProfileReport, ProfileError> {
        let look = self.get(target)?;
        if look.is_always() {
            return Err(ProfileError::Always(target.clone()));
        }
        look.stop();
        Ok(look.report())
    }

    /// Whose launches are or were profiled.
    pub fn targets(&self) -> Vec<Target> {
        let looks = lock(&self.looks);
        let always = looks.always.keys().cloned().map(Target::Tenant);
        let all: BTreeSet<Target> = always.chain(looks.by_command.keys().cloned()).collect();
        all.into_iter().collect()
    }

    /// A process has spoken to the driver, or runs another program.
    pub fn seen(&self, pid: u32) {
        let looks = lock(&self.looks);
        for look in looks.by_command.values().chain(looks.always.values()) {
            look.seen(pid);
        }
    }

    /// Counts an anomaly of a tenant; false if another look at the same process has told of it.
    pub fn count(&self, found: &Unusual, now: Instant) -> bool {
        let mut looks = lock(&self.looks);
        looks
            .told
            .retain(|_, at| now.saturating_duration_since(*at) < anomaly::CALM);
        let key = (found.pid, found.kernel.clone());
        if looks.told.contains_key(&key) {
            return false;
        }
        if looks.told.len() < MOST_TOLD {
            looks.told.insert(key, now);
        }
        if !found.tenant.is_empty() {
            *looks
                .anomalies
                .entry((*found.tenant).to_owned())
                .or_default() += 1;
        }
        true
    }

    /// Anomalies of a tenant since the daemon runs.
    pub fn anomalies(&self, tenant: &str) -> u64 {
        lock(&self.looks)
            .anomalies
            .get(tenant)
            .copied()
            .unwrap_or(0)
    }

    /// Forgets the counts of tenants that are not there any more.
    pub fn keep(&self, tenants: &BTreeSet<String>) {
        lock(&self.looks)
            .anomalies
            .retain(|tenant, _| tenants.contains(tenant));
    }

    /// How many looks have probes in processes: by command and by policy.
    pub fn running(&self) -> (usize, usize) {
        let looks = lock(&self.looks);
        let by_command = looks.by_command.values().filter(|look| !look.is_over());
        (by_command.count(), looks.always.len())
    }

    /// Tenants whose policy asks for a look that there is not, and why.
    pub fn left_out(&self) -> BTreeMap<String, String> {
        lock(&self.looks).left_out.clone()
    }

    /// Ends all looks.
    pub fn end(&self) {
        let _changing = lock(&self.changing);
        let all = {
            let mut looks = lock(&self.looks);
            (
                std::mem::take(&mut looks.by_command),
                std::mem::take(&mut looks.always),
            )
        };
        drop(all);
    }
}

/// A GPU that no host has, so that only what is said for all GPUs counts: a launch does not say which GPU it is for.
pub fn every_gpu() -> HostGpu {
    HostGpu {
        index: u32::MAX,
        uuid: String::new(),
        memory: 0,
    }
}

/// Tenants whose policy asks for a look at all times.
pub fn always(policy: &Policy) -> BTreeSet<String> {
    let every = every_gpu();
    let on_every = policy.on(&every);
    policy
        .tenants
        .keys()
        .filter(|name| {
            on_every
                .budget(name)
                .is_some_and(|budget| budget.profile.always)
        })
        .cloned()
        .collect()
}

/// What a policy says about anomalies and has no effect.
pub fn without_effect(policy: &Policy) -> Vec<String> {
    let groups = [Key::AnomalyFactor.split().0, Key::InsightBudget.split().0];
    let mut found = Vec::new();
    for tenant in policy.tenants.values() {
        for (selector, limits) in &tenant.gpu {
            if *selector == GpuSelector::Any {
                continue;
            }
            found.extend(
                limits
                    .iter()
                    .filter(|(key, ..)| groups.contains(&key.split().0))
                    .map(|(key, _, origin)| {
                        format!(
                            "{origin}: {key} has no effect for a single GPU: a launch does not say which GPU it is \
                             for, so tenant \"{}\" has one value for all of them",
                            tenant.name
                        )
                    }),
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use gpuquota_policy::{Layer, Source};

    use super::*;

    fn policy(text: &str) -> Policy {
        let source = Source::new("/p.toml", Layer::Admin, text);
        Policy::load(&[source], None).expect("valid").policy
    }

    #[test]
    fn tenants_are_profiled_if_they_or_their_class_say_so() {
        let policy = policy(
            "[class.watched]\ninsight.profile = true\n\
             [tenant.a]\ncgroup = \"/a\"\nclass = \"watched\"\n\
             [tenant.b]\ncgroup = \"/b\"\ninsight.profile = true\n\
             [tenant.c]\ncgroup = \"/c\"\n\
             [tenant.d]\ncgroup = \"/d\"\nclass = \"watched\"\ninsight.profile = false\n",
        );
        assert_eq!(
            always(&policy),
            BTreeSet::from(["a".to_owned(), "b".to_owned()])
        );
        assert!(without_effect(&policy).is_empty());
    }

    #[test]
    fn an_anomaly_that_two_looks_see_is_one() {
        let profiles = Profiles::default();
        let found = Unusual {
            tenant: "a".into(),
            pid: 7,
            kernel: "gemm".into(),
            duration: Duration::from_secs(1),
            usual: Duration::from_millis(1),
        };
        let start = Instant::now();
        assert!(profiles.count(&found, start));
        assert!(!profiles.count(&found, start + anomaly::CALM / 2));
        let other = Unusual {
            kernel: "conv".into(),
            ..found.clone()
        };
        assert!(profiles.count(&other, start));
        assert!(profiles.count(&found, start + anomaly::CALM));
        assert_eq!((profiles.anomalies("a"), profiles.anomalies("b")), (3, 0));
        profiles.keep(&BTreeSet::new());
        assert_eq!(profiles.anomalies("a"), 0);
    }

    #[test]
    fn what_is_said_for_one_gpu_is_told_to_have_no_effect() {
        let policy = policy(
            "[tenant.a]\ncgroup = \"/a\"\ngpu.\"*\".anomaly.factor = 2\n\
             gpu.\"0\".insight.profile = true\ngpu.\"0\".insight.budget = \"2%\"\n",
        );
        assert!(always(&policy).is_empty());
        let found = without_effect(&policy);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("insight.budget has no effect for a single GPU"));
    }
}
