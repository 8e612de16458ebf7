//! `uretprobe` on the same calls: tells of those that succeeded, with the stack of who obtains memory.
//!
//! At the return the registers are the caller's: the walk of the stack begins in the caller itself. Minimum kernel: 5.15.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_pid_tgid, bpf_probe_read_user,
        generated::{bpf_get_attach_cookie, bpf_probe_read_user as read_user_raw},
    },
    macros::uretprobe,
    programs::RetProbeContext,
};
use gpuquota_common::insight::{Entered, Header, STACK_BYTES, STACK_PIECE, Sample, call, counter};

use crate::{
    maps::{CALLS, ENTERED, count, now},
    registers::{self, Registers},
};

/// A call returns.
#[uretprobe]
pub fn allocation_return(ctx: RetProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let tid = task as u32;
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    let Some(entered) = unsafe { ENTERED.get(tid) }.copied() else {
        return 0;
    };
    let registers = registers::read(ctx.regs);
    // The return address is gone from the stack, and nothing else: otherwise this is the return of a call within it.
    if registers.sp.wrapping_sub(entered.sp) > 8 {
        return 0;
    }
    // Where it fails, the next call of the thread overwrites it.
    let _ = ENTERED.remove(tid);
    if ctx.ret::<u32>() != 0 {
        return 0;
    }
    // SAFETY: the helper takes the context of the program (kernel 5.15).
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let Some((address, bytes)) = result(cookie as u32, &entered) else {
        count(counter::UNREADABLE);
        return 0;
    };
    let header = Header {
        call: cookie as u32,
        index: (cookie >> 32) as u32,
        tgid: (task >> 32) as u32,
        tid,
        entered_ns: entered.at_ns,
        returned_ns: now(),
        address,
        bytes,
        fourth: entered.arguments[2],
        pc: registers.pc,
        sp: registers.sp,
        fp: registers.fp,
        stack_len: 0,
    };
    if call::obtains(header.call) {
        tell_with_stack(header, registers);
    } else {
        tell(header);
    }
    0
}

/// Address or handle, and bytes, of a call that succeeded.
#[inline(always)]
fn result(what: u32, entered: &Entered) -> Option<(u64, u64)> {
    let [first, second, fourth] = entered.arguments;
    let address = if call::has_result(what) {
        read(first)?
    } else {
        first
    };
    let bytes = if what == call::ALLOC_PITCH {
        read(second)?.wrapping_mul(fourth)
    } else {
        second
    };
    Some((address, bytes))
}

#[inline(always)]
fn read(address: u64) -> Option<u64> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_user(address as *const u64) }.ok()
}

#[inline(always)]
fn tell(header: Header) {
    let Some(mut entry) = CALLS.reserve::<Header>(0) else {
        count(counter::LOST);
        return;
    };
    entry.write(header);
    entry.submit(0);
}

#[inline(always)]
fn tell_with_stack(header: Header, registers: Registers) {
    let Some(mut entry) = CALLS.reserve::<Sample>(0) else {
        count(counter::LOST);
        return;
    };
    let sample = entry.as_mut_ptr();
    // SAFETY: room for a whole sample was reserved.
    unsafe { (&raw mut (*sample).header).write(header) };
    let mut length = 0;
    while length < STACK_BYTES {
        // SAFETY: as above; the piece ends within the sample, and the helper checks the other side.
        let failed = unsafe {
            let to = (&raw mut (*sample).stack).cast::<u8>().add(length);
            let from = (registers.sp + length as u64) as *const c_void;
            read_user_raw(to.cast::<c_void>(), STACK_PIECE as u32, from)
        };
        if failed != 0 {
            break;
        }
        length += STACK_PIECE;
    }
    // SAFETY: as above.
    unsafe { (*sample).header.stack_len = length as u64 };
    entry.submit(0);
}
