//! The maps of this object.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{HashMap, PerCpuArray, RingBuf},
};
use gpuquota_common::insight::{Entered, MAX_ENTERED, counter};

/// `BPF_F_NO_PREALLOC`: a large bound costs nothing.
const NO_PREALLOC: u32 = 1;

/// Calls between entry and return, by thread.
#[map]
pub static ENTERED: HashMap<u32, Entered> = HashMap::with_max_entries(MAX_ENTERED, NO_PREALLOC);
/// Calls that have returned. User space says how large it is.
#[map]
pub static CALLS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// What did not fit; see [`counter`].
#[map]
pub static LOSSES: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

/// Counts something that is lost.
#[inline(always)]
pub fn count(which: u32) {
    if let Some(value) = LOSSES.get_ptr_mut(which) {
        // SAFETY: a value of this CPU; a program that is preempted here may lose one.
        unsafe { *value += 1 };
    }
}

/// `CLOCK_MONOTONIC`, nanoseconds.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no arguments, no effects.
    unsafe { bpf_ktime_get_ns() }
}
