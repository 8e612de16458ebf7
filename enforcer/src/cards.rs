//! How much of a card can be used at all, which is what reservations are held against.
//!
//! The driver keeps a part of every card for itself, and NVML counts it as used although no process uses it. How much
//! that is shows best when nothing else is there that NVML cannot name, such as managed memory: so it is the least that
//! was ever seen.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

#[derive(Clone, Copy, Debug, Default)]
struct Card {
    /// Whether something is reserved on it.
    reserved: bool,
    /// Least seen of what is used by no process.
    apart: Option<u64>,
}

/// The cards, by GPU index.
#[derive(Debug, Default)]
pub struct Cards(Mutex<BTreeMap<u32, Card>>);

impl Cards {
    fn with<T>(&self, gpu: u32, act: impl FnOnce(&mut Card) -> T) -> T {
        let mut cards = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        act(cards.entry(gpu).or_default())
    }

    /// Says whether something is reserved on a card.
    pub fn reserved(&self, gpu: u32, reserved: bool) {
        self.with(gpu, |card| card.reserved = reserved);
    }

    /// Takes in what NVML says: bytes in use, and what processes use of it.
    pub fn seen(&self, gpu: u32, used: u64, by_processes: u64) {
        let now = used.saturating_sub(by_processes);
        self.with(gpu, |card| {
            card.apart = Some(card.apart.map_or(now, |before| before.min(now)));
        });
    }

    /// What may be claimed of a card with `memory` bytes; `None` where nothing is reserved, since then nothing has to be
    /// kept free.
    pub fn bound(&self, gpu: u32, memory: u64) -> Option<u64> {
        self.with(gpu, |card| {
            card.reserved
                .then(|| memory.saturating_sub(card.apart.unwrap_or(0)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_the_driver_keeps_is_the_least_that_was_seen() {
        let cards = Cards::default();
        assert_eq!(cards.bound(0, 16 * GIB), None);
        cards.reserved(0, true);
        assert_eq!(cards.bound(0, 16 * GIB), Some(16 * GIB));
        // Three are managed memory, which NVML shows for no process.
        cards.seen(0, 8 * GIB, 4 * GIB);
        assert_eq!(cards.bound(0, 16 * GIB), Some(12 * GIB));
        cards.seen(0, 3 * GIB, 2 * GIB);
        cards.seen(0, 9 * GIB, 4 * GIB);
        assert_eq!(cards.bound(0, 16 * GIB), Some(15 * GIB));
        assert_eq!(cards.bound(1, 16 * GIB), None);
        cards.reserved(0, false);
        assert_eq!(cards.bound(0, 16 * GIB), None);
    }
}
