//! Operations on launch budgets on behalf of user space; see [`gpuquota_common::launch::op`].

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpuquota_common::{
    launch::{op, ticks},
    op::result,
};

use crate::{atomic::Word, launch_maps::LAUNCH_BUCKETS, maps::now};

/// Runs the operation that the first word names; as [`crate::ledger_op`], never attached.
#[raw_tracepoint]
pub fn launch_op(ctx: RawTracePointContext) -> i32 {
    let outcome = match ctx.arg::<u64>(0) {
        op::RESET => reset(ctx.arg::<u64>(1) as u32, ctx.arg(2)),
        _ => result::INVALID,
    };
    outcome as i32
}

/// A full bucket.
#[inline(always)]
fn reset(tenant: u32, span: u64) -> u32 {
    let Some(bucket) = LAUNCH_BUCKETS.get_ptr_mut(tenant) else {
        return result::NOT_FOUND;
    };
    // SAFETY: a pointer to a map value.
    Word::new(unsafe { &raw mut (*bucket).free }).swap(ticks(now()).wrapping_sub(span));
    result::OK
}
