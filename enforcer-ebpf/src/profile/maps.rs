//! The maps of this object.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_ktime_get_ns, bpf_probe_read_user, generated::bpf_get_attach_cookie},
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
};
use gpuquota_common::profile::{
    Asking, EventKey, KernelKey, Launched, Launches, MAX_EVENTS, MAX_KERNELS, MAX_PROCESSES,
    MAX_THREADS, Spent, Waiting, counter, kind, since::NO_MORE,
};

use crate::atomic::Word;

/// `BPF_F_NO_PREALLOC`: a large bound costs nothing.
const NO_PREALLOC: u32 = 1;
/// `BPF_RB_NO_WAKEUP`: user space comes by itself.
pub const NO_WAKEUP: u64 = 1;

/// What the probes have cost a process, nanoseconds; a process that has no entry is not looked at.
#[map]
pub static SPENT: HashMap<u32, Spent> = HashMap::with_max_entries(MAX_PROCESSES + 1, NO_PREALLOC);
/// Since when the probes of a process are all in place, `CLOCK_MONOTONIC` nanoseconds: what is remembered from before says
/// nothing, since what came in between was not seen. See [`since`](gpuquota_common::profile::since) for other values.
#[map]
pub static SINCE: HashMap<u32, u64> = HashMap::with_max_entries(MAX_PROCESSES + 1, NO_PREALLOC);
/// Launches by kernel.
#[map]
pub static KERNELS: HashMap<KernelKey, Launches> =
    HashMap::with_max_entries(MAX_KERNELS, NO_PREALLOC);
/// One value, all zero: what a new entry of [`KERNELS`] begins as.
#[map]
pub static NONE_YET: Array<Launches> = Array::with_max_entries(1, 0);
/// The last launch of each thread. A thread that is forgotten for others begins anew.
#[map]
pub static LAUNCHED: LruHashMap<u32, Launched> = LruHashMap::with_max_entries(MAX_THREADS, 0);
/// The launch in front of each event.
#[map]
pub static RECORDED: LruHashMap<EventKey, Launched> = LruHashMap::with_max_entries(MAX_EVENTS, 0);
/// Threads that wait for a launch.
#[map]
pub static WAITING: LruHashMap<u32, Waiting> = LruHashMap::with_max_entries(MAX_THREADS, 0);
/// Threads that ask for a kernel.
#[map]
pub static ASKING: LruHashMap<u32, Asking> = LruHashMap::with_max_entries(MAX_THREADS, 0);
/// What is told to user space, which says how large it is.
#[map]
pub static MESSAGES: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
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

/// The cookie of the probe, once its cost is booked; `None` for a process that is not looked at.
#[inline(always)]
pub fn enter(ctx: &impl EbpfContext, tgid: u32) -> Option<u64> {
    // SAFETY: the helper takes the context of the program (kernel 5.15).
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let spent = SPENT.get_ptr_mut(tgid)?;
    // SAFETY: a part of a map value, at an index that it has.
    Word::new(unsafe { &raw mut (*spent)[kind::group(cookie as u32)] }).add(cookie >> 32);
    Some(cookie)
}

/// Since when everything that a process does is seen.
#[inline(always)]
pub fn since(tgid: u32) -> u64 {
    // SAFETY: a copy of a word.
    unsafe { SINCE.get(tgid) }.copied().unwrap_or(NO_MORE)
}

/// A word of the process's memory.
#[inline(always)]
pub fn read(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address.
    let read = unsafe { bpf_probe_read_user(address as *const u64) }.ok();
    if read.is_none() {
        count(counter::UNREADABLE);
    }
    read
}

/// `CLOCK_MONOTONIC`, nanoseconds.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no arguments, no effects.
    unsafe { bpf_ktime_get_ns() }
}
