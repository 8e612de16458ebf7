//! Who may allocate first when several wait: order of arrival among the waiters of one tenant on one GPU.
//!
//! Nobody sleeps here. A waiting allocation is answered "try again" and comes back by itself, every 250 ms with
//! libcuda. So a queue is a few slots with a ticket and the time of the last try in each; a waiter that does not
//! come back, because it was killed, is passed over after [`PATIENCE_NS`]. There are no locks: each slot is written
//! by the waiter that holds it, and taken by a compare-and-exchange.

use crate::launch::SharedWord;

/// Waiters of one tenant on one GPU that are kept in order. More than these wait too, without a place.
pub const SLOTS: usize = 16;

/// A waiter that was not seen for so long has given up.
pub const PATIENCE_NS: u64 = 1_500_000_000;

/// A place in the queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Order of arrival; 0 for a free place.
    pub ticket: u64,
    /// Last try, `CLOCK_MONOTONIC` nanoseconds.
    pub seen_ns: u64,
}

/// The waiters of one tenant on one GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    /// Tickets given out so far.
    pub tickets: u64,
    /// The places, in no order.
    pub slots: [Slot; SLOTS],
}

/// What a waiting thread knows of its allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiter {
    /// Its ticket; 0 if there was no place.
    pub ticket: u64,
    /// First try.
    pub since_ns: u64,
    /// Last try.
    pub seen_ns: u64,
    /// What it asks for: another size is another allocation.
    pub bytes: u64,
}

impl Waiter {
    /// Whether a try for `bytes` at `now` goes on with this wait.
    #[inline(always)]
    pub const fn is_same(&self, bytes: u64, now: u64) -> bool {
        self.bytes == bytes && now.wrapping_sub(self.seen_ns) < PATIENCE_NS
    }
}

/// The words of a slot, wherever it lies.
pub trait SharedSlot<W: SharedWord>: Copy {
    /// Its ticket.
    fn ticket(self) -> W;
    /// Its time of the last try.
    fn seen(self) -> W;
}

/// Whether a place is held by a waiter that still comes back.
#[inline(always)]
fn is_held<W: SharedWord>(slot: impl SharedSlot<W>, now: u64) -> bool {
    slot.ticket().load() != 0 && now.wrapping_sub(slot.seen().load()) < PATIENCE_NS
}

/// Whether the holder of `slot` goes before the one with `ticket`; 0 stands for one that has just come.
#[inline(always)]
pub fn goes_before<W: SharedWord>(slot: impl SharedSlot<W>, ticket: u64, now: u64) -> bool {
    let other = slot.ticket().load();
    is_held(slot, now) && other != ticket && (ticket == 0 || other < ticket)
}

/// Takes `slot` for `ticket` if it is free or its holder has given up. Returns whether it is now the ticket's.
#[inline(always)]
pub fn claim<W: SharedWord>(slot: impl SharedSlot<W>, ticket: u64, now: u64) -> bool {
    if is_held(slot, now) {
        return false;
    }
    let before = slot.ticket().load();
    // Before the ticket is in, so that nobody takes the place for a stale one.
    let seen = slot.seen().load();
    slot.seen().replace(seen, now);
    slot.ticket().replace(before, ticket);
    slot.ticket().load() == ticket
}

/// Notes a further try of `ticket`, if it holds `slot`.
#[inline(always)]
pub fn touch<W: SharedWord>(slot: impl SharedSlot<W>, ticket: u64, now: u64) {
    if slot.ticket().load() == ticket {
        let seen = slot.seen().load();
        slot.seen().replace(seen, now);
    }
}

/// Leaves `slot` if `ticket` holds it.
#[inline(always)]
pub fn leave<W: SharedWord>(slot: impl SharedSlot<W>, ticket: u64) {
    slot.ticket().replace(ticket, 0);
}

#[cfg(feature = "user")]
mod pod {
    use super::{Queue, Waiter};

