//! What a driver call means for the ledger.
//!
//! The kernel side and the supervisors in user space decode the same calls out of the caller's memory; they
//! differ only in how they read it. So the decoder is here, generic over [`CallerMemory`].

use crate::{
    map::{ObjectKey, call, kind},
    nvidia::{
        IoctlCmd, NVOS64_FLAGS_FINN, charge_for, class, ctrl, heap, memparams, nr, nvos00, nvos02,
        nvos32, nvos54, nvos55, nvos64, osdesc, pinned_for, xfer,
    },
};

/// Reads the memory of the process that makes the call.
pub trait CallerMemory {
    /// `N` words at `address`, or `None` if they cannot be read.
    fn words<const N: usize>(&self, address: u64) -> Option<[u32; N]>;

    /// One word.
    #[inline(always)]
    fn word(&self, address: u64) -> Option<u32> {
        self.words::<1>(address).map(|words| words[0])
    }

    /// Two words as a number.
    #[inline(always)]
    fn long(&self, address: u64) -> Option<u64> {
        self.words::<2>(address).map(long)
    }
}

#[inline(always)]
const fn long(words: [u32; 2]) -> u64 {
    words[0] as u64 | (words[1] as u64) << 32
}

/// The caller's memory could not be read where the call says that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable;

/// A decoded call. Fields that the call does not have are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// One of [`call`], or 0 for a call that does not concern the ledger.
    pub call: u32,
    /// Client.
    pub client: u32,
    /// Parent of a new object.
    pub parent: u32,
    /// Object; for a new one the handle that the caller proposes.
    pub handle: u32,
    /// Class of a new object; command of a control.
    pub class: u32,
    /// For a new device: the driver's device instance.
    pub instance: u32,
    /// 1 if the parameters of a memory allocation are in a form that is not decoded (FINN).
    pub opaque: u32,
    /// 1 if `granted` points to the offset of the last byte, not to the size.
    pub granted_is_limit: u32,
    /// Bytes that the call would take, rounded as the driver rounds.
    pub wanted: u64,
    /// Where the driver will have written the granted size, or 0.
    pub granted: u64,
    /// What a dup stands for.
    pub source: ObjectKey,
    /// Eight bytes of an allocation which, as `raised`, make the driver refuse it; 0 if there are none.
    pub lever: u64,
    /// See `lever`.
    pub raised: u64,
}

/// More than any card has, so the driver refuses it as out of memory (16 TiB: measured on an H200).
const TOO_MUCH: u64 = 16 << 40;
/// The same as height and pitch.
const TOO_HIGH_AND_WIDE: u64 = 0x00ff_ffff_00ff_ffff;
/// A class that no driver has.
const NO_CLASS: u64 = 0xffff_ffff;
/// A function that the heap interface does not have.
const NO_FUNCTION: u64 = 0xffff_ffff;

/// Value of [`Call::call`] for a control command; never in flight.
pub const CALL_CONTROL: u32 = 100;

/// Whether a command can concern the ledger at all: the cheap test that comes before every other.
///
/// The legacy `RM_ALLOC_MEMORY` pins host memory. With the video memory class it makes a window on the whole card and
/// takes no memory (measured on 580.159.04), which [`decode`] passes over.
#[inline(always)]
pub const fn concerns_ledger(cmd: IoctlCmd) -> bool {
    matches!(
        (cmd.nr, cmd.size),
        (nr::RM_ALLOC, nvos64::SIZE | nvos64::SIZE_NVOS21)
            | (nr::RM_ALLOC_MEMORY, nvos02::SIZE)
            | (nr::RM_FREE, nvos00::SIZE)
            | (nr::RM_CONTROL, nvos54::SIZE)
            | (nr::RM_DUP_OBJECT, nvos55::SIZE)
            | (nr::RM_VID_HEAP_CONTROL, nvos32::SIZE)
            | (nr::IOCTL_XFER_CMD, xfer::SIZE)
    )
}

