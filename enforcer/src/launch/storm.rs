//! Launch storms: a process that wants to launch far more than it may, for long.
//!
//! Pure. How fast a process would go is seen by the time between a launch that was not delayed and the next one; of
//! one whose launches are all delayed, by its launches over the time that is left when the delays are taken off.

use std::time::Duration;

/// What counts as a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// So many times the budget.
    pub factor: u32,
    /// For so long; and once it is calm for so long, the storm is over.
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
    /// Launches after one that was not delayed.
    pub thinks: u64,
    /// Nanoseconds between them and those before.
    pub think_ns: u64,
}

/// One process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch {
    last: Sample,
    state: State,
}

/// What a process is taken for; times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Calm,
    /// It goes too fast since then, which is not long enough yet.
    Rising { since_ns: u64 },
    /// It has been reported, and went too fast then for the last time. A busy host makes a process look calm for a moment.
    Storm { last_ns: u64 },
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
        let thinks = now.thinks.saturating_sub(last.thinks);
        let wanted = if thinks > 0 {
            per_second(thinks, now.think_ns.saturating_sub(last.think_ns))
        } else {
            let delay = now.delay_ns.saturating_sub(last.delay_ns);
            let undelayed = passed.saturating_sub(delay).max(passed / LEAST_SHARE);
            per_second(now.launches.saturating_sub(last.launches), undelayed)
        };
        let storms = now.delayed > last.delayed && wanted >= budget * f64::from(threshold.factor);
        let lasts = |since: u64| Duration::from_nanos(now.at_ns.saturating_sub(since));
        let (state, begins) = match self.state {
            State::Storm { .. } if storms => (State::Storm { last_ns: now.at_ns }, false),
            State::Storm { last_ns } if lasts(last_ns) < threshold.window => (self.state, false),
            _ if !storms => (State::Calm, false),
            State::Rising { since_ns } if lasts(since_ns) < threshold.window => (self.state, false),
            State::Calm if lasts(last.at_ns) < threshold.window => {
                let since_ns = last.at_ns;
                (State::Rising { since_ns }, false)
            }
            State::Calm | State::Rising { .. } | State::Storm { .. } => {
                (State::Storm { last_ns: now.at_ns }, true)
            }
        };
        self.state = state;
        begins.then_some(wanted)
    }
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn per_second(count: u64, nanos: u64) -> f64 {
    count as f64 / nanos.max(1) as f64 * 1e9
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
    fn a_pause_as_long_as_the_window_ends_it_and_the_next_one_is_reported_again() {
        let mut seconds = vec![(2000, 50); 6];
        seconds.extend([(10, 1000); 5]);
        seconds.extend([(2000, 50); 6]);
        assert_eq!(run(&seconds).iter().flatten().count(), 2);
    }

    #[test]
    fn a_process_that_a_busy_host_holds_up_for_a_moment_is_in_the_same_storm() {
        let mut seconds = vec![(2000, 50); 6];
        for _ in 0..3 {
            seconds.extend([(10, 1000); 4]);
            seconds.extend([(2000, 50); 6]);
        }
        assert_eq!(run(&seconds).iter().flatten().count(), 1);
    }

    #[test]
    fn a_moment_of_calm_keeps_a_storm_from_beginning() {
        let mut seconds = vec![(2000, 50); 4];
        seconds.push((10, 1000));
        seconds.extend([(2000, 50); 4]);
        assert!(run(&seconds).iter().all(Option::is_none));
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
            ..Sample::default()
        };
        let threshold = Threshold {
            factor: 10,
            window: Duration::ZERO,
        };
        assert_eq!(watch.observe(sample, 2000.0, threshold), None);
    }

    #[test]
    fn how_fast_a_process_goes_is_seen_between_its_delays() {
        let mut watch = Watch::new(Sample::default());
        let threshold = Threshold {
            factor: 10,
            window: Duration::ZERO,
        };
        // 100 launches 2 µs after the one before; the rest waited, and woke late.
        let sample = Sample {
            at_ns: SECOND,
            launches: 1000,
            delayed: 900,
            delay_ns: SECOND / 4,
            thinks: 100,
            think_ns: 200_000,
        };
        let wanted = watch.observe(sample, 1000.0, threshold);
        assert!(
            wanted.is_some_and(|wanted| (wanted - 500_000.0).abs() < 1.0),
            "{wanted:?}"
        );
    }
}
