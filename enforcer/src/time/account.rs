//! GPU time used: pure.
//!
//! NVML tells the use of a GPU by process as percentages of spans. [`Answers`] turns them into time, [`Meter`] adds
//! up what belongs to one tenant on one GPU.

use std::{collections::VecDeque, time::Duration};

/// Longest history that a [`Meter`] keeps.
const KEPT: Duration = Duration::from_mins(1);

/// What NVML says of a process: percent of the span that ends at `at_us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Process.
    pub tgid: u32,
    /// End of the span, microseconds since 1970.
    pub at_us: u64,
    /// Percent of the span.
    pub percent: u32,
}

/// GPU time of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Process.
    pub tgid: u32,
    /// Begin of the span, microseconds since 1970.
    pub from_us: u64,
    /// End of the span.
    pub to_us: u64,
    /// Microseconds of GPU time in it.
    pub busy_us: u64,
}

/// Samples that end this close to each other belong to the same span, microseconds.
const SAME_SPAN_US: u64 = 10_000;
/// A span is taken to be no longer than this, microseconds, before it is known how long they are.
const LONGEST_SPAN_US: u64 = 1_000_000;
/// Samples come with a delay; what is older than this when asked for is not waited for, microseconds.
const LATEST_US: u64 = 3_000_000;

/// Follows the answers about one GPU, and turns them into time.
///
/// The driver answers "what since then" with one sample per process and span, or with one per process over all
/// that time. Both follow from when the spans end. A process that is left out was idle, and so was the time before
/// the first span after a silence.
#[derive(Clone, Debug)]
pub struct Answers {
    since_us: u64,
    /// How far spans are apart.
    apart_us: Option<u64>,
}

impl Answers {
    /// Starts to count at `now_us`, microseconds since 1970.
    pub fn new(now_us: u64) -> Self {
        Self {
            since_us: now_us,
            apart_us: None,
        }
    }

    /// What to ask for.
    pub fn since(&self) -> u64 {
        self.since_us
    }

    /// Takes an answer that was asked for at `asked_us`.
    pub fn take(&mut self, asked_us: u64, samples: &[Sample]) -> Vec<Busy> {
        let mut ends: Vec<u64> = samples
            .iter()
            .map(|sample| sample.at_us)
            .filter(|end| *end > self.since_us)
            .collect();
        ends.sort_unstable();
        ends.dedup_by(|later, earlier| *later - *earlier < SAME_SPAN_US);
        let starts: Vec<u64> = ends
            .iter()
            .scan(self.since_us, |before, end| {
                let apart = end - *before;
                let start = match self.apart_us {
                    Some(known) => (*before).max(end.saturating_sub(known + known / 2)),
                    None => (*before).max(end.saturating_sub(LONGEST_SPAN_US)),
                };
                if apart >= SAME_SPAN_US {
                    self.apart_us = Some(self.apart_us.map_or(apart, |known| {
                        // Slowly up, so that one long silence does not count as the rule.
                        if apart < known {
                            apart
                        } else {
                            known + (apart - known).min(known / 8)
                        }
                    }));
                }
                *before = *end;
                Some(start)
            })
            .collect();
        let busy = samples
            .iter()
            .filter(|sample| sample.at_us > self.since_us)
            .filter_map(|sample| {
                let span = ends
                    .partition_point(|end| *end <= sample.at_us)
                    .checked_sub(1)?;
                let (from_us, to_us) = (starts[span], ends[span]);
                Some(Busy {
                    tgid: sample.tgid,
                    from_us,
                    to_us,
                    busy_us: (to_us - from_us) * u64::from(sample.percent.min(100)) / 100,
                })
            })
            .collect();
        let newest = samples.iter().map(|sample| sample.at_us).max();
        self.since_us = self
            .since_us
            .max(newest.unwrap_or(0))
            .max(asked_us.saturating_sub(LATEST_US));
        busy
    }
}

/// GPU time of one tenant on one GPU.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    history: VecDeque<Busy>,
    total_us: u64,
}

impl Meter {
    /// Adds what a process used.
    pub fn add(&mut self, busy: Busy) {
        self.total_us = self.total_us.saturating_add(busy.busy_us);
        if busy.busy_us > 0 {
            self.history.push_back(busy);
        }
        let kept = u64::try_from(KEPT.as_micros()).unwrap_or(u64::MAX);
        while self
            .history
            .front()
            .is_some_and(|oldest| oldest.to_us.saturating_add(kept) < busy.to_us)
        {
            self.history.pop_front();
        }
    }

    /// All GPU time since the tenant is known.
    pub fn total(&self) -> Duration {
        Duration::from_micros(self.total_us)
    }

    /// GPU time between two moments, microseconds since 1970. Spans that are partly inside count in part.
    pub fn between(&self, from_us: u64, to_us: u64) -> Duration {
        let busy: u64 = self
            .history
            .iter()
            .map(|busy| {
                let inside = busy
                    .to_us
                    .min(to_us)
                    .saturating_sub(busy.from_us.max(from_us));
                let span = (busy.to_us - busy.from_us).max(1);
                busy.busy_us * inside / span
            })
            .sum();
        Duration::from_micros(busy)
    }

