//! `uprobe` on every launch call of libcuda, in processes of tenants with a launch budget: counts, and delays
//! what comes too early.
//!
//! Two programs with one body: [`launch`], and [`launch_spin`], which may sleep and so may be preempted while
//! it spins for longer. The probe's cookie says which process and which symbol. Nothing here can refuse a
//! launch: it is charged when it comes and goes when its moment has come. Minimum kernel: 5.17 for `bpf_loop`,
//! 6.0 for [`launch_spin`].

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_current_task,
        generated::{bpf_get_attach_cookie, bpf_loop, bpf_send_signal},
    },
    macros::uprobe,
    programs::ProbeContext,
};
use gpuquota_common::{
    launch::{
        Bucket, Calls, GAPS, GRAPH, GraphKey, HEARTBEAT_STALE_NS, LAST_RESORT_NS, MAX_GRAPH_COST,
        Notice, SPIN_ANYWAY_NS, STOP_TAKES_NS, Settings, Slot, gap_index, give_back, limit_flags,
        nanos, notice, pace, take, ticks,
    },
    map::{self, MAX_NESTING, NO_TENANT, counter},
};

use crate::{
    atomic::Word,
    file::{field, patched},
    launch_maps::{
        LAUNCH_BUCKETS, LAUNCH_CALLS, LAUNCH_GAPS, LAUNCH_GRAPHS, LAUNCH_NOTICES, LAUNCH_SETTINGS,
        LAUNCH_SLOTS, limit,
    },
    maps::{count, now, settings, tenant_row},
    task,
};

/// `task_struct.ptrace`
#[unsafe(no_mangle)]
pub static OFF_TASK_PTRACE: u32 = u32::MAX;

/// Signals as x86 and arm64 number them.
mod signal {
    pub const TERM: u32 = 15;
    pub const STOP: u32 = 19;
}

/// More rounds than the longest spin takes; a round is some 20 ns.
const ROUNDS: u32 = 1 << 23;

/// Launch calls of a process that is stopped or frozen when it goes too fast.
#[uprobe]
pub fn launch(ctx: ProbeContext) -> u32 {
    pass(&ctx, SPIN_ANYWAY_NS);
    0
}

/// Launch calls of a process that spins through short delays.
#[uprobe(sleepable)]
pub fn launch_spin(ctx: ProbeContext) -> u32 {
    let longest = LAUNCH_SETTINGS.get(0).map_or(0, |word| word.spin_max_ns);
    pass(&ctx, longest.max(SPIN_ANYWAY_NS));
    0
}

/// What a launch has to wait for.
struct Wait {
    /// How long.
    ns: u64,
    /// For whose budget, or [`NO_TENANT`].
    limited_by: u32,
    /// The least time to stop the process for.
    hold_ns: u64,
    /// Whether the process is to end.
    deny: bool,
}

/// A launch in a process of a slot.
struct Launch<'a> {
    at: u32,
    slot: &'a Slot,
    calls: *mut Calls,
    symbol: u32,
    tenant: u32,
    generation: u64,
    nodes: u64,
}

#[inline(always)]
fn pass(ctx: &ProbeContext, longest_spin: u64) {
    // SAFETY: the helper takes the context of the program (kernel 5.15).
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let at = cookie as u32;
    let (Some(slot), Some(calls)) = (LAUNCH_SLOTS.get(at), LAUNCH_CALLS.get_ptr_mut(at)) else {
        return;
    };
    if slot.tgid == 0 {
        return;
    }
    let kernel = settings();
    let launch = Launch {
        at,
        slot,
        calls,
        symbol: (cookie >> 32) as u32,
        tenant: tenant(slot, &kernel),
        generation: kernel.generation,
        nodes: nodes(ctx, (cookie >> 32) as u32, slot.tgid),
    };
    let mut time = now();
    // SAFETY: a field of a map value.
    let until = unsafe { (*calls).until_ns };
    if until > time && stopped_and_yet_running(calls, time) {
        count_evasion(launch.tenant);
        spin(until.min(time + LAST_RESORT_NS));
        time = now();
    }
    note(&launch, time);
    let wait = charge(&launch, time);
    if wait.limited_by != NO_TENANT {
        delay(&launch, &wait, time, longest_spin);
    }
}

