//! What is usual for a kernel, and when it is not. Pure.
//!
//! The usual is a median, of the first durations one by one and from then on of the medians of seconds: two minutes in which
//! the kernel was waited for. A change that stays is usual after about one of them, and one that comes slowly is no anomaly.

use std::time::Duration;

use crate::baseline::Window;

/// Durations of one second that are remembered, the last ones.
const IN_A_SECOND: usize = 64;
const SECOND_NS: u64 = 1_000_000_000;
/// What is no more than this above the usual is what schedulers do: nanoseconds.
pub const LEAST_NS: f64 = 1e6;
/// An episode ends once so many durations in a row, and nothing else for so long, were usual.
const CALM_COUNT: u32 = 20;
/// See `CALM_COUNT`.
pub const CALM: Duration = Duration::from_secs(10);
const CALM_NS: u64 = CALM.as_secs() * SECOND_NS;

/// What is known of one kernel.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    usual: Window,
    second: Vec<f64>,
    /// Durations in this second so far, and when it began.
    count: usize,
    second_ns: u64,
    episode: Option<Episode>,
    anomalies: u64,
}

#[derive(Clone, Copy, Debug)]
struct Episode {
    last_ns: u64,
    calm: u32,
}

impl Watch {
    /// A duration, in nanoseconds, of a wait that was over at a moment. Returns what is usual if an anomaly begins: the
    /// duration is more than `factor` times as long.
    pub fn observe(&mut self, at_ns: u64, duration_ns: f64, factor: f64) -> Option<f64> {
        let usual = self.usual_ns();
        self.learn(at_ns, duration_ns);
        let usual = usual?;
        if duration_ns > usual * factor && duration_ns - usual >= LEAST_NS {
            let before = self.episode.replace(Episode {
                last_ns: at_ns,
                calm: 0,
            });
            if before.is_none() {
                self.anomalies += 1;
                return Some(usual);
            }
        } else if let Some(episode) = &mut self.episode {
            episode.calm = episode.calm.saturating_add(1);
            if episode.calm >= CALM_COUNT && at_ns.saturating_sub(episode.last_ns) >= CALM_NS {
                self.episode = None;
            }
        }
        None
    }

    fn learn(&mut self, at_ns: u64, duration_ns: f64) {
        if self.usual.usual().is_none() {
            self.usual.push(duration_ns);
            self.second_ns = at_ns;
            return;
        }
        if at_ns.saturating_sub(self.second_ns) >= SECOND_NS {
            self.end_second();
            self.second_ns = at_ns;
        }
        let place = self.count % IN_A_SECOND;
        if place < self.second.len() {
            self.second[place] = duration_ns;
        } else {
            self.second.push(duration_ns);
        }
        self.count += 1;
    }

    fn end_second(&mut self) {
        self.second.sort_unstable_by(f64::total_cmp);
        if let Some(median) = self.second.get(self.second.len() / 2) {
            self.usual.push(*median);
        }
        self.second.clear();
        self.count = 0;
    }

    /// What was seen of the same kernel apart from this; `is_more`: what is usual is what that says.
    pub fn join(&mut self, other: &Self, is_more: bool) {
        let anomalies = self.anomalies + other.anomalies;
        if is_more {
            self.clone_from(other);
        }
        self.anomalies = anomalies;
    }

    /// What is usual, in nanoseconds; `None` before there is enough to tell by.
    pub fn usual_ns(&self) -> Option<f64> {
        self.usual.usual().map(|usual| usual.median)
    }

    /// Anomalies so far: episodes, however long.
    pub fn anomalies(&self) -> u64 {
        self.anomalies
    }

