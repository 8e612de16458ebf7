//! The kernel side of gpuquota: it follows the driver's ioctls and keeps the ledger.
//!
//! One file per hook; the hooks share `maps`, `task` (who calls), `file` (which device), `rm` (what the
//! call is) and `ledger` (who pays). Minimum kernel: 5.15, for tracepoint links that can be pinned.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![allow(
    internal_features,
    reason = "the target declares no atomics that return the old value; the instruction set has them"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "words from the kernel are taken apart by their documented widths"
)]
#![allow(
    clippy::needless_pass_by_value,
    reason = "aya's macros hand every program its context by value"
)]

mod admission;
mod adopt;
mod atomic;
mod compat;
mod file;
mod ledger;
mod lists;
mod managed;
mod maps;
mod rm;
mod task;
mod waiting;

mod cgroup_mkdir;
mod cgroup_rmdir;
mod deny_lsm;
mod deny_override;
mod deny_rewrite;
mod ioctl_enter;
mod ioctl_exit;
mod late_enter;
mod late_exit;
mod launch;
mod launch_graph;
mod launch_maps;
mod launch_op;
mod launch_signal;
mod ledger_op;
mod nvidia_xid;
mod process_exec;
mod process_exit;
mod process_fork;
mod ungoverned;

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
