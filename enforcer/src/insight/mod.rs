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

use std::{sync::Weak, time::Duration};

pub use self::look::{Look, LookError, Watched};
use crate::{
    control::leaks::{LeakReport, Target},
    looks::{self, Book, Words},
};

/// All looks of the daemon at allocations.
pub type Leaks = Book<Look>;

impl looks::Look for Look {
    type Report = LeakReport;
    type Host = dyn Watched;
    type Error = LookError;
    const WORDS: Words = Words {
        what: "allocations",
        done: "followed",
        command: "leaks",
    };
    const MOST: usize = 8;
    const LONGEST: Duration = Duration::from_hours(24);

    fn begin(target: Target, limit: Duration, host: Weak<dyn Watched>) -> Result<Self, LookError> {
        Self::start(target, limit, host)
    }

    fn seen(&self, pid: u32) {
        self.seen(pid);
    }

    fn report(&self) -> LeakReport {
        self.report()
    }

    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn stop(&self) {
        self.stop();
    }
}
