//! What the process allocated, by the way it was allocated.
//!
//! - `cuMemAlloc`: whole multiples of 2 MiB from RM; up to 1 MiB shares a 2 MiB block with others.
//! - `cuMemAllocAsync`: a pool that grows in pieces of 32 MiB and gives back whole runs of them when a
//!   stream or the context is synchronised.
//! - `cuMemCreate`: one RM object; address ranges and mappings are apart from it.
//! - `cuMemAllocManaged`: a mapping of the `nvidia-uvm` file that the model is told of.
//! - `cuMemAllocHost`, `cuMemHostRegister`: pinned host memory.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use gpuquota_common::nvidia::{ctrl, nr};
use gpuquota_simgpu::side::managed;

use crate::driver::{Context, Driver, lock};
use crate::error::{self, CuResult};
use crate::rm::{MemoryRequest, To};

/// `UVM_DISABLE_READ_DUPLICATION`
const DISABLE_READ_DUPLICATION: u32 = 45;
const MIB: u64 = 1 << 20;
/// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`, asked before memory is mapped for the CPU.
const CLIENT_GET_ADDR_SPACE_TYPE: u32 = 0xd01;
/// Granularity of video memory.
pub const GRANULARITY: u64 = 2 * MIB;
/// Allocations up to this size share a block.
const SMALL_MAX: u64 = MIB;
/// Alignment inside a shared block.
const SMALL_ALIGN: u64 = 512;
/// What the pool asks for at a time.
const POOL_PIECE: u64 = 32 * MIB;
/// Row alignment of `cuMemAllocPitch`.
pub const PITCH_ALIGN: u64 = 512;

/// A run of memory that is handed out in parts.
#[derive(Default)]
struct Parts {
    length: u64,
    /// Parts in use: offset and length.
    used: BTreeMap<u64, u64>,
}

impl Parts {
    fn new(length: u64) -> Self {
        Self {
            length,
            used: BTreeMap::new(),
        }
    }

    /// First place where `length` bytes fit.
    fn take(&mut self, length: u64, align: u64) -> Option<u64> {
        let length = length.next_multiple_of(align);
        let mut at = 0;
        for (offset, size) in &self.used {
            if offset - at >= length {
                break;
            }
            at = offset + size;
        }
        if at + length > self.length {
            return None;
        }
        self.used.insert(at, length);
        Some(at)
    }
}

/// A 2 MiB block that small allocations share.
struct Block {
    device: usize,
    context: usize,
    handle: u32,
    parts: Parts,
}

/// A run of the pool's pieces.
struct Segment {
    device: usize,
    context: usize,
    handles: Vec<u32>,
    parts: Parts,
}

/// What an address that was handed out leads to.
enum Allocation {
    /// Part of the block at an address.
    Small { block: u64 },
    /// An RM object of its own.
    Large {
        device: usize,
        context: usize,
        handle: u32,
        length: u64,
    },
    /// Part of the pool's segment at an address.
    Pooled { segment: u64 },
    /// Host memory that moves.
    Managed { length: u64, context: usize },
}

/// Memory of `cuMemCreate`.
struct Created {
    device: usize,
    handle: u32,
    length: u64,
    /// One for the handle that the application holds, one for each mapping.
    references: u32,
}

/// A mapping of created memory.
struct Mapping {
    memory: u64,
    length: u64,
    accessible: bool,
}

/// Pinned host memory.
struct Pinned {
    device: usize,
    handle: u32,
    range: u64,
    length: u64,
    /// Whether the memory itself is ours.
    owned: bool,
}

#[derive(Default)]
struct Tables {
    allocations: BTreeMap<u64, Allocation>,
    blocks: BTreeMap<u64, Block>,
    segments: BTreeMap<u64, Segment>,
    /// Devices whose pool was set up.
    pools: Vec<usize>,
    created: BTreeMap<u64, Created>,
    mappings: BTreeMap<u64, Mapping>,
    pinned: BTreeMap<u64, Pinned>,
    next_created: u64,
}

