//! Allocations that wait for memory; see [`gpuquota_common::waiting`] for the order.

use gpuquota_common::{
    map::CELLS,
    waiting::{self, SLOTS, SharedSlot, Slot, Waiter},
};

use crate::{
    atomic::Word,
    maps::{QUEUES, WAITERS, now},
};

/// A place in a queue that lies in a map.
#[derive(Clone, Copy)]
struct Place(*mut Slot);

impl SharedSlot<Word> for Place {
    #[inline(always)]
    fn ticket(self) -> Word {
        // SAFETY: the slot is part of a map value.
        Word::new(unsafe { &raw mut (*self.0).ticket })
    }
    #[inline(always)]
    fn seen(self) -> Word {
        // SAFETY: as above.
        Word::new(unsafe { &raw mut (*self.0).seen_ns })
    }
}

/// What the thread knows of its wait for `bytes`, if it waits.
#[inline(always)]
fn known(thread: u32, bytes: u64, at_ns: u64) -> Option<Waiter> {
    // SAFETY: an entry is written by its own thread, and by a supervisor while that thread waits for it.
    let waiter = unsafe { WAITERS.get(thread) }.copied()?;
    waiter.is_same(bytes, at_ns).then_some(waiter)
}

/// Whether nobody who came earlier waits in the queue of `cell`.
#[inline(always)]
pub fn is_turn(cell: u32, thread: u32, bytes: u64) -> bool {
    let Some(queue) = QUEUES.get_ptr_mut(cell) else {
        return true;
    };
    let at_ns = now();
    let ticket = known(thread, bytes, at_ns).map_or(0, |waiter| waiter.ticket);
    for index in 0..SLOTS {
        // SAFETY: the index is below the length of the array in the map value.
        let place = Place(unsafe { (&raw mut (*queue).slots).cast::<Slot>().add(index) });
        if waiting::goes_before(place, ticket, at_ns) {
            return false;
        }
    }
    true
}

/// Lets the thread wait in the queue of `cell`; returns false if it has waited for `patience` already.
#[inline(always)]
pub fn wait(cell: u32, thread: u32, bytes: u64, patience: u64) -> bool {
    let at_ns = now();
    let mut waiter = known(thread, bytes, at_ns).unwrap_or(Waiter {
        ticket: 0,
        since_ns: at_ns,
        seen_ns: at_ns,
        bytes,
    });
    let over = at_ns.wrapping_sub(waiter.since_ns) >= patience;
    waiter.seen_ns = at_ns;
    if cell < CELLS
        && let Some(queue) = QUEUES.get_ptr_mut(cell)
    {
        if over {
            leave(queue, waiter.ticket);
            waiter.ticket = 0;
        } else if waiter.ticket == 0 {
            // SAFETY: a word of a map value.
            let ticket = Word::new(unsafe { &raw mut (*queue).tickets }).add(1) + 1;
            for index in 0..SLOTS {
                // SAFETY: as in `is_turn`.
                let place = Place(unsafe { (&raw mut (*queue).slots).cast::<Slot>().add(index) });
                if waiting::claim(place, ticket, at_ns) {
                    waiter.ticket = ticket;
                    break;
                }
            }
        } else {
            for index in 0..SLOTS {
                // SAFETY: as in `is_turn`.
                let place = Place(unsafe { (&raw mut (*queue).slots).cast::<Slot>().add(index) });
                waiting::touch(place, waiter.ticket, at_ns);
            }
        }
    }
    // Without an entry it waits on, and its time starts anew.
    let _ = WAITERS.insert(thread, waiter, 0);
    !over
}

/// Ends the wait of a thread, if it waits.
#[inline(always)]
pub fn done(cell: u32, thread: u32) {
    // SAFETY: as in `known`.
    let Some(waiter) = (unsafe { WAITERS.get(thread) }).copied() else {
        return;
    };
    let _ = WAITERS.remove(thread);
    if waiter.ticket != 0
        && let Some(queue) = QUEUES.get_ptr_mut(cell)
    {
        leave(queue, waiter.ticket);
    }
}

#[inline(always)]
fn leave(queue: *mut gpuquota_common::waiting::Queue, ticket: u64) {
    if ticket == 0 {
        return;
    }
    for index in 0..SLOTS {
        // SAFETY: as in `is_turn`.
        let place = Place(unsafe { (&raw mut (*queue).slots).cast::<Slot>().add(index) });
        waiting::leave(place, ticket);
    }
}
