//! `uretprobe` on the calls that wait: tells how long a launch took until its wait was over. Minimum kernel: 5.15.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::uretprobe, programs::RetProbeContext};
use gpuquota_common::profile::{Waited, counter, told};

use crate::{
    maps::{MESSAGES, NO_WAKEUP, WAITING, count, now},
    registers,
};

/// A wait is over.
#[uretprobe]
pub fn kernel_waited(ctx: RetProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let tid = task as u32;
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    let Some(waiting) = unsafe { WAITING.get(tid) }.copied() else {
        return 0;
    };
    // The return address is gone from the stack, and nothing else: otherwise this is the return of a call within it.
    if registers::read(ctx.regs).sp.wrapping_sub(waiting.sp) > 8 {
        return 0;
    }
    // Where it fails, the next wait of the thread overwrites it.
    let _ = WAITING.remove(tid);
    if ctx.ret::<u32>() != 0 {
        return 0;
    }
    let Some(mut entry) = MESSAGES.reserve::<Waited>(0) else {
        count(counter::LOST);
        return 0;
    };
    entry.write(Waited {
        told: told::WAITED,
        tgid: (task >> 32) as u32,
        handle: waiting.handle,
        launched_ns: waiting.launched_ns,
        since_ns: waiting.since_ns,
        until_ns: now(),
    });
    entry.submit(NO_WAKEUP);
    0
}
