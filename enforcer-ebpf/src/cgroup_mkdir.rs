//! `tracepoint/cgroup/cgroup_mkdir`: A cgroup was made: it may be a tenant's.

use aya_ebpf::{macros::tracepoint, programs::TracePointContext};
use gpuquota_common::event;

use crate::task;

/// A cgroup was made: it may be a tenant's.
#[tracepoint]
pub fn cgroup_mkdir(ctx: TracePointContext) -> u32 {
    task::report_cgroup(&ctx, event::kind::CGROUP_MKDIR);
    0
}
