//! What the probes of the launch profile and user space have to agree on.
//!
//! Nothing here is pinned: programs, maps and links live as long as somebody looks, and end with the daemon.

use crate::launch::Gaps;

/// What a probed call does: the lowest byte of its probe's cookie.
pub mod kind {
    /// Launches the kernel in the first argument on the stream in the ninth.
    pub const LAUNCH: u32 = 1;
    /// Launches the kernel in the second argument as the first one says, in which the stream is at [`CONFIG_STREAM`](super::CONFIG_STREAM).
    pub const LAUNCH_EX: u32 = 2;
    /// Launches the graph in the first argument on the stream in the second.
    pub const LAUNCH_GRAPH: u32 = 3;
    /// Launches the kernel in the first argument on the default stream.
    pub const LAUNCH_PLAIN: u32 = 4;
    /// As [`LAUNCH_PLAIN`], on the stream in the fourth argument.
    pub const LAUNCH_GRID: u32 = 5;
    /// Waits for the stream in the first argument.
    pub const WAIT_STREAM: u32 = 8;
    /// Waits for a context, with all its streams.
    pub const WAIT_CONTEXT: u32 = 9;
    /// Waits for the event in the first argument.
    pub const WAIT_EVENT: u32 = 10;
    /// Records the event in the first argument on the stream in the second.
    pub const RECORD: u32 = 11;
    /// The function of the name in the third argument; its handle goes to where the first one points.
    pub const NAME: u32 = 16;
    /// The function of the kernel in the second argument; its handle goes to where the first one points.
    pub const ALIAS: u32 = 17;

    /// Set where a stream that is not named is the thread's own.
    pub const PER_THREAD: u32 = 0x100;

    /// Where the [`group`](super::group) of a call begins.
    const GROUP_SHIFT: u32 = 12;

    /// The kind of a call in a group.
    pub const fn grouped(kind: u32, group: usize) -> u32 {
        kind | (group as u32) << GROUP_SHIFT
    }

    /// The group of a call, always one that there is.
    #[inline(always)]
    pub const fn group(kind: u32) -> usize {
        (kind >> GROUP_SHIFT) as usize & (super::group::COUNT - 1)
    }

    /// The kind without its flags.
    #[inline(always)]
    pub const fn plain(kind: u32) -> u32 {
        kind & 0xff
    }
}

/// Probes that come and go together, and whose cost is booked together.
pub mod group {
    /// All that launch and wait, since a launch and its wait are seen only together.
    pub const LAUNCHES: usize = 0;
    /// Those that give out kernels: each call on its own, since one may be rare and another as frequent as launches.
    pub const NAMES: [usize; 3] = [1, 2, 3];
    /// How many there are: a power of two.
    pub const COUNT: usize = 4;
}

/// In place of the moment since when all probes of a process's launches and waits are in place.
pub mod since {
    /// Some may be missing, so that nothing is known of what came before a launch.
    pub const NOT_YET: u64 = u64::MAX - 1;
    /// They are being taken out: launches are counted no more.
    pub const NO_MORE: u64 = u64::MAX;
}

/// What the probes have cost a process by [`group`], nanoseconds.
pub type Spent = [u64; group::COUNT];

/// Where `CUlaunchConfig` has its stream.
pub const CONFIG_STREAM: u64 = 32;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: what the null stream stands for.
pub const LEGACY_STREAM: u64 = 1;
/// See [`LEGACY_STREAM`].
pub const PER_THREAD_STREAM: u64 = 2;

/// The stream that a handle stands for.
#[inline(always)]
pub const fn stream(handle: u64, kind: u32) -> u64 {
    if handle != 0 {
        handle
    } else if kind & kind::PER_THREAD != 0 {
        PER_THREAD_STREAM
    } else {
        LEGACY_STREAM
    }
}

/// The cookie of a probe: what the call does, and what a hit costs in nanoseconds.
pub const fn cookie(kind: u32, cost_ns: u32) -> u64 {
    (kind as u64) | ((cost_ns as u64) << 32)
}

/// A kernel in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct KernelKey {
    /// Process.
    pub tgid: u64,
    /// Handle of the kernel, with [`GRAPH`] that of a graph, or [`OTHERS`].
    pub handle: u64,
}

/// Set in the handle of a graph, which no address has.
pub const GRAPH: u64 = 1 << 63;

/// In place of a handle: kernels for which there was no room.
pub const OTHERS: u64 = u64::MAX;

/// Launches of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Launches {
    /// How many.
    pub count: u64,
    /// How many came in less than 2^n ns after the launch before by the same thread.
    pub gaps: Gaps,
}

/// The last launch of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Launched {
    /// The kernel.
    pub handle: u64,
    /// See [`stream`].
    pub stream: u64,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// 1 until it was waited for.
    pub fresh: u64,
}

/// An event in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct EventKey {
    /// Process.
    pub tgid: u64,
    /// Handle of the event.
    pub event: u64,
}

