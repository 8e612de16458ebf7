//! The maps of this object.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{HashMap, PerCpuArray, RingBuf},
};
use gpuquota_common::idle::{MAX_CHOSEN, MAX_PACES, Pace, counter};

use crate::atomic::Word;

/// `BPF_F_NO_PREALLOC`: a large bound costs nothing.
const NO_PREALLOC: u32 = 1;

/// Processes that are followed, and since when (`CLOCK_MONOTONIC`, nanoseconds). Preallocated: every context switch of the host
/// looks here.
#[map]
pub static CHOSEN: HashMap<u32, u64> = HashMap::with_max_entries(MAX_CHOSEN, 0);
/// What following them has cost them so far, nanoseconds; those that are not followed right now keep theirs.
#[map]
pub static SPENT: HashMap<u32, u64> = HashMap::with_max_entries(MAX_CHOSEN, 0);
/// How often their threads go off their CPUs, by thread.
#[map]
pub static PACES: HashMap<u32, Pace> = HashMap::with_max_entries(MAX_PACES, NO_PREALLOC);
/// What became of their threads. User space says how large it is.
#[map]
pub static MOMENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// What did not fit; see [`counter`].
#[map]
pub static LOSSES: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

/// Since when a process is followed, if it is.
#[inline(always)]
pub fn followed_since(tgid: u32) -> Option<u64> {
    // Process 0 is what a CPU does when there is nothing to do.
    if tgid == 0 {
        return None;
    }
    // SAFETY: values are replaced as a whole.
    unsafe { CHOSEN.get(tgid) }.copied()
}

/// Books what a program has taken of the time of a process.
#[inline(always)]
pub fn book(tgid: u32, since_ns: u64) {
    if let Some(spent) = SPENT.get_ptr_mut(tgid) {
        Word::new(spent).add(now().wrapping_sub(since_ns));
    }
}

/// Counts something that is lost.
#[inline(always)]
pub fn count(which: u32) {
    if let Some(value) = LOSSES.get_ptr_mut(which) {
        // SAFETY: a value of this CPU; a program that is interrupted here may lose one.
        unsafe { *value += 1 };
    }
}

/// `CLOCK_MONOTONIC`, nanoseconds.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no arguments, no effects.
    unsafe { bpf_ktime_get_ns() }
}
