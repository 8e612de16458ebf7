//! Looking at the ledger once a second, so that there is a memory of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use gpuquota_common::map::{MAX_GPUS, MAX_TENANTS, kind as object_kind};

use super::{Enforcer, EnforcerError, system};
use crate::{
    baseline::{Baselines, Seen},
    control::{
        ControlError,
        insight::{HeatRow, MemoryHistory},
    },
    heap,
    history::{History, LONGEST, Track},
};

/// Time between two looks.
const SECOND: Duration = Duration::from_secs(1);
/// The driver hands out memory in pieces of this size; smaller objects share one.
const CHUNK: u64 = 2 << 20;

/// How many small objects a tenant has, and how much is in them.
#[derive(Clone, Copy, Debug, Default)]
struct Objects {
    all: u64,
    small: u64,
    small_bytes: u64,
}

impl Enforcer {
    /// Starts to remember.
    pub(super) fn start_recording(self: &Arc<Self>) -> Result<(), EnforcerError> {
        let enforcer = Arc::clone(self);
        thread::Builder::new()
            .name("history".into())
            .spawn(move || {
                while !enforcer.stopping() {
                    enforcer.remember(seconds_now());
                    heap::tidy();
                    thread::sleep(SECOND);
                }
            })
            .map(drop)
            .map_err(system("starting the thread of the history"))
    }

    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what everybody has who has or had something.
    fn remember(&self, second: u64) {
        // Who pays, and those around: usage is with nested tenants.
        let paying: BTreeSet<(u32, u32)> = if self.stir.is_calm() {
            BTreeSet::new()
        } else {
            self.kernel
                .accounts()
                .filter(|(_, bytes)| *bytes > 0)
                .map(|(key, _)| (u32::from(key.tenant), u32::from(key.gpu)))
                .filter(|(tenant, gpu)| *tenant < MAX_TENANTS && *gpu < MAX_GPUS)
                .collect()
        };
        let wanted: BTreeMap<(String, u32), u32> = {
            let now = self.read();
            let mut wanted: BTreeSet<(String, u32)> = BTreeSet::new();
            for (tenant, gpu) in paying {
                let mut next = now.seating.seat(tenant).map(|seat| &seat.name);
                while let Some(name) = next {
                    // Someone around it was here already, and so was who is around that one.
                    if !wanted.insert((name.clone(), gpu)) {
                        break;
                    }
                    next = now
                        .seating
                        .index(name)
                        .and_then(|index| now.seating.seat(index)?.parent.as_ref());
                }
            }
            let mut history = self.history();
            wanted.extend(history.keys().cloned());
            history.keep(|tenant| now.policy.tenants.contains_key(tenant));
            wanted
                .into_iter()
                .filter(|(name, _)| now.policy.tenants.contains_key(name))
                .filter_map(|key| Some((now.seating.index(&key.0)?, key)))
                .map(|(index, key)| (key, index))
                .collect()
        };
        let used = wanted
            .into_iter()
            .filter_map(|((name, gpu), index)| {
                let usage = self.kernel.usage(index, gpu).ok()?;
                Some(((name, gpu), (usage.memory, usage.peak)))
            })
            .collect();
        self.history().sample(second, &used);
        if self.baselines().is_due(second) {
            self.sample_usual(second);
        }
    }

    pub(super) fn baselines(&self) -> MutexGuard<'_, Baselines> {
        self.baselines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what is to become the usual.
    fn sample_usual(&self, second: u64) {
        let now = self.read();
        let memory: Vec<((String, u32), u64)> = self
            .history()
            .tracks()
            .map(|(name, gpu, track)| ((name.to_owned(), gpu), track.used()))
            .collect();
        let mut seen = BTreeMap::new();
        let mut launches = BTreeMap::new();
        for (key, used) in memory {
            let Some(index) = now.seating.index(&key.0) else {
                continue;
            };
            if let Some(launch) = self.launches.usage(index) {
                launches.insert(key.0.clone(), launch.launches);
            }
            let time = self.time.status(index, key.1);
            #[expect(clippy::cast_precision_loss, reason = "bytes of a card")]
            let memory = used as f64;
            seen.insert(
                key,
                Seen {
                    memory,
                    time: time.map(|time| time.share_10s),
                },
            );
        }
        drop(now);
        self.baselines().sample(second, &seen, &launches);
    }

