//! `raw_tracepoint/sched_switch`: a CPU goes from one thread to another.
//!
//! Runs for every context switch of the host, so what is not chosen leaves at once. Minimum kernel: 5.18.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_get_prandom_u32, bpf_probe_read_kernel},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use gpuquota_common::idle::{Moment, Pace, what};

use crate::{
    maps::{PACES, book, followed_since, now},
    registers,
    tell::{tell, tell_with_stack},
};

/// `task_struct.tgid`
#[unsafe(no_mangle)]
pub static OFF_TASK_TGID: u32 = u32::MAX;
/// `task_struct.pid`
#[unsafe(no_mangle)]
pub static OFF_TASK_PID: u32 = u32::MAX;
/// `task_struct.jobctl`
#[unsafe(no_mangle)]
pub static OFF_TASK_JOBCTL: u32 = u32::MAX;

/// Bits of a thread's state, as `sched_switch` has told them since it does; include/linux/sched.h.
mod bits {
    pub const UNINTERRUPTIBLE: u64 = 0x2;
    pub const STOPPED: u64 = 0x4;
    pub const TRACED: u64 = 0x8;
    pub const DEAD: u64 = 0x80;
}
/// `JOBCTL_TRAP_FREEZE`: the thread's cgroup is to be frozen; include/linux/sched/jobctl.h.
const TRAP_FREEZE: u64 = 1 << 23;

/// Arguments of the tracepoint.
mod argument {
    pub const PREEMPTED: usize = 0;
    pub const PREVIOUS: usize = 1;
    pub const NEXT: usize = 2;
    pub const STATE: usize = 3;
}

/// Reads a field of a task at an offset that user space patched.
macro_rules! task_field {
    ($task:expr, $offset:path, $type:ty) => {{
        // SAFETY: a plain static of this program; volatile because the compiler sees only the initial value. The helper
        // checks the address.
        unsafe {
            let offset = u64::from(core::ptr::read_volatile(&raw const $offset));
            bpf_probe_read_kernel(($task + offset) as *const $type)
        }
        .unwrap_or(0)
    }};
}

/// A CPU changes threads. The current one is still that which goes.
#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn sched_switch(ctx: RawTracePointContext) -> i32 {
    let task = bpf_get_current_pid_tgid();
    let process = (task >> 32) as u32;
    if let Some(followed_ns) = followed_since(process) {
        let began = now();
        goes(&ctx, (began, followed_ns), process, task as u32);
        book(process, began);
    }
    let next = ctx.arg::<u64>(argument::NEXT);
    let process = task_field!(next, OFF_TASK_TGID, u32);
    if followed_since(process).is_some() {
        let began = now();
        let thread = task_field!(next, OFF_TASK_PID, u32);
        tell(moment(began, what::RUNS, process, thread));
        book(process, began);
    }
    0
}

#[inline(always)]
fn moment(at_ns: u64, what: u32, process: u32, thread: u32) -> Moment {
    Moment {
        at_ns,
        tgid: process,
        tid: thread,
        what,
        syscall: u32::MAX,
        stands_for: 0,
        pc: 0,
        sp: 0,
        fp: 0,
        stack_len: 0,
    }
}

/// A chosen thread goes off its CPU.
#[inline(always)]
fn goes(ctx: &RawTracePointContext, (at_ns, followed_ns): (u64, u64), process: u32, thread: u32) {
    let state = ctx.arg::<u64>(argument::STATE);
    let preempted = ctx.arg::<u64>(argument::PREEMPTED) & 1 != 0;
    let what = if preempted || state as u32 == 0 {
        what::QUEUED
    } else if state & bits::DEAD != 0 {
        what::ENDED
    } else if state & (bits::STOPPED | bits::TRACED) != 0 {
        what::STOPPED
    } else if state & bits::UNINTERRUPTIBLE != 0 {
        what::WAITS
    } else {
        let previous = ctx.arg::<u64>(argument::PREVIOUS);
        if task_field!(previous, OFF_TASK_JOBCTL, u64) & TRAP_FREEZE != 0 {
            what::FROZEN
        } else {
            what::SLEEPS
        }
    };
    let mut moment = moment(at_ns, what, process, thread);
    if what == what::ENDED {
        let _ = PACES.remove(thread);
        return tell(moment);
    }
    let registers = registers::read();
    moment.syscall = registers.syscall;
    if what == what::QUEUED {
        return tell(moment);
    }
    let pace = if let Some(known) = PACES.get_ptr_mut(thread) {
        // SAFETY: the entry is of this thread, which is here and nowhere else.
        let known = unsafe { &mut *known };
        *known = known.next(at_ns, followed_ns);
        *known
    } else {
        let new = Pace::begin(at_ns);
        // Where it fails, every stack of the thread is copied.
        let _ = PACES.insert(thread, new, 0);
        new
    };
    let one_of = pace.one_of();
    // SAFETY: no arguments, no effects.
    if one_of > 1 && u64::from(unsafe { bpf_get_prandom_u32() }) % one_of != 0 {
        return tell(moment);
    }
    moment.stands_for = one_of;
    moment.pc = registers.pc;
    moment.sp = registers.sp;
    moment.fp = registers.fp;
    tell_with_stack(moment);
}
