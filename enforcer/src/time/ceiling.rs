//! Ceilings on GPU time: pure.
//!
//! A tenant with a ceiling runs for that part of every period and is frozen for the rest; one that leaves the GPU
//! alone is left alone too. [`starts`] spreads the parts of several tenants, so that one runs while the other is
//! frozen.
//!
//! The part is the ceiling itself, and no measurement makes it longer. NVML tells less of a process that is frozen
//! in between than it used (on an H200 12 % where it was 40 %), so a loop closed on it would let the tenant run for
//! far more than its ceiling. Beside others that want the GPU, a tenant gets its weight's share of its part.

use std::time::Duration;

/// A part of the period shorter than this is not worth the two controls that it costs.
const LEAST_PART: f64 = 0.01;
/// A part of a measured span below this is none.
const IDLE: f64 = 0.001;
/// Measurements in a row without any use after which a tenant is left alone.
const QUIET: u32 = 3;
/// Below this ceiling a tenant is never left alone: what it may use is less than what NVML misses.
const LEAST_SEEN: f64 = 0.1;

/// Controller of one ceiling.
#[derive(Clone, Debug)]
pub struct Ceiling {
    limit: f64,
    /// Measurements in a row in which the tenant did not use the GPU.
    quiet: u32,
    /// Seconds of thawed time that the tenant had too little, because the thread came late; negative: too much.
    owed: f64,
}

impl Ceiling {
    /// A ceiling of `limit`, between 0 and 1.
    pub fn new(limit: f64) -> Self {
        Self {
            limit: limit.clamp(LEAST_PART, 1.0),
            quiet: 0,
            owed: 0.0,
        }
    }

    /// The ceiling.
    pub fn limit(&self) -> f64 {
        self.limit
    }

    /// Changes the ceiling.
    pub fn set_limit(&mut self, limit: f64) {
        self.limit = limit.clamp(LEAST_PART, 1.0);
    }

    /// Takes a measurement: of a span, the part in which the tenant had the GPU.
    pub fn measured(&mut self, busy: f64) {
        self.quiet = if busy < IDLE {
            self.quiet.saturating_add(1)
        } else {
            0
        };
    }

    /// Without measurements a tenant is taken to want all the time it gets.
    pub fn unmeasured(&mut self) {
        self.quiet = 0;
    }

    /// The part of a period in which the tenant may run; 1 means that it need not be frozen at all.
    pub fn part(&self) -> f64 {
        let quiet = self.quiet >= QUIET && self.limit >= LEAST_SEEN;
        if quiet || self.limit > 1.0 - LEAST_PART {
            1.0
        } else {
            self.limit
        }
    }

    /// How long the tenant may run in the next period, with what is left over from the last ones.
    pub fn span(&self, period: Duration) -> Duration {
        let part = self.part();
        if part >= 1.0 {
            return period;
        }
        let wanted = part * period.as_secs_f64() + self.owed;
        Duration::from_secs_f64(wanted.clamp(0.0, period.as_secs_f64()))
    }

    /// Says how long the tenant really ran in a period: the thread that freezes may have come late.
    pub fn ran(&mut self, period: Duration, actual: Duration) {
        let part = self.part();
        if part >= 1.0 {
            self.owed = 0.0;
            return;
        }
        let most = period.as_secs_f64() / 2.0;
        let due = part * period.as_secs_f64();
        self.owed = (self.owed + due - actual.as_secs_f64()).clamp(-most, most);
    }
}

/// Where in the period each tenant's part begins, so that parts follow each other: as little as possible of them
/// overlaps, and so do the frozen rests.
pub fn starts(spans: &[Duration], period: Duration) -> Vec<Duration> {
    let mut at = Duration::ZERO;
    spans
        .iter()
        .map(|span| {
            let start = at;
            at += *span;
            while at >= period && !period.is_zero() {
                at -= period;
            }
            start
        })
        .collect()
}

/// Whether a tenant runs at `at` of the period, when its part begins at `start` and lasts `span`.
pub fn runs(at: Duration, start: Duration, span: Duration, period: Duration) -> bool {
    if span >= period {
        return true;
    }
    since(at, start, period) < span
}

/// Time from `at` until a tenant is to be frozen or thawed next; `None` if it never is.
pub fn until_edge(
    at: Duration,
    start: Duration,
    span: Duration,
    period: Duration,
) -> Option<Duration> {
    if span >= period || span.is_zero() {
        return None;
    }
    let passed = since(at, start, period);
    Some(if passed < span {
        span.saturating_sub(passed)
    } else {
        period.saturating_sub(passed)
    })
}

