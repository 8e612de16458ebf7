//! `tracepoint/syscalls/sys_enter_ioctl`: find the device, decode, reserve.
//!
//! Runs for every ioctl of the host, so the tests come in the order of their price: number and size of the
//! command first, then the file behind the fd, and only then the caller's memory.

use aya_ebpf::{macros::tracepoint, programs::TracePointContext};
use gpuquota_common::{
    event::{self, Event},
    map::{InFlight, NO_GPU, NO_TENANT, Settings, call, counter, device},
    nvidia::{IoctlCmd, ctrl},
    rm::{self, Call},
};

use crate::{
    file,
    ledger::{self, Reserved},
    maps::{IN_FLIGHT, count, emit, now, settings},
    rm::{Caller, gpu_of},
    task,
};

/// Offsets in the record of `sys_enter_ioctl`.
mod record {
    pub const FD: usize = 16;
    pub const CMD: usize = 24;
    pub const ARG: usize = 32;
}

/// Entry of an ioctl.
#[tracepoint]
pub fn ioctl_enter(ctx: TracePointContext) -> u32 {
    let cmd = IoctlCmd::from_raw(task::record::<u64>(&ctx, record::CMD) as u32);
    if !rm::concerns_ledger(cmd) {
        return 0;
    }
    let fd = task::record::<u64>(&ctx, record::FD) as u32;
    match file::device_of(fd) {
        Some(found) if found.kind == device::CONTROL || found.kind == device::GPU => {}
        _ => return 0,
    }
    enter(cmd, task::record::<u64>(&ctx, record::ARG), fd);
    0
}

#[inline(always)]
fn enter(cmd: IoctlCmd, arg: u64, fd: u32) {
    let settings = settings();
    let thread = task::thread();
    let tgid = task::tgid();
    if tgid == settings.daemon_tgid {
        return;
    }
    let mut decoded = Call::default();
    let Ok((cmd, arg)) = rm::unwrap_xfer(&Caller, cmd, arg) else {
        count(counter::UNREADABLE);
        return;
    };
    if rm::decode(&Caller, cmd, arg, &mut decoded).is_err() {
        count(counter::UNREADABLE);
        return;
    }
    if decoded.call == 0 {
        return;
    }
    count(counter::DECODED);
    let cgroup = task::cgroup();
    let tenant = task::tenant(&settings, cgroup);
    if decoded.call == rm::CALL_CONTROL {
        watch_control(tenant, tgid, &decoded);
        return;
    }
    task::note_process(tgid, tenant, cgroup);
    let mut flight = InFlight {
        arg,
        reserved: 0,
        wanted: decoded.wanted,
        granted: decoded.granted,
        cgroup,
        cmd: u32::from(cmd.nr) | u32::from(cmd.size) << 16,
        call: decoded.call,
        tenant,
        gpu: gpu_of(&settings, &decoded),
        client: decoded.client,
        parent: decoded.parent,
        handle: decoded.handle,
        class: decoded.class,
        source: decoded.source,
        fd,
        admitted: 0,
        limited_by: NO_TENANT,
        granted_is_limit: decoded.granted_is_limit,
    };
    take_over(&settings, thread, &mut flight);
    if flight.call == call::ALLOC_MEMORY {
        reserve(&settings, &mut flight);
    }
    if IN_FLIGHT.insert(thread, flight, 0).is_err() {
        count(counter::INFLIGHT_FULL);
        ledger::unreserve(
            settings.generation,
            flight.tenant,
            flight.gpu,
            flight.reserved,
        );
    }
}

/// Takes over what was reserved for this thread before: by a deny backend that let the call pass, or by a
/// second copy of this program while a new daemon replaces an old one's. Anything else is a leftover.
#[inline(always)]
fn take_over(settings: &Settings, thread: u32, flight: &mut InFlight) {
    // SAFETY: only this thread's programs and a supervisor that holds this thread in its call touch the entry.
    let Some(before) = (unsafe { IN_FLIGHT.get(thread) }) else {
        return;
    };
    if before.arg == flight.arg && before.cmd == flight.cmd {
        flight.reserved = before.reserved;
        flight.admitted = before.admitted;
        flight.tenant = before.tenant;
        flight.gpu = before.gpu;
    } else {
        ledger::unreserve(
            settings.generation,
            before.tenant,
            before.gpu,
            before.reserved,
        );
    }
}

/// Reserves what the call wants beyond what is reserved already.
///
/// Nothing is refused here. If a limit is in the way although a call comes this far, no backend could refuse
/// it, or its argument grew behind the backend's back: the exit hook charges and reports it.
#[inline(always)]
fn reserve(settings: &Settings, flight: &mut InFlight) {
    if flight.tenant == NO_TENANT || flight.wanted <= flight.reserved {
        return;
    }
    if flight.gpu == NO_GPU {
        count(counter::UNKNOWN_GPU);
        return;
    }
    let missing = flight.wanted - flight.reserved;
    match ledger::reserve(
        settings.generation,
        flight.tenant,
        flight.gpu,
        missing,
        false,
    ) {
        Reserved::Yes => flight.reserved = flight.wanted,
        Reserved::No { limited_by, .. } => flight.limited_by = limited_by,
    }
}

/// A tenant may change its own time slices: the daemon is told, and sets them again.
#[inline(always)]
fn watch_control(tenant: u32, tgid: u32, decoded: &Call) {
    if tenant == NO_TENANT || !ctrl::changes_scheduling(decoded.class) {
        return;
    }
    count(counter::OWN_CONTROLS);
    emit(&Event {
        kind: event::kind::OWN_CONTROL,
        tenant,
        gpu: NO_GPU,
        tgid,
        client: decoded.client,
        handle: decoded.handle,
        limited_by: NO_TENANT,
        class: decoded.class,
        at_ns: now(),
        ..Event::default()
    });
}