    /// Whether one goes on.
    pub fn is_unusual(&self) -> bool {
        self.episode.is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Durations one after the other, in milliseconds; how many anomalies there were.
    fn feed(watch: &mut Watch, at: &mut u64, durations: impl IntoIterator<Item = f64>) -> usize {
        durations
            .into_iter()
            .filter(|ms| {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a test's milliseconds"
                )]
                let ns = (ms * 1e6) as u64;
                *at += ns + MS;
                watch.observe(*at, ms * 1e6, 3.0).is_some()
            })
            .count()
    }

    #[test]
    fn a_slow_kernel_is_one_anomaly_however_long() {
        let (mut watch, mut at) = (Watch::default(), 0);
        assert_eq!(feed(&mut watch, &mut at, [50.0; 40]), 0);
        assert_eq!(feed(&mut watch, &mut at, [250.0; 8]), 1);
        assert!(watch.is_unusual());
        // Back, and slow again within the episode.
        assert_eq!(feed(&mut watch, &mut at, [50.0; 40]), 0);
        assert_eq!(feed(&mut watch, &mut at, [250.0; 2]), 0);
        assert_eq!(feed(&mut watch, &mut at, [50.0; 400]), 0);
        assert!(!watch.is_unusual());
        assert_eq!(feed(&mut watch, &mut at, [250.0]), 1);
        assert_eq!(watch.anomalies(), 2);
    }

    #[test]
    fn nothing_is_unusual_before_the_usual_is_known() {
        let (mut watch, mut at) = (Watch::default(), 0);
        assert_eq!(feed(&mut watch, &mut at, [5000.0, 1.0, 1.0, 900.0]), 0);
        assert_eq!(watch.usual_ns(), None);
    }

    #[test]
    fn what_schedulers_do_is_no_anomaly() {
        let (mut watch, mut at) = (Watch::default(), 0);
        assert_eq!(feed(&mut watch, &mut at, [0.025; 50]), 0);
        // 20 times as long, and less than a millisecond.
        assert_eq!(feed(&mut watch, &mut at, [0.5; 50]), 0);
        assert_eq!(feed(&mut watch, &mut at, [1.5]), 1);
    }

    #[test]
    fn a_slow_drift_is_none_and_a_change_that_stays_is_one() {
        let (mut watch, mut at) = (Watch::default(), 0);
        assert_eq!(feed(&mut watch, &mut at, [100.0; 100]), 0);
        // A percent a second: five times as long after some three minutes.
        let mut drift = 100.0;
        for _ in 0..170 {
            drift *= 1.01;
            assert_eq!(feed(&mut watch, &mut at, [drift; 5]), 0, "{drift}");
        }
        assert!(drift > 500.0);
        let (mut watch, mut at) = (Watch::default(), 0);
        assert_eq!(feed(&mut watch, &mut at, [100.0; 1200]), 0);
        assert_eq!(feed(&mut watch, &mut at, [500.0; 300]), 1);
        assert!(!watch.is_unusual(), "it is the usual by now");
        assert!((watch.usual_ns().expect("known") - 500e6).abs() < 1e6);
    }

    proptest! {
        /// Durations that vary by less than the factor are no anomaly, whatever their order, and memory has a bound.
        #[test]
        fn what_varies_less_is_none(durations in prop::collection::vec(10.0f64..29.0, 1..3000)) {
            let (mut watch, mut at) = (Watch::default(), 0);
            prop_assert_eq!(feed(&mut watch, &mut at, durations), 0);
            prop_assert!(watch.second.len() <= IN_A_SECOND);
        }

        /// Each anomaly is an episode apart from the one before.
        #[test]
        fn episodes_are_apart(slow in prop::collection::vec(any::<bool>(), 1..2000)) {
            let (mut watch, mut at) = (Watch::default(), 0);
            feed(&mut watch, &mut at, [10.0; 30]);
            let mut last: Option<u64> = None;
            for slow in slow {
                at += 11 * MS;
                if watch.observe(at, if slow { 60e6 } else { 10e6 }, 3.0).is_some() {
                    prop_assert!(last.is_none_or(|last| at - last >= CALM_NS));
                    last = Some(at);
                }
            }
        }
    }
}
