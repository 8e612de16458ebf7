//! `tracepoint/cgroup/cgroup_rmdir`: A cgroup was removed: its id never comes back.

use aya_ebpf::{macros::tracepoint, programs::TracePointContext};
use gpuquota_common::event;

use crate::task;

/// A cgroup was removed: its id never comes back.
#[tracepoint]
pub fn cgroup_rmdir(ctx: TracePointContext) -> u32 {
    task::report_cgroup(&ctx, event::kind::CGROUP_RMDIR);
    0
}
