//! Keys and values of the BPF maps.
//!
//! Who writes what: `Budget`, `TenantRow`, `Settings`, `Device` and the cgroup map are written by user
//! space only; `Usage`, `Object`, `Process`, `InFlight` and the accounts by the kernel side only. No field
//! has two writers, so user space never loses an update that the kernel side makes at the same time.

/// Version of every layout in this crate; part of the pin path, so that two layouts never share a map.
pub const LAYOUT_VERSION: u32 = 7;

/// Most tenants that one daemon governs.
pub const MAX_TENANTS: u32 = 2048;
/// Most GPUs of one host.
pub const MAX_GPUS: u32 = 16;
/// Deepest nesting of tenants: how many budgets one allocation may be charged to.
pub const MAX_NESTING: u32 = 8;
/// Deepest cgroup level at which a tenant's root is found.
pub const MAX_CGROUP_LEVEL: u32 = 32;

/// Cgroups that can be tenants' roots at the same time.
pub const MAX_CGROUPS: u32 = 16384;
/// Driver objects in the ledger.
pub const MAX_OBJECTS: u32 = 1 << 20;
/// RM clients that have objects in the ledger.
pub const MAX_CLIENTS: u32 = 1 << 17;
/// Accounts: processes times the GPUs that they use.
pub const MAX_ACCOUNTS: u32 = 65536;
/// Processes that have spoken to the driver.
pub const MAX_PROCESSES: u32 = 65536;
/// Threads inside a driver call.
pub const MAX_IN_FLIGHT: u32 = 16384;

/// "No tenant" in every field that holds a tenant index.
pub const NO_TENANT: u32 = u32::MAX;
/// "Not known" in every field that holds a GPU index.
pub const NO_GPU: u32 = u32::MAX;

/// "The reservations of others" in every field that says whose limit is in the way.
pub const RESERVATIONS: u32 = u32::MAX - 1;

/// Kinds of memory with a budget of their own, times GPUs: see [`host_place`].
///
/// A place is where memory is charged. The first [`MAX_GPUS`] are the GPUs themselves.
pub const PLACES: u32 = 2 * MAX_GPUS;

/// The place where host memory is charged that is pinned for a GPU.
#[inline(always)]
pub const fn host_place(gpu: u32) -> u32 {
    if gpu < MAX_GPUS { MAX_GPUS + gpu } else { gpu }
}

/// The GPU of a place, and whether the memory is pinned host memory.
#[inline(always)]
pub const fn of_place(place: u32) -> (u32, bool) {
    if place >= MAX_GPUS && place < PLACES {
        (place - MAX_GPUS, true)
    } else {
        (place, false)
    }
}

/// Index into the usage array for a tenant at a place; the caller has checked both bounds.
#[inline(always)]
pub const fn cell(tenant: u32, place: u32) -> u32 {
    tenant * PLACES + place
}

/// Number of [`cell`]s.
pub const CELLS: u32 = MAX_TENANTS * PLACES;

/// Index into a map that holds two policies, the one in force and the one being written.
///
/// The parity of the policy generation selects the bank, so a reload is one store.
#[inline(always)]
pub const fn banked(generation: u64, index: u32, len: u32) -> u32 {
    ((generation & 1) as u32) * len + index
}

/// The daemon's word to the programs; one entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `CLOCK_MONOTONIC` nanoseconds when the daemon last showed that it lives.
    pub heartbeat_ns: u64,
    /// Generation of the policy in force; its parity selects the bank.
    pub generation: u64,
    /// Changes whenever the cgroup map changes; invalidates the cache of leaves.
    pub cgroup_epoch: u32,
    /// Process of the daemon, whose own driver calls are not accounted.
    pub daemon_tgid: u32,
    /// GPUs of the host. With one GPU a device object needs no decoding.
    pub gpus: u32,
    /// One of [`deny`].
    pub deny: u16,
    /// [`settings_flags`].
    pub flags: u16,
}

/// Which backend in the kernel refuses what the entry hook found to be over a budget.
pub mod deny {
    /// None: a supervisor may refuse before the entry hook, and what comes this far goes on.
    pub const NONE: u16 = 0;
    /// The call returns before the driver sees it.
    pub const OVERRIDE: u16 = 1;
    /// The call is made so that the driver refuses it.
    pub const REWRITE: u16 = 2;
    /// The call fails with an error number.
    pub const LSM: u16 = 3;
}

