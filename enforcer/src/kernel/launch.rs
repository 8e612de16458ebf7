//! Launch budgets in the kernel: limits, buckets, and the record of who is stopped.
//!
//! [`Record`] is what has to be seen to whoever is there to do it: the daemon, its guard, or
//! `gpuquotad --release-all`. [`LaunchMaps`] is the rest, for the daemon alone.

use std::{
    collections::HashMap as StdHashMap,
    os::fd::RawFd,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, RingBuf},
    programs::{ProbeKind, UProbe},
};
use gpuquota_common::{
    launch::{Bucket, Calls, Done, Gaps, Limit, MAX_SLOTS, Settings, Slot},
    map::{MAX_TENANTS, banked},
};

use tracing::debug;

use super::{
    KernelError, OBJECT, PinDir, is_missing, map_error, program, program_error,
    table::Table,
    take,
    uprobe_multi::{MultiError, MultiProgram, Source},
};

/// Maps that live on across restarts.
pub(super) const PINNED: &[&str] = &[
    "LAUNCH_SETTINGS",
    "LAUNCH_LIMITS",
    "LAUNCH_BUCKETS",
    "LAUNCH_GAPS",
    "LAUNCH_SLOTS",
    "LAUNCH_CALLS",
    "LAUNCH_DONE",
    "LAUNCH_PIDS",
    "LAUNCH_FROZEN",
];

/// The maps of a [`Record`], in the order in which they are handed to the guard.
const RECORD: [&str; MAPS] = [
    "LAUNCH_SETTINGS",
    "LAUNCH_SLOTS",
    "LAUNCH_CALLS",
    "LAUNCH_DONE",
    "LAUNCH_FROZEN",
];
/// How many they are.
pub const MAPS: usize = 5;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in another thread leaves maps as they are; they hold no half-made state of ours.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who is stopped, and who sees to it.
pub struct Record {
    settings: Mutex<Array<MapData, Settings>>,
    slots: Mutex<Array<MapData, Slot>>,
    calls: Mutex<Array<MapData, Calls>>,
    done: Mutex<Array<MapData, Done>>,
    frozen: Mutex<HashMap<MapData, u64, u64>>,
    /// For the guard.
    ids: [u32; MAPS],
}

impl Record {
    /// The record that an earlier daemon pinned; `None` if there is none.
    pub fn pinned(pins: &PinDir) -> Result<Option<Self>, KernelError> {
        if !Path::exists(&pins.map(RECORD[0])) {
            return Ok(None);
        }
        let mut found = Vec::new();
        for name in RECORD {
            let data = MapData::from_pin(pins.map(name)).map_err(map_error(name))?;
            found.push(data);
        }
        Self::from_data(found).map(Some)
    }

    /// The record whose maps have these ids.
    pub fn by_ids(ids: [u32; MAPS]) -> Result<Self, KernelError> {
        let mut found = Vec::new();
        for (name, id) in RECORD.into_iter().zip(ids) {
            found.push(MapData::from_id(id).map_err(map_error(name))?);
        }
        Self::from_data(found)
    }

    fn from_data(maps: Vec<MapData>) -> Result<Self, KernelError> {
        let mut ids = [0; MAPS];
        for ((id, map), name) in ids.iter_mut().zip(&maps).zip(RECORD) {
            *id = map.info().map_err(map_error(name))?.id();
        }
        let maps: [MapData; MAPS] = maps
            .try_into()
            .map_err(|_| KernelError::Missing("map of launch budgets"))?;
        let [settings, slots, calls, done, frozen] = maps;
        let error = |at: usize| map_error(RECORD[at]);
        Ok(Self {
            settings: Mutex::new(Map::Array(settings).try_into().map_err(error(0))?),
            slots: Mutex::new(Map::Array(slots).try_into().map_err(error(1))?),
            calls: Mutex::new(Map::Array(calls).try_into().map_err(error(2))?),
            done: Mutex::new(Map::Array(done).try_into().map_err(error(3))?),
            frozen: Mutex::new(Map::HashMap(frozen).try_into().map_err(error(4))?),
            ids,
        })
    }

    /// Ids of its maps, for [`Record::by_ids`] in another process.
    pub fn ids(&self) -> [u32; MAPS] {
        self.ids
    }

    /// The controller's word to the programs.
    pub fn settings(&self) -> Result<Settings, KernelError> {
        lock(&self.settings)
            .get(&0, 0)
            .map_err(map_error("LAUNCH_SETTINGS"))
    }

