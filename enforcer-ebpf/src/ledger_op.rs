//! Ledger operations on behalf of user space, run by `BPF_PROG_TEST_RUN`; see [`gpuquota_common::op`].
//!
//! A raw tracepoint program that is never attached: the one type that takes arguments from user space on
//! every kernel since 5.10 and may use every map.

use core::ffi::c_void;

use aya_ebpf::programs::RawTracePointContext;
use gpuquota_common::{
    event::{self, Event},
    map::{
        AccountKey, MAX_GPUS, NO_TENANT, Object, ObjectKey, PLACES, context_key, counter, kind,
        managed_key,
    },
    op::{self, result},
};

use crate::{
    admission, adopt, file, late_exit,
    ledger::{self, Reserved},
    lists, managed,
    maps::{IN_FLIGHT, OBJECTS, count, now, settings},
};

/// Runs the operation that the first word names, and returns its result.
///
/// Written without aya's macro, whose programs always return 0.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp")]
pub extern "C" fn ledger_op(ctx: *mut c_void) -> u32 {
    let ctx = RawTracePointContext::new(ctx);
    let a: u64 = ctx.arg(1);
    let b: u64 = ctx.arg(2);
    let c: u64 = ctx.arg(3);
    let d: u64 = ctx.arg(4);
    match ctx.arg::<u64>(0) {
        op::ADMIT => admission::admit(
            a as u32,
            b as u32,
            c as u32,
            d,
            ctx.arg(5),
            ctx.arg::<u64>(6) as u32,
        ),
        op::CANCEL => admission::cancel(a as u32, b),
        op::SETTLE => settle(a as u32, b as u32),
        op::RELEASE_OBJECT => release_object(a as u32, b as u32, c),
        op::RELEASE_ACCOUNT => release_account(a as u32, b as u32, c as u32),
        op::MOVE_OBJECT => move_object(
            ObjectKey {
                client: a as u32,
                handle: b as u32,
            },
            c as u32,
            d as u32,
            ctx.arg::<u64>(5) as u32,
        ),
        op::IS_OPEN => found(file::is_open_control(a)),
        op::IS_FILE => found(file::is_file(a as u32, b)),
        op::ADOPT_PROCESS => adopt::process(a as u32, b, c as u32, d),
        op::ADOPT_OBJECT => adopt_object(&ctx),
        op::CHARGE_APART => charge_apart(
            (a as u32, c as u32),
            (b as u32, ctx.arg(5)),
            d,
            ctx.arg(6),
            ctx.arg::<u64>(7) == 1,
        ),
        op::RESERVE => {
            if ledger::set_reservation(settings().generation, a as u32, b as u32, c) {
                result::OK
            } else {
                result::INVALID
            }
        }
        op::REFUSE_MANAGED => {
            managed::refuse(a as u32, (b as u32, c as u32), d);
            result::OK
        }
        _ => result::INVALID,
    }
}

#[inline(always)]
fn found(found: bool) -> u32 {
    if found { result::OK } else { result::NOT_FOUND }
}

/// Takes the object apart that the words of an adoption describe.
#[inline(always)]
fn adopt_object(ctx: &RawTracePointContext) -> u32 {
    let client = ctx.arg::<u64>(1) as u32;
    let key = ObjectKey {
        client,
        handle: ctx.arg::<u64>(2) as u32,
    };
    adopt::object(
        key,
        Object {
            bytes: ctx.arg(10),
            born_ns: 0,
            cgroup: ctx.arg(11),
            tgid: ctx.arg::<u64>(3) as u32,
            tenant: ctx.arg::<u64>(4) as u32,
            gpu: ctx.arg::<u64>(5) as u32,
            kind: ctx.arg::<u64>(6) as u32,
            class: ctx.arg::<u64>(7) as u32,
            parent: ctx.arg::<u64>(8) as u32,
            source: ObjectKey {
                client: 0,
                handle: 0,
            },
            dups: 0,
            fd: ctx.arg::<u64>(9) as u32,
            file: 0,
            next: 0,
            previous: 0,
            listed: 0,
            reserved: 0,
        },
    )
}

/// Settles the last call of a thread, whose exit was not seen, for one that waits in its next call.
#[inline(always)]
fn settle(thread: u32, tgid: u32) -> u32 {
    let Some(flight) = IN_FLIGHT.get_ptr_mut(thread) else {
        return result::NOT_FOUND;
    };
    // SAFETY: the thread waits in its call; nobody else touches its entry.
    let flight = unsafe { &*flight };
    if flight.call == 0 {
        return result::NOT_FOUND;
    }
    late_exit::book(settings().generation, tgid, flight);
    let _ = IN_FLIGHT.remove(thread);
    result::OK
}