/// All memory of the process.
#[derive(Default)]
pub struct Memory {
    tables: Mutex<Tables>,
    /// Whether the pool has something to give back.
    loose: AtomicBool,
}

impl Memory {
    /// `cuMemAlloc`.
    pub fn alloc(&self, driver: &Driver, context: &Context, size: u64) -> Result<u64, CuResult> {
        if size == 0 {
            return Err(error::INVALID_VALUE);
        }
        if size > SMALL_MAX {
            return self.alloc_large(driver, context, size);
        }
        {
            let mut tables = lock(&self.tables);
            let found = tables
                .blocks
                .iter_mut()
                .filter(|(_, block)| block.context == context.id)
                .find_map(|(base, block)| Some((*base, block.parts.take(size, SMALL_ALIGN)?)));
            if let Some((block, offset)) = found {
                tables
                    .allocations
                    .insert(block + offset, Allocation::Small { block });
                return Ok(block + offset);
            }
        }
        let (handle, base) = Self::rm_memory(driver, context, GRANULARITY)?;
        let mut parts = Parts::new(GRANULARITY);
        let offset = parts.take(size, SMALL_ALIGN).ok_or(error::UNKNOWN)?;
        let mut tables = lock(&self.tables);
        tables.blocks.insert(
            base,
            Block {
                device: context.device,
                context: context.id,
                handle,
                parts,
            },
        );
        tables
            .allocations
            .insert(base + offset, Allocation::Small { block: base });
        Ok(base + offset)
    }

    fn alloc_large(&self, driver: &Driver, context: &Context, size: u64) -> Result<u64, CuResult> {
        let length = size
            .checked_next_multiple_of(GRANULARITY)
            .ok_or(error::OUT_OF_MEMORY)?;
        let (handle, base) = Self::rm_memory(driver, context, length)?;
        lock(&self.tables).allocations.insert(
            base,
            Allocation::Large {
                device: context.device,
                context: context.id,
                handle,
                length,
            },
        );
        Ok(base)
    }

    /// The recorded steps of `cuMemAlloc`: object, registration, range, mapping.
    fn rm_memory(driver: &Driver, context: &Context, length: u64) -> Result<(u32, u64), CuResult> {
        let device = driver.device(context.device)?;
        let handle = driver.take_handle();
        let request = MemoryRequest::video(length);
        if let Err(error) = driver.rm.alloc_memory(device.object, handle, &request) {
            driver.return_handle(handle);
            return Err(error);
        }
        driver
            .rm
            .control_plain(device.p2p, ctrl::P2P_REGISTER_VIDMEM);
        let base = driver.take_range(length);
        let mapped = driver
            .rm
            .uvm_range(base, length)
            .and_then(|()| driver.rm.uvm_map(base, length, handle));
        if let Err(error) = mapped {
            Self::free_rm_memory(driver, context.device, handle, base, length);
            return Err(error);
        }
        Ok((handle, base))
    }

    fn free_rm_memory(driver: &Driver, device: usize, handle: u32, base: u64, length: u64) {
        let Ok(device) = driver.device(device) else {
            return;
        };
        driver
            .rm
            .control_plain(device.p2p, ctrl::P2P_UNREGISTER_VIDMEM);
        driver.rm.uvm_free(base, length);
        driver.rm.free(driver.rm.client, device.object, handle);
        driver.return_handle(handle);
    }

    /// `cuMemFree`, for every kind of address.
    pub fn free(&self, driver: &Driver, address: u64) -> Result<(), CuResult> {
        if address == 0 {
            return Ok(());
        }
        let mut tables = lock(&self.tables);
        let allocation = tables
            .allocations
            .remove(&address)
            .ok_or(error::INVALID_VALUE)?;
        match allocation {
            Allocation::Small { block } => {
                let Some(entry) = tables.blocks.get_mut(&block) else {
                    return Err(error::INVALID_VALUE);
                };
                entry.parts.used.remove(&(address - block));
                if entry.parts.used.is_empty()
                    && let Some(entry) = tables.blocks.remove(&block)
                {
                    drop(tables);
                    Self::free_rm_memory(driver, entry.device, entry.handle, block, GRANULARITY);
                }
            }
            Allocation::Large {
                device,
                handle,
                length,
                ..
            } => {
                drop(tables);
                Self::free_rm_memory(driver, device, handle, address, length);
            }
            Allocation::Pooled { segment } => {
                if let Some(entry) = tables.segments.get_mut(&segment) {
                    entry.parts.used.remove(&(address - segment));
                }
                self.loose.store(true, Ordering::Release);
            }
            Allocation::Managed { length, .. } => {
                drop(tables);
                free_managed(driver, address, length)?;
            }
        }
        Ok(())
    }

