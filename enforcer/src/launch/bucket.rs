//! The token bucket outside of the kernel: the same arithmetic over atomics, for tests and benchmarks.
//!
//! [`gpuquota_common::launch::take`] is what the eBPF program runs. Here it is compared with an exact model, and
//! run by many threads at once.

use std::sync::atomic::{AtomicU64, Ordering};

use gpuquota_common::launch::{Limit, SharedWord, give_back, nanos, take, ticks};

/// A word in memory instead of a map.
#[derive(Clone, Copy, Debug)]
struct Shared<'a>(&'a AtomicU64);

impl SharedWord for Shared<'_> {
    fn load(self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(self, value: u64) -> u64 {
        self.0.fetch_add(value, Ordering::AcqRel)
    }

    fn replace(self, old: u64, new: u64) {
        // Whoever was quicker has done it.
        let _ = self
            .0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The buckets of a tenant and of all around it.
#[derive(Debug, Default)]
pub struct Chain {
    levels: Vec<(Limit, AtomicU64)>,
}

impl Chain {
    /// Buckets by their limits, innermost first; full.
    pub fn new(limits: &[Limit]) -> Self {
        Self {
            levels: limits
                .iter()
                .map(|limit| (*limit, AtomicU64::default()))
                .collect(),
        }
    }

    /// Takes a launch from every bucket and returns how many nanoseconds it has to wait.
    ///
    /// One that would wait longer than `longest` takes nothing and waits `longest`.
    pub fn launch(&self, now_ns: u64, cost: u64, longest: u64) -> u64 {
        let wait = self
            .limited()
            .map(|(limit, free)| nanos(take(free, ticks(now_ns), limit.interval, limit.span, cost)))
            .max()
            .unwrap_or(0);
        if wait <= longest {
            return wait;
        }
        for (limit, free) in self.limited() {
            give_back(free, limit.interval, cost);
        }
        longest
    }

    fn limited(&self) -> impl Iterator<Item = (&Limit, Shared<'_>)> {
        self.levels
            .iter()
            .filter(|(limit, _)| limit.interval != 0)
            .map(|(limit, free)| (limit, Shared(free)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A start late enough that a full bucket does not reach back behind zero.
    const START_NS: u64 = 1_000_000_000_000;
    const FOREVER: u64 = u64::MAX;

    fn limit(interval_ns: u64, burst: u64) -> Limit {
        Limit {
            interval: ticks(interval_ns),
            span: ticks(interval_ns) * (burst - 1),
            ..Limit::default()
        }
    }

    /// An exact bucket: tokens as a number over `interval`, filled by time and capped at the burst. Launches that
    /// wait are in debt.
    struct Exact {
        interval: i128,
        burst: i128,
        /// Tokens times `interval`.
        level: i128,
        at: i128,
    }

    impl Exact {
        fn new(interval_ns: u64, burst: u64) -> Self {
            let (interval, burst) = (i128::from(interval_ns), i128::from(burst));
            Self {
                interval,
                burst,
                level: interval * burst,
                at: i128::from(START_NS),
            }
        }

        /// Nanoseconds until the bucket holds `cost`, or is full if it never holds that many.
        fn launch(&mut self, now_ns: u64, cost: u64) -> i128 {
            let now = i128::from(now_ns);
            self.level = (self.level + now - self.at).min(self.interval * self.burst);
            self.at = now;
            let cost = i128::from(cost);
            let wanted = cost.min(self.burst) * self.interval;
            let wait = (wanted - self.level).max(0);
            self.level -= cost * self.interval;
            wait
        }
    }

    proptest! {
        /// The same waits as the exact model, over any sequence of pauses and costs, at one level or three.
        #[test]
        fn waits_are_those_of_the_exact_model(
            levels in prop::collection::vec((1u64..2_000_000, 1u64..2000), 1..4),
            launches in prop::collection::vec((0u64..3_000_000, 1u64..50), 1..300),
        ) {
            let limits: Vec<Limit> = levels.iter().map(|(i, b)| limit(*i, *b)).collect();
            let chain = Chain::new(&limits);
            let mut exact: Vec<Exact> = levels.iter().map(|(i, b)| Exact::new(*i, *b)).collect();
            let mut now = START_NS;
            for (pause, cost) in launches {
                now += pause;
                let wait = chain.launch(now, cost, FOREVER);
                let wanted = exact.iter_mut().map(|level| level.launch(now, cost)).max();
                prop_assert_eq!(Some(i128::from(wait)), wanted);
            }
        }

        /// Launches that wait as they are told: in no span of time more than the burst and what the rate gives.
        #[test]
        fn no_window_has_more_than_burst_and_rate(
            interval in 1000u64..1_000_000,
            burst in 1u64..100,
            think in prop::collection::vec(0u64..200_000, 200..400),
        ) {
            let chain = Chain::new(&[limit(interval, burst)]);
            let mut now = START_NS;
            let mut went = Vec::new();
            for pause in think {
                now += pause;
                now += chain.launch(now, 1, FOREVER);
                went.push(now);
            }
            for (first, from) in went.iter().enumerate() {
                for (last, to) in went.iter().enumerate().skip(first) {
                    let count = (last - first + 1) as u64;
                    prop_assert!(count <= burst + (to - from) / interval, "{count} in {} ns", to - from);
                }
            }
        }

        /// And no fewer: who always wants to launch gets the whole rate, however late it is woken within the burst.
        #[test]
        fn a_greedy_tenant_gets_its_rate(
            interval in 1000u64..100_000,
            burst in 2u64..200,
            late in prop::collection::vec(0u64..100, 500),
        ) {
            let chain = Chain::new(&[limit(interval, burst)]);
            let mut now = START_NS;
            // Lateness up to the burst is made up for.
            let span = interval * (burst - 1);
            for percent in &late {
                let wait = chain.launch(now, 1, FOREVER);
                if wait > 0 {
                    now += wait + span * percent / 100;
                }
            }
            let launches = late.len() as u64;
            let ideal = launches.saturating_sub(burst) * interval;
            prop_assert!(now - START_NS <= ideal + span + interval, "{} > {ideal}", now - START_NS);
        }

        /// A delay is never longer than the bound, and one that was cut short leaves no debt behind.
        #[test]
        fn delays_are_bounded_and_leave_no_debt(
            inner in (1000u64..1_000_000, 1u64..50),
            outer in (1000u64..1_000_000, 1u64..50),
            longest in 0u64..10_000_000,
            launches in 1usize..500,
        ) {
            let chain = Chain::new(&[limit(inner.0, inner.1), limit(outer.0, outer.1)]);
            for _ in 0..launches {
                prop_assert!(chain.launch(START_NS, 1, longest) <= longest);
            }
            let interval = inner.0.max(outer.0);
            let later = START_NS + longest + interval;
            prop_assert_eq!(chain.launch(later, 1, FOREVER), 0);
        }
    }

    #[test]
    fn many_threads_get_exactly_the_rate() {
        const THREADS: u64 = 8;
        const EACH: u64 = 20_000;
        let (interval, burst) = (500, 64);
        let chain = Chain::new(&[limit(interval, burst)]);
        // Time stands still, so every wait is a moment of its own.
        let mut waits: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        (0..EACH)
                            .map(|_| chain.launch(START_NS, 1, FOREVER))
                            .collect::<Vec<u64>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        waits.sort_unstable();
        for (index, wait) in (0u64..).zip(waits) {
            // Every moment is handed out once.
            assert_eq!(wait, (index + 1).saturating_sub(burst) * interval);
        }
    }

    #[test]
    fn an_outer_budget_holds_all_inside() {
        let outer = limit(1000, 10);
        let chains = [Chain::new(&[limit(100, 10)]), Chain::new(&[limit(100, 10)])];
        let shared = Chain::new(&[outer]);
        let mut now = START_NS;
        let mut went = 0u64;
        while now < START_NS + 1_000_000 {
            for chain in &chains {
                let wait = chain
                    .launch(now, 1, FOREVER)
                    .max(shared.launch(now, 1, FOREVER));
                went += 1;
                now += wait;
            }
        }
        assert!((1005..=1012).contains(&went), "{went}");
    }
}
