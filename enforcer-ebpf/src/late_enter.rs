//! `tracepoint/syscalls/sys_exit_ioctl`, before `ioctl_exit`: a call whose entry was not shown to `ioctl_enter` is put among
//! the calls in flight, for `ioctl_exit` to read. Attached on preemptible kernels only.
//!
//! Up to Linux 7.1 the kernel passes over all programs of tracepoints while a task on the same CPU is preempted in the middle
//! of an operation on a map; since 7.2 over a program of a system call while a task on the same CPU is preempted in that
//! very program.
#![allow(
    unexpected_cfgs,
    reason = "aya's build passes bpf_target_arch, which the compiler does not know by itself"
)]

use aya_ebpf::{
    helpers::generated::{bpf_get_current_task_btf, bpf_task_pt_regs},
    macros::tracepoint,
    programs::TracePointContext,
};
use gpuquota_common::{
    map::{InFlight, NO_GPU, NO_TENANT, ObjectKey, call, counter, device, refusal},
    nvidia::{IoctlCmd, nr},
    rm,
};

use crate::{
    file::{self, field},
    maps::{IN_FLIGHT, SETTINGS, count},
    task,
};

/// Where the three arguments of a native system call are in `struct pt_regs`, also at its end.
#[cfg(bpf_target_arch = "x86_64")]
const ARGUMENTS: [u32; 3] = [112, 104, 96];
/// `orig_x0`, `x1` and `x2`.
#[cfg(not(bpf_target_arch = "x86_64"))]
const ARGUMENTS: [u32; 3] = [272, 8, 16];

/// Exit of an ioctl, before it is settled.
#[tracepoint]
pub fn late_enter(_ctx: TracePointContext) -> u32 {
    let thread = task::thread();
    // SAFETY: only the presence of the entry is asked for.
    if unsafe { IN_FLIGHT.get(thread) }.is_some() {
        return 0;
    }
    let Some([fd, cmd, arg]) = arguments() else {
        return 0;
    };
    let cmd = IoctlCmd::from_raw(cmd as u32);
    // Controls are frequent, and change nothing in the ledger.
    if cmd.nr == nr::RM_CONTROL || !rm::concerns_ledger(cmd) {
        return 0;
    }
    match file::device_of(fd as u32) {
        Some(found) if found.kind == device::CONTROL || found.kind == device::GPU => {}
        _ => return 0,
    }
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    let tgid = task::tgid();
    if tgid == settings.daemon_tgid {
        return 0;
    }
    let cgroup = task::cgroup();
    let tenant = task::tenant(settings, cgroup);
    task::note_process(tgid, tenant, cgroup);
    let flight = InFlight {
        arg,
        reserved: 0,
        wanted: 0,
        granted: 0,
        cgroup,
        cmd: u32::from(cmd.nr) | u32::from(cmd.size) << 16,
        call: call::UNREADABLE,
        tenant,
        gpu: NO_GPU,
        client: 0,
        parent: 0,
        handle: 0,
        class: 0,
        source: ObjectKey {
            client: 0,
            handle: 0,
        },
        fd: fd as u32,
        admitted: 0,
        granted_is_limit: 0,
        limited_by: NO_TENANT,
        by: 0,
        refusal: refusal::NONE,
        status: 0,
        lever: 0,
        raised: 0,
    };
    if IN_FLIGHT.insert(thread, flight, 0).is_err() {
        count(counter::INFLIGHT_FULL);
    }
    0
}

/// The first three arguments of the system call that the current task is in (kernel 5.15).
#[inline(always)]
fn arguments() -> Option<[u64; 3]> {
    // SAFETY: no arguments and no effects; the second helper takes what the first one returns.
    let registers = unsafe { bpf_task_pt_regs(bpf_get_current_task_btf()) } as u64;
    Some([
        field(registers, ARGUMENTS[0])?,
        field(registers, ARGUMENTS[1])?,
        field(registers, ARGUMENTS[2])?,
    ])
}
