//! The part of the NVIDIA driver's ioctl ABI that gpuquota reads.
//!
//! Every number was read in the headers of NVIDIA's open kernel modules and is unchanged from
//! 535.43.02 to 595.45.04 unless a comment says otherwise. Handles are `u32`, pointers are `u64`
//! also for 32-bit callers, and every structure has the same layout for both.
//!
//! The driver looks only at the number and the size of a command: the type byte and the direction
//! bits are ignored (`nvidia_ioctl`). So does everything here; see [`IoctlCmd`].

/// An ioctl command as the driver sees it: number and size, nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoctlCmd {
    /// `_IOC_NR`: which escape.
    pub nr: u8,
    /// `_IOC_SIZE`: bytes of the argument structure. It also selects the layout.
    pub size: u16,
}

impl IoctlCmd {
    /// Takes number and size out of a raw command.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        Self {
            nr: (raw & 0xff) as u8,
            size: ((raw >> 16) & 0x3fff) as u16,
        }
    }

    /// The raw command as libcuda writes it: `_IOWR('F', nr, size)`.
    #[inline(always)]
    pub const fn to_raw(self) -> u32 {
        (3 << 30) | ((self.size as u32) << 16) | (0x46 << 8) | self.nr as u32
    }
}

/// Escape numbers (`nv_escape.h`, `nv-ioctl-numbers.h`).
pub mod nr {
    /// Legacy memory allocation, on a GPU node; see [`nvos02`](super::nvos02).
    pub const RM_ALLOC_MEMORY: u8 = 0x27;
    /// Allocates an object that takes no parameters; 20 bytes, status at 16.
    pub const RM_ALLOC_OBJECT: u8 = 0x28;
    /// Frees an object and all below it.
    pub const RM_FREE: u8 = 0x29;
    /// A control call on an object.
    pub const RM_CONTROL: u8 = 0x2a;
    /// Allocates an object; the size selects NVOS21 or NVOS64.
    pub const RM_ALLOC: u8 = 0x2b;
    /// Gives a second handle, maybe in another client, to an object.
    pub const RM_DUP_OBJECT: u8 = 0x34;
    /// Lets other clients duplicate an object; 24 bytes, status at 20.
    pub const RM_SHARE: u8 = 0x35;
    /// Waits until channels are idle; 56 bytes, status at 48.
    pub const RM_IDLE_CHANNELS: u8 = 0x41;
    /// The older allocator of video memory, many functions behind one number.
    pub const RM_VID_HEAP_CONTROL: u8 = 0x4a;
    /// Maps memory for the CPU.
    pub const RM_MAP_MEMORY: u8 = 0x4e;
    /// Undoes [`RM_MAP_MEMORY`].
    pub const RM_UNMAP_MEMORY: u8 = 0x4f;
    /// Allocates a DMA context; 56 bytes, status at 48.
    pub const RM_ALLOC_CONTEXT_DMA2: u8 = 0x54;
    /// Maps memory for the GPU; 64 bytes from 580.65.06 on, status at 56.
    pub const RM_MAP_MEMORY_DMA: u8 = 0x57;
    /// Undoes [`RM_MAP_MEMORY_DMA`]; 48 bytes from 550.40.07 on, status at 40.
    pub const RM_UNMAP_MEMORY_DMA: u8 = 0x58;
    /// Binds a DMA context to a channel; 16 bytes, status at 12.
    pub const RM_BIND_CONTEXT_DMA: u8 = 0x59;
    /// Tells the driver where a mapping went.
    pub const RM_UPDATE_DEVICE_MAPPING_INFO: u8 = 0x5e;
    /// Lists the cards.
    pub const CARD_INFO: u8 = 200;
    /// Ties a GPU node's fd to a control fd, which it keeps alive.
    pub const REGISTER_FD: u8 = 201;
    /// Allocates an event tied to an fd.
    pub const ALLOC_OS_EVENT: u8 = 206;
    /// Frees what [`ALLOC_OS_EVENT`] made.
    pub const FREE_OS_EVENT: u8 = 207;
    /// Reads a status code of a card.
    pub const STATUS_CODE: u8 = 209;
    /// Compares the version of user space with the driver's.
    pub const CHECK_VERSION_STR: u8 = 210;
    /// Carries any other escape by pointer.
    pub const IOCTL_XFER_CMD: u8 = 211;
    /// Opens GPUs through a control fd; an array of `u32` gpuIds.
    pub const ATTACH_GPUS_TO_FD: u8 = 212;
    /// Interrupt state of a card.
    pub const QUERY_DEVICE_INTR: u8 = 213;
    /// System parameters; first call of every client.
    pub const SYS_PARAMS: u8 = 214;
    /// NUMA state of a card.
    pub const NUMA_INFO: u8 = 215;
    /// Waits for a deferred open; 8 bytes; 550 and later.
    pub const WAIT_OPEN_COMPLETE: u8 = 218;
}

