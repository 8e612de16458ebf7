//! Who pays: reservations, charges and their release.
//!
//! A reservation is in the usage of the tenant and of every tenant around it from the moment it is made,
//! so two racing allocations can never both pass a limit that holds only one: a race may refuse at the
//! edge, it never over-admits. Settling moves the reservation into the account of the process; a release
//! takes from the account what is there and no more, so nothing is given back twice.

use gpuquota_common::{
    claim,
    event::{self, Event},
    launch::SharedWord as _,
    map::{
        AccountKey, MAX_NESTING, MAX_TENANTS, NO_TENANT, ORPHAN_CLIENT, Object, ObjectKey, PLACES,
        RESERVATIONS, Refusal, SECOND_TRY_NS, Usage, cell, counter, kind, on_max,
    },
    nvidia::status,
};

use crate::{
    atomic::Word,
    lists,
    maps::{
        ACCOUNTS, CARD_SIZES, CARDS, OBJECTS, REFUSALS, USAGE, budget, count, emit, now, tenant_row,
    },
    waiting,
};

/// Outcome of a reservation.
#[derive(Clone, Copy)]
pub enum Reserved {
    /// The bytes are in the usage of the tenant and of all around it.
    Yes,
    /// This tenant's limit does not allow it; nothing is reserved.
    No {
        limited_by: u32,
        used: u64,
        limit: u64,
    },
}

/// A call that asks for memory.
#[derive(Clone, Copy)]
pub struct Request {
    /// The calling thread.
    pub thread: u32,
    /// Tenant that pays.
    pub tenant: u32,
    /// Place where it is charged.
    pub gpu: u32,
    /// What the call asks for.
    pub bytes: u64,
    /// What of it is reserved already.
    pub reserved: u64,
    /// Whether the caller can be told to try again.
    pub can_wait: bool,
}

/// Answer to a [`Request`].
#[derive(Clone, Copy)]
pub enum Decision {
    /// All of it is reserved.
    Granted,
    /// Nothing more is reserved; the caller gets this status of the driver.
    Refused {
        status: u32,
        limited_by: u32,
        /// Whether it is a refusal of its own, not libcuda's second try or a wait that goes on.
        first: bool,
    },
}

/// Decides about a call, counts and reports a refusal. The one place where it is done, for every backend.
///
/// What happens above the limit is up to the innermost tenant's budget, whichever limit is in the way.
#[inline(always)]
pub fn decide(generation: u64, request: &Request) -> Decision {
    let &Request {
        thread,
        tenant,
        gpu,
        bytes,
        reserved,
        can_wait,
    } = request;
    if tenant >= MAX_TENANTS || gpu >= PLACES {
        return Decision::Refused {
            status: status::NO_MEMORY,
            limited_by: NO_TENANT,
            first: true,
        };
    }
    let at = cell(tenant, gpu);
    let patience = match budget(generation, at) {
        Some(budget) if can_wait && budget.on_max == on_max::WAIT => budget.wait_ns,
        _ => 0,
    };
    if patience > 0
        && !waiting::is_turn(at, thread, bytes)
        && waiting::wait(at, thread, bytes, patience)
    {
        return Decision::Refused {
            status: status::BUSY_RETRY,
            limited_by: tenant,
            first: false,
        };
    }
    match reserve(generation, tenant, gpu, bytes - reserved, false) {
        Reserved::Yes => {
            if patience > 0 {
                waiting::done(at, thread);
            }
            Decision::Granted
        }
        Reserved::No {
            limited_by,
            used,
            limit,
        } => {
            if patience > 0 && waiting::wait(at, thread, bytes, patience) {
                return Decision::Refused {
                    status: status::BUSY_RETRY,
                    limited_by,
                    first: false,
                };
            }
            let first = refuse(
                thread,
                &Event {
                    kind: event::kind::DENIED,
                    tenant,
                    gpu,
                    tgid: thread,
                    limited_by,
                    bytes,
                    used,
                    limit,
                    at_ns: now(),
                    ..Event::default()
                },
            );
            if patience > 0 && !first {
                // The second try of an allocation that has waited long enough; the next one waits anew.
                waiting::done(at, thread);
            }
            Decision::Refused {
                status: status::NO_MEMORY,
                limited_by,
                first,
            }
        }
    }
}

#[inline(always)]
fn usage(tenant: u32, place: u32) -> Option<*mut Usage> {
    if tenant >= MAX_TENANTS || place >= PLACES {
        return None;
    }
    USAGE.get_ptr_mut(cell(tenant, place))
}

#[inline(always)]
fn memory_of(usage: *mut Usage) -> Word {
    // SAFETY: `usage` points to a map value.
    Word::new(unsafe { &raw mut (*usage).memory })
}

