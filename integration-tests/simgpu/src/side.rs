//! The side channel: what the simulated libraries and the tests use next to the driver's own calls.
//!
//! A real GPU is given work through memory that the driver maps into the process; a file system in user
//! space cannot do that. So `libcuda` hands its launches to the file [`CONTROL_FILE`], with the ioctls
//! below. They are no ioctls of the driver: nothing under test sees them.
//!
//! The same file takes lines of text, written by root, that change the GPU's behaviour:
//!
//! | line | effect |
//! |---|---|
//! | `capacity GPU SIZE` | the card has this much memory from now on |
//! | `fail alloc STATUS [COUNT]` | the next COUNT (1) memory allocations fail with this RM status |
//! | `delay NR MS` | the driver's escape NR (`0x2b`, or `all`) takes MS milliseconds longer; 0 ends it |
//! | `xid GPU CODE [PID]` | raises an Xid; with PID its channels stop for good |
//! | `hide GPU PID SIZE` | a process has this much memory that none of its calls asked for, until it ends |
//! | `nvml-names one` | NVML lays each 200 ms at one process, by chance in proportion to its use, as seen on an H200; `all` ends it |
//! | `reset-peak` | the peak figures of `sim-state.json` start again at what is used now |

/// File for launches and commands.
pub const CONTROL_FILE: &str = "sim-control";
/// File with the truth, see [`crate::state`].
pub const STATE_FILE: &str = "sim-state.json";
/// The same without the clients, which is all that NVML needs.
pub const GPUS_FILE: &str = "sim-gpus.json";
/// File with every change of the memory in use, one line each.
pub const EVENTS_FILE: &str = "sim-events";
/// Environment variable of the simulated libraries: the directory of the device files, `/dev` if unset.
pub const DIR_VARIABLE: &str = "SIMGPU_DIR";

const MAGIC: u8 = b'S';

const fn iowr(nr: u8, size: usize) -> u32 {
    assert!(size < 1 << 14, "the size field has 14 bits");
    #[allow(clippy::cast_possible_truncation, reason = "checked above")]
    let size = size as u32;
    (3 << 30) | (size << 16) | ((MAGIC as u32) << 8) | nr as u32
}

/// Hands in kernels. Argument: [`submit`].
pub const SUBMIT: u32 = iowr(1, submit::SIZE);
/// Waits for a kernel. Argument: [`wait`].
pub const WAIT: u32 = iowr(2, wait::SIZE);
/// Tells about managed memory. Argument: [`managed`].
pub const MANAGED: u32 = iowr(3, managed::SIZE);
/// Asks what a context costs. Argument: [`info`].
pub const INFO: u32 = iowr(4, info::SIZE);
/// Asks which open file this is; used by the server on a duplicate of a caller's fd.
pub const WHO: u32 = iowr(5, 8);

/// Length of a kernel that does nothing but mark a moment: the model remembers when it ended.
pub const MARK_NS: u64 = 1;

/// Layout of [`SUBMIT`].
pub mod submit {
    /// Bytes.
    pub const SIZE: usize = 16 + MAX * 24;
    /// Number of entries, `u32`.
    pub const COUNT: usize = 0;
    /// Client, `u32`.
    pub const CLIENT: usize = 4;
    /// Out: Xid that stopped a channel of the entries, 0 for none, `u32`.
    pub const FAULT: usize = 8;
    /// First entry.
    pub const ENTRIES: usize = 16;
    /// Bytes of an entry.
    pub const ENTRY: usize = 24;
    /// In an entry: channel handle, `u32`.
    pub const CHANNEL: usize = 0;
    /// In an entry: number of kernels, `u32`.
    pub const KERNELS: usize = 4;
    /// In an entry: nanoseconds of each, `u64`.
    pub const EACH_NS: usize = 8;
    /// In an entry, out: kernels finished on the channel so far, `u64`.
    pub const COMPLETED: usize = 16;
    /// Most entries in one call.
    pub const MAX: usize = 64;
}

/// Layout of [`WAIT`].
pub mod wait {
    /// Bytes.
    pub const SIZE: usize = 40;
    /// Client, `u32`.
    pub const CLIENT: usize = 0;
    /// Channel handle, `u32`.
    pub const CHANNEL: usize = 4;
    /// Number of the kernel to wait for, counted from 1, `u64`.
    pub const NUMBER: usize = 8;
    /// Out: kernels finished on the channel, `u64`.
    pub const COMPLETED: usize = 16;
    /// Out: Xid that stopped the channel, 0 for none, `u32`.
    pub const FAULT: usize = 24;
    /// Out: when the kernel ended, if it was a [`MARK_NS`](super::MARK_NS) kernel, `u64` nanoseconds.
    pub const FINISHED_NS: usize = 32;
    /// Longest wait in one call, milliseconds. The server holds the caller no longer than this, so that a
    /// process that is killed or frozen does not hang in the kernel; callers ask again.
    pub const MAX_MS: u64 = 20;
}

/// Layout of [`MANAGED`].
pub mod managed {
    /// Bytes.
    pub const SIZE: usize = 40;
    /// What to do, `u32`.
    pub const OP: usize = 0;
    /// Client, `u32`.
    pub const CLIENT: usize = 4;
    /// GPU's device instance, `u32`.
    pub const GPU: usize = 8;
    /// Out: RM status, `u32`.
    pub const STATUS: usize = 12;
    /// First address, `u64`.
    pub const BASE: usize = 16;
    /// Length, `u64`.
    pub const LENGTH: usize = 24;
    /// Out for [`QUERY`]: bytes that are on a GPU, `u64`.
    pub const RESIDENT: usize = 32;
    /// Makes a range. It has no memory on a GPU yet.
    pub const CREATE: u32 = 1;
    /// A kernel touches the range: all of it moves to the GPU.
    pub const TOUCH: u32 = 2;
    /// Ends a range.
    pub const DESTROY: u32 = 3;
    /// Asks how much is on a GPU.
    pub const QUERY: u32 = 4;
}

/// Layout of [`INFO`].
pub mod info {
    /// Bytes.
    pub const SIZE: usize = 24;
    /// Out: what NVML shows for a process that has a context and nothing else, `u64` bytes.
    pub const CONTEXT_OVERHEAD: usize = 0;
    /// Out: the part of it that the driver takes by itself, `u64` bytes.
    pub const CONTEXT_HIDDEN: usize = 8;
    /// Out: number of GPUs, `u32`.
    pub const GPUS: usize = 16;
}
