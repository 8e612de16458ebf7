//! Launch budgets: how fast the processes of a tenant may launch kernels.
//!
//! Pure: [`limits`] (policy to limits), [`bucket`] (the token bucket outside of the kernel), [`stopper`] (who may be
//! continued), [`storm`], [`symbols`] (where probes go). Shell: [`attach`] (who gets probes), [`scan`] (finding libcuda
//! in a process), [`pacer`] (continuing on time), [`freezer`] (`launch.pace = "freeze"`), [`release`] (nobody stays
//! stopped). [`Launches`] is what the rest of the daemon sees.

pub mod attach;
pub mod bucket;
pub mod detach;
pub mod freezer;
pub mod limits;
pub mod pacer;
pub mod pressure;
pub mod process;
pub mod release;
pub mod scan;
pub mod stopper;
pub mod storm;
pub mod symbols;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc},
    time::Duration,
};

use gpuquota_common::map::MAX_TENANTS;

use self::{attach::Message, limits::Budgets, scan::Cache};
use crate::{
    control::{
        self, Finding, Verdict,
        launch::{LaunchRate, ProcessLaunches, TenantLaunch},
    },
    doctor,
    kernel::{Kernel, KernelError},
    time::release::Whereabouts,
};

/// Processes that are shown for a tenant: those with the most launches.
const TOP: usize = 16;

/// Who a process belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The innermost tenant that governs it.
    pub tenant: u32,
    /// Its cgroup.
    pub cgroup: u64,
    /// The state of the cgroup map in which that was found.
    pub epoch: u32,
}

/// What launch budgets have to know of the rest of the daemon.
pub trait Host: Send + Sync {
    /// Who a process belongs to; `None` for one in no tenant, or that is gone.
    fn member(&self, pid: u32) -> Option<Member>;
    /// Processes that have spoken to the driver.
    fn processes(&self) -> Vec<u32>;
    /// The cgroups of a tenant: ids and folders.
    fn roots(&self, tenant: u32) -> Vec<(u64, PathBuf)>;
    /// The name of a tenant.
    fn name_of(&self, tenant: u32) -> String;
    /// Tells whoever listens.
    fn notify(&self, notice: control::Notice);
    /// Where the guard finds what is frozen on the GPUs; `None` if that is written down nowhere.
    fn frozen(&self) -> Option<Whereabouts>;
}

/// A process with probes, as it is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) slot: u32,
    pub(crate) tenant: u32,
    /// Files with launch calls.
    pub(crate) files: Vec<scan::FoundFile>,
    /// Why it has no probes, or not all.
    pub(crate) trouble: Option<String>,
}