/// The tenant that pays, found again if the process has changed its cgroup or the cgroups their tenants.
#[inline(always)]
fn tenant(slot: &Slot, kernel: &map::Settings) -> u32 {
    let cgroup = task::cgroup();
    if cgroup == slot.cgroup && kernel.cgroup_epoch == slot.epoch {
        slot.tenant
    } else {
        task::tenant(kernel, cgroup)
    }
}

/// Kernel nodes of the graph that is launched; 1 for everything else, and for graphs that are not known.
#[inline(always)]
fn nodes(ctx: &ProbeContext, symbol: u32, tgid: u32) -> u64 {
    if symbol & GRAPH == 0 {
        return 1;
    }
    let key = GraphKey {
        handle: ctx.arg(0).unwrap_or(0),
        tgid: u64::from(tgid),
    };
    // SAFETY: values are replaced as a whole.
    unsafe { LAUNCH_GRAPHS.get(key) }
        .copied()
        .map_or(1, |nodes| nodes.clamp(1, MAX_GRAPH_COST))
}

/// Whether somebody else has continued the process before its time.
#[inline(always)]
fn stopped_and_yet_running(calls: *mut Calls, time: u64) -> bool {
    // SAFETY: fields of a map value.
    let (stopped, continued) = unsafe { ((*calls).stopped_ns, (*calls).foreign_continue_ns) };
    // Another thread may still be on its way to a halt, unless somebody is known to have continued it.
    stopped != 0 && (continued > stopped || time.wrapping_sub(stopped) > STOP_TAKES_NS)
}

macro_rules! word {
    ($place:expr) => {
        // SAFETY: callers have a pointer to a map value.
        Word::new(unsafe { &raw mut $place })
    };
}

#[inline(always)]
fn count_evasion(tenant: u32) {
    if let Some(bucket) = bucket(tenant) {
        word!((*bucket).evaded).add(1);
    }
}

#[inline(always)]
fn bucket(tenant: u32) -> Option<*mut Bucket> {
    LAUNCH_BUCKETS.get_ptr_mut(tenant)
}

/// Counts a launch of a process.
#[inline(always)]
fn note(launch: &Launch<'_>, time: u64) {
    let calls = launch.calls;
    word!((*calls).launches).add(1);
    let last = word!((*calls).last_ns).swap(time);
    // SAFETY: a field of a map value; threads that launch side by side may lose one.
    let was_delayed = unsafe { core::mem::replace(&mut (*calls).last_delayed, 0) } != 0;
    if last == 0 {
        return;
    }
    let gap = time.wrapping_sub(last);
    if !was_delayed {
        word!((*calls).thinks).add(1);
        word!((*calls).think_ns).add(gap);
    }
    let index = gap_index(gap);
    if let Some(gaps) = LAUNCH_GAPS.get_ptr_mut(launch.tenant)
        && index < GAPS
    {
        word!((*gaps)[index]).add(1);
    }
}

/// Takes the launch from the bucket of its tenant and of all around it, and says how long it has to wait.
#[inline(always)]
fn charge(launch: &Launch<'_>, time: u64) -> Wait {
    let mut wait = Wait {
        ns: 0,
        limited_by: NO_TENANT,
        hold_ns: 0,
        deny: false,
    };
    let mut at = launch.tenant;
    for _ in 0..MAX_NESTING {
        let Some(row) = tenant_row(launch.generation, at) else {
            break;
        };
        let (Some(limit), Some(bucket)) = (limit(launch.generation, at), bucket(at)) else {
            break;
        };
        word!((*bucket).launches).add(1);
        if limit.interval != 0 {
            let free = word!((*bucket).free);
            let cost = cost(limit.flags, launch.nodes);
            let ns = nanos(take(free, ticks(time), limit.interval, limit.span, cost));
            if ns > 0 {
                wait.deny |= limit.flags & limit_flags::DENY != 0;
            }
            if ns > wait.ns {
                wait.ns = ns;
                wait.limited_by = at;
                wait.hold_ns = limit.hold_ns;
            }
        }
        at = row.parent;
    }
    wait
}

