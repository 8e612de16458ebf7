//! The state of the process: the client, the GPUs, the contexts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use gpuquota_common::nvidia::{card, class, ctrl, fb_info, gid_info, nr, uvm};
use gpuquota_simgpu::bytes::{put_u32, u32_at};
use gpuquota_simgpu::side;

use crate::error::{self, CuResult};
use crate::launch::Launcher;
use crate::memory::Memory;
use crate::recorded::{self, Call, Ref};
use crate::rm::{MemoryRequest, Rm, To};

/// First handle that a client of libcuda uses for each GPU's objects, as recorded.
const RECORDED_DEVICE: u32 = 0x5c00_0002;
const RECORDED_SUBDEVICE: u32 = 0x5c00_0003;
const RECORDED_P2P: u32 = 0x5c00_000d;
/// First handle of a context, as recorded, and the first one after it.
const RECORDED_CONTEXT: u32 = 0x5c00_000e;
const RECORDED_CONTEXT_END: u32 = 0x5c00_0096;
/// The channel group of compute kernels, as recorded, and its time slice in microseconds.
const RECORDED_COMPUTE_GROUP: u32 = 0x5c00_0015;
const COMPUTE_SLICE_US: u64 = 2048;
/// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS`: engine, and two of them.
const GROUP_ENGINE: usize = 12;
const ENGINE_GRAPHICS: u32 = 1;
const ENGINE_COPY0: u32 = 9;
const MIB2: u64 = 2 << 20;
/// GPU addresses begin here: above all that user space maps, so that no pointer is taken for the host's.
const FIRST_ADDRESS: u64 = 0x0002_0000_0000_0000;

static DRIVER: OnceLock<Driver> = OnceLock::new();
static INITIALISING: Mutex<()> = Mutex::new(());
static FORKED: AtomicBool = AtomicBool::new(false);

/// A GPU.
pub struct Device {
    /// N of `nvidiaN`, also the device instance.
    pub minor: u32,
    /// UUID.
    pub uuid: [u8; 16],
    /// Marketing name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// PCI bus number.
    pub pci_bus: u8,
    /// Device object.
    pub object: u32,
    /// Subdevice object.
    pub subdevice: u32,
    /// The object that allocations are registered with.
    pub p2p: u32,
    /// The GPU's file, tied to the control file.
    pub file: File,
    /// First handle of the GPU's objects.
    base: u32,
    /// More open files of the GPU, one for each event.
    _events: Vec<File>,
}

/// A context on a GPU.
pub struct Context {
    /// What the application sees as a pointer.
    pub id: usize,
    /// Which GPU.
    pub device: usize,
    /// Its launches.
    pub launcher: Arc<Launcher>,
    /// Objects to free, first made first: parent and handle.
    objects: Vec<(u32, u32)>,
    /// Address ranges to free.
    ranges: Vec<(u64, u64)>,
    streams: AtomicUsize,
    _events: Vec<File>,
}

impl Context {
    /// The channel for a new stream: the others in turn, the first one is the default stream's.
    pub fn next_channel(&self) -> usize {
        let others = self.launcher.channels().saturating_sub(1).max(1);
        1 + self.streams.fetch_add(1, Ordering::Relaxed) % others
    }
}

/// The process's driver.
pub struct Driver {
    /// The client.
    pub rm: Rm,
    /// The GPUs that the process may see.
    pub devices: Vec<Device>,
    names: Mutex<Names>,
    /// What the process allocated.
    pub memory: Memory,
    contexts: RwLock<BTreeMap<usize, Arc<Context>>>,
    /// By device: the primary context and how often it is retained.
    primary: Mutex<BTreeMap<usize, (usize, u32)>>,
}

/// Handles and addresses that are not used yet.
struct Names {
    next_handle: u32,
    free_handles: Vec<u32>,
    next_address: u64,
    next_context: usize,
}

/// The driver, if `cuInit` was called and the process did not fork since.
pub fn driver() -> Result<&'static Driver, CuResult> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(error::NOT_INITIALIZED);
    }
    DRIVER.get().ok_or(error::NOT_INITIALIZED)
}

extern "C" fn child_after_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// `cuInit`.
pub fn init() -> Result<(), CuResult> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(error::NOT_INITIALIZED);
    }
    let _one = INITIALISING.lock().unwrap_or_else(PoisonError::into_inner);
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let driver = Driver::open()?;
    if DRIVER.set(driver).is_ok() {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(child_after_fork)) };
    }
    Ok(())
}

