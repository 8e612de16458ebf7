//! From a policy to launch limits: what the kernel side has to hold, and who gets probes.
//!
//! Pure. A launch names no GPU in the driver's interface (streams and contexts do, deep in libcuda), so a tenant
//! has one launch budget for all GPUs: the value that holds for the GPU `"*"`.

use std::{collections::BTreeMap, time::Duration};

use gpuquota_common::launch::{
    LONGEST_FREEZE_NS, LONGEST_HOLD_NS, Limit, limit_flags, nanos, pace, ticks,
};
use gpuquota_policy::{GraphCost, HostGpu, LaunchBudget, OnLaunchMax, Pace, Policy, Rate};

use crate::tenancy::Seating;

/// Launch budgets of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    rules: BTreeMap<u32, Rule>,
}

/// The launch budget of one tenant, and of whom it lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The tenant around it.
    pub parent: Option<u32>,
    /// Its own budget, if it has one.
    pub own: Option<LaunchBudget>,
}

/// What holds for the processes of a tenant, by its own budget and those around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Treatment {
    /// One of [`pace`], by the nearest budget.
    pub pace: u32,
    /// Whether some budget counts the nodes of graphs.
    pub counts_nodes: bool,
    /// How long a process has to end, by the nearest budget that ends processes.
    pub patience: Duration,
}

impl Budgets {
    /// The budgets of the tenants in force.
    pub fn new(policy: &Policy, seating: &Seating) -> Self {
        // Matches no GPU of a host, so that only what is said for all GPUs counts.
        let every = HostGpu {
            index: u32::MAX,
            uuid: String::new(),
            memory: 0,
        };
        let on_every = policy.on(&every);
        let rules = seating
            .in_force()
            .map(|(index, seat)| {
                let own = on_every
                    .launch(&seat.name)
                    .filter(|launch| launch.max.is_some());
                let parent = seat.parent.as_deref().and_then(|name| seating.index(name));
                (index, Rule { parent, own })
            })
            .collect();
        Self { rules }
    }

    /// The budget of a tenant.
    pub fn own(&self, tenant: u32) -> Option<&LaunchBudget> {
        self.rules.get(&tenant)?.own.as_ref()
    }

    /// The row for the kernel side; a tenant without a budget has one without a limit.
    pub fn limit(&self, tenant: u32) -> Limit {
        self.own(tenant).map(limit).unwrap_or_default()
    }

    /// What holds for the processes of a tenant; `None` if no budget holds for them, and they get no probes.
    pub fn treatment(&self, tenant: u32) -> Option<Treatment> {
        let budgets: Vec<&LaunchBudget> = self.chain(tenant).collect();
        let nearest = budgets.first()?;
        Some(Treatment {
            pace: match nearest.pace {
                Pace::Signal => pace::SIGNAL,
                Pace::Spin => pace::SPIN,
                Pace::Freeze => pace::FREEZE,
            },
            counts_nodes: budgets
                .iter()
                .any(|budget| budget.graph_cost == GraphCost::Nodes),
            patience: budgets
                .iter()
                .find(|budget| budget.on_max == OnLaunchMax::Deny)
                .unwrap_or(nearest)
                .patience,
        })
    }

    /// The lowest rate that holds for a tenant, in launches a second.
    pub fn rate(&self, tenant: u32) -> Option<f64> {
        self.chain(tenant)
            .filter_map(|budget| budget.max)
            .map(Rate::per_second)
            .min_by(f64::total_cmp)
    }

    /// The tenant and those around it, itself first.
    pub fn around(&self, tenant: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(tenant), |tenant| {
            self.rules.get(tenant).and_then(|rule| rule.parent)
        })
    }

    /// Whether a tenant of this number is in force.
    pub fn knows(&self, tenant: u32) -> bool {
        self.rules.contains_key(&tenant)
    }

    /// Whether any tenant has a budget.
    pub fn is_empty(&self) -> bool {
        self.rules.values().all(|rule| rule.own.is_none())
    }

    /// The budgets that hold for a tenant, its own first.
    fn chain(&self, tenant: u32) -> impl Iterator<Item = &LaunchBudget> {
        self.around(tenant)
            .filter_map(|tenant| self.rules.get(&tenant))
            .filter_map(|rule| rule.own.as_ref())
    }
}