/// A thread that waits for a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Waiting {
    /// The kernel.
    pub handle: u64,
    /// When it was launched.
    pub launched_ns: u64,
    /// Since when the thread waits.
    pub since_ns: u64,
    /// Its stack pointer at the entry of the call.
    pub sp: u64,
}

/// A thread that asks for a kernel by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Asking {
    /// The first argument: where the handle goes.
    pub place: u64,
    /// The second: the kernel itself for [`kind::ALIAS`].
    pub kernel: u64,
    /// The third: where the name is, for [`kind::NAME`].
    pub name: u64,
}

/// What a message is: its first word.
pub mod told {
    /// A [`Waited`](super::Waited).
    pub const WAITED: u32 = 1;
    /// A [`Named`](super::Named).
    pub const NAMED: u32 = 2;
}

/// A launch was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Waited {
    /// [`told::WAITED`].
    pub told: u32,
    /// Process.
    pub tgid: u32,
    /// The kernel.
    pub handle: u64,
    /// When it was launched, `CLOCK_MONOTONIC` nanoseconds.
    pub launched_ns: u64,
    /// Since when the thread waited.
    pub since_ns: u64,
    /// When the wait was over.
    pub until_ns: u64,
}

/// Longest name of a kernel, with the zero at its end.
pub const NAME_BYTES: usize = 1024;

/// A kernel has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Named {
    /// [`told::NAMED`].
    pub told: u32,
    /// Process.
    pub tgid: u32,
    /// The kernel.
    pub handle: u64,
    /// The kernel that it is another handle of; 0 where it has a name.
    pub alias_of: u64,
    /// The name, up to a zero.
    pub name: [u8; NAME_BYTES],
}

/// Places in the array of counters.
pub mod counter {
    /// Messages for which there was no room in the ring.
    pub const LOST: u32 = 0;
    /// Arguments and results that could not be read from the process.
    pub const UNREADABLE: u32 = 1;
    /// How many there are.
    pub const COUNT: u32 = 2;
}

/// Processes in one look, at most.
pub const MAX_PROCESSES: u32 = 1024;
/// Kernels that are counted apart.
pub const MAX_KERNELS: u32 = 8192;
/// Threads whose last launch is remembered.
pub const MAX_THREADS: u32 = 8192;
/// Events that are remembered.
pub const MAX_EVENTS: u32 = 4096;

#[cfg(feature = "user")]
mod pod {
    use super::{KernelKey, Launches};

    // SAFETY: integers without padding; any bit pattern is valid.
    unsafe impl aya::Pod for KernelKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Launches {}
}

#[cfg(test)]
mod tests {
    use core::mem::{align_of, offset_of, size_of};

    use super::*;
    use crate::launch::GAPS;

    #[test]
    fn both_sides_see_the_same_layout() {
        assert_eq!((size_of::<KernelKey>(), align_of::<KernelKey>()), (16, 8));
        assert_eq!(size_of::<Launches>(), 8 + 8 * GAPS);
        assert_eq!(offset_of!(Launches, gaps), 8);
        assert_eq!(size_of::<Launched>(), 32);
        assert_eq!(size_of::<EventKey>(), 16);
        assert_eq!(size_of::<Waiting>(), 32);
        assert_eq!(size_of::<Asking>(), 24);
        assert_eq!((size_of::<Waited>(), align_of::<Waited>()), (40, 8));
        assert_eq!(offset_of!(Waited, handle), 8);
        assert_eq!(offset_of!(Waited, until_ns), 32);
        assert_eq!(
            (size_of::<Named>(), align_of::<Named>()),
            (24 + NAME_BYTES, 8)
        );
        assert_eq!(offset_of!(Named, name), 24);
    }

    #[test]
    fn a_cookie_has_kind_and_cost() {
        let cookie = cookie(kind::LAUNCH | kind::PER_THREAD, 900);
        assert_eq!(kind::plain(cookie as u32), kind::LAUNCH);
        assert_eq!(cookie >> 32, 900);
    }

    #[test]
    fn a_kind_has_a_group() {
        let [_, _, last] = group::NAMES;
        let grouped = kind::grouped(kind::ALIAS, last);
        assert_eq!(
            (kind::plain(grouped), kind::group(grouped)),
            (kind::ALIAS, 3)
        );
        assert_eq!(
            kind::group(kind::LAUNCH | kind::PER_THREAD),
            group::LAUNCHES
        );
        assert!(kind::group(u32::MAX) < group::COUNT && group::COUNT.is_power_of_two());
    }

    #[test]
    fn the_null_stream_is_the_legacy_one_or_the_threads_own() {
        assert_eq!(stream(0, kind::LAUNCH), LEGACY_STREAM);
        assert_eq!(
            stream(0, kind::LAUNCH | kind::PER_THREAD),
            PER_THREAD_STREAM
        );
        assert_eq!(stream(0x5000, kind::LAUNCH), 0x5000);
        assert_eq!(stream(1, kind::PER_THREAD), LEGACY_STREAM);
    }
}