    /// `cuMemAllocAsync`.
    pub fn alloc_async(
        &self,
        driver: &Driver,
        context: &Context,
        size: u64,
    ) -> Result<u64, CuResult> {
        if size == 0 {
            return Err(error::INVALID_VALUE);
        }
        let pieces = size.div_ceil(POOL_PIECE);
        let length = pieces.checked_mul(POOL_PIECE).ok_or(error::OUT_OF_MEMORY)?;
        let first_use = {
            let mut tables = lock(&self.tables);
            let found = tables
                .segments
                .iter_mut()
                .filter(|(_, segment)| segment.context == context.id)
                .find_map(|(base, segment)| Some((*base, segment.parts.take(size, SMALL_ALIGN)?)));
            if let Some((segment, offset)) = found {
                tables
                    .allocations
                    .insert(segment + offset, Allocation::Pooled { segment });
                return Ok(segment + offset);
            }
            !tables.pools.contains(&context.device)
        };
        let base = driver.take_range(length);
        driver.rm.uvm_range(base, length)?;
        if first_use {
            self.set_up_pool(driver, context)?;
        }
        let handles = match Self::grow_pool(driver, context, base, pieces) {
            Ok(handles) => handles,
            Err(error) => {
                driver.rm.uvm_free(base, length);
                return Err(error);
            }
        };
        let mut parts = Parts::new(length);
        let offset = parts.take(size, SMALL_ALIGN).ok_or(error::UNKNOWN)?;
        let mut tables = lock(&self.tables);
        tables.segments.insert(
            base,
            Segment {
                device: context.device,
                context: context.id,
                handles,
                parts,
            },
        );
        tables
            .allocations
            .insert(base + offset, Allocation::Pooled { segment: base });
        Ok(base + offset)
    }

    /// The bookkeeping memory that the first use of a pool takes in the host.
    fn set_up_pool(&self, driver: &Driver, context: &Context) -> Result<(), CuResult> {
        let device = driver.device(context.device)?;
        let handle = driver.take_handle();
        driver
            .rm
            .alloc_memory(device.object, handle, &MemoryRequest::host(GRANULARITY))?;
        driver
            .rm
            .control_plain(driver.rm.client, CLIENT_GET_ADDR_SPACE_TYPE);
        driver.rm.escape(To::Ctl, nr::RM_MAP_MEMORY, 56)?;
        let base = driver.take_range(GRANULARITY);
        driver.rm.uvm_range(base, GRANULARITY)?;
        driver.rm.uvm_map(base, GRANULARITY, handle)?;
        lock(&self.tables).pools.push(context.device);
        Ok(())
    }

    fn grow_pool(
        driver: &Driver,
        context: &Context,
        base: u64,
        pieces: u64,
    ) -> Result<Vec<u32>, CuResult> {
        let device = driver.device(context.device)?;
        let count = u32::try_from(pieces).map_err(|_| error::OUT_OF_MEMORY)?;
        if pieces.saturating_mul(POOL_PIECE) > device.memory {
            return Err(error::OUT_OF_MEMORY);
        }
        let first = driver.take_handles(count);
        let mut handles = Vec::new();
        let mut result = Ok(());
        for handle in first..first + count {
            let request = MemoryRequest::video_pooled(POOL_PIECE);
            result = driver
                .rm
                .alloc_memory(device.object, handle, &request)
                .map(|_| ());
            if result.is_err() {
                break;
            }
            handles.push(handle);
        }
        if result.is_ok() {
            for (index, handle) in (0..).zip(&handles) {
                result = driver
                    .rm
                    .uvm_map(base + index * POOL_PIECE, POOL_PIECE, *handle);
                if result.is_err() {
                    break;
                }
            }
        }
        if let Err(error) = result {
            for handle in handles.iter().rev() {
                driver.rm.free(driver.rm.client, device.object, *handle);
            }
            return Err(error);
        }
        Ok(handles)
    }

