//! `tracepoint/syscalls/sys_exit_ioctl`: settle what the entry hook or a deny backend reserved.

use aya_ebpf::{
    helpers::generated::bpf_send_signal, macros::tracepoint, programs::TracePointContext,
};
use gpuquota_common::{
    event::{self, Event},
    map::{
        InFlight, MAX_TENANTS, NO_TENANT, Object, ObjectKey, PLACES, RESERVATIONS, Settings, call,
        cell, counter, kind, refusal, settings_flags,
    },
    nvidia::{IoctlCmd, class, nr, nvos00, nvos32, nvos55, nvos64, status, status_offset},
    rm::{self, Call, CallerMemory, object_kind},
};

use crate::{
    admission, file,
    ledger::{self, Reserved},
    lists,
    maps::{IN_FLIGHT, OBJECTS, SETTINGS, budget, count, emit, now},
    rm::{Caller, place_of},
    task,
};

/// Stands for the answer to a call that failed without one.
const FAILED: u32 = u32::MAX;
/// Offset of the result in the record of `sys_exit_ioctl`.
const RECORD_RET: usize = 16;

/// Exit of an ioctl.
///
/// In line with the entry point that the macro makes, which would be a frame of its own.
#[tracepoint]
#[inline(always)]
pub fn ioctl_exit(ctx: TracePointContext) -> u32 {
    let thread = task::thread();
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    // Not copied: kernels before 6.13 allow 512 bytes of stack for all frames together.
    let Some(flight) = IN_FLIGHT.get_ptr_mut(thread) else {
        return 0;
    };
    // SAFETY: the entry is this thread's own, and stays until it is removed below.
    let flight = unsafe { &mut *flight };
    // 0: it makes managed memory.
    let is_known = flight.call != 0 && flight.call != call::UNREADABLE;
    if is_known || read_late(settings, flight) {
        let ret = task::record::<i64>(&ctx, RECORD_RET);
        // The verifier has one path from here on, not one for every way to decode a call.
        let flight = core::hint::black_box(&*flight);
        let answer = if ret == 0 { answer(flight) } else { FAILED };
        if answer == status::OK {
            // What a supervisor has refused was not shown either, and has failed.
            if flight.by == 0 && flight.admitted == 0 {
                count(counter::LATE_ENTRIES);
            }
            settle(settings, flight);
        } else if flight.reserved > 0 {
            ledger::unreserve(
                settings.generation,
                flight.tenant,
                flight.gpu,
                flight.reserved,
            );
            if answer == status::NO_MEMORY && flight.refusal == refusal::NONE {
                tell_full(flight);
            }
        }
    } else if flight.reserved > 0 {
        ledger::unreserve(
            settings.generation,
            flight.tenant,
            flight.gpu,
            flight.reserved,
        );
    }
    let _ = IN_FLIGHT.remove(thread);
    0
}

/// Reads a call that could not be read at its entry: the driver has paged in what it needed.
///
/// Returns whether it concerns the ledger; the entry then says what the call was.
#[inline(always)]
fn read_late(settings: &Settings, flight: &mut InFlight) -> bool {
    let Ok((cmd, arg)) = rm::unwrap_xfer(&Caller, IoctlCmd::from_raw(flight.cmd), flight.arg)
    else {
        return false;
    };
    let mut decoded = Call::default();
    if rm::decode(&Caller, cmd, arg, &mut decoded).is_err()
        || decoded.call == 0
        || decoded.call == rm::CALL_CONTROL
    {
        return false;
    }
    flight.arg = arg;
    flight.cmd = u32::from(cmd.nr) | u32::from(cmd.size) << 16;
    flight.call = decoded.call;
    flight.wanted = decoded.wanted;
    flight.granted = decoded.granted;
    flight.granted_is_limit = decoded.granted_is_limit as u16;
    flight.client = decoded.client;
    flight.parent = decoded.parent;
    flight.handle = decoded.handle;
    flight.class = decoded.class;
    flight.source = decoded.source;
    flight.gpu = place_of(settings, &decoded);
    admission::take(task::thread(), flight);
    true
}

