//! `raw_tracepoint/sched_process_exec`: a new program; files marked close-on-exec are gone.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpuquota_common::{event, map::process_flags};

use crate::{
    maps::{PROCESSES, emit, settings},
    task,
};

/// A process replaced its program: the daemon looks which clients it still has.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let tgid = task::tgid();
    let Some(process) = PROCESSES.get_ptr_mut(tgid) else {
        return 0;
    };
    // Its next driver call is the first of a new program, with a libcuda of its own.
    // SAFETY: the process has one thread now, and nobody else clears the flag.
    unsafe { (*process).flags &= !process_flags::ACTIVE };
    let cgroup = task::cgroup();
    let tenant = task::tenant(&settings(), cgroup);
    emit(&task::process_event(
        event::kind::PROCESS_EXEC,
        tgid,
        tenant,
        cgroup,
    ));
    0
}
