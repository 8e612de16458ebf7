//! When `memory.high` counts as crossed: once, until usage has clearly fallen below it. What is given back for growth above
//! it. And who above it gives back first.

use std::collections::{BTreeMap, btree_map::Entry};

/// Usage has to fall below the limit by this part of it before the next crossing counts, and to grow by as much before more is
/// given back: one in so many.
const PART: u64 = 20;

/// As far below its `memory.high` a tenant has to come.
pub fn floor(high: u64) -> u64 {
    high - high / PART
}

/// What is known of a tenant that is above its `memory.high`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Above {
    /// Usage that was answered.
    answered: u64,
    /// Bytes that were given back for it and stay charged.
    moved: u64,
    /// Whether an answer is under way.
    busy: bool,
}

/// A tenant that has grown since it was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    /// Its index.
    pub tenant: u32,
    /// On which GPU.
    pub gpu: u32,
    /// Bytes that were given back before and stay charged.
    pub moved: u64,
}

/// Which tenants are above their `memory.high`, by tenant index and GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HighWater(BTreeMap<(u32, u32), Above>);

impl HighWater {
    /// A tenant has crossed its limit. Returns whether that is news; then the answer is under way until [`Self::answered`].
    pub fn crossed(&mut self, tenant: u32, gpu: u32) -> bool {
        let Entry::Vacant(free) = self.0.entry((tenant, gpu)) else {
            return false;
        };
        free.insert(Above {
            busy: true,
            ..Above::default()
        });
        true
    }

    /// What a tenant used has been answered, and so much more was given back that stays charged.
    pub fn answered(&mut self, tenant: u32, gpu: u32, used: u64, moved: u64) {
        if let Some(above) = self.0.get_mut(&(tenant, gpu)) {
            *above = Above {
                answered: used,
                moved: above.moved + moved,
                busy: false,
            };
        }
    }

    /// Lets go of those that have fallen below. `look` tells usage and limit; `None` where there is none any more. Returns those
    /// that have grown since they were answered; their answer is under way from now on.
    pub fn look(&mut self, look: impl Fn(u32, u32) -> Option<(u64, u64)>) -> Vec<Grown> {
        let mut grown = Vec::new();
        self.0.retain(|(tenant, gpu), above| {
            let Some((used, high)) =
                look(*tenant, *gpu).filter(|(used, high)| *used >= floor(*high))
            else {
                return false;
            };
            if !above.busy && used > above.answered.saturating_add(high / PART) {
                above.busy = true;
                grown.push(Grown {
                    tenant: *tenant,
                    gpu: *gpu,
                    moved: above.moved,
                });
            }
            true
        });
        grown
    }

    /// Whether nobody is above.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A tenant that may have to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lender {
    /// Its index.
    pub tenant: u32,
    /// Priority of its class.
    pub priority: u32,
    /// Bytes above its `memory.high`.
    pub above: u64,
}

/// Those that give back for a tenant whose class has the priority `asking`, in order: the lowest class first, in a class
/// who is furthest above its limit. Nobody of the same class or a higher one does, and nobody who is within its limit.
pub fn order(lenders: impl IntoIterator<Item = Lender>, asking: u32) -> Vec<Lender> {
    let mut order: Vec<Lender> = lenders
        .into_iter()
        .filter(|lender| lender.priority < asking && lender.above > 0)
        .collect();
    order.sort_by_key(|lender| (lender.priority, std::cmp::Reverse(lender.above)));
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn swaying_around_the_limit_is_one_crossing() {
        let mut water = HighWater::default();
        assert!(water.crossed(1, 0));
        for used in [101, 99, 100, 96, 104] {
            water.look(|_, _| Some((used, 100)));
            assert!(!water.crossed(1, 0), "at {used}");
        }
        water.look(|_, _| Some((94, 100)));
        assert!(water.crossed(1, 0));
        assert!(water.crossed(1, 1), "another GPU");
    }

    #[test]
    fn growth_is_answered_once_and_not_before_the_last_answer() {
        let mut water = HighWater::default();
        water.crossed(1, 0);
        let look = |water: &mut HighWater, used| -> Vec<u64> {
            let grown = water.look(|_, _| Some((used, 100)));
            grown.iter().map(|grown| grown.moved).collect()
        };
        assert!(
            look(&mut water, 200).is_empty(),
            "the first answer is under way"
        );
        water.answered(1, 0, 120, 25);
        assert!(look(&mut water, 125).is_empty());
        assert_eq!(look(&mut water, 126), [25u64]);
        assert!(look(&mut water, 190).is_empty());
        water.answered(1, 0, 126, 6);
        assert_eq!(look(&mut water, 190), [31u64]);
        // Who fell below meanwhile is a stranger.
        assert!(look(&mut water, 90).is_empty());
        water.answered(1, 0, 190, 64);
        assert!(water.is_empty());
    }

    #[test]
    fn a_limit_that_is_gone_is_forgotten() {
        let mut water = HighWater::default();
        water.crossed(1, 0);
        water.look(|_, _| None);
        assert!(water.is_empty());
    }

    #[test]
    fn lower_classes_give_back_first_and_only_what_is_above() {
        let lender = |tenant, priority, above| Lender {
            tenant,
            priority,
            above,
        };
        let all = [
            lender(0, 100, 9),
            lender(1, 50, 1),
            lender(2, 0, 3),
            lender(3, 0, 5),
            lender(4, 0, 0),
        ];
        let told = |asking| -> Vec<u32> {
            order(all, asking)
                .iter()
                .map(|lender| lender.tenant)
                .collect()
        };
        assert_eq!(told(100), [3, 2, 1]);
        assert_eq!(told(50), [3, 2]);
        assert!(told(0).is_empty());
    }

    proptest! {
        /// Between two crossings that count, usage was below the limit by the whole part.
        #[test]
        fn no_crossing_counts_twice(samples in prop::collection::vec(0u64..200, 1..100)) {
            let mut water = HighWater::default();
            let mut lowest = 0;
            for used in samples {
                lowest = lowest.min(used);
                water.look(|_, _| Some((used, 100)));
                if used > 100 && water.crossed(0, 0) {
                    prop_assert!(lowest < 95);
                    lowest = u64::MAX;
                }
            }
        }
    }
}
