//! What is told of processes while a GPU is idle.

use serde::{Deserialize, Serialize};

use super::leaks::{LeakFrame, Target};
use crate::idle::State;

/// What a look has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleReport {
    /// Who is looked at.
    pub target: Target,
    /// Whether the look goes on: a program is on the context switches of the host.
    pub running: bool,
    /// Microseconds that the look has lasted.
    pub elapsed_usec: u64,
    /// Microseconds after which it ends by itself.
    pub limit_usec: u64,
    /// GPUs on which one of the processes has a context.
    pub gpus: Vec<IdleGpu>,
    /// All processes that were met.
    pub processes: Vec<IdleProcess>,
    /// Where threads were while the GPUs were idle, most time first.
    pub stacks: Vec<IdleStack>,
    /// What is not known for certain.
    pub gaps: IdleGaps,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleGpu {
    /// Its index.
    pub gpu: u32,
    /// Microseconds of the spans for which NVML tells its use, in the mean; absent while it has told none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_usec: Option<u64>,
    /// Microseconds of which NVML told nothing although the board was at work; they are in nothing else that is told.
    pub untold_usec: u64,
    /// What each process did, those with a context first.
    pub shares: Vec<IdleShare>,
    /// Why its use is not known, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A process and a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleShare {
    /// Process.
    pub pid: u32,
    /// Whether it has a context there; else it works for those who have, or for nobody.
    pub context: bool,
    /// Microseconds for which both the use of the GPU and the states of the threads are known.
    pub known_usec: u64,
    /// In which the process used the GPU.
    pub used_usec: u64,
    /// In which others did.
    pub others_usec: u64,
    /// In which nobody did.
    pub idle_usec: u64,
    /// What the process did meanwhile, in the order of [`State::ALL`].
    pub states: Vec<IdleState>,
}

/// Time in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleState {
    /// Which.
    pub state: State,
    /// Microseconds in all.
    pub time_usec: u64,
    /// Microseconds while the GPU was idle: the estimate.
    pub idle_usec: u64,
    /// The least that it can have been.
    pub least_usec: u64,
    /// The most.
    pub most_usec: u64,
}

/// A process that is or was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleProcess {
    /// Its id.
    pub pid: u32,
    /// Its program.
    pub comm: String,
    /// Whether it has ended.
    pub ended: bool,
    /// Part of its time that it has cost to be followed.
    #[serde(default)]
    pub cost: f64,
    /// Part of its time that this may cost.
    #[serde(default)]
    pub budget: f64,
    /// Part of the time in which its threads were followed.
    #[serde(default)]
    pub covered: f64,
}

/// A stack and the time that was spent on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleStack {
    /// Process.
    pub pid: u32,
    /// Name of the thread.
    pub thread: String,
    /// What the thread did.
    pub state: State,
    /// Where it was, the innermost function first.
    pub frames: Vec<LeakFrame>,
    /// Whether the stack goes on beyond what could be followed.
    pub cut: bool,
    /// Microseconds on it while the GPU was idle.
    pub idle_usec: u64,
}

/// What a look does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleGaps {
    /// Changes of threads that were lost on the way: what a thread does was looked up again after.
    pub lost: u64,
    /// Stacks for which there was no room on the way.
    pub stackless: u64,
    /// Changes of threads for which there was no room.
    pub crowded: u64,
    /// Microseconds on stacks of which it is not known how idle a GPU was, or for which there was no room.
    pub uncounted_usec: u64,
    /// Processes that are not looked at because there are too many.
    pub processes: u64,
    /// Why stacks of running threads are missing, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_samples: Option<String>,
    /// Files on the stacks that do not name their functions.
    pub unnamed: Vec<String>,
    /// Files that are too large to follow stacks through.
    pub too_large: Vec<String>,
}