/// Flags in the [`Settings`].
pub mod settings_flags {
    /// Nothing is refused while no daemon lives.
    pub const OPEN_WITHOUT_DAEMON: u16 = 1;
    /// Whoever got memory past its budget is signalled at once, as its budget says.
    pub const ANSWER_BREACHES: u16 = 2;
    /// The GPUs are closed to processes in no tenant.
    pub const DENY_UNGOVERNED: u16 = 4;
    /// A program can make a call fail with an error number: [`super::deny::OVERRIDE`], or a security hook.
    pub const FAILS_CALLS: u16 = 8;
}

/// Heartbeats older than this mean that no daemon is there.
pub const HEARTBEAT_STALE_NS: u64 = 2_000_000_000;

/// Place of a tenant in the hierarchy, per policy bank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantRow {
    /// One of [`row`].
    pub state: u32,
    /// The tenant around it, or [`NO_TENANT`].
    pub parent: u32,
}

/// Longest name of a tenant in bytes.
pub const NAME_LEN: usize = 64;

/// Name of a tenant, filled up with zeros. Kept in the kernel so that whoever finds the ledger can read it.
pub type TenantName = [u8; NAME_LEN];

/// States of a [`TenantRow`].
pub mod row {
    /// No such tenant.
    pub const ABSENT: u32 = 0;
    /// Governs its cgroups.
    pub const IN_FORCE: u32 = 1;
    /// Left the policy, or moved in the hierarchy: governs nobody, but what was charged to it is still
    /// given back along its old parents.
    pub const RETIRED: u32 = 2;
}

/// Limits of a tenant at one place, per policy bank. "No limit" is `u64::MAX`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Bytes that may be charged at most.
    pub memory_max: u64,
    /// Bytes above which the tenant is told.
    pub memory_high: u64,
    /// How long an allocation waits at most under [`on_max::WAIT`], in nanoseconds.
    pub wait_ns: u64,
    /// One of [`on_max`].
    pub on_max: u16,
    /// 1 if the tenant may have no managed memory.
    pub deny_managed: u16,
    /// 1 if a process that got memory past the limit is to end.
    pub end_on_breach: u32,
}

/// What happens to an allocation above [`Budget::memory_max`].
pub mod on_max {
    /// It is refused.
    pub const DENY: u16 = 0;
    /// It waits, and is refused when its time is over.
    pub const WAIT: u16 = 1;
    /// It is refused, and its process is to end.
    pub const KILL: u16 = 2;
}

/// What a tenant uses at one place. Written by the kernel side only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes charged and reserved now, nested tenants included.
    pub memory: u64,
    /// Highest `memory` so far.
    pub peak: u64,
    /// Refused allocations; a refusal and libcuda's immediate second try count once.
    pub denials: u64,
    /// Allocations that went above the limit because nothing could refuse them.
    pub breaches: u64,
    /// What limits are compared with: `memory`, reservations of nested tenants included; see [`crate::claim`].
    pub claim: u64,
}

/// What is claimed of a card, by all tenants and by processes in none. Written by the kernel side only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Card {
    /// See [`crate::claim`].
    pub claim: u64,
}

/// Key of an account: what one process has at one place at the expense of one tenant.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AccountKey {
    /// Process.
    pub tgid: u32,
    /// Tenant index, or 0xffff for none.
    pub tenant: u16,
    /// Place; see [`PLACES`].
    pub gpu: u16,
}

impl AccountKey {
    /// Key for a tenant index that may be [`NO_TENANT`], at a place.
    #[inline(always)]
    pub const fn new(tgid: u32, tenant: u32, gpu: u32) -> Self {
        Self {
            tgid,
            tenant: tenant as u16,
            gpu: gpu as u16,
        }
    }
}

/// Key of an object: handles are numbers of a client, client handles are global in the driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Client handle; for a client itself equal to `handle`.
    pub client: u32,
    /// Handle of the object.
    pub handle: u32,
}

