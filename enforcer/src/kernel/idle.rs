//! The programs that follow chosen threads while a GPU is idle; see `enforcer-ebpf/src/idle`.
//!
//! An object of its own: [`IdleKernel::load`] makes its maps, loads its programs and attaches them, and all of it goes
//! when it is let go of. Nothing is pinned, so it also goes with the daemon, however that ends.

use std::path::Path;

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, MapData, PerCpuArray, RingBuf},
    programs::{
        PerfEvent, RawTracePoint,
        perf_event::{PerfEventConfig, PerfEventScope, SamplePolicy, SoftwareEvent},
    },
    util::online_cpus,
};
use gpuquota_common::idle::counter;

use crate::enforcer::monotonic_ns;

use super::{
    KernelError, is_missing, map_error, offsets, program, program_error, take, uprobe_multi,
};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/gpuquota-idle"));

/// Bytes of moments and stacks on their way to us.
const RING: u32 = 16 << 20;
/// How often a second it is looked which thread runs, on each CPU. No divisor of what programs do a second.
pub const TICKS: u32 = 49;

const SWITCH: &str = "sched_switch";
const TICK: &str = "tick";

/// The first kernel whose `sched_switch` tells the state of the thread that goes.
const OLDEST: (u32, u32) = (5, 18);

/// The version of the running kernel, if its context switches tell too little.
pub fn too_old() -> Option<(u32, u32)> {
    uprobe_multi::release()
        .ok()
        .filter(|release| *release < OLDEST)
}

/// Attached programs and their maps.
pub struct IdleKernel {
    chosen: HashMap<MapData, u32, u64>,
    spent: HashMap<MapData, u32, u64>,
    losses: PerCpuArray<MapData, u64>,
    /// Why running threads are not sampled, if they are not.
    pub no_ticks: Option<String>,
    /// Has the links.
    _ebpf: Ebpf,
}

impl IdleKernel {
    /// Loads and attaches them; returns the ring of moments too. Nobody is chosen yet.
    pub fn load() -> Result<(Self, RingBuf<MapData>), KernelError> {
        let offsets = offsets::lookup_threads(Path::new("/sys/kernel/btf/vmlinux"))?;
        let mut loader = EbpfLoader::new();
        // Offsets were looked up; reading all types of the kernel takes long.
        loader.btf(None).map_max_entries("MOMENTS", RING);
        for (name, offset) in &offsets {
            loader.override_global(name, offset, true);
        }
        let mut ebpf = loader.load(OBJECT)?;
        let no_ticks = attach_ticks(&mut ebpf).err().map(|error| error.to_string());
        let switch: &mut RawTracePoint = program(&mut ebpf, SWITCH)?;
        switch
            .load()
            .and_then(|()| switch.attach(SWITCH))
            .map_err(program_error(SWITCH))?;
        let ring = take(&mut ebpf, "MOMENTS")?;
        let kernel = Self {
            chosen: take(&mut ebpf, "CHOSEN")?,
            spent: take(&mut ebpf, "SPENT")?,
            losses: take(&mut ebpf, "LOSSES")?,
            no_ticks,
            _ebpf: ebpf,
        };
        Ok((kernel, ring))
    }

    /// Books from now on what following a process costs it.
    pub fn admit(&mut self, tgid: u32) -> Result<(), KernelError> {
        self.spent.insert(tgid, 0, 0).map_err(map_error("SPENT"))
    }

    /// Nanoseconds that following a process has cost it so far.
    pub fn spent(&self, tgid: u32) -> Result<u64, KernelError> {
        self.spent.get(&tgid, 0).map_err(map_error("SPENT"))
    }

    /// Follows a process from now on.
    pub fn choose(&mut self, tgid: u32) -> Result<(), KernelError> {
        self.chosen
            .insert(tgid, monotonic_ns(), 0)
            .map_err(map_error("CHOSEN"))
    }

    /// Does not follow a process for a while.
    pub fn pause(&mut self, tgid: u32) -> Result<(), KernelError> {
        match self.chosen.remove(&tgid) {
            Err(source) if !is_missing(&source) => Err(map_error("CHOSEN")(source)),
            _ => Ok(()),
        }
    }

    /// Follows a process no more.
    pub fn forget(&mut self, tgid: u32) -> Result<(), KernelError> {
        self.pause(tgid)?;
        match self.spent.remove(&tgid) {
            Err(source) if !is_missing(&source) => Err(map_error("SPENT")(source)),
            _ => Ok(()),
        }
    }

    /// What did not fit, summed over CPUs; see [`counter`].
    pub fn losses(&self) -> Result<[u64; counter::COUNT as usize], KernelError> {
        let mut sums = [0; counter::COUNT as usize];
        for (index, sum) in (0..counter::COUNT).zip(&mut sums) {
            *sum = self
                .losses
                .get(&index, 0)
                .map_err(map_error("LOSSES"))?
                .iter()
                .sum();
        }
        Ok(sums)
    }
}

fn attach_ticks(ebpf: &mut Ebpf) -> Result<(), KernelError> {
    let tick: &mut PerfEvent = program(ebpf, TICK)?;
    tick.load().map_err(program_error(TICK))?;
    let cpus = online_cpus().map_err(|(path, source)| KernelError::Cpus { path, source })?;
    for cpu in cpus {
        tick.attach(
            PerfEventConfig::Software(SoftwareEvent::CpuClock),
            PerfEventScope::AllProcessesOneCpu { cpu },
            SamplePolicy::Frequency(u64::from(TICKS)),
            false,
        )
        .map_err(program_error(TICK))?;
    }
    Ok(())
}
