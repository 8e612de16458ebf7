//! Managed memory of tenants that may have none: the part of `ioctl_enter` for `nvidia-uvm`.
//!
//! libcuda maps a range and asks the driver whether it is one (`UVM_VALIDATE_VA_RANGE`). If that call fails it unmaps the range, the
//! program gets an error and goes on (measured on 580.159.04). The pool of semaphores of a context is asked about in the
//! same way; `UVM_ALLOC_SEMAPHORE_POOL` has named it before. Who maps without asking is found by the look at its
//! mappings.

use aya_ebpf::{macros::map, maps::PerCpuArray};
use gpuquota_common::{
    event::{self, Event},
    map::{InFlight, MAX_GPUS, NO_TENANT, cell, counter, device, refusal, settings_flags},
    nvidia::uvm,
    rm::CallerMemory,
};

use crate::{
    file, ioctl_enter, ledger,
    maps::{IN_FLIGHT, PROCESSES, SETTINGS, budget, count, now},
    rm::Caller,
    task,
};

/// One place per CPU for an entry of the map: a record on the stack would be more than kernels before 6.13 have room for.
#[map]
static REFUSED: PerCpuArray<InFlight> = PerCpuArray::with_max_entries(1, 0);

/// Whether a command is one of the two; `nvidia-uvm` compares the whole word.
#[inline(always)]
pub const fn concerns(cmd: u32) -> bool {
    matches!(cmd, uvm::ALLOC_SEMAPHORE_POOL | uvm::VALIDATE_VA_RANGE)
}

/// Entry of one of the two.
#[inline(always)]
pub fn enter(cmd: u32, arg: u64, fd: u32) {
    match file::device_of(fd) {
        Some(found) if found.kind == device::UVM => {}
        _ => return,
    }
    let Some(settings) = SETTINGS.get(0) else {
        return;
    };
    let Some(process) = PROCESSES.get_ptr_mut(task::tgid()) else {
        return;
    };
    let (Some(base), Some(length)) = (Caller.long(arg), Caller.long(arg + 8)) else {
        count(counter::UNREADABLE);
        return;
    };
    // SAFETY: words of a map value, each written by one store.
    let (pool, home) = unsafe {
        if cmd == uvm::ALLOC_SEMAPHORE_POOL {
            (*process).pool = base;
        }
        ((*process).pool, (*process).home)
    };
    if base == pool
        || settings.flags & settings_flags::FAILS_CALLS == 0
        || !ioctl_enter::refuses(settings)
    {
        return;
    }
    let tenant = task::tenant(settings, task::cgroup());
    if tenant == NO_TENANT || home >= MAX_GPUS {
        return;
    }
    let denies = budget(settings.generation, cell(tenant, home))
        .is_some_and(|budget| budget.deny_managed == 1);
    if denies && mark(arg) {
        refuse(task::thread(), (tenant, home), length);
    }
}

/// Lets the backend find that the call of the current thread is to be refused.
#[inline(always)]
fn mark(arg: u64) -> bool {
    let Some(slot) = REFUSED.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: the slot is this CPU's own, and its other fields stay zero.
    let flight = unsafe {
        (*slot).arg = arg;
        (*slot).tenant = NO_TENANT;
        (*slot).limited_by = NO_TENANT;
        (*slot).refusal = refusal::MANAGED;
        &*slot
    };
    IN_FLIGHT.insert(task::thread(), flight, 0).is_ok()
}

/// Counts and reports that a thread may have no managed memory on a GPU.
#[inline(always)]
pub fn refuse(thread: u32, (tenant, gpu): (u32, u32), bytes: u64) {
    ledger::refuse(
        thread,
        &Event {
            kind: event::kind::DENIED,
            tenant,
            gpu,
            tgid: thread,
            limited_by: tenant,
            class: uvm::VALIDATE_VA_RANGE,
            bytes,
            at_ns: now(),
            ..Event::default()
        },
    );
}