/// What kind of driver object an [`Object`] is.
pub mod kind {
    /// An RM client.
    pub const CLIENT: u32 = 1;
    /// A device.
    pub const DEVICE: u32 = 2;
    /// A subdevice.
    pub const SUBDEVICE: u32 = 3;
    /// Video memory.
    pub const MEMORY: u32 = 4;
    /// A channel group.
    pub const CHANNEL_GROUP: u32 = 5;
    /// A channel.
    pub const CHANNEL: u32 = 6;
    /// A second handle to somebody's memory.
    pub const DUP: u32 = 7;
    /// Pinned host memory.
    pub const HOST: u32 = 8;
    /// What the driver takes for a process by itself.
    pub const CONTEXT: u32 = 9;
    /// Managed memory of a process.
    pub const MANAGED: u32 = 10;

    /// Whether it is memory that is charged.
    #[inline(always)]
    pub const fn is_memory(kind: u32) -> bool {
        matches!(kind, MEMORY | HOST)
    }
}

/// A driver object that matters for a quota.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Object {
    /// Bytes charged for it; taken to zero exactly once, by whoever releases it.
    pub bytes: u64,
    /// When it was made, `CLOCK_MONOTONIC` nanoseconds: tells reused handles apart.
    pub born_ns: u64,
    /// cgroup of the task that made it.
    pub cgroup: u64,
    /// Process that made it.
    pub tgid: u32,
    /// Tenant that pays, or [`NO_TENANT`].
    pub tenant: u32,
    /// GPU it is on, or [`NO_GPU`]; for memory the place where it is charged.
    pub gpu: u32,
    /// One of [`kind`].
    pub kind: u32,
    /// Class as the driver was asked for it.
    pub class: u32,
    /// Handle of the parent.
    pub parent: u32,
    /// For a [`kind::DUP`]: the memory it stands for.
    pub source: ObjectKey,
    /// For memory: handles that others hold on it. For a [`kind::CLIENT`]: 1 once another process has made an
    /// object in it.
    pub dups: u32,
    /// For a [`kind::CLIENT`]: the fd through which it was made.
    pub fd: u32,
    /// For a [`kind::CLIENT`]: address of the open file through which it was made, with which the driver frees it; 0 if
    /// that is not known.
    pub file: u64,
    /// Handle of the next object in the client's list, or 0.
    pub next: u32,
    /// Handle of the one before it, or 0.
    pub previous: u32,
    /// One of [`list`], plus 1; 0 while it is in none.
    pub listed: u32,
    /// Unused; zero.
    pub reserved: u32,
}

/// The lists that a [`Client`] has.
pub mod list {
    /// Memory, its own and others': what there may be a million of.
    pub const MEMORY: usize = 0;
    /// Everything else: the client itself, devices, channels.
    pub const STRUCTURE: usize = 1;
    /// Number of lists.
    pub const COUNT: usize = 2;

    /// The list for a kind of object.
    #[inline(always)]
    pub const fn of(kind: u32) -> usize {
        if super::kind::is_memory(kind) || kind == super::kind::DUP {
            MEMORY
        } else {
            STRUCTURE
        }
    }
}

/// The objects of one client, as lists through them: whoever gives back what hangs below something looks at these
/// and not at every object of the host. Written by the kernel side only.
///
/// The flags are only ever set, each by one store.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// 1 while somebody changes a list.
    pub lock: u64,
    /// Handle of the first object of each [`list`], or 0.
    pub first: [u32; list::COUNT],
    /// Objects in each [`list`].
    pub count: [u32; list::COUNT],
    /// Process that made the first object seen.
    pub tgid: u32,
    /// 1 if objects of other processes are among them.
    pub mixed: u32,
    /// 1 if there were [`kind::DUP`]s among them.
    pub dups: u32,
    /// 1 if the lists may lack objects: then only a look at everything finds them.
    pub broken: u32,
    /// 1 once the entry is about to be removed.
    pub gone: u32,
    /// Unused; zero.
    pub reserved: u32,
}

/// Client handle under which memory lives on when its owner freed it and others still hold it.
/// RM hands out client handles from 0xc1d00000, so this one is never a client's.
pub const ORPHAN_CLIENT: u32 = 0xffff_fffe;

/// "Process" of what lives on although no process has its file: the file is on its way through a socket, or held by
/// something in the kernel. No process has this number.
pub const PARKED: u32 = 0;

/// Client handles under which processes are charged for what no call asks RM for begin here, one for each process
/// id, of which there are 2^22. RM's own begin at 0xc1d00000.
const CONTEXT_CLIENTS: u32 = 0x8000_0000;

