//! The D-Bus shape of [`TenantMemory`].

use serde::{Deserialize, Serialize};
use zbus::zvariant::{Type, as_value};

use super::{
    memory::TenantMemory,
    time::Pressure,
    wire_time::{AveragesTuple, averages, averages_back},
};

/// [`TenantMemory`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct MemoryDict {
    #[serde(with = "as_value")]
    min: u64,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    host_max: Option<u64>,
    #[serde(with = "as_value")]
    host_used: u64,
    #[serde(with = "as_value")]
    host_peak: u64,
    #[serde(with = "as_value")]
    host_denials: u64,
    #[serde(with = "as_value")]
    host_breaches: u64,
    #[serde(with = "as_value")]
    context: u64,
    #[serde(with = "as_value")]
    managed: u64,
    #[serde(with = "as_value")]
    drift: i64,
    #[serde(with = "as_value")]
    pressure_some: AveragesTuple,
    #[serde(with = "as_value")]
    pressure_full: AveragesTuple,
    #[serde(with = "as_value")]
    host_processes: Vec<(u32, u64)>,
}

impl From<TenantMemory> for MemoryDict {
    fn from(memory: TenantMemory) -> Self {
        Self {
            min: memory.min,
            host_max: memory.host_max,
            host_used: memory.host_used,
            host_peak: memory.host_peak,
            host_denials: memory.host_denials,
            host_breaches: memory.host_breaches,
            context: memory.context,
            managed: memory.managed,
            drift: memory.drift,
            pressure_some: averages(memory.pressure.some),
            pressure_full: averages(memory.pressure.full),
            host_processes: memory.host_processes,
        }
    }
}

impl From<MemoryDict> for TenantMemory {
    fn from(dict: MemoryDict) -> Self {
        Self {
            min: dict.min,
            host_max: dict.host_max,
            host_used: dict.host_used,
            host_peak: dict.host_peak,
            host_denials: dict.host_denials,
            host_breaches: dict.host_breaches,
            context: dict.context,
            managed: dict.managed,
            drift: dict.drift,
            pressure: Pressure {
                some: averages_back(dict.pressure_some),
                full: averages_back(dict.pressure_full),
            },
            host_processes: dict.host_processes,
        }
    }
}
