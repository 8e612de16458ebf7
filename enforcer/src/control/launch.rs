//! Launches of a tenant, as users see them.

use serde::{Deserialize, Serialize};

use super::time::Pressure;

/// So many launches in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRate {
    /// Launches.
    pub count: u64,
    /// The time, in microseconds.
    pub per_usec: u64,
}

/// Launch budget and launches of a tenant, nested tenants included. Counts begin with the tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantLaunch {
    /// Highest rate; absent: only tenants around this one have a budget.
    pub max: Option<LaunchRate>,
    /// Launches that may come at once after a pause; 0 without `max`.
    pub burst: u32,
    /// Launches, a graph as one.
    pub launches: u64,
    /// Launches that had to wait.
    pub delayed: u64,
    /// Microseconds that they were made to wait; threads that wait side by side add up.
    pub delay_usec: u64,
    /// Launches that went early because they would have had to wait longer than the longest delay.
    pub overdue: u64,
    /// Launches over a budget whose processes are ended for it.
    pub denied: u64,
    /// Launches that went at once because the daemon was not there to continue a stopped process.
    pub unheld: u64,
    /// Launches of processes that somebody else had continued before their time.
    pub evaded: u64,
    /// Launch storms since the daemon runs. Without nested tenants.
    pub storms: u64,
    /// Time in which processes had launches and were made to wait with them.
    pub pressure: Pressure,
    /// Time between the launches of a process: element n counts times under 2^n ns. Without nested tenants.
    pub gaps: Vec<u64>,
    /// The processes with the most launches. Without nested tenants.
    pub processes: Vec<ProcessLaunches>,
}

/// Launches of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessLaunches {
    /// Process id in the daemon's namespace.
    pub pid: u32,
    /// Name of the program; bytes that are no UTF-8 are replaced.
    pub comm: String,
    /// Launches since it has probes.
    pub launches: u64,
    /// Launches that had to wait.
    pub delayed: u64,
    /// Microseconds that they were made to wait.
    pub delay_usec: u64,
}
