//! The truth that the server tells in `sim-state.json`.
//!
//! Tests compare what the enforcer believes with this; the simulated NVML answers from it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Driver version that the simulated libraries report.
    pub driver_version: String,
    /// Nanoseconds since the server began; the clock of all times below.
    pub now_ns: u64,
    /// Microseconds since 1970 at the same moment, the clock of NVML's samples.
    pub unix_us: u64,
    /// The cards.
    pub gpus: Vec<GpuState>,
    /// NVML lays each of its spans at one process.
    #[serde(default)]
    pub names_one: bool,
    /// The RM clients.
    pub clients: Vec<ClientState>,
    /// Open device files.
    pub files: u64,
    /// Calls answered, by file name and number.
    pub calls: BTreeMap<String, u64>,
}

/// A card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuState {
    /// Index, also its minor number and device instance.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Marketing name.
    pub name: String,
    /// RM's id.
    pub gpu_id: u32,
    /// PCI bus number; domain, slot and function are 0.
    pub pci_bus: u8,
    /// Bytes on the card.
    pub capacity: u64,
    /// Bytes taken.
    pub used: u64,
    /// Most bytes taken at once since the start or the last `reset-peak`.
    pub peak: u64,
    /// Bytes granted since the start, whatever was freed since.
    pub granted: u64,
    /// Memory allocations granted.
    pub allocations: u64,
    /// Memory allocations refused for want of memory.
    pub refused: u64,
    /// Switches between channel groups, and the time they took.
    pub switches: u64,
    /// Nanoseconds that the switches took.
    pub switching_ns: u64,
    /// Processes that hold or held something, by pid.
    pub processes: BTreeMap<u32, ProcessState>,
    /// History of use in spans of [`crate::scheduler::BUCKET_NS`].
    pub history: Vec<SpanState>,
    /// Xids raised, oldest first.
    pub xids: Vec<XidState>,
}

/// A process on a card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessState {
    /// Bytes of RM memory objects.
    pub rm_bytes: u64,
    /// Bytes that the driver took for its contexts by itself.
    pub hidden_bytes: u64,
    /// Bytes of managed memory on the card.
    pub managed_bytes: u64,
    /// Whether it has a channel group.
    pub has_context: bool,
    /// Nanoseconds of engine time since the start.
    pub busy_ns: u64,
}

impl ProcessState {
    /// What NVML shows. Managed memory is in the card's figure and in no process's (measured on 580.159.04).
    pub fn bytes(&self) -> u64 {
        self.rm_bytes + self.hidden_bytes
    }
}

/// One span of the history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanState {
    /// End of the span, nanoseconds since the server began.
    pub end_ns: u64,
    /// Engine time by process, nanoseconds.
    pub busy: BTreeMap<u32, u64>,
}

/// An Xid.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct XidState {
    /// When, nanoseconds since the server began.
    pub at_ns: u64,
    /// The code.
    pub code: u32,
    /// Whose channels it stopped.
    pub pid: Option<u32>,
}

/// An RM client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientState {
    /// Handle.
    pub handle: u32,
    /// Process that made it.
    pub pid: u32,
    /// Number of objects.
    pub objects: u64,
    /// Its memory on the cards.
    pub memory: Vec<MemoryState>,
    /// Its channel groups.
    pub groups: Vec<GroupState>,
}

/// A memory object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryState {
    /// Handle.
    pub handle: u32,
    /// Class.
    pub class: u32,
    /// Which card.
    pub gpu: u32,
    /// Bytes.
    pub bytes: u64,
}

/// A channel group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Handle.
    pub handle: u32,
    /// Which card.
    pub gpu: u32,
    /// Time slice, microseconds.
    pub slice_us: u64,
    /// Interleave level.
    pub interleave: u32,
    /// Channels with their state.
    pub channels: Vec<ChannelState>,
}

/// A channel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChannelState {
    /// Handle.
    pub handle: u32,
    /// Whether it is disabled.
    pub disabled: bool,
    /// Kernels handed in.
    pub submitted: u64,
    /// Kernels finished.
    pub completed: u64,
}

impl State {
    /// Bytes that a process holds on a card, by NVML's measure.
    pub fn bytes_of(&self, gpu: usize, pid: u32) -> u64 {
        self.gpus
            .get(gpu)
            .and_then(|gpu| gpu.processes.get(&pid))
            .map_or(0, ProcessState::bytes)
    }

    /// Bytes taken on all cards.
    pub fn used(&self) -> u64 {
        self.gpus.iter().map(|gpu| gpu.used).sum()
    }
}
