//! Which functions of a mapped file launch kernels, and where in them a probe costs least.
//!
//! Files are the tenants' to make: everything is read in bounded pieces, by position, and nothing is mapped, so a
//! file that is cut short or lies about itself costs an error and no more.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use gpuquota_common::launch::graph_call;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use object::{
    LittleEndian, elf,
    pod::{Pod, from_bytes, slice_from_bytes},
};

/// The launch calls that are known, as of CUDA 13. Their place in this list is their index.
pub const KNOWN: &[&str] = &[
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel_ptsz",
    "cuLaunchCooperativeKernelMultiDevice",
    "cuLaunch",
    "cuLaunchGrid",
    "cuLaunchGridAsync",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
];

/// Launch calls that every driver has had since CUDA 11.8: one that is missing is said aloud.
pub const EXPECTED: &[&str] = &[
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
];

/// Calls through which the kernel nodes of graphs are learned, with their [`graph_call`].
pub const GRAPH_CALLS: &[(&str, u32)] = &[
    ("cuGraphAddKernelNode", graph_call::ADD),
    ("cuGraphAddKernelNode_v2", graph_call::ADD),
    ("cuGraphAddNode", graph_call::ADD),
    ("cuGraphAddNode_v2", graph_call::ADD),
    ("cuGraphAddChildGraphNode", graph_call::ADD_CHILD),
    ("cuStreamBeginCapture", graph_call::BEGIN_CAPTURE),
    ("cuStreamBeginCapture_ptsz", graph_call::BEGIN_CAPTURE),
    ("cuStreamBeginCapture_v2", graph_call::BEGIN_CAPTURE),
    ("cuStreamBeginCapture_v2_ptsz", graph_call::BEGIN_CAPTURE),
    ("cuStreamEndCapture", graph_call::END_CAPTURE),
    ("cuStreamEndCapture_ptsz", graph_call::END_CAPTURE),
    ("cuGraphClone", graph_call::COPY),
    ("cuGraphInstantiate", graph_call::COPY),
    ("cuGraphInstantiate_v2", graph_call::COPY),
    ("cuGraphInstantiateWithFlags", graph_call::COPY),
    ("cuGraphInstantiateWithParams", graph_call::COPY),
    ("cuGraphInstantiateWithParams_ptsz", graph_call::COPY),
];

/// Prefixes of launch calls: a later driver may have calls that [`KNOWN`] does not.
const PREFIXES: &[&str] = &["cuLaunch", "cuGraphLaunch"];
/// They run on the host and cost the GPU nothing.
const NO_LAUNCH: &str = "cuLaunchHostFunc";

/// Most program headers and symbols, and longest tables, that a file may have.
const MAX_HEADERS: u16 = 256;
const MAX_SYMBOLS: u64 = 1 << 20;
const MAX_NAMES: u64 = 64 << 20;
const MAX_DYNAMIC: u64 = 1 << 16;
/// A function is looked at so far.
const MAX_CODE: u64 = 4096;
/// Code that is looked at where the file does not say how long a function is.
const SOME_CODE: u64 = 128;

/// What a probe at a place costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cost {
    /// The kernel emulates the instruction: some 0.5 µs.
    Emulated,
    /// The kernel steps over a copy of the instruction: some 5 µs.
    Stepped,
}

/// A function with the place for its probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its name.
    pub name: String,
    /// Where in the file the probe goes.
    pub offset: u64,
    /// Where in the file the function begins.
    pub entry: u64,
    /// What a probe there costs.
    pub cost: Cost,
}

/// The calls of a file that matter for launch budgets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbols {
    /// Those that launch.
    pub launches: Vec<Symbol>,
    /// Those that tell about graphs, by their entries.
    pub graphs: Vec<(Symbol, u32)>,
}

impl Symbols {
    /// Launch calls that every driver has and this file does not.
    pub fn missing(&self) -> Vec<&'static str> {
        EXPECTED
            .iter()
            .copied()
            .filter(|name| self.launches.iter().all(|symbol| symbol.name != *name))
            .collect()
    }
}

/// Where a file's bytes come from.
pub trait ReadAt {
    /// Fills `buffer` from `offset` on.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = start
            .checked_add(buffer.len())
            .and_then(|end| self.get(start..end))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(found);
        Ok(())
    }
}