#[inline(always)]
fn claim_of(usage: *mut Usage) -> Word {
    // SAFETY: `usage` points to a map value.
    Word::new(unsafe { &raw mut (*usage).claim })
}

/// The tenant around `at`. One that a new policy dropped still has its own cell; its parents are then unknown.
#[inline(always)]
fn around(generation: u64, at: u32) -> u32 {
    tenant_row(generation, at).map_or(NO_TENANT, |row| row.parent)
}

/// Adds `bytes` to `tenant` and all around it, unless a limit is in the way.
///
/// Claims come first, for all of them: what limits are compared with is at no moment less than what is in use. Then
/// the limits are compared. If one is in the way the claims are taken back; else the bytes are in use.
///
/// With `force` the limits are only compared: the first one that is exceeded is reported, and the bytes
/// stay charged.
#[inline(always)]
pub fn reserve(generation: u64, tenant: u32, place: u32, bytes: u64, force: bool) -> Reserved {
    if bytes == 0 {
        return Reserved::Yes;
    }
    if bytes > claim::MAX_REQUEST && !force {
        return Reserved::No {
            limited_by: tenant,
            used: 0,
            limit: claim::MAX_REQUEST,
        };
    }
    let outcome = claim_from(generation, tenant, place, claim::units(bytes));
    if !force && !matches!(outcome, Reserved::Yes) {
        unclaim_from(generation, tenant, place, claim::units(bytes));
        return outcome;
    }
    use_bytes(generation, tenant, place, bytes);
    outcome
}

/// Claims `units` of `tenant` and what follows of all around it, and tells the first limit that this exceeds.
#[inline(always)]
fn claim_from(generation: u64, tenant: u32, place: u32, units: u64) -> Reserved {
    let mut outcome = Reserved::Yes;
    let mut at = tenant;
    let mut outside = units;
    for _ in 0..MAX_NESTING {
        let Some(usage) = usage(at, place) else {
            break;
        };
        let change = claim::raise(claim_of(usage), outside);
        let max = match budget(generation, cell(at, place)) {
            Some(budget) => budget.memory_max,
            None => u64::MAX,
        };
        // What lies within a reservation was compared when it was reserved.
        if outside > 0 && claim::bytes(change.used) > max && matches!(outcome, Reserved::Yes) {
            outcome = Reserved::No {
                limited_by: at,
                used: claim::bytes(change.used - outside),
                limit: max,
            };
        }
        outside = change.outside;
        at = around(generation, at);
    }
    if outside == 0 {
        return outcome;
    }
    if let Some(card) = CARDS.get_ptr_mut(place) {
        // SAFETY: `card` points to a map value.
        let word = Word::new(unsafe { &raw mut (*card).claim });
        let change = claim::raise(word, outside);
        let size = match CARD_SIZES.get(place) {
            // Not written yet.
            None | Some(0) => u64::MAX,
            Some(size) => *size,
        };
        if claim::bytes(change.used) > size && matches!(outcome, Reserved::Yes) {
            outcome = Reserved::No {
                limited_by: RESERVATIONS,
                used: claim::bytes(change.used - outside),
                limit: size,
            };
        }
    }
    outcome
}

/// The opposite of [`claim_from`].
#[inline(always)]
fn unclaim_from(generation: u64, tenant: u32, place: u32, units: u64) {
    let mut at = tenant;
    let mut outside = units;
    for _ in 0..MAX_NESTING {
        let Some(usage) = usage(at, place) else {
            break;
        };
        outside = claim::lower(claim_of(usage), outside).outside;
        at = around(generation, at);
    }
    if outside > 0
        && let Some(card) = CARDS.get_ptr_mut(place)
    {
        // SAFETY: `card` points to a map value.
        claim::lower(Word::new(unsafe { &raw mut (*card).claim }), outside);
    }
}

/// Counts `bytes` as used by `tenant` and all around it.
#[inline(always)]
fn use_bytes(generation: u64, tenant: u32, place: u32, bytes: u64) {
    let mut at = tenant;
    for _ in 0..MAX_NESTING {
        let Some(usage) = usage(at, place) else {
            break;
        };
        memory_of(usage).add(bytes);
        at = around(generation, at);
    }
}

/// Takes a reservation back from `tenant` and all around it.
#[inline(always)]
pub fn unreserve(generation: u64, tenant: u32, place: u32, bytes: u64) {
    if bytes == 0 {
        return;
    }
    unclaim_from(generation, tenant, place, claim::units(bytes));
    let mut at = tenant;
    for _ in 0..MAX_NESTING {
        let Some(usage) = usage(at, place) else {
            break;
        };
        take(memory_of(usage), bytes);
        at = around(generation, at);
    }
}

