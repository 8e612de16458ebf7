//! `raw_tracepoint/sched_process_fork`: a child inherits the files, and with them the driver's clients.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpuquota_common::{
    event,
    map::{NO_TENANT, Process, counter},
};

use crate::{
    file::{field, patched},
    launch_maps::LAUNCH_PIDS,
    maps::{PROCESSES, count, emit},
    task::{self, OFF_TASK_START},
};

/// `task_struct.tgid`
#[unsafe(no_mangle)]
pub static OFF_TASK_TGID: u32 = u32::MAX;

/// A new task. Threads of the same process are none of our business.
#[raw_tracepoint(tracepoint = "sched_process_fork")]
pub fn process_fork(ctx: RawTracePointContext) -> i32 {
    let parent: u64 = ctx.arg(0);
    let child: u64 = ctx.arg(1);
    let parent_tgid: u32 = field(parent, patched!(OFF_TASK_TGID)).unwrap_or(0);
    let child_tgid: u32 = field(child, patched!(OFF_TASK_TGID)).unwrap_or(0);
    // SAFETY: only the presence of the entry is asked for.
    if child_tgid == parent_tgid || unsafe { PROCESSES.get(parent_tgid) }.is_none() {
        return 0;
    }
    let start_ns = field(child, patched!(OFF_TASK_START)).unwrap_or(0);
    let process = Process::new(start_ns, parent_tgid, 0);
    if PROCESSES.insert(child_tgid, process, 0).is_err() {
        count(counter::PROCESSES_FULL);
    }
    // Probes are not inherited: a child of a process that has some is told of at once.
    // SAFETY: only the presence of the entry is asked for.
    if unsafe { LAUNCH_PIDS.get(parent_tgid) }.is_some() {
        emit(&task::process_event(
            event::kind::PROCESS_NEW,
            child_tgid,
            NO_TENANT,
            0,
        ));
    }
    0
}
