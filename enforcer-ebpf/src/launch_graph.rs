//! `uprobe` and `uretprobe` on the calls that make graphs, in processes of tenants whose graphs cost as much as they
//! have kernel nodes: how many nodes a graph has is known only while it is made.
//!
//! A node is counted when it is added; a capture counts what the process launches between its begin and its end, more
//! than that if other threads launch meanwhile. Nothing that a graph launches goes uncounted that way.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_user, generated::bpf_get_attach_cookie},
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use gpuquota_common::launch::{GraphKey, Making, graph_call};

use crate::launch_maps::{LAUNCH_CALLS, LAUNCH_CAPTURES, LAUNCH_GRAPHS, LAUNCH_MAKING};

/// Entry of a call that makes graphs or adds to them.
#[uprobe]
pub fn launch_graph(ctx: ProbeContext) -> u32 {
    // SAFETY: the helper takes the context of the program (kernel 5.15).
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let (first, second): (u64, u64) = (ctx.arg(0).unwrap_or(0), ctx.arg(1).unwrap_or(0));
    match (cookie >> 32) as u32 {
        graph_call::ADD => add(second, 1),
        graph_call::ADD_CHILD => add(second, nodes(ctx.arg(4).unwrap_or(0))),
        graph_call::BEGIN_CAPTURE => {
            // A capture that does not fit makes a graph that costs one.
            let _ = LAUNCH_CAPTURES.insert(key(first), launches(cookie as u32), 0);
        }
        graph_call::END_CAPTURE => {
            // SAFETY: values are replaced as a whole.
            let before = unsafe { LAUNCH_CAPTURES.get(key(first)) }.copied();
            let now = launches(cookie as u32);
            make(second, now.wrapping_sub(before.unwrap_or(now)));
            let _ = LAUNCH_CAPTURES.remove(key(first));
        }
        graph_call::COPY => make(first, nodes(second)),
        _ => {}
    }
    0
}

/// Return of a call that made a graph: its handle is where the caller wanted it.
#[uretprobe]
pub fn launch_graph_return(_ctx: RetProbeContext) -> u32 {
    let thread = bpf_get_current_pid_tgid();
    // SAFETY: the entry is this thread's own.
    let Some(making) = (unsafe { LAUNCH_MAKING.get(thread) }).copied() else {
        return 0;
    };
    let _ = LAUNCH_MAKING.remove(thread);
    // SAFETY: the helper checks the address (kernel 5.5).
    if let Ok(handle) = unsafe { bpf_probe_read_user(making.out as *const u64) }
        && handle != 0
    {
        let _ = LAUNCH_GRAPHS.insert(key(handle), making.nodes, 0);
    }
    0
}

#[inline(always)]
fn key(handle: u64) -> GraphKey {
    GraphKey {
        handle,
        tgid: bpf_get_current_pid_tgid() >> 32,
    }
}

/// Launches of the process in a slot so far.
#[inline(always)]
fn launches(slot: u32) -> u64 {
    LAUNCH_CALLS.get(slot).map_or(0, |calls| calls.launches)
}

#[inline(always)]
fn nodes(graph: u64) -> u64 {
    // SAFETY: values are replaced as a whole.
    unsafe { LAUNCH_GRAPHS.get(key(graph)) }
        .copied()
        .unwrap_or(0)
}

#[inline(always)]
fn add(graph: u64, more: u64) {
    let _ = LAUNCH_GRAPHS.insert(key(graph), nodes(graph) + more, 0);
}

#[inline(always)]
fn make(out: u64, nodes: u64) {
    let _ = LAUNCH_MAKING.insert(bpf_get_current_pid_tgid(), Making { out, nodes }, 0);
}
