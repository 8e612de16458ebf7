//! What the daemon offers to its users: one trait, served over D-Bus by [`dbus`].
//!
//! [`Control`] is the seam between the enforcement core and every way to talk to it. All types here
//! are plain data, serialise to the documented JSON of `gpuquotactl --json`, and carry bytes and
//! microseconds, never formatted text.

mod access;
pub mod dbus;
pub mod idle;
pub mod insight;
pub mod launch;
pub mod leaks;
mod looks;
mod manager;
pub mod memory;
mod objects;
pub mod peer;
mod polkit;
pub mod profile;
mod time;
mod transport;
pub mod wire;
pub mod wire_launch;
pub mod wire_memory;
pub mod wire_time;

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use self::insight::{HeatRow, MemoryHistory};
pub use self::{
    dbus::{ServeError, Server, serve},
    time::{Averages, Held, Pressure, TenantTime, Uncontrolled},
};

/// The operations behind the D-Bus interface `org.gpuquota.Enforcer1.Manager`.
///
/// Calls are short and never wait for a tenant or for NVML.
pub trait Control: Send + Sync + 'static {
    /// Version of the daemon.
    fn version(&self) -> String;
    /// The enforcement backends, in order of preference, with their state on this host.
    fn backends(&self) -> Vec<Backend>;
    /// Counts the policies that were put into force; starts at 1.
    fn policy_generation(&self) -> u64;
    /// The GPUs of the host, by index.
    fn gpus(&self) -> Vec<Gpu>;
    /// All tenants, by name.
    fn tenants(&self) -> Vec<Tenant>;
    /// One tenant.
    fn tenant(&self, name: &str) -> Result<Tenant, ControlError>;
    /// The innermost tenant that governs a process.
    fn tenant_by_pid(&self, pid: u32) -> Result<Tenant, ControlError>;
    /// Changes properties of one tenant; all of them or none.
    ///
    /// Returns the file that keeps the change.
    fn set_quota(&self, change: &QuotaChange) -> Result<PathBuf, ControlError>;
    /// Drops what [`set_quota`](Self::set_quota) changed for a tenant (all properties if none is named).
    fn reset_quota(&self, tenant: &str, properties: &[String]) -> Result<(), ControlError>;
    /// Reads the policy files again; a policy that does not load changes nothing.
    fn reload(&self) -> Result<PolicyLoaded, ControlError>;
    /// Freezes a tenant on one GPU (by index or UUID), or on all: its work stops and goes on when it is thawed.
    fn freeze(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ControlError>;
    /// Undoes [`freeze`](Self::freeze).
    fn thaw(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ControlError>;
    /// Memory over time of one tenant or of all, on each GPU that it used in the last day.
    fn memory_history(
        &self,
        tenant: Option<&str>,
        since: Duration,
    ) -> Result<Vec<MemoryHistory>, ControlError>;
    /// Peaks of all tenants in equal parts of the time since then.
    fn memory_heat_map(&self, since: Duration, columns: u32) -> Vec<HeatRow>;
    /// What the host offers and what is in use.
    fn doctor(&self) -> Vec<Finding>;
    /// Follows the allocations of processes for so long at most, see [`crate::insight`].
    fn start_leaks(&self, target: leaks::Target, limit: Duration) -> Result<(), ControlError>;
    /// What was found so far.
    fn leaks(&self, target: &leaks::Target) -> Result<leaks::LeakReport, ControlError>;
    /// Removes the probes, and tells what was found.
    fn stop_leaks(&self, target: &leaks::Target) -> Result<leaks::LeakReport, ControlError>;
    /// Whose allocations are or were followed.
    fn leak_targets(&self) -> Vec<leaks::Target>;
    /// Profiles the launches of processes for so long at most, see [`crate::profile`].
    fn start_profile(&self, target: leaks::Target, limit: Duration) -> Result<(), ControlError>;
    /// What was found so far.
    fn profile(&self, target: &leaks::Target) -> Result<profile::ProfileReport, ControlError>;
    /// Removes the probes, and tells what was found.
    fn stop_profile(&self, target: &leaks::Target) -> Result<profile::ProfileReport, ControlError>;
    /// Whose launches are or were profiled.
    fn profile_targets(&self) -> Vec<leaks::Target>;
    /// Follows the threads of processes for so long at most, see [`crate::idle`].
    fn start_idle(&self, target: leaks::Target, limit: Duration) -> Result<(), ControlError>;
    /// What was found so far.
    fn idle(&self, target: &leaks::Target) -> Result<idle::IdleReport, ControlError>;
    /// Ends the look, and tells what was found.
    fn stop_idle(&self, target: &leaks::Target) -> Result<idle::IdleReport, ControlError>;
    /// Whose threads are or were followed.
    fn idle_targets(&self) -> Vec<leaks::Target>;
    /// The whole state for debugging, as JSON.
    fn dump_state(&self) -> serde_json::Value;
    /// What happens from now on. A receiver that does not keep up loses the oldest notices.
    fn subscribe(&self) -> broadcast::Receiver<Notice>;
}

/// A backend and why it is or is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// `override`, `rewrite`, `notify`, `lsm`, `signal`.
    pub name: String,
    /// What it does on this host.
    pub state: BackendState,
    /// The reason for the state, as a sentence.
    pub reason: String,
}