/// Takes a lock; a panic elsewhere does not make the state unusable.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the recorded handles of a GPU and of a context lie in this process.
#[derive(Clone, Copy)]
struct Bases {
    gpu: u32,
    context: u32,
}

impl Bases {
    fn map(self, recorded: u32) -> u32 {
        if recorded >= RECORDED_CONTEXT {
            recorded - RECORDED_CONTEXT + self.context
        } else if recorded >= RECORDED_DEVICE {
            recorded - RECORDED_DEVICE + self.gpu
        } else {
            recorded
        }
    }
}

/// What a repeated recording made.
#[derive(Default)]
struct Made {
    objects: Vec<(u32, u32)>,
    ranges: Vec<(u64, u64)>,
    files: Vec<File>,
    channels: Vec<(u32, u32)>,
    /// The memory object made last, with its size: what the next range is for.
    memory: Option<(u32, u64)>,
    identity: Identity,
}

/// What the recorded controls tell about a GPU.
#[derive(Default)]
struct Identity {
    uuid: Option<[u8; 16]>,
    name: String,
    memory: u64,
}

impl Driver {
    fn open() -> Result<Self, CuResult> {
        let dir = std::env::var_os(side::DIR_VARIABLE)
            .filter(|dir| !dir.is_empty())
            .unwrap_or_else(|| OsString::from("/dev"));
        let mut rm = Rm::open(&PathBuf::from(dir))?;
        let cards = Self::init_client(&mut rm)?;
        let visible = visible(&cards);
        if visible.is_empty() {
            return Err(error::NO_DEVICE);
        }
        let mut names = Names {
            next_handle: RECORDED_DEVICE,
            free_handles: Vec::new(),
            next_address: FIRST_ADDRESS,
            next_context: 1,
        };
        let mut devices = Vec::new();
        for card in visible {
            devices.push(Self::init_gpu(&rm, &mut names, card)?);
        }
        select_by_uuid(&mut devices);
        if devices.is_empty() {
            return Err(error::NO_DEVICE);
        }
        Ok(Self {
            rm,
            devices,
            names: Mutex::new(names),
            memory: Memory::default(),
            contexts: RwLock::default(),
            primary: Mutex::default(),
        })
    }

    /// The part of `cuInit` that is done once; returns the cards.
    fn init_client(rm: &mut Rm) -> Result<Vec<CardInfo>, CuResult> {
        let mut cards = Vec::new();
        for call in recorded::parse(recorded::INIT)? {
            match call {
                Call::Client => rm.client = rm.alloc_client()?,
                Call::Escape {
                    gpu: false,
                    number: nr::CARD_INFO,
                    size,
                } => cards = card_infos(&rm.escape(To::Ctl, nr::CARD_INFO, size)?),
                Call::Escape { number, size, .. } => {
                    rm.escape(To::Ctl, number, size)?;
                }
                Call::Control { cmd, object } => {
                    let object = match object {
                        Ref::Client => rm.client,
                        Ref::Handle(handle) => handle,
                    };
                    id_control(rm, object, cmd, cards.first());
                }
                Call::Alloc { class, new, .. } => {
                    rm.alloc(To::Ctl, class, rm.client, new, &mut [])?;
                }
                Call::Free(Ref::Client) => rm.free(rm.client, rm.client, rm.client),
                Call::Free(Ref::Handle(handle)) => rm.free(rm.client, rm.client, handle),
                Call::Uvm(cmd) => rm.uvm_plain(cmd)?,
                Call::Legacy { .. } => return Err(error::UNKNOWN),
            }
        }
        Ok(cards)
    }

