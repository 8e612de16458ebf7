//! The records of the tracepoints that the programs read, checked against tracefs.
//!
//! The programs read fields at fixed places. The kernel says in `events/*/format` where they are; a kernel
//! that has moved one is refused here, instead of being misread.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpuquota_common::fault::XidPlaces;

use super::xid::XidTracepoint;

/// Fields the programs rely on: group, event, field, offset in bytes.
const RECORDS: &[(&str, &str, &str, u32)] = &[
    ("syscalls", "sys_enter_ioctl", "fd", 16),
    ("syscalls", "sys_enter_ioctl", "cmd", 24),
    ("syscalls", "sys_enter_ioctl", "arg", 32),
    ("syscalls", "sys_exit_ioctl", "ret", 16),
    ("cgroup", "cgroup_mkdir", "root", 8),
    ("cgroup", "cgroup_mkdir", "id", 16),
    ("cgroup", "cgroup_rmdir", "root", 8),
    ("cgroup", "cgroup_rmdir", "id", 16),
];

/// Where tracefs may be mounted.
const MOUNTS: &[&str] = &["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Why the tracepoints cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TracefsError {
    /// There is none.
    #[error("tracefs is not mounted; mount it: mount -t tracefs none /sys/kernel/tracing")]
    NotMounted,
    /// An event is missing.
    #[error("{path}: {source}; the kernel lacks this tracepoint (CONFIG_FTRACE_SYSCALLS)")]
    NoEvent {
        /// Where it was looked for.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// The driver's tracepoint of GPU faults is missing.
    #[error("{path}: {source}; the loaded driver has no such tracepoint, or none is loaded")]
    NoXid {
        /// Where it was looked for.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// A tracepoint lacks a field.
    #[error("{path}: there is no field {field}")]
    NoField {
        /// Format file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
    /// A field is not where the programs read it.
    #[error("{path}: field {field} is at {found:?}, the programs read it at {expected}")]
    Moved {
        /// Format file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Where it is.
        found: Option<u32>,
        /// Where it should be.
        expected: u32,
    },
}

/// Where tracefs is mounted.
fn root() -> Result<&'static Path, TracefsError> {
    MOUNTS
        .iter()
        .map(Path::new)
        .find(|mount| mount.join("events").is_dir())
        .ok_or(TracefsError::NotMounted)
}

/// The driver's tracepoint of GPU faults, with its fields where this driver has them.
pub fn xid_tracepoint() -> Result<XidTracepoint, TracefsError> {
    const GROUP: &str = "nvidia";
    const EVENT: &str = "nvidia_dev_xid";
    let path = root()?
        .join("events")
        .join(GROUP)
        .join(EVENT)
        .join("format");
    let format = fs::read_to_string(&path).map_err(|source| TracefsError::NoXid {
        path: path.clone(),
        source,
    })?;
    let place = |field| {
        field_offset(&format, field).ok_or_else(|| TracefsError::NoField {
            path: path.clone(),
            field,
        })
    };
    Ok(XidTracepoint {
        group: GROUP,
        event: EVENT,
        places: XidPlaces {
            device: place("dev")?,
            code: place("error_code")?,
            message: place("msg")?,
            reserved: 0,
        },
    })
}

/// Checks every record.
pub(super) fn check_records() -> Result<(), TracefsError> {
    let root = root()?;
    for &(group, event, field, expected) in RECORDS {
        let path = root.join("events").join(group).join(event).join("format");
        let format = match fs::read_to_string(&path) {
            Ok(format) => format,
            Err(source) => return Err(TracefsError::NoEvent { path, source }),
        };
        let found = field_offset(&format, field);
        if found != Some(expected) {
            return Err(TracefsError::Moved {
                path,
                field,
                found,
                expected,
            });
        }
    }
    Ok(())
}

/// The offset of a field in a format file, whose lines name it, its offset, size and sign, with semicolons between.
fn field_offset(format: &str, field: &str) -> Option<u32> {
    format.lines().find_map(|line| {
        let mut parts = line.trim().strip_prefix("field:")?.split(';');
        let name = parts.next()?.rsplit([' ', '*']).next()?;
        if name != field {
            return None;
        }
        parts.next()?.trim().strip_prefix("offset:")?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: &str = "name: sys_enter_ioctl\nformat:\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:unsigned int fd;\toffset:16;\tsize:8;\tsigned:0;\n\
        \tfield:const char *path;\toffset:24;\tsize:8;\tsigned:0;\n\
        \tfield:__data_loc char[] msg;\toffset:32;\tsize:4;\tsigned:0;\n";

    #[test]
    fn finds_fields_by_name() {
        assert_eq!(field_offset(FORMAT, "fd"), Some(16));
        assert_eq!(field_offset(FORMAT, "path"), Some(24));
        assert_eq!(field_offset(FORMAT, "msg"), Some(32));
        assert_eq!(field_offset(FORMAT, "cmd"), None);
    }
}