    /// Gives the pool's empty runs back, as a synchronisation does.
    pub fn trim(&self, driver: &Driver) {
        if !self.loose.swap(false, Ordering::AcqRel) {
            return;
        }
        let empty: Vec<(u64, Segment)> = {
            let mut tables = lock(&self.tables);
            let bases: Vec<u64> = tables
                .segments
                .iter()
                .filter(|(_, segment)| segment.parts.used.is_empty())
                .map(|(base, _)| *base)
                .collect();
            bases
                .into_iter()
                .filter_map(|base| Some((base, tables.segments.remove(&base)?)))
                .collect()
        };
        for (base, segment) in empty {
            free_segment(driver, base, &segment);
        }
    }

    /// `cuMemAllocManaged`.
    pub fn alloc_managed(
        &self,
        driver: &Driver,
        context: &Context,
        size: u64,
    ) -> Result<u64, CuResult> {
        if size == 0 {
            return Err(error::INVALID_VALUE);
        }
        let length = size
            .checked_next_multiple_of(GRANULARITY)
            .ok_or(error::OUT_OF_MEMORY)?;
        let base = driver.rm.map_managed(length)?;
        if let Err(error) = driver.rm.uvm_validate(base, length) {
            unmap_host(base, length);
            return Err(error);
        }
        driver.rm.uvm_plain(DISABLE_READ_DUPLICATION)?;
        driver.rm.managed(managed::CREATE, 0, base, length)?;
        lock(&self.tables).allocations.insert(
            base,
            Allocation::Managed {
                length,
                context: context.id,
            },
        );
        Ok(base)
    }

    /// A kernel touches an address: if it is managed memory, its range moves to the GPU.
    pub fn touch(&self, driver: &Driver, device: usize, address: u64) -> Result<(), CuResult> {
        let found = {
            let tables = lock(&self.tables);
            tables
                .allocations
                .range(..=address)
                .next_back()
                .and_then(|(base, allocation)| match allocation {
                    Allocation::Managed { length, .. } if address - base < *length => {
                        Some((*base, *length))
                    }
                    _ => None,
                })
        };
        if let Some((base, length)) = found {
            let gpu = driver.device(device)?.minor;
            driver.rm.managed(managed::TOUCH, gpu, base, length)?;
        }
        Ok(())
    }

    /// Whether an address belongs to managed memory, and how many bytes follow it there.
    pub fn managed_rest(&self, address: u64) -> Option<u64> {
        let tables = lock(&self.tables);
        let (base, allocation) = tables.allocations.range(..=address).next_back()?;
        match allocation {
            Allocation::Managed { length, .. } => (base + length).checked_sub(address),
            _ => None,
        }
    }

