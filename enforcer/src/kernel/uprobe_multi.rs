//! Many probes in a process by one link (`BPF_TRACE_UPROBE_MULTI`).
//!
//! Such a link is attached and detached at once, without the lock and the waiting that an event per probe costs (see
//! [`crate::launch::detach`]). aya 0.14 does not load programs for it, so this does, from aya's own reading of the
//! object and with the maps that aya has made. Linux 6.6 has them; before 6.12 some releases run the program for the
//! first thread of a process alone, so 6.12 is asked for.

use std::{
    collections::{HashMap, HashSet},
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::{Ebpf, maps::Map};
use aya_obj::{
    Object,
    generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_prog_type},
};

/// First release whose per-process links mean all threads of a process.
const LEAST_RELEASE: (u32, u32) = (6, 12);
/// `BPF_F_UPROBE_MULTI_RETURN`
const RETURN: u32 = 1;
/// `BPF_F_SLEEPABLE`
const SLEEPABLE: u32 = 1 << 4;

/// Why a program cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MultiError {
    /// Too old.
    #[error("Linux {0}.{1} is too old; it takes {major}.{minor}", major = LEAST_RELEASE.0, minor = LEAST_RELEASE.1)]
    Release(u32, u32),
    /// The object.
    #[error("the object cannot be read: {0}")]
    Object(String),
    /// A system call.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> MultiError {
    move |source| MultiError::System { what, source }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "passed to `map_err`, which hands the error over by value"
)]
fn object(error: impl ToString) -> MultiError {
    MultiError::Object(error.to_string())
}

/// The object with its maps in place, from which programs are loaded.
pub struct Source {
    object: Object,
    btf: Option<OwnedFd>,
}

/// Descriptors of the maps of a loaded object, by name.
pub fn map_descriptors(ebpf: &Ebpf) -> HashMap<String, RawFd> {
    ebpf.maps()
        .filter_map(|(name, map)| match map {
            Map::Array(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::PerCpuArray(data)
            | Map::RingBuf(data) => Some((name.to_owned(), data.fd().as_fd().as_raw_fd())),
            // Not used by the programs that are loaded here.
            _ => None,
        })
        .collect()
}

impl Source {
    /// Reads the object once more and puts descriptors in the place of maps.
    pub fn new(bytes: &[u8], maps: &HashMap<String, RawFd>) -> Result<Self, MultiError> {
        let (major, minor) = release().map_err(system("asking for the kernel's release"))?;
        if (major, minor) < LEAST_RELEASE {
            return Err(MultiError::Release(major, minor));
        }
        let mut parsed = Object::parse(bytes).map_err(object)?;
        let btf = match aya::features().btf() {
            Some(features) => match parsed.fixup_and_sanitize_btf(features).map_err(object)? {
                Some(btf) => Some(load_btf(&btf.to_bytes()).map_err(system("BPF_BTF_LOAD"))?),
                None => None,
            },
            None => None,
        };
        let text: HashSet<usize> = parsed
            .functions
            .keys()
            .map(|(section, _)| *section)
            .collect();
        // A map that is not among them belongs to a program that is not loaded here.
        let own = parsed.maps.clone();
        let placed = own
            .iter()
            .map(|(name, map)| (name.as_str(), maps.get(name).copied().unwrap_or(-1), map));
        parsed.relocate_maps(placed, &text).map_err(object)?;
        parsed.relocate_calls(&text).map_err(object)?;
        Ok(Self {
            object: parsed,
            btf,
        })
    }

    /// Loads a uprobe or uretprobe for links of this kind.
    pub fn load(&self, name: &str, sleepable: bool) -> Result<MultiProgram, MultiError> {
        let program = self
            .object
            .programs
            .get(name)
            .ok_or_else(|| object(format!("it has no program {name}")))?;
        let function = self
            .object
            .functions
            .get(&program.function_key())
            .ok_or_else(|| object(format!("program {name} has no code")))?;
        let func_info = function.func_info.func_info_bytes();
        // SAFETY: all zero is a valid value of this union of plain integers.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        // SAFETY: this is the member that BPF_PROG_LOAD reads.
        let load = unsafe { &mut attr.__bindgen_anon_3 };
        for (slot, byte) in load.prog_name.iter_mut().take(15).zip(name.bytes()) {
            *slot = byte.cast_signed();
        }
        load.prog_type = bpf_prog_type::BPF_PROG_TYPE_KPROBE as u32;
        load.expected_attach_type = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;
        load.prog_flags = if sleepable { SLEEPABLE } else { 0 };
        load.insns = function.instructions.as_ptr() as u64;
        load.insn_cnt = count(function.instructions.len());
        load.license = program.license.as_ptr() as u64;
        if let Some(btf) = &self.btf {
            load.prog_btf_fd = btf.as_raw_fd().cast_unsigned();
            load.func_info = func_info.as_ptr() as u64;
            load.func_info_cnt = count(function.func_info.len());
            load.func_info_rec_size = count(function.func_info_rec_size);
        }
        // SAFETY: everything that the structure points to lives until the call returns.
        let fd =
            unsafe { bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr) }.map_err(system("BPF_PROG_LOAD"))?;
        Ok(MultiProgram { fd })
    }
}

