//! `uretprobe` on the same calls: tells the name of the kernel that was given out. Minimum kernel: 5.15.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_pid_tgid,
        generated::{bpf_get_attach_cookie, bpf_probe_read_user_str},
    },
    macros::uretprobe,
    programs::RetProbeContext,
};
use gpuquota_common::profile::{NAME_BYTES, Named, counter, kind, told};

use crate::maps::{ASKING, MESSAGES, NO_WAKEUP, count, read};

/// A kernel was given out.
#[uretprobe]
pub fn kernel_named(ctx: RetProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let tid = task as u32;
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    let Some(asking) = unsafe { ASKING.get(tid) }.copied() else {
        return 0;
    };
    // Where it fails, the next call of the thread overwrites it.
    let _ = ASKING.remove(tid);
    if ctx.ret::<u32>() != 0 {
        return 0;
    }
    let Some(handle) = read(asking.place) else {
        return 0;
    };
    // SAFETY: the helper takes the context of the program (kernel 5.15).
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let is_alias = kind::plain(cookie as u32) == kind::ALIAS;
    let Some(mut entry) = MESSAGES.reserve::<Named>(0) else {
        count(counter::LOST);
        return 0;
    };
    let named = entry.as_mut_ptr();
    // SAFETY: room for a whole message was reserved; every field but the rest of the name, which ends in zero, is written.
    let length = unsafe {
        (*named).told = told::NAMED;
        (*named).tgid = (task >> 32) as u32;
        (*named).handle = handle;
        (*named).alias_of = if is_alias { asking.kernel } else { 0 };
        (*named).name[0] = 0;
        if is_alias {
            1
        } else {
            bpf_probe_read_user_str(
                (&raw mut (*named).name).cast::<c_void>(),
                NAME_BYTES as u32,
                asking.name as *const c_void,
            )
        }
    };
    if length > 0 {
        entry.submit(NO_WAKEUP);
    } else {
        count(counter::UNREADABLE);
        entry.discard(NO_WAKEUP);
    }
    0
}
