//! `tracepoint/syscalls/sys_enter_ioctl`, before `ioctl_enter`: the last call of the thread is settled if its exit was not shown
//! to `ioctl_exit`. Attached on preemptible kernels only; see `late_enter` for when they pass a program over.
//!
//! What the driver answered may not be there any more, since the thread may have used the memory for something else. So what
//! was asked for is charged, and what was freed stays charged, until the daemon has asked the driver whether it is there.
//!
//! Much less than `ioctl_exit` does: the kernel looks at each program in full before it takes it, and would at that one twice.

use aya_ebpf::{macros::tracepoint, programs::TracePointContext};
use gpuquota_common::{
    map::{InFlight, ObjectKey, PLACES, call, counter, refusal},
    nvidia::class,
};

use crate::{
    file::patched,
    ioctl_enter::LOADED_BY,
    ioctl_exit, ledger,
    maps::{IN_FLIGHT, SETTINGS, count},
    task,
};

/// Entry of an ioctl, before it is looked at.
#[tracepoint]
pub fn late_exit(_ctx: TracePointContext) -> u32 {
    let thread = task::thread();
    let Some(flight) = IN_FLIGHT.get_ptr_mut(thread) else {
        return 0;
    };
    // SAFETY: the entry is this thread's own, and stays until it is removed below.
    let flight = unsafe { &*flight };
    // Call 0: it was refused, whatever it made. Another load of the programs may have seen this very call.
    if flight.call == 0 || flight.by != patched!(LOADED_BY) {
        return 0;
    }
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    let tgid = task::tgid();
    if let Some(client) = book(settings.generation, tgid, flight) {
        ioctl_exit::note_use(tgid, flight.fd, client);
    }
    let _ = IN_FLIGHT.remove(thread);
    0
}

/// Books what a call of process `tgid` may have done whose exit was not seen: nothing is taken for refused or freed that may not
/// be. Returns the client in which there is something new.
#[inline(always)]
pub fn book(generation: u64, tgid: u32, flight: &InFlight) -> Option<u32> {
    count(counter::LATE_EXITS);
    let (tenant, gpu) = (flight.tenant, flight.gpu);
    let is_new = matches!(flight.call, call::ALLOC_OBJECT | call::ALLOC_MEMORY);
    if !is_new || flight.refusal != refusal::NONE {
        ledger::unreserve(generation, tenant, gpu, flight.reserved);
        return None;
    }
    let bytes = if flight.call == call::ALLOC_MEMORY && gpu < PLACES {
        let missing = flight.wanted.saturating_sub(flight.reserved);
        let _ = ledger::reserve(generation, tenant, gpu, missing, true);
        ledger::deposit(generation, tgid, tenant, gpu, flight.reserved + missing);
        flight.reserved + missing
    } else {
        0
    };
    // Where the driver has chosen the name, the memory goes with its process.
    if flight.handle == 0 || class::is_client(flight.class) {
        return None;
    }
    let key = ObjectKey {
        client: flight.client,
        handle: flight.handle,
    };
    ioctl_exit::remember(tgid, flight, key, bytes);
    Some(key.client)
}
