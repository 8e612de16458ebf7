//! Which device stands behind a file descriptor.
//!
//! Tracepoints see only the number of an fd. The way from the task to the inode goes through structures
//! whose layout differs between kernels: user space looks the offsets up in BTF and sets the globals here.

use aya_ebpf::helpers::{bpf_get_current_task, bpf_probe_read_kernel};
use gpuquota_common::map::{Device, DeviceKey, device};

use crate::maps::DEVICES;

macro_rules! offset {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub static $name: u32 = u32::MAX;
    };
}
offset!(
    /// `task_struct.files`
    OFF_TASK_FILES
);
offset!(
    /// `files_struct.fdt`
    OFF_FILES_FDT
);
offset!(
    /// `fdtable.fd`
    OFF_FDT_FD
);
offset!(
    /// `fdtable.max_fds`
    OFF_FDT_MAX
);
offset!(
    /// `file.f_inode`
    OFF_FILE_INODE
);
offset!(
    /// `file.f_ref`, before Linux 6.13 `file.f_count`
    OFF_FILE_COUNT
);
offset!(
    /// What that counter says of a file that one holder has, less one: since 6.13 it begins at 0.
    FILE_COUNT_LEAST
);
offset!(
    /// `inode.i_rdev`
    OFF_INODE_RDEV
);
offset!(
    /// `inode.i_ino`
    OFF_INODE_INO
);
offset!(
    /// `inode.i_sb`
    OFF_INODE_SB
);
offset!(
    /// `super_block.s_dev`
    OFF_SB_DEV
);

/// Reads an offset that user space patched; volatile because the compiler sees only the initial value.
macro_rules! patched {
    ($name:path) => {{
        // SAFETY: a plain static of this program, always readable.
        unsafe { core::ptr::read_volatile(&raw const $name) }
    }};
}
pub(crate) use patched;

/// Reads a field of a kernel structure (`bpf_probe_read_kernel`: kernel 5.5).
#[inline(always)]
pub fn field<T: Copy>(base: u64, offset: u32) -> Option<T> {
    if base == 0 {
        return None;
    }
    // SAFETY: the helper checks the address and fails on one that cannot be read.
    unsafe { bpf_probe_read_kernel((base + u64::from(offset)) as *const T) }.ok()
}

/// The driver's device behind `fd` of the current task, or `None` for every other file.
#[inline(always)]
pub fn device_of(fd: u32) -> Option<Device> {
    device_behind(file_of(fd)?)
}

/// The address of the open file behind `fd` of the current task.
#[inline(always)]
pub fn file_of(fd: u32) -> Option<u64> {
    // SAFETY: no arguments, no effects (kernel 4.8).
    let task = unsafe { bpf_get_current_task() };
    let files: u64 = field(task, patched!(OFF_TASK_FILES))?;
    let table: u64 = field(files, patched!(OFF_FILES_FDT))?;
    let max: u32 = field(table, patched!(OFF_FDT_MAX))?;
    if fd >= max {
        return None;
    }
    let fds: u64 = field(table, patched!(OFF_FDT_FD))?;
    field(fds, fd.wrapping_mul(8)).filter(|file| *file != 0)
}

/// Whether `fd` of the current task is the open file at an address.
#[inline(always)]
pub fn is_file(fd: u32, file: u64) -> bool {
    // Not compared as options: the compiler then looks at the content of one that has none, which the verifier refuses.
    let found = core::hint::black_box(file_of(fd).unwrap_or(0));
    found == file
}

/// Whether the file at an address, once a control file's, is that and open.
///
/// One that was closed has no holder, or its memory is another file's by now.
#[inline(always)]
pub fn is_open_control(file: u64) -> bool {
    let Some(holders) = field::<i64>(file, patched!(OFF_FILE_COUNT)) else {
        return false;
    };
    holders >= i64::from(patched!(FILE_COUNT_LEAST))
        && matches!(device_behind(file), Some(found) if found.kind == device::CONTROL)
}

/// The driver's device behind a `struct file`, or `None` for every other file.
#[inline(always)]
pub fn device_behind(file: u64) -> Option<Device> {
    let inode: u64 = field(file, patched!(OFF_FILE_INODE))?;
    let rdev: u32 = field(inode, patched!(OFF_INODE_RDEV))?;
    let key = if rdev == 0 {
        let superblock: u64 = field(inode, patched!(OFF_INODE_SB))?;
        DeviceKey {
            inode: field(inode, patched!(OFF_INODE_INO))?,
            dev: field(superblock, patched!(OFF_SB_DEV))?,
            reserved: 0,
        }
    } else {
        DeviceKey {
            inode: 0,
            dev: rdev,
            reserved: 0,
        }
    };
    // SAFETY: entries are never changed in place, only inserted and removed.
    unsafe { DEVICES.get(key) }.copied()
}
