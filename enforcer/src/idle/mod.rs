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

use std::{sync::Weak, time::Duration};

pub use self::{
    look::{Look, LookError, Watched},
    state::State,
};
use crate::{
    control::{idle::IdleReport, leaks::Target},
    looks::{self, Book, Words},
};

/// All looks of the daemon at threads.
pub type Idle = Book<Look>;

impl looks::Look for Look {
    type Report = IdleReport;
    type Host = dyn Watched;
    type Error = LookError;
    const WORDS: Words = Words {
        what: "threads",
        done: "followed",
        command: "idle",
    };
    /// Each that goes on costs the host's context switches something.
    const MOST: usize = 4;
    const LONGEST: Duration = Duration::from_hours(1);

    fn begin(target: Target, limit: Duration, host: Weak<dyn Watched>) -> Result<Self, LookError> {
        Self::start(target, limit, &host)
    }

    /// Processes are found by their tenant, whether they have spoken to the driver or not.
    fn seen(&self, _pid: u32) {}

    fn report(&self) -> IdleReport {
        self.report()
    }

    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn is_attached(&self) -> bool {
        self.is_attached()
    }

    fn stop(&self) {
        self.stop();
    }

    fn abandon(&self) {
        self.abandon();
    }
}
