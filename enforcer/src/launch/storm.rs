//! Launch storms: a process that wants to launch far more than it may, for long.
//!
//! Pure. A process that is delayed shows how fast it would go by how fast it goes while it is not delayed: its launches
//! over the time that is left when the delays are taken off.

use std::time::Duration;

/// What counts as a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// So many times the budget.
    pub factor: u32,
    /// For so long.
    pub window: Duration,
}

/// Counts of a process at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// Launches so far.
    pub launches: u64,
    /// Launches that were delayed.
    pub delayed: u64,
    /// Nanoseconds of delay so far.
    pub delay_ns: u64,
}

/// One process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch {
    last: Sample,
    /// Since when it goes too fast.
    since_ns: Option<u64>,
    reported: bool,
}

/// The delays leave at least one part in this many of the time; threads that wait side by side add up to more than
/// there is.
const LEAST_SHARE: u64 = 20;

impl Watch {
    /// Begins to watch.
    pub fn new(first: Sample) -> Self {
        Self {
            last: first,
            ..Self::default()
        }
    }

    /// Takes the next counts; returns how many launches a second the process wants when a storm begins.
    pub fn observe(&mut self, now: Sample, budget: f64, threshold: Threshold) -> Option<f64> {
        let last = std::mem::replace(&mut self.last, now);
        let passed = now.at_ns.saturating_sub(last.at_ns);
        if passed == 0 {
            return None;
        }
        let delay = now.delay_ns.saturating_sub(last.delay_ns);
        let undelayed = passed
            .saturating_sub(delay)
            .max(passed / LEAST_SHARE)
            .max(1);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let wanted = now.launches.saturating_sub(last.launches) as f64 / undelayed as f64 * 1e9;
        let storms = now.delayed > last.delayed && wanted >= budget * f64::from(threshold.factor);
        if !storms {
            self.since_ns = None;
            self.reported = false;
            return None;
        }
        let since = *self.since_ns.get_or_insert(last.at_ns);
        let lasts = Duration::from_nanos(now.at_ns.saturating_sub(since));
        if self.reported || lasts < threshold.window {
            return None;
        }
        self.reported = true;
        Some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: Threshold = Threshold {
        factor: 10,
        window: Duration::from_secs(5),
    };
    const SECOND: u64 = 1_000_000_000;

    /// A second each with so many launches, the first part of it undelayed.
    fn run(seconds: &[(u64, u64)]) -> Vec<Option<f64>> {
        let mut watch = Watch::new(Sample::default());
        let mut sum = Sample::default();
        seconds
            .iter()
            .map(|(launches, undelayed_ms)| {
                sum.at_ns += SECOND;
                sum.launches += launches;
                sum.delayed += u64::from(*undelayed_ms < 1000);
                sum.delay_ns += SECOND - undelayed_ms * 1_000_000;
                watch.observe(sum, 2000.0, THRESHOLD)
            })
            .collect()
    }

    #[test]
    fn a_storm_is_reported_once_when_it_has_lasted() {
        // 2000 launches in 50 ms are 40,000 a second.
        let seen = run(&[(2000, 50); 8]);
        assert_eq!(seen.iter().flatten().count(), 1);
        assert!(
            seen[4].is_some_and(|wanted| (wanted - 40_000.0).abs() < 1.0),
            "{seen:?}"
        );
    }

    #[test]
    fn what_is_a_little_too_fast_is_no_storm() {
        assert!(run(&[(2000, 500); 20]).iter().all(Option::is_none));
        assert!(run(&[(2000, 1000); 20]).iter().all(Option::is_none));
    }

    #[test]
    fn a_pause_ends_it_and_the_next_one_is_reported_again() {
        let mut seconds = vec![(2000, 50); 6];
        seconds.push((10, 1000));
        seconds.extend([(2000, 50); 6]);
        assert_eq!(run(&seconds).iter().flatten().count(), 2);
    }

    #[test]
    fn threads_that_wait_side_by_side_do_not_make_a_storm_of_nothing() {
        // Sixteen threads wait all the time: at most twenty times the rate is believed.
        let mut watch = Watch::new(Sample::default());
        let sample = Sample {
            at_ns: SECOND,
            launches: 900,
            delayed: 900,
            delay_ns: 16 * SECOND,
        };
        let threshold = Threshold {
            factor: 10,
            window: Duration::ZERO,
        };
        assert_eq!(watch.observe(sample, 2000.0, threshold), None);
    }
}
