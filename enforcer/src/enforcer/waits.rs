//! Memory pressure: the share of time in which allocations of a tenant wait for memory (`memory.on-max = "wait"`).
//!
//! A waiting allocation comes back every 250 ms, so who waits is known from looking at the queues as often.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{MutexGuard, PoisonError},
    time::Duration,
};

use gpuquota_common::map::MAX_TENANTS;

use super::Enforcer;
use crate::{
    enforcer::monotonic_ns,
    time::pressure::{Lost, Pressure},
};

/// A waiter that has not come back for so long waits no more. libcuda comes every 250 ms, under load later.
const FRESH: Duration = Duration::from_millis(750);

/// Who waits in a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Waiting {
    /// Allocations that wait.
    allocations: usize,
    /// Processes of the tenant with memory on the GPU, those that wait for their first included.
    processes: usize,
}

/// The memory pressure of all tenants that may wait.
#[derive(Debug, Default)]
pub(super) struct Waits {
    at_ns: u64,
    pressures: BTreeMap<(u32, u32), Pressure>,
}

impl Waits {
    /// Takes who waits at `at_ns`, by tenant and GPU; it counts for the time since the look before.
    fn observe(&mut self, at_ns: u64, queues: &BTreeMap<(u32, u32), Waiting>) {
        let span = Duration::from_nanos(at_ns.saturating_sub(self.at_ns));
        let first = self.at_ns == 0;
        self.at_ns = at_ns;
        self.pressures.retain(|place, _| queues.contains_key(place));
        for (place, waiting) in queues {
            let pressure = self.pressures.entry(*place).or_default();
            if !first {
                pressure.add(span, lost(*waiting));
            }
        }
    }
}

fn lost(waiting: Waiting) -> Lost {
    let share = |holds: bool| f64::from(u8::from(holds));
    Lost {
        some: share(waiting.allocations > 0),
        // One allocation at a time is what a process usually waits with.
        full: share(waiting.allocations > 0 && waiting.allocations >= waiting.processes),
    }
}

impl Enforcer {
    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at who waits for memory.
    pub(super) fn observe_waits(&self) {
        let at_ns = monotonic_ns();
        let waiting = self.kernel.waiting(at_ns, FRESH);
        let mut processes: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
        if waiting.values().any(|allocations| *allocations > 0) {
            for (key, bytes) in self.kernel.accounts() {
                let (tenant, gpu) = (u32::from(key.tenant), u32::from(key.gpu));
                if bytes > 0 && tenant < MAX_TENANTS {
                    processes.entry((tenant, gpu)).or_default().insert(key.tgid);
                }
            }
        }
        let queues = waiting
            .into_iter()
            .map(|(place, allocations)| {
                let processes = processes.get(&place).map_or(0, BTreeSet::len);
                let waiting = Waiting {
                    allocations,
                    processes,
                };
                (place, waiting)
            })
            .collect();
        self.waits().observe(at_ns, &queues);
    }

    /// The memory pressure of a tenant on a GPU.
    pub(super) fn memory_pressure(&self, tenant: u32, gpu: u32) -> Pressure {
        self.waits()
            .pressures
            .get(&(tenant, gpu))
            .copied()
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn queue(allocations: usize, processes: usize) -> BTreeMap<(u32, u32), Waiting> {
        let waiting = Waiting {
            allocations,
            processes,
        };
        BTreeMap::from([((1, 0), waiting)])
    }

    #[test]
    fn who_waits_beside_others_at_work_is_some_and_all_of_them_full() {
        let mut waits = Waits::default();
        waits.observe(SECOND, &queue(1, 1));
        assert!(waits.pressures[&(1, 0)].some.total.is_zero(), "only begun");
        waits.observe(2 * SECOND, &queue(1, 2));
        waits.observe(3 * SECOND, &queue(2, 2));
        waits.observe(4 * SECOND, &queue(0, 2));
        let pressure = waits.pressures[&(1, 0)];
        assert_eq!(pressure.some.total, Duration::from_secs(2));
        assert_eq!(pressure.full.total, Duration::from_secs(1));
    }

    #[test]
    fn a_queue_that_is_gone_is_forgotten() {
        let mut waits = Waits::default();
        waits.observe(SECOND, &queue(1, 1));
        waits.observe(2 * SECOND, &BTreeMap::new());
        assert!(waits.pressures.is_empty());
    }
}
