//! What the probes of the leak finder and user space have to agree on.
//!
//! Nothing here is pinned: programs, maps and links live as long as somebody looks, and end with the daemon.

/// What a probed call does: the lower half of its probe's cookie.
pub mod call {
    /// Memory of the GPU: its address goes to where the first argument points, the second is its size.
    pub const ALLOC: u32 = 1;
    /// As [`ALLOC`], of rows: the second argument points to where the length of a row goes, the fourth is their number.
    pub const ALLOC_PITCH: u32 = 2;
    /// The first argument is an address that is given back.
    pub const FREE: u32 = 3;
    /// Memory without an address: its handle goes to where the first argument points, the second is its size.
    pub const CREATE: u32 = 4;
    /// One reference less to the handle in the first argument.
    pub const RELEASE: u32 = 5;
    /// One reference more; the handle goes to where the first argument points.
    pub const RETAIN: u32 = 6;
    /// The handle in the fourth argument is mapped at the address in the first, for as many bytes as the second says.
    pub const MAP: u32 = 7;
    /// What is mapped at the address in the first argument, for as many bytes as the second says, is not any more.
    pub const UNMAP: u32 = 8;
    /// Pinned host memory, as [`ALLOC`].
    pub const HOST_ALLOC: u32 = 9;
    /// Pinned host memory is given back, as [`FREE`].
    pub const HOST_FREE: u32 = 10;
    /// Host memory at the address in the first argument is pinned, the second is its size.
    pub const REGISTER: u32 = 11;
    /// Host memory at the address in the first argument is pinned no longer.
    pub const UNREGISTER: u32 = 12;
    /// A context ends, with all that was allocated in it.
    pub const CONTEXT_END: u32 = 13;

    /// Whether the call's first argument points to where its result goes.
    #[inline(always)]
    pub const fn has_result(call: u32) -> bool {
        matches!(call, ALLOC | ALLOC_PITCH | CREATE | RETAIN | HOST_ALLOC)
    }

    /// Whether the call obtains something that can leak, so that its caller is of interest.
    #[inline(always)]
    pub const fn obtains(call: u32) -> bool {
        matches!(call, ALLOC | ALLOC_PITCH | CREATE | HOST_ALLOC | REGISTER)
    }
}

/// The cookie of a probe: what the call does, and which one it is in the list of user space.
pub const fn cookie(call: u32, index: u32) -> u64 {
    (call as u64) | ((index as u64) << 32)
}

/// Bytes of a caller's stack that travel with an allocation, at most.
pub const STACK_BYTES: usize = 16 << 10;
/// A stack is copied in pieces of this size; where it ends in the middle of one, the rest is left out.
pub const STACK_PIECE: usize = 1 << 10;

/// A call that has returned with success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Header {
    /// See [`call`].
    pub call: u32,
    /// Which call by name, by its place in the list of user space.
    pub index: u32,
    /// Process.
    pub tgid: u32,
    /// Thread.
    pub tid: u32,
    /// When it was called, `CLOCK_MONOTONIC` nanoseconds.
    pub entered_ns: u64,
    /// When it returned.
    pub returned_ns: u64,
    /// Address or handle that it is about.
    pub address: u64,
    /// Bytes, where it says how many.
    pub bytes: u64,
    /// The fourth argument.
    pub fourth: u64,
    /// Where it returned to.
    pub pc: u64,
    /// The stack pointer after its return.
    pub sp: u64,
    /// The frame pointer.
    pub fp: u64,
    /// Bytes of the stack that follow.
    pub stack_len: u64,
}

/// A call with the stack of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sample {
    /// The call.
    pub header: Header,
    /// The caller's stack from [`Header::sp`] on, as far as [`Header::stack_len`].
    pub stack: [u8; STACK_BYTES],
}

/// A call between its entry and its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Entered {
    /// When it was called.
    pub at_ns: u64,
    /// Stack pointer at its entry.
    pub sp: u64,
    /// First, second and fourth argument.
    pub arguments: [u64; 3],
}

/// Places in the array of counters.
pub mod counter {
    /// Events for which there was no room in the ring.
    pub const LOST: u32 = 0;
    /// Calls for which there was no room between entry and return.
    pub const CROWDED: u32 = 1;
    /// Results that could not be read from the process.
    pub const UNREADABLE: u32 = 2;
    /// How many there are.
    pub const COUNT: u32 = 3;
}

/// Calls between entry and return, at most: one for each thread that is in one.
pub const MAX_ENTERED: u32 = 16384;

#[cfg(test)]
mod tests {
    use core::mem::{align_of, offset_of, size_of};

    use super::*;

    #[test]
    fn both_sides_see_the_same_layout() {
        assert_eq!((size_of::<Header>(), align_of::<Header>()), (88, 8));
        assert_eq!(offset_of!(Header, entered_ns), 16);
        assert_eq!(offset_of!(Header, stack_len), 80);
        assert_eq!(size_of::<Sample>(), 88 + STACK_BYTES);
        assert_eq!(offset_of!(Sample, stack), 88);
        assert_eq!(size_of::<Entered>(), 40);
        assert_eq!(STACK_BYTES % STACK_PIECE, 0);
    }

    #[test]
    fn a_cookie_is_both_halves() {
        assert_eq!(cookie(call::FREE, 7), 0x7_0000_0003);
    }
}
