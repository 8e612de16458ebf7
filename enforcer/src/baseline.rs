//! What is usual for a tenant: median and median absolute deviation over the last hour. Pure.
//!
//! Both stand still while less than half of the hour is unusual, which mean and standard deviation do not.

use std::collections::{BTreeMap, BTreeSet};

/// Seconds between two samples.
pub const STEP: u64 = 30;
/// Samples of a window: an hour.
const WINDOW: usize = 120;
/// Fewer samples than this say nothing: ten minutes.
const ENOUGH: usize = 20;

/// What is usual.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usual {
    /// As many samples are above as below.
    pub median: f64,
    /// Half of the samples are no farther from the median than this.
    pub mad: f64,
}

/// The samples of one thing.
#[derive(Clone, Debug, Default)]
pub struct Window {
    samples: Vec<f32>,
    next: usize,
    usual: Option<Usual>,
}

impl Window {
    /// Adds a sample; the oldest of a full window goes.
    pub fn push(&mut self, sample: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "seven digits are enough for what is usual"
        )]
        let sample = sample as f32;
        if !sample.is_finite() {
            return;
        }
        if self.samples.len() < WINDOW {
            if self.samples.len() == self.samples.capacity() {
                self.samples.reserve_exact(ENOUGH);
            }
            self.samples.push(sample);
        } else {
            self.samples[self.next] = sample;
            self.next = (self.next + 1) % WINDOW;
        }
        self.usual = usual(&self.samples);
    }

    /// What is usual; `None` before there are enough samples.
    pub fn usual(&self) -> Option<Usual> {
        self.usual
    }
}

fn usual(samples: &[f32]) -> Option<Usual> {
    if samples.len() < ENOUGH {
        return None;
    }
    let mut sorted: Vec<f64> = samples.iter().copied().map(f64::from).collect();
    let median = median(&mut sorted);
    let mut distances: Vec<f64> = sorted
        .iter()
        .map(|sample| (sample - median).abs())
        .collect();
    Some(Usual {
        median,
        mad: self::median(&mut distances),
    })
}

/// The middle of some numbers, or of the two in the middle.
fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() % 2 {
        1 => numbers[middle],
        _ => f64::midpoint(numbers[middle.saturating_sub(1)], numbers[middle]),
    }
}

/// What was seen of a tenant on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Bytes charged.
    pub memory: f64,
    /// Part of the GPU's time; absent while it is not controlled.
    pub time: Option<f64>,
}

/// Windows of a tenant on one GPU.
#[derive(Clone, Debug, Default)]
pub struct OnGpu {
    /// Bytes charged.
    pub memory: Window,
    /// Part of the GPU's time.
    pub time: Window,
}

/// Windows of all tenants.
#[derive(Clone, Debug, Default)]
pub struct Baselines {
    on_gpu: BTreeMap<(String, u32), OnGpu>,
    /// Launches a second, and their count at the last look.
    launches: BTreeMap<String, (Window, u64)>,
    last: u64,
}

impl Baselines {
    /// Whether it is time for a sample.
    pub fn is_due(&self, second: u64) -> bool {
        // A clock that was set back is no reason to wait until it has caught up.
        second >= self.last + STEP || second < self.last
    }

    /// Takes a sample of everybody who has a history, and forgets the others.
    pub fn sample(
        &mut self,
        second: u64,
        seen: &BTreeMap<(String, u32), Seen>,
        launches: &BTreeMap<String, u64>,
    ) {
        let elapsed = second.saturating_sub(self.last).max(1);
        let first = self.last == 0;
        self.last = second;
        let wanted: BTreeSet<&(String, u32)> = seen.keys().collect();
        self.on_gpu.retain(|key, _| wanted.contains(key));
        for (key, seen) in seen {
            let on_gpu = self.on_gpu.entry(key.clone()).or_default();
            on_gpu.memory.push(seen.memory);
            if let Some(time) = seen.time {
                on_gpu.time.push(time);
            }
        }
        self.launches
            .retain(|tenant, _| launches.contains_key(tenant));
        for (tenant, count) in launches {
            match self.launches.get_mut(tenant) {
                Some((window, before)) if !first => {
                    #[expect(clippy::cast_precision_loss, reason = "launches of half a minute")]
                    window.push(count.saturating_sub(*before) as f64 / elapsed as f64);
                    *before = *count;
                }
                _ => {
                    self.launches
                        .insert(tenant.clone(), (Window::default(), *count));
                }
            }
        }
    }

