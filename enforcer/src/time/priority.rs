//! Exclusive classes: pure.
//!
//! While a tenant of a class marked `exclusive` is active on a GPU, tenants of lower classes are kept out of it: frozen.
//! Nobody starves: who was kept out for `time.starve-max` runs for a moment.

use std::{collections::BTreeMap, time::Duration};

/// A tenant on one GPU and its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranked {
    /// Index of the tenant.
    pub tenant: u32,
    /// Priority of its class; larger wins.
    pub priority: u32,
    /// Whether its class is exclusive.
    pub exclusive: bool,
    /// Whether it has used the GPU lately.
    pub active: bool,
}

/// Tenants of classes below the highest exclusive one that is active.
pub fn outranked(tenants: &[Ranked]) -> Vec<u32> {
    let top = tenants
        .iter()
        .filter(|tenant| tenant.exclusive && tenant.active)
        .map(|tenant| tenant.priority)
        .max();
    tenants
        .iter()
        .filter(|tenant| top.is_some_and(|top| tenant.priority < top))
        .map(|tenant| tenant.tenant)
        .collect()
}

/// A tenant that is to be kept out of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unwanted {
    /// Index of the tenant.
    pub tenant: u32,
    /// How long it may be kept out.
    pub starve_max: Duration,
}

/// What becomes of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Kept out since then.
    Out(Duration),
    /// Lets out its breath until then.
    Breath(Duration),
}

/// Keeps tenants out of one GPU, and lets nobody starve. Times are on any clock that does not go back.
#[derive(Clone, Debug, Default)]
pub struct Door {
    turns: BTreeMap<u32, Turn>,
}

/// What is to be done now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Tenants to keep out.
    pub out: Vec<u32>,
    /// When to ask again at the latest.
    pub next: Option<Duration>,
}

impl Door {
    /// Decides at `now`; a tenant that starved runs for `breath`.
    pub fn decide(&mut self, now: Duration, breath: Duration, unwanted: &[Unwanted]) -> Orders {
        self.turns
            .retain(|tenant, _| unwanted.iter().any(|unwanted| unwanted.tenant == *tenant));
        let mut orders = Orders::default();
        for Unwanted { tenant, starve_max } in unwanted {
            let turn = self.turns.entry(*tenant).or_insert(Turn::Out(now));
            match *turn {
                Turn::Out(since) if now >= since + *starve_max => {
                    *turn = Turn::Breath(now + breath);
                }
                Turn::Breath(until) if now >= until => *turn = Turn::Out(now),
                _ => {}
            }
            let next = match *turn {
                Turn::Out(since) => {
                    orders.out.push(*tenant);
                    since + *starve_max
                }
                Turn::Breath(until) => until,
            };
            orders.next = Some(orders.next.map_or(next, |before| before.min(next)));
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BREATH: Duration = Duration::from_millis(10);
    const STARVE: Duration = Duration::from_secs(1);

    fn ranked(tenant: u32, priority: u32, exclusive: bool, active: bool) -> Ranked {
        Ranked {
            tenant,
            priority,
            exclusive,
            active,
        }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn lower_classes_are_out_while_an_exclusive_one_is_active() {
        let mut all = [
            ranked(1, 100, true, true),
            ranked(2, 50, false, true),
            ranked(3, 0, false, true),
            ranked(4, 100, false, true),
        ];
        assert_eq!(outranked(&all), [2, 3]);
        all[0].active = false;
        assert!(outranked(&all).is_empty());
    }

    #[test]
    fn a_class_that_is_not_exclusive_keeps_nobody_out() {
        assert!(outranked(&[ranked(1, 100, false, true), ranked(2, 0, false, true)]).is_empty());
    }

    #[test]
    fn of_two_exclusive_classes_the_higher_wins() {
        assert_eq!(
            outranked(&[ranked(1, 100, true, true), ranked(2, 50, true, true)]),
            [2]
        );
    }

    #[test]
    fn who_starves_runs_for_a_moment() {
        let mut door = Door::default();
        let all = [Unwanted {
            tenant: 2,
            starve_max: STARVE,
        }];
        let first = door.decide(at(0), BREATH, &all);
        assert_eq!((first.out, first.next), (vec![2], Some(at(1000))));
        let second = door.decide(at(1000), BREATH, &all);
        assert_eq!((second.out, second.next), (vec![], Some(at(1010))));
        let third = door.decide(at(1010), BREATH, &all);
        assert_eq!((third.out, third.next), (vec![2], Some(at(2010))));
        assert_eq!(door.decide(at(1020), BREATH, &[]), Orders::default());
    }

    proptest! {
        /// Whatever the others do, nobody is out for longer than allowed.
        #[test]
        fn nobody_starves(
            unwanted in prop::collection::vec(any::<bool>(), 1..400),
            starve in 20..500u64,
        ) {
            let mut door = Door::default();
            let mut out_since = None;
            for (step, unwanted) in unwanted.iter().enumerate() {
                let now = at(10 * step as u64);
                let all = [Unwanted { tenant: 2, starve_max: at(starve) }];
                let orders = door.decide(now, BREATH, if *unwanted { &all } else { &[] });
                if orders.out.is_empty() {
                    out_since = None;
                } else {
                    let since = *out_since.get_or_insert(now);
                    prop_assert!(now <= since + at(starve) + at(10));
                    prop_assert!(orders.next.expect("it asks again") > now);
                }
            }
        }
    }
}
