//! From a copied stack to the names of the functions on it.
//!
//! Stacks are walked with what the process's own files say about their frames (`.eh_frame`), so it takes no frame pointers;
//! where a file says nothing, frame pointers are followed. Files are read through `/proc/PID/map_files`: the very ones that
//! are mapped, in the process's own mount namespace.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use framehop::{
    ExplicitModuleSectionInfo, FrameAddress, Module, Unwinder as _,
    x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64},
};
use gpuquota_common::insight::Header;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use super::elf::{Binary, demangle};

/// Frames of a stack that are told.
pub const DEEPEST: usize = 256;
/// Mappings are read again no more often than this.
const AGAIN: Duration = Duration::from_millis(250);
/// What all files of a look may take for walking stacks, in bytes.
const MAX_UNWIND: usize = 512 << 20;
/// As much of a process's own map of its generated code is read.
const MAX_PERF_MAP: u64 = 32 << 20;

/// A mapping of code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    offset: u64,
    /// Whether a file is mapped.
    is_file: bool,
    name: String,
}

/// The mappings of code in the text of `/proc/PID/maps`.
fn code_regions(maps: &str) -> Vec<Region> {
    maps.lines()
        .filter_map(|line| {
            let mut rest = line;
            let mut field = || {
                rest = rest.trim_start_matches(' ');
                let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
                rest = after;
                field
            };
            let (range, permissions, offset) = (field(), field(), field());
            let (_, inode) = (field(), field());
            let hex = |text: &str| u64::from_str_radix(text, 16).ok();
            let (start, end) = range.split_once('-')?;
            let region = Region {
                start: hex(start)?,
                end: hex(end)?,
                offset: hex(offset)?,
                is_file: inode.parse::<u64>().ok()? != 0,
                name: rest.trim_start_matches(' ').to_owned(),
            };
            (permissions.as_bytes().get(2) == Some(&b'x')).then_some(region)
        })
        .collect()
}

/// Device, inode, size, and time of change to the nanosecond.
type Stamp = (u64, u64, u64, (i64, i64));

/// What is known about files, so that each is read once for all processes of a look.
#[derive(Default)]
pub struct Binaries {
    files: HashMap<Stamp, Option<Arc<Binary>>>,
    unwind_bytes: usize,
    /// Files whose frames could not be read for their size.
    pub too_large: Vec<PathBuf>,
}

impl Binaries {
    fn open(&mut self, path: &Path) -> io::Result<Option<Arc<Binary>>> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Ok(None);
        }
        let stamp = (
            metadata.dev(),
            metadata.ino(),
            metadata.size(),
            (metadata.ctime(), metadata.ctime_nsec()),
        );
        if let Some(known) = self.files.get(&stamp) {
            return Ok(known.clone());
        }
        let mut binary = Binary::read(file).unwrap_or(None);
        if let Some(binary) = &mut binary {
            let bytes =
                |part: &Option<super::elf::Part>| part.as_ref().map_or(0, |part| part.bytes.len());
            let size = bytes(&binary.frames) + bytes(&binary.index);
            if self.unwind_bytes + size > MAX_UNWIND {
                self.too_large
                    .push(fs::read_link(path).unwrap_or_else(|_| path.to_owned()));
                (binary.frames, binary.index) = (None, None);
            } else {
                self.unwind_bytes += size;
            }
        }
        let binary = binary.map(Arc::new);
        self.files.insert(stamp, binary.clone());
        Ok(binary)
    }
}

/// A mapped file that was met on a stack.
struct Met {
    region: Region,
    binary: Option<Arc<Binary>>,
    /// What to take from an address in the process to have one in the file's own terms.
    bias: u64,
}

/// Where a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Program counter.
    pub pc: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer.
    pub fp: u64,
    /// Whether a call returns to it, so that the call itself is before it.
    pub is_return: bool,
}

impl From<&Header> for Place {
    fn from(header: &Header) -> Self {
        Self {
            pc: header.pc,
            sp: header.sp,
            fp: header.fp,
            is_return: true,
        }
    }
}

/// A walked stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Return addresses, the innermost first; of a thread that is in no call its place and one more, as if there were one.
    pub addresses: Vec<u64>,
    /// Whether it goes on beyond what was copied, or cannot be followed further.
    pub cut: bool,
}

/// A frame as people know it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
    /// The function; absent if nothing says which.
    pub function: Option<String>,
    /// The file with the code; empty for generated code.
    pub file: String,
    /// Where in the file, in its own terms; for generated code where in the process.
    pub address: u64,
}

