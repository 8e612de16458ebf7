//! The maps, the counters and the way out for events.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf},
};
use gpuquota_common::{
    event::Event,
    map::{
        AccountKey, Budget, CELLS, Card, Client, Device, DeviceKey, HEARTBEAT_STALE_NS, InFlight,
        Leaf, MAX_ACCOUNTS, MAX_CGROUPS, MAX_CLIENTS, MAX_GPUS, MAX_IN_FLIGHT, MAX_OBJECTS,
        MAX_PROCESSES, MAX_TENANTS, Object, ObjectKey, Process, Refusal, Rewritten, Settings,
        TenantName, TenantRow, Usage, banked, counter, row,
    },
    time::{Frozen, FrozenKey},
    waiting::{Queue, Waiter},
};

use crate::atomic::Word;

/// Entries are allocated as they are needed (`BPF_F_NO_PREALLOC`): a large bound costs nothing.
pub const NO_PREALLOC: u32 = 1;
/// The daemon sees the array in its own memory (`BPF_F_MMAPABLE`, kernel 5.5).
pub const MAPPED: u32 = 1 << 10;

/// The daemon's settings.
#[map]
pub static SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);
/// Hierarchy of tenants, two banks.
#[map]
pub static TENANTS: Array<TenantRow> = Array::with_max_entries(2 * MAX_TENANTS, MAPPED);
/// Names of tenants. No program reads them; they are here to live as long as the ledger.
#[map]
pub static NAMES: Array<TenantName> = Array::with_max_entries(MAX_TENANTS, MAPPED);
/// Limits by tenant × GPU, two banks.
#[map]
pub static BUDGETS: Array<Budget> = Array::with_max_entries(2 * CELLS, MAPPED);
/// Usage by tenant × GPU.
#[map]
pub static USAGE: Array<Usage> = Array::with_max_entries(CELLS, MAPPED);
/// What is claimed of each card.
#[map]
pub static CARDS: Array<Card> = Array::with_max_entries(MAX_GPUS, MAPPED);
/// Most that may be claimed of each card, bytes: what it has where something is reserved, else `u64::MAX`.
#[map]
pub static CARD_SIZES: Array<u64> = Array::with_max_entries(MAX_GPUS, MAPPED);
/// Root cgroup of a tenant, by cgroup id.
#[map]
pub static CGROUPS: HashMap<u64, u32> = HashMap::with_max_entries(MAX_CGROUPS, NO_PREALLOC);
/// Answers for cgroups below a tenant's root, or outside of every tenant.
#[map]
pub static LEAVES: LruHashMap<u64, Leaf> = LruHashMap::with_max_entries(8192, 0);
/// The driver's nodes.
#[map]
pub static DEVICES: HashMap<DeviceKey, Device> = HashMap::with_max_entries(64, 0);
/// GPU index by the driver's device instance.
#[map]
pub static INSTANCES: Array<u32> = Array::with_max_entries(MAX_GPUS, 0);
/// Driver objects. Never evicts: what does not fit is counted.
#[map]
pub static OBJECTS: HashMap<ObjectKey, Object> =
    HashMap::with_max_entries(MAX_OBJECTS, NO_PREALLOC);
/// Which objects a client has.
#[map]
pub static CLIENTS: HashMap<u32, Client> = HashMap::with_max_entries(MAX_CLIENTS, NO_PREALLOC);
/// Charged bytes by process, tenant and GPU.
#[map]
pub static ACCOUNTS: HashMap<AccountKey, u64> =
    HashMap::with_max_entries(MAX_ACCOUNTS, NO_PREALLOC);
/// Processes that have spoken to the driver.
#[map]
pub static PROCESSES: HashMap<u32, Process> = HashMap::with_max_entries(MAX_PROCESSES, NO_PREALLOC);
/// Calls between entry and exit, by thread.
#[map]
pub static IN_FLIGHT: HashMap<u32, InFlight> =
    HashMap::with_max_entries(MAX_IN_FLIGHT, NO_PREALLOC);
/// Last refusal, by thread. Losing an old one only means that a second try counts as a refusal.
#[map]
pub static REFUSALS: LruHashMap<u32, Refusal> = LruHashMap::with_max_entries(4096, 0);
/// Allocations that wait for memory, by thread.
#[map]
pub static WAITERS: LruHashMap<u32, Waiter> = LruHashMap::with_max_entries(4096, 0);
/// Order among them, by tenant × GPU; user space makes an entry where a budget says "wait".
#[map]
pub static QUEUES: HashMap<u32, Queue> = HashMap::with_max_entries(4096, NO_PREALLOC);
/// Cgroups whose processes, and those below, may open the GPUs without being a tenant's.
#[map]
pub static EXEMPT: HashMap<u64, u32> = HashMap::with_max_entries(1024, NO_PREALLOC);
/// What callers wrote where a call was changed, by thread.
#[map]
pub static REWRITTEN: LruHashMap<u32, Rewritten> = LruHashMap::with_max_entries(4096, 0);
/// What is frozen. No program reads it; it is here to live on when the daemon is gone.
#[map]
pub static FROZEN: HashMap<FrozenKey, Frozen> = HashMap::with_max_entries(16384, NO_PREALLOC);
/// Events for the daemon.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);
/// What went wrong or was passed over, see [`counter`].
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

/// Adds one to a counter.
#[inline(always)]
pub fn count(index: u32) {
    if let Some(value) = COUNTERS.get_ptr_mut(index) {
        // A program may be preempted, and another one counts in the same slot meanwhile.
        Word::new(value).add(1);
    }
}

/// A copy of the settings; all zero (no policy, no daemon) before the daemon has written them.
#[inline(always)]
pub fn settings() -> Settings {
    SETTINGS.get(0).copied().unwrap_or(Settings {
        heartbeat_ns: 0,
        generation: 0,
        cgroup_epoch: 0,
        daemon_tgid: 0,
        gpus: 0,
        deny: 0,
        flags: 0,
    })
}

/// Whether the daemon has shown lately that it lives.
#[inline(always)]
pub fn daemon_alive(settings: &Settings) -> bool {
    now().wrapping_sub(settings.heartbeat_ns) < HEARTBEAT_STALE_NS
}

/// The tenant's row in the policy in force, retired ones too; `None` if there is none.
#[inline(always)]
pub fn tenant_row(generation: u64, tenant: u32) -> Option<TenantRow> {
    if tenant >= MAX_TENANTS {
        return None;
    }
    TENANTS
        .get(banked(generation, tenant, MAX_TENANTS))
        .copied()
        .filter(|found| found.state != row::ABSENT)
}

/// The limits in force for a cell of the usage array.
#[inline(always)]
pub fn budget(generation: u64, cell: u32) -> Option<&'static Budget> {
    BUDGETS.get(banked(generation, cell, CELLS))
}

/// `CLOCK_MONOTONIC` now (kernel 4.1).
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper has no arguments and no effects.
    unsafe { bpf_ktime_get_ns() }
}

/// Sends an event, or counts it as lost (ring buffer: kernel 5.8).
#[inline(always)]
pub fn emit(event: &Event) {
    match EVENTS.reserve::<Event>(0) {
        Some(mut slot) => {
            slot.write(*event);
            slot.submit(0);
        }
        None => count(counter::EVENTS_LOST),
    }
}