/// Reserves memory for a tenant, in place of what was reserved for it before.
#[inline(always)]
pub fn set_reservation(generation: u64, tenant: u32, place: u32, bytes: u64) -> bool {
    let Some(usage) = usage(tenant, place) else {
        return false;
    };
    let (more, less) = claim::reserve(claim_of(usage), claim::units(bytes));
    let parent = around(generation, tenant);
    if more > 0 {
        let _ = claim_from(generation, parent, place, more);
    }
    if less > 0 {
        unclaim_from(generation, parent, place, less);
    }
    true
}

/// Subtracts at most what is there and returns how much that was: counters saturate, they never wrap.
#[inline(always)]
fn take(word: Word, bytes: u64) -> u64 {
    let before = word.sub(bytes);
    if before >= bytes {
        return bytes;
    }
    word.add(bytes - before);
    before
}

/// Notes that a tenant and all around it have these bytes more, for good: peaks, and limits that are crossed. Not before,
/// since the driver may yet refuse what was reserved.
#[inline(always)]
fn note_growth(generation: u64, tenant: u32, place: u32, bytes: u64) {
    let mut at = tenant;
    for _ in 0..MAX_NESTING {
        let Some(usage) = usage(at, place) else {
            break;
        };
        // Whoever gives back lets go of the claim first: what is in use may for a moment seem more than is claimed.
        let claimed = claim::bytes(claim::used(claim_of(usage).load()));
        let after = memory_of(usage).load().min(claimed);
        // SAFETY: a word of a map value. A racing maximum may be lost for one allocation; it is a gauge.
        unsafe {
            if (*usage).peak < after {
                (*usage).peak = after;
            }
        }
        let high = match budget(generation, cell(at, place)) {
            Some(budget) => budget.memory_high,
            None => u64::MAX,
        };
        if after > high && after.saturating_sub(bytes) <= high {
            emit(&Event {
                kind: event::kind::HIGH,
                tenant,
                gpu: place,
                limited_by: at,
                bytes,
                used: after,
                limit: high,
                at_ns: now(),
                ..Event::default()
            });
        }
        at = around(generation, at);
    }
}

/// Puts settled bytes into the account of a process.
#[inline(always)]
pub fn deposit(generation: u64, tgid: u32, tenant: u32, gpu: u32, bytes: u64) {
    note_growth(generation, tenant, gpu, bytes);
    let key = AccountKey::new(tgid, tenant, gpu);
    if let Some(account) = ACCOUNTS.get_ptr_mut(key) {
        Word::new(account).add(bytes);
        return;
    }
    // BPF_NOEXIST (1): when another thread was quicker, add to its entry.
    if ACCOUNTS.insert(key, bytes, 1).is_ok() {
        return;
    }
    match ACCOUNTS.get_ptr_mut(key) {
        Some(account) => {
            Word::new(account).add(bytes);
        }
        None => count(counter::PROCESSES_FULL),
    }
}

/// Takes bytes out of an account and out of the usage behind it.
#[inline(always)]
pub fn withdraw(generation: u64, tgid: u32, tenant: u32, gpu: u32, bytes: u64) {
    let Some(account) = ACCOUNTS.get_ptr_mut(AccountKey::new(tgid, tenant, gpu)) else {
        return;
    };
    let taken = take(Word::new(account), bytes);
    unreserve(generation, tenant, gpu, taken);
}

/// Empties an account, returns what it held and forgets it.
#[inline(always)]
pub fn close_account(generation: u64, key: AccountKey) -> u64 {
    let Some(account) = ACCOUNTS.get_ptr_mut(key) else {
        return 0;
    };
    let held = Word::new(account).swap(0);
    let _ = ACCOUNTS.remove(key);
    let tenant = if key.tenant == 0xffff {
        NO_TENANT
    } else {
        u32::from(key.tenant)
    };
    unreserve(generation, tenant, u32::from(key.gpu), held);
    held
}

/// Takes the bytes of an object, once: whoever comes second gets zero.
#[inline(always)]
pub fn take_bytes(object: *mut Object) -> u64 {
    // SAFETY: `object` points to a map value.
    Word::new(unsafe { &raw mut (*object).bytes }).swap(0)
}

/// Puts bytes into an object from which they were taken.
#[inline(always)]
pub fn give_bytes(object: *mut Object, bytes: u64) {
    // SAFETY: `object` points to a map value.
    Word::new(unsafe { &raw mut (*object).bytes }).add(bytes);
}