/// Key of the object that stands for a process's contexts on a GPU.
#[inline(always)]
pub const fn context_key(tgid: u32, gpu: u32) -> ObjectKey {
    ObjectKey {
        client: CONTEXT_CLIENTS | tgid,
        handle: gpu + 1,
    }
}

/// Key of the object that stands for a process's managed memory on a GPU.
#[inline(always)]
pub const fn managed_key(tgid: u32, gpu: u32) -> ObjectKey {
    ObjectKey {
        client: CONTEXT_CLIENTS | tgid,
        handle: MAX_GPUS + gpu + 1,
    }
}

/// Whether a client handle is one of a [`context_key`] or [`managed_key`].
#[inline(always)]
pub const fn is_context(client: u32) -> bool {
    client >> 22 == CONTEXT_CLIENTS >> 22
}

/// A process that has spoken to the driver, or inherited from one that has.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Start time as in field 22 of `/proc/PID/stat`, in nanoseconds since boot.
    pub start_ns: u64,
    /// The process it was forked from, if that one had spoken to the driver; else 0.
    pub forked_from: u32,
    /// [`process_flags`].
    pub flags: u32,
    /// Where its youngest context has its pool of semaphores, which is made like managed memory and is none; or 0.
    pub pool: u64,
    /// GPU of its youngest context, or [`NO_GPU`].
    pub home: u32,
    /// Unused; zero.
    pub reserved: u32,
}

impl Process {
    /// A process without a context.
    #[inline(always)]
    pub const fn new(start_ns: u64, forked_from: u32, flags: u32) -> Self {
        Self {
            start_ns,
            forked_from,
            flags,
            pool: 0,
            home: NO_GPU,
            reserved: 0,
        }
    }
}

/// Flags of a [`Process`].
pub mod process_flags {
    /// Made driver calls itself.
    pub const ACTIVE: u32 = 1;
    /// Is exiting; its charges are released when its files are gone.
    pub const EXITING: u32 = 2;
    /// Was there before the observer.
    pub const ADOPTED: u32 = 4;
}

/// A driver call between entry and exit, by thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Pointer to the argument, after unwrapping.
    pub arg: u64,
    /// Bytes added to the usage of `tenant` and those around it.
    pub reserved: u64,
    /// Bytes that the call asks for, rounded as the driver rounds.
    pub wanted: u64,
    /// Where the driver will have written the granted size, or 0.
    pub granted: u64,
    /// cgroup of the task.
    pub cgroup: u64,
    /// Escape number and size, `nr | size << 16`.
    pub cmd: u32,
    /// One of [`call`].
    pub call: u32,
    /// Tenant of the caller, or [`NO_TENANT`].
    pub tenant: u32,
    /// GPU, or [`NO_GPU`]; for memory the place where it is charged.
    pub gpu: u32,
    /// Client.
    pub client: u32,
    /// Parent object.
    pub parent: u32,
    /// Handle in the call, before the driver may have chosen one.
    pub handle: u32,
    /// Class.
    pub class: u32,
    /// Source of a dup.
    pub source: ObjectKey,
    /// fd of the call.
    pub fd: u32,
    /// 1 once a deny backend let the call pass.
    pub admitted: u16,
    /// 1 if what stands at `granted` is the last byte's offset, not the size.
    pub granted_is_limit: u16,
    /// Tenant whose limit did not allow `wanted`, or [`NO_TENANT`].
    pub limited_by: u32,
    /// Which load of the programs has seen the entry; 0 for none.
    pub by: u32,
    /// One of [`refusal`].
    pub refusal: u32,
    /// The driver's status that a refused call gets.
    pub status: u32,
    /// Eight bytes of the call which, as `raised`, make the driver refuse it.
    pub lever: u64,
    /// See `lever`.
    pub raised: u64,
}

/// What a supervisor has reserved for a call that it lets pass, until the entry hook sees that call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admitted {
    /// Pointer to the argument, after unwrapping: by it and `cmd` the entry hook knows the call again.
    pub arg: u64,
    /// Bytes added to the usage of `tenant` and those around it.
    pub reserved: u64,
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// Escape number and size, `nr | size << 16`.
    pub cmd: u32,
    /// Tenant that pays.
    pub tenant: u32,
    /// Place where it is charged.
    pub gpu: u32,
    /// Zero.
    pub unused: u32,
}