/// The driver's answer. It reports most failures in the argument, with 0 as the call's own result.
#[inline(always)]
fn answer(flight: &InFlight) -> u32 {
    let cmd = IoctlCmd {
        nr: flight.cmd as u8,
        size: (flight.cmd >> 16) as u16,
    };
    let Some(offset) = status_offset(cmd) else {
        return FAILED;
    };
    if let Some(word) = Caller.word(flight.arg + offset as u64) {
        return word;
    }
    // The driver has just written there. Charging is the safe reading.
    count(counter::UNREADABLE);
    status::OK
}

/// Tells the daemon that a card is full: lower classes may have to give back.
#[inline(always)]
fn tell_full(flight: &InFlight) {
    emit(&Event {
        kind: event::kind::CARD_FULL,
        tenant: flight.tenant,
        gpu: flight.gpu,
        tgid: task::tgid(),
        client: flight.client,
        handle: flight.handle,
        limited_by: NO_TENANT,
        class: flight.class,
        bytes: flight.wanted,
        cgroup: flight.cgroup,
        at_ns: now(),
        ..Event::default()
    });
}

/// Books a call that the driver has done.
#[inline(always)]
fn settle(settings: &Settings, flight: &InFlight) {
    let tgid = task::tgid();
    let key = match flight.call {
        call::FREE => {
            if !is_as_it_was(flight) {
                count(counter::CHANGED_FREES);
                return;
            }
            ObjectKey {
                client: flight.client,
                handle: flight.handle,
            }
        }
        call::ALLOC_OBJECT | call::ALLOC_MEMORY | call::DUP => {
            let handle = new_handle(flight);
            let is_client = class::is_client(flight.class) && flight.call == call::ALLOC_OBJECT;
            ObjectKey {
                client: if is_client { handle } else { flight.client },
                handle,
            }
        }
        _ => return,
    };
    // Freed now, or its free was not seen and something new has its name. Not kept as an option: one that has none would
    // be passed on with content that was never written, which the verifier refuses.
    let before = ledger::release(settings.generation, key).unwrap_or_default();
    match flight.call {
        call::FREE if before.kind == 0 => count(counter::UNKNOWN_FREES),
        call::FREE => freed(tgid, key, &before),
        call::DUP => dup(tgid, flight, key),
        made => {
            let bytes = if made == call::ALLOC_MEMORY {
                charge(settings, tgid, flight)
            } else {
                0
            };
            remember(tgid, flight, key, bytes);
            note_use(tgid, flight.fd, key.client);
        }
    }
}

/// Whether the caller's argument still names what it named at the entry. Nobody knows what the driver has freed if a
/// second thread has changed it meanwhile; then everything stays charged.
#[inline(always)]
fn is_as_it_was(flight: &InFlight) -> bool {
    let handle_at = match flight.cmd as u8 {
        nr::RM_VID_HEAP_CONTROL => nvos32::MEMORY,
        _ => nvos00::OBJECT,
    };
    Caller.word(flight.arg) == Some(flight.client)
        && Caller.word(flight.arg + handle_at as u64) == Some(flight.handle)
}

/// The handle of the new object: the driver chooses one where the caller gave 0.
#[inline(always)]
fn new_handle(flight: &InFlight) -> u32 {
    // A client's handle is the driver's choice whatever the caller proposes; others' proposals are taken.
    if flight.handle != 0 && !class::is_client(flight.class) {
        return flight.handle;
    }
    let offset = match IoctlCmd::from_raw(flight.cmd).nr {
        nr::RM_VID_HEAP_CONTROL => nvos32::MEMORY,
        nr::RM_DUP_OBJECT => nvos55::OBJECT,
        _ => nvos64::NEW,
    };
    Caller.word(flight.arg + offset as u64).unwrap_or(0)
}