#[inline(always)]
fn cost(flags: u32, nodes: u64) -> u64 {
    if flags & limit_flags::GRAPH_NODES != 0 {
        nodes
    } else {
        1
    }
}

/// What happens to the buckets of a tenant and of all around it when a launch is not to be delayed as it should.
#[derive(Clone, Copy, PartialEq)]
enum Why {
    /// It waits in full.
    Delayed(u64),
    /// It goes early: its moment is too far ahead. It takes nothing from the buckets.
    Overdue(u64),
    /// It goes at once: nobody is there to continue the process. It takes nothing from the buckets.
    Unheld,
    /// Its process is to end.
    Denied,
}

#[inline(always)]
fn settle(launch: &Launch<'_>, why: Why) {
    let mut at = launch.tenant;
    for _ in 0..MAX_NESTING {
        let Some(row) = tenant_row(launch.generation, at) else {
            break;
        };
        let (Some(limit), Some(bucket)) = (limit(launch.generation, at), bucket(at)) else {
            break;
        };
        if matches!(why, Why::Overdue(_) | Why::Unheld) && limit.interval != 0 {
            give_back(
                word!((*bucket).free),
                limit.interval,
                cost(limit.flags, launch.nodes),
            );
        }
        match why {
            Why::Delayed(ns) | Why::Overdue(ns) => {
                word!((*bucket).delayed).add(1);
                word!((*bucket).delay_ns).add(ns);
                if matches!(why, Why::Overdue(_)) {
                    word!((*bucket).overdue).add(1);
                }
            }
            Why::Unheld => {
                word!((*bucket).unheld).add(1);
            }
            Why::Denied => {
                word!((*bucket).denied).add(1);
            }
        }
        at = row.parent;
    }
}

/// Delays a launch as the pace of its process says.
#[inline(always)]
fn delay(launch: &Launch<'_>, wait: &Wait, time: u64, longest_spin: u64) {
    let word = LAUNCH_SETTINGS.get(0).copied().unwrap_or(Settings {
        heartbeat_ns: 0,
        max_delay_ns: 0,
        spin_max_ns: 0,
        helper_tgid: 0,
        reserved: 0,
    });
    if time.wrapping_sub(word.heartbeat_ns) > HEARTBEAT_STALE_NS {
        settle(launch, Why::Unheld);
        return;
    }
    let calls = launch.calls;
    // SAFETY: a copy of a map value.
    if unsafe { *calls }.stopped_by_others() {
        // It is about to stand still, and for longer than we would have it.
        return;
    }
    if wait.deny {
        settle(launch, Why::Denied);
        tell_to_end(launch, wait, time);
    }
    // Threads that spin need no more than their own delay.
    let spins = wait.ns <= longest_spin
        && (wait.hold_ns < SPIN_ANYWAY_NS || launch.slot.pace == pace::SPIN);
    let wanted = if spins {
        wait.ns
    } else {
        wait.ns.max(wait.hold_ns)
    };
    let ns = wanted.min(word.max_delay_ns);
    settle(
        launch,
        if wait.ns > word.max_delay_ns {
            Why::Overdue(ns)
        } else {
            Why::Delayed(ns)
        },
    );
    word!((*calls).delayed).add(1);
    word!((*calls).delay_ns).add(ns);
    // SAFETY: a field of a map value; the last writer may win.
    unsafe {
        (*calls).symbol = u64::from(launch.symbol & (GRAPH - 1));
        (*calls).last_delayed = 1;
    }
    let until = time + ns;
    if spins {
        spin(until);
    } else if launch.slot.pace == pace::FREEZE {
        ask_to_freeze(launch, wait, time, until);
    } else if is_traced() || !stop(launch, wait, time, until) {
        spin(until.min(time + LAST_RESORT_NS));
    }
}