/// Why an [`InFlight`] call is to be refused.
pub mod refusal {
    /// It is not.
    pub const NONE: u32 = 0;
    /// A budget is in the way, or it is not known which one would be.
    pub const MEMORY: u32 = 1;
    /// Its parameters cannot be read, so nobody knows what it asks for.
    pub const UNREADABLE: u32 = 2;
    /// As [`MEMORY`], and the call cannot be changed so that the driver refuses it.
    pub const STUCK: u32 = 3;
    /// It makes managed memory, of which its tenant may have none.
    pub const MANAGED: u32 = 4;
}

/// What the caller wrote where a call was changed so that the driver refuses it, by thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewritten {
    /// Where.
    pub at: u64,
    /// What stood there.
    pub was: u64,
    /// What stands there instead.
    pub raised: u64,
    /// Where the driver writes its status.
    pub status_at: u64,
    /// The status that the caller is to see there, if the driver has refused.
    pub status: u64,
}

/// What an [`InFlight`] call is.
pub mod call {
    /// Allocates an object without memory.
    pub const ALLOC_OBJECT: u32 = 1;
    /// Allocates video memory or pinned host memory.
    pub const ALLOC_MEMORY: u32 = 2;
    /// Frees an object.
    pub const FREE: u32 = 3;
    /// Gives a second handle.
    pub const DUP: u32 = 4;
    /// Could not be read at its entry; what it was is found out at its exit.
    pub const UNREADABLE: u32 = 5;
}

/// Key of a device: the device number of a node, or file system and inode of a simulated one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceKey {
    /// For a node: 0. Else the inode.
    pub inode: u64,
    /// For a node: its `i_rdev` as the kernel encodes it. Else the file system's `s_dev`.
    pub dev: u32,
    /// Unused; zero.
    pub reserved: u32,
}

/// What a device is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// One of [`device`].
    pub kind: u32,
    /// GPU index for [`device::GPU`], else [`NO_GPU`].
    pub gpu: u32,
}

/// Kinds of [`Device`].
pub mod device {
    /// `/dev/nvidiactl`.
    pub const CONTROL: u32 = 1;
    /// `/dev/nvidiaN`.
    pub const GPU: u32 = 2;
    /// `/dev/nvidia-uvm`.
    pub const UVM: u32 = 3;
}

/// Cached answer for a cgroup that is no tenant's root.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// [`Settings::cgroup_epoch`] when it was found.
    pub epoch: u32,
    /// Tenant, or [`NO_TENANT`].
    pub tenant: u32,
}

/// The last refusal of a thread: libcuda asks once more at once, and that is not a second refusal.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// What was asked for.
    pub bytes: u64,
}

/// A second refusal of the same size by the same thread within this time is libcuda's second try.
///
/// It comes within microseconds, but a machine may be busy. A third refusal is a new one in any case.
pub const SECOND_TRY_NS: u64 = 200_000_000;

/// Indices into the per-CPU counters.
pub mod counter {
    /// Events that found no room in the ring.
    pub const EVENTS_LOST: u32 = 0;
    /// Calls that found no room among the calls in flight.
    pub const INFLIGHT_FULL: u32 = 1;
    /// Objects that found no room.
    pub const OBJECTS_FULL: u32 = 2;
    /// Frees of handles that are not known: no change.
    pub const UNKNOWN_FREES: u32 = 3;
    /// Parameters that could not be read.
    pub const UNREADABLE: u32 = 4;
    /// Allocations whose GPU could not be told.
    pub const UNKNOWN_GPU: u32 = 5;
    /// Processes or accounts that found no room.
    pub const PROCESSES_FULL: u32 = 6;
    /// Scheduling controls that tenants issued, and those on channels that others did.
    pub const OWN_CONTROLS: u32 = 7;
    /// Driver calls that were decoded.
    pub const DECODED: u32 = 8;
    /// Refused calls that could not be made to fail as wanted.
    pub const NOT_REFUSED: u32 = 9;
    /// Driver calls of tenants that the entry program has not seen, as those of 32-bit callers, and that were refused.
    pub const UNSEEN_REFUSED: u32 = 10;
    /// Opened GPU files that were closed to a process in no tenant.
    pub const UNGOVERNED_DENIED: u32 = 11;
    /// Frees whose argument was another one after the call: nothing was released.
    pub const CHANGED_FREES: u32 = 12;
    /// Objects that are in no client's list, because there was no room for the client.
    pub const UNLISTED: u32 = 13;
    /// Calls whose entry was not shown to the programs, and which were read at their exit.
    pub const LATE_ENTRIES: u32 = 14;
    /// Calls whose exit was not shown to the programs, and which were settled at the next call of the thread.
    pub const LATE_EXITS: u32 = 15;
    /// Number of counters.
    pub const COUNT: u32 = 16;
}