/// Charges what the driver granted and gives back what was reserved beyond it.
#[inline(always)]
fn charge(settings: &Settings, tgid: u32, flight: &InFlight) -> u64 {
    let bytes = granted(flight);
    if flight.gpu >= PLACES {
        return bytes;
    }
    if bytes > flight.reserved {
        let missing = bytes - flight.reserved;
        let outcome = ledger::reserve(
            settings.generation,
            flight.tenant,
            flight.gpu,
            missing,
            true,
        );
        if let Reserved::No {
            limited_by,
            used,
            limit,
        } = outcome
            && flight.tenant != NO_TENANT
        {
            ledger::breach(&Event {
                kind: event::kind::BREACHED,
                tenant: flight.tenant,
                gpu: flight.gpu,
                tgid,
                client: flight.client,
                handle: flight.handle,
                limited_by,
                class: flight.class,
                bytes,
                used,
                limit,
                cgroup: flight.cgroup,
                at_ns: now(),
            });
            answer_breach(settings, flight, limited_by, bytes);
        }
    } else {
        ledger::unreserve(
            settings.generation,
            flight.tenant,
            flight.gpu,
            flight.reserved - bytes,
        );
    }
    ledger::deposit(settings.generation, tgid, flight.tenant, flight.gpu, bytes);
    bytes
}

/// Signals a process that got memory past a budget, where the budget says so.
///
/// One that had been refused, or got more than it had asked for when it was looked at, has changed the call behind our
/// back: it is killed. One that nothing could refuse is asked to end; the daemon sees to it that it does.
#[inline(always)]
fn answer_breach(settings: &Settings, flight: &InFlight, limited_by: u32, granted: u64) {
    const SIGKILL: u32 = 9;
    const SIGTERM: u32 = 15;
    /// What the driver may add by itself: pages are at most this large.
    const ROUNDING: u64 = 2 << 20;
    let payer = if limited_by == RESERVATIONS {
        flight.tenant
    } else {
        limited_by
    };
    if settings.flags & settings_flags::ANSWER_BREACHES == 0 || payer >= MAX_TENANTS {
        return;
    }
    let ends = budget(settings.generation, cell(payer, flight.gpu))
        .is_some_and(|budget| budget.end_on_breach == 1);
    if !ends {
        return;
    }
    let changed = granted > flight.wanted.saturating_add(ROUNDING);
    let signal = if changed || flight.refusal != refusal::NONE {
        SIGKILL
    } else {
        SIGTERM
    };
    // SAFETY: the process that is signalled is the caller itself (kernel 5.3).
    unsafe { bpf_send_signal(signal) };
}

/// The size that the driver granted, but at least what it takes for what was asked: the size that it writes
/// back may leave out what it rounds up to.
///
/// The caller can write there too. Much more than it asked for shows that the call was changed after it was looked at;
/// a caller that only pretends so pays for it.
#[inline(always)]
fn granted(flight: &InFlight) -> u64 {
    let page: u64 = if class::is_host_memory(flight.class) {
        4 << 10
    } else {
        64 << 10
    };
    if flight.granted == 0 {
        return flight.wanted;
    }
    let Some(word) = Caller.words::<2>(flight.granted) else {
        return flight.wanted;
    };
    let word = u64::from(word[0]) | u64::from(word[1]) << 32;
    let size = if flight.granted_is_limit == 1 {
        word.saturating_add(1)
    } else {
        word
    };
    let rounded = size.saturating_add(page - 1) & !(page - 1);
    rounded.max(flight.wanted)
}

