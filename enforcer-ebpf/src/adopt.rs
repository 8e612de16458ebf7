//! Ledger operations for processes that were there before anybody observed: see `gpuquota_common::op`.

use gpuquota_common::{
    event,
    map::{Object, ObjectKey, PLACES, Process, counter, kind, process_flags},
    op::result,
};

use crate::{
    ledger, lists,
    maps::{OBJECTS, PROCESSES, count, emit, now, settings},
    task,
};

/// `BPF_NOEXIST`: what the observer has seen itself is never replaced.
const NO_EXIST: u64 = 1;

/// Notes a process, and lets the daemon wait for its end.
#[inline(always)]
pub fn process(tgid: u32, start_ns: u64, tenant: u32, cgroup: u64) -> u32 {
    let process = Process::new(start_ns, 0, process_flags::ACTIVE | process_flags::ADOPTED);
    if PROCESSES.insert(tgid, process, NO_EXIST).is_err() && PROCESSES.get_ptr(tgid).is_none() {
        count(counter::PROCESSES_FULL);
        return result::FULL;
    }
    emit(&task::process_event(
        event::kind::PROCESS_NEW,
        tgid,
        tenant,
        cgroup,
    ));
    result::OK
}

/// Takes an object into the ledger, with its charge. The memory is there already, so no limit is asked.
#[inline(always)]
pub fn object(key: ObjectKey, mut object: Object) -> u32 {
    if object.kind == 0 || object.kind > kind::HOST {
        return result::INVALID;
    }
    if OBJECTS.get_ptr(key).is_some() {
        return result::OK;
    }
    object.born_ns = now();
    let Object {
        tgid, tenant, gpu, ..
    } = object;
    let bytes = if gpu < PLACES { object.bytes } else { 0 };
    let generation = settings().generation;
    // Before it can be found: a free may come at once.
    if bytes > 0 {
        let _ = ledger::reserve(generation, tenant, gpu, bytes, true);
        ledger::deposit(generation, tgid, tenant, gpu, bytes);
    }
    if OBJECTS.insert(key, object, NO_EXIST).is_err() {
        if bytes > 0 {
            ledger::withdraw(generation, tgid, tenant, gpu, bytes);
        }
        if OBJECTS.get_ptr(key).is_none() {
            count(counter::OBJECTS_FULL);
            return result::FULL;
        }
        return result::OK;
    }
    lists::link(key.client, key.handle);
    if object.kind == kind::CHANNEL_GROUP {
        task::note_context(tgid, gpu);
    }
    result::OK
}