    /// Changes the controller's word.
    pub fn update_settings(&self, change: impl FnOnce(&mut Settings)) -> Result<(), KernelError> {
        let mut map = lock(&self.settings);
        let mut settings = map.get(&0, 0).map_err(map_error("LAUNCH_SETTINGS"))?;
        change(&mut settings);
        map.set(0, settings, 0)
            .map_err(map_error("LAUNCH_SETTINGS"))
    }

    /// The process in a slot.
    pub fn slot(&self, at: u32) -> Result<Slot, KernelError> {
        lock(&self.slots)
            .get(&at, 0)
            .map_err(map_error("LAUNCH_SLOTS"))
    }

    /// Puts a process into a slot; all zero frees it.
    pub fn set_slot(&self, at: u32, slot: Slot) -> Result<(), KernelError> {
        lock(&self.slots)
            .set(at, slot, 0)
            .map_err(map_error("LAUNCH_SLOTS"))
    }

    /// The slots in use.
    pub fn slots(&self) -> impl Iterator<Item = (u32, Slot)> + '_ {
        (0..MAX_SLOTS).filter_map(|at| {
            let slot = self.slot(at).ok()?;
            (slot.tgid != 0).then_some((at, slot))
        })
    }

    /// What the kernel side knows about a process.
    pub fn calls(&self, at: u32) -> Result<Calls, KernelError> {
        lock(&self.calls)
            .get(&at, 0)
            .map_err(map_error("LAUNCH_CALLS"))
    }

    /// Begins anew for the next process in a slot, while no probe knows the slot.
    pub fn clear(&self, at: u32) -> Result<(), KernelError> {
        lock(&self.calls)
            .set(at, Calls::default(), 0)
            .map_err(map_error("LAUNCH_CALLS"))?;
        self.set_continued(at, 0)
    }

    /// How many stops of a process were seen to.
    pub fn continued(&self, at: u32) -> Result<u64, KernelError> {
        lock(&self.done)
            .get(&at, 0)
            .map(|done| done.continued)
            .map_err(map_error("LAUNCH_DONE"))
    }

    /// Says how many stops of a process were seen to.
    pub fn set_continued(&self, at: u32, continued: u64) -> Result<(), KernelError> {
        lock(&self.done)
            .set(at, Done { continued }, 0)
            .map_err(map_error("LAUNCH_DONE"))
    }
}

impl Record {
    /// Ids of the cgroups that are frozen for launches.
    pub fn frozen(&self) -> Vec<u64> {
        lock(&self.frozen).keys().filter_map(Result::ok).collect()
    }

    /// Says that a cgroup is about to be frozen.
    pub fn set_frozen(&self, cgroup: u64, until_ns: u64) -> Result<(), KernelError> {
        lock(&self.frozen)
            .insert(cgroup, until_ns, 0)
            .map_err(map_error("LAUNCH_FROZEN"))
    }

    /// Says that a cgroup is not frozen by us any more.
    pub fn clear_frozen(&self, cgroup: u64) -> Result<(), KernelError> {
        match lock(&self.frozen).remove(&cgroup) {
            Err(source) if !is_missing(&source) => Err(map_error("LAUNCH_FROZEN")(source)),
            _ => Ok(()),
        }
    }
}

/// The maps of launch budgets.
pub struct LaunchMaps {
    /// Who is stopped.
    pub record: Record,
    limits: Table<Limit>,
    buckets: Array<MapData, Bucket>,
    gaps: Array<MapData, Gaps>,
    pids: Mutex<HashMap<MapData, u32, u32>>,
    notices: Mutex<Option<RingBuf<MapData>>>,
}

/// The launch programs as this kernel takes them.
#[derive(Default)]
pub struct LaunchPrograms {
    unavailable: Option<String>,
    no_spin: Option<String>,
    /// The same programs for many probes by one link, where the kernel has that.
    pub(super) multi: Option<Multi>,
}

impl LaunchPrograms {
    /// Loads them. A kernel that refuses them does everything else.
    pub(super) fn load(ebpf: &mut Ebpf, maps: &StdHashMap<String, RawFd>) -> Self {
        let mut refused = |name| {
            program::<UProbe>(ebpf, name)
                .and_then(|program| program.load().map_err(program_error(name)))
                .err()
                .map(|error| error.to_string())
        };
        let mut programs = Self {
            unavailable: refused(LaunchProgram::Launch.name()),
            no_spin: refused(LaunchProgram::Spin.name()),
            multi: None,
        };
        for program in [LaunchProgram::Graph, LaunchProgram::GraphReturn] {
            programs.unavailable = programs.unavailable.or_else(|| refused(program.name()));
        }
        programs.multi = Source::new(OBJECT, maps)
            .and_then(|source| Multi::load(&source))
            .inspect_err(|why| debug!(%why, "launch probes are attached one by one"))
            .ok();
        programs
    }

