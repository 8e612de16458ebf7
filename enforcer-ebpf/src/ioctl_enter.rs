//! `tracepoint/syscalls/sys_enter_ioctl`: find the device, decode, reserve.
//!
//! Runs for every ioctl of the host, so the tests come in the order of their price: number and size of the
//! command first, of a control which one it is, then the file behind the fd, and only then what else the caller's memory says.

use aya_ebpf::{
    macros::{map, tracepoint},
    maps::PerCpuArray,
    programs::TracePointContext,
};
use gpuquota_common::{
    event::{self, Event},
    map::{
        InFlight, NO_GPU, NO_TENANT, PLACES, Settings, call, counter, deny, device, refusal,
        settings_flags,
    },
    nvidia::{IoctlCmd, ctrl, status},
    rm::{self, Call},
};

use crate::{
    admission,
    file::{self, patched},
    ledger::{self, Decision, Request, Reserved},
    managed,
    maps::{IN_FLIGHT, SETTINGS, count, daemon_alive, emit, now},
    rm::{Caller, place_of},
    task,
};

/// Offsets in the record of `sys_enter_ioctl`.
mod record {
    pub const FD: usize = 16;
    pub const CMD: usize = 24;
    pub const ARG: usize = 32;
}

/// Number of this load of the programs, never 0.
#[unsafe(no_mangle)]
pub static LOADED_BY: u32 = u32::MAX;

/// Entry of an ioctl.
///
/// In line with the entry point that the macro makes, which would be a frame of its own.
#[tracepoint]
#[inline(always)]
pub fn ioctl_enter(ctx: TracePointContext) -> u32 {
    let raw = task::record::<u64>(&ctx, record::CMD) as u32;
    let cmd = IoctlCmd::from_raw(raw);
    let fd = task::record::<u64>(&ctx, record::FD) as u32;
    if !rm::concerns_ledger(cmd) {
        if managed::concerns(raw) {
            managed::enter(raw, task::record::<u64>(&ctx, record::ARG), fd);
        }
        return 0;
    }
    let arg = task::record::<u64>(&ctx, record::ARG);
    if rm::is_idle_control(&Caller, cmd, arg) {
        return 0;
    }
    match file::device_of(fd) {
        Some(found) if found.kind == device::CONTROL || found.kind == device::GPU => {}
        _ => return 0,
    }
    enter(cmd, arg, fd);
    0
}

#[inline(always)]
fn enter(outer: IoctlCmd, outer_arg: u64, fd: u32) {
    // By reference: a copy on the stack is more than older kernels have room for.
    let Some(settings) = SETTINGS.get(0) else {
        return;
    };
    let thread = task::thread();
    let tgid = task::tgid();
    if tgid == settings.daemon_tgid {
        return;
    }
    let mut decoded = Call::default();
    let mut at = (outer, outer_arg);
    let readable = match rm::unwrap_xfer(&Caller, outer, outer_arg) {
        Ok(inner) => {
            at = inner;
            rm::decode(&Caller, inner.0, inner.1, &mut decoded).is_ok()
        }
        Err(_) => false,
    };
    if !readable {
        count(counter::UNREADABLE);
        at = (outer, outer_arg);
        decoded = Call {
            call: call::UNREADABLE,
            ..Call::default()
        };
    }
    if decoded.call == 0 {
        return;
    }
    let Some(kept) = forget_paths(&Decoded {
        call: decoded,
        cmd: u32::from(at.0.nr) | u32::from(at.0.size) << 16,
        arg: at.1,
    }) else {
        return;
    };
    let decoded = &kept.call;
    count(counter::DECODED);
    let cgroup = task::cgroup();
    let tenant = task::tenant(settings, cgroup);
    if decoded.call == rm::CALL_CONTROL {
        watch_control(tenant, tgid, decoded);
        return;
    }
    task::note_process(tgid, tenant, cgroup);
    let mut flight = InFlight {
        arg: kept.arg,
        reserved: 0,
        wanted: decoded.wanted,
        granted: decoded.granted,
        cgroup,
        cmd: kept.cmd,
        call: decoded.call,
        tenant,
        gpu: place_of(settings, decoded),
        client: decoded.client,
        parent: decoded.parent,
        handle: decoded.handle,
        class: decoded.class,
        source: decoded.source,
        fd,
        admitted: 0,
        limited_by: NO_TENANT,
        granted_is_limit: decoded.granted_is_limit as u16,
        by: patched!(LOADED_BY),
        refusal: refusal::NONE,
        status: 0,
        lever: decoded.lever,
        raised: decoded.raised,
    };
    // From here on it is in memory: fields that the compiler keeps apart from it take the room that they take in it once
    // more, and kernels before 6.13 allow 512 bytes of stack for all frames together.
    let flight = core::hint::black_box(&mut flight);
    if !take_over(settings, thread, flight) {
        return;
    }
    if flight.tenant != NO_TENANT {
        let refusing = refuses(settings);
        if flight.call == call::ALLOC_MEMORY {
            reserve(settings, thread, flight, refusing, decoded.opaque != 0);
        } else if flight.call == call::UNREADABLE && refusing {
            flight.refusal = refusal::UNREADABLE;
        }
    }
    let (tenant, gpu, reserved) = (flight.tenant, flight.gpu, flight.reserved);
    if IN_FLIGHT.insert(thread, flight, 0).is_err() {
        count(counter::INFLIGHT_FULL);
        ledger::unreserve(settings.generation, tenant, gpu, reserved);
    }
}

