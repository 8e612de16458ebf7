//! Who used a card's energy: pure.
//!
//! NVML tells the energy of the whole board. What the board draws when nobody uses it is learned, and goes on beside any work
//! for the time that nobody does; the rest is divided by GPU time. The parts always add up to what the board used.

use std::{collections::BTreeMap, time::Duration};

/// Below this part of a span a GPU counts as idle, and its power as idle power.
const IDLE: f64 = 0.005;
/// How quickly learned idle power follows what is seen: this part of the difference at each look.
const LEARN: f64 = 0.2;
/// Watts are averaged over about so many seconds.
const AVERAGED: f64 = 10.0;

/// Energy of one user: joules so far, and watts of late.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Joules since it is known.
    pub joules: f64,
    /// Watts, over the last ten seconds or so.
    pub watts: f64,
}

impl Spent {
    /// Adds what was used in a span; nothing is something to add too, since watts fall with it.
    pub fn add(&mut self, joules: f64, span: Duration) {
        let seconds = span.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        self.joules += joules;
        let old = (-seconds / AVERAGED).exp();
        self.watts = self.watts * old + joules / seconds * (1.0 - old);
    }
}

/// Energy of a board that is no tenant's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Apart {
    /// Nobody used it.
    pub none: Spent,
    /// Processes in no tenant used it.
    pub others: Spent,
    /// What the board's counter said when all was divided, millijoules: parts and board add up to it.
    pub board_mj: Option<u64>,
}

/// What a board's counter said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// When, microseconds since 1970.
    pub at_us: u64,
    /// Energy so far, millijoules.
    pub counter_mj: u64,
}

/// GPU time of which the energy is not known yet.
#[derive(Clone, Debug, Default)]
pub struct Pending {
    /// All of it, microseconds.
    pub all_us: u64,
    /// By tenant, what is inside a tenant counted to it too, microseconds.
    pub tenants_us: BTreeMap<u32, u64>,
    /// By processes in no tenant, microseconds.
    pub others_us: u64,
}

/// What a span's energy was used for, in joules.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Split {
    /// Nobody's.
    pub idle: f64,
    /// To be divided by GPU time.
    pub users: f64,
}

/// The energy of one board.
#[derive(Clone, Debug, Default)]
pub struct Board {
    last: Option<Reading>,
    idle_watts: Option<f64>,
}

impl Board {
    /// What the counter said last, millijoules.
    pub fn counter_mj(&self) -> Option<u64> {
        self.last.map(|reading| reading.counter_mj)
    }

    /// Takes a reading at the end of a span in which the GPU was used for `busy`; returns what the energy was used for, and how long
    /// the span was. `None` at first, and after the counter began anew (the driver was loaded again).
    pub fn observe(&mut self, reading: Reading, busy: Duration) -> Option<(Split, Duration)> {
        let before = self.last.replace(reading)?;
        let span = Duration::from_micros(reading.at_us.checked_sub(before.at_us)?);
        let seconds = span.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "millijoules of some seconds")]
        let used = reading.counter_mj.checked_sub(before.counter_mj)? as f64 / 1000.0;
        if seconds <= 0.0 {
            return None;
        }
        let busy = (busy.as_secs_f64() / seconds).min(1.0);
        let watts = used / seconds;
        if busy < IDLE {
            let learned = self.idle_watts.get_or_insert(watts);
            *learned += (watts - *learned) * LEARN;
            let split = Split {
                idle: used,
                users: 0.0,
            };
            return Some((split, span));
        }
        // Before idle power is known, idle time costs what the average time does.
        let idle = self.idle_watts.unwrap_or(watts) * seconds * (1.0 - busy);
        let idle = idle.min(used);
        let split = Split {
            idle,
            users: used - idle,
        };
        Some((split, span))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(second: u64, counter_mj: u64) -> Reading {
        Reading {
            at_us: 7_000_000 + second * 1_000_000,
            counter_mj,
        }
    }

    #[test]
    fn idle_power_is_learned_and_stays_apart() {
        let mut board = Board::default();
        assert_eq!(board.observe(at(0, 5_000), Duration::ZERO), None);
        for second in 1..=60 {
            let split = board.observe(at(second, 5_000 + second * 80_000), Duration::ZERO);
            assert_eq!(
                split.map(|(split, span)| (split.users, span)),
                Some((0.0, SECOND))
            );
        }
        // Half a second of work at 580 W, half a second idle at 80 W.
        let (split, _) = board
            .observe(at(61, 5_000 + 60 * 80_000 + 330_000), SECOND / 2)
            .expect("a split");
        assert!((split.idle - 40.0).abs() < 0.1, "{split:?}");
        assert!((split.users - 290.0).abs() < 0.1, "{split:?}");
        assert_eq!(board.counter_mj(), Some(5_135_000));
    }

    #[test]
    fn a_counter_that_begins_anew_is_no_energy() {
        let mut board = Board::default();
        board.observe(at(0, 5_000), SECOND / 2);
        assert_eq!(board.observe(at(1, 10), SECOND / 2), None);
        assert!(board.observe(at(2, 20), SECOND / 2).is_some());
        // Nor is a clock that was set back a span.
        assert_eq!(board.observe(at(1, 30), SECOND / 2), None);
    }

    #[test]
    fn watts_follow_and_fall() {
        let mut spent = Spent::default();
        for _ in 0..60 {
            spent.add(300.0, SECOND);
        }
        assert!((spent.watts - 300.0).abs() < 2.0, "{spent:?}");
        assert!((spent.joules - 18_000.0).abs() < 1e-6);
        for _ in 0..60 {
            spent.add(0.0, SECOND);
        }
        assert!(spent.watts < 2.0, "{spent:?}");
    }

    proptest! {
        #[test]
        fn parts_are_never_negative_and_add_up(steps in prop::collection::vec((0..1_000_000_u64, 0.0..=1.0_f64), 1..50)) {
            let mut board = Board::default();
            let mut counter = 0;
            board.observe(at(0, counter), Duration::ZERO);
            for (second, (more, busy)) in (1..).zip(steps) {
                counter += more;
                let (split, _) = board.observe(at(second, counter), SECOND.mul_f64(busy)).expect("a split");
                prop_assert!(split.idle >= 0.0 && split.users >= 0.0);
                #[expect(clippy::cast_precision_loss, reason = "small")]
                let used = more as f64 / 1000.0;
                prop_assert!((split.idle + split.users - used).abs() < 1e-6);
            }
        }
    }
}
