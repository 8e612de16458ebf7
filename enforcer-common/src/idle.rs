//! What the programs that follow threads while a GPU is idle and user space have to agree on.
//!
//! Nothing here is pinned: programs, maps and links live as long as somebody looks, and end with the daemon.

/// What became of a thread: [`Moment::what`].
pub mod what {
    /// It runs on a CPU from now on.
    pub const RUNS: u32 = 0;
    /// It is off its CPU and could run: it was preempted, or made way.
    pub const QUEUED: u32 = 1;
    /// It sleeps until something happens or a signal comes.
    pub const SLEEPS: u32 = 2;
    /// It sleeps until something happens, whatever signals come: the kernel's way to wait for devices.
    pub const WAITS: u32 = 3;
    /// A signal or a tracer has stopped it.
    pub const STOPPED: u32 = 4;
    /// Its cgroup is frozen.
    pub const FROZEN: u32 = 5;
    /// It has ended.
    pub const ENDED: u32 = 6;
    /// Not a change: it was found running.
    pub const SAMPLE: u32 = 7;
}

/// Bytes of a thread's stack that are copied, at most.
pub const STACK_BYTES: usize = 16 << 10;
/// A stack is copied in pieces of this size; where it ends in the middle of one, the rest is left out.
pub const STACK_PIECE: usize = 1 << 10;

/// A thread goes on or off its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Moment {
    /// When, `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// Process.
    pub tgid: u32,
    /// Thread.
    pub tid: u32,
    /// See [`what`].
    pub what: u32,
    /// Number of the system call that it is in; meaningless outside of one.
    pub syscall: u32,
    /// For how many of its kind the stack that follows stands; 0 if none follows.
    pub stands_for: u64,
    /// Where it is in its own code.
    pub pc: u64,
    /// Its stack pointer.
    pub sp: u64,
    /// Its frame pointer.
    pub fp: u64,
    /// Bytes of the stack that follow.
    pub stack_len: u64,
}

/// The same with the thread's stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct WithStack {
    /// What happened.
    pub moment: Moment,
    /// The stack from [`Moment::sp`] on, as far as [`Moment::stack_len`].
    pub stack: [u8; STACK_BYTES],
}

/// How often a thread goes off its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Pace {
    /// When it last did, `CLOCK_MONOTONIC` nanoseconds.
    pub last_ns: u64,
    /// Mean time between two of them, nanoseconds; the last ones count most.
    pub mean_ns: u64,
}

/// A thread that goes off its CPU more often than this has only some of its stacks copied.
pub const STACK_EVERY_NS: u64 = 5_000_000;
/// The longest span that goes into [`Pace::mean_ns`].
pub const LONGEST_PACE_NS: u64 = 1 << 30;

impl Pace {
    /// A thread of which nothing is known yet.
    #[inline(always)]
    pub const fn begin(now_ns: u64) -> Self {
        Self {
            last_ns: now_ns,
            mean_ns: STACK_EVERY_NS,
        }
    }

    /// It goes off its CPU. Of a span in which its process was not followed, which it is since `followed_ns`, nothing is known:
    /// a thread that blocks often does so as often after that.
    #[inline(always)]
    #[must_use]
    pub const fn next(self, now_ns: u64, followed_ns: u64) -> Self {
        if self.last_ns < followed_ns {
            return Self {
                last_ns: now_ns,
                ..self
            };
        }
        let span = now_ns.saturating_sub(self.last_ns);
        let span = if span < LONGEST_PACE_NS {
            span
        } else {
            LONGEST_PACE_NS
        };
        Self {
            last_ns: now_ns,
            mean_ns: self.mean_ns - self.mean_ns / 8 + span / 8,
        }
    }

    /// One stack of how many is copied.
    #[inline(always)]
    pub const fn one_of(self) -> u64 {
        if self.mean_ns >= STACK_EVERY_NS {
            return 1;
        }
        STACK_EVERY_NS / (self.mean_ns + 1) + 1
    }
}

/// Places in the array of counters.
pub mod counter {
    /// Moments for which there was no room in the ring.
    pub const LOST: u32 = 0;
    /// Stacks for which there was no room; the moment itself was told.
    pub const STACKLESS: u32 = 1;
    /// How many there are.
    pub const COUNT: u32 = 2;
}

/// Processes that are followed at once.
pub const MAX_CHOSEN: u32 = 1024;
/// Threads whose pace is known.
pub const MAX_PACES: u32 = 16384;

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `#[repr(C)]`, integers only and without padding.
    unsafe impl aya::Pod for super::Pace {}
}

#[cfg(test)]
mod tests {
    use core::mem::{align_of, offset_of, size_of};

    use super::*;

    #[test]
    fn both_sides_see_the_same_layout() {
        assert_eq!((size_of::<Moment>(), align_of::<Moment>()), (64, 8));
        assert_eq!(offset_of!(Moment, what), 16);
        assert_eq!(offset_of!(Moment, stands_for), 24);
        assert_eq!(offset_of!(Moment, stack_len), 56);
        assert_eq!(size_of::<WithStack>(), 64 + STACK_BYTES);
        assert_eq!(offset_of!(WithStack, stack), 64);
        assert_eq!((size_of::<Pace>(), align_of::<Pace>()), (16, 8));
        assert_eq!(STACK_BYTES % STACK_PIECE, 0);
    }

    #[test]
    fn stacks_of_a_busy_thread_are_copied_every_few_milliseconds() {
        let (mut pace, mut now) = (Pace::begin(0), 0);
        assert_eq!(pace.one_of(), 1, "the first is copied");
        for _ in 0..100 {
            now += 50_000;
            pace = pace.next(now, 0);
        }
        assert!((95..=105).contains(&pace.one_of()), "{pace:?}");
        for _ in 0..100 {
            now += 20_000_000;
            pace = pace.next(now, 0);
        }
        assert_eq!(pace.one_of(), 1, "{pace:?}");
        // Having been out of sight is no reason to copy every stack.
        let mut busy = Pace::begin(0);
        for at in 1..200 {
            busy = busy.next(at * 50_000, 0);
        }
        assert!(busy.next(1 << 40, 1 << 39).one_of() >= 3, "{busy:?}");
        // A clock that stands still and one that jumps are both possible.
        assert!(pace.next(0, 0).next(u64::MAX, 0).mean_ns < u64::MAX / 4);
    }
}
