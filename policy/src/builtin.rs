//! What holds where the policy files say nothing.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use crate::limits::{Limits, Written};
use crate::policy::Class;
use crate::profile::{Factor, Share};
use crate::source::{Origin, Spanned};
use crate::values::{
    GraphCost, Limit, Managed, OnBreach, OnHigh, OnLaunchMax, OnMemoryMax, OnXid, Pace, Size,
    Weight,
};
use crate::xids::Xids;

/// The classes that exist without being defined. A `[class.NAME]` of the same name changes what it says and keeps the rest.
pub const BUILTIN_CLASSES: [&str; 3] = ["best-effort", "burstable", "guaranteed"];

/// The class of a tenant that names none.
pub const DEFAULT_CLASS: &str = "burstable";

/// The priority of a class that names none.
pub(crate) const DEFAULT_PRIORITY: u32 = 50;

/// `launch.burst` where nothing gives one: what `launch.max` allows in this time, and at least [`LEAST_BURST`].
pub(crate) const BURST_NANOS: u64 = 10_000_000;

/// The smallest default burst: programs launch in short series even at low rates.
pub(crate) const LEAST_BURST: u32 = 16;

/// Xids that what an application does causes: exceptions of the graphics engine (13, 69), an access to an unmapped address
/// (31), a broken push buffer (32), a channel that was stopped for an error of its own (43), a context switch that did not
/// end (109). From NVIDIA's catalogue of Xid errors.
const APPLICATION_XIDS: [u32; 6] = [13, 31, 32, 43, 69, 109];

fn builtin<T>(value: T) -> Written<T> {
    plain(value).map(Box::new)
}

#[expect(clippy::unnecessary_wraps, reason = "the fields of Class are options")]
fn plain<T>(value: T) -> Option<Spanned<T>> {
    static ORIGIN: LazyLock<Origin> = LazyLock::new(Origin::builtin);
    Some(Spanned {
        value,
        origin: ORIGIN.clone(),
    })
}

static DEFAULTS: LazyLock<Limits> = LazyLock::new(|| Limits {
    memory_max: builtin(Limit::Max),
    memory_high: builtin(Limit::Max),
    memory_min: builtin(Size(0)),
    memory_on_max: builtin(OnMemoryMax::Deny),
    memory_on_high: builtin(OnHigh::Notify),
    memory_wait_timeout: builtin(Duration::from_secs(10)),
    memory_managed: builtin(Managed::Charge),
    memory_context: builtin(true),
    memory_host: builtin(Limit::Max),
    memory_on_breach: builtin(OnBreach::Kill),
    launch_max: builtin(Limit::Max),
    // Depends on launch.max.
    launch_burst: None,
    launch_on_max: builtin(OnLaunchMax::Delay),
    launch_patience: builtin(Duration::from_secs(10)),
    launch_pace: builtin(Pace::Signal),
    launch_graph_cost: builtin(GraphCost::One),
    time_weight: builtin(weight(100)),
    time_max: builtin(Limit::Max),
    time_starve_max: builtin(Duration::from_secs(1)),
    time_latency_target: builtin(Limit::Max),
    fault_on_xid: builtin(OnXid::Notify),
    fault_xids: builtin(Xids::of(APPLICATION_XIDS)),
    anomaly_factor: builtin(Factor::DEFAULT),
    insight_budget: builtin(Share::DEFAULT),
    insight_profile: builtin(false),
});

static CLASSES: LazyLock<BTreeMap<&'static str, Class>> = LazyLock::new(|| {
    BUILTIN_CLASSES
        .into_iter()
        .map(|name| {
            let (priority, limits) = match name {
                "guaranteed" => (
                    100,
                    Limits {
                        time_weight: builtin(weight(800)),
                        ..Limits::default()
                    },
                ),
                "best-effort" => (
                    0,
                    Limits {
                        time_weight: builtin(weight(10)),
                        memory_on_high: builtin(OnHigh::Reclaim),
                        ..Limits::default()
                    },
                ),
                _ => (DEFAULT_PRIORITY, Limits::default()),
            };
            let class = Class {
                name: name.to_owned(),
                origin: Origin::builtin(),
                priority: plain(priority),
                exclusive: plain(false),
                limits,
                gpu: BTreeMap::new(),
            };
            (name, class)
        })
        .collect()
});

fn weight(weight: u32) -> Weight {
    Weight::new(weight).expect("the constants above are in range")
}

/// The limits of a tenant about which nothing is written.
pub(crate) fn defaults() -> &'static Limits {
    &DEFAULTS
}

/// The built-in class of this name.
pub(crate) fn class(name: &str) -> Option<&'static Class> {
    CLASSES.get(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Key;

    #[test]
    fn every_key_but_the_burst_has_a_default() {
        for key in Key::ALL {
            assert_eq!(
                defaults().get(*key).is_none(),
                *key == Key::LaunchBurst,
                "{key}"
            );
        }
    }

    #[test]
    fn the_classes_are_ordered() {
        let priority = |name| {
            class(name)
                .and_then(|class| class.priority.clone())
                .map(|priority| priority.value)
        };
        assert!(
            priority("best-effort") < priority("burstable")
                && priority("burstable") < priority("guaranteed")
        );
        assert!(class(DEFAULT_CLASS).is_some());
        assert!(class("other").is_none());
    }
}
