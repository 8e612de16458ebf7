//! Driver calls that the entry tracepoint does not report: those of 32-bit callers.
//!
//! NVIDIA ships no 32-bit CUDA for any driver that is supported here, but a 64-bit program can make a 32-bit system
//! call. What takes video memory or hides what it does is refused to tenants.

use gpuquota_common::{
    map::{Device, NO_TENANT, Settings, call, counter, device},
    nvidia::IoctlCmd,
    rm::{self, Call},
};

use crate::{maps::count, rm::Caller, task};

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
        count(counter::COMPAT_REFUSED);
    }
    !harmless
}