#[cfg(feature = "user")]
mod pod {
    use super::{
        AccountKey, Admitted, Budget, Card, Client, Device, DeviceKey, InFlight, Leaf, Object,
        ObjectKey, Process, Refusal, Rewritten, Settings, TenantRow, Usage,
    };

    macro_rules! pod {
        ($($t:ty),*) => {$(
            // SAFETY: repr(C), only integers, no padding (see the layout tests).
            unsafe impl aya::Pod for $t {}
        )*};
    }
    pod!(
        AccountKey, Admitted, Budget, Card, Client, Device, DeviceKey, InFlight, Leaf, Object,
        ObjectKey, Process, Refusal, Rewritten, Settings, TenantRow, Usage
    );
}

#[cfg(test)]
mod tests {
    use core::mem::{offset_of, size_of};

    use super::*;

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<Settings>(), 32);
        assert_eq!(size_of::<TenantRow>(), 8);
        assert_eq!(size_of::<Budget>(), 32);
        assert_eq!(size_of::<Usage>(), 40);
        assert_eq!(size_of::<Card>(), 8);
        assert_eq!(size_of::<AccountKey>(), 8);
        assert_eq!(size_of::<ObjectKey>(), 8);
        assert_eq!(size_of::<Object>(), 4 * 8 + 14 * 4);
        assert_eq!(size_of::<Client>(), 8 + 10 * 4);
        assert_eq!(size_of::<Process>(), 32);
        assert_eq!(size_of::<InFlight>(), 7 * 8 + 16 * 4);
        assert_eq!(size_of::<Admitted>(), 3 * 8 + 4 * 4);
        assert_eq!(size_of::<DeviceKey>(), 16);
        assert_eq!(size_of::<Device>(), 8);
        assert_eq!(size_of::<Leaf>(), 8);
        assert_eq!(size_of::<Refusal>(), 16);
        assert_eq!(size_of::<Rewritten>(), 40);
    }

    #[test]
    fn fields_that_both_sides_read_stay_where_they_are() {
        assert_eq!(offset_of!(Settings, generation), 8);
        assert_eq!(offset_of!(Settings, daemon_tgid), 20);
        assert_eq!(offset_of!(Usage, denials), 16);
        assert_eq!(offset_of!(Object, tgid), 24);
        assert_eq!(offset_of!(Object, source), 48);
        assert_eq!(offset_of!(InFlight, cmd), 40);
        assert_eq!(offset_of!(InFlight, admitted), 84);
        assert_eq!(offset_of!(InFlight, by), 92);
        assert_eq!(offset_of!(InFlight, lever), 104);
        assert_eq!(offset_of!(Settings, deny), 28);
        assert_eq!(offset_of!(Budget, on_max), 24);
        assert_eq!(offset_of!(Budget, deny_managed), 26);
        assert_eq!(offset_of!(Process, flags), 12);
        assert_eq!(offset_of!(Process, pool), 16);
        assert_eq!(offset_of!(Process, home), 24);
    }

    #[test]
    fn banks_do_not_meet() {
        assert_eq!(banked(6, CELLS - 1, CELLS), CELLS - 1);
        assert_eq!(banked(7, 0, CELLS), CELLS);
        assert_eq!(cell(MAX_TENANTS - 1, PLACES - 1), CELLS - 1);
    }

    #[test]
    fn a_place_knows_its_gpu() {
        for gpu in 0..MAX_GPUS {
            assert_eq!(of_place(gpu), (gpu, false));
            assert_eq!(of_place(host_place(gpu)), (gpu, true));
        }
        assert_eq!(of_place(host_place(NO_GPU)), (NO_GPU, false));
    }

    #[test]
    fn no_tenant_survives_the_narrow_key() {
        assert_eq!(AccountKey::new(7, NO_TENANT, 3).tenant, 0xffff);
        const { assert!(MAX_TENANTS < 0xffff) };
    }
}
