//! `raw_tracepoint/signal_generate`: who else stops and continues processes that we stop.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};

use crate::{
    file::{field, patched},
    launch_maps::{LAUNCH_CALLS, LAUNCH_PIDS, LAUNCH_SETTINGS},
    maps::{now, settings},
    process_fork::OFF_TASK_TGID,
    task,
};

/// Signals as x86 and arm64 number them.
const SIGCONT: u32 = 18;
const SIGSTOP: u32 = 19;
const SIGTTOU: u32 = 22;

/// `SEND_SIG_PRIV`: sent by the kernel itself, as by `bpf_send_signal`.
const BY_KERNEL: u64 = 1;
/// `TRACE_SIGNAL_IGNORED`
const IGNORED: u32 = 1;

/// A signal is sent. Everything but the five signals of job control is passed over at once.
#[raw_tracepoint(tracepoint = "signal_generate")]
pub fn launch_signal(ctx: RawTracePointContext) -> i32 {
    let signal: u32 = ctx.arg(0);
    if !(SIGCONT..=SIGTTOU).contains(&signal) {
        return 0;
    }
    let target: u64 = ctx.arg(2);
    let tgid: u32 = field(target, patched!(OFF_TASK_TGID)).unwrap_or(0);
    // SAFETY: entries are only inserted and removed.
    let Some(slot) = (unsafe { LAUNCH_PIDS.get(tgid) }).copied() else {
        return 0;
    };
    let Some(calls) = LAUNCH_CALLS.get_ptr_mut(slot) else {
        return 0;
    };
    let info: u64 = ctx.arg(1);
    let sender = task::tgid();
    if sender == settings().daemon_tgid || is_helper(sender) {
        return 0;
    }
    // SAFETY: fields of a map value, whose latest writer may win.
    unsafe {
        match signal {
            SIGCONT => (*calls).foreign_continue_ns = now(),
            SIGSTOP if info == BY_KERNEL && sender == tgid => {}
            SIGSTOP => (*calls).foreign_stop_ns = now(),
            _ if ctx.arg::<u32>(4) == IGNORED => {}
            _ => (*calls).job_control_ns = now() & !0xff | u64::from(signal),
        }
    }
    0
}

fn is_helper(sender: u32) -> bool {
    LAUNCH_SETTINGS
        .get(0)
        .is_some_and(|word| word.helper_tgid == sender)
}
