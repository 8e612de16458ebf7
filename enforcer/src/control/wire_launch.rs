//! The D-Bus shape of [`TenantLaunch`].

use serde::{Deserialize, Serialize};
use zbus::zvariant::{Type, as_value};

use super::{
    launch::{LaunchRate, ProcessLaunches, TenantLaunch},
    time::Pressure,
    wire_time::{AveragesTuple, averages, averages_back},
};

/// [`TenantLaunch`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct LaunchDict {
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    max: Option<(u64, u64)>,
    #[serde(with = "as_value")]
    burst: u32,
    #[serde(with = "as_value")]
    launches: u64,
    #[serde(with = "as_value")]
    delayed: u64,
    #[serde(with = "as_value", rename = "DelayUSec")]
    delay_usec: u64,
    #[serde(with = "as_value")]
    overdue: u64,
    #[serde(with = "as_value")]
    denied: u64,
    #[serde(with = "as_value")]
    unheld: u64,
    #[serde(with = "as_value")]
    evaded: u64,
    #[serde(with = "as_value")]
    storms: u64,
    #[serde(with = "as_value")]
    pressure_some: AveragesTuple,
    #[serde(with = "as_value")]
    pressure_full: AveragesTuple,
    #[serde(with = "as_value")]
    gaps: Vec<u64>,
    #[serde(with = "as_value")]
    processes: Vec<(u32, String, u64, u64, u64)>,
}

impl From<TenantLaunch> for LaunchDict {
    fn from(launch: TenantLaunch) -> Self {
        Self {
            max: launch.max.map(|rate| (rate.count, rate.per_usec)),
            burst: launch.burst,
            launches: launch.launches,
            delayed: launch.delayed,
            delay_usec: launch.delay_usec,
            overdue: launch.overdue,
            denied: launch.denied,
            unheld: launch.unheld,
            evaded: launch.evaded,
            storms: launch.storms,
            pressure_some: averages(launch.pressure.some),
            pressure_full: averages(launch.pressure.full),
            gaps: launch.gaps,
            processes: launch
                .processes
                .into_iter()
                .map(|process| {
                    (
                        process.pid,
                        // A NUL would make the whole message invalid.
                        process.comm.replace('\0', "\u{fffd}"),
                        process.launches,
                        process.delayed,
                        process.delay_usec,
                    )
                })
                .collect(),
        }
    }
}

impl From<LaunchDict> for TenantLaunch {
    fn from(dict: LaunchDict) -> Self {
        Self {
            max: dict
                .max
                .map(|(count, per_usec)| LaunchRate { count, per_usec }),
            burst: dict.burst,
            launches: dict.launches,
            delayed: dict.delayed,
            delay_usec: dict.delay_usec,
            overdue: dict.overdue,
            denied: dict.denied,
            unheld: dict.unheld,
            evaded: dict.evaded,
            storms: dict.storms,
            pressure: Pressure {
                some: averages_back(dict.pressure_some),
                full: averages_back(dict.pressure_full),
            },
            gaps: dict.gaps,
            processes: dict
                .processes
                .into_iter()
                .map(
                    |(pid, comm, launches, delayed, delay_usec)| ProcessLaunches {
                        pid,
                        comm,
                        launches,
                        delayed,
                        delay_usec,
                    },
                )
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zbus::zvariant::{LE, serialized::Context, to_bytes};

    use super::*;
    use crate::control::time::Averages;

    #[test]
    fn launches_survive_the_bus() {
        let launch = TenantLaunch {
            max: Some(LaunchRate {
                count: 60,
                per_usec: 60_000_000,
            }),
            burst: 16,
            launches: 1,
            delayed: 2,
            delay_usec: 3,
            overdue: 4,
            denied: 5,
            unheld: 6,
            evaded: 7,
            storms: 13,
            pressure: Pressure {
                some: Averages {
                    avg10: 0.5,
                    avg60: 0.25,
                    avg300: 0.125,
                    total: Duration::from_secs(3),
                },
                full: Averages::default(),
            },
            gaps: vec![0, 8],
            processes: vec![ProcessLaunches {
                pid: 9,
                comm: "python3".into(),
                launches: 10,
                delayed: 11,
                delay_usec: 12,
            }],
        };
        for wanted in [
            launch.clone(),
            TenantLaunch {
                max: None,
                ..launch
            },
        ] {
            let bytes = to_bytes(Context::new_dbus(LE, 0), &LaunchDict::from(wanted.clone()))
                .expect("encode");
            let (dict, _): (LaunchDict, _) = bytes.deserialize().expect("decode");
            assert_eq!(TenantLaunch::from(dict), wanted);
        }
    }
}