/// A program for links of this kind.
#[derive(Debug)]
pub struct MultiProgram {
    fd: OwnedFd,
}

impl MultiProgram {
    /// Probes a process at places of a file: offsets, each with its cookie; with `returns` where the functions that
    /// begin there return.
    pub fn attach(
        &self,
        process: u32,
        file: &Path,
        points: &[(u64, u64)],
        returns: bool,
    ) -> io::Result<OwnedFd> {
        let path = CString::new(file.as_os_str().as_bytes())?;
        let (offsets, cookies): (Vec<u64>, Vec<u64>) = points.iter().copied().unzip();
        // SAFETY: all zero is a valid value of this union of plain integers.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        // SAFETY: this is the member that BPF_LINK_CREATE reads.
        let link = unsafe { &mut attr.link_create };
        link.__bindgen_anon_1.prog_fd = self.fd.as_raw_fd().cast_unsigned();
        link.attach_type = bpf_attach_type::BPF_TRACE_UPROBE_MULTI as u32;
        // SAFETY: the part that a link of this type reads.
        let multi = unsafe { &mut link.__bindgen_anon_3.uprobe_multi };
        multi.path = path.as_ptr() as u64;
        multi.offsets = offsets.as_ptr() as u64;
        multi.cookies = cookies.as_ptr() as u64;
        multi.cnt = count(offsets.len());
        multi.flags = if returns { RETURN } else { 0 };
        multi.pid = process;
        // SAFETY: everything that the structure points to lives until the call returns.
        unsafe { bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr) }
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn load_btf(bytes: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: all zero is a valid value of this union of plain integers.
    let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
    // SAFETY: this is the member that BPF_BTF_LOAD reads.
    let load = unsafe { &mut attr.__bindgen_anon_7 };
    load.btf = bytes.as_ptr() as u64;
    load.btf_size = count(bytes.len());
    // SAFETY: the bytes live until the call returns.
    unsafe { bpf(bpf_cmd::BPF_BTF_LOAD, &mut attr) }
}

/// `bpf(2)` for commands that give a descriptor.
///
/// # Safety
///
/// What `attr` points to is as the command wants it and lives until the call returns.
unsafe fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: by the contract of this function; the size is that of the structure.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            std::ptr::from_mut(attr),
            size_of::<bpf_attr>(),
        )
    };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just handed this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Version of the running kernel.
pub(super) fn release() -> io::Result<(u32, u32)> {
    parse_release(&fs::read_to_string("/proc/sys/kernel/osrelease")?)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(parse_release("6.18.44\n"), Some((6, 18)));
        assert_eq!(parse_release("5.15.0-105-generic\n"), Some((5, 15)));
        assert_eq!(parse_release("7.2-rc1\n"), Some((7, 2)));
        assert_eq!(parse_release("linux"), None);
        release().expect("this kernel has one");
    }
}
