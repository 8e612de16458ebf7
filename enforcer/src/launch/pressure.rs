//! Launch pressure: the share of time in which processes of a tenant had launches and were made to wait with them.
//!
//! Pure. The kernel side counts how long each process was delayed; threads that wait side by side add up there, so a
//! process counts as waiting for all of the time at most. Who waited at the same time as whom is not known: delays of
//! several processes are taken to fall independently of each other.

use std::{collections::BTreeMap, time::Duration};

use crate::time::pressure::{Lost, Pressure};

/// What a process has done since it has probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Launches.
    pub launches: u64,
    /// Nanoseconds of delay.
    pub delay_ns: u64,
}

/// The pressure of all tenants, and what it was last seen from.
#[derive(Debug, Default)]
pub struct Book {
    at_ns: u64,
    processes: BTreeMap<u32, Counts>,
    tenants: BTreeMap<u32, Pressure>,
}

impl Book {
    /// Takes the counts of all processes with probes at `at_ns` (`CLOCK_MONOTONIC`). `payers` are the tenant of a
    /// process and those around it.
    pub fn observe(&mut self, at_ns: u64, processes: &[(u32, Vec<u32>, Counts)]) {
        let span = Duration::from_nanos(at_ns.saturating_sub(self.at_ns));
        let first = self.at_ns == 0;
        self.at_ns = at_ns;
        let before = std::mem::replace(
            &mut self.processes,
            processes
                .iter()
                .map(|(pid, _, counts)| (*pid, *counts))
                .collect(),
        );
        if first || span.is_zero() {
            return;
        }
        let mut waits: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for (pid, payers, now) in processes {
            let old = before.get(pid).copied().unwrap_or_default();
            let delayed = Duration::from_nanos(now.delay_ns.saturating_sub(old.delay_ns));
            // Who did not launch and was not delayed had nothing to wait for.
            if now.launches <= old.launches && delayed.is_zero() {
                continue;
            }
            for payer in payers {
                waits
                    .entry(*payer)
                    .or_default()
                    .push(delayed.div_duration_f64(span).min(1.0));
            }
        }
        for tenant in waits.keys() {
            self.tenants.entry(*tenant).or_default();
        }
        for (tenant, pressure) in &mut self.tenants {
            pressure.add(
                span,
                waits
                    .get(tenant)
                    .map_or_else(Lost::default, |waits| lost(waits)),
            );
        }
    }

    /// The pressure of a tenant.
    pub fn of(&self, tenant: u32) -> Pressure {
        self.tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// Forgets tenants that are no more.
    pub fn retain(&mut self, lives: impl Fn(u32) -> bool) {
        self.tenants.retain(|tenant, _| lives(*tenant));
    }
}

/// From the shares of a span that each of the processes with work waited.
fn lost(waits: &[f64]) -> Lost {
    if waits.is_empty() {
        return Lost::default();
    }
    Lost {
        some: 1.0 - waits.iter().map(|share| 1.0 - share).product::<f64>(),
        full: waits.iter().product(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn counts(launches: u64, delay_ns: u64) -> Counts {
        Counts { launches, delay_ns }
    }

    #[test]
    fn one_process_that_waits_half_of_the_time_is_half_of_the_pressure() {
        let mut book = Book::default();
        for second in 1..=60 {
            let process = (7, vec![1, 0], counts(second, second * SECOND / 2));
            book.observe(second * SECOND, &[process]);
        }
        for tenant in [0, 1] {
            let pressure = book.of(tenant);
            assert!((pressure.some.avg10 - 0.5).abs() < 0.01, "{pressure:?}");
            assert_eq!(pressure.some, pressure.full);
            assert_eq!(pressure.some.total, Duration::from_millis(59 * 500));
        }
        assert_eq!(book.of(2), Pressure::default());
    }

    #[test]
    fn another_process_at_work_makes_it_partial_and_rest_lets_it_fall() {
        let mut book = Book::default();
        for second in 1..=60 {
            book.observe(
                second * SECOND,
                &[
                    (7, vec![1], counts(second, second * SECOND)),
                    (8, vec![1], counts(second, 0)),
                ],
            );
        }
        assert!(book.of(1).some.avg10 > 0.99);
        assert!(book.of(1).full.avg10 < 0.01);
        for second in 61..=160 {
            book.observe(
                second * SECOND,
                &[
                    (7, vec![1], counts(60, 60 * SECOND)),
                    (8, vec![1], counts(60, 0)),
                ],
            );
        }
        assert!(book.of(1).some.avg10 < 0.01);
    }

    #[test]
    fn threads_that_wait_side_by_side_are_one_waiting_process() {
        let mut book = Book::default();
        book.observe(SECOND, &[(7, vec![1], counts(1, 0))]);
        book.observe(2 * SECOND, &[(7, vec![1], counts(2, 16 * SECOND))]);
        assert_eq!(book.of(1).some.total, Duration::from_secs(1));
    }

    proptest! {
        #[test]
        fn full_is_never_more_than_some_and_both_are_shares(waits in prop::collection::vec(0.0..=1.0f64, 0..8)) {
            let lost = lost(&waits);
            prop_assert!(lost.full <= lost.some + 1e-9);
            prop_assert!((0.0..=1.0).contains(&lost.some) && (0.0..=1.0).contains(&lost.full));
        }
    }
}