/// Whether a debugger would take our stop for its own.
#[inline(always)]
fn is_traced() -> bool {
    // SAFETY: no arguments, no effects.
    let task = unsafe { bpf_get_current_task() };
    field::<u32>(task, patched!(OFF_TASK_PTRACE)).unwrap_or(0) != 0
}

#[inline(always)]
fn notice(launch: &Launch<'_>, wait: &Wait, kind: u32, time: u64, until: u64, stop: u64) -> Notice {
    Notice {
        kind,
        slot: launch.at,
        tgid: launch.slot.tgid,
        tenant: launch.tenant,
        limited_by: wait.limited_by,
        symbol: launch.symbol & (GRAPH - 1),
        stop,
        until_ns: until,
        at_ns: time,
    }
}

/// Puts a later moment into a word.
#[inline(always)]
fn raise(word: Word, until: u64) {
    use gpuquota_common::launch::SharedWord as _;
    // A third CPU in between may win; its moment is as good within a launch or two.
    for _ in 0..2 {
        let old = word.load();
        if old >= until {
            return;
        }
        word.replace(old, until);
    }
}

/// Stops the process; false if that cannot be done. Whoever is stopped is on record before it is, and the
/// notice leaves after it is.
#[inline(always)]
fn stop(launch: &Launch<'_>, wait: &Wait, time: u64, until: u64) -> bool {
    let calls = launch.calls;
    let Some(mut entry) = LAUNCH_NOTICES.reserve::<Notice>(0) else {
        count(counter::EVENTS_LOST);
        return false;
    };
    raise(word!((*calls).until_ns), until);
    let number = word!((*calls).stops).add(1) + 1;
    // SAFETY: a field of a map value; the last writer may win.
    unsafe { (*calls).stopped_ns = time };
    entry.write(notice(launch, wait, notice::STOPPED, time, until, number));
    // SAFETY: signals the current process (kernel 5.3).
    let sent = unsafe { bpf_send_signal(signal::STOP) };
    entry.submit(0);
    sent == 0
}

/// Tells the process to end, once.
#[inline(always)]
fn tell_to_end(launch: &Launch<'_>, wait: &Wait, time: u64) {
    let calls = launch.calls;
    if word!((*calls).told_ns).swap(time) != 0 {
        return;
    }
    let Some(mut entry) = LAUNCH_NOTICES.reserve::<Notice>(0) else {
        count(counter::EVENTS_LOST);
        // SAFETY: a field of a map value: the next launch tries again.
        unsafe { (*calls).told_ns = 0 };
        return;
    };
    entry.write(notice(launch, wait, notice::TOLD, time, time, 0));
    // SAFETY: signals the current process (kernel 5.3). One that cannot be told is ended by the controller.
    let _ = unsafe { bpf_send_signal(signal::TERM) };
    entry.submit(0);
}

/// Asks the controller to freeze the tenant; once until then.
#[inline(always)]
fn ask_to_freeze(launch: &Launch<'_>, wait: &Wait, time: u64, until: u64) {
    let calls = launch.calls;
    // SAFETY: a field of a map value.
    if unsafe { (*calls).until_ns } > time {
        return;
    }
    raise(word!((*calls).until_ns), until);
    let Some(mut entry) = LAUNCH_NOTICES.reserve::<Notice>(0) else {
        count(counter::EVENTS_LOST);
        return;
    };
    entry.write(notice(launch, wait, notice::FREEZE, time, until, 0));
    entry.submit(0);
}

/// Keeps the thread until a moment has come.
#[inline(always)]
fn spin(until: u64) {
    let mut until = until;
    // SAFETY: the callback only reads the word behind its context, which outlives the call (kernel 5.17).
    unsafe {
        bpf_loop(
            ROUNDS,
            spin_round as *mut c_void,
            (&raw mut until).cast(),
            0,
        )
    };
}

/// 1 ends the loop.
unsafe extern "C" fn spin_round(_round: u32, until: *mut c_void) -> i64 {
    // SAFETY: `spin` passes a pointer to a word on its stack.
    let until = unsafe { *until.cast::<u64>() };
    i64::from(now() >= until)
}
