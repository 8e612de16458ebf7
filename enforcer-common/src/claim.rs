//! What a tenant takes from whatever is around it: what it uses, or what is reserved for it if that is more.
//!
//! One word holds both, so that every change is one atomic addition and sees the two as they were at one moment. What a
//! change takes from the tenant around it follows from the word before alone, and the changes of all callers together
//! add up to exactly the difference between the last word and the first, whatever their order. So the sum of claims
//! that a card or a tenant has to bear is never wrong for long, without a lock.

use crate::launch::SharedWord;

/// Bits of the word that count what is used; the reservation stands above them.
const USED_BITS: u32 = 36;
const USED_MASK: u64 = (1 << USED_BITS) - 1;
/// Claims are counted in pages of 4 KiB.
const UNIT_SHIFT: u32 = 12;

/// Largest reservation: 1 TiB less a page.
pub const MAX_RESERVATION: u64 = (1 << (64 - USED_BITS + UNIT_SHIFT)) - (1 << UNIT_SHIFT);

/// More than any card has. Requests above are refused before they are added, so that the word cannot overflow.
pub const MAX_REQUEST: u64 = 1 << 40;

/// Pages of a size, the last one in full.
#[inline(always)]
pub const fn units(bytes: u64) -> u64 {
    (bytes >> UNIT_SHIFT) + ((bytes & ((1 << UNIT_SHIFT) - 1) != 0) as u64)
}

/// The size of pages.
#[inline(always)]
pub const fn bytes(units: u64) -> u64 {
    units << UNIT_SHIFT
}

/// Pages that a word counts as used.
#[inline(always)]
pub const fn used(word: u64) -> u64 {
    word & USED_MASK
}

/// Pages that a word reserves.
#[inline(always)]
pub const fn reserved(word: u64) -> u64 {
    word >> USED_BITS
}

/// Pages that a word takes from what is around it.
#[inline(always)]
pub const fn taken(word: u64) -> u64 {
    let (used, reserved) = (used(word), reserved(word));
    if used > reserved { used } else { reserved }
}

/// A change of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Pages in use after it.
    pub used: u64,
    /// Pages that it takes more from what is around, or gives back.
    pub outside: u64,
}

/// Uses `units` more.
#[inline(always)]
pub fn raise(word: impl SharedWord, units: u64) -> Change {
    let before = word.add(units);
    let after = before.wrapping_add(units);
    Change {
        used: used(after),
        outside: taken(after).wrapping_sub(taken(before)),
    }
}

/// Uses `units` less, at most what is used.
#[inline(always)]
pub fn lower(word: impl SharedWord, units: u64) -> Change {
    let before = word.add(units.wrapping_neg());
    let mut less = units;
    if used(before) < units {
        less = used(before);
        word.add(units - less);
    }
    let after = before.wrapping_sub(less);
    Change {
        used: used(after),
        outside: taken(before).wrapping_sub(taken(after)),
    }
}

/// Reserves `units` from now on; one caller at a time. Returns what it takes more from what is around, and what less.
#[inline(always)]
pub fn reserve(word: impl SharedWord, units: u64) -> (u64, u64) {
    let old = reserved(word.load());
    let change = units.wrapping_sub(old) << USED_BITS;
    let before = word.add(change);
    let after = before.wrapping_add(change);
    (
        taken(after).saturating_sub(taken(before)),
        taken(before).saturating_sub(taken(after)),
    )
}