    /// The part of `cuInit` that is done for each GPU.
    fn init_gpu(rm: &Rm, names: &mut Names, card: CardInfo) -> Result<Device, CuResult> {
        let bases = Bases {
            gpu: names.next_handle,
            context: 0,
        };
        names.next_handle += RECORDED_CONTEXT - RECORDED_DEVICE;
        let mut made = Made::default();
        let calls = recorded::parse(recorded::GPU)?;
        replay(
            rm,
            &calls,
            &mut made,
            Replay {
                bases,
                card,
                scale: None,
                uuid: None,
                address: &mut |length| names.take_range(length),
            },
        )?;
        let Identity { uuid, name, memory } = made.identity;
        let uuid = uuid.ok_or(error::UNKNOWN)?;
        let file = if made.files.is_empty() {
            return Err(error::UNKNOWN);
        } else {
            made.files.remove(0)
        };
        Ok(Device {
            minor: card.minor,
            uuid,
            name,
            memory,
            pci_bus: card.bus,
            object: bases.map(RECORDED_DEVICE),
            subdevice: bases.map(RECORDED_SUBDEVICE),
            p2p: bases.map(RECORDED_P2P),
            file,
            base: bases.gpu,
            _events: made.files,
        })
    }

    /// A device by number.
    pub fn device(&self, device: usize) -> Result<&Device, CuResult> {
        self.devices.get(device).ok_or(error::INVALID_DEVICE)
    }

    /// A handle that is free.
    pub fn take_handle(&self) -> u32 {
        let mut names = lock(&self.names);
        names
            .free_handles
            .pop()
            .unwrap_or_else(|| names.take_handles(2))
    }

    /// Handles that are free and follow each other.
    pub fn take_handles(&self, count: u32) -> u32 {
        lock(&self.names).take_handles(count)
    }

    /// Gives a handle back.
    pub fn return_handle(&self, handle: u32) {
        lock(&self.names).free_handles.push(handle);
    }

    /// Addresses that are free.
    pub fn take_range(&self, length: u64) -> u64 {
        lock(&self.names).take_range(length)
    }

    /// Makes a context.
    pub fn create_context(&self, device_index: usize) -> Result<Arc<Context>, CuResult> {
        let device = self.device(device_index)?;
        let calls = recorded::parse(recorded::CONTEXT)?;
        let scale = self.context_scale(&calls)?;
        let bases = Bases {
            gpu: device.base,
            context: self.take_handles(RECORDED_CONTEXT_END - RECORDED_CONTEXT),
        };
        let mut made = Made::default();
        let result = replay(
            &self.rm,
            &calls,
            &mut made,
            Replay {
                bases,
                card: CardInfo {
                    minor: device.minor,
                    bus: device.pci_bus,
                    gpu_id: 0,
                },
                scale: Some(&scale),
                uuid: Some(device.uuid),
                address: &mut |length| self.take_range(length),
            },
        );
        let compute: Vec<u32> = made
            .channels
            .iter()
            .filter(|(group, _)| *group == bases.map(RECORDED_COMPUTE_GROUP))
            .map(|(_, channel)| *channel)
            .collect();
        let launcher =
            result.and_then(|()| Launcher::start(self.rm.side_fd(), self.rm.client, &compute));
        let launcher = match launcher {
            Ok(launcher) => launcher,
            Err(error) => {
                self.free_made(&made.objects, &made.ranges);
                return Err(error);
            }
        };
        let id = {
            let mut names = lock(&self.names);
            names.next_context += 1;
            // Looks like a pointer and is never null.
            names.next_context << 12
        };
        let context = Arc::new(Context {
            id,
            device: device_index,
            launcher,
            objects: made.objects,
            ranges: made.ranges,
            streams: AtomicUsize::new(0),
            _events: made.files,
        });
        self.contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, Arc::clone(&context));
        Ok(context)
    }

    /// Ends a context and frees what was allocated in it.
    pub fn destroy_context(&self, id: usize) -> Result<(), CuResult> {
        let context = self
            .contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&id)
            .ok_or(error::INVALID_CONTEXT)?;
        context.launcher.close();
        self.memory.free_all(self, id);
        self.free_made(&context.objects, &context.ranges);
        Ok(())
    }

    fn free_made(&self, objects: &[(u32, u32)], ranges: &[(u64, u64)]) {
        for (base, length) in ranges {
            self.rm.uvm_free(*base, *length);
        }
        for (parent, handle) in objects.iter().rev() {
            self.rm.free(self.rm.client, *parent, *handle);
        }
    }

    /// A context by what the application sees as its pointer.
    pub fn context(&self, id: usize) -> Result<Arc<Context>, CuResult> {
        self.contexts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&id)
            .cloned()
            .ok_or(error::INVALID_CONTEXT)
    }

    /// The primary context, made at the first call.
    pub fn retain_primary(&self, device: usize) -> Result<usize, CuResult> {
        let mut primary = lock(&self.primary);
        if let Some((id, count)) = primary.get_mut(&device) {
            *count += 1;
            return Ok(*id);
        }
        let context = self.create_context(device)?;
        primary.insert(device, (context.id, 1));
        Ok(context.id)
    }

    /// Gives the primary context back; with `all`, whoever else uses it.
    pub fn release_primary(&self, device: usize, all: bool) -> Result<(), CuResult> {
        self.device(device)?;
        let mut primary = lock(&self.primary);
        let Some((id, count)) = primary.get_mut(&device) else {
            return if all {
                Ok(())
            } else {
                Err(error::INVALID_CONTEXT)
            };
        };
        *count = if all { 0 } else { *count - 1 };
        if *count > 0 {
            return Ok(());
        }
        let id = *id;
        primary.remove(&device);
        drop(primary);
        self.destroy_context(id)
    }

    /// Total and free memory of a GPU.
    pub fn memory_info(&self, device: usize) -> Result<(u64, u64), CuResult> {
        memory_info(&self.rm, self.device(device)?.subdevice)
    }

    /// Sizes for the context's memory objects such that NVML shows what the server is set to.
    fn context_scale(&self, calls: &[Call]) -> Result<Vec<u64>, CuResult> {
        let (overall, hidden) = self.rm.context_cost()?;
        let mut sizes: Vec<u64> = calls
            .iter()
            .filter_map(|call| match call {
                Call::Alloc {
                    class: class::NV01_MEMORY_LOCAL_USER,
                    memory: Some(memory),
                    ..
                } => Some(memory.size),
                _ => None,
            })
            .collect();
        let target = overall.saturating_sub(hidden) / MIB2 * MIB2;
        let total: u64 = sizes.iter().map(|size| size.next_multiple_of(MIB2)).sum();
        if total < target {
            if let Some(largest) = sizes.iter_mut().max() {
                *largest = largest.next_multiple_of(MIB2) + target - total;
            }
            return Ok(sizes);
        }
        let mut excess = total - target;
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(sizes[*index]));
        for index in order {
            let size = sizes[index].next_multiple_of(MIB2);
            let cut = excess.min(size - MIB2);
            if cut > 0 {
                sizes[index] = size - cut;
                excess -= cut;
            }
        }
        Ok(sizes)
    }
}

