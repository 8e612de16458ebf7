//! The programs that look into processes for a while; see `enforcer-ebpf/src/insight`.
//!
//! An object of its own: [`InsightKernel::load`] makes its maps and loads its programs, and all of it goes when the last
//! of it is let go of. Nothing is pinned, so it also goes with the daemon, however that ends.

use std::{path::Path, sync::Mutex};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, PerCpuArray, RingBuf},
    programs::{ProbeKind, UProbe},
};
use gpuquota_common::insight::counter;
use tracing::debug;

use super::{
    KernelError, lock, map_error, probe,
    probe::Probe,
    program, program_error, take,
    uprobe_multi::{self, MultiError, MultiProgram, Source},
};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/gpuquota-insight"));

/// Bytes of calls on their way to us.
const RING: u32 = 8 << 20;

/// The programs on calls that obtain and give back memory.
const ENTRY: &str = "allocation";
const RETURN: &str = "allocation_return";

/// Loaded programs and their maps.
pub struct InsightKernel {
    ebpf: Mutex<Ebpf>,
    multi: Option<(MultiProgram, MultiProgram)>,
    losses: PerCpuArray<MapData, u64>,
}

impl InsightKernel {
    /// Loads them; returns the ring of calls too.
    pub fn load() -> Result<(Self, RingBuf<MapData>), KernelError> {
        let mut ebpf = EbpfLoader::new()
            // Nothing in it depends on the running kernel's types, and reading them takes long.
            .btf(None)
            .map_max_entries("CALLS", RING)
            .load(OBJECT)?;
        for name in [ENTRY, RETURN] {
            program::<UProbe>(&mut ebpf, name)?
                .load()
                .map_err(program_error(name))?;
        }
        let descriptors = uprobe_multi::map_descriptors(&ebpf);
        let multi = Source::new(OBJECT, &descriptors)
            .and_then(|source| {
                Ok::<_, MultiError>((source.load(ENTRY, false)?, source.load(RETURN, false)?))
            })
            .inspect_err(|why| debug!(%why, "allocation probes are attached one by one"))
            .ok();
        let ring = take(&mut ebpf, "CALLS")?;
        let losses = take(&mut ebpf, "LOSSES")?;
        let kernel = Self {
            ebpf: Mutex::new(ebpf),
            multi,
            losses,
        };
        Ok((kernel, ring))
    }

    /// Probes entry and return of functions in a process: places in a file, each with its cookie.
    ///
    /// `thread` is the process itself, or another thread of it once the first has ended.
    pub fn attach(
        &self,
        (process, thread): (u32, u32),
        file: &Path,
        points: &[(u64, u64)],
    ) -> Result<Vec<Probe>, KernelError> {
        let refused = |source| KernelError::Probe {
            file: file.to_owned(),
            source,
        };
        if let Some((entry, back)) = self.multi.as_ref().filter(|_| process == thread) {
            // Returns first: a call that is seen to begin is seen to end.
            let back = back.attach(process, file, points, true).map_err(refused)?;
            let entry = entry
                .attach(process, file, points, false)
                .map_err(refused)?;
            return Ok(vec![Probe::Many(entry), Probe::Many(back)]);
        }
        let mut probes = Vec::new();
        for (name, kind) in [(RETURN, ProbeKind::Return), (ENTRY, ProbeKind::Entry)] {
            let mut program = probe::own_handle(&lock(&self.ebpf), name, kind)?;
            probes.extend(probe::attach_one_by_one(
                &mut program,
                name,
                thread,
                file,
                points,
            )?);
        }
        Ok(probes)
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