/// Object classes (`cl*.h`, `resource_list.h`).
pub mod class {
    /// Client, as some callers write it.
    pub const NV01_ROOT: u32 = 0x0;
    /// Client without privileges.
    pub const NV01_ROOT_NON_PRIV: u32 = 0x1;
    /// Client; what the driver makes of the two above for user space.
    pub const NV01_ROOT_CLIENT: u32 = 0x41;
    /// A GPU as seen by a client.
    pub const NV01_DEVICE_0: u32 = 0x80;
    /// One physical GPU of a device.
    pub const NV20_SUBDEVICE_0: u32 = 0x2080;
    /// Pinned host memory allocated by the driver.
    pub const NV01_MEMORY_SYSTEM: u32 = 0x3e;
    /// Video memory: the class behind every `cuMemAlloc`.
    pub const NV01_MEMORY_LOCAL_USER: u32 = 0x40;
    /// An alias of all memory of the card, which takes none.
    pub const NV01_MEMORY_LOCAL_PHYSICAL: u32 = 0xc2;
    /// Extended GPU memory (host memory on coherent systems); 550 and later.
    pub const NV_MEMORY_EXTENDED_USER: u32 = 0x42;
    /// An address range without memory.
    pub const NV01_MEMORY_VIRTUAL: u32 = 0x70;
    /// User pages pinned for the GPU.
    pub const NV01_MEMORY_SYSTEM_OS_DESCRIPTOR: u32 = 0x71;
    /// An address range; uses the memory parameters but takes no memory.
    pub const NV50_MEMORY_VIRTUAL: u32 = 0x50a0;
    /// A channel group: what the scheduler gives time slices to.
    pub const KEPLER_CHANNEL_GROUP_A: u32 = 0xa06c;
    /// A channel on Turing.
    pub const TURING_CHANNEL_GPFIFO_A: u32 = 0xc46f;
    /// A channel on Ampere and Ada.
    pub const AMPERE_CHANNEL_GPFIFO_A: u32 = 0xc56f;
    /// A channel on Hopper.
    pub const HOPPER_CHANNEL_GPFIFO_A: u32 = 0xc86f;
    /// A channel on Blackwell (data centre).
    pub const BLACKWELL_CHANNEL_GPFIFO_A: u32 = 0xc96f;
    /// A channel on Blackwell (other).
    pub const BLACKWELL_CHANNEL_GPFIFO_B: u32 = 0xca6f;

    /// Whether `class` is memory of the host that is pinned for the GPU.
    #[inline(always)]
    pub const fn is_host_memory(class: u32) -> bool {
        matches!(
            class,
            NV01_MEMORY_SYSTEM | NV_MEMORY_EXTENDED_USER | NV01_MEMORY_SYSTEM_OS_DESCRIPTOR
        )
    }

    /// Whether `class` makes a client.
    #[inline(always)]
    pub const fn is_client(class: u32) -> bool {
        matches!(class, NV01_ROOT | NV01_ROOT_NON_PRIV | NV01_ROOT_CLIENT)
    }

    /// Whether `class` makes a channel on any supported architecture.
    #[inline(always)]
    pub const fn is_channel(class: u32) -> bool {
        matches!(
            class,
            TURING_CHANNEL_GPFIFO_A
                | AMPERE_CHANNEL_GPFIFO_A
                | HOPPER_CHANNEL_GPFIFO_A
                | BLACKWELL_CHANNEL_GPFIFO_A
                | BLACKWELL_CHANNEL_GPFIFO_B
        )
    }
}