    // SAFETY: repr(C), only integers, no padding (see the layout test).
    unsafe impl aya::Pod for Queue {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Waiter {}
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::cell::Cell;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy)]
    struct Word<'a>(&'a Cell<u64>);

    impl SharedWord for Word<'_> {
        fn load(self) -> u64 {
            self.0.get()
        }
        fn add(self, value: u64) -> u64 {
            let before = self.0.get();
            self.0.set(before.wrapping_add(value));
            before
        }
        fn replace(self, old: u64, new: u64) {
            if self.0.get() == old {
                self.0.set(new);
            }
        }
    }

    #[derive(Clone, Copy)]
    struct Place<'a>(&'a (Cell<u64>, Cell<u64>));

    impl<'a> SharedSlot<Word<'a>> for Place<'a> {
        fn ticket(self) -> Word<'a> {
            Word(&self.0.0)
        }
        fn seen(self) -> Word<'a> {
            Word(&self.0.1)
        }
    }

    /// A tenant with a limit, driven as the kernel side drives a queue.
    struct Model {
        places: Vec<(Cell<u64>, Cell<u64>)>,
        tickets: u64,
        free: u64,
    }

    impl Model {
        fn new(free: u64) -> Self {
            Self {
                places: (0..SLOTS).map(|_| (Cell::new(0), Cell::new(0))).collect(),
                tickets: 0,
                free,
            }
        }

        /// One try; whether it was granted.
        fn ask(&mut self, waiter: &mut Waiter, now: u64) -> bool {
            let waits = waiter.is_same(waiter.bytes, now) && waiter.since_ns != 0;
            if !waits {
                *waiter = Waiter {
                    since_ns: now,
                    seen_ns: now,
                    bytes: waiter.bytes,
                    ticket: 0,
                };
            }
            let turn = !self
                .places
                .iter()
                .any(|place| goes_before(Place(place), waiter.ticket, now));
            if turn && waiter.bytes <= self.free {
                self.free -= waiter.bytes;
                for place in &self.places {
                    if waiter.ticket != 0 {
                        leave(Place(place), waiter.ticket);
                    }
                }
                waiter.since_ns = 0;
                return true;
            }
            waiter.seen_ns = now;
            if waiter.ticket == 0 {
                self.tickets += 1;
                if self
                    .places
                    .iter()
                    .any(|place| claim(Place(place), self.tickets, now))
                {
                    waiter.ticket = self.tickets;
                }
            } else {
                for place in &self.places {
                    touch(Place(place), waiter.ticket, now);
                }
            }
            false
        }
    }

    #[test]
    fn layout() {
        assert_eq!(size_of::<Queue>(), 8 + SLOTS * 16);
        assert_eq!(size_of::<Waiter>(), 32);
    }

    #[test]
    fn who_is_killed_while_waiting_is_passed_over() {
        let mut model = Model::new(0);
        let (mut first, mut second) = (waiter(5), waiter(5));
        assert!(!model.ask(&mut first, 1));
        assert!(!model.ask(&mut second, 2));
        model.free = 5;
        assert!(!model.ask(&mut second, 3), "the first is still there");
        // The second keeps asking, the first does not.
        let mut now = 3;
        while now < PATIENCE_NS + 10 {
            now += PATIENCE_NS / 4;
            if model.ask(&mut second, now) {
                return;
            }
        }
        panic!("a dead waiter keeps the queue");
    }

    fn waiter(bytes: u64) -> Waiter {
        Waiter {
            bytes,
            ..Waiter::default()
        }
    }

    proptest! {
        /// However tries and releases mix: grants come in the order of arrival, and never exceed what is free.
        #[test]
        fn first_come_first_served(
            sizes in prop::collection::vec(1u64..8, 1..SLOTS),
            tries in prop::collection::vec((0usize..SLOTS, 0u64..6), 1..400),
        ) {
            let mut model = Model::new(0);
            let mut waiters: Vec<Waiter> = sizes.iter().map(|bytes| waiter(*bytes)).collect();
            let mut granted: Vec<usize> = Vec::new();
            let mut now = 1;
            // All arrive in the order of their index.
            for waiter in &mut waiters {
                now += 1;
                prop_assert!(!model.ask(waiter, now));
            }
            let mut given = 0;
            for (who, released) in tries {
                now += 1;
                model.free += released;
                given += released;
                let who = who % sizes.len();
                if granted.contains(&who) {
                    continue;
                }
                if model.ask(&mut waiters[who], now) {
                    granted.push(who);
                }
            }
            let taken: u64 = granted.iter().map(|who| sizes[*who]).sum();
            prop_assert!(taken <= given);
            prop_assert!(granted.is_sorted(), "{granted:?}");
        }
    }
}
