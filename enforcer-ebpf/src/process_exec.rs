//! `raw_tracepoint/sched_process_exec`: a new program; files marked close-on-exec are gone.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpuquota_common::event;

use crate::{
    maps::{PROCESSES, emit, settings},
    task,
};

/// A process replaced its program: the daemon looks which clients it still has.
#[raw_tracepoint(tracepoint = "sched_process_exec")]
pub fn process_exec(_ctx: RawTracePointContext) -> i32 {
    let tgid = task::tgid();
    // SAFETY: only the presence of the entry is asked for.
    if unsafe { PROCESSES.get(tgid) }.is_none() {
        return 0;
    }
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
