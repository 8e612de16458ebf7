//! `uprobe` on the entry of libcuda's calls that give out kernels: keeps where handle and name are for the return. Minimum
//! kernel: 5.15.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::uprobe, programs::ProbeContext};
use gpuquota_common::profile::Asking;

use crate::maps::{ASKING, enter};

/// A thread asks for a kernel.
#[uprobe]
pub fn kernel_name(ctx: ProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    if enter(&ctx, (task >> 32) as u32).is_none() {
        return 0;
    }
    let asking = Asking {
        place: ctx.arg(0).unwrap_or(0),
        kernel: ctx.arg(1).unwrap_or(0),
        name: ctx.arg(2).unwrap_or(0),
    };
    // Where it fails, the kernel has no name.
    let _ = ASKING.insert(task as u32, asking, 0);
    0
}
