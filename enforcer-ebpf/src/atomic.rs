//! Atomic words in map values.
//!
//! `core`'s atomics offer only load and store on this target; the instructions behind the rest exist since
//! Linux 5.12 (`BPF_FETCH`, `BPF_XCHG`).
//!
//! The ordering is stronger than counting needs. With a relaxed one LLVM 22 emits the old instruction, which
//! returns nothing, and then uses its operand as if it were the old value: every limit would be compared with
//! the request alone.

use core::intrinsics::{
    AtomicOrdering::{AcqRel, Acquire},
    atomic_cxchg, atomic_xadd, atomic_xchg,
};

use gpuquota_common::launch::SharedWord;

/// A word of a map value that several CPUs change at once.
#[derive(Clone, Copy)]
pub struct Word(*mut u64);

impl Word {
    /// The word at `pointer`, which points into a map value: aligned, and valid while the program runs.
    #[inline(always)]
    pub fn new(pointer: *mut u64) -> Self {
        Self(pointer)
    }

    /// Adds, and returns the value before.
    #[inline(always)]
    pub fn add(self, value: u64) -> u64 {
        // SAFETY: see `new`; the verifier checks the address besides.
        unsafe { atomic_xadd::<u64, u64, { AcqRel }>(self.0, value) }
    }

    /// Subtracts, and returns the value before.
    #[inline(always)]
    pub fn sub(self, value: u64) -> u64 {
        self.add(value.wrapping_neg())
    }

    /// Replaces, and returns the value before.
    #[inline(always)]
    pub fn swap(self, value: u64) -> u64 {
        // SAFETY: as in `add`.
        unsafe { atomic_xchg::<u64, { AcqRel }>(self.0, value) }
    }
}

impl SharedWord for Word {
    #[inline(always)]
    fn load(self) -> u64 {
        // SAFETY: see `new`. An aligned word is read in one piece.
        unsafe { core::ptr::read_volatile(self.0) }
    }

    #[inline(always)]
    fn add(self, value: u64) -> u64 {
        Self::add(self, value)
    }

    #[inline(always)]
    fn replace(self, old: u64, new: u64) {
        // SAFETY: as in `add`.
        unsafe { atomic_cxchg::<u64, { AcqRel }, { Acquire }>(self.0, old, new) };
    }
}