    /// `cuMemCreate`.
    pub fn create(&self, driver: &Driver, device: usize, size: u64) -> Result<u64, CuResult> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(error::INVALID_VALUE);
        }
        let parent = driver.device(device)?.object;
        let handle = driver.take_handle();
        let request = MemoryRequest::video_pooled(size);
        if let Err(error) = driver.rm.alloc_memory(parent, handle, &request) {
            driver.return_handle(handle);
            return Err(error);
        }
        let mut tables = lock(&self.tables);
        tables.next_created += 1;
        let id = tables.next_created;
        tables.created.insert(
            id,
            Created {
                device,
                handle,
                length: size,
                references: 1,
            },
        );
        Ok(id)
    }

    /// `cuMemRelease`: the memory goes when nothing maps it any more.
    pub fn release(&self, driver: &Driver, id: u64) -> Result<(), CuResult> {
        let mut tables = lock(&self.tables);
        let created = tables.created.get_mut(&id).ok_or(error::INVALID_VALUE)?;
        created.references -= 1;
        if created.references == 0
            && let Some(created) = tables.created.remove(&id)
        {
            drop(tables);
            let parent = driver.device(created.device)?.object;
            driver.rm.free(driver.rm.client, parent, created.handle);
            driver.return_handle(created.handle);
        }
        Ok(())
    }

    /// `cuMemMap`.
    pub fn map(&self, address: u64, length: u64, id: u64) -> Result<(), CuResult> {
        let mut tables = lock(&self.tables);
        if tables.mappings.contains_key(&address) {
            return Err(error::INVALID_VALUE);
        }
        let created = tables.created.get_mut(&id).ok_or(error::INVALID_VALUE)?;
        if length != created.length {
            return Err(error::INVALID_VALUE);
        }
        created.references += 1;
        tables.mappings.insert(
            address,
            Mapping {
                memory: id,
                length,
                accessible: false,
            },
        );
        Ok(())
    }

    /// `cuMemSetAccess`: from here on the GPU refers to the memory.
    pub fn set_access(&self, driver: &Driver, address: u64, length: u64) -> Result<(), CuResult> {
        let todo: Vec<(u64, u64, u32)> = {
            let mut tables = lock(&self.tables);
            let hit: Vec<u64> = tables
                .mappings
                .range(address..address.saturating_add(length))
                .filter(|(_, mapping)| !mapping.accessible)
                .map(|(base, _)| *base)
                .collect();
            let mut todo = Vec::new();
            for base in hit {
                let Some(mapping) = tables.mappings.get_mut(&base) else {
                    continue;
                };
                mapping.accessible = true;
                let (memory, length) = (mapping.memory, mapping.length);
                if let Some(created) = tables.created.get(&memory) {
                    todo.push((base, length, created.handle));
                }
            }
            todo
        };
        if todo.is_empty() {
            return Err(error::INVALID_VALUE);
        }
        for (base, length, handle) in todo {
            driver.rm.uvm_range(base, length)?;
            driver.rm.uvm_map(base, length, handle)?;
        }
        Ok(())
    }

    /// `cuMemUnmap`.
    pub fn unmap(&self, driver: &Driver, address: u64, length: u64) -> Result<(), CuResult> {
        let gone: Vec<(u64, Mapping)> = {
            let mut tables = lock(&self.tables);
            let hit: Vec<u64> = tables
                .mappings
                .range(address..address.saturating_add(length))
                .map(|(base, _)| *base)
                .collect();
            hit.into_iter()
                .filter_map(|base| Some((base, tables.mappings.remove(&base)?)))
                .collect()
        };
        if gone.is_empty() {
            return Err(error::INVALID_VALUE);
        }
        for (base, mapping) in gone {
            if mapping.accessible {
                driver.rm.uvm_free(base, mapping.length);
            }
            self.release(driver, mapping.memory)?;
        }
        Ok(())
    }

    /// `cuMemAllocHost`.
    pub fn alloc_host(
        &self,
        driver: &Driver,
        context: &Context,
        size: u64,
    ) -> Result<u64, CuResult> {
        if size == 0 {
            return Err(error::INVALID_VALUE);
        }
        let length = size
            .checked_next_multiple_of(4096)
            .ok_or(error::OUT_OF_MEMORY)?;
        let address = map_host(length)?;
        let pinned = self.pin(driver, context, address, length, true);
        if pinned.is_err() {
            unmap_host(address, length);
        }
        pinned.map(|()| address)
    }

    /// `cuMemHostRegister`.
    pub fn register_host(
        &self,
        driver: &Driver,
        context: &Context,
        address: u64,
        size: u64,
    ) -> Result<(), CuResult> {
        if address == 0 || size == 0 {
            return Err(error::INVALID_VALUE);
        }
        self.pin(driver, context, address, size, false)
    }

    fn pin(
        &self,
        driver: &Driver,
        context: &Context,
        address: u64,
        length: u64,
        owned: bool,
    ) -> Result<(), CuResult> {
        let device = driver.device(context.device)?;
        let handle = driver.take_handle();
        if let Err(error) = driver
            .rm
            .pin(&device.file, device.object, handle, address, length)
        {
            driver.return_handle(handle);
            return Err(error);
        }
        let range = driver.take_range(length);
        driver.rm.uvm_range(range, length)?;
        driver.rm.uvm_map(range, length, handle)?;
        lock(&self.tables).pinned.insert(
            address,
            Pinned {
                device: context.device,
                handle,
                range,
                length,
                owned,
            },
        );
        Ok(())
    }

    /// `cuMemFreeHost` with `owned`, `cuMemHostUnregister` without.
    pub fn unpin(&self, driver: &Driver, address: u64, owned: bool) -> Result<(), CuResult> {
        let pinned = {
            let mut tables = lock(&self.tables);
            match tables.pinned.get(&address) {
                Some(pinned) if pinned.owned == owned => tables.pinned.remove(&address),
                _ => None,
            }
        }
        .ok_or(error::INVALID_VALUE)?;
        free_pinned(driver, address, &pinned);
        Ok(())
    }

    /// Frees what a context's end takes with it.
    pub fn free_all(&self, driver: &Driver, context: usize) {
        let addresses: Vec<u64> = {
            let tables = lock(&self.tables);
            let of_context = |allocation: &Allocation| match allocation {
                Allocation::Small { block } => tables.blocks.get(block).map(|block| block.context),
                Allocation::Pooled { segment } => {
                    tables.segments.get(segment).map(|segment| segment.context)
                }
                Allocation::Large { context, .. } | Allocation::Managed { context, .. } => {
                    Some(*context)
                }
            };
            tables
                .allocations
                .iter()
                .filter(|(_, allocation)| of_context(allocation) == Some(context))
                .map(|(address, _)| *address)
                .collect()
        };
        for address in addresses {
            // It was in the table a moment ago; if another thread was faster, that is as good.
            let _ = self.free(driver, address);
        }
        self.trim(driver);
    }
}