/// Whether a call is a control that changes nothing that is followed, as nearly all controls are.
///
/// Told by one word of the caller's memory, before it is known whether the call goes to the driver at all. One that cannot be
/// read is not taken for one, nor one that is wrapped.
#[inline(always)]
pub fn is_idle_control<M: CallerMemory>(memory: &M, cmd: IoctlCmd, arg: u64) -> bool {
    cmd.nr == nr::RM_CONTROL
        && cmd.size == nvos54::SIZE
        && memory
            .words::<1>(arg.wrapping_add(nvos54::CMD as u64))
            .is_some_and(|[command]| !ctrl::changes_scheduling(command))
}

/// Looks through `IOCTL_XFER_CMD`: returns the command and argument that the driver will act on.
///
/// The inner number is compared as a whole word by the driver, so one above 255 names nothing.
#[inline(always)]
pub fn unwrap_xfer<M: CallerMemory>(
    memory: &M,
    cmd: IoctlCmd,
    arg: u64,
) -> Result<(IoctlCmd, u64), Unreadable> {
    if cmd.nr != nr::IOCTL_XFER_CMD || cmd.size != xfer::SIZE {
        return Ok((cmd, arg));
    }
    let [inner, size, low, high] = memory.words::<4>(arg).ok_or(Unreadable)?;
    if inner > 0xff || size > 0x3fff || inner == nr::IOCTL_XFER_CMD as u32 {
        return Ok((IoctlCmd { nr: 0, size: 0 }, 0));
    }
    let cmd = IoctlCmd {
        nr: inner as u8,
        size: size as u16,
    };
    Ok((cmd, long([low, high])))
}

/// Decodes a call that was unwrapped before.
#[inline(always)]
pub fn decode<M: CallerMemory>(
    memory: &M,
    cmd: IoctlCmd,
    arg: u64,
    out: &mut Call,
) -> Result<(), Unreadable> {
    match (cmd.nr, cmd.size) {
        (nr::RM_ALLOC, nvos64::SIZE | nvos64::SIZE_NVOS21) => rm_alloc(memory, cmd.size, arg, out),
        (nr::RM_ALLOC_MEMORY, nvos02::SIZE) => alloc_memory(memory, arg, out),
        (nr::RM_FREE, nvos00::SIZE) => {
            let [client, _parent, handle] = memory.words::<3>(arg).ok_or(Unreadable)?;
            out.call = call::FREE;
            out.client = client;
            out.handle = handle;
            Ok(())
        }
        (nr::RM_CONTROL, nvos54::SIZE) => {
            let [client, object, command] = memory.words::<3>(arg).ok_or(Unreadable)?;
            out.call = CALL_CONTROL;
            out.client = client;
            out.handle = object;
            out.class = command;
            Ok(())
        }
        (nr::RM_DUP_OBJECT, nvos55::SIZE) => {
            let words = memory.words::<5>(arg).ok_or(Unreadable)?;
            out.call = call::DUP;
            out.client = words[0];
            out.parent = words[1];
            out.handle = words[2];
            out.source = ObjectKey {
                client: words[3],
                handle: words[4],
            };
            Ok(())
        }
        (nr::RM_VID_HEAP_CONTROL, nvos32::SIZE) => vid_heap(memory, arg, out),
        _ => Ok(()),
    }
}

