//! The programs of the launch profile; see `enforcer-ebpf/src/profile`.
//!
//! An object of its own, as [`super::insight`] is: all of it goes when the last of it is let go of, and with the daemon.

use std::{path::Path, sync::Mutex};

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, MapData, PerCpuArray, RingBuf},
    programs::{ProbeKind, UProbe},
};
use gpuquota_common::profile::{KernelKey, Launches, Spent, counter};
use tracing::debug;

use super::{
    KernelError, is_missing, lock, map_error, probe,
    probe::Probe,
    program, program_error, take,
    uprobe_multi::{self, MultiError, MultiProgram, Source},
};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/gpuquota-profile"));

/// Bytes of messages on their way to us.
const RING: u32 = 1 << 20;

/// A program of the launch profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProfileProgram {
    /// Entry of calls that launch.
    Launch,
    /// Entry of calls that wait, and of those that record events.
    Wait,
    /// Return of calls that wait.
    Waited,
    /// Entry of calls that give out kernels.
    Name,
    /// Their return.
    Named,
}

impl ProfileProgram {
    const ALL: [Self; 5] = [
        Self::Launch,
        Self::Wait,
        Self::Waited,
        Self::Name,
        Self::Named,
    ];

    /// All of them, those at returns before those at entries.
    pub const RETURNS_FIRST: [Self; 5] = [
        Self::Waited,
        Self::Named,
        Self::Wait,
        Self::Name,
        Self::Launch,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Launch => "kernel_launch",
            Self::Wait => "kernel_wait",
            Self::Waited => "kernel_waited",
            Self::Name => "kernel_name",
            Self::Named => "kernel_named",
        }
    }

    const fn kind(self) -> ProbeKind {
        match self {
            Self::Launch | Self::Wait | Self::Name => ProbeKind::Entry,
            Self::Waited | Self::Named => ProbeKind::Return,
        }
    }
}

/// Loaded programs and their maps.
pub struct ProfileKernel {
    ebpf: Mutex<Ebpf>,
    multi: Option<Vec<(ProfileProgram, MultiProgram)>>,
    spent: Mutex<HashMap<MapData, u32, Spent>>,
    since: Mutex<HashMap<MapData, u32, u64>>,
    kernels: Mutex<HashMap<MapData, KernelKey, Launches>>,
    losses: PerCpuArray<MapData, u64>,
}

impl ProfileKernel {
    /// Loads them; returns the ring of messages too.
    pub fn load() -> Result<(Self, RingBuf<MapData>), KernelError> {
        let mut ebpf = EbpfLoader::new()
            // Nothing in it depends on the running kernel's types, and reading them takes long.
            .btf(None)
            .map_max_entries("MESSAGES", RING)
            .load(OBJECT)?;
        for name in ProfileProgram::ALL.map(ProfileProgram::name) {
            program::<UProbe>(&mut ebpf, name)?
                .load()
                .map_err(program_error(name))?;
        }
        let descriptors = uprobe_multi::map_descriptors(&ebpf);
        let multi = Source::new(OBJECT, &descriptors)
            .and_then(|source| {
                ProfileProgram::ALL
                    .into_iter()
                    .map(|program| Ok((program, source.load(program.name(), false)?)))
                    .collect::<Result<Vec<_>, MultiError>>()
            })
            .inspect_err(|why| debug!(%why, "profile probes are attached one by one"))
            .ok();
        let ring = take(&mut ebpf, "MESSAGES")?;
        let kernel = Self {
            spent: Mutex::new(take(&mut ebpf, "SPENT")?),
            since: Mutex::new(take(&mut ebpf, "SINCE")?),
            kernels: Mutex::new(take(&mut ebpf, "KERNELS")?),
            losses: take(&mut ebpf, "LOSSES")?,
            ebpf: Mutex::new(ebpf),
            multi,
        };
        Ok((kernel, ring))
    }

    /// Probes functions in a process: places in a file, each with its cookie.
    pub fn attach(
        &self,
        program: ProfileProgram,
        process: u32,
        file: &Path,
        points: &[(u64, u64)],
    ) -> Result<Vec<Probe>, KernelError> {
        if points.is_empty() {
            return Ok(Vec::new());
        }
        let multi = self
            .multi
            .as_ref()
            .and_then(|all| all.iter().find(|(known, _)| *known == program));
        if let Some((_, multi)) = multi {
            let returns = matches!(program.kind(), ProbeKind::Return);
            return multi
                .attach(process, file, points, returns)
                .map(|link| vec![Probe::Many(link)])
                .map_err(|source| KernelError::Probe {
                    file: file.to_owned(),
                    source,
                });
        }
        let mut handle = probe::own_handle(&lock(&self.ebpf), program.name(), program.kind())?;
        probe::attach_one_by_one(&mut handle, program.name(), process, file, points)
    }

    /// Begins to look at a process.
    pub fn admit(&self, process: u32) -> Result<(), KernelError> {
        lock(&self.spent)
            .insert(process, Spent::default(), 0)
            .map_err(map_error("SPENT"))
    }

    /// Says that all probes of its launches and waits are in place since then, or one of [`gpuquota_common::profile::since`].
    pub fn set_since(&self, process: u32, at_ns: u64) -> Result<(), KernelError> {
        lock(&self.since)
            .insert(process, at_ns, 0)
            .map_err(map_error("SINCE"))
    }

    /// Nanoseconds that the probes have cost a process since it is looked at, by group.
    pub fn spent(&self, process: u32) -> Result<Spent, KernelError> {
        lock(&self.spent)
            .get(&process, 0)
            .map_err(map_error("SPENT"))
    }

    /// Looks at a process no more, and forgets these kernels of it.
    pub fn dismiss(&self, process: u32, kernels: impl IntoIterator<Item = KernelKey>) {
        let removed = [
            lock(&self.spent).remove(&process),
            lock(&self.since).remove(&process),
        ];
        for error in removed.into_iter().filter_map(Result::err) {
            if !is_missing(&error) {
                debug!(process, %error, "it is not forgotten");
            }
        }
        let mut counted = lock(&self.kernels);
        for key in kernels {
            if let Err(error) = counted.remove(&key)
                && !is_missing(&error)
            {
                debug!(process, %error, "a kernel of it is not forgotten");
            }
        }
    }

    /// Launches so far, by kernel.
    pub fn launches(&self) -> Vec<(KernelKey, Launches)> {
        lock(&self.kernels).iter().filter_map(Result::ok).collect()
    }

    /// What did not fit or could not be read, summed over CPUs; see [`counter`].
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