/// RM status codes (`nvstatuscodes.h`).
pub mod status {
    /// Done.
    pub const OK: u32 = 0;
    /// libcuda waits about 250 ms and asks again, for ever.
    pub const BUSY_RETRY: u32 = 0x03;
    /// UVM before its initialisation.
    pub const ILLEGAL_ACTION: u32 = 0x16;
    /// The handle or the object is in use.
    pub const STATE_IN_USE: u32 = 0x63;
    /// An argument is not acceptable.
    pub const INVALID_ARGUMENT: u32 = 0x1f;
    /// No such class.
    pub const INVALID_CLASS: u32 = 0x22;
    /// The client does not exist, or belongs to another file.
    pub const INVALID_CLIENT: u32 = 0x23;
    /// The caller may not do this.
    pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
    /// The new handle is taken.
    pub const INSERT_DUPLICATE_NAME: u32 = 0x19;
    /// There is one already, or there are no more.
    pub const INSUFFICIENT_RESOURCES: u32 = 0x1a;
    /// No such channel.
    pub const INVALID_CHANNEL: u32 = 0x21;
    /// No such GPU among those that a file knows.
    pub const INVALID_DEVICE: u32 = 0x26;
    /// No client with that handle, when objects are made or freed.
    pub const INVALID_OBJECT_HANDLE: u32 = 0x33;
    /// An object of this class cannot be below that parent.
    pub const INVALID_OBJECT_PARENT: u32 = 0x36;
    /// The owner of a heap allocation is missing.
    pub const INVALID_OWNER: u32 = 0x39;
    /// Parameters that make no sense together.
    pub const INVALID_PARAM_STRUCT: u32 = 0x3a;
    /// A pointer of the caller does not lead to memory.
    pub const INVALID_ADDRESS: u32 = 0x1e;
    /// The state does not allow it.
    pub const INVALID_STATE: u32 = 0x40;
    /// Out of memory: what libcuda turns into `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const NO_MEMORY: u32 = 0x51;
    /// Not on this GPU or driver.
    pub const NOT_SUPPORTED: u32 = 0x56;
    /// No object with that handle.
    pub const OBJECT_NOT_FOUND: u32 = 0x57;
}

/// Control commands that gpuquota issues or watches (`ctrl*.h`).
pub mod ctrl {
    /// Client: device instance and ids of a GPU by its `gpuId`; 32 bytes.
    pub const GPU_GET_ID_INFO_V2: u32 = 0x205;
    /// Client: ids of the attached GPUs; `u32[32]`.
    pub const GPU_GET_ATTACHED_IDS: u32 = 0x201;
    /// Client: ids of the probed GPUs; `u32[32]` and `u32[32]`.
    pub const GPU_GET_PROBED_IDS: u32 = 0x214;
    /// Client: attaches GPUs; 132 bytes.
    pub const GPU_ATTACH_IDS: u32 = 0x215;
    /// Client: class and parent of a handle.
    pub const CLIENT_GET_HANDLE_INFO: u32 = 0xd02;
    /// Channel group: reads the interleave level.
    pub const TSG_GET_INTERLEAVE_LEVEL: u32 = 0xa06c_0108;
    /// Channel group: sets the time slice; `u64` microseconds.
    pub const TSG_SET_TIMESLICE: u32 = 0xa06c_0103;
    /// Channel group: reads the time slice.
    pub const TSG_GET_TIMESLICE: u32 = 0xa06c_0104;
    /// Channel group: starts or stops scheduling.
    pub const TSG_GPFIFO_SCHEDULE: u32 = 0xa06c_0101;
    /// Channel group: preempts what runs.
    pub const TSG_PREEMPT: u32 = 0xa06c_0105;
    /// Channel group: interleave level.
    pub const TSG_SET_INTERLEAVE_LEVEL: u32 = 0xa06c_0107;
    /// Subdevice: disables or enables channels; 536 bytes.
    pub const FIFO_DISABLE_CHANNELS: u32 = 0x2080_110b;
    /// Subdevice: memory totals and free; list of (index, data).
    pub const FB_GET_INFO_V2: u32 = 0x2080_1303;
    /// Memory object: size and placement; list of (index, data) by pointer.
    pub const MEMORY_GET_SURFACE_INFO: u32 = 0x41_0110;
    /// Subdevice: UUID; see [`gid_info`](super::gid_info).
    pub const GPU_GET_GID_INFO: u32 = 0x2080_014a;
    /// Subdevice: marketing name; `u32` flags, then 64 bytes of text.
    pub const GPU_GET_NAME_STRING: u32 = 0x2080_0110;
    /// P2P object: registers video memory.
    pub const P2P_REGISTER_VIDMEM: u32 = 0x503c_0104;
    /// P2P object: unregisters it.
    pub const P2P_UNREGISTER_VIDMEM: u32 = 0x503c_0105;