#[inline(always)]
fn rm_alloc<M: CallerMemory>(
    memory: &M,
    size: u16,
    arg: u64,
    out: &mut Call,
) -> Result<(), Unreadable> {
    let words = memory.words::<6>(arg).ok_or(Unreadable)?;
    let params = long([words[4], words[5]]);
    out.client = words[0];
    out.parent = words[1];
    out.handle = words[2];
    out.class = words[3];
    if object_kind(out.class) == 0 {
        return Ok(());
    }
    out.call = call::ALLOC_OBJECT;
    if out.class == class::NV01_DEVICE_0 && params != 0 {
        out.instance = memory.word(params).ok_or(Unreadable)?;
    }
    let pins = class::is_host_memory(out.class);
    if out.class != class::NV01_MEMORY_LOCAL_USER && !pins {
        return Ok(());
    }
    out.call = call::ALLOC_MEMORY;
    // The size may be out of reach, and hosts have more of it than cards: without its class the driver refuses the call.
    out.lever = arg + nvos64::NEW as u64;
    out.raised = u64::from(out.handle) | NO_CLASS << 32;
    if size == nvos64::SIZE {
        let flags = memory.word(arg + nvos64::FLAGS as u64).ok_or(Unreadable)?;
        if flags & NVOS64_FLAGS_FINN != 0 {
            out.opaque = 1;
            return Ok(());
        }
    }
    if out.class == class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR {
        let limit = memory
            .long(params + osdesc::LIMIT as u64)
            .ok_or(Unreadable)?;
        out.wanted = pinned_for(limit.saturating_add(1));
        return Ok(());
    }
    if pins {
        let requested = memory
            .long(params + memparams::REQUESTED as u64)
            .ok_or(Unreadable)?;
        out.wanted = pinned_for(requested);
        out.granted = params + memparams::REQUESTED as u64;
        return Ok(());
    }
    let attr = memory
        .word(params + memparams::ATTR as u64)
        .ok_or(Unreadable)?;
    let requested = memory
        .long(params + memparams::REQUESTED as u64)
        .ok_or(Unreadable)?;
    out.wanted = charge_for(requested, attr);
    out.granted = params + memparams::LIMIT as u64;
    out.granted_is_limit = 1;
    out.lever = params + memparams::REQUESTED as u64;
    out.raised = TOO_MUCH;
    Ok(())
}

/// The legacy allocator: host memory by its size, with the class in the same structure.
#[inline(always)]
fn alloc_memory<M: CallerMemory>(memory: &M, arg: u64, out: &mut Call) -> Result<(), Unreadable> {
    let [client, parent, handle, object_class] = memory.words::<4>(arg).ok_or(Unreadable)?;
    if !class::is_host_memory(object_class) {
        return Ok(());
    }
    let limit = memory.long(arg + nvos02::LIMIT as u64).ok_or(Unreadable)?;
    out.call = call::ALLOC_MEMORY;
    out.client = client;
    out.parent = parent;
    out.handle = handle;
    out.class = object_class;
    out.wanted = pinned_for(limit.saturating_add(1));
    out.lever = arg + nvos02::NEW as u64;
    out.raised = u64::from(handle) | NO_CLASS << 32;
    Ok(())
}