/// A process whose stacks are walked.
pub struct AddressSpace {
    pid: u32,
    regions: Vec<Region>,
    read: Option<Instant>,
    met: HashMap<u64, Met>,
    unwinder: UnwinderX86_64<Arc<[u8]>>,
    cache: CacheX86_64,
    /// The process's own map of generated code: start, end, name.
    generated: Option<Vec<(u64, u64, String)>>,
    changes: u64,
}

impl AddressSpace {
    /// A process by its id.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            regions: Vec::new(),
            read: None,
            met: HashMap::new(),
            unwinder: UnwinderX86_64::new(),
            cache: CacheX86_64::new(),
            generated: None,
            changes: 0,
        }
    }

    /// How often something was found to be mapped no more: an address from before may mean something else since.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn read_again(&mut self) {
        if self.read.is_some_and(|when| when.elapsed() < AGAIN) {
            return;
        }
        self.read = Some(Instant::now());
        let Ok(maps) = fs::read(format!("/proc/{}/maps", self.pid)) else {
            return;
        };
        self.regions = code_regions(&String::from_utf8_lossy(&maps));
        // What is mapped at an address now may be another file than before.
        let gone: Vec<u64> = self
            .met
            .iter()
            .filter(|(_, met)| !self.regions.contains(&met.region))
            .map(|(start, _)| *start)
            .collect();
        self.changes += u64::from(!gone.is_empty());
        for start in gone {
            self.met.remove(&start);
            self.unwinder.remove_module(start);
        }
        self.generated = None;
    }

    /// The region of an address, with its file ready to be asked.
    fn meet(&mut self, binaries: &mut Binaries, address: u64) -> Option<u64> {
        let find = |regions: &[Region]| {
            regions
                .iter()
                .find(|region| (region.start..region.end).contains(&address))
                .cloned()
        };
        let region = find(&self.regions).or_else(|| {
            self.read_again();
            find(&self.regions)
        })?;
        let start = region.start;
        if self.met.contains_key(&start) {
            return Some(start);
        }
        let binary = if region.is_file {
            let path = format!(
                "/proc/{}/map_files/{:x}-{:x}",
                self.pid, region.start, region.end
            );
            binaries.open(Path::new(&path)).unwrap_or(None)
        } else {
            None
        };
        let own = binary
            .as_ref()
            .and_then(|binary| binary.address_of(region.offset));
        let bias = region.start.wrapping_sub(own.unwrap_or(0));
        if let Some(binary) = &binary {
            self.unwinder.add_module(Module::new(
                region.name.clone(),
                region.start..region.end,
                bias,
                sections(binary),
            ));
        }
        self.met.insert(
            start,
            Met {
                region,
                binary,
                bias,
            },
        );
        Some(start)
    }

    /// Walks a stack from where its thread is on.
    pub fn walk(&mut self, binaries: &mut Binaries, place: Place, stack: &[u8]) -> Stack {
        let mut registers = UnwindRegsX86_64::new(place.pc, place.sp, place.fp);
        let mut read = |address: u64| -> Result<u64, ()> {
            let at = usize::try_from(address.checked_sub(place.sp).ok_or(())?).map_err(drop)?;
            let bytes = stack.get(at..at.checked_add(8).ok_or(())?).ok_or(())?;
            bytes.try_into().map(u64::from_le_bytes).map_err(drop)
        };
        let mut walked = Stack::default();
        let mut next = if place.is_return {
            FrameAddress::from_return_address(place.pc)
        } else {
            Some(FrameAddress::from_instruction_pointer(place.pc))
        };
        while let Some(address) = next {
            if walked.addresses.len() >= DEEPEST {
                walked.cut = true;
                break;
            }
            walked
                .addresses
                .push(address.address_for_lookup().wrapping_add(1));
            self.meet(binaries, address.address_for_lookup());
            next = match self.unwinder.unwind_frame(
                address,
                &mut registers,
                &mut self.cache,
                &mut read,
            ) {
                Ok(found) => found.and_then(FrameAddress::from_return_address),
                Err(framehop::Error::ReturnAddressIsNull) => None,
                Err(_) => {
                    walked.cut = true;
                    None
                }
            };
        }
        walked
    }

    /// The frame of a return address.
    pub fn frame(&mut self, binaries: &mut Binaries, address: u64) -> Frame {
        // The call, not what comes after it, which may be another function.
        let call = address.wrapping_sub(1);
        let found = self.meet(binaries, call).and_then(|at| self.met.get(&at));
        let Some(Met {
            region,
            binary: Some(binary),
            bias,
        }) = found
        else {
            return Frame {
                function: self.generated(call),
                file: String::new(),
                address: call,
            };
        };
        let own = call.wrapping_sub(*bias);
        Frame {
            function: binary.function(own).map(|name| demangle(&name)),
            file: region.name.clone(),
            address: own,
        }
    }

    /// The name of generated code, as the process itself tells it to profilers.
    fn generated(&mut self, address: u64) -> Option<String> {
        let pid = self.pid;
        let generated = self
            .generated
            .get_or_insert_with(|| perf_map(pid).unwrap_or_default());
        let after = generated.partition_point(|(start, ..)| *start <= address);
        let (_, end, name) = generated.get(after.checked_sub(1)?)?;
        (address < *end).then(|| name.clone())
    }
}

