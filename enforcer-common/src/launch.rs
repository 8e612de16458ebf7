//! Launch budgets: the token bucket, and what its two sides keep in maps.
//!
//! The bucket is one word, the *next free moment*: the virtual time at which the launch that comes next may
//! go. A launch takes its moment and moves the word on by one interval; a bucket that nobody used falls back
//! by its burst at most. Nothing is ever refused under contention, and no launch is counted twice, however
//! many CPUs take from the bucket at once: moments are handed out by one atomic addition.
//!
//! Who writes what: [`Limit`], [`Slot`], [`Done`] and [`Settings`] by user space only; [`Bucket`], [`Gaps`]
//! and [`Calls`] by the kernel side only.

use crate::map::{MAX_TENANTS, NO_TENANT};

/// Virtual time runs in 1/256 ns: fine enough for a million launches a second to be exact to 1/25000.
pub const TICK_SHIFT: u32 = 8;

/// Nanoseconds as virtual time. Wraps after two years of uptime, so moments are compared by [`ahead`] only.
#[inline(always)]
pub const fn ticks(nanos: u64) -> u64 {
    nanos << TICK_SHIFT
}

/// Virtual time as nanoseconds, rounded up: waiting that long is waiting long enough.
#[inline(always)]
pub const fn nanos(ticks: u64) -> u64 {
    (ticks >> TICK_SHIFT) + ((ticks & ((1 << TICK_SHIFT) - 1) != 0) as u64)
}

/// How far `moment` is ahead of `now`; zero if it has come. Both wrap.
#[inline(always)]
pub const fn ahead(moment: u64, now: u64) -> u64 {
    let distance = moment.wrapping_sub(now);
    if distance as i64 > 0 { distance } else { 0 }
}

/// A word that several CPUs change at once.
pub trait SharedWord: Copy {
    /// Its value.
    fn load(self) -> u64;
    /// Adds, and returns the value before.
    fn add(self, value: u64) -> u64;
    /// Replaces `old`; does nothing if another value is there.
    fn replace(self, old: u64, new: u64);
}

/// Takes the moment for a launch that costs `cost` from a bucket, and returns how far ahead of `now` it is.
///
/// A launch that costs more than the burst waits for a full bucket and leaves it in debt.
#[inline(always)]
pub fn take(free: impl SharedWord, now: u64, interval: u64, span: u64, cost: u64) -> u64 {
    let floor = now.wrapping_sub(span);
    let old = free.load();
    if ahead(floor, old) > 0 {
        // Another CPU that was quicker has raised it as well, or has taken from it already.
        free.replace(old, floor);
    }
    let moment = free.add(charge(interval, cost));
    let rest = charge(interval, cost.wrapping_sub(1));
    ahead(
        moment.wrapping_add(if rest < span { rest } else { span }),
        now,
    )
}

/// Virtual time that a launch takes from a bucket.
///
/// At rates below one in 17 s the nodes of a graph cost a little less than single launches do, so that no
/// graph runs the clock over.
#[inline(always)]
const fn charge(interval: u64, cost: u64) -> u64 {
    const LONGEST: u64 = 1 << 42;
    if cost > 1 && interval > LONGEST {
        LONGEST * cost
    } else {
        interval.wrapping_mul(cost)
    }
}

/// Gives a moment back that was taken for nothing.
#[inline(always)]
pub fn give_back(free: impl SharedWord, interval: u64, cost: u64) {
    free.add(charge(interval, cost).wrapping_neg());
}

/// A launch budget of a tenant, per policy bank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Virtual time that one launch takes; 0 for no limit.
    pub interval: u64,
    /// Virtual time that the burst takes, less one launch: how far the bucket falls back.
    pub span: u64,
    /// The least time to stop a process for, in nanoseconds. What it waits too long comes back as burst.
    pub hold_ns: u64,
    /// [`limit_flags`].
    pub flags: u32,
    /// Unused; zero.
    pub reserved: u32,
}

/// Flags of a [`Limit`].
pub mod limit_flags {
    /// A process over the budget is to end.
    pub const DENY: u32 = 1;
    /// A graph costs as much as it has kernel nodes.
    pub const GRAPH_NODES: u32 = 2;
}

