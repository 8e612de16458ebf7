//! What a supervisor has reserved for calls that it lets pass, until the entry hook sees them.
//!
//! A thread that waits for a supervisor may be killed or interrupted at any moment, and its exit hook runs then. So these are
//! not among the calls in flight, which belong to the hooks of their thread: an admission is made and cancelled by user space
//! alone, one operation at a time, and a hook takes it only for the call that it was made for, after the answer.

use aya_ebpf::{macros::map, maps::HashMap};
use gpuquota_common::{
    map::{Admitted, InFlight, MAX_IN_FLIGHT, MAX_TENANTS, PLACES, call, counter},
    nvidia::status,
    op::result,
};

use crate::{
    ledger::{self, Decision, Request},
    maps::{IN_FLIGHT, NO_PREALLOC, count, now, settings},
};

/// Admissions, by thread.
#[map]
static ADMITTED: HashMap<u32, Admitted> = HashMap::with_max_entries(MAX_IN_FLIGHT, NO_PREALLOC);

/// Reserves for a thread whose call waits at a supervisor.
#[inline(always)]
pub fn admit(thread: u32, tenant: u32, gpu: u32, bytes: u64, arg: u64, cmd: u32) -> u32 {
    if tenant >= MAX_TENANTS || gpu >= PLACES {
        return result::INVALID;
    }
    // SAFETY: only a word is read that never changes.
    if unsafe { IN_FLIGHT.get(thread) }.is_some_and(|last| last.call != 0) {
        return result::UNSETTLED;
    }
    // An answer may not have found its thread, which has made the call again.
    cancel(thread, 0);
    let generation = settings().generation;
    let request = Request {
        thread,
        tenant,
        gpu,
        bytes,
        reserved: 0,
        can_wait: true,
    };
    match ledger::decide(generation, &request) {
        Decision::Granted => {}
        Decision::Refused {
            status: status::BUSY_RETRY,
            ..
        } => return result::WAIT,
        Decision::Refused { first: true, .. } => return result::DENIED,
        Decision::Refused { first: false, .. } => return result::DENIED_AGAIN,
    }
    let admitted = Admitted {
        arg,
        reserved: bytes,
        at_ns: now(),
        cmd,
        tenant,
        gpu,
        unused: 0,
    };
    if ADMITTED.insert(thread, admitted, 0).is_err() {
        count(counter::INFLIGHT_FULL);
        ledger::unreserve(generation, tenant, gpu, bytes);
        return result::FULL;
    }
    result::OK
}

/// Takes an admission back whose call never came; with a time, only the one that was made then.
#[inline(always)]
pub fn cancel(thread: u32, at_ns: u64) -> u32 {
    // SAFETY: entries are replaced as a whole.
    let Some(admitted) = (unsafe { ADMITTED.get(thread) }).copied() else {
        return result::NOT_FOUND;
    };
    if at_ns != 0 && admitted.at_ns != at_ns || ADMITTED.remove(thread).is_err() {
        return result::NOT_FOUND;
    }
    ledger::unreserve(
        settings().generation,
        admitted.tenant,
        admitted.gpu,
        admitted.reserved,
    );
    result::OK
}

/// Takes over what was reserved for the call that the current thread makes.
#[inline(always)]
pub fn take(thread: u32, flight: &mut InFlight) {
    if flight.call != call::ALLOC_MEMORY {
        return;
    }
    // SAFETY: entries are replaced as a whole.
    let Some(admitted) = (unsafe { ADMITTED.get(thread) }) else {
        return;
    };
    // One for a call that was never made is left to the daemon.
    if admitted.arg != flight.arg || admitted.cmd != flight.cmd {
        return;
    }
    flight.reserved = admitted.reserved;
    flight.tenant = admitted.tenant;
    flight.gpu = admitted.gpu;
    flight.admitted = 1;
    if ADMITTED.remove(thread).is_err() {
        flight.reserved = 0;
        flight.admitted = 0;
    }
}
