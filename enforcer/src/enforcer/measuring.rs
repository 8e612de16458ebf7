//! What a scrape of the metrics shows, from the state at that moment.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use gpuquota_common::map::{
    MAX_ACCOUNTS, MAX_CGROUPS, MAX_CLIENTS, MAX_IN_FLIGHT, MAX_OBJECTS, MAX_PROCESSES, MAX_TENANTS,
    counter, host_place,
};

use tracing::warn;

use super::{Enforcer, EnforcerError};
use crate::{
    journal,
    metrics::{GpuSample, MapFill, PolicySample, Snapshot, TenantGpuSample, TenantSample, own},
    telemetry::Card,
};

/// Why a policy did not load, as metrics tell it.
const FAILURES: [&str; 3] = ["policy", "io", "kernel"];

/// Counters that are shown under one name, by reason.
const UNACCOUNTED: [(u32, &str); 5] = [
    (counter::INFLIGHT_FULL, "in-flight-full"),
    (counter::OBJECTS_FULL, "objects-full"),
    (counter::PROCESSES_FULL, "processes-full"),
    (counter::UNKNOWN_GPU, "unknown-gpu"),
    (counter::UNREADABLE, "unreadable"),
];

/// Attempts to load a policy, since the daemon runs.
#[derive(Debug, Default)]
pub(super) struct Loads {
    failures: [AtomicU64; FAILURES.len()],
    /// Milliseconds since 1970 of the last success; 0 for none.
    loaded_at: AtomicU64,
    /// Microseconds from the last order to the moment from which every decision was by the new policy; 0 for none.
    enforced_us: AtomicU64,
}

impl Loads {
    /// So long after it was ordered, every decision is by the new policy.
    pub(super) fn enforced_after(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        self.enforced_us.store(took, Ordering::Relaxed);
    }

    fn enforced(&self) -> Option<Duration> {
        match self.enforced_us.load(Ordering::Relaxed) {
            0 => None,
            took => Some(Duration::from_micros(took)),
        }
    }

    /// Counts an attempt and hands its outcome on.
    pub(super) fn note<T>(&self, outcome: Result<T, EnforcerError>) -> Result<T, EnforcerError> {
        match &outcome {
            Ok(_) => {
                let now = SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
                self.loaded_at.store(now, Ordering::Relaxed);
            }
            Err(error) => {
                warn!(
                    message_id = journal::POLICY_FAILED,
                    "the policy does not load, the one before stays in force: {error}"
                );
                let index = match error {
                    EnforcerError::Policy(_) | EnforcerError::Tenancy(_) => 0,
                    EnforcerError::File(_) => 1,
                    _ => 2,
                };
                self.failures[index].fetch_add(1, Ordering::Relaxed);
            }
        }
        outcome
    }

    fn failures(&self) -> Vec<(&'static str, u64)> {
        FAILURES
            .into_iter()
            .zip(&self.failures)
            .map(|(reason, count)| (reason, count.load(Ordering::Relaxed)))
            .collect()
    }

    fn loaded_at(&self) -> Option<SystemTime> {
        match self.loaded_at.load(Ordering::Relaxed) {
            0 => None,
            millis => Some(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)),
        }
    }
}

/// Events that were served, since the daemon runs.
#[derive(Debug, Default)]
pub(super) struct Served {
    events: AtomicU64,
    lag_ns: AtomicU64,
}

impl Served {
    /// Counts an event that happened at `at_ns`, 0 for one that does not say when.
    pub(super) fn note(&self, at_ns: u64, now_ns: u64) {
        self.events.fetch_add(1, Ordering::Relaxed);
        if at_ns != 0 {
            self.lag_ns
                .fetch_add(now_ns.saturating_sub(at_ns), Ordering::Relaxed);
        }
    }
}

