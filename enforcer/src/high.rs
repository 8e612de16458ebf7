//! When `memory.high` counts as crossed: once, until usage has clearly fallen below it.

use std::collections::BTreeSet;

/// Usage has to fall below the limit by this part of it before the next crossing counts: one in so many.
const PART: u64 = 20;

/// Which tenants are above their `memory.high`, by tenant index and GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HighWater(BTreeSet<(u32, u32)>);

impl HighWater {
    /// A tenant has crossed its limit. Returns whether that is news.
    pub fn crossed(&mut self, tenant: u32, gpu: u32) -> bool {
        self.0.insert((tenant, gpu))
    }

    /// Lets go of those that have fallen below. `look` tells usage and limit; `None` where there is none any more.
    pub fn look(&mut self, look: impl Fn(u32, u32) -> Option<(u64, u64)>) {
        self.0.retain(|(tenant, gpu)| {
            look(*tenant, *gpu).is_some_and(|(used, high)| used >= high - high / PART)
        });
    }

    /// Whether nobody is above.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
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
    fn a_limit_that_is_gone_is_forgotten() {
        let mut water = HighWater::default();
        water.crossed(1, 0);
        water.look(|_, _| None);
        assert!(water.is_empty());
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