fn free_segment(driver: &Driver, base: u64, segment: &Segment) {
    let Ok(device) = driver.device(segment.device) else {
        return;
    };
    let mut at = base + segment.parts.length;
    for handle in segment.handles.iter().rev() {
        at -= POOL_PIECE;
        driver.rm.uvm_unmap(at, POOL_PIECE);
        driver.rm.free(driver.rm.client, device.object, *handle);
    }
}

fn free_managed(driver: &Driver, address: u64, length: u64) -> Result<(), CuResult> {
    for cmd in [0x1f, 0x2d, 0x2f, 0x2f, 0x2b] {
        driver.rm.uvm_plain(cmd)?;
    }
    driver.rm.managed(managed::DESTROY, 0, address, length)?;
    unmap_host(address, length);
    Ok(())
}

fn free_pinned(driver: &Driver, address: u64, pinned: &Pinned) {
    let Ok(device) = driver.device(pinned.device) else {
        return;
    };
    driver.rm.uvm_free(pinned.range, pinned.length);
    driver
        .rm
        .free(driver.rm.client, device.object, pinned.handle);
    driver
        .rm
        .control_plain(device.subdevice, ctrl::GPU_GET_NAME_STRING);
    driver.return_handle(pinned.handle);
    if pinned.owned {
        unmap_host(address, pinned.length);
    }
}

/// Host memory that is there when it is touched.
fn map_host(length: u64) -> Result<u64, CuResult> {
    let length = usize::try_from(length).map_err(|_| error::OUT_OF_MEMORY)?;
    // SAFETY: a new anonymous mapping touches nothing that exists.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        Err(error::OUT_OF_MEMORY)
    } else {
        Ok(address as u64)
    }
}

fn unmap_host(address: u64, length: u64) {
    let (Ok(address), Ok(length)) = (usize::try_from(address), usize::try_from(length)) else {
        return;
    };
    // SAFETY: the range was made by `map_host`, and the application gave it back.
    unsafe { libc::munmap(std::ptr::without_provenance_mut(address), length) };
}
