//! What the daemon remembers of tenants, as users see it, and `org.gpuquota.Enforcer1.Insight`, which tells it.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use zbus::{
    interface,
    zvariant::{Type, as_value},
};

use super::manager::{MethodError, Shared, check_strings};

/// The interface.
pub const INSIGHT: &str = "org.gpuquota.Enforcer1.Insight";
/// In place of an amount that nobody looked at.
pub const UNKNOWN: u64 = u64::MAX;
/// Columns that may be asked for.
pub const MAX_COLUMNS: u32 = 1000;

/// Memory of a tenant on one GPU over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryHistory {
    /// Tenant.
    pub tenant: String,
    /// GPU index.
    pub gpu: u32,
    /// Bytes charged now.
    pub used: u64,
    /// Most bytes charged since the daemon knows the tenant to use the GPU.
    pub high_water: u64,
    /// Bytes by which use grew, summed from second to second since then.
    pub growth: u64,
    /// Bytes a second by which use grew, over the last minute.
    pub growth_rate: u64,
    /// The driver's memory objects of the tenant's processes on that GPU.
    pub objects: u64,
    /// Those of them that are smaller than the 2 MiB in which the driver hands out memory.
    pub small_objects: u64,
    /// Bytes in those.
    pub small_bytes: u64,
    /// Seconds of one step.
    pub step_sec: u64,
    /// When the first step began, microseconds since 1970.
    pub start_usec: u64,
    /// Mean of each step in bytes; absent where nobody looked.
    pub mean: Vec<Option<u64>>,
    /// Peak of each step in bytes.
    pub peak: Vec<Option<u64>>,
}

/// A row of a heat map: one tenant on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeatRow {
    /// Tenant.
    pub tenant: String,
    /// GPU index.
    pub gpu: u32,
    /// What is full: `memory.max`, or the card.
    pub full: u64,
    /// Peak of each column in bytes; absent where nobody looked.
    pub peaks: Vec<Option<u64>>,
}

/// [`MemoryHistory`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct HistoryDict {
    #[serde(with = "as_value")]
    tenant: String,
    #[serde(with = "as_value", rename = "GPU")]
    gpu: u32,
    #[serde(with = "as_value")]
    used: u64,
    #[serde(with = "as_value")]
    high_water: u64,
    #[serde(with = "as_value")]
    growth: u64,
    #[serde(with = "as_value")]
    growth_rate: u64,
    #[serde(with = "as_value")]
    objects: u64,
    #[serde(with = "as_value")]
    small_objects: u64,
    #[serde(with = "as_value")]
    small_bytes: u64,
    #[serde(with = "as_value", rename = "StepUSec")]
    step_usec: u64,
    #[serde(with = "as_value", rename = "StartUSec")]
    start_usec: u64,
    #[serde(with = "as_value")]
    mean: Vec<u64>,
    #[serde(with = "as_value")]
    peak: Vec<u64>,
}

/// [`HeatRow`] as `(sutat)`.
pub type HeatTuple = (String, u32, u64, Vec<u64>);

fn to_wire(points: Vec<Option<u64>>) -> Vec<u64> {
    points
        .into_iter()
        .map(|point| point.unwrap_or(UNKNOWN))
        .collect()
}

fn from_wire(points: Vec<u64>) -> Vec<Option<u64>> {
    points
        .into_iter()
        .map(|point| Some(point).filter(|point| *point != UNKNOWN))
        .collect()
}

impl From<MemoryHistory> for HistoryDict {
    fn from(history: MemoryHistory) -> Self {
        Self {
            tenant: history.tenant,
            gpu: history.gpu,
            used: history.used,
            high_water: history.high_water,
            growth: history.growth,
            growth_rate: history.growth_rate,
            objects: history.objects,
            small_objects: history.small_objects,
            small_bytes: history.small_bytes,
            step_usec: history.step_sec * 1_000_000,
            start_usec: history.start_usec,
            mean: to_wire(history.mean),
            peak: to_wire(history.peak),
        }
    }
}

impl From<HistoryDict> for MemoryHistory {
    fn from(dict: HistoryDict) -> Self {
        Self {
            tenant: dict.tenant,
            gpu: dict.gpu,
            used: dict.used,
            high_water: dict.high_water,
            growth: dict.growth,
            growth_rate: dict.growth_rate,
            objects: dict.objects,
            small_objects: dict.small_objects,
            small_bytes: dict.small_bytes,
            step_sec: dict.step_usec / 1_000_000,
            start_usec: dict.start_usec,
            mean: from_wire(dict.mean),
            peak: from_wire(dict.peak),
        }
    }
}

/// [`HeatRow`] as a tuple.
pub fn heat_to_wire(row: HeatRow) -> HeatTuple {
    (row.tenant, row.gpu, row.full, to_wire(row.peaks))
}

/// The opposite of [`heat_to_wire`].
pub fn heat_from_wire((tenant, gpu, full, peaks): HeatTuple) -> HeatRow {
    HeatRow {
        tenant,
        gpu,
        full,
        peaks: from_wire(peaks),
    }
}

/// The served object; one per connection.
pub(super) struct Insight {
    pub(super) shared: Arc<Shared>,
}

#[interface(name = "org.gpuquota.Enforcer1.Insight")]
impl Insight {
    /// Memory over time of one tenant, or of all for an empty name.
    #[zbus(out_args("histories"))]
    async fn memory_history(
        &self,
        tenant: String,
        since_usec: u64,
    ) -> Result<Vec<HistoryDict>, MethodError> {
        check_strings([tenant.as_str()])?;
        let since = Duration::from_micros(since_usec);
        let histories = self
            .shared
            .call(move |control| {
                let tenant = (!tenant.is_empty()).then_some(tenant.as_str());
                control.memory_history(tenant, since)
            })
            .await??;
        Ok(histories.into_iter().map(Into::into).collect())
    }

    /// Peaks of all tenants in equal parts of the time since then.
    #[zbus(out_args("rows"))]
    async fn memory_heat_map(
        &self,
        since_usec: u64,
        columns: u32,
    ) -> Result<Vec<HeatTuple>, MethodError> {
        let since = Duration::from_micros(since_usec);
        let columns = columns.clamp(1, MAX_COLUMNS);
        let rows = self
            .shared
            .call(move |control| control.memory_heat_map(since, columns))
            .await?;
        Ok(rows.into_iter().map(heat_to_wire).collect())
    }
}

#[cfg(test)]
mod tests {
    use zbus::zvariant::{LE, serialized::Context, to_bytes};

    use super::*;

    #[test]
    fn a_history_survives_the_bus() {
        let history = MemoryHistory {
            tenant: "a".into(),
            gpu: 1,
            used: 2,
            high_water: 3,
            growth: 4,
            growth_rate: 5,
            objects: 6,
            small_objects: 7,
            small_bytes: 8,
            step_sec: 10,
            start_usec: 9,
            mean: vec![Some(1), None],
            peak: vec![Some(2), None],
        };
        let bytes = to_bytes(
            Context::new_dbus(LE, 0),
            &HistoryDict::from(history.clone()),
        )
        .expect("encode");
        let (dict, _): (HistoryDict, _) = bytes.deserialize().expect("decode");
        assert_eq!(MemoryHistory::from(dict), history);
        let row = HeatRow {
            tenant: "a".into(),
            gpu: 0,
            full: 9,
            peaks: vec![None, Some(0)],
        };
        assert_eq!(heat_from_wire(heat_to_wire(row.clone())), row);
    }
}
