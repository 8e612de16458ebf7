//! `tracepoint/nvidia/nvidia_dev_xid`: the driver reports a fault of a GPU.
//!
//! The tracepoint is the module's, so where its fields are is read from its `format` file and handed over in a map.
//! `bpf_probe_read_kernel_str`: kernel 5.5. Ring buffer: kernel 5.8.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_probe_read_kernel, bpf_probe_read_kernel_str_bytes},
    macros::{map, tracepoint},
    maps::{Array, RingBuf},
    programs::TracePointContext,
};
use gpuquota_common::{
    fault::{XidPlaces, XidRecord},
    map::counter,
};

use crate::maps::{count, now};

/// Where the fields are.
#[map]
pub static XID_PLACES: Array<XidPlaces> = Array::with_max_entries(1, 0);
/// The faults.
#[map]
pub static XIDS: RingBuf = RingBuf::with_byte_size(1 << 14, 0);

/// A GPU has a fault.
#[tracepoint]
pub fn nvidia_xid(ctx: TracePointContext) -> u32 {
    let Some(places) = XID_PLACES.get(0) else {
        return 0;
    };
    let Some(mut slot) = XIDS.reserve::<XidRecord>(0) else {
        count(counter::EVENTS_LOST);
        return 0;
    };
    let record = slot.as_mut_ptr();
    let base = ctx.as_ptr().cast::<u8>();
    // SAFETY: the slot is ours until it is submitted, and the helpers check every address that they read.
    unsafe {
        (*record).at_ns = now();
        (*record).code = bpf_probe_read_kernel(base.add(places.code as usize).cast()).unwrap_or(0);
        (*record).reserved = 0;
        (*record).device[0] = 0;
        (*record).message[0] = 0;
        read_text(base, places.device, &mut (*record).device);
        read_text(base, places.message, &mut (*record).message);
    }
    slot.submit(0);
    0
}

/// Reads a text of the record through its `__data_loc` word; one that cannot be read is left as it is.
///
/// # Safety
/// `base` is the context's own address.
#[inline(always)]
unsafe fn read_text(base: *const u8, place: u32, into: &mut [u8]) {
    // SAFETY: the helpers check what they read.
    unsafe {
        let Ok(word) = bpf_probe_read_kernel::<u32>(base.add(place as usize).cast()) else {
            return;
        };
        let _ = bpf_probe_read_kernel_str_bytes(base.add((word & 0xffff) as usize), into);
    }
}