/// The launch calls of a file; `None` for a file that is no shared object or has none.
///
/// Whether a file has any is asked of its hash table, so that files without cost a few short reads.
pub fn find(file: &(impl ReadAt + ?Sized)) -> io::Result<Option<Symbols>> {
    let Some(image) = Image::open(file)? else {
        return Ok(None);
    };
    let mut has_some = false;
    for name in KNOWN {
        if image.has(name)? {
            has_some = true;
            break;
        }
    }
    if !has_some {
        return Ok(None);
    }
    let mut symbols = Symbols::default();
    for (name, found) in image.functions()? {
        let is_launch =
            PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(NO_LAUNCH);
        let graph = GRAPH_CALLS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, call)| *call);
        if is_launch {
            symbols.launches.push(image.place(name, &found)?);
        } else if let Some(call) = graph {
            symbols.graphs.push((image.place(name, &found)?, call));
        }
    }
    symbols.launches.sort_by(|a, b| a.name.cmp(&b.name));
    symbols.graphs.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    Ok(Some(symbols).filter(|found| !found.launches.is_empty()))
}

/// Those functions of a list that a file exports, each with its place in the list; none for a file that is no shared
/// object.
pub fn find_listed(
    file: &(impl ReadAt + ?Sized),
    list: &[(&str, u32)],
) -> io::Result<Vec<(Symbol, usize)>> {
    let Some(image) = Image::open(file)? else {
        return Ok(Vec::new());
    };
    let mut has_some = false;
    for (name, _) in list {
        if image.has(name)? {
            has_some = true;
            break;
        }
    }
    if !has_some {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (name, function) in image.functions()? {
        if let Some(index) = list.iter().position(|(known, _)| *known == name) {
            found.push((image.place(name, &function)?, index));
        }
    }
    Ok(found)
}

pub(crate) type Header = elf::FileHeader64<LittleEndian>;
pub(crate) type Segment = elf::ProgramHeader64<LittleEndian>;
type Dynamic = elf::Dyn64<LittleEndian>;
pub(crate) type Sym = elf::Sym64<LittleEndian>;
pub(crate) const LE: LittleEndian = LittleEndian;

/// A shared object as the dynamic linker sees it.
struct Image<'a, R: ?Sized> {
    file: &'a R,
    segments: Vec<Segment>,
    x86_64: bool,
    symbols: u64,
    names: u64,
    names_size: u64,
    hash: Option<Hash>,
}

#[derive(Clone, Copy)]
enum Hash {
    /// `DT_GNU_HASH`: offset.
    Gnu(u64),
    /// `DT_HASH`: offset.
    SysV(u64),
}

