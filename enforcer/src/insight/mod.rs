//! Looking into processes for a while: which of their call sites obtain GPU memory and do not give it back.
//!
//! Nothing here enforces anything, and nothing of it is there while nobody looks: programs, maps and probes come with a
//! look and go with it, at the latest with the daemon.
//!
//! Pure: [`pairing`] (allocations and what gives them back), [`survival`], [`trend`], [`calls`] (which calls), [`folded`]
//! and [`pprof`] (reports in other programs' formats). Shell: [`look`] (probes in and out, calls read), [`stack`] (whose
//! stack it is), [`elf`] (what files say about their functions).

pub mod calls;
pub mod elf;
pub mod folded;
pub mod look;
pub mod pairing;
pub mod pprof;
pub mod stack;
pub mod survival;
pub mod trend;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

pub use self::look::{Look, LookError, Watched};
use crate::control::leaks::{LeakReport, Target};

/// Looks that are kept, those that are over among them.
const MOST_LOOKS: usize = 8;
/// A look may last so long.
pub const LONGEST: Duration = Duration::from_hours(24);

/// Why the leak finder does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum LeaksError {
    /// It cannot begin.
    #[error("allocations of {target} cannot be followed: {source}")]
    Start {
        /// Whose.
        target: Target,
        /// Why.
        source: Box<LookError>,
    },
    /// One at a time for each target.
    #[error(
        "allocations of {0} are being followed already; `gpuquotactl leaks` shows what was found so far"
    )]
    Running(Target),
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
    #[error("allocations of {0} are not followed and were not lately")]
    NoLook(Target),
}

/// All looks of the daemon.
#[derive(Default)]
pub struct Leaks {
    looks: Mutex<BTreeMap<Target, Arc<Look>>>,
    /// Who knows the processes of tenants. Weak: the daemon has the looks.
    watched: OnceLock<Weak<dyn Watched>>,
}

impl Leaks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Target, Arc<Look>>> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says who knows the processes of tenants; the first word counts.
    pub fn ask(&self, watched: &Arc<dyn Watched>) {
        let _ = self.watched.set(Arc::downgrade(watched));
    }

    /// Begins to look. A look at the same target that is over makes place for it.
    pub fn start(&self, target: Target, limit: Duration) -> Result<(), LeaksError> {
        let watched = self
            .watched
            .get()
            .map(Weak::clone)
            .ok_or(LeaksError::NotYet)?;
        if !(Duration::from_secs(1)..=LONGEST).contains(&limit) {
            return Err(LeaksError::Duration);
        }
        let mut looks = self.lock();
        if looks.get(&target).is_some_and(|look| !look.is_over()) {
            return Err(LeaksError::Running(target));
        }
        looks.remove(&target);
        if looks.len() >= MOST_LOOKS {
            let over = looks
                .iter()
                .find(|(_, look)| look.is_over())
                .map(|(target, _)| target.clone())
                .ok_or(LeaksError::TooMany)?;
            looks.remove(&over);
        }
        let look =
            Look::start(target.clone(), limit, watched).map_err(|source| LeaksError::Start {
                target: target.clone(),
                source: Box::new(source),
            })?;
        looks.insert(target, Arc::new(look));
        Ok(())
    }

    fn get(&self, target: &Target) -> Result<Arc<Look>, LeaksError> {
        let found = self.lock().get(target).map(Arc::clone);
        found.ok_or_else(|| LeaksError::NoLook(target.clone()))
    }

    /// What a look has found.
    pub fn report(&self, target: &Target) -> Result<LeakReport, LeaksError> {
        Ok(self.get(target)?.report())
    }

    /// Removes the probes of a look and returns what it found, which is kept for a while.
    pub fn stop(&self, target: &Target) -> Result<LeakReport, LeaksError> {
        let look = self.get(target)?;
        look.stop();
        Ok(look.report())
    }

    /// Whose allocations are or were followed.
    pub fn targets(&self) -> Vec<Target> {
        self.lock().keys().cloned().collect()
    }

    /// A process has spoken to the driver, or runs another program.
    pub fn seen(&self, pid: u32) {
        for look in self.lock().values() {
            look.seen(pid);
        }
    }

    /// How many looks have probes in processes.
    pub fn running(&self) -> usize {
        self.lock().values().filter(|look| !look.is_over()).count()
    }

    /// Ends all looks.
    pub fn end(&self) {
        self.lock().clear();
    }
}