fn limit(budget: &LaunchBudget) -> Limit {
    let Some(rate) = budget.max else {
        return Limit::default();
    };
    let interval = interval(rate);
    let span = interval.saturating_mul(u64::from(budget.burst.saturating_sub(1)));
    let longest = match budget.pace {
        Pace::Freeze => LONGEST_FREEZE_NS,
        Pace::Signal | Pace::Spin => LONGEST_HOLD_NS,
    };
    let mut flags = 0;
    if budget.on_max == OnLaunchMax::Deny {
        flags |= limit_flags::DENY;
    }
    if budget.graph_cost == GraphCost::Nodes {
        flags |= limit_flags::GRAPH_NODES;
    }
    Limit {
        interval,
        // Half of what wraps: moments stay comparable.
        span: span.min(1 << 62),
        // Half the burst, so that what a stop lasts too long is not lost.
        hold_ns: (nanos(span) / 2).min(longest),
        flags,
        reserved: 0,
    }
}

/// Virtual time of one launch, to the nearest tick and at least one.
fn interval(rate: Rate) -> u64 {
    let second = u128::from(ticks(1_000_000_000));
    let count = u128::from(rate.count());
    let interval = (u128::from(rate.unit().seconds()) * second + count / 2) / count;
    u64::try_from(interval).unwrap_or(u64::MAX >> 1).max(1)
}

#[cfg(test)]
mod tests {
    use gpuquota_policy::{Layer, RateUnit, Source};

    use super::*;
    use crate::tenancy::Seat;

    fn budgets(text: &str, seats: &[(&str, Option<&str>)]) -> Budgets {
        let source = Source::new("/p.toml", Layer::Admin, text);
        let policy = Policy::load(&[source], None).expect("valid").policy;
        let mut seating = Seating::default();
        for (index, (name, parent)) in (0..).zip(seats) {
            seating.restore(
                index,
                Seat {
                    name: (*name).to_owned(),
                    parent: parent.map(str::to_owned),
                    in_force: true,
                },
            );
        }
        Budgets::new(&policy, &seating)
    }

    const NESTED: &str = r#"
        [tenant.lab]
        cgroup = "/lab"
        launch.max = "20000/s"
        launch.burst = 500
        launch.on-max = "deny"
        launch.patience = "3s"
        [tenant.vision]
        cgroup = "/lab/vision"
        launch.max = "60/min"
        launch.burst = 1
        launch.pace = "spin"
        launch.graph-cost = "nodes"
        [tenant.quiet]
        cgroup = "/lab/quiet"
        [tenant.free]
        cgroup = "/free"
    "#;
    const SEATS: [(&str, Option<&str>); 4] = [
        ("lab", None),
        ("vision", Some("lab")),
        ("quiet", Some("lab")),
        ("free", None),
    ];

    #[test]
    fn limits_are_exact() {
        let budgets = budgets(NESTED, &SEATS);
        let lab = budgets.limit(0);
        assert_eq!(nanos(lab.interval), 50_000);
        assert_eq!(nanos(lab.span), 499 * 50_000);
        assert_eq!(
            (lab.hold_ns, lab.flags),
            (LONGEST_HOLD_NS, limit_flags::DENY)
        );
        let vision = budgets.limit(1);
        assert_eq!(nanos(vision.interval), 1_000_000_000);
        assert_eq!((vision.span, vision.hold_ns), (0, 0));
        assert_eq!(budgets.limit(2), Limit::default());
    }

    #[test]
    fn rates_are_held_to_a_thousandth() {
        for (count, unit) in [
            (1, RateUnit::Hour),
            (3, RateUnit::Second),
            (123_457, RateUnit::Minute),
            (3_333_333, RateUnit::Second),
        ] {
            let rate = Rate::new(count, unit).expect("a rate");
            #[expect(clippy::cast_precision_loss, reason = "compared to a thousandth")]
            let held = ticks(1_000_000_000) as f64 / interval(rate) as f64;
            assert!(
                (held / rate.per_second() - 1.0).abs() < 1e-3,
                "{rate}: {held}"
            );
        }
    }

    #[test]
    fn processes_are_treated_by_the_nearest_budget() {
        let budgets = budgets(NESTED, &SEATS);
        let vision = budgets.treatment(1).expect("has one");
        assert_eq!(vision.pace, pace::SPIN);
        assert!(vision.counts_nodes);
        assert_eq!(
            vision.patience,
            Duration::from_secs(3),
            "of the one that ends processes"
        );
        let quiet = budgets.treatment(2).expect("the lab has one");
        assert_eq!(quiet.pace, pace::SIGNAL);
        assert!(!quiet.counts_nodes);
        assert_eq!(budgets.treatment(3), None);
        assert!(!budgets.is_empty());
    }

    #[test]
    fn a_limit_for_one_gpu_is_no_limit_of_launches() {
        let text = "[tenant.a]\ncgroup = \"/a\"\n[tenant.a.gpu.0]\nlaunch.max = \"5/s\"\n[tenant.a.gpu.\"*\"]\nlaunch.max = \"7/s\"\n";
        let budgets = budgets(text, &[("a", None)]);
        assert_eq!(nanos(budgets.limit(0).interval), 142_857_143);
    }
}