/// Longest [`Limit::hold_ns`]: stopping and continuing a process costs some 20 µs, 500 µs make that little.
pub const LONGEST_HOLD_NS: u64 = 500_000;
/// The same for [`pace::FREEZE`], which costs more.
pub const LONGEST_FREEZE_NS: u64 = 5_000_000;

/// The bucket and the counts of a tenant. Counts include nested tenants.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// The next free moment.
    pub free: u64,
    /// Launches, a graph as one.
    pub launches: u64,
    /// Launches that had to wait.
    pub delayed: u64,
    /// Nanoseconds that they were to wait.
    pub delay_ns: u64,
    /// Launches that went early, because no delay is longer than [`Settings::max_delay_ns`].
    pub overdue: u64,
    /// Launches over a budget whose tenant is to be ended for it.
    pub denied: u64,
    /// Launches over a budget that went at once: nobody was there to continue a stopped process.
    pub unheld: u64,
    /// Launches of processes that ran although they were to be stopped.
    pub evaded: u64,
}

/// Time between the launches of a process, by tenant: element `n` counts times under 2^n ns.
pub const GAPS: usize = 40;

/// Histogram of the time between launches.
pub type Gaps = [u64; GAPS];

/// The element of [`Gaps`] for a time.
#[inline(always)]
pub const fn gap_index(nanos: u64) -> usize {
    let bits = bits(nanos);
    if bits < GAPS as u32 {
        bits as usize
    } else {
        GAPS - 1
    }
}

/// Bits that a number needs. By comparisons: the target has no instruction for it.
#[inline(always)]
const fn bits(mut number: u64) -> u32 {
    let mut bits = 0;
    let mut step = 32;
    while step > 0 {
        if number >> step != 0 {
            number >>= step;
            bits += step;
        }
        step >>= 1;
    }
    bits + (number != 0) as u32
}

/// Most processes that have launch probes at once.
pub const MAX_SLOTS: u32 = 16384;
/// "No slot".
pub const NO_SLOT: u32 = u32::MAX;

/// A process with launch probes; the probes' cookie carries the index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// The cgroup it was in when its tenant was found.
    pub cgroup: u64,
    /// When it was started, in clock ticks since boot: tells reused process ids apart.
    pub started: u64,
    /// The process, or 0 for a slot that is free.
    pub tgid: u32,
    /// The tenant that governs `cgroup`.
    pub tenant: u32,
    /// [`crate::map::Settings::cgroup_epoch`] when it was found.
    pub epoch: u32,
    /// One of [`pace`].
    pub pace: u32,
}

/// How the launches of a process are delayed.
pub mod pace {
    /// The process is stopped and continued.
    pub const SIGNAL: u32 = 0;
    /// The thread waits in the probe, if it is not for long; else as [`SIGNAL`].
    pub const SPIN: u32 = 1;
    /// The cgroups of the tenant are frozen and thawed.
    pub const FREEZE: u32 = 2;
}

/// What the kernel side knows about the process in a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Launches, a graph as one.
    pub launches: u64,
    /// Launches that had to wait.
    pub delayed: u64,
    /// Nanoseconds that they were to wait.
    pub delay_ns: u64,
    /// When it last launched, `CLOCK_MONOTONIC` nanoseconds.
    pub last_ns: u64,
    /// How often it was stopped. It is stopped by us while this differs from [`Done::continued`].
    pub stops: u64,
    /// Until when it is to be stopped, `CLOCK_MONOTONIC` nanoseconds.
    pub until_ns: u64,
    /// When it was last stopped.
    pub stopped_ns: u64,
    /// When somebody else last sent it `SIGSTOP`.
    pub foreign_stop_ns: u64,
    /// When somebody else last sent it `SIGCONT`.
    pub foreign_continue_ns: u64,
    /// When it was last sent a stop signal of job control; the signal is in the lowest byte.
    pub job_control_ns: u64,
    /// When it was told to end, or 0.
    pub told_ns: u64,
    /// Index of the symbol through which it was last delayed.
    pub symbol: u64,
    /// 1 if its last launch was delayed.
    pub last_delayed: u64,
    /// Launches that came after one that was not delayed: how fast it would go.
    pub thinks: u64,
    /// Nanoseconds between them and those before.
    pub think_ns: u64,
}