    /// Share of the GPU in the `window` that ends at `now_us`; the sum over processes, so more than 1 only by
    /// rounding.
    pub fn share(&self, now_us: u64, window: Duration) -> f64 {
        let length = u64::try_from(window.as_micros()).unwrap_or(u64::MAX);
        let busy = self.between(now_us.saturating_sub(length), now_us);
        busy.as_secs_f64() / window.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000;

    fn sample(tgid: u32, at_us: u64, percent: u32) -> Sample {
        Sample {
            tgid,
            at_us,
            percent,
        }
    }

    fn times(answers: &mut Answers, asked_us: u64, samples: &[Sample]) -> Vec<u64> {
        answers
            .take(asked_us, samples)
            .iter()
            .map(|busy| busy.busy_us)
            .collect()
    }

    #[test]
    fn one_sample_covers_all_the_time_that_was_asked_for() {
        let mut answers = Answers::new(SECOND);
        let first = [sample(1, 2 * SECOND, 30), sample(2, 2 * SECOND + 40, 70)];
        assert_eq!(
            times(&mut answers, 2 * SECOND + 100, &first),
            [300_000, 700_000]
        );
        assert_eq!(answers.since(), 2 * SECOND + 40);
        // Asked more often than the driver samples: nothing new, and nothing lost.
        assert!(times(&mut answers, 2 * SECOND + 500_000, &[]).is_empty());
        assert_eq!(answers.since(), 2 * SECOND + 40);
        let later = [sample(1, 3 * SECOND + 40, 50)];
        assert_eq!(times(&mut answers, 3 * SECOND + 100, &later), [500_000]);
    }

    #[test]
    fn several_samples_follow_each_other() {
        let samples = [
            sample(1, SECOND + 100_000, 100),
            sample(2, SECOND + 200_000, 50),
            sample(1, SECOND + 300_000, 10),
        ];
        let mut answers = Answers::new(SECOND);
        assert_eq!(
            times(&mut answers, 2 * SECOND, &samples),
            [100_000, 50_000, 10_000]
        );
    }

    #[test]
    fn what_was_counted_before_is_not_counted_again() {
        let mut answers = Answers::new(SECOND);
        let old = [sample(1, SECOND, 100), sample(1, SECOND - 1, 100)];
        assert!(times(&mut answers, SECOND, &old).is_empty());
    }

    #[test]
    fn a_span_after_a_silence_does_not_count_the_silence() {
        let mut answers = Answers::new(SECOND);
        let busy = [
            sample(1, SECOND + 100_000, 100),
            sample(1, SECOND + 200_000, 100),
        ];
        times(&mut answers, SECOND + 250_000, &busy);
        assert!(times(&mut answers, 60 * SECOND, &[]).is_empty());
        let after = times(
            &mut answers,
            60 * SECOND + 100_000,
            &[sample(1, 60 * SECOND + 50_000, 100)],
        );
        assert_eq!(after, [150_000]);
    }

    #[test]
    fn shares_are_of_their_window() {
        let mut meter = Meter::default();
        for index in 0..100 {
            let from_us = index * 100_000;
            let busy_us = if index >= 90 { 100_000 } else { 0 };
            meter.add(Busy {
                tgid: 1,
                from_us,
                to_us: from_us + 100_000,
                busy_us,
            });
        }
        let now = 10 * SECOND;
        let share = |seconds| meter.share(now, Duration::from_secs(seconds));
        assert!((share(1) - 1.0).abs() < 1e-9);
        assert!((share(10) - 0.1).abs() < 1e-9);
        assert!((share(60) - 1.0 / 60.0).abs() < 1e-9);
        assert_eq!(meter.total(), Duration::from_secs(1));
    }

    proptest! {
        /// However the samples are cut into answers, the same time is counted.
        #[test]
        fn no_time_is_lost_between_answers(
            percents in prop::collection::vec(0..=100u32, 1..200),
            cuts in prop::collection::vec(1..20usize, 1..40),
        ) {
            let samples: Vec<Sample> = percents
                .iter()
                .enumerate()
                .map(|(index, percent)| sample(1, SECOND + 100_000 * (index as u64 + 1), *percent))
                .collect();
            let mut meter = Meter::default();
            let (mut answers, mut at) = (Answers::new(SECOND), 0);
            for cut in cuts.iter().cycle() {
                let end = (at + cut).min(samples.len());
                let asked = samples[end - 1].at_us;
                for busy in answers.take(asked, &samples[..end]) {
                    meter.add(busy);
                }
                at = end;
                if at == samples.len() {
                    break;
                }
            }
            let expected: u64 = percents.iter().map(|percent| u64::from(*percent) * 1000).sum();
            prop_assert_eq!(meter.total(), Duration::from_micros(expected));
        }
    }
}
