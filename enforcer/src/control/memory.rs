//! Memory beyond one limit and its use, as users see it.

use serde::{Deserialize, Serialize};

use super::time::Pressure;

/// What else there is to say about a tenant's memory on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantMemory {
    /// Bytes that are reserved for it; 0: none.
    pub min: u64,
    /// Limit of pinned host memory in bytes; absent: none.
    pub host_max: Option<u64>,
    /// Bytes of host memory that are pinned now, nested tenants included.
    pub host_used: u64,
    /// Highest value of `host_used`.
    pub host_peak: u64,
    /// Refused allocations of pinned host memory.
    pub host_denials: u64,
    /// Allocations of pinned host memory above the limit that nothing could refuse.
    pub host_breaches: u64,
    /// Bytes that are charged for what the driver takes by itself, nested tenants included.
    pub context: u64,
    /// Bytes that are charged for managed memory, by its virtual size, nested tenants included.
    pub managed: u64,
    /// What NVML shows for the tenant's processes, less what is charged.
    pub drift: i64,
    /// Time in which allocations waited for memory (`memory.on-max = "wait"`).
    #[serde(default)]
    pub pressure: Pressure,
    /// Bytes of host memory by process.
    pub host_processes: Vec<(u32, u64)>,
}

impl TenantMemory {
    /// Whether there is anything to say.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}
