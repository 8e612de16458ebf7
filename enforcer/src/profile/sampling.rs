//! When probes of a process are in it, so that they cost no more than a part of its time. Pure.
//!
//! What a probe costs is the breakpoint, not the program behind it, so calls are not sampled one by one but in stretches
//! of time: the probes are in the process until what they have cost is used up, and out of it until enough for another
//! stretch has been saved. A process that calls seldom has them all the time.
//!
//! A stretch has a price beyond its length: breakpoints stay for a while after the order to take them out, since the kernel
//! waits for all its processors first, and putting them in and out takes time too. Both are learned and paid for in
//! advance. What the first stretch costs nobody knows, so it is short, and each is at most twice as long as the one before.

/// The longest stretch that is waited for: nanoseconds. It goes on for as long as it can be paid.
pub const STRETCH_NS: u64 = 100_000_000;
/// The first stretch of those whose first one came to its end.
const SHORT_NS: u64 = 5_000_000;
/// What is not used is saved for so long: nanoseconds.
const HORIZON_NS: f64 = 10e9;
/// What probes may cost before it has been saved.
#[derive(Clone, Copy, Debug)]
pub struct Loan {
    /// What is saved in this time: nanoseconds.
    pub of_ns: f64,
    /// It is less and less, and nothing after this time.
    pub over_ns: f64,
}

impl Loan {
    /// Short, so that looks of a second keep to the budget.
    pub const SHORT: Self = Self {
        of_ns: 250e6,
        over_ns: 1e9,
    };
    /// For calls that are rare but for the beginning of a program, and whose budget is a small part of one that others have to
    /// keep to, who pay for it.
    pub const LONG: Self = Self {
        of_ns: 2e9,
        over_ns: 20e9,
    };
}

/// How long breakpoints stay after the order to take them out, until it is known.
const TAIL_NS: f64 = 20e6;
/// Longer than that is no property of the host.
const LONGEST_TAIL_NS: f64 = 2e9;
/// Time between two looks at what was spent: nanoseconds.
const OFTEN_NS: u64 = 2_000_000;
/// See `OFTEN_NS`.
pub const SELDOM_NS: u64 = 20_000_000;
/// Part of its time that a process may begin to spend from one moment to the next without that being noticed late.
const SUDDEN: f64 = 0.2;

/// What was spent since the beginning: nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// On hits of these probes.
    pub hits: u64,
    /// On putting them in and out.
    pub changes: u64,
    /// On other probes that have to be paid from the same budget.
    pub others: u64,
}

impl Spent {
    /// All of it.
    pub const fn all(self) -> u64 {
        self.hits
            .saturating_add(self.changes)
            .saturating_add(self.others)
    }
}

/// Where the probes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// They are being put in.
    Coming,
    /// They are in.
    In,
    /// They are being taken out.
    Leaving,
    /// They are out.
    Out,
}

/// The account of probes in one process that come and go together.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Part of its time that may be spent.
    budget: f64,
    loan: Loan,
    /// Nanoseconds that may be spent now; negative if too much was.
    credit: f64,
    last_ns: u64,
    /// What was spent until then.
    spent: Spent,
    phase: Phase,
    /// Nanoseconds a nanosecond that hits cost lately while the probes are in, and most lately. `None`: not known yet.
    rate: Option<f64>,
    latest: f64,
    /// Looks of this stretch.
    looks: u32,
    /// How long breakpoints stay after the order to take them out, and what they have cost since the last such order.
    tail_ns: f64,
    tail_hits: u64,
    /// How long the next stretch is to be.
    length_ns: u64,
    stretches: u32,
    /// When they were first in, and how long they were since.
    began_ns: Option<u64>,
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

/// Nanoseconds as they are divided. Exact up to 100 days.
#[expect(
    clippy::cast_precision_loss,
    reason = "what is spent in a look is far below 2^53 nanoseconds"
)]
fn ns(nanoseconds: u64) -> f64 {
    nanoseconds as f64
}

