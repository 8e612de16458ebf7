//! `uprobe` on the entry of libcuda's calls that obtain and give back memory, in the processes that are looked at: keeps
//! the arguments for the return. Minimum kernel: 5.15.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::uprobe, programs::ProbeContext};
use gpuquota_common::insight::{Entered, counter};

use crate::{
    maps::{ENTERED, count, now},
    registers,
};

/// Stack between a call and one within it, at most.
const NESTED_BYTES: u64 = 64 << 10;
/// No call takes longer, so an older entry is of one whose return was never seen: its thread was torn out of it.
const LONGEST_NS: u64 = 10_000_000_000;

/// A call begins. A call within another one of the list is passed over: the outer one is what the program asked for, and
/// only at its return is the whole stack as the program made it.
#[uprobe]
pub fn allocation(ctx: ProbeContext) -> u32 {
    let tid = bpf_get_current_pid_tgid() as u32;
    let (at_ns, sp) = (now(), registers::read(ctx.regs).sp);
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    if let Some(outer) = unsafe { ENTERED.get(tid) }
        && sp < outer.sp
        && outer.sp - sp < NESTED_BYTES
        && at_ns.wrapping_sub(outer.at_ns) < LONGEST_NS
    {
        return 0;
    }
    let entered = Entered {
        at_ns,
        sp,
        arguments: [
            ctx.arg(0).unwrap_or(0),
            ctx.arg(1).unwrap_or(0),
            ctx.arg(3).unwrap_or(0),
        ],
    };
    if ENTERED.insert(tid, entered, 0).is_err() {
        count(counter::CROWDED);
    }
    0
}