/// Charges what no call asks RM for. What is there already is charged above a limit too; `above` says what else happens.
#[inline(always)]
fn charge_apart(
    (tgid, gpu): (u32, u32),
    (tenant, cgroup): (u32, u64),
    bytes: u64,
    above: u64,
    managed: bool,
) -> u32 {
    if gpu >= MAX_GPUS {
        return result::INVALID;
    }
    let generation = settings().generation;
    let (key, kind) = if managed {
        (managed_key(tgid, gpu), kind::MANAGED)
    } else {
        (context_key(tgid, gpu), kind::CONTEXT)
    };
    if bytes == 0 {
        ledger::release(generation, key);
        return result::OK;
    }
    if OBJECTS.get_ptr_mut(key).is_none() {
        let object = Object {
            bytes: 0,
            born_ns: now(),
            cgroup,
            tgid,
            tenant,
            gpu,
            kind,
            class: 0,
            parent: 0,
            source: ObjectKey {
                client: 0,
                handle: 0,
            },
            dups: 0,
            fd: 0,
            file: 0,
            next: 0,
            previous: 0,
            listed: 0,
            reserved: 0,
        };
        if OBJECTS.insert(key, object, 0).is_err() {
            count(counter::OBJECTS_FULL);
            return result::FULL;
        }
        lists::link(key.client, key.handle);
    }
    let Some(place) = OBJECTS.get_ptr_mut(key) else {
        return result::NOT_FOUND;
    };
    // SAFETY: a copy of a map value, and a field of it that only user space changes, one call at a time.
    let object = unsafe { *place };
    let before = object.bytes;
    if bytes < before {
        // SAFETY: as above.
        unsafe { (*place).bytes = bytes };
        ledger::withdraw(generation, tgid, object.tenant, gpu, before - bytes);
        return result::OK;
    }
    let forces = above != op::above::REFUSE;
    let outcome = ledger::reserve(generation, object.tenant, gpu, bytes - before, forces);
    if forces || matches!(outcome, Reserved::Yes) {
        // SAFETY: as above.
        unsafe { (*place).bytes = bytes };
        ledger::deposit(generation, tgid, object.tenant, gpu, bytes - before);
    }
    if let Reserved::No {
        limited_by,
        used,
        limit,
    } = outcome
        && above != op::above::CHARGE
        && object.tenant != NO_TENANT
    {
        let event = Event {
            kind: if forces {
                event::kind::BREACHED
            } else {
                event::kind::DENIED
            },
            tenant: object.tenant,
            gpu,
            tgid,
            client: key.client,
            handle: key.handle,
            limited_by,
            class: 0,
            bytes: if forces { bytes } else { bytes - before },
            used,
            limit,
            cgroup: object.cgroup,
            at_ns: now(),
        };
        if !forces {
            ledger::refuse(tgid, &event);
            return result::DENIED;
        }
        ledger::breach(&event);
    }
    result::OK
}

/// Releases an object; with a time of birth, only the one that was born then.
#[inline(always)]
fn release_object(client: u32, handle: u32, born_ns: u64) -> u32 {
    let key = ObjectKey { client, handle };
    // SAFETY: a word of a map value that never changes.
    if let Some(object) = unsafe { OBJECTS.get(key) }
        && born_ns != 0
        && object.born_ns != born_ns
    {
        return result::NOT_FOUND;
    }
    match ledger::release(settings().generation, key) {
        Some(_) => result::OK,
        None => result::NOT_FOUND,
    }
}

#[inline(always)]
fn release_account(tgid: u32, tenant: u32, gpu: u32) -> u32 {
    ledger::close_account(settings().generation, AccountKey::new(tgid, tenant, gpu));
    result::OK
}

/// Moves an object and its charge: to a process that inherited it, or into a tenant that appeared later.
///
/// The charge follows even above the new tenant's limit: the memory is there already.
#[inline(always)]
fn move_object(key: ObjectKey, tgid: u32, tenant: u32, fd: u32) -> u32 {
    let generation = settings().generation;
    let Some(object) = OBJECTS.get_ptr_mut(key) else {
        return result::NOT_FOUND;
    };
    // SAFETY: a copy of a map value.
    let before = unsafe { *object };
    let bytes = ledger::take_bytes(object);
    if before.bytes > 0 && bytes == 0 {
        // It is being freed, and its charge given back where it was.
        return result::NOT_FOUND;
    }
    let charged = bytes > 0 && before.gpu < PLACES;
    if charged {
        ledger::withdraw(generation, before.tgid, before.tenant, before.gpu, bytes);
        let _ = ledger::reserve(generation, tenant, before.gpu, bytes, true);
        ledger::deposit(generation, tgid, tenant, before.gpu, bytes);
    }
    // SAFETY: fields of a map value. Who takes the bytes reads them afterwards.
    unsafe {
        (*object).tgid = tgid;
        (*object).fd = fd;
        (*object).tenant = tenant;
    }
    ledger::give_bytes(object, bytes);
    // A free at the same time has found no bytes and gave nothing back.
    // SAFETY: a word of a map value that never changes.
    let lives = unsafe { OBJECTS.get(key) }.is_some_and(|now| now.born_ns == before.born_ns);
    if charged && !lives {
        let left = ledger::take_bytes(object);
        ledger::withdraw(generation, tgid, tenant, before.gpu, left);
    }
    lists::moved(key, tgid);
    result::OK
}