impl Sampling {
    /// Begins with probes that are being put in, with a budget from 0 to 1.
    pub fn new(budget: f64, loan: Loan) -> Self {
        Self {
            budget,
            loan,
            credit: 0.0,
            last_ns: 0,
            spent: Spent::default(),
            phase: Phase::Coming,
            rate: None,
            latest: 0.0,
            looks: 0,
            tail_ns: TAIL_NS,
            tail_hits: 0,
            length_ns: SHORT_NS,
            stretches: 1,
            began_ns: None,
            on_ns: 0,
        }
    }

    /// Another budget holds.
    pub fn set_budget(&mut self, budget: f64) {
        self.budget = budget;
        self.credit = self.credit.min(budget * HORIZON_NS);
    }

    /// The probes are in.
    pub fn came(&mut self, now_ns: u64, spent: Spent) {
        if self.began_ns.is_none() {
            (self.began_ns, self.last_ns) = (Some(now_ns), now_ns);
        }
        self.account(now_ns, spent);
        if self.phase == Phase::Coming {
            (self.phase, self.looks) = (Phase::In, 0);
        }
    }

    /// The probes are out.
    pub fn left(&mut self, now_ns: u64, spent: Spent) {
        let (_, hits) = self.account(now_ns, spent);
        if self.phase != Phase::Leaving {
            return;
        }
        self.tail_hits += hits;
        self.phase = Phase::Out;
        // Who has just stopped to call tells nothing of how long breakpoints stay.
        if self.latest > 0.0 {
            let seen = ns(self.tail_hits) / self.latest;
            self.tail_ns = seen.max(0.75 * self.tail_ns).min(LONGEST_TAIL_NS);
        }
    }

    /// The probes could not be put in: they are tried again later.
    pub fn put_off(&mut self) {
        self.phase = Phase::Out;
        self.credit = self.credit.min(self.price() - self.budget * 1e9);
    }

    /// Looks at what was spent since the beginning, and says what to do.
    pub fn look(&mut self, now_ns: u64, spent: Spent) -> Order {
        let (elapsed, hits) = self.account(now_ns, spent);
        match self.phase {
            Phase::In => {
                self.on_ns += elapsed;
                self.learn(elapsed, hits);
                if self.credit + self.loan() >= self.foreseen() {
                    return Order::Stay;
                }
                (self.phase, self.tail_hits) = (Phase::Leaving, 0);
                Order::Out
            }
            Phase::Leaving => {
                self.tail_hits += hits;
                Order::Stay
            }
            Phase::Out if self.credit >= self.price() => {
                self.phase = Phase::Coming;
                self.stretches = self.stretches.saturating_add(1);
                self.length_ns = (2 * self.length_ns).min(STRETCH_NS);
                Order::In
            }
            Phase::Out | Phase::Coming => Order::Stay,
        }
    }

    /// Books what was spent; returns how long that took, and what hits have cost in it.
    fn account(&mut self, now_ns: u64, spent: Spent) -> (u64, u64) {
        if self.began_ns.is_none() {
            return (0, 0);
        }
        let elapsed = now_ns.saturating_sub(self.last_ns);
        let newly = spent.all().saturating_sub(self.spent.all());
        let hits = spent.hits.saturating_sub(self.spent.hits);
        self.last_ns = now_ns.max(self.last_ns);
        self.spent = spent;
        let most = (self.budget * HORIZON_NS).max(self.price());
        self.credit = (self.credit + self.budget * ns(elapsed) - ns(newly)).min(most);
        (elapsed, hits)
    }

    fn learn(&mut self, elapsed: u64, hits: u64) {
        if elapsed == 0 {
            return;
        }
        self.looks = self.looks.saturating_add(1);
        self.latest = ns(hits) / ns(elapsed);
        // The more the longer: a burst is not what always comes.
        let weight = ns(elapsed) / ns(elapsed + SELDOM_NS);
        self.rate = Some(
            self.rate
                .map_or(self.latest, |rate| weight.mul_add(self.latest - rate, rate)),
        );
    }

    /// Nanoseconds a nanosecond that hits are taken to cost: what they cost usually, or most lately if that was more.
    fn forecast(&self) -> f64 {
        self.rate.unwrap_or(0.0).max(self.latest)
    }