    /// Whether a tenant that issues `cmd` changes its own share of GPU time.
    #[inline(always)]
    pub const fn changes_scheduling(cmd: u32) -> bool {
        matches!(
            cmd,
            TSG_SET_TIMESLICE
                | TSG_GPFIFO_SCHEDULE
                | TSG_SET_INTERLEAVE_LEVEL
                | FIFO_DISABLE_CHANNELS
        )
    }
}

/// Bit 0 of `NVOS64.flags`: the parameters are serialised (FINN), offsets below do not hold.
pub const NVOS64_FLAGS_FINN: u32 = 1;

/// NVOS00, `RM_FREE`.
pub mod nvos00 {
    /// Bytes.
    pub const SIZE: u16 = 16;
    /// Client.
    pub const ROOT: usize = 0;
    /// Parent of the object.
    pub const PARENT: usize = 4;
    /// The object to free; equal to [`ROOT`] it frees the client.
    pub const OBJECT: usize = 8;
    /// Status, out.
    pub const STATUS: usize = 12;
}

/// NVOS21 (32 bytes) and NVOS64 (48 bytes), `RM_ALLOC`. The first five fields have equal offsets.
pub mod nvos64 {
    /// Bytes of NVOS21.
    pub const SIZE_NVOS21: u16 = 32;
    /// Bytes of NVOS64.
    pub const SIZE: u16 = 48;
    /// Client.
    pub const ROOT: usize = 0;
    /// Parent object.
    pub const PARENT: usize = 4;
    /// New handle, in and out; 0 lets the driver choose.
    pub const NEW: usize = 8;
    /// Class.
    pub const CLASS: usize = 12;
    /// Pointer to the class's parameters.
    pub const PARAMS: usize = 16;
    /// Status in NVOS21, out.
    pub const STATUS_NVOS21: usize = 28;
    /// Flags, only in NVOS64.
    pub const FLAGS: usize = 36;
    /// Status in NVOS64, out.
    pub const STATUS: usize = 40;
}

/// NVOS02 with an fd behind it, `RM_ALLOC_MEMORY`.
pub mod nvos02 {
    /// Bytes with the fd.
    pub const SIZE: u16 = 56;
    /// Client.
    pub const ROOT: usize = 0;
    /// Device.
    pub const PARENT: usize = 4;
    /// New handle.
    pub const NEW: usize = 8;
    /// Class.
    pub const CLASS: usize = 12;
    /// Flags: location in bits 11:8, 2 is video memory.
    pub const FLAGS: usize = 16;
    /// Size − 1.
    pub const LIMIT: usize = 32;
    /// Status, out.
    pub const STATUS: usize = 40;
}

/// NVOS54, `RM_CONTROL`.
pub mod nvos54 {
    /// Bytes.
    pub const SIZE: u16 = 32;
    /// Client.
    pub const CLIENT: usize = 0;
    /// Object.
    pub const OBJECT: usize = 4;
    /// Command.
    pub const CMD: usize = 8;
    /// Flags.
    pub const FLAGS: usize = 12;
    /// Pointer to the parameters.
    pub const PARAMS: usize = 16;
    /// Their size.
    pub const PARAMS_SIZE: usize = 24;
    /// Status, out.
    pub const STATUS: usize = 28;
}

/// NVOS55, `RM_DUP_OBJECT`.
pub mod nvos55 {
    /// Bytes.
    pub const SIZE: u16 = 28;
    /// Receiving client.
    pub const CLIENT: usize = 0;
    /// Parent in the receiving client.
    pub const PARENT: usize = 4;
    /// New handle, in and out.
    pub const OBJECT: usize = 8;
    /// Giving client.
    pub const CLIENT_SRC: usize = 12;
    /// Object in the giving client.
    pub const OBJECT_SRC: usize = 16;
    /// Status, out.
    pub const STATUS: usize = 24;
}

