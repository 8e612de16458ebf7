//! Which objects a client has: lists through the objects themselves.
//!
//! They are for user space, which follows them to give back what a client or a process had. No program decides
//! by them, so a list that could not be kept is marked and costs a look at everything, never a charge.

use gpuquota_common::map::{Client, Object, ObjectKey, counter, kind, list};

use crate::{
    atomic::Word,
    maps::{CLIENTS, OBJECTS, count},
};

/// `BPF_NOEXIST`: whoever comes second takes the entry of the first.
const NO_EXIST: u64 = 1;
/// Tries to get at a client that another CPU is changing; it takes the other some hundred nanoseconds.
const TRIES: u32 = 128;

/// Puts an object that is in the map into its client's list.
///
/// Its own program for the verifier, so that each caller pays with one call.
#[inline(never)]
pub fn link(client: u32, handle: u32) -> u32 {
    let key = ObjectKey { client, handle };
    let Some(object) = OBJECTS.get_ptr_mut(key) else {
        return 0;
    };
    // SAFETY: fields of a map value that do not change.
    let (tgid, kind) = unsafe { ((*object).tgid, (*object).kind) };
    let Some(owner) = owner(client, tgid) else {
        count(counter::UNLISTED);
        return 0;
    };
    // SAFETY: fields of a map value, set by one store each.
    unsafe {
        if (*owner).tgid != tgid {
            (*owner).mixed = 1;
        }
        if kind == kind::DUP {
            (*owner).dups = 1;
        }
    }
    if !lock(owner) {
        // SAFETY: as above.
        unsafe { (*owner).broken = 1 };
        return 0;
    }
    let which = list::of(kind);
    // SAFETY: fields of map values; the lists are this program's while it holds the lock.
    unsafe {
        if (*owner).gone == 1 {
            (*owner).broken = 1;
            count(counter::UNLISTED);
        } else if (*object).listed == 0 {
            let next = (*owner).first[which];
            (*object).next = next;
            (*object).previous = 0;
            (*object).listed = which as u32 + 1;
            if next != 0
                && let Some(next) = OBJECTS.get_ptr_mut(ObjectKey {
                    client,
                    handle: next,
                })
            {
                (*next).previous = handle;
            }
            (*owner).first[which] = handle;
            (*owner).count[which] += 1;
        }
    }
    unlock(owner);
    0
}

/// Takes an object out of its client's list and out of the map.
#[inline(never)]
pub fn remove(client: u32, handle: u32) -> u32 {
    let key = ObjectKey { client, handle };
    if let Some(owner) = CLIENTS.get_ptr_mut(client) {
        if lock(owner) {
            if let Some(object) = OBJECTS.get_ptr_mut(key) {
                unlink(owner, client, object);
            }
            // SAFETY: as in `link`.
            let empty = unsafe { (*owner).count[0] == 0 && (*owner).count[1] == 0 };
            if empty {
                // SAFETY: as in `link`. Whoever waits for the lock sees that this entry is none any more.
                unsafe { (*owner).gone = 1 };
                let _ = CLIENTS.remove(client);
            }
            unlock(owner);
        } else {
            // SAFETY: as in `link`.
            unsafe { (*owner).broken = 1 };
        }
    }
    let _ = OBJECTS.remove(key);
    0
}

/// Notes that an object came to another process. A client itself takes its entry along, which then has what others made.
#[inline(always)]
pub fn moved(key: ObjectKey, tgid: u32) {
    if let Some(owner) = CLIENTS.get_ptr_mut(key.client) {
        // SAFETY: as in `link`.
        unsafe {
            if (*owner).tgid != tgid {
                (*owner).mixed = 1;
            }
            if key.handle == key.client {
                (*owner).tgid = tgid;
            }
        }
    }
}

/// The entry of a client, made if there is none.
#[inline(always)]
fn owner(client: u32, tgid: u32) -> Option<*mut Client> {
    if let Some(owner) = CLIENTS.get_ptr_mut(client) {
        return Some(owner);
    }
    let new = Client {
        lock: 0,
        first: [0; list::COUNT],
        count: [0; list::COUNT],
        tgid,
        mixed: 0,
        dups: 0,
        broken: 0,
        gone: 0,
        reserved: 0,
    };
    let _ = CLIENTS.insert(client, new, NO_EXIST);
    CLIENTS.get_ptr_mut(client)
}

#[inline(always)]
fn unlink(owner: *mut Client, client: u32, object: *mut Object) {
    // SAFETY: fields of map values; the lists are the caller's while it holds the lock.
    unsafe {
        let (next, previous) = ((*object).next, (*object).previous);
        // Two lists, spelled out: the verifier does not follow an index out of a map.
        let which = match (*object).listed {
            1 => list::MEMORY,
            2 => list::STRUCTURE,
            _ => return,
        };
        (*object).listed = 0;
        if previous == 0 {
            (*owner).first[which] = next;
        } else if let Some(before) = OBJECTS.get_ptr_mut(ObjectKey {
            client,
            handle: previous,
        }) {
            (*before).next = next;
        }
        if next != 0
            && let Some(after) = OBJECTS.get_ptr_mut(ObjectKey {
                client,
                handle: next,
            })
        {
            (*after).previous = previous;
        }
        (*owner).count[which] -= 1;
    }
}

#[inline(always)]
fn lock(owner: *mut Client) -> bool {
    // SAFETY: `owner` points to a map value.
    let word = Word::new(unsafe { &raw mut (*owner).lock });
    for _ in 0..TRIES {
        if word.swap(1) == 0 {
            return true;
        }
    }
    false
}

#[inline(always)]
fn unlock(owner: *mut Client) {
    // SAFETY: as in `lock`.
    Word::new(unsafe { &raw mut (*owner).lock }).swap(0);
}
