//! GPU time as users see it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time::pressure;

/// GPU time of a tenant on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantTime {
    /// Share relative to the tenants beside it.
    pub weight: u32,
    /// Ceiling between 0 and 1; absent: none.
    pub max: Option<f64>,
    /// GPU time used since the daemon knows the tenant, nested tenants included.
    #[serde(rename = "used_usec", with = "micros")]
    pub used: Duration,
    /// Share of the GPU in the last second that is known.
    pub share_1s: f64,
    /// Share of the GPU in the last 10 seconds.
    pub share_10s: f64,
    /// Share of the GPU in the last minute.
    pub share_60s: f64,
    /// Why the tenant is frozen: `command`, `memory-high`, `ceiling`, `exclusive`, `latency`. Empty: it is not.
    pub frozen: Vec<String>,
    /// Time slice of each process, microseconds.
    pub slices: Vec<(u32, u64)>,
    /// Time in which the tenant had work and could not do it.
    pub pressure: Pressure,
    /// Energy by its GPU time, joules since the daemon knows the tenant, nested tenants included.
    pub energy_joules: f64,
    /// Power by its GPU time, watts over the last ten seconds or so.
    pub power_watts: f64,
    /// Scheduling controls that the tenant's processes issued themselves.
    pub own_controls: u64,
    /// Processes whose time is not controlled.
    pub uncontrolled: Vec<Uncontrolled>,
}

/// A process whose time is not controlled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uncontrolled {
    /// Process id.
    pub pid: u32,
    /// Why.
    pub why: String,
}

/// Pressure of one kind, in the sense of the kernel's PSI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// At least one process waited.
    pub some: Averages,
    /// Nothing was done.
    pub full: Averages,
}

/// Shares of time, 0 to 1, and the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Averages {
    /// Over the last 10 seconds.
    pub avg10: f64,
    /// Over the last minute.
    pub avg60: f64,
    /// Over the last five minutes.
    pub avg300: f64,
    /// All time so far.
    #[serde(rename = "total_usec", with = "micros")]
    pub total: Duration,
}

impl From<pressure::Pressure> for Pressure {
    fn from(pressure: pressure::Pressure) -> Self {
        Self {
            some: pressure.some.into(),
            full: pressure.full.into(),
        }
    }
}

impl From<pressure::Averages> for Averages {
    fn from(averages: pressure::Averages) -> Self {
        let pressure::Averages {
            avg10,
            avg60,
            avg300,
            total,
        } = averages;
        Self {
            avg10,
            avg60,
            avg300,
            total,
        }
    }
}

/// What came of an order to freeze or thaw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Processes of the tenant that are frozen now, on any GPU.
    pub frozen: Vec<u32>,
    /// Processes that are out of reach.
    pub uncontrolled: Vec<Uncontrolled>,
}

mod micros {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        u64::try_from(duration.as_micros())
            .unwrap_or(u64::MAX)
            .serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_micros)
    }
}
