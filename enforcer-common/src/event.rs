//! Events that leave the kernel by the ring buffer.

/// One event. Which fields mean something depends on `kind`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// One of [`kind`].
    pub kind: u32,
    /// Tenant of the caller, or `NO_TENANT`.
    pub tenant: u32,
    /// GPU, or `NO_GPU`; in events about memory the place, see `map::PLACES`.
    pub gpu: u32,
    /// Process; for [`kind::DENIED`] the thread, which is all that a supervisor knows.
    pub tgid: u32,
    /// Client handle.
    pub client: u32,
    /// Object handle.
    pub handle: u32,
    /// Tenant whose limit refused or was exceeded, or `RESERVATIONS`.
    pub limited_by: u32,
    /// Class of the object, or control command; for a [`kind::DENIED`] of managed memory `VALIDATE_VA_RANGE`, else 0 there.
    pub class: u32,
    /// Bytes asked for or released.
    pub bytes: u64,
    /// Bytes charged to `limited_by` at that time.
    pub used: u64,
    /// The limit in question.
    pub limit: u64,
    /// cgroup id.
    pub cgroup: u64,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
}

/// Kinds of [`Event`].
pub mod kind {
    /// An allocation was refused.
    pub const DENIED: u32 = 1;
    /// An allocation went above a limit.
    pub const BREACHED: u32 = 2;
    /// Usage rose above `memory.high`.
    pub const HIGH: u32 = 3;
    /// A process made its first driver call, or was forked from one that had.
    pub const PROCESS_NEW: u32 = 4;
    /// A process is exiting.
    pub const PROCESS_EXIT: u32 = 5;
    /// A process replaced its program.
    pub const PROCESS_EXEC: u32 = 6;
    /// An object that may have others below it was freed.
    pub const SUBTREE_FREED: u32 = 7;
    /// Memory was freed by its owner while others hold it.
    pub const OWNER_FREED: u32 = 8;
    /// A cgroup was made.
    pub const CGROUP_MKDIR: u32 = 9;
    /// A cgroup was removed.
    pub const CGROUP_RMDIR: u32 = 10;
    /// A tenant issued a scheduling control.
    pub const OWN_CONTROL: u32 = 11;
    /// A subdevice, channel group or channel was made.
    pub const CHANNEL_NEW: u32 = 12;
    /// The driver had no memory left for an allocation that was within every budget.
    pub const CARD_FULL: u32 = 13;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout() {
        assert_eq!(core::mem::size_of::<Event>(), 72);
        assert_eq!(core::mem::offset_of!(Event, bytes), 32);
        assert_eq!(core::mem::offset_of!(Event, at_ns), 64);
    }
}