impl<'a, R: ReadAt + ?Sized> Image<'a, R> {
    fn open(file: &'a R) -> io::Result<Option<Self>> {
        let header: Header = match read(file, 0) {
            Ok(header) => header,
            // Too short for a header is no object, and no error.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        let ident = &header.e_ident;
        let is_ours = ident.magic == elf::ELFMAG
            && ident.class == elf::ELFCLASS64
            && ident.data == elf::ELFDATA2LSB
            && usize::from(header.e_phentsize.get(LE)) == size_of::<Segment>()
            && header.e_phnum.get(LE) <= MAX_HEADERS;
        if !is_ours {
            return Ok(None);
        }
        let segments: Vec<Segment> = read_many(
            file,
            header.e_phoff.get(LE),
            u64::from(header.e_phnum.get(LE)),
        )?;
        let Some(dynamic) = segments
            .iter()
            .find(|segment| segment.p_type.get(LE) == elf::PT_DYNAMIC)
        else {
            return Ok(None);
        };
        let size = dynamic.p_filesz.get(LE).min(MAX_DYNAMIC);
        let entries: Vec<Dynamic> = read_many(
            file,
            dynamic.p_offset.get(LE),
            size / size_of::<Dynamic>() as u64,
        )?;
        let value = |tag: elf::DynamicTag| {
            entries
                .iter()
                .take_while(|entry| entry.d_tag.get(LE) != elf::DT_NULL)
                .find(|entry| entry.d_tag.get(LE) == tag)
                .map(|entry| entry.d_val.get(LE))
        };
        let at =
            |tag: elf::DynamicTag| value(tag).and_then(|address| file_offset(&segments, address));
        let (Some(symbols), Some(names), Some(names_size)) =
            (at(elf::DT_SYMTAB), at(elf::DT_STRTAB), value(elf::DT_STRSZ))
        else {
            return Ok(None);
        };
        let hash = at(elf::DT_GNU_HASH)
            .map(Hash::Gnu)
            .or_else(|| at(elf::DT_HASH).map(Hash::SysV));
        Ok(Some(Self {
            file,
            x86_64: header.e_machine.get(LE) == elf::EM_X86_64,
            symbols,
            names,
            names_size: names_size.min(MAX_NAMES),
            hash,
            segments,
        }))
    }

    /// Whether the file defines a symbol, by its hash table.
    fn has(&self, name: &str) -> io::Result<bool> {
        match self.hash {
            Some(Hash::Gnu(at)) => self.has_gnu(at, name),
            Some(Hash::SysV(at)) => self.has_sysv(at, name),
            None => Ok(false),
        }
    }

    fn has_gnu(&self, at: u64, name: &str) -> io::Result<bool> {
        let [buckets, first, bloom_words, shift] = self.words::<4>(at)?;
        if buckets == 0 || bloom_words == 0 || !bloom_words.is_power_of_two() {
            return Ok(false);
        }
        let hash = elf::gnu_hash(name.as_bytes());
        let bloom_at = at + 16;
        let mut word = [0; 8];
        let index = u64::from((hash / 64) & (bloom_words - 1));
        self.file.read_at(&mut word, bloom_at + index * 8)?;
        let mask = 1u64 << (hash % 64) | 1u64 << (hash.checked_shr(shift).unwrap_or(0) % 64);
        if u64::from_le_bytes(word) & mask != mask {
            return Ok(false);
        }
        let buckets_at = bloom_at + u64::from(bloom_words) * 8;
        let [start] = self.words::<1>(buckets_at + u64::from(hash % buckets) * 4)?;
        if start < first {
            return Ok(false);
        }
        let chains_at = buckets_at + u64::from(buckets) * 4;
        for index in u64::from(start)..MAX_SYMBOLS {
            let [chain] = self.words::<1>(chains_at + (index - u64::from(first)) * 4)?;
            if chain | 1 == hash | 1 && self.is_defined(index, name)? {
                return Ok(true);
            }
            if chain & 1 != 0 {
                break;
            }
        }
        Ok(false)
    }

    fn has_sysv(&self, at: u64, name: &str) -> io::Result<bool> {
        let [buckets, chains] = self.words::<2>(at)?;
        if buckets == 0 {
            return Ok(false);
        }
        let hash = elf::hash(name.as_bytes());
        let [mut index] = self.words::<1>(at + 8 + u64::from(hash % buckets) * 4)?;
        // A chain is no longer than the table; one that goes in circles is cut off.
        for _ in 0..chains {
            if index == 0 || index >= chains {
                break;
            }
            if self.is_defined(u64::from(index), name)? {
                return Ok(true);
            }
            [index] = self.words::<1>(at + 8 + (u64::from(buckets) + u64::from(index)) * 4)?;
        }
        Ok(false)
    }

    fn is_defined(&self, index: u64, name: &str) -> io::Result<bool> {
        let symbol: Sym = read(self.file, self.symbols + index * size_of::<Sym>() as u64)?;
        let at = u64::from(symbol.st_name.get(LE));
        if symbol.st_shndx.get(LE) == elf::SHN_UNDEF || at + name.len() as u64 >= self.names_size {
            return Ok(false);
        }
        let mut found = vec![0; name.len() + 1];
        self.file.read_at(&mut found, self.names + at)?;
        Ok(found.strip_suffix(&[0]) == Some(name.as_bytes()))
    }

    /// All functions that the file exports.
    fn functions(&self) -> io::Result<Vec<(String, Sym)>> {
        let symbols: Vec<Sym> = read_many(self.file, self.symbols, self.count()?)?;
        let mut names = vec![0; usize::try_from(self.names_size).unwrap_or(0)];
        self.file.read_at(&mut names, self.names)?;
        Ok(symbols
            .into_iter()
            .filter(|symbol| {
                symbol.st_shndx.get(LE) != elf::SHN_UNDEF && symbol.st_type() == elf::STT_FUNC
            })
            .filter_map(|symbol| {
                let at = usize::try_from(symbol.st_name.get(LE)).ok()?;
                let rest = names.get(at..)?;
                let end = rest.iter().position(|byte| *byte == 0)?;
                let name = std::str::from_utf8(&rest[..end]).ok()?;
                Some((name.to_owned(), symbol))
            })
            .collect())
    }

    /// How many symbols the table has; only the hash tables tell.
    fn count(&self) -> io::Result<u64> {
        let count = match self.hash {
            Some(Hash::SysV(at)) => u64::from(self.words::<2>(at)?[1]),
            Some(Hash::Gnu(at)) => {
                let [buckets, first, bloom_words, _] = self.words::<4>(at)?;
                let buckets_at = at + 16 + u64::from(bloom_words) * 8;
                let starts: Vec<[u8; 4]> =
                    read_many(self.file, buckets_at, u64::from(buckets).min(MAX_SYMBOLS))?;
                let last = starts
                    .into_iter()
                    .map(u32::from_le_bytes)
                    .max()
                    .unwrap_or(0);
                if last < first {
                    return Ok(u64::from(first));
                }
                let chains_at = buckets_at + u64::from(buckets) * 4;
                let mut index = u64::from(last);
                while index < MAX_SYMBOLS {
                    let [chain] = self.words::<1>(chains_at + (index - u64::from(first)) * 4)?;
                    index += 1;
                    if chain & 1 != 0 {
                        break;
                    }
                }
                index
            }
            None => 0,
        };
        Ok(count.min(MAX_SYMBOLS))
    }

    fn place(&self, name: String, symbol: &Sym) -> io::Result<Symbol> {
        let address = symbol.st_value.get(LE);
        let entry = file_offset(&self.segments, address).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{name} is in no segment"),
            )
        })?;
        let size = match symbol.st_size.get(LE) {
            0 => SOME_CODE,
            size => size.min(MAX_CODE),
        };
        let mut code = vec![0; usize::try_from(size).unwrap_or(0)];
        self.file.read_at(&mut code, entry)?;
        let (offset, cost) = if self.x86_64 {
            cheapest(&code)
        } else {
            (0, Cost::Stepped)
        };
        Ok(Symbol {
            name,
            offset: entry + offset,
            entry,
            cost,
        })
    }

    fn words<const N: usize>(&self, at: u64) -> io::Result<[u32; N]> {
        let words: [[u8; 4]; N] = read(self.file, at)?;
        Ok(words.map(u32::from_le_bytes))
    }
}

