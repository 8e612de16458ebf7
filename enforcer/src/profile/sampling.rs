//! When the probes of a process are in it, so that they cost no more than a part of its time. Pure.
//!
//! What a probe costs is the breakpoint, not the program behind it, so launches are not sampled one by one but in stretches
//! of time: the probes are in the process until what they have cost is used up, and out of it until enough for another
//! stretch has been saved. A process that launches seldom has them all the time.

/// The least stretch with probes, and the pause between two looks at what they have cost: nanoseconds.
pub const STRETCH_NS: u64 = 100_000_000;
/// What is not used is saved for so long: nanoseconds.
const HORIZON_NS: f64 = 10e9;
/// What a process begins with: what it saves in this time.
const BEGINS_WITH_NS: f64 = 1e9;

/// The account of one process.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Part of its time that may be spent.
    budget: f64,
    /// Nanoseconds that may be spent now; negative if too much was.
    credit: f64,
    last_ns: u64,
    /// What was spent until then.
    spent: u64,
    /// Whether the probes are in.
    on: bool,
    /// Nanoseconds a nanosecond that they cost lately.
    rate: f64,
    /// When it began, and how long the probes were in since.
    began_ns: u64,
    on_ns: u64,
}

/// What to do with the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Leave them as they are.
    Stay,
    /// Put them in.
    In,
    /// Take them out.
    Out,
}

impl Sampling {
    /// Begins with probes in the process, with a budget from 0 to 1.
    pub fn new(budget: f64, now_ns: u64) -> Self {
        Self {
            budget,
            credit: budget * BEGINS_WITH_NS,
            last_ns: now_ns,
            spent: 0,
            on: true,
            rate: 0.0,
            began_ns: now_ns,
            on_ns: 0,
        }
    }

    /// Another budget holds.
    pub fn set_budget(&mut self, budget: f64) {
        self.budget = budget;
        self.credit = self.credit.min(budget * HORIZON_NS);
    }