/// NVOS32, `RM_VID_HEAP_CONTROL`.
pub mod nvos32 {
    /// Bytes.
    pub const SIZE: u16 = 184;
    /// Client.
    pub const ROOT: usize = 0;
    /// Device.
    pub const PARENT: usize = 4;
    /// Which function.
    pub const FUNCTION: usize = 8;
    /// Address space; together with the function eight bytes.
    pub const VASPACE: usize = 12;
    /// Status, out.
    pub const STATUS: usize = 20;
    /// The memory's handle, in every function below.
    pub const MEMORY: usize = 44;
    /// Allocation flags, in every allocating function below.
    pub const FLAGS: usize = 52;

    /// Allocate by size.
    pub const FN_ALLOC_SIZE: u32 = 2;
    /// Free.
    pub const FN_FREE: u32 = 3;
    /// Allocate height × pitch; the size field is ignored.
    pub const FN_ALLOC_TILED: u32 = 6;
    /// Allocate by size inside a range.
    pub const FN_ALLOC_SIZE_RANGE: u32 = 14;

    /// `ALLOC_SIZE`: attributes.
    pub const ALLOC_SIZE_ATTR: usize = 56;
    /// `ALLOC_SIZE`: size, in and out.
    pub const ALLOC_SIZE_SIZE: usize = 88;
    /// `ALLOC_SIZE`: second attributes.
    pub const ALLOC_SIZE_ATTR2: usize = 144;
    /// `ALLOC_TILED`: height.
    pub const TILED_HEIGHT: usize = 56;
    /// `ALLOC_TILED`: pitch.
    pub const TILED_PITCH: usize = 60;
    /// `ALLOC_TILED`: attributes.
    pub const TILED_ATTR: usize = 64;
    /// `ALLOC_TILED`: size, out.
    pub const TILED_SIZE: usize = 88;
    /// `ALLOC_TILED`: second attributes.
    pub const TILED_ATTR2: usize = 144;
    /// `ALLOC_SIZE_RANGE`: attributes.
    pub const RANGE_ATTR: usize = 56;
    /// `ALLOC_SIZE_RANGE`: size, in and out.
    pub const RANGE_SIZE: usize = 80;
    /// `ALLOC_SIZE_RANGE`: second attributes.
    pub const RANGE_ATTR2: usize = 136;
}

/// `NV_MEMORY_ALLOCATION_PARAMS`: the parameters of the memory classes (120 bytes in 535, 128 later).
pub mod memparams {
    /// Bytes that every version has.
    pub const MIN_SIZE: usize = 120;
    /// Allocation flags.
    pub const FLAGS: usize = 8;
    /// Attributes.
    pub const ATTR: usize = 24;
    /// Second attributes.
    pub const ATTR2: usize = 28;
    /// Requested size, in and out.
    pub const REQUESTED: usize = 64;
    /// Granted size − 1, out.
    pub const LIMIT: usize = 88;
}

/// `NV_OS_DESC_MEMORY_ALLOCATION_PARAMS`: user pages to be pinned (40 bytes).
pub mod osdesc {
    /// Size − 1.
    pub const LIMIT: usize = 24;
}

/// Allocation flags and attributes (`NVOS32_ALLOC_FLAGS_*`, `NVOS32_ATTR_*`).
pub mod heap {
    /// Only addresses are wanted.
    pub const FLAGS_VIRTUAL: u32 = 0x0008_0000;
    /// `attr` bits 26:25.
    pub const ATTR_LOCATION_SHIFT: u32 = 25;
    /// Mask after the shift.
    pub const ATTR_LOCATION_MASK: u32 = 3;
    /// Location: video memory.
    pub const ATTR_LOCATION_VIDMEM: u32 = 0;
    /// `attr` bits 24:23.
    pub const ATTR_PAGE_SIZE_SHIFT: u32 = 23;
    /// Page size: 4 KiB.
    pub const ATTR_PAGE_SIZE_4KB: u32 = 1;
    /// Page size: 64 KiB.
    pub const ATTR_PAGE_SIZE_BIG: u32 = 2;
    /// Page size: as `attr2` says, 2 MiB or more.
    pub const ATTR_PAGE_SIZE_HUGE: u32 = 3;
    /// `attr2`: extended GPU memory; 550 and later.
    pub const ATTR2_USE_EGM: u32 = 1 << 24;
    /// NVOS02 flags bits 11:8.
    pub const NVOS02_LOCATION_SHIFT: u32 = 8;
    /// NVOS02 location: video memory.
    pub const NVOS02_LOCATION_VIDMEM: u32 = 2;
}