/// A structure at a place of a file.
pub(crate) fn read<T: Pod>(file: &(impl ReadAt + ?Sized), offset: u64) -> io::Result<T> {
    let mut bytes = vec![0; size_of::<T>()];
    file.read_at(&mut bytes, offset)?;
    from_bytes::<T>(&bytes)
        .map(|(value, _)| *value)
        .map_err(|()| io::ErrorKind::InvalidData.into())
}

/// So many structures from a place of a file on. Their number has to be bounded before.
pub(crate) fn read_many<T: Pod>(
    file: &(impl ReadAt + ?Sized),
    offset: u64,
    count: u64,
) -> io::Result<Vec<T>> {
    let count = usize::try_from(count).map_err(|_| io::ErrorKind::InvalidData)?;
    let mut bytes = vec![0; count * size_of::<T>()];
    file.read_at(&mut bytes, offset)?;
    slice_from_bytes::<T>(&bytes, count)
        .map(|(values, _)| values.to_vec())
        .map_err(|()| io::ErrorKind::InvalidData.into())
}

/// Where in the file an address is.
fn file_offset(segments: &[Segment], address: u64) -> Option<u64> {
    segments
        .iter()
        .filter(|segment| segment.p_type.get(LE) == elf::PT_LOAD)
        .find_map(|segment| {
            let within = address.checked_sub(segment.p_vaddr.get(LE))?;
            (within < segment.p_filesz.get(LE)).then(|| segment.p_offset.get(LE) + within)
        })
}

