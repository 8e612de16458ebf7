//! Who calls: process, thread, tenant.

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_pid_tgid,
        bpf_get_current_task,
    },
};
use gpuquota_common::{
    event::{self, Event},
    map::{
        Leaf, MAX_CGROUP_LEVEL, NO_GPU, NO_TENANT, Process, Settings, counter, process_flags, row,
    },
};

use crate::{
    file::{field, patched},
    maps::{CGROUPS, LEAVES, PROCESSES, count, emit, now, tenant_row},
};

/// `task_struct.group_leader`
#[unsafe(no_mangle)]
pub static OFF_TASK_LEADER: u32 = u32::MAX;
/// `task_struct.start_boottime`
#[unsafe(no_mangle)]
pub static OFF_TASK_START: u32 = u32::MAX;
/// `task_struct.signal`
#[unsafe(no_mangle)]
pub static OFF_TASK_SIGNAL: u32 = u32::MAX;
/// `signal_struct.live`
#[unsafe(no_mangle)]
pub static OFF_SIGNAL_LIVE: u32 = u32::MAX;

/// The current thread.
#[inline(always)]
pub fn thread() -> u32 {
    bpf_get_current_pid_tgid() as u32
}

/// The current process.
#[inline(always)]
pub fn tgid() -> u32 {
    (bpf_get_current_pid_tgid() >> 32) as u32
}

/// The cgroup (v2) of the current task (kernel 4.18).
#[inline(always)]
pub fn cgroup() -> u64 {
    // SAFETY: no arguments, no effects.
    unsafe { bpf_get_current_cgroup_id() }
}

/// The innermost tenant that governs the current task, or [`NO_TENANT`].
///
/// A tenant owns its cgroup and all below it; the deepest root wins. Answers for cgroups that are no root
/// are cached until the set of roots changes.
#[inline(always)]
pub fn tenant(settings: &Settings, cgroup: u64) -> u32 {
    // SAFETY: values are replaced as a whole.
    if let Some(leaf) = unsafe { LEAVES.get(cgroup) }
        && leaf.epoch == settings.cgroup_epoch
    {
        return in_force(settings, leaf.tenant);
    }
    let mut found = NO_TENANT;
    for level in 0..MAX_CGROUP_LEVEL {
        // SAFETY: no effects; 0 for levels below the task's own (kernel 5.7).
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) };
        if id == 0 {
            break;
        }
        // SAFETY: values are replaced as a whole.
        if let Some(tenant) = unsafe { CGROUPS.get(id) } {
            found = *tenant;
        }
    }
    let leaf = Leaf {
        epoch: settings.cgroup_epoch,
        tenant: found,
    };
    // A full cache only costs the walk.
    let _ = LEAVES.insert(cgroup, leaf, 0);
    in_force(settings, found)
}

/// A tenant that the policy in force no longer has governs nobody.
#[inline(always)]
fn in_force(settings: &Settings, tenant: u32) -> u32 {
    match tenant_row(settings.generation, tenant) {
        Some(found) if found.state == row::IN_FORCE => tenant,
        _ => NO_TENANT,
    }
}

/// When the current process was started, nanoseconds since boot.
#[inline(always)]
fn start_ns() -> u64 {
    // SAFETY: no arguments, no effects.
    let task = unsafe { bpf_get_current_task() };
    let leader: u64 = field(task, patched!(OFF_TASK_LEADER)).unwrap_or(0);
    field(leader, patched!(OFF_TASK_START)).unwrap_or(0)
}

/// Whether the current task is the last thread of its process to exit.
///
/// The kernel has taken the thread off `signal->live` before it reports the exit (`do_exit`).
#[inline(always)]
pub fn is_last_thread() -> bool {
    // SAFETY: no arguments, no effects.
    let task = unsafe { bpf_get_current_task() };
    let signal: u64 = field(task, patched!(OFF_TASK_SIGNAL)).unwrap_or(0);
    let live: u32 = field(signal, patched!(OFF_SIGNAL_LIVE)).unwrap_or(0);
    live == 0
}

/// Notes that the current process speaks to the driver; tells the daemon the first time.
#[inline(always)]
pub fn note_process(tgid: u32, tenant: u32, cgroup: u64) {
    if let Some(process) = PROCESSES.get_ptr_mut(tgid) {
        // SAFETY: the entry is in the map; the flag is only ever set, so a lost race changes nothing.
        unsafe {
            if (*process).flags & process_flags::ACTIVE != 0 {
                return;
            }
            (*process).flags |= process_flags::ACTIVE;
        }
    } else {
        let process = Process::new(start_ns(), 0, process_flags::ACTIVE);
        if PROCESSES.insert(tgid, process, 0).is_err() {
            count(counter::PROCESSES_FULL);
        }
    }
    emit(&process_event(
        event::kind::PROCESS_NEW,
        tgid,
        tenant,
        cgroup,
    ));
}

/// Notes that a process has a context on a GPU: with the youngest one goes its managed memory.
#[inline(always)]
pub fn note_context(tgid: u32, gpu: u32) {
    if let Some(process) = PROCESSES.get_ptr_mut(tgid) {
        // SAFETY: a word of a map value, written by one store.
        unsafe { (*process).home = gpu };
    }
}

/// An event about a process.
#[inline(always)]
pub fn process_event(kind: u32, tgid: u32, tenant: u32, cgroup: u64) -> Event {
    Event {
        kind,
        tenant,
        gpu: NO_GPU,
        tgid,
        limited_by: NO_TENANT,
        cgroup,
        at_ns: now(),
        ..Event::default()
    }
}

/// Reads a word of a tracepoint's record.
#[inline(always)]
pub fn record<T: Copy>(ctx: &impl EbpfContext, offset: usize) -> T {
    // SAFETY: the verifier checks the offset against the record; formats are in tracefs `events/*/format`.
    unsafe { core::ptr::read(ctx.as_ptr().cast::<u8>().add(offset).cast::<T>()) }
}

/// Offsets in the records of the cgroup tracepoints; user space checks them against tracefs before it loads.
mod cgroup_record {
    pub const HIERARCHY: usize = 8;
    pub const ID: usize = 16;
}

/// Tells the daemon about a cgroup of the unified hierarchy (number 0); others are not ours.
#[inline(always)]
pub fn report_cgroup(ctx: &impl EbpfContext, kind: u32) {
    if record::<u32>(ctx, cgroup_record::HIERARCHY) != 0 {
        return;
    }
    emit(&process_event(
        kind,
        0,
        NO_TENANT,
        record::<u64>(ctx, cgroup_record::ID),
    ));
}