impl Enforcer {
    /// What a scrape of the metrics shows now.
    pub fn measure(&self) -> Snapshot {
        let mut ledger: BTreeMap<u32, u64> = BTreeMap::new();
        let mut holders: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
        let mut accounts = 0;
        for (key, bytes) in self.kernel.accounts() {
            accounts += 1;
            if bytes == 0 {
                continue;
            }
            let (tenant, gpu) = (u32::from(key.tenant), u32::from(key.gpu));
            let of_gpu = ledger.entry(gpu).or_default();
            *of_gpu = of_gpu.saturating_add(bytes);
            if tenant < MAX_TENANTS {
                holders.entry((tenant, gpu)).or_default().insert(key.tgid);
            }
        }
        let counters = self.kernel.counters().unwrap_or_default();
        let count = |index: u32| counters[index as usize];
        Snapshot {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            driver_version: self.driver_version.clone(),
            enforcing: self.enforcing,
            nvml_up: self.telemetry.latest().is_some(),
            policy: self.policy_sample(),
            gpus: self.gpu_samples(&ledger),
            tenants: self.tenant_samples(&holders),
            maps: self.map_fill(accounts),
            events: self.served.events.load(Ordering::Relaxed),
            event_lag: Duration::from_nanos(self.served.lag_ns.load(Ordering::Relaxed)),
            events_lost: count(counter::EVENTS_LOST),
            driver_calls: count(counter::DECODED),
            unknown_frees: count(counter::UNKNOWN_FREES),
            own_controls: count(counter::OWN_CONTROLS),
            unaccounted: UNACCOUNTED
                .iter()
                .map(|(index, reason)| (*reason, count(*index)))
                .chain([("passed-over", self.kernel.passed_over().unwrap_or(0))])
                .collect(),
            daemon: own::cost().ok(),
        }
    }

    fn policy_sample(&self) -> PolicySample {
        let now = self.read();
        PolicySample {
            generation: now.generation,
            loaded_at: self.loads.loaded_at(),
            enforced_after: self.loads.enforced(),
            failures: self.loads.failures(),
            warnings: u64::try_from(now.warnings.len()).unwrap_or(u64::MAX),
        }
    }

    fn gpu_samples(&self, ledger: &BTreeMap<u32, u64>) -> Vec<GpuSample> {
        let latest = self.telemetry.latest();
        self.topology
            .gpus
            .iter()
            .map(|gpu| {
                let seen = latest
                    .as_ref()
                    .and_then(|last| last.cards.iter().find(|card| card.uuid == gpu.card.uuid));
                let counter = seen.and_then(|card| card.energy_mj);
                let apart = self.time.energy_apart(gpu.card.index).unwrap_or_default();
                GpuSample {
                    index: gpu.card.index,
                    uuid: gpu.card.uuid.clone(),
                    name: gpu.card.name.clone(),
                    memory_size: gpu.card.memory_total,
                    memory_used: seen.map(|card| card.memory_used),
                    memory_used_by_processes: seen.and_then(Card::used_by_processes),
                    ledger: ledger.get(&gpu.card.index).copied().unwrap_or(0),
                    power_mw: seen.and_then(|card| card.power_mw),
                    energy_mj: apart.board_mj.or(counter),
                    xids: self.faults().tally.of_gpu(gpu.card.index),
                    energy_of_none_and_others: counter
                        .map(|_| (apart.none.joules, apart.others.joules)),
                }
            })
            .collect()
    }

