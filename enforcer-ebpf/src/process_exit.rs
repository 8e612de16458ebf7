//! `raw_tracepoint/sched_process_exit`: a thread ends; with the last one, its process.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use gpuquota_common::{
    event,
    map::{AccountKey, NO_TENANT, PLACES, process_flags},
};

use crate::{
    late_exit, ledger,
    maps::{IN_FLIGHT, PROCESSES, daemon_alive, emit, settings},
    task,
};

/// End of a thread.
///
/// Files are closed after this hook, so the driver still holds the memory. The daemon waits until they are
/// gone and then releases what the process had; without a daemon it is released here, a little early.
#[raw_tracepoint(tracepoint = "sched_process_exit")]
pub fn process_exit(_ctx: RawTracePointContext) -> i32 {
    let thread = task::thread();
    let tgid = task::tgid();
    let settings = settings();
    if let Some(flight) = IN_FLIGHT.get_ptr_mut(thread) {
        // SAFETY: the entry is this thread's own, and stays until it is removed below.
        let flight = unsafe { &*flight };
        // A call that ends with its thread is at its exit before. This one was not seen there.
        if flight.call != 0 {
            late_exit::book(settings.generation, tgid, flight);
        }
        let _ = IN_FLIGHT.remove(thread);
    }
    let Some(process) = PROCESSES.get_ptr_mut(tgid) else {
        return 0;
    };
    if !task::is_last_thread() {
        return 0;
    }
    let cgroup = task::cgroup();
    let tenant = task::tenant(&settings, cgroup);
    if daemon_alive(&settings) {
        // SAFETY: the flag is only ever set.
        unsafe { (*process).flags |= process_flags::EXITING };
        emit(&task::process_event(
            event::kind::PROCESS_EXIT,
            tgid,
            tenant,
            cgroup,
        ));
        return 0;
    }
    for gpu in 0..PLACES {
        ledger::close_account(settings.generation, AccountKey::new(tgid, tenant, gpu));
        ledger::close_account(settings.generation, AccountKey::new(tgid, NO_TENANT, gpu));
    }
    let _ = PROCESSES.remove(tgid);
    0
}