    /// Looks at what was spent since the beginning, and says what to do.
    #[expect(
        clippy::cast_precision_loss,
        reason = "nanoseconds between two looks, and what is spent in them"
    )]
    pub fn look(&mut self, now_ns: u64, spent: u64) -> Order {
        let elapsed = now_ns.saturating_sub(self.last_ns);
        let newly = spent.saturating_sub(self.spent);
        (self.last_ns, self.spent) = (now_ns.max(self.last_ns), spent.max(self.spent));
        let saved = self.budget * elapsed as f64;
        self.credit = (self.credit + saved - newly as f64).min(self.budget * HORIZON_NS);
        if self.on {
            self.on_ns += elapsed;
            if elapsed > 0 {
                let rate = newly as f64 / elapsed as f64;
                // The last stretch counts half: a burst is not what always comes.
                self.rate = if self.rate == 0.0 {
                    rate
                } else {
                    f64::midpoint(self.rate, rate)
                };
            }
            if self.credit < 0.0 {
                self.on = false;
                return Order::Out;
            }
        } else if self.credit >= self.stretch() {
            self.on = true;
            return Order::In;
        }
        Order::Stay
    }

    /// The probes could not be put in: they are tried again later.
    pub fn put_off(&mut self) {
        self.on = false;
        self.credit = self
            .credit
            .min(self.stretch() - self.budget * BEGINS_WITH_NS);
    }

    /// What a stretch costs, as far as that can be saved.
    fn stretch(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a constant far below 2^53")]
        let stretch = self.rate * STRETCH_NS as f64;
        stretch.min(self.budget * HORIZON_NS * 0.9)
    }

    /// Whether the probes are to be in the process.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Part of the time that the probes were in the process.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn covered(&self) -> f64 {
        match self.last_ns.saturating_sub(self.began_ns) {
            0 => 1.0,
            whole => (self.on_ns as f64 / whole as f64).min(1.0),
        }
    }

    /// Part of the time that the probes have cost.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn cost(&self) -> f64 {
        match self.last_ns.saturating_sub(self.began_ns) {
            0 => 0.0,
            whole => self.spent as f64 / whole as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP: u64 = 50_000_000;

    /// Goes through stretches of cost rates (nanoseconds a nanosecond while the probes are in); returns what was spent and
    /// how long it took.
    fn run(sampling: &mut Sampling, rates: &[f64], step: u64) -> (u64, u64) {
        let (mut now, mut spent) = (0, 0_u64);
        for rate in rates {
            let was_on = sampling.is_on();
            now += step;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a test's numbers"
            )]
            if was_on {
                spent += (rate * step as f64) as u64;
            }
            sampling.look(now, spent);
        }
        (spent, now)
    }

    #[test]
    fn who_launches_seldom_has_probes_all_the_time() {
        let mut sampling = Sampling::new(0.01, 0);
        run(&mut sampling, &[0.009; 1000], STEP);
        assert!(sampling.is_on());
        assert!((sampling.covered() - 1.0).abs() < 1e-9);
        assert!((sampling.cost() - 0.009).abs() < 1e-4);
    }

    #[test]
    fn who_launches_much_has_them_a_part_of_the_time() {
        let mut sampling = Sampling::new(0.01, 0);
        let (spent, whole) = run(&mut sampling, &vec![0.1; 6000], STEP);
        #[expect(clippy::cast_precision_loss, reason = "a test's numbers")]
        let cost = spent as f64 / whole as f64;
        assert!((0.009..=0.0102).contains(&cost), "{cost}");
        assert!(
            (0.08..0.13).contains(&sampling.covered()),
            "{}",
            sampling.covered()
        );
    }

    #[test]
    fn a_new_budget_holds_from_then_on() {
        let mut sampling = Sampling::new(1.0, 0);
        run(&mut sampling, &[0.1; 100], STEP);
        assert!(sampling.is_on());
        sampling.set_budget(0.001);
        let (mut now, mut spent) = (100 * STEP, 500_000_000);
        let before = spent;
        for _ in 0..4000 {
            now += STEP;
            if sampling.is_on() {
                spent += STEP / 10;
            }
            sampling.look(now, spent);
        }
        // Ten seconds of the new budget may be saved, and one look may be too late.
        assert!(spent - before <= 200_000_000 + 10_000_000 + STEP / 10);
    }

    #[test]
    fn what_could_not_be_put_in_is_tried_again_a_second_later() {
        let mut sampling = Sampling::new(0.01, 0);
        run(&mut sampling, &[0.005; 100], STEP);
        sampling.put_off();
        let begin = 100 * STEP;
        let spent = sampling.spent;
        let tried = (1..100).find(|at| sampling.look(begin + at * STEP, spent) == Order::In);
        assert!(tried.is_some_and(|at| (20..=22).contains(&at)), "{tried:?}");
    }

    #[test]
    fn a_clock_that_stands_still_is_no_reason_to_change() {
        let mut sampling = Sampling::new(0.01, 5);
        assert_eq!(sampling.look(5, 0), Order::Stay);
        assert_eq!(sampling.look(3, 0), Order::Stay);
        assert!((sampling.covered() - 1.0).abs() < 1e-9 && sampling.cost() == 0.0);
    }

    proptest! {
        /// Whatever comes: no more is spent than the budget of the whole time, what was saved, and one look too late.
        #[test]
        fn the_budget_holds(
            budget in 0.0001f64..0.2,
            rates in prop::collection::vec(prop_oneof![Just(0.0), 0.0f64..0.02, 0.02f64..0.9], 1..600),
        ) {
            let mut sampling = Sampling::new(budget, 0);
            let (spent, whole) = run(&mut sampling, &rates, STEP);
            #[expect(clippy::cast_precision_loss, reason = "a test's numbers")]
            let (spent, whole, step) = (spent as f64, whole as f64, STEP as f64);
            prop_assert!(spent <= budget * (whole + BEGINS_WITH_NS) + step, "{spent} of {whole}");
        }

        /// Who was put out comes in again as soon as what is owed and a stretch have been saved.
        #[test]
        fn nobody_stays_out(budget in 0.001f64..0.2, rate in 0.21f64..0.9) {
            let mut sampling = Sampling::new(budget, 0);
            run(&mut sampling, &[rate; 400], STEP);
            #[expect(clippy::cast_precision_loss, reason = "a test's numbers")]
            let (step, stretch) = (STEP as f64, STRETCH_NS as f64);
            let most = rate * (2.0 * step + stretch) / budget;
            let (spent, mut now, mut waited) = (sampling.spent, 400 * STEP, 0.0);
            while !sampling.is_on() {
                now += STEP;
                waited += step;
                sampling.look(now, spent);
                prop_assert!(waited <= most, "{waited} of {most}");
            }
        }
    }
}
