//! Exclusive classes: pure.
//!
//! While a tenant of a class marked `exclusive` is active on a GPU, tenants of lower classes are frozen there. Nobody
//! starves: who was kept out for `time.starve-max` runs for a moment.

use std::{collections::BTreeMap, time::Duration};

/// A tenant on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Index of the tenant.
    pub tenant: u32,
    /// Priority of its class; larger wins.
    pub priority: u32,
    /// Whether its class is exclusive.
    pub exclusive: bool,
    /// Whether it has used the GPU lately.
    pub active: bool,
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

/// Controller of one GPU. Times are on any clock that does not go back.
#[derive(Clone, Debug, Default)]
pub struct Exclusive {
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

impl Exclusive {
    /// Decides at `now`; a tenant that starved runs for `breath`.
    pub fn decide(&mut self, now: Duration, breath: Duration, contenders: &[Contender]) -> Orders {
        let top = contenders
            .iter()
            .filter(|contender| contender.exclusive && contender.active)
            .map(|contender| contender.priority)
            .max();
        self.turns.retain(|tenant, _| {
            contenders
                .iter()
                .any(|contender| contender.tenant == *tenant)
        });
        let mut orders = Orders::default();
        for contender in contenders {
            if top.is_none_or(|top| contender.priority >= top) {
                self.turns.remove(&contender.tenant);
                continue;
            }
            let turn = self.turns.entry(contender.tenant).or_insert(Turn::Out(now));
            match *turn {
                Turn::Out(since) if now >= since + contender.starve_max => {
                    *turn = Turn::Breath(now + breath)
                }
                Turn::Breath(until) if now >= until => *turn = Turn::Out(now),
                _ => {}
            }
            let next = match *turn {
                Turn::Out(since) => {
                    orders.out.push(contender.tenant);
                    since + contender.starve_max
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

    fn contender(tenant: u32, priority: u32, exclusive: bool, active: bool) -> Contender {
        Contender {
            tenant,
            priority,
            exclusive,
            active,
            starve_max: STARVE,
        }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn lower_classes_are_out_while_an_exclusive_one_is_active() {
        let mut exclusive = Exclusive::default();
        let mut all = [
            contender(1, 100, true, true),
            contender(2, 50, false, true),
            contender(3, 0, false, true),
            contender(4, 100, false, true),
        ];
        assert_eq!(exclusive.decide(at(0), BREATH, &all).out, [2, 3]);
        all[0].active = false;
        assert_eq!(exclusive.decide(at(5), BREATH, &all), Orders::default());
    }

    #[test]
    fn a_class_that_is_not_exclusive_keeps_nobody_out() {
        let all = [contender(1, 100, false, true), contender(2, 0, false, true)];
        assert!(
            Exclusive::default()
                .decide(at(0), BREATH, &all)
                .out
                .is_empty()
        );
    }

    #[test]
    fn who_starves_runs_for_a_moment() {
        let mut exclusive = Exclusive::default();
        let all = [contender(1, 100, true, true), contender(2, 0, false, true)];
        let first = exclusive.decide(at(0), BREATH, &all);
        assert_eq!((first.out, first.next), (vec![2], Some(at(1000))));
        let second = exclusive.decide(at(1000), BREATH, &all);
        assert_eq!((second.out, second.next), (vec![], Some(at(1010))));
        let third = exclusive.decide(at(1010), BREATH, &all);
        assert_eq!((third.out, third.next), (vec![2], Some(at(2010))));
    }

    proptest! {
        /// Whatever the others do, nobody is out for longer than allowed.
        #[test]
        fn nobody_starves(
            active in prop::collection::vec(any::<bool>(), 1..400),
            starve in 20..500u64,
        ) {
            let mut exclusive = Exclusive::default();
            let mut out_since = None;
            for (step, active) in active.iter().enumerate() {
                let now = at(10 * step as u64);
                let all = [
                    contender(1, 100, true, *active),
                    Contender { starve_max: at(starve), ..contender(2, 0, false, true) },
                ];
                let orders = exclusive.decide(now, BREATH, &all);
                if orders.out.is_empty() {
                    out_since = None;
                } else {
                    let since = *out_since.get_or_insert(now);
                    prop_assert!(now - since <= at(starve) + at(10));
                    prop_assert!(orders.next.expect("it asks again") > now);
                }
            }
        }
    }
}
