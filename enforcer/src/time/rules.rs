//! What should hold, as the engine needs it.

use std::{collections::BTreeMap, fmt, time::Duration};

use gpuquota_policy::{HostGpu, Policy, TimeBudget};

use crate::tenancy::Seating;

/// What holds for a tenant on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Share relative to the tenants beside it.
    pub weight: u32,
    /// Ceiling between 0 and 1.
    pub max: Option<f64>,
    /// Priority of the class; larger wins.
    pub priority: u32,
    /// Whether lower classes are kept out while this tenant is active.
    pub exclusive: bool,
    /// How long this tenant may be kept out.
    pub starve_max: Duration,
    /// How long this tenant should wait for its turn at most.
    pub latency_target: Option<Duration>,
}

/// A tenant in force.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantRules {
    /// Name.
    pub name: String,
    /// Index of the tenant around it.
    pub parent: Option<u32>,
    /// By GPU index.
    pub gpus: BTreeMap<u32, Rule>,
}

/// Tenants in force by index.
pub type Rules = BTreeMap<u32, TenantRules>;

/// The rules of a policy.
pub fn rules(policy: &Policy, seating: &Seating, gpus: &[HostGpu]) -> Rules {
    let on_gpus = policy.on_each(gpus);
    seating
        .in_force()
        .filter_map(|(index, seat)| {
            let class = policy.tenants.get(&seat.name)?.class_name();
            let (priority, exclusive) =
                (policy.class_priority(class), policy.class_exclusive(class));
            let rule = |time: TimeBudget| Rule {
                weight: time.weight,
                max: time.max.map(gpuquota_policy::Percent::ratio),
                priority,
                exclusive,
                starve_max: time.starve_max,
                latency_target: time.latency_target,
            };
            let rules = TenantRules {
                name: seat.name.clone(),
                parent: seat
                    .parent
                    .as_deref()
                    .and_then(|parent| seating.index(parent)),
                gpus: on_gpus
                    .time(&seat.name)
                    .into_iter()
                    .map(|(gpu, time)| (gpu, rule(time)))
                    .collect(),
            };
            Some((index, rules))
        })
        .collect()
}

/// Why a tenant is frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// An admin said so.
    Command,
    /// It crossed `memory.high`, and `memory.on-high` is `freeze`.
    MemoryHigh,
    /// It caused a GPU fault, and `fault.on-xid` is `freeze`.
    Fault,
    /// It has had its part of the period.
    Ceiling,
    /// An exclusive class is active.
    Exclusive,
    /// Another tenant's latency target would not be met.
    Latency,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Command => "command",
            Self::MemoryHigh => "memory-high",
            Self::Fault => "fault",
            Self::Ceiling => "ceiling",
            Self::Exclusive => "exclusive",
            Self::Latency => "latency",
        })
    }
}
