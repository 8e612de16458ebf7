//! `perf_event` on the clock of every CPU: tells which chosen thread runs there, with its stack.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::perf_event, programs::PerfEventContext};
use gpuquota_common::idle::{Moment, what};

use crate::{
    maps::{book, followed_since, now},
    registers,
    tell::tell_with_stack,
};

/// The clock of a CPU ticks.
#[perf_event]
pub fn tick(_ctx: PerfEventContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let tgid = (task >> 32) as u32;
    if followed_since(tgid).is_none() {
        return 0;
    }
    let began = now();
    let registers = registers::read();
    tell_with_stack(Moment {
        at_ns: began,
        tgid,
        tid: task as u32,
        what: what::SAMPLE,
        syscall: registers.syscall,
        stands_for: 1,
        pc: registers.pc,
        sp: registers.sp,
        fp: registers.fp,
        stack_len: 0,
    });
    book(tgid, began);
    0
}