    /// What may be spent without having been saved.
    fn loan(&self) -> f64 {
        let part = 1.0 - ns(self.age()) / self.loan.over_ns;
        self.budget * self.loan.of_ns * part.max(0.0)
    }

    /// What will have been spent when the probes are out, if they are taken out at the next look.
    fn foreseen(&self) -> f64 {
        self.forecast() * (ns(self.next_ns()) + self.tail_ns) + self.change()
    }

    /// What the next stretch costs. It is shorter than it should be where it would take long to save so much.
    fn price(&self) -> f64 {
        let rate = self.forecast();
        let fixed = rate * self.tail_ns + 2.0 * self.change();
        let most = 0.9 * self.budget * HORIZON_NS - fixed;
        let stretch = rate * ns(self.length_ns);
        fixed + stretch.min(most.max(rate * ns(OFTEN_NS)))
    }

    /// What putting the probes in, or out, costs.
    fn change(&self) -> f64 {
        ns(self.spent.changes) / (2.0 * f64::from(self.stretches))
    }

    /// When to look again: nanoseconds from now.
    pub fn next_ns(&self) -> u64 {
        if self.phase != Phase::In {
            return SELDOM_NS;
        }
        if self.looks < 2 {
            return OFTEN_NS;
        }
        let until = (self.credit + self.loan()).max(0.0) / (4.0 * self.forecast()).max(SUDDEN);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and bounded in the same line"
        )]
        let until = until.min(ns(SELDOM_NS)) as u64;
        until.max(OFTEN_NS)
    }

    /// Whether the probes are in the process, or about to be.
    pub fn is_on(&self) -> bool {
        matches!(self.phase, Phase::Coming | Phase::In)
    }

    fn age(&self) -> u64 {
        self.began_ns
            .map_or(0, |began| self.last_ns.saturating_sub(began))
    }

    /// Part of the time that the probes were in the process.
    pub fn covered(&self) -> f64 {
        match self.age() {
            0 => 1.0,
            whole => (ns(self.on_ns) / ns(whole)).min(1.0),
        }
    }

    /// Part of the time that was spent, on other probes too.
    pub fn cost(&self) -> f64 {
        match self.age() {
            0 => 0.0,
            whole => ns(self.spent.all()) / ns(whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    /// Steps of the model of a host.
    const STEP: u64 = MS / 2;

    /// A host on which probes take a while to come and to go.
    #[derive(Clone, Copy)]
    struct Host {
        /// From the order to put in until they are in.
        comes: u64,
        /// From the order to take out until the breakpoints are gone, and until that is known.
        goes: u64,
        known: u64,
        /// What either costs.
        change: u64,
    }

    const QUICK: Host = Host {
        comes: 10 * MS,
        goes: 15 * MS,
        known: 60 * MS,
        change: 100_000,
    };

    /// Probes and what they do to a process.
    struct Model {
        host: Host,
        sampling: Sampling,
        spent: Spent,
        now: u64,
        due: u64,
        /// Breakpoints are in from then on, and until then.
        from: u64,
        until: u64,
        told: Option<(u64, Order)>,
        stretches: u32,
    }

    impl Model {
        fn new(budget: f64, host: Host) -> Self {
            Self::lent(budget, Loan::SHORT, host)
        }

        fn lent(budget: f64, loan: Loan, host: Host) -> Self {
            let mut sampling = Sampling::new(budget, loan);
            sampling.came(0, Spent::default());
            Self {
                host,
                sampling,
                spent: Spent::default(),
                now: 0,
                due: OFTEN_NS,
                from: 0,
                until: u64::MAX,
                told: None,
                stretches: 1,
            }
        }

        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a test's numbers"
        )]
        fn step(&mut self, rate: f64, others: f64) {
            self.now += STEP;
            if self.now > self.from && self.now <= self.until {
                self.spent.hits += (rate * ns(STEP)) as u64;
            }
            self.spent.others += (others * ns(STEP)) as u64;
            if let Some((at, order)) = self.told
                && self.now >= at
            {
                self.spent.changes += self.host.change;
                match order {
                    Order::In => self.sampling.came(self.now, self.spent),
                    _ => self.sampling.left(self.now, self.spent),
                }
                self.told = None;
                self.due = self.now + self.sampling.next_ns();
            }
            if self.now >= self.due {
                match self.sampling.look(self.now, self.spent) {
                    Order::In => {
                        (self.from, self.until) = (self.now + self.host.comes, u64::MAX);
                        self.told = Some((self.from, Order::In));
                        self.stretches += 1;
                    }
                    Order::Out => {
                        self.until = self.now + self.host.goes;
                        self.told = Some((self.now + self.host.known, Order::Out));
                    }
                    Order::Stay => {}
                }
                self.due = self.now + self.sampling.next_ns();
            }
        }

        fn run(&mut self, rate: f64, ms: u64) {
            for _ in 0..ms * MS / STEP {
                self.step(rate, 0.0);
            }
        }

        fn part(&self) -> f64 {
            ns(self.spent.all()) / ns(self.now)
        }
    }

    #[test]
    fn who_launches_seldom_has_probes_all_the_time() {
        for rate in [0.0, 0.001, 0.008] {
            let mut model = Model::new(0.01, QUICK);
            model.run(rate, 20_000);
            assert!(model.sampling.is_on() && model.stretches == 1);
            assert!((model.sampling.covered() - 1.0).abs() < 1e-9);
            assert!((model.sampling.cost() - rate).abs() < 1e-4);
        }
    }

    #[test]
    fn who_launches_much_has_them_a_part_of_the_time() {
        let mut model = Model::new(0.01, QUICK);
        model.run(0.1, 120_000);
        assert!((0.008..=0.01).contains(&model.part()), "{}", model.part());
        // What breakpoints cost while they leave is not in what is seen.
        let covered = model.sampling.covered();
        assert!((0.06..0.1).contains(&covered), "{covered}");
    }

    #[test]
    fn a_training_keeps_within_its_budget_over_two_seconds_too() {
        let mut model = Model::new(0.01, QUICK);
        model.run(0.38, 2000);
        assert!(model.part() <= 0.01, "{}", model.part());
        assert!(model.stretches >= 2, "{}", model.stretches);
    }

    #[test]
    fn a_program_that_begins_may_ask_for_all_its_kernels() {
        let eighth = 0.01 / 8.0;
        let mut model = Model::lent(eighth, Loan::LONG, QUICK);
        // A thousand calls a second, and then none.
        model.run(0.004, 500);
        model.run(0.0, 5000);
        assert_eq!((model.sampling.is_on(), model.stretches), (true, 1));
        // Who goes on to ask for kernels is not asked all the time for that.
        let mut model = Model::lent(eighth, Loan::LONG, QUICK);
        for second in 1..60_u64 {
            model.run(0.1, 1000);
            let may = eighth * (ns(second * 1000 * MS) + Loan::LONG.of_ns);
            assert!(ns(model.spent.all()) <= may, "{second}");
        }
        assert!(
            model.part() <= eighth && model.stretches > 2,
            "{}",
            model.part()
        );
    }

    #[test]
    fn a_new_budget_holds_from_then_on() {
        let mut model = Model::new(1.0, QUICK);
        model.run(0.1, 5000);
        assert!(model.sampling.is_on());
        model.sampling.set_budget(0.001);
        let before = model.spent.all();
        model.run(0.1, 200_000);
        // Ten seconds of the new budget may be saved.
        let spent = model.spent.all() - before;
        assert!(spent <= 210 * MS, "{spent}");
    }

    #[test]
    fn what_could_not_be_put_in_is_tried_again_a_second_later() {
        let mut sampling = Sampling::new(0.01, Loan::SHORT);
        sampling.came(0, Spent::default());
        sampling.put_off();
        let tried = (1..200).find(|at| sampling.look(at * 20 * MS, Spent::default()) == Order::In);
        assert!(tried.is_some_and(|at| (49..=51).contains(&at)), "{tried:?}");
    }

    #[test]
    fn a_clock_that_stands_still_is_no_reason_to_change() {
        let mut sampling = Sampling::new(0.01, Loan::SHORT);
        sampling.came(5, Spent::default());
        assert_eq!(sampling.look(5, Spent::default()), Order::Stay);
        assert_eq!(sampling.look(3, Spent::default()), Order::Stay);
        assert!((sampling.covered() - 1.0).abs() < 1e-9 && sampling.cost() == 0.0);
    }

    #[test]
    fn hosts_that_take_probes_out_slowly_have_them_less_often() {
        let slow = Host {
            goes: 400 * MS,
            known: 1200 * MS,
            ..QUICK
        };
        let mut model = Model::new(0.01, slow);
        model.run(0.2, 300_000);
        assert!(model.part() <= 0.0105, "{}", model.part());
        assert!(model.stretches > 2, "{}", model.stretches);
    }

    fn rates() -> impl Strategy<Value = f64> {
        prop_oneof![Just(0.0), 0.0f64..0.02, 0.02f64..0.9, 0.9f64..4.0]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever rate of calls comes and stays: the part that was spent is within the budget, from the moment on that
        /// the first stretch can have been paid for.
        #[test]
        fn a_steady_rate_keeps_within_the_budget(budget in 0.002f64..0.2, rate in rates(), goes in 0u64..25) {
            let mut model = Model::new(budget, Host { goes: goes * MS, ..QUICK });
            // Two looks, and breakpoints that are slow to go; putting in and out.
            let first = rate * ns((goes + 5) * MS) + 200_000.0;
            let paid = (first / budget).max(1e9);
            while model.now < 60_000 * MS {
                model.step(rate, 0.0);
                if ns(model.now) >= paid {
                    // The model goes in steps.
                    let may = budget + rate * ns(STEP) / ns(model.now);
                    prop_assert!(
                        model.part() <= may,
                        "{} of {budget} after {} ms, {} stretches", model.part(), model.now / MS, model.stretches
                    );
                }
            }
        }

        /// Whatever rates come one after the other: no more is spent than the budget of the whole time, and what nobody could
        /// foresee in one look and while breakpoints leave.
        #[test]
        fn the_budget_holds(
            budget in 0.001f64..0.2,
            spans in prop::collection::vec((rates(), 1u64..2000), 1..40),
        ) {
            let mut model = Model::new(budget, QUICK);
            for (rate, ms) in spans {
                model.run(rate, ms);
                let may = budget * (ns(model.now) + Loan::SHORT.of_ns) + 4.0 * ns(SELDOM_NS + QUICK.goes + MS) + 200_000.0;
                prop_assert!(ns(model.spent.all()) <= may, "{} of {may}", model.spent.all());
            }
        }

        /// Some stretch is always made, however much it costs.
        #[test]
        fn nobody_stays_out(budget in 0.001f64..0.2, rate in 0.0f64..4.0, before in 0.0f64..4.0) {
            let mut model = Model::new(budget, QUICK);
            model.run(before, 5000);
            model.run(rate, 1000);
            // What was spent too much is saved first, then a stretch: ten seconds' worth, or what the shortest one costs.
            let most = before.max(rate);
            let debt = 2.0 * most * ns(3 * SELDOM_NS + 2 * QUICK.goes) / budget;
            let on = model.sampling.on_ns;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a test's numbers")]
            let longest = (debt / 1e6) as u64 + 12_000;
            model.run(rate, longest);
            prop_assert!(model.sampling.on_ns > on, "{} stretches in {longest} ms", model.stretches);
        }

        /// What others spend is theirs: all together keep within the budget.
        #[test]
        fn others_are_paid_first(budget in 0.005f64..0.2, rate in 0.0f64..0.9, part in 0.0f64..0.4) {
            let mut model = Model::new(budget, QUICK);
            for _ in 0..40_000 * MS / STEP {
                model.step(rate, part * budget);
            }
            prop_assert!(model.part() <= budget, "{} of {budget}", model.part());
            prop_assert!(model.sampling.on_ns > 0);
        }
    }
}