/// `nv_ioctl_xfer_t`, `IOCTL_XFER_CMD`.
pub mod xfer {
    /// Bytes.
    pub const SIZE: u16 = 16;
    /// Inner number, compared as a whole `u32`.
    pub const CMD: usize = 0;
    /// Inner size.
    pub const INNER_SIZE: usize = 4;
    /// Pointer to the inner structure.
    pub const PTR: usize = 8;
}

/// `nv_ioctl_card_info_t`, one entry of `CARD_INFO`.
pub mod card {
    /// Bytes of one entry.
    pub const SIZE: usize = 72;
    /// Whether the entry is filled.
    pub const VALID: usize = 0;
    /// PCI domain, `u32`.
    pub const PCI_DOMAIN: usize = 4;
    /// PCI bus, `u8`.
    pub const PCI_BUS: usize = 8;
    /// PCI slot, `u8`.
    pub const PCI_SLOT: usize = 9;
    /// PCI function, `u8`.
    pub const PCI_FUNCTION: usize = 10;
    /// RM's id of the GPU.
    pub const GPU_ID: usize = 16;
    /// N of `/dev/nvidiaN`.
    pub const MINOR: usize = 56;
}

/// UVM commands on `/dev/nvidia-uvm`: whole values, not encoded by `_IOC` (`uvm_ioctl.h`).
pub mod uvm {
    /// Binds the file to the caller's address space; 16 bytes, status at 8.
    pub const INITIALIZE: u32 = 0x3000_0001;
    /// Second fd of a process; 8 bytes, status at 4.
    pub const MM_INITIALIZE: u32 = 75;
    /// Registers a channel.
    pub const REGISTER_CHANNEL: u32 = 27;
    /// Maps RM memory; takes a reference on it.
    pub const MAP_EXTERNAL_ALLOCATION: u32 = 33;
    /// Frees a range.
    pub const FREE: u32 = 34;
    /// Registers a GPU by UUID.
    pub const REGISTER_GPU: u32 = 37;
    /// Registers an address space.
    pub const REGISTER_GPU_VASPACE: u32 = 25;
    /// Moves a range to a processor.
    pub const MIGRATE: u32 = 51;
    /// Drops a mapping of RM memory.
    pub const UNMAP_EXTERNAL: u32 = 66;
    /// Names the range of a context's pool of semaphores, before it is mapped.
    pub const ALLOC_SEMAPHORE_POOL: u32 = 68;
    /// Asks whether a range that was just mapped is one; libcuda unmaps it if this fails.
    pub const VALIDATE_VA_RANGE: u32 = 72;
    /// Makes an address range.
    pub const CREATE_EXTERNAL_RANGE: u32 = 73;
}

/// `NV2080_CTRL_FB_INFO`, the list of [`ctrl::FB_GET_INFO_V2`]: a count, then pairs of index and data.
pub mod fb_info {
    /// Number of pairs, `u32`.
    pub const COUNT: usize = 0;
    /// First pair.
    pub const LIST: usize = 4;
    /// Pairs that the list has room for in 580.159.04 (measured). The driver wants parameters of exactly this length.
    pub const MAX_PAIRS: usize = 128;
    /// Memory of the card, KiB.
    pub const INDEX_RAM_SIZE: u32 = 0x7;
    /// Memory of the card including what is reserved, KiB.
    pub const INDEX_TOTAL_RAM_SIZE: u32 = 0x8;
    /// Memory that user space can allocate, KiB.
    pub const INDEX_HEAP_SIZE: u32 = 0x9;
    /// Memory that is free, KiB.
    pub const INDEX_HEAP_FREE: u32 = 0x16;
    /// Memory that is usable at all, KiB.
    pub const INDEX_USABLE_RAM_SIZE: u32 = 0x20;
}