/// Launch budgets as the rest of the daemon sees them.
pub struct Launches {
    kernel: Arc<Kernel>,
    budgets: RwLock<Arc<Budgets>>,
    cache: Arc<Cache>,
    /// Processes that have probes, or are about to.
    shown: Mutex<BTreeMap<u32, Shown>>,
    inbox: Mutex<Option<mpsc::Sender<Message>>>,
    /// Storms by tenant.
    storms: Mutex<BTreeMap<u32, u64>>,
    pressure: Mutex<pressure::Book>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Launches {
    /// No budgets yet.
    pub fn new(kernel: Arc<Kernel>) -> Self {
        Self {
            kernel,
            budgets: RwLock::default(),
            cache: Arc::default(),
            shown: Mutex::default(),
            inbox: Mutex::default(),
            storms: Mutex::default(),
            pressure: Mutex::default(),
        }
    }

    /// The budgets in force.
    pub fn budgets(&self) -> Arc<Budgets> {
        Arc::clone(&self.budgets.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes limits into the bank of `generation`, which no program reads yet.
    pub fn write_bank(&self, generation: u64, budgets: &Budgets) -> Result<(), KernelError> {
        let maps = self.kernel.launch();
        for tenant in 0..MAX_TENANTS {
            let wanted = budgets.limit(tenant);
            if maps.limit(generation, tenant)? != wanted {
                maps.set_limit(generation, tenant, wanted)?;
            }
        }
        Ok(())
    }

    /// The bank is in force: buckets whose limit is another one begin full, and probes follow.
    pub fn put_in_force(&self, budgets: Budgets) -> Result<(), KernelError> {
        let before = {
            let mut now = self.budgets.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *now, Arc::new(budgets))
        };
        let now = self.budgets();
        for tenant in 0..MAX_TENANTS {
            let limit = now.limit(tenant);
            if before.limit(tenant).interval != limit.interval {
                self.kernel.fill_launches(tenant, limit.span)?;
            }
        }
        self.send(Message::Sweep);
        Ok(())
    }

    /// A process has spoken to the driver, made a channel, or was forked from one with probes.
    pub fn seen(&self, tgid: u32) {
        if !self.budgets().is_empty() {
            self.send(Message::Seen(tgid));
        }
    }

    /// Processes have ended.
    pub fn gone(&self, tgids: &BTreeSet<u32>) {
        let ours = {
            let shown = lock(&self.shown);
            tgids.iter().any(|tgid| shown.contains_key(tgid))
        };
        if ours {
            self.send(Message::Gone(tgids.clone()));
        }
    }

    /// Looks at everything again.
    pub fn sweep(&self) {
        self.send(Message::Sweep);
    }

    fn send(&self, message: Message) {
        if let Some(inbox) = lock(&self.inbox).as_ref() {
            // A thread that has ended needs no news.
            let _ = inbox.send(message);
        }
    }

    /// When a process launched last, on `CLOCK_MONOTONIC`; `None` if it has no probes.
    pub fn last_launch(&self, tgid: u32) -> Option<Duration> {
        let slot = lock(&self.shown).get(&tgid)?.slot;
        let calls = self.kernel.launch().record.calls(slot).ok()?;
        Some(Duration::from_nanos(calls.last_ns))
    }

    /// Whether a process that is stopped now is so by us.
    pub fn stops(&self, tgid: u32) -> bool {
        let Some(slot) = lock(&self.shown).get(&tgid).map(|shown| shown.slot) else {
            return false;
        };
        self.kernel.launch().record.calls(slot).is_ok_and(|calls| {
            calls.stops > 0
                && !calls.stopped_by_others()
                && calls.job_control_ns <= calls.stopped_ns
        })
    }

    /// The launches of a tenant; `None` if no budget holds for it.
    pub fn usage(&self, tenant: u32) -> Option<TenantLaunch> {
        let budgets = self.budgets();
        budgets.treatment(tenant)?;
        let own = budgets.own(tenant);
        let maps = self.kernel.launch();
        let bucket = maps.bucket(tenant).ok()?;
        let mut processes: Vec<ProcessLaunches> = lock(&self.shown)
            .iter()
            .filter(|(_, shown)| shown.tenant == tenant)
            .filter_map(|(pid, shown)| {
                let calls = maps.record.calls(shown.slot).ok()?;
                Some(ProcessLaunches {
                    pid: *pid,
                    comm: doctor::comm(*pid),
                    launches: calls.launches,
                    delayed: calls.delayed,
                    delay_usec: calls.delay_ns / 1000,
                })
            })
            .collect();
        processes.sort_by_key(|process| std::cmp::Reverse(process.launches));
        processes.truncate(TOP);
        Some(TenantLaunch {
            max: own.and_then(|own| own.max).map(|rate| LaunchRate {
                count: rate.count(),
                per_usec: rate.unit().seconds() * 1_000_000,
            }),
            burst: own.map_or(0, |own| own.burst),
            launches: bucket.launches,
            delayed: bucket.delayed,
            delay_usec: bucket.delay_ns / 1000,
            overdue: bucket.overdue,
            denied: bucket.denied,
            unheld: bucket.unheld,
            evaded: bucket.evaded,
            storms: lock(&self.storms).get(&tenant).copied().unwrap_or(0),
            pressure: lock(&self.pressure).of(tenant).into(),
            gaps: maps
                .gaps(tenant)
                .map_or_else(|_| Vec::new(), |gaps| gaps.to_vec()),
            processes,
        })
    }

    /// Lines for `doctor`.
    pub fn findings(&self) -> Vec<Finding> {
        let programs = self.kernel.launch_programs();
        let mut findings = Vec::new();
        let mut say = |verdict, detail: String| {
            findings.push(doctor::finding("launch budgets", verdict, detail));
        };
        if let Some(why) = programs.unavailable() {
            say(
                Verdict::Warning,
                format!("launch.max is not enforced on this kernel: {why}"),
            );
            return findings;
        }
        match programs.no_spin() {
            Some(why) => say(
                Verdict::Info,
                format!("launch.pace = \"spin\" does as \"signal\" does: {why}"),
            ),
            None => say(
                Verdict::Ok,
                "launches can be counted and delayed".to_owned(),
            ),
        }
        for (pid, shown) in lock(&self.shown).iter() {
            if let Some(trouble) = &shown.trouble {
                say(Verdict::Warning, format!("process {pid}: {trouble}"));
            }
            for file in &shown.files {
                if !file.missing.is_empty() {
                    say(
                        Verdict::Warning,
                        format!(
                            "{} of process {pid} has no {}: a launch call of another name is not counted",
                            file.name.display(),
                            file.missing.join(", ")
                        ),
                    );
                }
                if !file.stepped.is_empty() {
                    say(
                        Verdict::Info,
                        format!(
                            "{} of process {pid}: probes on {} cost some 5 µs a call, since no instruction at their \
                             entry is one that the kernel emulates",
                            file.name.display(),
                            file.stepped.join(", ")
                        ),
                    );
                }
            }
        }
        findings
    }
}
