//! `lsm/file_ioctl` and `lsm/file_ioctl_compat`: a call that the entry hook found to be over a budget fails with an
//! error number. Hard, and the last resort: CUDA takes the error for one of the system, not for want of memory.
//!
//! Not sleepable: everything that could fault was read at the entry, and what could not be read there is refused.
//! Beside another backend this program refuses what that one cannot: calls that the entry hook did not see, and calls
//! whose parameters cannot be read.

use aya_ebpf::{macros::lsm, programs::LsmContext};
use gpuquota_common::map::{deny, refusal};

use crate::{
    compat, file,
    maps::{IN_FLIGHT, REWRITTEN, settings},
    task,
};

const EPERM: i32 = 1;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EFAULT: i32 = 14;
const ENOSYS: i32 = 38;

/// Permission to do an ioctl (kernel 5.7).
#[lsm(hook = "file_ioctl")]
pub fn deny_lsm(ctx: LsmContext) -> i32 {
    verdict(&ctx)
}

/// The same for a 32-bit caller (kernel 6.8, and stable kernels that took it over).
#[lsm(hook = "file_ioctl_compat")]
pub fn deny_lsm_compat(ctx: LsmContext) -> i32 {
    verdict(&ctx)
}

#[inline(always)]
fn verdict(ctx: &LsmContext) -> i32 {
    let before: i32 = ctx.arg(3);
    if before != 0 {
        return before;
    }
    let settings = settings();
    if settings.deny == deny::NONE {
        return 0;
    }
    let thread = task::thread();
    // SAFETY: the entry is this thread's own.
    if let Some(flight) = unsafe { IN_FLIGHT.get(thread) } {
        if flight.refusal == refusal::NONE {
            return 0;
        }
        if flight.refusal == refusal::UNREADABLE {
            return -EFAULT;
        }
        if flight.refusal == refusal::MANAGED {
            return -EPERM;
        }
        // SAFETY: as above.
        let is_rewritten = unsafe { REWRITTEN.get(thread) }.is_some();
        return match settings.deny {
            deny::REWRITE if is_rewritten => 0,
            // A preemptible kernel has passed over the program that refuses: the call is to be made again.
            deny::REWRITE if flight.refusal != refusal::STUCK => -EAGAIN,
            deny::OVERRIDE => -EAGAIN,
            _ => -ENOMEM,
        };
    }
    let file: *const u8 = ctx.arg(0);
    let cmd: u32 = ctx.arg(1);
    let arg: u64 = ctx.arg(2);
    if compat::is_refused(&settings, cmd, arg, || file::device_behind(file as u64)) {
        // libcuda makes a call again at once that is told so, and it is seen then.
        return if compat::is_compat() {
            -ENOSYS
        } else {
            -EAGAIN
        };
    }
    0
}