    /// Why this kernel cannot delay launches, if it cannot.
    pub fn unavailable(&self) -> Option<&str> {
        self.unavailable.as_deref()
    }

    /// Why this kernel cannot spin for launches, if it cannot.
    pub fn no_spin(&self) -> Option<&str> {
        self.no_spin.as_deref()
    }
}

/// The launch programs for links of many probes.
pub(super) struct Multi {
    launch: MultiProgram,
    spin: MultiProgram,
    graph: MultiProgram,
    graph_return: MultiProgram,
}

impl Multi {
    pub(super) fn load(source: &Source) -> Result<Self, MultiError> {
        let load =
            |program: LaunchProgram| source.load(program.name(), program == LaunchProgram::Spin);
        Ok(Self {
            launch: load(LaunchProgram::Launch)?,
            spin: load(LaunchProgram::Spin)?,
            graph: load(LaunchProgram::Graph)?,
            graph_return: load(LaunchProgram::GraphReturn)?,
        })
    }

    pub(super) fn program(&self, program: LaunchProgram) -> &MultiProgram {
        match program {
            LaunchProgram::Launch => &self.launch,
            LaunchProgram::Spin => &self.spin,
            LaunchProgram::Graph => &self.graph,
            LaunchProgram::GraphReturn => &self.graph_return,
        }
    }
}

/// A program for probes in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchProgram {
    /// On launch calls.
    Launch,
    /// On launch calls of processes that spin; where the kernel has no such, as [`LaunchProgram::Launch`].
    Spin,
    /// On the entry of calls that make graphs.
    Graph,
    /// On their return.
    GraphReturn,
}

impl LaunchProgram {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Spin => "launch_spin",
            Self::Graph => "launch_graph",
            Self::GraphReturn => "launch_graph_return",
        }
    }

    pub(super) fn kind(self) -> ProbeKind {
        match self {
            Self::GraphReturn => ProbeKind::Return,
            _ => ProbeKind::Entry,
        }
    }
}

impl LaunchMaps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        let mut record = Vec::new();
        for name in RECORD {
            match ebpf.take_map(name) {
                Some(Map::Array(data) | Map::HashMap(data)) => record.push(data),
                _ => return Err(KernelError::Missing(name)),
            }
        }
        let record = Record::from_data(record)?;
        Ok(Self {
            record,
            limits: Table::take(ebpf, "LAUNCH_LIMITS")?,
            buckets: take(ebpf, "LAUNCH_BUCKETS")?,
            gaps: take(ebpf, "LAUNCH_GAPS")?,
            pids: Mutex::new(take(ebpf, "LAUNCH_PIDS")?),
            notices: Mutex::new(Some(take(ebpf, "LAUNCH_NOTICES")?)),
        })
    }

    /// The ring of notices; it is handed out once.
    pub fn take_notices(&self) -> Option<RingBuf<MapData>> {
        lock(&self.notices).take()
    }

    /// Reads the limit of a tenant from the bank of `generation`.
    pub fn limit(&self, generation: u64, tenant: u32) -> Result<Limit, KernelError> {
        self.limits.get(banked(generation, tenant, MAX_TENANTS))
    }

    /// Writes the limit of a tenant into the bank of `generation`.
    pub fn set_limit(&self, generation: u64, tenant: u32, limit: Limit) -> Result<(), KernelError> {
        self.limits
            .set(banked(generation, tenant, MAX_TENANTS), limit)
    }

    /// The bucket and the counts of a tenant.
    pub fn bucket(&self, tenant: u32) -> Result<Bucket, KernelError> {
        self.buckets
            .get(&tenant, 0)
            .map_err(map_error("LAUNCH_BUCKETS"))
    }

    /// The time between launches of a tenant's processes.
    pub fn gaps(&self, tenant: u32) -> Result<Gaps, KernelError> {
        self.gaps.get(&tenant, 0).map_err(map_error("LAUNCH_GAPS"))
    }

    /// Says in which slot a process is.
    pub fn set_pid(&self, tgid: u32, slot: u32) -> Result<(), KernelError> {
        lock(&self.pids)
            .insert(tgid, slot, 0)
            .map_err(map_error("LAUNCH_PIDS"))
    }

    /// Forgets in which slot a process was.
    pub fn forget_pid(&self, tgid: u32) -> Result<(), KernelError> {
        match lock(&self.pids).remove(&tgid) {
            Err(source) if !is_missing(&source) => Err(map_error("LAUNCH_PIDS")(source)),
            _ => Ok(()),
        }
    }

    /// All processes that have a slot.
    pub fn pids(&self) -> Vec<u32> {
        lock(&self.pids).keys().filter_map(Result::ok).collect()
    }
}