impl Names {
    fn take_handles(&mut self, count: u32) -> u32 {
        let first = self.next_handle;
        self.next_handle += count;
        first
    }

    fn take_range(&mut self, length: u64) -> u64 {
        let base = self.next_address;
        // A gap, so that an address behind a range is in no other.
        self.next_address += length.next_multiple_of(MIB2) + MIB2;
        base
    }
}

/// What `CARD_INFO` tells.
#[derive(Clone, Copy)]
struct CardInfo {
    minor: u32,
    bus: u8,
    gpu_id: u32,
}

fn card_infos(arg: &[u8]) -> Vec<CardInfo> {
    arg.chunks_exact(card::SIZE)
        .filter(|entry| entry[card::VALID] != 0)
        .map(|entry| CardInfo {
            minor: u32_at(entry, card::MINOR),
            bus: entry[card::PCI_BUS],
            gpu_id: u32_at(entry, card::GPU_ID),
        })
        .collect()
}

fn visible_variable() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// The cards that `CUDA_VISIBLE_DEVICES` names by number; all of them if it names none by number.
fn visible(cards: &[CardInfo]) -> Vec<CardInfo> {
    let Some(list) = visible_variable() else {
        return cards.to_vec();
    };
    if list.contains("GPU-") {
        return cards.to_vec();
    }
    // As the real one: the list ends at the first entry that names no card.
    list.split(',')
        .map_while(|word| cards.get(word.trim().parse::<usize>().ok()?).copied())
        .collect()
}