/// The heap interface: the class of what it makes follows from flags and attributes.
#[inline(always)]
fn vid_heap<M: CallerMemory>(memory: &M, arg: u64, out: &mut Call) -> Result<(), Unreadable> {
    let [client, parent, function, vaspace] = memory.words::<4>(arg).ok_or(Unreadable)?;
    let handle = memory.word(arg + nvos32::MEMORY as u64).ok_or(Unreadable)?;
    out.client = client;
    out.parent = parent;
    out.handle = handle;
    let (attr_at, second_attr_at, size_at) = match function {
        nvos32::FN_FREE => {
            out.call = call::FREE;
            return Ok(());
        }
        nvos32::FN_ALLOC_SIZE => (
            nvos32::ALLOC_SIZE_ATTR,
            nvos32::ALLOC_SIZE_ATTR2,
            nvos32::ALLOC_SIZE_SIZE,
        ),
        nvos32::FN_ALLOC_TILED => (nvos32::TILED_ATTR, nvos32::TILED_ATTR2, nvos32::TILED_SIZE),
        nvos32::FN_ALLOC_SIZE_RANGE => {
            (nvos32::RANGE_ATTR, nvos32::RANGE_ATTR2, nvos32::RANGE_SIZE)
        }
        _ => return Ok(()),
    };
    let flags = memory.word(arg + nvos32::FLAGS as u64).ok_or(Unreadable)?;
    let attr = memory.word(arg + attr_at as u64).ok_or(Unreadable)?;
    let attr2 = memory.word(arg + second_attr_at as u64).ok_or(Unreadable)?;
    let location = (attr >> heap::ATTR_LOCATION_SHIFT) & heap::ATTR_LOCATION_MASK;
    if flags & heap::FLAGS_VIRTUAL != 0 {
        return Ok(());
    }
    let pins = attr2 & heap::ATTR2_USE_EGM != 0 || location != heap::ATTR_LOCATION_VIDMEM;
    out.lever = arg + size_at as u64;
    out.raised = TOO_MUCH;
    let requested = if function == nvos32::FN_ALLOC_TILED {
        out.lever = arg + nvos32::TILED_HEIGHT as u64;
        out.raised = TOO_HIGH_AND_WIDE;
        let height = memory
            .word(arg + nvos32::TILED_HEIGHT as u64)
            .ok_or(Unreadable)?;
        let pitch = memory
            .word(arg + nvos32::TILED_PITCH as u64)
            .ok_or(Unreadable)?;
        u64::from(height) * u64::from(pitch)
    } else {
        memory.long(arg + size_at as u64).ok_or(Unreadable)?
    };
    out.call = call::ALLOC_MEMORY;
    out.granted = arg + size_at as u64;
    if pins {
        out.class = class::NV01_MEMORY_SYSTEM;
        out.wanted = pinned_for(requested);
        out.lever = arg + nvos32::FUNCTION as u64;
        out.raised = NO_FUNCTION | u64::from(vaspace) << 32;
    } else {
        out.class = class::NV01_MEMORY_LOCAL_USER;
        out.wanted = charge_for(requested, attr);
    }
    Ok(())
}