/// A call as it was decoded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Decoded {
    call: Call,
    /// Escape number and size, `nr | size << 16`.
    cmd: u32,
    arg: u64,
}

/// One place per CPU. Where a program can be preempted (since Linux 7.2), the kernel does not run the same one on that CPU
/// meanwhile; another load of the programs has a map of its own.
#[map]
static DECODED: PerCpuArray<Decoded> = PerCpuArray::with_max_entries(1, 0);

/// Returns what it is given, by way of a map: the verifier then knows nothing of how it came about, and looks at what
/// follows once instead of once for every way to decode a call. Loading takes an eighth of the time.
#[inline(always)]
fn forget_paths(decoded: &Decoded) -> Option<&'static Decoded> {
    let slot = DECODED.get_ptr_mut(0)?;
    // SAFETY: the slot is this CPU's own. Volatile, so that the compiler does not see through it; by reference, since a
    // second copy on the stack is more than older kernels have room for.
    unsafe {
        core::ptr::write_volatile(slot, *decoded);
        Some(&*core::hint::black_box(slot))
    }
}

/// Takes over what a supervisor has reserved for this call. Anything else that is known of this thread is a leftover.
///
/// Returns false if there is nothing more to do: a second copy of this program, which runs while a new daemon
/// replaces an old one's, finds the call decided.
#[inline(always)]
fn take_over(settings: &Settings, thread: u32, flight: &mut InFlight) -> bool {
    // SAFETY: the entry is this thread's own.
    if let Some(before) = unsafe { IN_FLIGHT.get(thread) } {
        // One that this load of the programs has seen before is a call whose exit it has not.
        let by_another = before.call != 0 && before.by != flight.by;
        if by_another && before.arg == flight.arg && before.cmd == flight.cmd {
            return false;
        }
        ledger::unreserve(
            settings.generation,
            before.tenant,
            before.gpu,
            before.reserved,
        );
    }
    admission::take(thread, flight);
    true
}

/// Whether a backend in the kernel refuses what is found here to be over a budget.
#[inline(always)]
pub fn refuses(settings: &Settings) -> bool {
    settings.deny != deny::NONE
        && (settings.flags & settings_flags::OPEN_WITHOUT_DAEMON == 0 || daemon_alive(settings))
}

/// Reserves what the call wants beyond what is reserved already, or marks it as one to refuse.
///
/// Without a backend in the kernel nothing is refused. If a limit is in the way although a call comes this far, no
/// backend could refuse it, or its argument grew behind the backend's back: the exit hook charges and reports it.
#[inline(always)]
fn reserve(settings: &Settings, thread: u32, flight: &mut InFlight, refusing: bool, opaque: bool) {
    if flight.gpu >= PLACES || opaque {
        if !opaque {
            count(counter::UNKNOWN_GPU);
        }
        if refusing && flight.admitted == 0 {
            flight.refusal = refusal::MEMORY;
            flight.status = status::NO_MEMORY;
        }
        return;
    }
    if flight.wanted <= flight.reserved {
        return;
    }
    if !refusing {
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
        return;
    }
    let request = Request {
        thread,
        tenant: flight.tenant,
        gpu: flight.gpu,
        bytes: flight.wanted,
        reserved: flight.reserved,
        // An error number cannot say "later".
        can_wait: settings.deny != deny::LSM,
    };
    match ledger::decide(settings.generation, &request) {
        Decision::Granted => flight.reserved = flight.wanted,
        Decision::Refused {
            status, limited_by, ..
        } => {
            flight.limited_by = limited_by;
            flight.refusal = refusal::MEMORY;
            flight.status = status;
        }
    }
}

/// A tenant may change its own time slices, and whoever has a GPU open may disable and enable everybody's channels: the
/// daemon is told, and sets them again.
#[inline(always)]
fn watch_control(tenant: u32, tgid: u32, decoded: &Call) {
    if !ctrl::changes_scheduling(decoded.class)
        || tenant == NO_TENANT && decoded.class != ctrl::FIFO_DISABLE_CHANNELS
    {
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