#[cfg(test)]
mod tests {
    extern crate std;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::{thread, vec::Vec};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy)]
    struct Shared<'a>(&'a AtomicU64);

    impl SharedWord for Shared<'_> {
        fn load(self) -> u64 {
            self.0.load(Ordering::SeqCst)
        }
        fn add(self, value: u64) -> u64 {
            self.0.fetch_add(value, Ordering::SeqCst)
        }
        fn replace(self, old: u64, new: u64) {
            let _ = self
                .0
                .compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    #[test]
    fn use_within_a_reservation_takes_nothing_more() {
        let word = AtomicU64::new(0);
        let word = Shared(&word);
        assert_eq!(reserve(word, 100), (100, 0));
        assert_eq!(raise(word, 60).outside, 0);
        assert_eq!(raise(word, 60).outside, 20);
        assert_eq!(lower(word, 50).outside, 20);
        assert_eq!(reserve(word, 10), (0, 30));
        assert_eq!(used(word.load()), 70);
        assert_eq!(
            lower(word, 100),
            Change {
                used: 0,
                outside: 60
            }
        );
    }

    #[test]
    fn pages_are_whole() {
        assert_eq!((units(0), units(1), units(4096), units(4097)), (0, 1, 1, 2));
        assert_eq!(bytes(units(MAX_RESERVATION)), MAX_RESERVATION);
        assert!(units(MAX_RESERVATION) < 1 << (64 - USED_BITS));
        assert!(units(u64::MAX) > units(MAX_REQUEST));
    }

    #[test]
    fn threads_together_leave_outside_what_the_word_takes() {
        let words: Vec<AtomicU64> = (0..2).map(|_| AtomicU64::new(0)).collect();
        let outside = AtomicU64::new(0);
        thread::scope(|scope| {
            for start in 0u64..4 {
                let (words, outside) = (&words, &outside);
                scope.spawn(move || {
                    for step in 0u64..2000 {
                        let word = Shared(&words[((start + step) % 2) as usize]);
                        let size = 1 + (start * 7 + step) % 13;
                        if start == 0 && step % 5 == 0 {
                            let (more, less) = reserve(word, step % 40);
                            outside.fetch_add(more.wrapping_sub(less), Ordering::SeqCst);
                        }
                        outside.fetch_add(raise(word, size).outside, Ordering::SeqCst);
                        outside.fetch_sub(lower(word, size).outside, Ordering::SeqCst);
                    }
                });
            }
        });
        let words: Vec<u64> = words.iter().map(|word| Shared(word).load()).collect();
        assert!(words.iter().all(|word| used(*word) == 0));
        let taken: u64 = words.iter().map(|word| super::taken(*word)).sum();
        assert_eq!(outside.load(Ordering::SeqCst), taken);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Raise(usize, u64),
        Lower(usize, u64),
        Reserve(usize, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let tenant = 0usize..4;
        let size = 0u64..200;
        prop_oneof![
            (tenant.clone(), size.clone()).prop_map(|(at, size)| Step::Raise(at, size)),
            (tenant.clone(), size.clone()).prop_map(|(at, size)| Step::Lower(at, size)),
            (tenant, size).prop_map(|(at, size)| Step::Reserve(at, size)),
        ]
    }

    /// Tenants 0 and 1 lie in 2; 2 and 3 lie on the card, 4.
    const PARENT: [usize; 4] = [2, 2, 4, 4];

    fn pass_on(words: &[AtomicU64; 5], mut at: usize, mut units: u64, up: bool) {
        while at < 4 {
            at = PARENT[at];
            let word = Shared(&words[at]);
            units = if up {
                raise(word, units).outside
            } else {
                lower(word, units).outside
            };
        }
    }

    proptest! {
        /// Whatever happens, each claim is what lies in it, and nobody gives back more than there was.
        #[test]
        fn claims_add_up(steps in prop::collection::vec(step(), 1..200)) {
            let words: [AtomicU64; 5] = core::array::from_fn(|_| AtomicU64::new(0));
            let mut own = [0u64; 4];
            let mut reserved = [0u64; 4];
            for step in steps {
                match step {
                    Step::Raise(at, size) => {
                        own[at] += size;
                        let change = raise(Shared(&words[at]), size);
                        pass_on(&words, at, change.outside, true);
                    }
                    Step::Lower(at, size) => {
                        // As the ledger does: never more than the account of the process holds.
                        let size = size.min(own[at]);
                        own[at] -= size;
                        let change = lower(Shared(&words[at]), size);
                        pass_on(&words, at, change.outside, false);
                    }
                    Step::Reserve(at, size) => {
                        reserved[at] = size;
                        let (more, less) = reserve(Shared(&words[at]), size);
                        pass_on(&words, at, more, true);
                        pass_on(&words, at, less, false);
                    }
                }
                let claim = |at: usize, below: u64| (own[at] + below).max(reserved[at]);
                let inner = claim(0, 0) + claim(1, 0);
                prop_assert_eq!(used(words[2].load(Ordering::SeqCst)), own[2] + inner);
                prop_assert_eq!(
                    used(words[4].load(Ordering::SeqCst)),
                    claim(2, inner) + claim(3, 0)
                );
            }
        }
    }
}