/// Keeps the devices that `CUDA_VISIBLE_DEVICES` names by UUID, in its order.
fn select_by_uuid(devices: &mut Vec<Device>) {
    let Some(list) = visible_variable().filter(|list| list.contains("GPU-")) else {
        return;
    };
    let mut chosen = Vec::new();
    for word in list.split(',') {
        let wanted: String = word
            .trim()
            .trim_start_matches("GPU-")
            .replace('-', "")
            .to_lowercase();
        let found = devices
            .iter()
            .position(|device| !wanted.is_empty() && hex(&device.uuid).starts_with(&wanted));
        match found {
            Some(index) => chosen.push(devices.remove(index)),
            None => break,
        }
    }
    *devices = chosen;
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn gpu_uuid(rm: &Rm, subdevice: u32) -> Result<[u8; 16], CuResult> {
    let mut gid = [0; gid_info::SIZE];
    put_u32(&mut gid, gid_info::FLAGS, gid_info::FLAGS_BINARY);
    rm.control(subdevice, ctrl::GPU_GET_GID_INFO, &mut gid)?;
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&gid[gid_info::DATA..][..16]);
    Ok(uuid)
}

fn gpu_name(rm: &Rm, subdevice: u32) -> Result<String, CuResult> {
    let mut name = [0; 68];
    rm.control(subdevice, ctrl::GPU_GET_NAME_STRING, &mut name)?;
    let text: Vec<u8> = name[4..].iter().copied().take_while(|b| *b != 0).collect();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Total and free bytes.
fn memory_info(rm: &Rm, subdevice: u32) -> Result<(u64, u64), CuResult> {
    let mut info = [0; fb_info::LIST + 8 * fb_info::MAX_PAIRS];
    put_u32(&mut info, fb_info::COUNT, 2);
    put_u32(&mut info, fb_info::LIST, fb_info::INDEX_TOTAL_RAM_SIZE);
    put_u32(&mut info, fb_info::LIST + 8, fb_info::INDEX_HEAP_FREE);
    rm.control(subdevice, ctrl::FB_GET_INFO_V2, &mut info)?;
    let kib = |offset| u64::from(u32_at(&info, offset)) << 10;
    Ok((kib(fb_info::LIST + 4), kib(fb_info::LIST + 12)))
}

/// A control of the recording; those that name a GPU get the id of one.
fn id_control(rm: &Rm, object: u32, cmd: u32, card: Option<&CardInfo>) {
    let mut params = [0; 4096];
    if let Some(card) = card {
        put_u32(&mut params, 0, card.gpu_id);
    }
    // Most of them have no meaning in the model, and none of them any for this library.
    let _ = rm.control(object, cmd, &mut params);
}

/// What a recording is repeated with.
struct Replay<'a> {
    bases: Bases,
    card: CardInfo,
    /// Sizes of the video memory objects, in order, instead of the recorded ones.
    scale: Option<&'a [u64]>,
    /// UUID of the GPU, if it is known before.
    uuid: Option<[u8; 16]>,
    address: &'a mut dyn FnMut(u64) -> u64,
}

/// Repeats a recording and notes what it made, also when it fails half-way.
fn replay(rm: &Rm, calls: &[Call], made: &mut Made, with: Replay<'_>) -> Result<(), CuResult> {
    let Replay {
        bases,
        card,
        scale,
        uuid,
        address,
    } = with;
    let object = |reference| match reference {
        Ref::Client => rm.client,
        Ref::Handle(handle) => bases.map(handle),
    };
    let mut sizes = scale.into_iter().flatten();
    let mut at = UvmPlaces::default();
    for call in calls {
        match *call {
            Call::Alloc {
                gpu,
                class,
                parent,
                new,
                memory,
            } => {
                let (parent, new) = (object(parent), bases.map(new));
                if let Some(mut memory) = memory {
                    if class == class::NV01_MEMORY_LOCAL_USER {
                        memory.size = sizes.next().copied().unwrap_or(memory.size);
                    }
                    replay_memory(rm, made, class, parent, new, memory)?;
                } else {
                    let to = match made.files.last() {
                        Some(file) if gpu => To::Gpu(file),
                        _ => To::Ctl,
                    };
                    let mut params = Vec::new();
                    if class == class::NV01_DEVICE_0 {
                        params = vec![0; 56];
                        put_u32(&mut params, 0, card.minor);
                    } else if class == class::KEPLER_CHANNEL_GROUP_A {
                        params = vec![0; 20];
                        let engine = if new == bases.map(RECORDED_COMPUTE_GROUP) {
                            ENGINE_GRAPHICS
                        } else {
                            ENGINE_COPY0
                        };
                        put_u32(&mut params, GROUP_ENGINE, engine);
                    }
                    rm.alloc(to, class, parent, new, &mut params)?;
                    if class::is_channel(class) {
                        made.channels.push((parent, new));
                    }
                }
                made.objects.push((parent, new));
            }
            Call::Legacy { parent, new, size } => {
                let (parent, new) = (object(parent), bases.map(new));
                let file = made.files.last().ok_or(error::UNKNOWN)?;
                rm.pin(file, parent, new, 0, size)?;
                made.memory = Some((new, size));
                made.objects.push((parent, new));
            }
            Call::Escape {
                gpu: true,
                number,
                size,
            } => {
                if number == nr::REGISTER_FD {
                    made.files.push(rm.open_gpu(card.minor)?);
                } else {
                    let file = made.files.last().ok_or(error::UNKNOWN)?;
                    rm.escape(To::Gpu(file), number, size)?;
                }
            }
            Call::Escape { number, size, .. } => {
                rm.escape(To::Ctl, number, size)?;
            }
            Call::Control {
                cmd,
                object: reference,
            } => replay_control(rm, made, object(reference), cmd, &card)?,
            Call::Uvm(cmd) => replay_uvm(rm, cmd, made, uuid, &mut at, address)?,
            Call::Free(_) | Call::Client => return Err(error::UNKNOWN),
        }
    }
    Ok(())
}