/// State of a backend or of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendState {
    /// In use.
    Active,
    /// The host offers it; it is not in use.
    Available,
    /// The host does not offer it.
    Unavailable,
}

/// A GPU of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Index in NVML's order.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Bytes of memory on the card.
    pub memory_total: u64,
    /// Bytes in use on the card, by NVML; absent while NVML does not answer.
    pub memory_used: Option<u64>,
}

/// A tenant with its limits and usage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// Name in the policy.
    pub name: String,
    /// The cgroup path or glob of the policy.
    pub cgroup: String,
    /// Class, if one is named.
    pub class: Option<String>,
    /// The tenant around this one, if nested.
    pub parent: Option<String>,
    /// The cgroups governed now; empty while none exists.
    pub cgroups: Vec<String>,
    /// Limits and usage per GPU, by GPU index.
    pub gpus: Vec<TenantGpu>,
    /// Launches on all GPUs; absent while no launch budget holds for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<launch::TenantLaunch>,
}

/// Limits and usage of a tenant on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantGpu {
    /// Index of the GPU.
    pub gpu: u32,
    /// UUID of the GPU.
    pub uuid: String,
    /// Hard limit in bytes; absent: none.
    pub memory_max: Option<u64>,
    /// Soft limit in bytes; absent: none.
    pub memory_high: Option<u64>,
    /// Bytes charged now, nested tenants included.
    pub memory_used: u64,
    /// Highest value of `memory_used` since the tenant exists.
    pub memory_peak: u64,
    /// Allocations refused since the tenant exists.
    pub denials: u64,
    /// Allocations that went above `memory_max` because nothing could refuse them.
    pub breaches: u64,
    /// Processes with memory on this GPU: charged bytes by process.
    pub processes: Vec<ProcessUse>,
    /// Reservation, pinned host memory and what else there is about its memory.
    #[serde(default)]
    pub memory: memory::TenantMemory,
    /// GPU time; absent while it is not controlled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<TenantTime>,
}

/// Memory of one process on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Process id in the daemon's namespace.
    pub pid: u32,
    /// Name of the program; bytes that are no UTF-8 are replaced.
    pub comm: String,
    /// Bytes charged.
    pub memory_used: u64,
}

/// A change of properties.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaChange {
    /// Which tenant.
    pub tenant: String,
    /// One GPU by index or UUID; absent: every GPU.
    pub gpu: Option<String>,
    /// Properties as in the policy file: `("memory.max", "20GiB")`. An empty value removes one.
    pub properties: Vec<(String, String)>,
    /// Until the next boot only.
    pub runtime: bool,
}

/// A policy came into force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyLoaded {
    /// The new generation.
    pub generation: u64,
    /// Tenants in it.
    pub tenants: u32,
    /// Rendered warnings, one each.
    pub warnings: Vec<String>,
}

/// One line of `doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at, such as `tracepoint sys_enter_ioctl`.
    pub subject: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What was found and, unless it is fine, what to do.
    pub detail: String,
}

/// Verdict of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Works and is in use.
    Ok,
    /// Works, not in use or not needed.
    Info,
    /// Something is missing; the rest goes on.
    Warning,
    /// Enforcement does not work.
    Error,
}

