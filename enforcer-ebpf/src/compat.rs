//! Driver calls that the entry tracepoint has not reported. What takes video memory or hides what it does is refused to
//! tenants.
//!
//! Those of 32-bit callers are never reported. NVIDIA ships no 32-bit CUDA for any driver that is supported here, but a 64-bit
//! program can make a 32-bit system call. And a preemptible kernel passes programs over (see `late_enter`); such a call is to
//! be made again.
#![allow(
    unexpected_cfgs,
    reason = "aya's build passes bpf_target_arch, which the compiler does not know by itself"
)]

use aya_ebpf::helpers::bpf_get_current_task;

use gpuquota_common::{
    map::{Device, NO_TENANT, Settings, call, counter, device},
    nvidia::IoctlCmd,
    rm::{self, Call},
};

use crate::{
    file::{field, patched},
    maps::count,
    rm::Caller,
    task,
};

/// x86-64: `thread_info.status` in `task_struct`. arm64: `thread_info.flags` there.
#[unsafe(no_mangle)]
pub static OFF_TASK_COMPAT: u32 = u32::MAX;

/// `TS_COMPAT`
#[cfg(bpf_target_arch = "x86_64")]
const IS_COMPAT: u32 = 2;
/// `_TIF_32BIT`
#[cfg(not(bpf_target_arch = "x86_64"))]
const IS_COMPAT: u32 = 1 << 22;

/// Whether the current system call is one of a 32-bit program.
#[inline(always)]
pub fn is_compat() -> bool {
    // SAFETY: no arguments, no effects.
    let task = unsafe { bpf_get_current_task() };
    field::<u32>(task, patched!(OFF_TASK_COMPAT)).is_some_and(|flags| flags & IS_COMPAT != 0)
}

/// Whether a call that no entry hook saw is refused. `device` finds the file's device; it is asked last.
#[inline(always)]
pub fn is_refused(
    settings: &Settings,
    cmd: u32,
    arg: u64,
    device_of: impl FnOnce() -> Option<Device>,
) -> bool {
    let cmd = IoctlCmd::from_raw(cmd);
    if !rm::concerns_ledger(cmd) {
        return false;
    }
    match device_of() {
        Some(found) if found.kind == device::CONTROL || found.kind == device::GPU => {}
        _ => return false,
    }
    if task::tgid() == settings.daemon_tgid || task::tenant(settings, task::cgroup()) == NO_TENANT {
        return false;
    }
    let mut decoded = Call::default();
    let harmless = match rm::unwrap_xfer(&Caller, cmd, arg) {
        Ok((cmd, arg)) => {
            rm::decode(&Caller, cmd, arg, &mut decoded).is_ok()
                && decoded.call != call::ALLOC_MEMORY
        }
        Err(_) => false,
    };
    if !harmless {
        count(counter::UNSEEN_REFUSED);
    }
    !harmless
}
