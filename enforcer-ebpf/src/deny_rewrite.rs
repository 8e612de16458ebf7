//! `tracepoint/syscalls/sys_enter_ioctl` and `sys_exit_ioctl`: a call that the entry hook found to be over a budget is
//! made to ask for more than any card has, so that the driver itself refuses it; at the exit the caller finds what it
//! wrote.
//!
//! Needs `bpf_probe_write_user` (not under lockdown), which security hooks may not use and tracepoints may. The
//! entry program is attached after `ioctl_enter`, and programs of one tracepoint run in that order.

use aya_ebpf::{
    helpers::{bpf_probe_read_user, bpf_probe_write_user},
    macros::tracepoint,
    programs::TracePointContext,
};
use gpuquota_common::{
    map::{InFlight, Rewritten, counter, deny, refusal},
    nvidia::{IoctlCmd, status, status_offset},
};

use crate::{
    maps::{IN_FLIGHT, REWRITTEN, count, settings},
    task,
};

/// Entry of an ioctl, after the decision.
#[tracepoint]
pub fn deny_rewrite(_ctx: TracePointContext) -> u32 {
    let thread = task::thread();
    // SAFETY: the entry is this thread's own.
    let Some(flight) = IN_FLIGHT.get_ptr_mut(thread) else {
        return 0;
    };
    // SAFETY: as above.
    let flight = unsafe { &mut *flight };
    if flight.refusal != refusal::MEMORY || settings().deny != deny::REWRITE {
        return 0;
    }
    if !raise(thread, flight) {
        flight.refusal = refusal::STUCK;
        count(counter::NOT_REFUSED);
    }
    0
}

#[inline(always)]
fn raise(thread: u32, flight: &InFlight) -> bool {
    let Some(offset) = status_offset(IoctlCmd::from_raw(flight.cmd)) else {
        return false;
    };
    let at = flight.lever;
    // SAFETY: the helper checks the address and fails on one that cannot be read.
    let Ok(was) = (unsafe { bpf_probe_read_user(at as *const u64) }) else {
        return false;
    };
    if was == flight.raised {
        // A second copy of this program, while a new daemon replaces an old one's.
        return true;
    }
    let rewritten = Rewritten {
        at,
        was,
        raised: flight.raised,
        status_at: flight.arg + offset as u64,
        status: u64::from(flight.status),
    };
    if REWRITTEN.insert(thread, rewritten, 0).is_err() {
        return false;
    }
    // SAFETY: the helper checks the address and fails on one that cannot be written.
    if unsafe { bpf_probe_write_user(at as *mut u64, &raw const flight.raised) }.is_err() {
        let _ = REWRITTEN.remove(thread);
        return false;
    }
    true
}

/// Exit of an ioctl.
#[tracepoint]
pub fn deny_rewrite_exit(_ctx: TracePointContext) -> u32 {
    let thread = task::thread();
    // SAFETY: the entry is this thread's own; it is copied before it is removed.
    let Some(rewritten) = (unsafe { REWRITTEN.get(thread) }).copied() else {
        return 0;
    };
    let _ = REWRITTEN.remove(thread);
    // SAFETY: the helpers check the addresses. A caller that has unmapped its own argument meanwhile keeps the rest.
    unsafe {
        // A preemptible kernel may have passed over this program at the exit of the call, and this is another one: what
        // lies there may be the caller's by now.
        if bpf_probe_read_user(rewritten.at as *const u64) != Ok(rewritten.raised) {
            return 0;
        }
        let _ = bpf_probe_write_user(rewritten.at as *mut u64, &raw const rewritten.was);
        if let Ok(answered) = bpf_probe_read_user(rewritten.status_at as *const u32)
            && answered != status::OK
        {
            let wanted = rewritten.status as u32;
            let _ = bpf_probe_write_user(rewritten.status_at as *mut u32, &raw const wanted);
        }
    }
    0
}