    /// Memory over time of one tenant or of all.
    pub(super) fn remembered(
        &self,
        tenant: Option<&str>,
        since: Duration,
    ) -> Result<Vec<MemoryHistory>, ControlError> {
        if let Some(tenant) = tenant {
            self.known_tenant(tenant)?;
        }
        let since = since.as_secs().clamp(1, LONGEST);
        let objects = self.count_objects();
        let now = seconds_now();
        let history = self.history();
        Ok(history
            .tracks()
            .filter(|(name, ..)| tenant.is_none_or(|tenant| tenant == *name))
            .map(|(name, gpu, track)| {
                let objects = objects
                    .get(&(name.to_owned(), gpu))
                    .copied()
                    .unwrap_or_default();
                describe(name, gpu, track, since, now, objects)
            })
            .collect())
    }

    /// Peaks of all tenants in columns.
    pub(super) fn heat(&self, since: Duration, columns: u32) -> Vec<HeatRow> {
        let since = since.as_secs().clamp(1, LONGEST);
        let now = seconds_now();
        let in_force = self.read();
        let history = self.history();
        history
            .tracks()
            .filter_map(|(name, gpu, track)| {
                let card = self.host.gpus.iter().find(|card| card.index == gpu)?;
                let max = in_force.policy.effective(name, card)?.memory.max;
                let full = max.unwrap_or(card.memory).min(card.memory);
                let columns = usize::try_from(columns).unwrap_or(1);
                Some(HeatRow {
                    tenant: name.to_owned(),
                    gpu,
                    full,
                    peaks: track.series(since, now).columns(
                        now.saturating_sub(since),
                        now,
                        columns,
                    ),
                })
            })
            .collect()
    }

    /// Memory objects by tenant and GPU, without those of nested tenants.
    fn count_objects(&self) -> BTreeMap<(String, u32), Objects> {
        let mut counts: BTreeMap<(u32, u32), Objects> = BTreeMap::new();
        for (_, object) in self.kernel.objects() {
            let is_memory = object.kind == object_kind::MEMORY;
            if !is_memory || object.gpu >= MAX_GPUS || object.tenant >= MAX_TENANTS {
                continue;
            }
            let objects = counts.entry((object.tenant, object.gpu)).or_default();
            objects.all += 1;
            if object.bytes < CHUNK {
                objects.small += 1;
                objects.small_bytes += object.bytes;
            }
        }
        let now = self.read();
        counts
            .into_iter()
            .filter_map(|((tenant, gpu), objects)| {
                Some(((now.seating.seat(tenant)?.name.clone(), gpu), objects))
            })
            .collect()
    }
}

fn describe(
    tenant: &str,
    gpu: u32,
    track: &Track,
    since: u64,
    now: u64,
    objects: Objects,
) -> MemoryHistory {
    let series = track.series(since, now);
    let (mean, peak) = series.points.iter().map(|point| point.unzip()).unzip();
    MemoryHistory {
        tenant: tenant.to_owned(),
        gpu,
        used: track.used(),
        high_water: track.high_water(),
        growth: track.growth(),
        growth_rate: track.growth_rate(),
        objects: objects.all,
        small_objects: objects.small,
        small_bytes: objects.small_bytes,
        step_sec: series.step,
        start_usec: series.first * series.step * 1_000_000,
        mean,
        peak,
    }
}

/// Seconds since 1970. A clock that is set back makes a pause in what is remembered, one that is set on a gap.
fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |age| age.as_secs())
}