impl Calls {
    /// Whether somebody else has stopped the process and not continued it since.
    #[inline(always)]
    pub const fn stopped_by_others(&self) -> bool {
        self.foreign_stop_ns > self.foreign_continue_ns
    }
}

/// What user space has done about the process in a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The value of [`Calls::stops`] up to which it was continued.
    pub continued: u64,
}

/// The controller's word to the programs; one entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// When the controller last showed that it lives, `CLOCK_MONOTONIC` nanoseconds; 0: nobody is stopped.
    pub heartbeat_ns: u64,
    /// The longest delay.
    pub max_delay_ns: u64,
    /// The longest delay that a thread spins through with [`pace::SPIN`].
    pub spin_max_ns: u64,
    /// Process that continues others besides the daemon: its guard, or whoever releases what a daemon left.
    pub helper_tgid: u32,
    /// Unused; zero.
    pub reserved: u32,
}

/// Heartbeats older than this mean that no controller is there: nobody is stopped any more.
pub const HEARTBEAT_STALE_NS: u64 = 500_000_000;

/// Shorter delays than this are spun through whatever the pace: stopping and continuing takes as long.
pub const SPIN_ANYWAY_NS: u64 = 50_000;

/// The longest that a launch spins when its process cannot be stopped: one that runs under a debugger, or
/// that somebody keeps continuing.
pub const LAST_RESORT_NS: u64 = 10_000_000;

/// A process that runs this long after it was stopped was continued by somebody else.
pub const STOP_TAKES_NS: u64 = 300_000;

/// Something that the controller has to see to. Leaves by a ring buffer of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notice {
    /// One of [`notice`].
    pub kind: u32,
    /// Slot of the process.
    pub slot: u32,
    /// The process.
    pub tgid: u32,
    /// Its tenant.
    pub tenant: u32,
    /// The tenant whose budget delays it.
    pub limited_by: u32,
    /// Index of the symbol.
    pub symbol: u32,
    /// [`Calls::stops`] with this stop.
    pub stop: u64,
    /// Until when, `CLOCK_MONOTONIC` nanoseconds.
    pub until_ns: u64,
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
}

/// Kinds of [`Notice`].
pub mod notice {
    /// The process was stopped and is to be continued.
    pub const STOPPED: u32 = 1;
    /// The tenant is to be frozen.
    pub const FREEZE: u32 = 2;
    /// The process was told to end.
    pub const TOLD: u32 = 3;
}

/// Cookie of a probe: slot and symbol.
#[inline(always)]
pub const fn cookie(slot: u32, symbol: u32) -> u64 {
    slot as u64 | (symbol as u64) << 32
}

/// In the symbol of a [`cookie`]: what is launched is a graph, named by the first argument.
pub const GRAPH: u32 = 1 << 16;

/// What a call says about the kernel nodes of a graph; in the place of the symbol in a [`cookie`].
pub mod graph_call {
    /// `(CUgraphNode *out, CUgraph graph, …)`: one node more.
    pub const ADD: u32 = 1;
    /// `(CUgraphNode *out, CUgraph graph, dependencies, count, CUgraph child)`: the nodes of another graph more.
    pub const ADD_CHILD: u32 = 2;
    /// `(CUstream stream, …)`: launches become nodes from now on.
    pub const BEGIN_CAPTURE: u32 = 3;
    /// `(CUstream stream, CUgraph *out)`: the graph that they became.
    pub const END_CAPTURE: u32 = 4;
    /// `(OUT *out, CUgraph graph, …)`: another handle for the same nodes.
    pub const COPY: u32 = 5;
}

/// A graph call between entry and return, by thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Making {
    /// Where the new handle will be written.
    pub out: u64,
    /// Kernel nodes of what it stands for.
    pub nodes: u64,
}

/// Graphs whose kernel nodes are known.
pub const MAX_GRAPHS: u32 = 65536;
/// A graph counts as this many launches at most.
pub const MAX_GRAPH_COST: u64 = 1 << 20;

