//! Offsets of kernel structure fields, from the running kernel's BTF.

use std::{fs::File, io, os::fd::AsRawFd as _, path::Path};

use btf_rs::{Backend, Btf, BtfType, Struct, Type};
use rustix::fs::{MemfdFlags, memfd_create};

/// Globals of the programs and the fields that they stand for.
const FIELDS: &[(&str, &str, &str)] = &[
    ("OFF_TASK_FILES", "task_struct", "files"),
    ("OFF_TASK_LEADER", "task_struct", "group_leader"),
    ("OFF_TASK_START", "task_struct", "start_boottime"),
    ("OFF_TASK_SIGNAL", "task_struct", "signal"),
    ("OFF_TASK_TGID", "task_struct", "tgid"),
    ("OFF_TASK_PTRACE", "task_struct", "ptrace"),
    ("OFF_SIGNAL_LIVE", "signal_struct", "live"),
    ("OFF_FILES_FDT", "files_struct", "fdt"),
    ("OFF_FDT_FD", "fdtable", "fd"),
    ("OFF_FDT_MAX", "fdtable", "max_fds"),
    ("OFF_FILE_INODE", "file", "f_inode"),
    ("OFF_INODE_RDEV", "inode", "i_rdev"),
    ("OFF_INODE_INO", "inode", "i_ino"),
    ("OFF_INODE_SB", "inode", "i_sb"),
    ("OFF_SB_DEV", "super_block", "s_dev"),
];

/// Where it stands whether a task is in a 32-bit system call.
#[cfg(target_arch = "x86_64")]
const COMPAT: &str = "status";
#[cfg(not(target_arch = "x86_64"))]
const COMPAT: &str = "flags";

/// Why an offset is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum OffsetError {
    /// The kernel offers no BTF.
    #[error("{path}: {reason}; the kernel must be built with CONFIG_DEBUG_INFO_BTF")]
    NoBtf {
        /// Where it was looked for.
        path: String,
        /// Why it cannot be read.
        reason: String,
    },
    /// BTF has no such structure or field.
    #[error("this kernel's BTF has no {structure}.{field}")]
    NoField {
        /// The structure.
        structure: &'static str,
        /// The field.
        field: &'static str,
    },
}

/// Globals of the programs that follow threads while a GPU is idle, as [`FIELDS`].
const THREAD_FIELDS: &[(&str, &str, &str)] = &[
    ("OFF_TASK_TGID", "task_struct", "tgid"),
    ("OFF_TASK_PID", "task_struct", "pid"),
    ("OFF_TASK_JOBCTL", "task_struct", "jobctl"),
];

/// The offset, in bytes, behind every global that the programs leave open.
pub(super) fn lookup(path: &Path) -> Result<Vec<(&'static str, u32)>, OffsetError> {
    let btf = open(path)?;
    let mut found = fields(&btf, FIELDS)?;
    // The holders of an open file: Linux 6.13 renamed the field, and begins to count at 0 there.
    let (offset, least) = offset_of(&btf, "file", "f_ref")
        .map(|offset| (offset, 0))
        .or_else(|| offset_of(&btf, "file", "f_count").map(|offset| (offset, 1)))
        .ok_or(OffsetError::NoField {
            structure: "file",
            field: "f_ref",
        })?;
    found.extend([("OFF_FILE_COUNT", offset), ("FILE_COUNT_LEAST", least)]);
    let [outer, inner] =
        [("task_struct", "thread_info"), ("thread_info", COMPAT)].map(|(structure, field)| {
            offset_of(&btf, structure, field).ok_or(OffsetError::NoField { structure, field })
        });
    found.push(("OFF_TASK_COMPAT", outer? + inner?));
    Ok(found)
}

/// As [`lookup`], for the programs that follow threads while a GPU is idle.
pub(super) fn lookup_threads(path: &Path) -> Result<Vec<(&'static str, u32)>, OffsetError> {
    fields(&open(path)?, THREAD_FIELDS)
}

fn open(path: &Path) -> Result<Btf, OffsetError> {
    let no_btf = |reason: String| OffsetError::NoBtf {
        path: path.display().to_string(),
        reason,
    };
    // sysfs allows no mapping of this file on every kernel; a copy can be mapped on all. Few of its types are looked at, and
    // to read all of them takes ten times as long.
    Btf::from_file_with_backend(path, Backend::Mmap).or_else(|_| {
        let copy = copy_of(path).map_err(|error| no_btf(error.to_string()))?;
        Btf::from_file_with_backend(format!("/proc/self/fd/{}", copy.as_raw_fd()), Backend::Mmap)
            .map_err(|error| no_btf(error.to_string()))
    })
}

fn fields(
    btf: &Btf,
    wanted: &[(&'static str, &'static str, &'static str)],
) -> Result<Vec<(&'static str, u32)>, OffsetError> {
    wanted
        .iter()
        .map(|&(global, structure, field)| {
            offset_of(btf, structure, field)
                .map(|offset| (global, offset))
                .ok_or(OffsetError::NoField { structure, field })
        })
        .collect()
}

/// A copy in memory.
fn copy_of(path: &Path) -> io::Result<File> {
    let mut copy: File = memfd_create("btf", MemfdFlags::CLOEXEC)?.into();
    io::copy(&mut File::open(path)?, &mut copy)?;
    Ok(copy)
}

fn offset_of(btf: &Btf, structure: &str, field: &str) -> Option<u32> {
    btf.resolve_types_by_name(structure)
        .ok()?
        .into_iter()
        .find_map(|found| match found {
            Type::Struct(found) => member_offset(btf, &found, field),
            _ => None,
        })
}

/// Fields may sit in unnamed structures and unions: randomised layouts and unions are written so.
fn member_offset(btf: &Btf, outer: &Struct, field: &str) -> Option<u32> {
    outer.members.iter().find_map(|member| {
        let at = member.bit_offset() / 8;
        let name = btf.resolve_name(member).unwrap_or_default();
        if name == field {
            return Some(at);
        }
        if !name.is_empty() {
            return None;
        }
        match btf.resolve_chained_type(member as &dyn BtfType).ok()? {
            Type::Struct(inner) | Type::Union(inner) => {
                member_offset(btf, &inner, field).map(|inner| at + inner)
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_kernel_has_every_field() {
        let path = Path::new("/sys/kernel/btf/vmlinux");
        let offsets = lookup(path).expect("BTF of the running kernel");
        assert_eq!(offsets.len(), FIELDS.len() + 3);
        assert!(offsets.iter().all(|(_, offset)| *offset < 1 << 16));
        let copy = copy_of(path).expect("readable");
        let copy = format!("/proc/self/fd/{}", copy.as_raw_fd());
        assert_eq!(lookup(Path::new(&copy)).expect("the same"), offsets);
        let threads = lookup_threads(path).expect("BTF of the running kernel");
        assert_eq!(threads.len(), THREAD_FIELDS.len());
        let tgid = |list: &[(&str, u32)]| {
            let found = list.iter().find(|(name, _)| *name == "OFF_TASK_TGID");
            found.map(|(_, offset)| *offset)
        };
        assert_eq!(tgid(&threads), tgid(&offsets));
    }

    #[test]
    fn a_kernel_without_btf_is_named() {
        let error = lookup(Path::new("/nonexistent")).expect_err("no such file");
        assert!(error.to_string().contains("CONFIG_DEBUG_INFO_BTF"));
    }
}
