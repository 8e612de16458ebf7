//! What the launch profile is asked and what it tells.

use serde::{Deserialize, Serialize};

use super::leaks::Target;

/// What a look has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// Who is looked at.
    pub target: Target,
    /// Whether the look goes on.
    pub running: bool,
    /// Whether it goes on until the policy says otherwise.
    pub always: bool,
    /// Microseconds that the look has lasted.
    pub elapsed_usec: u64,
    /// Microseconds after which it ends by itself; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_usec: Option<u64>,
    /// What a hit of the probes costs on this host.
    pub costs: ProbeCosts,
    /// The processes, in the order in which they were met.
    pub processes: Vec<ProfileProcess>,
    /// Kernels, those that are launched most first.
    pub kernels: Vec<ProfileKernel>,
    /// What is not known for certain.
    pub gaps: ProfileGaps,
}

/// Nanoseconds that a hit of a probe costs, as measured when the look began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeCosts {
    /// At the entry of a function.
    pub entry_nsec: u32,
    /// The same where the kernel does not emulate the instruction there.
    pub stepped_nsec: u32,
    /// At the return.
    pub return_nsec: u32,
}

/// A process that is or was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileProcess {
    /// Its id.
    pub pid: u32,
    /// Its program.
    pub comm: String,
    /// The innermost tenant that it is in; empty for none.
    pub tenant: String,
    /// Files with calls that are followed.
    pub files: Vec<String>,
    /// Whether it has ended.
    pub ended: bool,
    /// Part of its time that the probes have cost, an estimate.
    pub cost: f64,
    /// Part of its time that the probes may cost.
    pub budget: f64,
    /// Part of the time in which its launches were seen.
    pub covered: f64,
    /// Part of the time in which kernels were seen to be given out, of the call for which that was least.
    #[serde(default = "whole")]
    pub names_covered: f64,
    /// Why not everything of it is followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

const fn whole() -> f64 {
    1.0
}

/// A kernel, or graph, of a tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileKernel {
    /// The tenant; empty for none.
    pub tenant: String,
    /// Its name, readable; `kernel@0x…` where it was given out unseen, before the look or while probes were out; `graph@0x…` for a graph; `(others)` for those that are not told
    /// apart.
    pub name: String,
    /// Its name as its module has it; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symbol: Option<String>,
    /// Launches that were seen.
    pub launches: u64,
    /// How many of them came less than 2^n ns, and not less than half of that, after the launch before by the same thread.
    pub gaps: Vec<u64>,
    /// How many were waited for, by nanoseconds from launch to the end of the wait, as `gaps`.
    pub durations: Vec<u64>,
    /// Waits that began so late that they do not tell how long it took.
    pub late: u64,
    /// The usual duration, microseconds; absent before there is enough to tell by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usual_usec: Option<f64>,
    /// Anomalies so far.
    pub anomalies: u64,
    /// Whether one goes on.
    pub unusual: bool,
}

/// What a look does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileGaps {
    /// Waits and names that were lost on the way.
    pub lost: u64,
    /// Arguments that could not be read.
    pub unreadable: u64,
    /// Launches of kernels that are not told apart.
    pub crowded: u64,
    /// Names of kernels for which there was no room.
    pub unnamed: u64,
    /// Processes that are not looked at: there are too many.
    pub left_out: u64,
}
