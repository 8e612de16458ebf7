//! `uprobe` on the entry of libcuda's launch calls, in the processes that are looked at: counts the launch and remembers it
//! for the wait. Minimum kernel: 5.15.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::uprobe, programs::ProbeContext};
use gpuquota_common::{
    launch::{GAPS, gap_index},
    profile::{
        CONFIG_STREAM, GRAPH, KernelKey, Launched, Launches, OTHERS, kind, since::NO_MORE, stream,
    },
};

use crate::{
    atomic::Word,
    maps::{KERNELS, LAUNCHED, NONE_YET, enter, now, read, since},
    registers,
};

/// Where the ninth argument is: above the return address, the seventh and the eighth.
const NINTH: u64 = 24;

/// `BPF_NOEXIST`
const NEW: u64 = 1;

/// A kernel or graph is launched.
#[uprobe]
pub fn kernel_launch(ctx: ProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let (tgid, thread) = ((task >> 32) as u32, task as u32);
    let Some(cookie) = enter(&ctx, tgid) else {
        return 0;
    };
    let since = since(tgid);
    if since == NO_MORE {
        return 0;
    }
    let what = cookie as u32;
    let argument = |at: usize| ctx.arg::<u64>(at).unwrap_or(0);
    let (handle, on) = match kind::plain(what) {
        kind::LAUNCH => (
            argument(0),
            read(registers::read(ctx.regs).sp.wrapping_add(NINTH)),
        ),
        kind::LAUNCH_EX => (argument(1), read(argument(0).wrapping_add(CONFIG_STREAM))),
        kind::LAUNCH_GRAPH => (argument(0) | GRAPH, Some(argument(1))),
        kind::LAUNCH_GRID => (argument(0), Some(argument(3))),
        _ => (argument(0), Some(0)),
    };
    let at_ns = now();
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    let before = unsafe { LAUNCHED.get(thread) }.map(|launched| launched.at_ns);
    let gap = before
        .filter(|before| *before >= since)
        .map(|before| at_ns.wrapping_sub(before));
    let launched = Launched {
        handle,
        stream: stream(on.unwrap_or(0), what),
        at_ns,
        // A launch whose stream is not known is waited for by nobody.
        fresh: u64::from(on.is_some()),
    };
    // Where it fails, the thread's launches are counted and not waited for.
    let _ = LAUNCHED.insert(thread, launched, 0);
    note(u64::from(tgid), handle, gap);
    0
}

#[inline(always)]
fn note(tgid: u64, handle: u64, gap: Option<u64>) {
    let Some(entry) = entry(KernelKey { tgid, handle }).or_else(|| {
        entry(KernelKey {
            tgid,
            handle: OTHERS,
        })
    }) else {
        return;
    };
    // SAFETY: a field of a map value.
    Word::new(unsafe { &raw mut (*entry).count }).add(1);
    let Some(gap) = gap else { return };
    let index = gap_index(gap);
    if index < GAPS {
        // SAFETY: as above, and the index is within the array.
        Word::new(unsafe { &raw mut (*entry).gaps[index] }).add(1);
    }
}

/// The entry of a kernel; a new one if there is room.
#[inline(always)]
fn entry(key: KernelKey) -> Option<*mut Launches> {
    if let Some(entry) = KERNELS.get_ptr_mut(key) {
        return Some(entry);
    }
    // Another thread may have been first.
    let _ = KERNELS.insert(key, NONE_YET.get(0)?, NEW);
    KERNELS.get_ptr_mut(key)
}