    fn tenant_samples(&self, holders: &BTreeMap<(u32, u32), BTreeSet<u32>>) -> Vec<TenantSample> {
        let now = self.read();
        let mut cgroups: BTreeMap<u32, u64> = BTreeMap::new();
        for (index, _) in now.roots.values() {
            *cgroups.entry(*index).or_default() += 1;
        }
        now.policy
            .tenants
            .iter()
            .filter_map(|(name, tenant)| {
                let index = now.seating.index(name)?;
                let gpus = self
                    .host
                    .gpus
                    .iter()
                    .filter_map(|gpu| {
                        let budget = now.policy.effective(name, gpu)?;
                        let usage = self.kernel.usage(index, gpu.index).ok()?;
                        let pinned = self.kernel.usage(index, host_place(gpu.index)).ok()?;
                        let sums = self.sums(index, gpu.index);
                        let (high_water, growth) = self
                            .history()
                            .track(name, gpu.index)
                            .map_or((0, 0), |track| (track.high_water(), track.growth()));
                        let (usual_memory, usual_time) = self
                            .baselines()
                            .of(name, gpu.index)
                            .map_or((None, None), |on_gpu| {
                                (on_gpu.memory.usual(), on_gpu.time.usual())
                            });
                        Some(TenantGpuSample {
                            context: sums.context,
                            managed: sums.managed,
                            drift: sums.drift,
                            gpu: gpu.index,
                            max: budget.memory.max,
                            high: budget.memory.high,
                            used: usage.memory,
                            peak: usage.peak,
                            denials: usage.denials,
                            breaches: usage.breaches,
                            min: budget.memory.min,
                            host_max: budget.memory.host,
                            host_used: pinned.memory,
                            host_denials: pinned.denials,
                            processes: holders.get(&(index, gpu.index)).map_or(0, size),
                            memory_pressure: self.memory_pressure(index, gpu.index).into(),
                            time: self.time.status(index, gpu.index),
                            faults: self.faults().tally.of(index, gpu.index),
                            high_water,
                            growth,
                            usual_memory,
                            usual_time,
                        })
                    })
                    .collect();
                Some(TenantSample {
                    name: name.clone(),
                    class: tenant
                        .class
                        .as_ref()
                        .map_or_else(String::new, |class| class.value.clone()),
                    parent: now.seating.seat(index)?.parent.clone().unwrap_or_default(),
                    cgroups: cgroups.get(&index).copied().unwrap_or(0),
                    gpus,
                    launch: self.launches.usage(index),
                    usual_launches: self.baselines().launches(name),
                    anomalies: self.profiles.anomalies(name),
                })
            })
            .collect()
    }

    fn map_fill(&self, accounts: u64) -> Vec<MapFill> {
        let fill = |map, entries, capacity: u32| MapFill {
            map,
            entries,
            capacity: u64::from(capacity),
        };
        let counted = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        vec![
            fill("objects", self.kernel.object_count(), MAX_OBJECTS),
            fill(
                "clients",
                counted(self.kernel.clients().count()),
                MAX_CLIENTS,
            ),
            fill("accounts", accounts, MAX_ACCOUNTS),
            fill(
                "processes",
                counted(self.kernel.processes().len()),
                MAX_PROCESSES,
            ),
            fill(
                "in-flight",
                counted(self.kernel.in_flight().count()),
                MAX_IN_FLIGHT,
            ),
            fill(
                "admitted",
                counted(self.kernel.admitted().count()),
                MAX_IN_FLIGHT,
            ),
            fill(
                "cgroups",
                self.kernel.cgroups().map_or(0, |all| counted(all.len())),
                MAX_CGROUPS,
            ),
        ]
    }
}

fn size(set: &BTreeSet<u32>) -> u64 {
    u64::try_from(set.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_by_reason() {
        let loads = Loads::default();
        assert_eq!((loads.loaded_at(), loads.enforced()), (None, None));
        let broken: Result<(), _> = Err(EnforcerError::System {
            what: "x",
            source: std::io::Error::other("x"),
        });
        loads.note(broken).expect_err("handed on");
        loads.note(Ok(())).expect("handed on");
        assert_eq!(loads.failures(), [("policy", 0), ("io", 0), ("kernel", 1)]);
        assert!(loads.loaded_at().is_some());
        loads.enforced_after(Duration::ZERO);
        assert!(loads.enforced().is_some(), "however short it was");
    }

    #[test]
    fn lag_is_summed_over_the_events_that_say_when() {
        let served = Served::default();
        served.note(100, 350);
        served.note(0, 350);
        served.note(400, 350);
        assert_eq!(served.events.load(Ordering::Relaxed), 3);
        assert_eq!(served.lag_ns.load(Ordering::Relaxed), 250);
    }

    #[test]
    fn a_process_of_unknown_size_makes_the_sum_unknown() {
        let card = |processes| Card {
            index: 0,
            uuid: String::new(),
            name: String::new(),
            minor: 0,
            pci: None,
            memory_total: 0,
            memory_used: 0,
            power_mw: None,
            energy_mj: None,
            processes,
        };
        assert_eq!(card(vec![]).used_by_processes(), Some(0));
        assert_eq!(
            card(vec![(1, Some(2)), (2, Some(3))]).used_by_processes(),
            Some(5)
        );
        assert_eq!(
            card(vec![(1, Some(2)), (2, None)]).used_by_processes(),
            None
        );
    }
}