/// `NV0041_CTRL_GET_SURFACE_INFO_PARAMS`: a count and a pointer to pairs of index and data.
pub mod surface_info {
    /// Bytes.
    pub const SIZE: usize = 16;
    /// Number of pairs, `u32`.
    pub const COUNT: usize = 0;
    /// Pointer to the pairs.
    pub const LIST: usize = 8;
    /// Size of the allocation in units of 4 KiB.
    pub const INDEX_PHYS_SIZE: u32 = 0x7;
}

/// `NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS`.
pub mod handle_info {
    /// Bytes.
    pub const SIZE: usize = 16;
    /// The handle asked about.
    pub const OBJECT: usize = 0;
    /// What is asked.
    pub const INDEX: usize = 4;
    /// The answer, `u64`.
    pub const DATA: usize = 8;
    /// Ask for the parent's handle.
    pub const INDEX_PARENT: u32 = 1;
    /// Ask for the class.
    pub const INDEX_CLASS: u32 = 2;
}

/// `NV2080_CTRL_GPU_GET_GID_INFO_PARAMS`, of [`ctrl::GPU_GET_GID_INFO`].
pub mod gid_info {
    /// Bytes.
    pub const SIZE: usize = 268;
    /// Format, in.
    pub const FLAGS: usize = 4;
    /// Length of the answer, out.
    pub const LENGTH: usize = 8;
    /// The answer.
    pub const DATA: usize = 12;
    /// Flag: 16 bytes instead of text.
    pub const FLAGS_BINARY: u32 = 2;
}

/// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`, of [`ctrl::FIFO_DISABLE_CHANNELS`].
pub mod disable_channels {
    /// Bytes.
    pub const SIZE: usize = 536;
    /// 1 to disable, 0 to enable; `u8`.
    pub const DISABLE: usize = 0;
    /// Number of channels, `u32`.
    pub const COUNT: usize = 4;
    /// An event pointer; must be null for user space.
    pub const EVENT: usize = 16;
    /// Clients, `u32[64]`.
    pub const CLIENTS: usize = 24;
    /// Channels, `u32[64]`.
    pub const CHANNELS: usize = 280;
    /// Most channels in one call.
    pub const MAX: usize = 64;
}

/// Argument layouts of the UVM commands, as of 580 (`uvm_ioctl.h`).
pub mod uvm_args {
    /// First address of a range, in every command below.
    pub const BASE: usize = 0;
    /// Its length.
    pub const LENGTH: usize = 8;
    /// `INITIALIZE`: status.
    pub const INITIALIZE_STATUS: usize = 8;
    /// `MM_INITIALIZE`: status.
    pub const MM_INITIALIZE_STATUS: usize = 4;
    /// `MAP_EXTERNAL_ALLOCATION`: bytes.
    pub const MAP_EXTERNAL_SIZE: usize = 9264;
    /// `MAP_EXTERNAL_ALLOCATION`: control fd.
    pub const MAP_EXTERNAL_CTL_FD: usize = 9248;
    /// `MAP_EXTERNAL_ALLOCATION`: client of the memory.
    pub const MAP_EXTERNAL_CLIENT: usize = 9252;
    /// `MAP_EXTERNAL_ALLOCATION`: the memory.
    pub const MAP_EXTERNAL_MEMORY: usize = 9256;
    /// `MAP_EXTERNAL_ALLOCATION`: status.
    pub const MAP_EXTERNAL_STATUS: usize = 9260;
    /// `FREE` and `CREATE_EXTERNAL_RANGE`: status.
    pub const RANGE_STATUS: usize = 16;
    /// `UNMAP_EXTERNAL`: status.
    pub const UNMAP_EXTERNAL_STATUS: usize = 32;
    /// `REGISTER_GPU`: UUID, 16 bytes.
    pub const REGISTER_GPU_UUID: usize = 0;
    /// `REGISTER_GPU`: status.
    pub const REGISTER_GPU_STATUS: usize = 36;
    /// `MIGRATE`: bytes.
    pub const MIGRATE_SIZE: usize = 80;
    /// `MIGRATE`: UUID of the destination, 16 bytes.
    pub const MIGRATE_UUID: usize = 16;
    /// `MIGRATE`: NUMA node when the destination is the CPU, −1 for any.
    pub const MIGRATE_CPU_NODE: usize = 52;
    /// `MIGRATE`: status.
    pub const MIGRATE_STATUS: usize = 72;
    /// The CPU's UUID as a destination.
    pub const CPU_UUID: [u8; 16] = [
        0xa6, 0x5e, 0x0f, 0x4e, 0xd7, 0xd4, 0x7b, 0xa2, 0x50, 0x47, 0x41, 0x2c, 0x14, 0x2a, 0x77,
        0x73,
    ];
}

