//! Telling user space, which looks often by itself: nobody is woken.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_probe_read_user as read_user_raw;
use gpuquota_common::idle::{Moment, STACK_BYTES, STACK_PIECE, WithStack, counter};

use crate::maps::{MOMENTS, count};

/// `BPF_RB_NO_WAKEUP`
const NO_WAKEUP: u64 = 1;

/// Tells of a moment.
#[inline(always)]
pub fn tell(moment: Moment) {
    let Some(mut entry) = MOMENTS.reserve::<Moment>(0) else {
        count(counter::LOST);
        return;
    };
    entry.write(moment);
    entry.submit(NO_WAKEUP);
}

/// Tells of a moment of the current thread, with its stack if there is room for that.
#[inline(always)]
pub fn tell_with_stack(moment: Moment) {
    let Some(mut entry) = MOMENTS.reserve::<WithStack>(0) else {
        count(counter::STACKLESS);
        tell(Moment {
            stands_for: 0,
            ..moment
        });
        return;
    };
    let whole = entry.as_mut_ptr();
    // SAFETY: room for all of it was reserved.
    unsafe { (&raw mut (*whole).moment).write(moment) };
    let mut length = 0;
    while length < STACK_BYTES {
        // SAFETY: as above; the piece ends within the entry, and the helper checks the other side.
        let failed = unsafe {
            let to = (&raw mut (*whole).stack).cast::<u8>().add(length);
            let from = (moment.sp + length as u64) as *const c_void;
            read_user_raw(to.cast::<c_void>(), STACK_PIECE as u32, from)
        };
        if failed != 0 {
            break;
        }
        length += STACK_PIECE;
    }
    // SAFETY: as above.
    unsafe { (*whole).moment.stack_len = length as u64 };
    entry.submit(NO_WAKEUP);
}