fn sections(binary: &Binary) -> ExplicitModuleSectionInfo<Arc<[u8]>> {
    let range = |part: &super::elf::Part| {
        part.address..part.address.saturating_add(part.bytes.len() as u64)
    };
    ExplicitModuleSectionInfo {
        base_svma: 0,
        eh_frame_svma: binary.frames.as_ref().map(range),
        eh_frame: binary.frames.as_ref().map(|part| Arc::clone(&part.bytes)),
        eh_frame_hdr_svma: binary.index.as_ref().map(range),
        eh_frame_hdr: binary.index.as_ref().map(|part| Arc::clone(&part.bytes)),
        ..ExplicitModuleSectionInfo::default()
    }
}

/// `/tmp/perf-PID.map` of a process, as it sees itself.
fn perf_map(pid: u32) -> io::Result<Vec<(u64, u64, String)>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let inner = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .and_then(|pids| pids.split_ascii_whitespace().last())
        .ok_or(io::ErrorKind::NotFound)?;
    let root = File::open(format!("/proc/{pid}/root"))?;
    // The tenant's links lead nowhere but into the tenant's own files, and a pipe is not waited for.
    let file: File = openat2(
        &root,
        format!("tmp/perf-{inner}.map"),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT,
    )?
    .into();
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = Vec::new();
    file.take(MAX_PERF_MAP).read_to_end(&mut text)?;
    Ok(parse_perf_map(&String::from_utf8_lossy(&text)))
}

/// Lines of start, size (both hexadecimal) and name.
fn parse_perf_map(text: &str) -> Vec<(u64, u64, String)> {
    let mut found: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ' ');
            let mut hex = || u64::from_str_radix(fields.next()?.trim_start_matches("0x"), 16).ok();
            let (start, size) = (hex()?, hex()?);
            Some((start, start.checked_add(size)?, fields.next()?.to_owned()))
        })
        .collect();
    found.sort_by_key(|(start, ..)| *start);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_with_its_file_and_its_offset() {
        let maps = "\
            55d0c0000000-55d0c0001000 r--p 00000000 fe:00 11                         /usr/bin/a\n\
            55d0c0001000-55d0c0002000 r-xp 00001000 fe:00 11                         /usr/bin/a name\n\
            7f0000002000-7f0000003000 r-xp 00000000 00:00 0 \n\
            nonsense\n";
        let found = code_regions(maps);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].name, "/usr/bin/a name");
        assert_eq!((found[0].offset, found[0].is_file), (0x1000, true));
        assert_eq!((found[1].is_file, found[1].name.as_str()), (false, ""));
    }

    #[test]
    fn maps_of_generated_code_are_read() {
        let map = parse_perf_map(
            "7f20 10 py::train:/a.py\n1000 20 py::a b\nx y z\nffffffffffffffff 10 q\n",
        );
        assert_eq!(
            map,
            [
                (0x1000, 0x1020, "py::a b".to_owned()),
                (0x7f20, 0x7f30, "py::train:/a.py".to_owned())
            ]
        );
    }

    #[test]
    fn a_stack_of_nonsense_ends() {
        let mut space = AddressSpace::new(std::process::id());
        let header = Header {
            call: 0,
            index: 0,
            tgid: 0,
            tid: 0,
            entered_ns: 0,
            returned_ns: 0,
            address: 0,
            bytes: 0,
            fourth: 0,
            pc: a_stack_of_nonsense_ends as fn() as usize as u64 + 8,
            sp: 0x7000,
            fp: 0x7010,
            stack_len: 0,
        };
        let mut binaries = Binaries::default();
        let stack = space.walk(&mut binaries, Place::from(&header), &[0xa5; 4096]);
        assert!(!stack.addresses.is_empty() && stack.addresses.len() <= DEEPEST);
        let frame = space.frame(&mut binaries, header.pc);
        let function = frame.function.expect("this program has symbols");
        assert!(function.contains("a_stack_of_nonsense_ends"), "{function}");
    }
}