/// Major number of `/dev/nvidia*` (`nv.h`); the uvm node's is dynamic.
pub const NV_MAJOR: u32 = 195;
/// Minor number of `/dev/nvidiactl`.
pub const NV_CTL_MINOR: u32 = 255;

/// Offset of the status word in the argument of an escape, by number and size.
///
/// `None` for an escape that carries no RM status or whose size the driver would refuse.
#[inline(always)]
pub const fn status_offset(cmd: IoctlCmd) -> Option<usize> {
    match (cmd.nr, cmd.size) {
        (nr::RM_ALLOC_MEMORY, nvos02::SIZE) => Some(nvos02::STATUS),
        (nr::RM_FREE, nvos00::SIZE) => Some(nvos00::STATUS),
        (nr::RM_CONTROL, nvos54::SIZE) => Some(nvos54::STATUS),
        (nr::RM_ALLOC, nvos64::SIZE_NVOS21) => Some(nvos64::STATUS_NVOS21),
        (nr::RM_ALLOC, nvos64::SIZE) => Some(nvos64::STATUS),
        (nr::RM_DUP_OBJECT, nvos55::SIZE) => Some(nvos55::STATUS),
        (nr::RM_VID_HEAP_CONTROL, nvos32::SIZE) => Some(nvos32::STATUS),
        _ => None,
    }
}

/// Bytes of video memory that an allocation of `size` bytes takes at most.
///
/// RM hands out whole pages of the size it chooses: 64 KiB for small or explicitly small-paged
/// requests, 2 MiB otherwise (`_vidmemPmaAllocate`). Saturates instead of wrapping.
#[inline(always)]
pub const fn charge_for(size: u64, attr: u32) -> u64 {
    let page_size = (attr >> heap::ATTR_PAGE_SIZE_SHIFT) & 3;
    let small = page_size == heap::ATTR_PAGE_SIZE_4KB
        || page_size == heap::ATTR_PAGE_SIZE_BIG
        || size < (2 << 20);
    let mask: u64 = if small { (64 << 10) - 1 } else { (2 << 20) - 1 };
    if size > u64::MAX - mask {
        return !mask;
    }
    (size + mask) & !mask
}

/// Bytes of host memory that are pinned for a request of `size` bytes: whole pages. Saturates instead of wrapping.
#[inline(always)]
pub const fn pinned_for(size: u64) -> u64 {
    const MASK: u64 = 4095;
    if size > u64::MAX - MASK {
        return !MASK;
    }
    (size + MASK) & !MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_ignores_type_and_direction() {
        let usual = IoctlCmd::from_raw(0xc030_462b);
        assert_eq!(usual, IoctlCmd { nr: 0x2b, size: 48 });
        assert_eq!(IoctlCmd::from_raw(0x4030_002b), usual);
        assert_eq!(usual.to_raw(), 0xc030_462b);
    }

    #[test]
    fn status_offsets_depend_on_the_layout() {
        assert_eq!(status_offset(IoctlCmd { nr: 0x2b, size: 32 }), Some(28));
        assert_eq!(status_offset(IoctlCmd { nr: 0x2b, size: 48 }), Some(40));
        assert_eq!(status_offset(IoctlCmd { nr: 0x2b, size: 40 }), None);
    }

    #[test]
    fn charges_are_whole_pages_and_never_wrap() {
        assert_eq!(charge_for(1, 0), 64 << 10);
        assert_eq!(charge_for(2 << 20, 0), 2 << 20);
        assert_eq!(charge_for((2 << 20) + 1, 0), 4 << 20);
        let big = heap::ATTR_PAGE_SIZE_BIG << heap::ATTR_PAGE_SIZE_SHIFT;
        assert_eq!(charge_for((2 << 20) + 1, big), (2 << 20) + (64 << 10));
        assert!(charge_for(u64::MAX, 0) >= u64::MAX - (2 << 20));
    }
}
