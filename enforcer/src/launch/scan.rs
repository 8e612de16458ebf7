//! Finding the libcuda of a process, whatever it is called and wherever it is, and putting probes into it.
//!
//! Mapped files are opened through `/proc/PID/map_files`, which leads to the very file that is mapped: in the
//! process's own mount namespace, copied, renamed or deleted. A tenant may have its files on a file system that never
//! answers, so each process is looked at by a thread of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use gpuquota_common::launch::{GRAPH, cookie, graph_call, pace};
use tracing::debug;

use super::{
    limits::Treatment,
    symbols::{self, Cost, KNOWN, Symbol, Symbols},
};
use crate::kernel::{Kernel, KernelError, Probe, launch::LaunchProgram};

/// A file, as the kernel tells files apart.
pub type FileId = (u64, u64);

/// A mapping of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The link to the mapped file below `/proc/PID/map_files`.
    pub range: String,
    /// Device and inode as `/proc/PID/maps` shows them.
    pub file: (String, u64),
}

/// The mapped files with code, each once, from the text of `/proc/PID/maps`.
pub fn code_mappings(maps: &str) -> Vec<Mapping> {
    let mut seen = BTreeSet::new();
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let range = fields.next()?;
            let permissions = fields.next()?;
            let device = fields.nth(1)?;
            let inode: u64 = fields.next()?.parse().ok()?;
            let is_code = permissions.as_bytes().get(2) == Some(&b'x') && inode != 0;
            let file = (device.to_owned(), inode);
            // The link has no leading zeros, the line may have some.
            let (from, to) = range.split_once('-')?;
            let plain = |text: &str| u64::from_str_radix(text, 16).ok();
            let range = format!("{:x}-{:x}", plain(from)?, plain(to)?);
            (is_code && seen.insert(file.clone())).then_some(Mapping { range, file })
        })
        .collect()
}

/// What is known about files, so that each is read once.
#[derive(Debug, Default)]
pub struct Cache {
    files: Mutex<BTreeMap<Stamp, Option<Arc<Symbols>>>>,
    /// Names of launch calls by their index: the known ones, then others as they are found.
    names: Mutex<Vec<String>>,
}

/// Device, inode, size, and times of change to the nanosecond.
type Stamp = (u64, u64, u64, (i64, i64), (i64, i64));

impl Cache {
    /// Remembers this many files; more than hosts have libraries in use.
    const MOST: usize = 16384;

    /// The name of a launch call.
    pub fn name(&self, index: u32) -> String {
        let known = usize::try_from(index)
            .ok()
            .and_then(|index| KNOWN.get(index).copied());
        if let Some(name) = known {
            return name.to_owned();
        }
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        usize::try_from(index)
            .ok()
            .and_then(|index| names.get(index.checked_sub(KNOWN.len())?))
            .cloned()
            .unwrap_or_else(|| format!("#{index}"))
    }

    fn index(&self, name: &str) -> u32 {
        let at = KNOWN
            .iter()
            .position(|known| *known == name)
            .unwrap_or_else(|| {
                let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                let at = names
                    .iter()
                    .position(|other| other == name)
                    .unwrap_or_else(|| {
                        names.push(name.to_owned());
                        names.len() - 1
                    });
                KNOWN.len() + at
            });
        // Names are bounded by what a driver exports.
        u32::try_from(at).unwrap_or(0) & (GRAPH - 1)
    }

    /// The index of a launch call, as probes carry it.
    fn cookie_index(&self, symbol: &Symbol) -> u32 {
        let is_graph = symbol.name.starts_with("cuGraph");
        self.index(&symbol.name) | if is_graph { GRAPH } else { 0 }
    }

    fn symbols(&self, path: &Path) -> io::Result<(FileId, Option<Arc<Symbols>>)> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let id = (metadata.dev(), metadata.ino());
        if !metadata.is_file() {
            return Ok((id, None));
        }
        let stamp = (
            metadata.dev(),
            metadata.ino(),
            metadata.size(),
            (metadata.mtime(), metadata.mtime_nsec()),
            (metadata.ctime(), metadata.ctime_nsec()),
        );
        let known = self
            .files
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&stamp)
            .cloned();
        if let Some(known) = known {
            return Ok((id, known));
        }
        // A file that cannot be made sense of has no symbols that anybody could call.
        let found = symbols::find(&file)
            .inspect_err(|error| debug!(path = %path.display(), %error, "no object"))
            .unwrap_or(None)
            .map(Arc::new);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.len() >= Self::MOST {
            files.clear();
        }
        files.insert(stamp, found.clone());
        Ok((id, found))
    }
}

/// What to look at.
pub struct Job {
    /// The process.
    pub tgid: u32,
    /// The thread whose memory the probes are for: the first one, or another once that has ended.
    pub thread: u32,
    /// Its slot.
    pub slot: u32,
    /// How its launches are treated.
    pub treatment: Treatment,
    /// Files that have probes already.
    pub known: BTreeSet<FileId>,
}

/// What was found and done.
#[derive(Default)]
pub struct Found {
    /// The probes.
    pub links: Vec<Probe>,
    /// Files with launch calls.
    pub files: Vec<FoundFile>,
    /// Files that could not be looked at.
    pub unreadable: Vec<(PathBuf, io::Error)>,
}