/// Addresses that one call to `nvidia-uvm` chooses and the next ones name.
#[derive(Default)]
struct UvmPlaces {
    /// Base and length of the last range.
    range: (u64, u64),
    /// Base of the pool of semaphores.
    pool: u64,
}

fn replay_uvm(
    rm: &Rm,
    cmd: u32,
    made: &mut Made,
    uuid: Option<[u8; 16]>,
    at: &mut UvmPlaces,
    address: &mut dyn FnMut(u64) -> u64,
) -> Result<(), CuResult> {
    match cmd {
        uvm::REGISTER_GPU => {
            let uuid = uuid.or(made.identity.uuid).ok_or(error::UNKNOWN)?;
            rm.uvm_register_gpu(uuid)
        }
        uvm::CREATE_EXTERNAL_RANGE => {
            let (_, size) = made.memory.ok_or(error::UNKNOWN)?;
            at.range = (address(size), size.next_multiple_of(MIB2));
            rm.uvm_range(at.range.0, at.range.1)?;
            made.ranges.push(at.range);
            Ok(())
        }
        uvm::MAP_EXTERNAL_ALLOCATION => {
            let (memory, _) = made.memory.ok_or(error::UNKNOWN)?;
            rm.uvm_map(at.range.0, at.range.1, memory)
        }
        uvm::ALLOC_SEMAPHORE_POOL => {
            at.pool = address(MIB2);
            rm.uvm_pool(at.pool, MIB2)
        }
        uvm::VALIDATE_VA_RANGE => rm.uvm_validate(at.pool, MIB2),
        cmd => rm.uvm_plain(cmd),
    }
}

fn replay_memory(
    rm: &Rm,
    made: &mut Made,
    class: u32,
    parent: u32,
    new: u32,
    memory: recorded::Memory,
) -> Result<(), CuResult> {
    let request = MemoryRequest {
        class,
        size: memory.size,
        attr: memory.attr,
        attr2: memory.attr2,
        flags: memory.flags,
        kind: memory.kind,
    };
    rm.alloc_memory(parent, new, &request)?;
    // Addresses alone are nothing to map.
    if class != class::NV50_MEMORY_VIRTUAL {
        made.memory = Some((new, memory.size));
    }
    Ok(())
}

/// A control; what it tells about the GPU is noted.
fn replay_control(
    rm: &Rm,
    made: &mut Made,
    object: u32,
    cmd: u32,
    card: &CardInfo,
) -> Result<(), CuResult> {
    match cmd {
        ctrl::TSG_GPFIFO_SCHEDULE => rm.schedule(object)?,
        ctrl::TSG_SET_TIMESLICE => {
            rm.control(object, cmd, &mut COMPUTE_SLICE_US.to_ne_bytes())?;
        }
        ctrl::GPU_GET_GID_INFO => made.identity.uuid = Some(gpu_uuid(rm, object)?),
        ctrl::GPU_GET_NAME_STRING => made.identity.name = gpu_name(rm, object)?,
        ctrl::FB_GET_INFO_V2 => made.identity.memory = memory_info(rm, object)?.0,
        _ => id_control(rm, object, cmd, Some(card)),
    }
    Ok(())
}