/// Key of a graph: handles are addresses in a process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// The handle.
    pub handle: u64,
    /// The process.
    pub tgid: u64,
}

/// Operations of the program `launch_op`, run as those of [`crate::op`].
pub mod op {
    /// Fill a bucket, after its limit changed: `[RESET, tenant, span]`.
    pub const RESET: u64 = 1;
}

/// Whether a tenant index can be used.
#[inline(always)]
pub const fn is_tenant(tenant: u32) -> bool {
    tenant != NO_TENANT && tenant < MAX_TENANTS
}

#[cfg(feature = "user")]
mod pod {
    use super::{Bucket, Calls, Done, GraphKey, Limit, Settings, Slot};

    macro_rules! pod {
        ($($t:ty),*) => {$(
            // SAFETY: repr(C), only integers, no padding (see the layout tests).
            unsafe impl aya::Pod for $t {}
        )*};
    }
    pod!(Bucket, Calls, Done, GraphKey, Limit, Settings, Slot);
}

#[cfg(test)]
mod tests {
    use core::{cell::Cell, mem::size_of};

    use super::*;

    impl SharedWord for &Cell<u64> {
        fn load(self) -> u64 {
            self.get()
        }
        fn add(self, value: u64) -> u64 {
            self.replace(self.get().wrapping_add(value))
        }
        fn replace(self, old: u64, new: u64) {
            if self.get() == old {
                self.set(new);
            }
        }
    }

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<Limit>(), 32);
        assert_eq!(size_of::<Bucket>(), 64);
        assert_eq!(size_of::<Slot>(), 32);
        assert_eq!(size_of::<Calls>(), 120);
        assert_eq!(size_of::<Done>(), 8);
        assert_eq!(size_of::<Settings>(), 32);
        assert_eq!(size_of::<Notice>(), 48);
        assert_eq!(size_of::<GraphKey>(), 16);
        assert_eq!(size_of::<Making>(), 16);
        assert_eq!(core::mem::offset_of!(Calls, stops), 32);
        assert_eq!(core::mem::offset_of!(Notice, until_ns), 32);
    }

    #[test]
    fn a_burst_goes_at_once_and_the_rest_at_the_rate() {
        let free = Cell::new(0);
        let (interval, burst) = (ticks(1000), 3);
        let now = ticks(1_000_000);
        let waits = [(); 5].map(|()| nanos(take(&free, now, interval, interval * (burst - 1), 1)));
        assert_eq!(waits, [0, 0, 0, 1000, 2000]);
    }

    #[test]
    fn what_costs_more_waits_for_more() {
        let interval = ticks(10);
        let span = interval * 9;
        let now = ticks(5000);
        let free = Cell::new(now);
        // An empty bucket: eleven launches later it holds eleven; here it has none.
        assert_eq!(nanos(take(&free, now, interval, span, 5)), 40);
        assert_eq!(nanos(take(&free, now, interval, span, 1)), 50);
        // More than the burst: a full bucket is enough, and the debt is kept.
        let free = Cell::new(0);
        assert_eq!(take(&free, now, interval, span, 1000), 0);
        assert_eq!(nanos(take(&free, now, interval, span, 1)), 1000 * 10 - 90);
    }

    #[test]
    fn moments_survive_the_wrap() {
        let interval = ticks(1000);
        let now = u64::MAX - 10;
        let free = Cell::new(now.wrapping_sub(ticks(50)));
        assert_eq!(take(&free, now, interval, interval, 1), 0);
        assert_eq!(nanos(take(&free, now, interval, interval, 1)), 950);
        assert_eq!(ahead(5, u64::MAX), 6);
        assert_eq!(ahead(u64::MAX, 5), 0);
    }

    #[test]
    fn gaps_by_powers_of_two() {
        assert_eq!(
            [0, 1, 2, 3, 4, 1023, 1024].map(gap_index),
            [0, 1, 2, 2, 3, 10, 11]
        );
        assert_eq!(gap_index(u64::MAX), GAPS - 1);
    }

    #[test]
    fn nanoseconds_are_rounded_up() {
        assert_eq!(nanos(ticks(7)), 7);
        assert_eq!(nanos(ticks(7) + 1), 8);
    }
}
