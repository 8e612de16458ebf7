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
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use gpuquota_policy::{HostGpu, Policy};
use tracing::warn;

pub use self::look::{Look, LookError};
use crate::{
    control::{leaks::Target, profile::ProfileReport},
    insight::Watched,
    looks::{self, Book, LooksError, Words},
};

/// Looks by policy at once: each has programs, maps and a thread of its own.
const MOST_ALWAYS: usize = 32;
/// Anomalies that are remembered so that each is told once.
const MOST_TOLD: usize = 1024;

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

#[derive(Default)]
struct Kept {
    /// Looks by policy, by tenant.
    always: BTreeMap<String, Arc<Look>>,
    /// Tenants whose policy asks for it and for whom there was no room, or no look could begin.
    left_out: BTreeMap<String, String>,
    /// Anomalies by tenant since the daemon runs.
    anomalies: BTreeMap<String, u64>,
    /// What was told lately: process and kernel.
    told: BTreeMap<(u32, String), Instant>,
}

/// All looks of the daemon at launches.
#[derive(Default)]
pub struct Profiles {
    by_command: Book<Look>,
    kept: Mutex<Kept>,
    /// Held while looks begin and end, which takes longer than other questions should wait.
    changing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl looks::Look for Look {
    type Report = ProfileReport;
    type Host = dyn Host;
    type Error = LookError;
    const WORDS: Words = Words {
        what: "launches",
        done: "profiled",
        command: "profile",
    };
    const MOST: usize = 8;
    const LONGEST: Duration = Duration::from_hours(24);

    fn begin(target: Target, limit: Duration, host: Weak<dyn Host>) -> Result<Self, LookError> {
        Self::start(target, Some(limit), host)
    }

    fn seen(&self, pid: u32) {
        self.seen(pid);
    }

    fn report(&self) -> ProfileReport {
        self.report()
    }

    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn stop(&self) {
        self.stop();
    }
}

impl Profiles {
    /// Says who knows the processes of tenants; the first word counts.
    pub fn ask(&self, host: &Arc<dyn Host>) {
        self.by_command.ask(host);
    }

    fn always(&self, target: &Target) -> Option<Arc<Look>> {
        match target {
            Target::Tenant(name) => lock(&self.kept).always.get(name).cloned(),
            Target::Process(_) => None,
        }
    }

    /// Begins to look, if the policy does not look already.
    pub fn start(&self, target: &Target, limit: Duration) -> Result<(), LooksError> {
        let _changing = lock(&self.changing);
        if self.always(target).is_some() {
            return Err(LooksError::Always(target.clone()));
        }
        self.by_command.start(target, limit)
    }

    /// Looks at these tenants at all times, and at no others.
    pub fn follow(&self, wanted: &BTreeSet<String>) {
        let Ok(host) = self.by_command.host() else {
            // The daemon is starting, and says so again when it has.
            return;
        };
        let _changing = lock(&self.changing);
        let (ended, missing) = {
            let mut kept = lock(&self.kept);
            let (stay, ended): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut kept.always)
                .into_iter()
                .partition(|(name, _)| wanted.contains(name));
            kept.always = stay;
            kept.left_out.clear();
            let missing: Vec<String> = wanted
                .iter()
                .filter(|name| !kept.always.contains_key(*name))
                .cloned()
                .collect();
            (ended, missing)
        };
        drop(ended);
        for name in missing {
            let target = Target::Tenant(name.clone());
            let begun = if lock(&self.kept).always.len() >= MOST_ALWAYS {
                Err(format!("{MOST_ALWAYS} tenants are profiled already"))
            } else {
                Look::start(target.clone(), None, Weak::clone(&host))
                    .map_err(|error| Book::<Look>::refused(&target, error).to_string())
            };
            let mut kept = lock(&self.kept);
            match begun {
                Ok(look) => {
                    kept.always.insert(name, Arc::new(look));
                }
                Err(why) => {
                    warn!(tenant = name, why, "insight.profile has no effect");
                    kept.left_out.insert(name, why);
                }
            }
        }
    }

    /// What a look has found.
    pub fn report(&self, target: &Target) -> Result<ProfileReport, LooksError> {
        match self.always(target) {
            Some(look) => Ok(look.report()),
            None => self.by_command.report(target),
        }
    }

    /// Removes the probes of a look by command and returns what it found, which is kept for a while.
    pub fn stop(&self, target: &Target) -> Result<ProfileReport, LooksError> {
        if self.always(target).is_some() {
            return Err(LooksError::Always(target.clone()));
        }
        self.by_command.stop(target)
    }

    /// Whose launches are or were profiled.
    pub fn targets(&self) -> Vec<Target> {
        let always: Vec<String> = lock(&self.kept).always.keys().cloned().collect();
        let all: BTreeSet<Target> = always
            .into_iter()
            .map(Target::Tenant)
            .chain(self.by_command.targets())
            .collect();
        all.into_iter().collect()
    }

    /// A process has spoken to the driver, or runs another program.
    pub fn seen(&self, pid: u32) {
        self.by_command.seen(pid);
        for look in lock(&self.kept).always.values() {
            look.seen(pid);
        }
    }

    /// Counts an anomaly of a tenant; false if another look at the same process has told of it.
    pub fn count(&self, found: &Unusual, now: Instant) -> bool {
        let mut kept = lock(&self.kept);
        kept.told
            .retain(|_, at| now.saturating_duration_since(*at) < anomaly::CALM);
        let key = (found.pid, found.kernel.clone());
        if kept.told.contains_key(&key) {
            return false;
        }
        if kept.told.len() < MOST_TOLD {
            kept.told.insert(key, now);
        }
        if !found.tenant.is_empty() {
            *kept
                .anomalies
                .entry((*found.tenant).to_owned())
                .or_default() += 1;
        }
        true
    }

    /// Anomalies of a tenant since the daemon runs.
    pub fn anomalies(&self, tenant: &str) -> u64 {
        lock(&self.kept).anomalies.get(tenant).copied().unwrap_or(0)
    }

    /// Forgets the counts of tenants that are not there any more.
    pub fn keep(&self, tenants: &BTreeSet<String>) {
        lock(&self.kept)
            .anomalies
            .retain(|tenant, _| tenants.contains(tenant));
    }

    /// How many looks have probes in processes: by command and by policy.
    pub fn running(&self) -> (usize, usize) {
        (self.by_command.running(), lock(&self.kept).always.len())
    }

    /// Tenants whose policy asks for a look that there is not, and why.
    pub fn left_out(&self) -> BTreeMap<String, String> {
        lock(&self.kept).left_out.clone()
    }

    /// Ends all looks.
    pub fn end(&self) {
        let _changing = lock(&self.changing);
        let always = std::mem::take(&mut lock(&self.kept).always);
        drop(always);
        self.by_command.end();
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
    fn what_is_said_for_one_gpu_has_no_effect() {
        let policy = policy(
            "[tenant.a]\ncgroup = \"/a\"\ngpu.\"*\".anomaly.factor = 2\n\
             gpu.\"0\".insight.profile = true\n",
        );
        assert!(always(&policy).is_empty());
    }
}