/// Something that happened, as sent in signals and shown by `monitor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Notice {
    /// An allocation was refused.
    Denied {
        /// Innermost tenant of the caller.
        tenant: String,
        /// The tenant whose limit refused (this one or one around it); empty where it is what others reserve.
        limited_by: String,
        /// Which limit: `memory.max`, `memory.host`, or `memory.min` of others.
        key: String,
        /// GPU index.
        gpu: u32,
        /// Process id.
        pid: u32,
        /// Bytes asked for.
        requested: u64,
        /// Bytes charged to `limited_by` then, those that are reserved in it included.
        used: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// An allocation above the limit went through because nothing could refuse it.
    Breached {
        /// Tenant.
        tenant: String,
        /// Which limit: `memory.max`, `memory.host`, or `memory.min` of others.
        key: String,
        /// GPU index.
        gpu: u32,
        /// Process id.
        pid: u32,
        /// Bytes allocated.
        requested: u64,
        /// Bytes charged after it.
        used: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// Usage rose above `memory.high`.
    HighReached {
        /// Tenant.
        tenant: String,
        /// GPU index.
        gpu: u32,
        /// Bytes charged.
        used: u64,
        /// The soft limit in bytes.
        high: u64,
    },
    /// Managed memory of a tenant above its `memory.high` was moved to the host.
    Reclaimed {
        /// Tenant.
        tenant: String,
        /// GPU index.
        gpu: u32,
        /// Bytes that were moved.
        moved: u64,
        /// The tenant that the card had no memory left for; empty where it is the tenant's own `memory.on-high`.
        wanted_by: String,
    },
    /// Launches of a process are being delayed; not said again for a while.
    Throttled {
        /// Innermost tenant of the process.
        tenant: String,
        /// Process id.
        pid: u32,
        /// The call through which it launches.
        symbol: String,
        /// Launches of it that were delayed so far.
        delayed: u64,
        /// Microseconds that they were made to wait.
        delay_usec: u64,
    },
    /// A process was told to end because it launches too fast and its tenant's `launch.on-max` is `deny`.
    LaunchDenied {
        /// Innermost tenant of the process.
        tenant: String,
        /// The tenant whose budget it is over (this one or one around it).
        limited_by: String,
        /// Process id.
        pid: u32,
        /// The call through which it launches.
        symbol: String,
        /// Microseconds that it has to end by itself.
        patience_usec: u64,
    },
    /// A process wants to launch far more than it may, and has for long.
    Storm {
        /// Innermost tenant of the process.
        tenant: String,
        /// Process id.
        pid: u32,
        /// The call through which it launches.
        symbol: String,
        /// Launches a second that it wants, an estimate.
        wanted: u64,
        /// Launches a second that it may have.
        budget: u64,
    },
    /// A kernel took much longer than is usual for it; not said again until it is as usual for a while.
    Anomaly {
        /// Innermost tenant of the process; empty for none.
        tenant: String,
        /// Process id.
        pid: u32,
        /// The kernel. Its name is the tenant's to choose.
        kernel: String,
        /// Microseconds from its launch until it had been waited for.
        duration_usec: u64,
        /// Microseconds that are usual for it.
        usual_usec: u64,
    },
    /// The driver reported an error on a GPU. Where only the GPU is known, every tenant on it gets one of these.
    Xid {
        /// Tenant; empty for processes in no tenant, or if nobody uses the GPU.
        tenant: String,
        /// GPU index.
        gpu: u32,
        /// The driver's error code; 0 where NVML has none for it.
        xid: u32,
        /// Process that the driver names, 0 for none.
        pid: u32,
        /// `process`: the driver named it. `gpu`: the tenant is one of those on the GPU, and nothing more is known.
        certainty: String,
        /// `tracepoint`, `kernel-log` or `nvml`.
        source: String,
        /// What follows by the policy: `notify`, `freeze` or `kill`.
        action: String,
        /// The driver's words, where the source has them. They hold names that tenants choose.
        message: String,
    },
    /// A policy came into force.
    PolicyLoaded(PolicyLoaded),
    /// A tenant's cgroup appeared.
    CgroupAttached {
        /// Tenant.
        tenant: String,
        /// Path below the cgroup root.
        cgroup: String,
    },
    /// A tenant's cgroup went away.
    CgroupDetached {
        /// Tenant.
        tenant: String,
        /// Path below the cgroup root.
        cgroup: String,
    },
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No tenant of that name.
    #[error("no tenant named \"{0}\"; `gpuquotactl list` shows those there are")]
    NoSuchTenant(String),
    /// No GPU of that index or UUID.
    #[error("no GPU \"{0}\" on this host; `gpuquotactl doctor` lists the GPUs")]
    NoSuchGpu(String),
    /// The process does not exist.
    #[error("no process {0}")]
    NoSuchProcess(u32),
    /// The process is in no tenant.
    #[error("process {0} is in no tenant's cgroup")]
    Ungoverned(u32),
    /// The policy does not load; nothing was changed. Holds the rendered diagnostics.
    #[error("{0}")]
    BadPolicy(String),
    /// A property or a value is not acceptable; nothing was changed.
    #[error("{0}")]
    BadProperty(String),
    /// GPU time is not controlled, or the driver did not do it in time.
    #[error("{0}")]
    Time(#[from] crate::time::HoldError),
    /// Looks into processes do not do what they are asked.
    #[error(transparent)]
    Looks(#[from] crate::looks::LooksError),
    /// A file could not be written.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The kernel refused a map update.
    #[error("the kernel side could not be updated: {0}")]
    Kernel(String),
}