/// Puts a new object into the map.
#[inline(always)]
pub fn remember(tgid: u32, flight: &InFlight, key: ObjectKey, bytes: u64) {
    let kind = object_kind(flight.class);
    let object = Object {
        bytes,
        born_ns: now(),
        cgroup: flight.cgroup,
        tgid,
        tenant: flight.tenant,
        gpu: flight.gpu,
        kind,
        class: flight.class,
        parent: flight.parent,
        source: ObjectKey {
            client: 0,
            handle: 0,
        },
        dups: 0,
        fd: flight.fd,
        file: 0,
        next: 0,
        previous: 0,
        listed: 0,
        reserved: 0,
    };
    if OBJECTS.insert(key, object, 0).is_err() {
        count(counter::OBJECTS_FULL);
    }
    lists::link(key.client, key.handle);
    if kind == kind::CHANNEL_GROUP {
        task::note_context(tgid, flight.gpu);
    }
    if matches!(kind, kind::SUBDEVICE | kind::CHANNEL_GROUP | kind::CHANNEL) {
        emit(&Event {
            kind: event::kind::CHANNEL_NEW,
            tenant: flight.tenant,
            gpu: flight.gpu,
            tgid,
            client: key.client,
            handle: key.handle,
            limited_by: NO_TENANT,
            class: flight.class,
            at_ns: now(),
            ..Event::default()
        });
    }
}

/// Notes on a client that the current process has made something in it, or itself: who that was, and through which file.
///
/// The driver takes a call on a client only through the client's own file, so the file of a call that succeeded is it.
#[inline(always)]
pub fn note_use(tgid: u32, fd: u32, client: u32) {
    let key = ObjectKey {
        client,
        handle: client,
    };
    let Some(object) = OBJECTS.get_ptr_mut(key) else {
        return;
    };
    // SAFETY: words of a map value. The file of a client is always the same, and `dups` of a client is only ever set.
    unsafe {
        if (*object).file == 0 {
            (*object).file = file::file_of(fd).unwrap_or(0);
        }
        if (*object).tgid != tgid {
            (*object).dups = 1;
        }
    }
}

/// Tells the daemon of a freed object below which others may hang.
#[inline(always)]
fn freed(tgid: u32, key: ObjectKey, object: &Object) {
    if kind::is_memory(object.kind) || object.kind == kind::DUP || object.kind == kind::CHANNEL {
        return;
    }
    emit(&Event {
        kind: event::kind::SUBTREE_FREED,
        tenant: object.tenant,
        gpu: object.gpu,
        tgid,
        client: key.client,
        handle: key.handle,
        limited_by: NO_TENANT,
        class: object.class,
        at_ns: now(),
        ..Event::default()
    });
}

/// Notes a second handle: the owner keeps paying, and the memory lives as long as any handle.
#[inline(always)]
fn dup(tgid: u32, flight: &InFlight, key: ObjectKey) {
    let mut source_key = flight.source;
    // SAFETY: what is used of it never changes.
    let Some(mut source) = (unsafe { OBJECTS.get(source_key) }) else {
        return;
    };
    if source.kind == kind::DUP {
        source_key = source.source;
        // SAFETY: as above.
        let Some(owner) = (unsafe { OBJECTS.get(source_key) }) else {
            return;
        };
        source = owner;
    }
    if !kind::is_memory(source.kind) {
        return;
    }
    let object = Object {
        bytes: 0,
        born_ns: source.born_ns,
        cgroup: flight.cgroup,
        tgid,
        tenant: flight.tenant,
        gpu: source.gpu,
        kind: kind::DUP,
        class: source.class,
        parent: flight.parent,
        source: source_key,
        dups: 0,
        fd: flight.fd,
        file: 0,
        next: 0,
        previous: 0,
        listed: 0,
        reserved: 0,
    };
    if OBJECTS.insert(key, object, 0).is_err() {
        count(counter::OBJECTS_FULL);
        return;
    }
    lists::link(key.client, key.handle);
    note_use(tgid, flight.fd, key.client);
    if let Some(owner) = OBJECTS.get_ptr_mut(source_key) {
        // SAFETY: a word of a map value, changed by one kind of program; RM serialises dups of one object.
        unsafe { (*owner).dups += 1 };
    }
}