/// A file with launch calls.
#[derive(Clone, Debug)]
pub struct FoundFile {
    /// Which.
    pub id: FileId,
    /// Its name in the process's own mount namespace, for people.
    pub name: PathBuf,
    /// Launch calls that every driver has and this file does not.
    pub missing: Vec<&'static str>,
    /// Launch calls whose probes are slow.
    pub stepped: Vec<String>,
}

/// Why a process could not be probed.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// Its mappings cannot be read.
    #[error("mappings: {0}")]
    Maps(#[from] io::Error),
    /// The kernel refuses a probe.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Looks at a process and puts probes into every file that has none yet.
pub fn run(kernel: &Kernel, cache: &Cache, job: &Job) -> Result<Found, ScanError> {
    let maps = fs::read(format!("/proc/{}/maps", job.tgid))?;
    let mut found = Found::default();
    let mut seen = job.known.clone();
    for mapping in code_mappings(&String::from_utf8_lossy(&maps)) {
        let path = PathBuf::from(format!("/proc/{}/map_files/{}", job.tgid, mapping.range));
        let (id, symbols) = match cache.symbols(&path) {
            Ok(known) => known,
            // Unmapped meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                found.unreadable.push((path, error));
                continue;
            }
        };
        let Some(symbols) = symbols else { continue };
        if !seen.insert(id) {
            continue;
        }
        let points: Vec<(u64, u64)> = symbols
            .launches
            .iter()
            .map(|symbol| (symbol.offset, cookie(job.slot, cache.cookie_index(symbol))))
            .collect();
        let program = if job.treatment.pace == pace::SPIN {
            LaunchProgram::Spin
        } else {
            LaunchProgram::Launch
        };
        let probes = kernel.attach_launch(program, (job.tgid, job.thread), &path, &points)?;
        found.links.extend(probes);
        if job.treatment.counts_nodes {
            found
                .links
                .extend(attach_graph_calls(kernel, &path, &symbols, job)?);
        }
        found.files.push(FoundFile {
            id,
            name: fs::read_link(&path).unwrap_or(path),
            missing: symbols.missing(),
            stepped: symbols
                .launches
                .iter()
                .filter(|symbol| symbol.cost == Cost::Stepped)
                .map(|symbol| symbol.name.clone())
                .collect(),
        });
    }
    Ok(found)
}

/// Probes on the calls that make graphs: at their entry, and where a handle comes out at their return too.
fn attach_graph_calls(
    kernel: &Kernel,
    path: &Path,
    symbols: &Symbols,
    job: &Job,
) -> Result<Vec<Probe>, KernelError> {
    let points = |with: fn(u32) -> bool| -> Vec<(u64, u64)> {
        symbols
            .graphs
            .iter()
            .filter(|(_, call)| with(*call))
            // Arguments are where the calling convention has them only at the very entry.
            .map(|(symbol, call)| (symbol.entry, cookie(job.slot, *call)))
            .collect()
    };
    let who = (job.tgid, job.thread);
    let mut probes = Vec::new();
    for (program, points) in [
        (LaunchProgram::Graph, points(|_| true)),
        (
            LaunchProgram::GraphReturn,
            points(|call| matches!(call, graph_call::END_CAPTURE | graph_call::COPY)),
        ),
    ] {
        if !points.is_empty() {
            probes.extend(kernel.attach_launch(program, who, path, &points)?);
        }
    }
    Ok(probes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_once_per_file() {
        let maps = "\
            55d0c0000000-55d0c0001000 r--p 00000000 fe:00 11    /usr/bin/python3\n\
            55d0c0001000-55d0c0002000 r-xp 00001000 fe:00 11    /usr/bin/python3\n\
            00400000-00401000 r-xp 00000000 00:2a 7             /tmp/a name (deleted)\n\
            7f0000000000-7f0000001000 r-xp 00000000 fe:00 11    /usr/bin/python3\n\
            7f0000002000-7f0000003000 r-xp 00000000 00:00 0     [vdso]\n\
            nonsense\n";
        let found = code_mappings(maps);
        let ranges: Vec<&str> = found.iter().map(|mapping| mapping.range.as_str()).collect();
        assert_eq!(ranges, ["55d0c0001000-55d0c0002000", "400000-401000"]);
        assert_eq!(found[1].file, ("00:2a".to_owned(), 7));
    }

    #[test]
    fn unknown_calls_get_names_too() {
        let cache = Cache::default();
        let index = cache.index("cuLaunchKernel_v3");
        assert_eq!(cache.index("cuLaunchKernel_v3"), index);
        assert_eq!(cache.name(index), "cuLaunchKernel_v3");
        assert_eq!(cache.name(cache.index("cuLaunchKernel")), "cuLaunchKernel");
        assert_eq!(cache.name(9999), "#9999");
    }

    #[test]
    fn own_mappings_have_no_launch_calls() {
        let cache = Cache::default();
        let maps = fs::read_to_string("/proc/self/maps").expect("readable");
        let mappings = code_mappings(&maps);
        assert!(!mappings.is_empty());
        for mapping in mappings {
            let path = format!("/proc/self/map_files/{}", mapping.range);
            if let Ok((_, symbols)) = cache.symbols(Path::new(&path)) {
                assert!(symbols.is_none(), "{path}");
            }
        }
    }
}
