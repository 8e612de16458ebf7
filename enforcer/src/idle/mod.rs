//! What the threads of a tenant do while its GPU is idle.
//!
//! Nothing here enforces anything, and nothing of it is there while nobody looks: the program on the context switches of the
//! host comes with a look and goes with it, at the latest with the daemon.
//!
//! Pure: [`state`] (what a thread does), [`timeline`] (what a process does, from its threads), [`gpu`] (how a GPU was used,
//! from NVML), [`correlate`] (both together), [`folded`]. Shell: [`look`].

pub mod correlate;
pub mod folded;
pub mod gpu;
pub mod look;
pub mod state;
pub mod timeline;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

pub use self::{
    look::{Look, LookError, Watched},
    state::State,
};
use crate::control::{idle::IdleReport, leaks::Target};

/// Looks that are kept, those that are over among them. Each that goes on costs the host's context switches something.
const MOST_LOOKS: usize = 4;
/// A look may last so long.
pub const LONGEST: Duration = Duration::from_hours(1);

/// Why it is not looked at what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum IdleError {
    /// It cannot begin.
    #[error("the threads of {target} cannot be followed: {source}")]
    Start {
        /// Whose.
        target: Target,
        /// Why.
        source: Box<LookError>,
    },
    /// One at a time for each target.
    #[error(
        "the threads of {0} are being followed already; `gpuquotactl idle` shows what was found so far"
    )]
    Running(Target),
    /// Too many.
    #[error("{MOST_LOOKS} looks are running already; end one of them first")]
    TooMany,
    /// Too long, or not at all.
    #[error("a look may last from 1 s to {} min", LONGEST.as_secs() / 60)]
    Duration,
    /// The daemon is starting.
    #[error("the daemon is starting; try again in a moment")]
    NotYet,
    /// There is no such look.
    #[error("the threads of {0} are not followed and were not lately")]
    NoLook(Target),
}

/// All looks of the daemon.
#[derive(Default)]
pub struct Idle {
    looks: Mutex<BTreeMap<Target, Arc<Look>>>,
    /// Who knows the processes of tenants. Weak: the daemon has the looks.
    watched: OnceLock<Weak<dyn Watched>>,
}

impl Idle {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Target, Arc<Look>>> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says who knows the processes of tenants; the first word counts.
    pub fn ask(&self, watched: &Arc<dyn Watched>) {
        let _ = self.watched.set(Arc::downgrade(watched));
    }

    /// Begins to look. A look at the same target that is over makes place for it.
    pub fn start(&self, target: Target, limit: Duration) -> Result<(), IdleError> {
        let watched = self
            .watched
            .get()
            .map(Weak::clone)
            .ok_or(IdleError::NotYet)?;
        if !(Duration::from_secs(1)..=LONGEST).contains(&limit) {
            return Err(IdleError::Duration);
        }
        let mut looks = self.lock();
        if looks.get(&target).is_some_and(|look| !look.is_over()) {
            return Err(IdleError::Running(target));
        }
        looks.remove(&target);
        if looks.len() >= MOST_LOOKS {
            let over = looks
                .iter()
                .find(|(_, look)| look.is_over())
                .map(|(target, _)| target.clone())
                .ok_or(IdleError::TooMany)?;
            looks.remove(&over);
        }
        let look =
            Look::start(target.clone(), limit, &watched).map_err(|source| IdleError::Start {
                target: target.clone(),
                source: Box::new(source),
            })?;
        looks.insert(target, Arc::new(look));
        Ok(())
    }

    fn get(&self, target: &Target) -> Result<Arc<Look>, IdleError> {
        let found = self.lock().get(target).map(Arc::clone);
        found.ok_or_else(|| IdleError::NoLook(target.clone()))
    }

    /// What a look has found.
    pub fn report(&self, target: &Target) -> Result<IdleReport, IdleError> {
        Ok(self.get(target)?.report())
    }

    /// Ends a look and returns what it found, which is kept for a while.
    pub fn stop(&self, target: &Target) -> Result<IdleReport, IdleError> {
        let look = self.get(target)?;
        look.stop();
        Ok(look.report())
    }

    /// Whose threads are or were followed.
    pub fn targets(&self) -> Vec<Target> {
        self.lock().keys().cloned().collect()
    }

    /// How many looks have a program on the context switches.
    pub fn running(&self) -> usize {
        self.lock()
            .values()
            .filter(|look| look.is_attached())
            .count()
    }

    /// Ends all looks.
    pub fn end(&self) {
        let looks = std::mem::take(&mut *self.lock());
        for look in looks.values() {
            look.abandon();
        }
    }
}