    /// Of a tenant on one GPU.
    pub fn of(&self, tenant: &str, gpu: u32) -> Option<&OnGpu> {
        self.on_gpu.get(&(tenant.to_owned(), gpu))
    }

    /// Launches a second of a tenant.
    pub fn launches(&self, tenant: &str) -> Option<Usual> {
        self.launches.get(tenant)?.0.usual()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn window(samples: impl IntoIterator<Item = f64>) -> Window {
        let mut window = Window::default();
        for sample in samples {
            window.push(sample);
        }
        window
    }

    #[test]
    fn ten_minutes_are_needed() {
        assert_eq!(window((0..19).map(f64::from)).usual(), None);
        let usual = window((0..21).map(f64::from)).usual().expect("enough");
        assert_eq!(
            usual,
            Usual {
                median: 10.0,
                mad: 5.0
            }
        );
    }

    #[test]
    fn what_is_rare_does_not_move_it() {
        let steady = window((0..120).map(|at| if at % 3 == 0 { 1e12 } else { 40.0 }));
        assert_eq!(
            steady.usual(),
            Some(Usual {
                median: 40.0,
                mad: 0.0
            })
        );
        let odd = window(
            [f64::NAN, f64::INFINITY]
                .into_iter()
                .chain((0..20).map(|_| 1.0)),
        );
        assert_eq!(
            odd.usual(),
            Some(Usual {
                median: 1.0,
                mad: 0.0
            })
        );
    }

    #[test]
    fn an_hour_later_the_new_is_usual() {
        let mut window = window((0..120).map(|_| 10.0));
        for _ in 0..59 {
            window.push(20.0);
        }
        assert_eq!(window.usual().map(|usual| usual.median), Some(10.0));
        window.push(20.0);
        window.push(20.0);
        assert_eq!(window.usual().map(|usual| usual.median), Some(20.0));
    }

    #[test]
    fn tenants_come_and_go_and_launches_are_a_rate() {
        let mut baselines = Baselines::default();
        let key = ("a".to_owned(), 0);
        let seen = BTreeMap::from([(
            key,
            Seen {
                memory: 5.0,
                time: Some(0.5),
            },
        )]);
        for round in 1..=30_u64 {
            let second = round * STEP;
            assert!(baselines.is_due(second) && (round == 1 || !baselines.is_due(second - 1)));
            let launches = BTreeMap::from([("a".to_owned(), round * STEP * 100)]);
            baselines.sample(second, &seen, &launches);
        }
        let on_gpu = baselines.of("a", 0).expect("there");
        assert_eq!(
            on_gpu.time.usual(),
            Some(Usual {
                median: 0.5,
                mad: 0.0
            })
        );
        assert_eq!(on_gpu.memory.usual().map(|usual| usual.median), Some(5.0));
        assert_eq!(
            baselines.launches("a"),
            Some(Usual {
                median: 100.0,
                mad: 0.0
            })
        );
        baselines.sample(31 * STEP, &BTreeMap::new(), &BTreeMap::new());
        assert!(baselines.of("a", 0).is_none() && baselines.launches("a").is_none());
    }

    proptest! {
        /// Half of the window is no farther away than the deviation, and memory has a bound.
        #[test]
        fn half_is_within(samples in prop::collection::vec(0.0f64..1e12, 20..300)) {
            let window = window(samples.clone());
            prop_assert!(window.samples.capacity() <= WINDOW);
            let usual = window.usual().expect("enough");
            let within = window.samples.iter()
                .filter(|sample| (f64::from(**sample) - usual.median).abs() <= usual.mad)
                .count();
            prop_assert!(within * 2 >= window.samples.len());
            prop_assert!(window.samples.iter().any(|sample| f64::from(*sample) <= usual.median));
            prop_assert!(window.samples.iter().any(|sample| f64::from(*sample) >= usual.median));
        }
    }
}
