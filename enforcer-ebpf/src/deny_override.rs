//! `kprobe/__ARCH_sys_ioctl`: a call that the entry hook found to be over a budget returns before the driver sees it.
//!
//! The entry tracepoint of a system call runs before its function, so the decision is there already; this program
//! carries it out. Needs `bpf_override_return` (`CONFIG_BPF_KPROBE_OVERRIDE`) and `bpf_probe_write_user` (not under
//! lockdown). Attached to the entry of the system call, where an error can be injected and interrupts are on.
#![allow(
    unexpected_cfgs,
    reason = "aya's build passes bpf_target_arch, which the compiler does not know by itself"
)]

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_probe_read_kernel, bpf_probe_write_user, generated::bpf_override_return},
    macros::kprobe,
    programs::ProbeContext,
};
use gpuquota_common::{
    map::{InFlight, counter, deny, refusal},
    nvidia::{IoctlCmd, status_offset},
};

use crate::{
    compat, file,
    maps::{IN_FLIGHT, count, settings},
    task,
};

const EPERM: i64 = 1;
const ENOMEM: i64 = 12;
const EFAULT: i64 = 14;
const ENOSYS: i64 = 38;

/// Entry of a native ioctl.
#[kprobe]
pub fn deny_override(ctx: ProbeContext) -> u32 {
    // SAFETY: the entry is this thread's own.
    let Some(flight) = (unsafe { IN_FLIGHT.get(task::thread()) }) else {
        return 0;
    };
    if flight.refusal == refusal::NONE || settings().deny != deny::OVERRIDE {
        return 0;
    }
    let result = if flight.refusal == refusal::UNREADABLE {
        // The driver could not copy what cannot be read either.
        -EFAULT
    } else if flight.refusal == refusal::MANAGED {
        -EPERM
    } else if answer(flight) {
        0
    } else {
        count(counter::NOT_REFUSED);
        -ENOMEM
    };
    override_return(&ctx, result);
    0
}

/// Entry of an ioctl of a 32-bit caller, which the tracepoint does not report.
#[kprobe]
pub fn deny_override_compat(ctx: ProbeContext) -> u32 {
    let settings = settings();
    if settings.deny != deny::OVERRIDE {
        return 0;
    }
    // The function's only argument is the caller's registers.
    let Some(caller) = ctx.arg::<u64>(0) else {
        return 0;
    };
    let Some([fd, cmd, arg]) = arguments(caller) else {
        return 0;
    };
    if compat::is_refused(&settings, cmd as u32, arg & 0xffff_ffff, || {
        file::device_of(fd as u32)
    }) {
        override_return(&ctx, -ENOSYS);
    }
    0
}

/// Writes the status where the driver would.
#[inline(always)]
fn answer(flight: &InFlight) -> bool {
    let Some(offset) = status_offset(IoctlCmd::from_raw(flight.cmd)) else {
        return false;
    };
    let at = flight.arg + offset as u64;
    // SAFETY: the helper checks the address and fails on one that cannot be written.
    unsafe { bpf_probe_write_user(at as *mut u32, &raw const flight.status) }.is_ok()
}

#[inline(always)]
fn override_return(ctx: &ProbeContext, result: i64) {
    // SAFETY: the context of this very program (kernel 4.16).
    unsafe { bpf_override_return(ctx.as_ptr().cast(), result as u64) };
}

/// The first three arguments of a 32-bit system call.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn arguments(registers: u64) -> Option<[u64; 3]> {
    // `struct pt_regs`: ebx, ecx and edx of the caller.
    const BX: u64 = 40;
    const CX: u64 = 88;
    const DX: u64 = 96;
    Some([
        register(registers + BX)?,
        register(registers + CX)?,
        register(registers + DX)?,
    ])
}

/// The first three arguments of a 32-bit system call.
#[cfg(not(bpf_target_arch = "x86_64"))]
#[inline(always)]
fn arguments(registers: u64) -> Option<[u64; 3]> {
    // `struct user_pt_regs` begins with x0.
    Some([
        register(registers)?,
        register(registers + 8)?,
        register(registers + 16)?,
    ])
}

#[inline(always)]
fn register(at: u64) -> Option<u64> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel(at as *const u64) }.ok()
}