/// Releases an object: gives back its bytes, lets go of what it shares, and forgets it.
///
/// Returns the object as it was, or `None` for an unknown handle, which changes nothing.
#[inline(always)]
pub fn release(generation: u64, key: ObjectKey) -> Option<Object> {
    let object = OBJECTS.get_ptr_mut(key)?;
    // SAFETY: a copy of a map value; only `bytes` and `dups` change in place.
    let copy = unsafe { *object };
    if kind::is_memory(copy.kind) && copy.dups > 0 {
        orphan(key, object);
        return Some(copy);
    }
    let bytes = take_bytes(object);
    // Only now: user space may just have given it to somebody else.
    // SAFETY: words of a map value.
    let (tgid, tenant) = unsafe { ((*object).tgid, (*object).tenant) };
    lists::remove(key.client, key.handle);
    if bytes > 0 {
        withdraw(generation, tgid, tenant, copy.gpu, bytes);
    }
    if copy.kind == kind::DUP {
        drop_dup(generation, copy.source, copy.born_ns);
    }
    Some(Object { bytes, ..copy })
}

/// Key under which memory is kept that its owner freed while others hold it.
///
/// Time of birth in microseconds: unique enough within the few seconds that the daemon needs to hand the
/// charge to a survivor, and a collision keeps a charge, it never drops one.
#[inline(always)]
fn orphan_key(born_ns: u64) -> ObjectKey {
    ObjectKey {
        client: ORPHAN_CLIENT,
        handle: (born_ns / 1000) as u32,
    }
}

/// Keeps the charge of freed memory that others still hold.
#[inline(always)]
fn orphan(key: ObjectKey, object: *mut Object) {
    // SAFETY: a copy of a map value.
    let mut copy = unsafe { *object };
    copy.bytes = take_bytes(object);
    copy.listed = 0;
    lists::remove(key.client, key.handle);
    let kept = orphan_key(copy.born_ns);
    if OBJECTS.insert(kept, copy, 0).is_err() {
        count(counter::OBJECTS_FULL);
    }
    lists::link(kept.client, kept.handle);
    emit(&Event {
        kind: event::kind::OWNER_FREED,
        tenant: copy.tenant,
        gpu: copy.gpu,
        tgid: copy.tgid,
        client: key.client,
        handle: key.handle,
        limited_by: kept.handle,
        bytes: copy.bytes,
        at_ns: now(),
        ..Event::default()
    });
}

/// A second handle is gone: the source has one holder less, and goes with the last if its owner freed it.
///
/// `source_born` is the birth of the memory, which a dup takes over from its source.
#[inline(always)]
fn drop_dup(generation: u64, source: ObjectKey, source_born: u64) {
    if let Some(object) = OBJECTS.get_ptr_mut(source) {
        // SAFETY: fields of a map value.
        unsafe {
            if (*object).born_ns == source_born {
                if (*object).dups > 0 {
                    (*object).dups -= 1;
                }
                return;
            }
        }
    }
    let key = orphan_key(source_born);
    let Some(object) = OBJECTS.get_ptr_mut(key) else {
        return;
    };
    // SAFETY: fields of a map value.
    unsafe {
        if (*object).dups > 1 {
            (*object).dups -= 1;
            return;
        }
    }
    // SAFETY: a copy of a map value.
    let copy = unsafe { *object };
    let bytes = take_bytes(object);
    lists::remove(key.client, key.handle);
    withdraw(generation, copy.tgid, copy.tenant, copy.gpu, bytes);
}

/// The tenant at which an event is counted: others' reservations are nobody's limit, so the caller itself.
#[inline(always)]
fn limiting(event: &Event) -> u32 {
    if event.limited_by == RESERVATIONS {
        event.tenant
    } else {
        event.limited_by
    }
}

/// Counts a refusal and reports it, unless it is libcuda's immediate second try of the same allocation.
///
/// Returns whether it was a first try.
#[inline(always)]
pub fn refuse(thread: u32, event: &Event) -> bool {
    let at_ns = now();
    // SAFETY: values are replaced as a whole.
    if let Some(last) = unsafe { REFUSALS.get(thread) }
        && last.bytes == event.bytes
        && at_ns.wrapping_sub(last.at_ns) < SECOND_TRY_NS
    {
        // The pair is complete: a third refusal is a new one.
        let _ = REFUSALS.remove(thread);
        return false;
    }
    let refusal = Refusal {
        at_ns,
        bytes: event.bytes,
    };
    let _ = REFUSALS.insert(thread, refusal, 0);
    if let Some(usage) = usage(limiting(event), event.gpu) {
        // SAFETY: `usage` points to a map value.
        Word::new(unsafe { &raw mut (*usage).denials }).add(1);
    }
    emit(event);
    true
}

/// Counts and reports an allocation above a limit that nothing refused.
#[inline(always)]
pub fn breach(event: &Event) {
    if let Some(usage) = usage(limiting(event), event.gpu) {
        // SAFETY: `usage` points to a map value.
        Word::new(unsafe { &raw mut (*usage).breaches }).add(1);
    }
    emit(event);
}