/// The place in a function that every call passes exactly once and where a probe costs least.
///
/// That is an instruction that the kernel emulates (`arch/x86/kernel/uprobes.c`: pushes of a register, `nop`,
/// relative jumps and calls) before the first branch, unless a branch of the function leads back there.
pub fn cheapest(code: &[u8]) -> (u64, Cost) {
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let mut entry_block: Vec<(u64, bool)> = Vec::new();
    let mut targets: Vec<u64> = Vec::new();
    let mut in_entry_block = true;
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            break;
        }
        let at = instruction.ip();
        let end = instruction.next_ip();
        let bytes = usize::try_from(at)
            .ok()
            .zip(usize::try_from(end).ok())
            .and_then(|(at, end)| code.get(at..end))
            .unwrap_or_default();
        if in_entry_block {
            entry_block.push((at, is_emulated(bytes)));
            in_entry_block = instruction.flow_control() == FlowControl::Next;
        }
        if matches!(
            instruction.flow_control(),
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
        ) {
            targets.push(instruction.near_branch_target());
        }
    }
    entry_block
        .into_iter()
        .take_while(|(at, _)| !targets.iter().any(|target| (1..=*at).contains(target)))
        .find(|(_, emulated)| *emulated)
        .map_or((0, Cost::Stepped), |(at, _)| (at, Cost::Emulated))
}

fn is_emulated(instruction: &[u8]) -> bool {
    match instruction {
        // push %rax…%rdi; with one prefix %r8…%r15 (Linux 4.18). nop. jcc rel8. call, jmp rel32, jmp rel8.
        [0x50..=0x57 | 0x90]
        | [0x41, 0x50..=0x57]
        | [0x70..=0x7f | 0xeb, _]
        | [0xe8 | 0xe9, _, _, _, _] => true,
        // jcc rel32
        [0x0f, 0x80..=0x8f, rest @ ..] => rest.len() == 4,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_at_the_entry_is_taken() {
        // push rbp; mov rbp,rsp
        assert_eq!(
            cheapest(&[0x55, 0x48, 0x89, 0xe5, 0xc3]),
            (0, Cost::Emulated)
        );
        // push r12 needs one prefix
        assert_eq!(cheapest(&[0x41, 0x54, 0xc3]), (0, Cost::Emulated));
    }

    #[test]
    fn a_later_push_is_better_than_a_step() {
        // endbr64; mov rax,rdi; push rbx
        let code = [0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x89, 0xf8, 0x53, 0xc3];
        assert_eq!(cheapest(&code), (7, Cost::Emulated));
        // sub rsp,8; test eax,eax; je +0; ret
        let code = [0x48, 0x83, 0xec, 0x08, 0x85, 0xc0, 0x74, 0x00, 0xc3];
        assert_eq!(cheapest(&code), (6, Cost::Emulated));
    }

    #[test]
    fn nothing_behind_a_branch_or_in_a_loop_is_taken() {
        // sub rsp,8; ret; push rbx
        assert_eq!(
            cheapest(&[0x48, 0x83, 0xec, 0x08, 0xc3, 0x53]),
            (0, Cost::Stepped)
        );
        // mov eax,5; L: dec eax; jne L; ret. The jump runs five times.
        let code = [0xb8, 5, 0, 0, 0, 0xff, 0xc8, 0x75, 0xfc, 0xc3];
        assert_eq!(cheapest(&code), (0, Cost::Stepped));
    }

    #[test]
    fn code_that_is_none_is_stepped_at_the_entry() {
        assert_eq!(cheapest(&[]), (0, Cost::Stepped));
        assert_eq!(cheapest(&[0x06, 0x06, 0x55]), (0, Cost::Stepped));
        // 66-prefixed jumps are not emulated
        assert_eq!(cheapest(&[0x66, 0x90, 0xc3]), (0, Cost::Stepped));
    }

    #[test]
    fn other_files_have_none() {
        for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", &[0; 4096]] {
            assert_eq!(find(bytes).expect("no object is no error"), None);
        }
        // This test is an object without launch calls.
        let own = File::open("/proc/self/exe").expect("own program");
        assert_eq!(find(&own).expect("readable"), None);
    }

    #[test]
    fn a_file_that_lies_about_itself_is_an_error_or_nothing() {
        let own = std::fs::read("/proc/self/exe").expect("own program");
        let head = &own[..own.len().min(1 << 16)];
        for at in 0..head.len().min(2048) {
            for value in [0, 0x7f, 0xff] {
                let mut bent = head.to_vec();
                bent[at] = value;
                // Must return, and not reserve memory for what is not there.
                drop(find(&bent[..]));
            }
        }
    }
}
