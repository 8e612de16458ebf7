//! Ceilings on GPU time: pure.
//!
//! A tenant with a ceiling runs for a part of every period and is frozen for the rest. [`Ceiling`] says how long
//! the part is: the ceiling itself to begin with, and then as much more as the tenant does not turn into GPU
//! time, because it has little work or because it shares the GPU. [`starts`] spreads the parts of several tenants,
//! so that one runs while the other is frozen.

use std::time::Duration;

/// A measurement that shows this much more GPU time per thawed time than was believed counts at once.
const JUMP: f64 = 0.2;
/// How much of a smaller difference is believed per measurement.
const TRUST: f64 = 0.3;
/// Thawed time that a tenant cannot turn into more GPU time than this factor. A freeze takes effect up to a
/// millisecond late, so it can be above 1; measurements beyond are errors.
const MOST_YIELD: f64 = 1.25;
/// A part of the period shorter than this is not worth the two controls that it costs.
const LEAST_PART: f64 = 0.01;

/// Controller of one ceiling.
#[derive(Clone, Debug)]
pub struct Ceiling {
    limit: f64,
    /// GPU time that the tenant gets out of thawed time.
    gain: f64,
    /// Seconds of thawed time that the tenant had too little, because the thread came late; negative: too much.
    owed: f64,
}

impl Ceiling {
    /// A ceiling of `limit`, between 0 and 1.
    pub fn new(limit: f64) -> Self {
        Self {
            limit: limit.clamp(LEAST_PART, 1.0),
            gain: 1.0,
            owed: 0.0,
        }
    }

    /// The ceiling.
    pub fn limit(&self) -> f64 {
        self.limit
    }

    /// Changes the ceiling and keeps what was learned.
    pub fn set_limit(&mut self, limit: f64) {
        self.limit = limit.clamp(LEAST_PART, 1.0);
    }

    /// Takes a measurement: of a span, the part in which the tenant was thawed, and the part in which it had the
    /// GPU.
    ///
    /// More GPU time than expected is acted on at once, less is believed slowly: too little for a moment is made
    /// up for, too much is not.
    pub fn measured(&mut self, thawed: f64, busy: f64) {
        if thawed < LEAST_PART {
            return;
        }
        let seen = (busy / thawed).clamp(0.0, MOST_YIELD);
        if seen > self.gain + JUMP {
            self.gain = seen;
        } else {
            self.gain += TRUST * (seen - self.gain);
        }
    }

    /// Without measurements a tenant is taken to use all the time it gets.
    pub fn unmeasured(&mut self) {
        self.gain = self.gain.max(1.0);
    }

    /// The part of a period in which the tenant may run; 1 means that it need not be frozen at all.
    pub fn part(&self) -> f64 {
        let part = self.limit / self.gain.max(LEAST_PART);
        if part > 1.0 - LEAST_PART {
            1.0
        } else {
            part.max(LEAST_PART)
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

    /// A tenant that turns `appetite` of the time it is thawed into GPU time.
    fn settle(ceiling: &mut Ceiling, appetite: f64, rounds: usize) -> f64 {
        for _ in 0..rounds {
            let part = ceiling.part();
            ceiling.measured(part, part * appetite);
        }
        ceiling.part() * appetite
    }

    #[test]
    fn a_saturating_tenant_has_its_ceiling_from_the_first_period_on() {
        for limit in [0.25, 0.5, 0.75] {
            let mut ceiling = Ceiling::new(limit);
            assert_eq!(ceiling.span(PERIOD), PERIOD.mul_f64(limit));
            assert!((settle(&mut ceiling, 1.0, 100) - limit).abs() < 1e-9);
        }
    }

    #[test]
    fn freezes_that_take_effect_late_are_made_up_for() {
        let mut ceiling = Ceiling::new(0.5);
        assert!((settle(&mut ceiling, 1.03, 50) - 0.5).abs() < 0.001);
    }

    #[test]
    fn a_tenant_below_its_ceiling_is_left_alone_until_it_bursts() {
        let mut ceiling = Ceiling::new(0.5);
        settle(&mut ceiling, 0.3, 50);
        assert_eq!(ceiling.span(PERIOD), PERIOD);
        // One measurement of more than that is enough.
        ceiling.measured(1.0, 1.0);
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
        settle(&mut ceiling, 0.1, 50);
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

    proptest! {
        /// Whatever part of its time the tenant turns into GPU time, it converges to the ceiling or to all it
        /// wants, and stays there.
        #[test]
        fn it_converges_and_does_not_oscillate(
            limit in 0.01..1.0f64,
            before in 0.0..1.1f64,
            appetite in 0.05..1.1f64,
        ) {
            let mut ceiling = Ceiling::new(limit);
            settle(&mut ceiling, before, 20);
            settle(&mut ceiling, appetite, 60);
            let got = ceiling.part() * appetite;
            let wanted = limit.min(appetite);
            prop_assert!((got - wanted).abs() < 0.02, "{got} for {wanted}");
            let mut previous = ceiling.part();
            for _ in 0..20 {
                settle(&mut ceiling, appetite, 1);
                prop_assert!((ceiling.part() - previous).abs() < 0.01);
                previous = ceiling.part();
            }
        }

        /// Noise of the measurement does not push a tenant away from its ceiling.
        #[test]
        fn noise_averages_out(limit in 0.2..0.9f64, noise in prop::collection::vec(-0.05..0.05f64, 200)) {
            let mut ceiling = Ceiling::new(limit);
            let mut sum = 0.0;
            for error in &noise {
                let part = ceiling.part();
                ceiling.measured(part, (part + error * part).max(0.0));
                sum += part;
            }
            let mean = sum / 200.0;
            prop_assert!((mean - limit).abs() < 0.02, "{mean} for {limit}");
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