/// The [`kind`] of object that a class makes, or 0 for one that does not concern a quota.
#[inline(always)]
pub const fn object_kind(object_class: u32) -> u32 {
    match object_class {
        class::NV01_DEVICE_0 => kind::DEVICE,
        class::NV20_SUBDEVICE_0 => kind::SUBDEVICE,
        class::NV01_MEMORY_LOCAL_USER => kind::MEMORY,
        class::KEPLER_CHANNEL_GROUP_A => kind::CHANNEL_GROUP,
        other if class::is_host_memory(other) => kind::HOST,
        other if class::is_client(other) => kind::CLIENT,
        other if class::is_channel(other) => kind::CHANNEL,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{vec, vec::Vec};

    use super::*;

    /// Memory of a pretended caller: bytes at one address.
    struct Fake(u64, Vec<u8>);

    impl CallerMemory for Fake {
        fn words<const N: usize>(&self, address: u64) -> Option<[u32; N]> {
            let start = usize::try_from(address.checked_sub(self.0)?).ok()?;
            let bytes = self.1.get(start..start + 4 * N)?;
            let mut words = [0; N];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes(bytes.try_into().ok()?);
            }
            Some(words)
        }
    }

    impl Fake {
        fn new(len: usize) -> Self {
            Self(0x1000, vec![0; len])
        }
        fn put(&mut self, at: usize, word: u32) {
            self.1[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        fn put_long(&mut self, at: usize, long: u64) {
            self.1[at..at + 8].copy_from_slice(&long.to_le_bytes());
        }
    }

    fn decoded(memory: &Fake, nr: u8, size: u16) -> Result<Call, Unreadable> {
        let (cmd, arg) = unwrap_xfer(memory, IoctlCmd { nr, size }, 0x1000)?;
        let mut out = Call::default();
        decode(memory, cmd, arg, &mut out)?;
        Ok(out)
    }

    fn memory_call(size: u64) -> Fake {
        let mut memory = Fake::new(512);
        memory.put(nvos64::ROOT, 0xc1d0_0001);
        memory.put(nvos64::PARENT, 0x5c00_0002);
        memory.put(nvos64::NEW, 0x5c00_0010);
        memory.put(nvos64::CLASS, class::NV01_MEMORY_LOCAL_USER);
        memory.put_long(nvos64::PARAMS, 0x1000 + 256);
        memory.put_long(256 + memparams::REQUESTED, size);
        memory
    }

    #[test]
    fn both_layouts_of_an_allocation_mean_the_same() {
        let memory = memory_call(1 << 30);
        for size in [nvos64::SIZE, nvos64::SIZE_NVOS21] {
            let call = decoded(&memory, nr::RM_ALLOC, size).expect("readable");
            assert_eq!(call.call, call::ALLOC_MEMORY);
            assert_eq!(call.wanted, 1 << 30);
            assert_eq!(call.granted, 0x1000 + 256 + 88);
        }
    }

    #[test]
    fn serialised_parameters_are_never_taken_at_their_word() {
        let mut memory = memory_call(4096);
        memory.put(nvos64::FLAGS, NVOS64_FLAGS_FINN);
        let call = decoded(&memory, nr::RM_ALLOC, nvos64::SIZE).expect("readable");
        assert_eq!((call.call, call.opaque), (call::ALLOC_MEMORY, 1));
    }

    #[test]
    fn unreadable_parameters_are_an_error_not_a_free_pass() {
        let mut memory = memory_call(4096);
        memory.put_long(nvos64::PARAMS, 0xdead_0000);
        assert_eq!(decoded(&memory, nr::RM_ALLOC, 48), Err(Unreadable));
    }

    #[test]
    fn controls_that_change_nothing_are_told_by_their_command() {
        let mut memory = Fake::new(64);
        let control = |size| IoctlCmd {
            nr: nr::RM_CONTROL,
            size,
        };
        let is_idle = |memory: &Fake, cmd| is_idle_control(memory, cmd, 0x1000);
        memory.put(nvos54::CMD, ctrl::GPU_GET_ATTACHED_IDS);
        assert!(is_idle(&memory, control(nvos54::SIZE)));
        assert!(!is_idle(&memory, control(nvos54::SIZE + 8)));
        let free = IoctlCmd {
            nr: nr::RM_FREE,
            size: nvos54::SIZE,
        };
        assert!(!is_idle(&memory, free));
        for command in [
            ctrl::TSG_SET_TIMESLICE,
            ctrl::TSG_GPFIFO_SCHEDULE,
            ctrl::TSG_SET_INTERLEAVE_LEVEL,
            ctrl::FIFO_DISABLE_CHANNELS,
        ] {
            memory.put(nvos54::CMD, command);
            assert!(!is_idle(&memory, control(nvos54::SIZE)), "{command:#x}");
        }
        let nowhere = is_idle_control(&memory, control(nvos54::SIZE), 0xdead_0000);
        assert!(!nowhere);
    }

    #[test]
    fn a_wrapped_call_is_the_call_inside() {
        let mut memory = memory_call(1 << 21);
        memory.put(400, u32::from(nr::RM_ALLOC));
        memory.put(404, 48);
        memory.put_long(408, 0x1000);
        let outer = IoctlCmd {
            nr: nr::IOCTL_XFER_CMD,
            size: xfer::SIZE,
        };
        let (cmd, arg) = unwrap_xfer(&memory, outer, 0x1000 + 400).expect("readable");
        assert_eq!((cmd.nr, cmd.size, arg), (nr::RM_ALLOC, 48, 0x1000));
    }

    #[test]
    fn tiled_memory_is_height_times_pitch_whatever_the_size_says() {
        let mut memory = Fake::new(184);
        memory.put(nvos32::FUNCTION, nvos32::FN_ALLOC_TILED);
        memory.put(nvos32::TILED_HEIGHT, 1 << 12);
        memory.put(nvos32::TILED_PITCH, 1 << 20);
        memory.put_long(nvos32::TILED_SIZE, 1);
        let call = decoded(&memory, nr::RM_VID_HEAP_CONTROL, nvos32::SIZE).expect("readable");
        assert_eq!((call.call, call.wanted), (call::ALLOC_MEMORY, 1 << 32));
    }

    #[test]
    fn heap_calls_take_addresses_host_memory_or_video_memory() {
        for (flags, attr, call, class) in [
            (heap::FLAGS_VIRTUAL, 0, 0, 0),
            (
                0,
                1 << heap::ATTR_LOCATION_SHIFT,
                call::ALLOC_MEMORY,
                class::NV01_MEMORY_SYSTEM,
            ),
            (0, 0, call::ALLOC_MEMORY, class::NV01_MEMORY_LOCAL_USER),
        ] {
            let mut memory = Fake::new(184);
            memory.put(nvos32::FUNCTION, nvos32::FN_ALLOC_SIZE);
            memory.put(nvos32::FLAGS, flags);
            memory.put(nvos32::ALLOC_SIZE_ATTR, attr);
            memory.put_long(nvos32::ALLOC_SIZE_SIZE, 1 << 30);
            let found = decoded(&memory, nr::RM_VID_HEAP_CONTROL, nvos32::SIZE).expect("readable");
            assert_eq!((found.call, found.class), (call, class));
        }
    }

    #[test]
    fn host_memory_is_pinned_in_three_ways() {
        let mut system = memory_call((1 << 20) + 1);
        system.put(nvos64::CLASS, class::NV01_MEMORY_SYSTEM);
        let mut pages = memory_call(0);
        pages.put(nvos64::CLASS, class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR);
        pages.put_long(256 + osdesc::LIMIT, 1 << 20);
        let mut legacy = Fake::new(64);
        legacy.put(nvos02::CLASS, class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR);
        legacy.put(nvos02::NEW, 7);
        legacy.put_long(nvos02::LIMIT, 1 << 20);
        for (memory, nr, size) in [
            (&system, nr::RM_ALLOC, nvos64::SIZE),
            (&pages, nr::RM_ALLOC, nvos64::SIZE),
            (&legacy, nr::RM_ALLOC_MEMORY, nvos02::SIZE),
        ] {
            let call = decoded(memory, nr, size).expect("readable");
            assert_eq!(call.call, call::ALLOC_MEMORY);
            assert_eq!(object_kind(call.class), kind::HOST);
            assert_eq!(call.wanted, (1 << 20) + 4096);
        }
    }

    #[test]
    fn a_window_on_the_card_takes_no_memory() {
        let mut legacy = Fake::new(64);
        legacy.put(nvos02::CLASS, class::NV01_MEMORY_LOCAL_USER);
        legacy.put_long(nvos02::LIMIT, u64::MAX);
        let call = decoded(&legacy, nr::RM_ALLOC_MEMORY, nvos02::SIZE).expect("readable");
        assert_eq!(call.call, 0);
    }

    #[test]
    fn an_address_range_is_not_memory() {
        let mut memory = memory_call(1 << 40);
        memory.put(nvos64::CLASS, class::NV50_MEMORY_VIRTUAL);
        assert_eq!(
            decoded(&memory, nr::RM_ALLOC, 48).expect("readable").call,
            0
        );
    }

    #[test]
    fn a_device_names_its_instance() {
        let mut memory = memory_call(0);
        memory.put(nvos64::CLASS, class::NV01_DEVICE_0);
        memory.put(256, 3);
        let call = decoded(&memory, nr::RM_ALLOC, 48).expect("readable");
        assert_eq!((call.call, call.instance), (call::ALLOC_OBJECT, 3));
    }
}
