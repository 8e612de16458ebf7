//! The D-Bus shape of [`TenantTime`].

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zbus::zvariant::{Type, as_value};

use super::time::{Averages, Held, Pressure, TenantTime, Uncontrolled};

/// Averages over 10, 60 and 300 seconds, and microseconds of all time.
pub(super) type AveragesTuple = (f64, f64, f64, u64);

/// [`Held`] as `(aua(us))`: frozen processes, and those out of reach.
pub type HeldTuple = (Vec<u32>, Vec<(u32, String)>);

/// [`TenantTime`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct TimeDict {
    #[serde(with = "as_value")]
    weight: u32,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    max: Option<f64>,
    #[serde(with = "as_value", rename = "UsedUSec")]
    used_usec: u64,
    #[serde(with = "as_value", rename = "Share1s")]
    share_1s: f64,
    #[serde(with = "as_value", rename = "Share10s")]
    share_10s: f64,
    #[serde(with = "as_value", rename = "Share60s")]
    share_60s: f64,
    #[serde(with = "as_value")]
    frozen: Vec<String>,
    #[serde(with = "as_value", rename = "SlicesUSec")]
    slices: Vec<(u32, u64)>,
    #[serde(with = "as_value")]
    pressure_some: AveragesTuple,
    #[serde(with = "as_value")]
    pressure_full: AveragesTuple,
    #[serde(with = "as_value")]
    energy_joules: f64,
    #[serde(with = "as_value")]
    power_watts: f64,
    #[serde(with = "as_value")]
    own_controls: u64,
    #[serde(with = "as_value")]
    uncontrolled: Vec<(u32, String)>,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn averages(of: Averages) -> AveragesTuple {
    (of.avg10, of.avg60, of.avg300, micros(of.total))
}

pub(super) fn averages_back((avg10, avg60, avg300, total): AveragesTuple) -> Averages {
    Averages {
        avg10,
        avg60,
        avg300,
        total: Duration::from_micros(total),
    }
}

fn uncontrolled(of: Vec<Uncontrolled>) -> Vec<(u32, String)> {
    of.into_iter()
        // A NUL would make the whole message invalid.
        .map(|process| (process.pid, process.why.replace('\0', "\u{fffd}")))
        .collect()
}

fn uncontrolled_back(of: Vec<(u32, String)>) -> Vec<Uncontrolled> {
    of.into_iter()
        .map(|(pid, why)| Uncontrolled { pid, why })
        .collect()
}

impl From<TenantTime> for TimeDict {
    fn from(time: TenantTime) -> Self {
        Self {
            weight: time.weight,
            max: time.max,
            used_usec: micros(time.used),
            share_1s: time.share_1s,
            share_10s: time.share_10s,
            share_60s: time.share_60s,
            frozen: time.frozen,
            slices: time.slices,
            pressure_some: averages(time.pressure.some),
            pressure_full: averages(time.pressure.full),
            energy_joules: time.energy_joules,
            power_watts: time.power_watts,
            own_controls: time.own_controls,
            uncontrolled: uncontrolled(time.uncontrolled),
        }
    }
}

impl From<TimeDict> for TenantTime {
    fn from(dict: TimeDict) -> Self {
        Self {
            weight: dict.weight,
            max: dict.max,
            used: Duration::from_micros(dict.used_usec),
            share_1s: dict.share_1s,
            share_10s: dict.share_10s,
            share_60s: dict.share_60s,
            frozen: dict.frozen,
            slices: dict.slices,
            pressure: Pressure {
                some: averages_back(dict.pressure_some),
                full: averages_back(dict.pressure_full),
            },
            energy_joules: dict.energy_joules,
            power_watts: dict.power_watts,
            own_controls: dict.own_controls,
            uncontrolled: uncontrolled_back(dict.uncontrolled),
        }
    }
}

/// [`Held`] for the bus.
pub fn held_to_wire(held: Held) -> HeldTuple {
    (held.frozen, uncontrolled(held.uncontrolled))
}

/// [`Held`] from the bus.
pub fn held_from_wire((frozen, out_of_reach): HeldTuple) -> Held {
    Held {
        frozen,
        uncontrolled: uncontrolled_back(out_of_reach),
    }
}

#[cfg(test)]
mod tests {
    use zbus::zvariant::{LE, serialized::Context, to_bytes};

    use super::*;

    #[test]
    fn time_survives_the_bus() {
        let time = TenantTime {
            weight: 300,
            max: Some(0.5),
            used: Duration::from_micros(1_234_567),
            share_1s: 0.49,
            share_10s: 0.5,
            share_60s: 0.25,
            frozen: vec!["ceiling".into()],
            slices: vec![(4242, 2500)],
            pressure: Pressure {
                some: Averages {
                    avg10: 0.5,
                    avg60: 0.4,
                    avg300: 0.1,
                    total: Duration::from_secs(3),
                },
                full: Averages::default(),
            },
            energy_joules: 1234.5,
            power_watts: 350.0,
            own_controls: 1,
            uncontrolled: vec![Uncontrolled {
                pid: 7,
                why: "no file".into(),
            }],
        };
        let context = Context::new_dbus(LE, 0);
        let bytes = to_bytes(context, &TimeDict::from(time.clone())).expect("encode");
        let (dict, _): (TimeDict, _) = bytes.deserialize().expect("decode");
        assert_eq!(TenantTime::from(dict), time);
    }
}
