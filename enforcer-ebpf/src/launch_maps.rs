//! Maps of launch budgets; see [`gpuquota_common::launch`].

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LruHashMap, RingBuf},
};
use gpuquota_common::{
    launch::{
        Bucket, Calls, Done, Gaps, GraphKey, Limit, MAX_GRAPHS, MAX_SLOTS, Making, Settings, Slot,
    },
    map::{MAX_TENANTS, banked},
};

use crate::maps::MAPPED;

/// Word of the controller.
#[map]
pub static LAUNCH_SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);
/// Limits by tenant, two banks.
#[map]
pub static LAUNCH_LIMITS: Array<Limit> = Array::with_max_entries(2 * MAX_TENANTS, MAPPED);
/// Buckets by tenant.
#[map]
pub static LAUNCH_BUCKETS: Array<Bucket> = Array::with_max_entries(MAX_TENANTS, 0);
/// Time between launches by tenant.
#[map]
pub static LAUNCH_GAPS: Array<Gaps> = Array::with_max_entries(MAX_TENANTS, 0);
/// Processes with probes.
#[map]
pub static LAUNCH_SLOTS: Array<Slot> = Array::with_max_entries(MAX_SLOTS, 0);
/// What they did, by slot.
#[map]
pub static LAUNCH_CALLS: Array<Calls> = Array::with_max_entries(MAX_SLOTS, 0);
/// What was done about them, by slot. No program reads it; it is here to live as long as the stops.
#[map]
pub static LAUNCH_DONE: Array<Done> = Array::with_max_entries(MAX_SLOTS, 0);
/// Slot by process.
#[map]
pub static LAUNCH_PIDS: HashMap<u32, u32> = HashMap::with_max_entries(MAX_SLOTS, 0);
/// Cgroups that are frozen, and until when. No program reads it; it is here to live as long as they are frozen.
#[map]
pub static LAUNCH_FROZEN: HashMap<u64, u64> = HashMap::with_max_entries(MAX_SLOTS, 0);
/// Kernel nodes of graphs, by process and handle. An old graph that is lost costs one launch.
#[map]
pub static LAUNCH_GRAPHS: LruHashMap<GraphKey, u64> = LruHashMap::with_max_entries(MAX_GRAPHS, 0);
/// Graph calls between entry and return, by thread (process in the upper half).
#[map]
pub static LAUNCH_MAKING: LruHashMap<u64, Making> = LruHashMap::with_max_entries(4096, 0);
/// Launches of a process when a capture began, by process and stream.
#[map]
pub static LAUNCH_CAPTURES: LruHashMap<GraphKey, u64> = LruHashMap::with_max_entries(4096, 0);
/// What the controller has to see to.
#[map]
pub static LAUNCH_NOTICES: RingBuf = RingBuf::with_byte_size(1 << 18, 0);

/// The limit of a tenant in the policy in force.
#[inline(always)]
pub fn limit(generation: u64, tenant: u32) -> Option<&'static Limit> {
    LAUNCH_LIMITS.get(banked(generation, tenant, MAX_TENANTS))
}
