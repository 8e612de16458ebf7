//! `uprobe` on the entry of libcuda's calls that wait, and of those that record what can be waited for: finds the launch
//! that is waited for. Minimum kernel: 5.15.

use aya_ebpf::{helpers::bpf_get_current_pid_tgid, macros::uprobe, programs::ProbeContext};
use gpuquota_common::profile::{EventKey, Launched, Waiting, kind, stream};

use crate::{
    maps::{LAUNCHED, RECORDED, WAITING, enter, now, since},
    registers,
};

/// A thread waits, or records an event.
#[uprobe]
pub fn kernel_wait(ctx: ProbeContext) -> u32 {
    let task = bpf_get_current_pid_tgid();
    let (tgid, thread) = ((task >> 32) as u32, task as u32);
    let Some(cookie) = enter(&ctx, tgid) else {
        return 0;
    };
    let what = cookie as u32;
    let argument = |at: usize| ctx.arg::<u64>(at).unwrap_or(0);
    let event = EventKey {
        tgid: u64::from(tgid),
        event: argument(0),
    };
    let since = since(tgid);
    let launched = match kind::plain(what) {
        kind::RECORD => {
            match last(thread, since, |launched| {
                launched.stream == stream(argument(1), what)
            }) {
                Some(launched) => {
                    let _ = RECORDED.insert(event, launched, 0);
                }
                // What it stood behind before is not what it stands behind now.
                None => {
                    let _ = RECORDED.remove(event);
                }
            }
            return 0;
        }
        kind::WAIT_STREAM => last(thread, since, |launched| {
            launched.stream == stream(argument(0), what)
        }),
        kind::WAIT_CONTEXT => last(thread, since, |_| true),
        _ => {
            // SAFETY: a copy of a value that is replaced as a whole.
            let launched = unsafe { RECORDED.get(event) }.copied();
            let _ = RECORDED.remove(event);
            launched.filter(|launched| launched.at_ns >= since)
        }
    };
    let sp = registers::read(ctx.regs).sp;
    let Some(launched) = launched else {
        // SAFETY: the entry is of this thread, which is here and nowhere else.
        let over = unsafe { WAITING.get(thread) }.is_some_and(|waiting| waiting.sp <= sp);
        // The call that began deeper in the stack, or here, has returned unseen.
        if over {
            let _ = WAITING.remove(thread);
        }
        return 0;
    };
    let waiting = Waiting {
        handle: launched.handle,
        launched_ns: launched.at_ns,
        since_ns: now(),
        sp,
    };
    // Where it fails, this wait is not told.
    let _ = WAITING.insert(thread, waiting, 0);
    0
}

/// The last launch of the thread, once, if it is the one that is meant.
#[inline(always)]
fn last(thread: u32, since: u64, is_meant: impl Fn(&Launched) -> bool) -> Option<Launched> {
    let entry = LAUNCHED.get_ptr_mut(thread)?;
    // SAFETY: the entry is of this thread, which is here and nowhere else.
    let launched = unsafe { &mut *entry };
    if launched.fresh == 0 || launched.at_ns < since || !is_meant(launched) {
        return None;
    }
    let found = *launched;
    launched.fresh = 0;
    Some(found)
}