/// Time since the last start.
fn since(at: Duration, start: Duration, period: Duration) -> Duration {
    if at >= start {
        at.saturating_sub(start)
    } else {
        (at + period).saturating_sub(start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PERIOD: Duration = Duration::from_millis(100);

    #[test]
    fn a_tenant_that_uses_the_gpu_has_its_ceiling_whatever_is_measured() {
        for limit in [0.25, 0.5, 0.75] {
            let mut ceiling = Ceiling::new(limit);
            for busy in [0.9, 0.002, 0.1, 0.5] {
                assert_eq!(ceiling.span(PERIOD), PERIOD.mul_f64(limit));
                ceiling.measured(busy);
            }
        }
    }

    #[test]
    fn who_leaves_the_gpu_alone_is_left_alone_until_it_comes_back() {
        let mut ceiling = Ceiling::new(0.5);
        for _ in 0..QUIET {
            assert_eq!(ceiling.span(PERIOD), PERIOD / 2);
            ceiling.measured(0.0);
        }
        assert_eq!(ceiling.span(PERIOD), PERIOD);
        ceiling.measured(0.3);
        assert_eq!(ceiling.span(PERIOD), PERIOD / 2);
    }

    #[test]
    fn what_ran_too_long_is_taken_off_the_next_period() {
        let mut ceiling = Ceiling::new(0.5);
        let close = |span: Duration, ms: u64| {
            span.abs_diff(Duration::from_millis(ms)) < Duration::from_micros(1)
        };
        ceiling.ran(PERIOD, Duration::from_millis(53));
        assert!(close(ceiling.span(PERIOD), 47));
        ceiling.ran(PERIOD, Duration::from_millis(46));
        assert!(close(ceiling.span(PERIOD), 51));
    }

    #[test]
    fn without_measurements_the_ceiling_is_the_part() {
        let mut ceiling = Ceiling::new(0.4);
        for _ in 0..QUIET {
            ceiling.measured(0.0);
        }
        ceiling.unmeasured();
        assert!((ceiling.part() - 0.4).abs() < 1e-9);
    }

    #[test]
    fn parts_of_two_halves_do_not_meet() {
        let spans = [PERIOD / 2, PERIOD / 2];
        let starts = starts(&spans, PERIOD);
        for at in 0..100 {
            let at = Duration::from_millis(at);
            let running = (0..2)
                .filter(|index| runs(at, starts[*index], spans[*index], PERIOD))
                .count();
            assert_eq!(running, 1);
        }
    }

    #[test]
    fn a_low_ceiling_holds_although_its_use_is_not_seen() {
        let mut ceiling = Ceiling::new(0.02);
        for _ in 0..100 {
            ceiling.measured(0.0);
        }
        assert_eq!(ceiling.span(PERIOD), PERIOD / 50);
    }

    proptest! {
        /// No sequence of measurements lets a tenant run for more than its ceiling while it uses the GPU.
        #[test]
        fn no_measurement_lengthens_the_part(
            limit in 0.01..0.98f64,
            busy in prop::collection::vec(0.0..1.1f64, 1..50),
        ) {
            let mut ceiling = Ceiling::new(limit);
            for busy in busy {
                ceiling.measured(busy);
                prop_assert!(busy < IDLE || ceiling.part() <= limit);
            }
        }

        /// However late the thread is, over many periods the thawed time is what was planned.
        #[test]
        fn lateness_is_paid_back(limit in 0.1..0.9f64, late in prop::collection::vec(0..4000u64, 100)) {
            let mut ceiling = Ceiling::new(limit);
            let mut total = Duration::ZERO;
            for late in &late {
                let actual = ceiling.span(PERIOD) + Duration::from_micros(*late);
                ceiling.ran(PERIOD, actual);
                total += actual;
            }
            let wanted = PERIOD.mul_f64(limit) * 100;
            prop_assert!(total.abs_diff(wanted) < Duration::from_millis(10), "{total:?} for {wanted:?}");
        }

        /// In any period, every tenant runs for its span; and frozen rests of neighbours in the list do not meet.
        #[test]
        fn everybody_gets_their_span(parts in prop::collection::vec(1..100u64, 1..6)) {
            let spans: Vec<Duration> = parts.iter().map(|part| Duration::from_millis(*part)).collect();
            let starts = starts(&spans, PERIOD);
            for (start, span) in starts.iter().zip(&spans) {
                let ran = (0..100)
                    .filter(|at| runs(Duration::from_millis(*at), *start, *span, PERIOD))
                    .count();
                prop_assert_eq!(ran as u128, span.as_millis());
            }
            for index in 1..spans.len() {
                let both_frozen = (0..100).filter(|at| {
                    [index - 1, index]
                        .iter()
                        .all(|index| !runs(Duration::from_millis(*at), starts[*index], spans[*index], PERIOD))
                });
                let rest: Duration = [index - 1, index].iter().map(|index| PERIOD.saturating_sub(spans[*index])).sum();
                let unavoidable = rest.saturating_sub(PERIOD).as_millis();
                prop_assert!(both_frozen.count() as u128 <= unavoidable);
            }
        }

        #[test]
        fn edges_are_where_running_changes(start in 0..100u64, span in 1..100u64, at in 0..100u64) {
            let ms = Duration::from_millis;
            let edge = until_edge(ms(at), ms(start), ms(span), PERIOD).expect("it is frozen at times");
            let before = runs(ms(at), ms(start), ms(span), PERIOD);
            let mut then = ms(at) + edge;
            while then >= PERIOD {
                then -= PERIOD;
            }
            prop_assert!(edge > Duration::ZERO && edge <= PERIOD);
            prop_assert_ne!(before, runs(then, ms(start), ms(span), PERIOD));
        }
    }
}
