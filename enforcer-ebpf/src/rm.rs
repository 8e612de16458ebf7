//! Reading the caller's memory, and which GPU a call is about.

use aya_ebpf::helpers::bpf_probe_read_user;
use gpuquota_common::{
    map::{MAX_GPUS, NO_GPU, ObjectKey, Settings, host_place},
    nvidia::class,
    rm::{Call, CallerMemory},
};

use crate::maps::{INSTANCES, OBJECTS};

/// Memory of the current task (`bpf_probe_read_user`: kernel 5.5).
///
/// The helper does not fault pages in. The caller has just written what is read here, and what cannot be
/// read is never taken for harmless: it is counted, and a deny backend refuses it.
pub struct Caller;

impl CallerMemory for Caller {
    #[inline(always)]
    fn words<const N: usize>(&self, address: u64) -> Option<[u32; N]> {
        // SAFETY: the helper checks the address and fails on one that cannot be read.
        unsafe { bpf_probe_read_user(address as *const [u32; N]) }.ok()
    }
}

/// The GPU that a new object is on: a device names it, everything below inherits it.
#[inline(always)]
fn gpu_of(settings: &Settings, call: &Call) -> u32 {
    if class::is_client(call.class) {
        return NO_GPU;
    }
    if call.class == class::NV01_DEVICE_0 {
        return match INSTANCES.get(call.instance) {
            Some(gpu) if *gpu < MAX_GPUS => *gpu,
            _ => only_gpu(settings),
        };
    }
    let parent = ObjectKey {
        client: call.client,
        handle: call.parent,
    };
    // SAFETY: `gpu` never changes once an object is in the map.
    match unsafe { OBJECTS.get(parent) } {
        Some(object) if object.gpu < MAX_GPUS => object.gpu,
        _ => only_gpu(settings),
    }
}

/// Where the new object is charged: on its GPU, or as host memory that is pinned for it.
#[inline(always)]
pub fn place_of(settings: &Settings, call: &Call) -> u32 {
    let gpu = gpu_of(settings, call);
    if class::is_host_memory(call.class) {
        host_place(gpu)
    } else {
        gpu
    }
}

/// On a host with one GPU there is nothing to tell apart.
#[inline(always)]
fn only_gpu(settings: &Settings) -> u32 {
    if settings.gpus == 1 { 0 } else { NO_GPU }
}
