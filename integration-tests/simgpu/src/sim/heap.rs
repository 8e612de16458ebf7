//! `VID_HEAP_CONTROL`, the older allocator: many functions behind one number.

use gpuquota_common::nvidia::{class, heap, nvos32, status};

use super::object::Kind;
use super::{MemoryRequest, RmStatus, Sim};
use crate::bytes::{put_u32, put_u64, u32_at, u64_at};

const FN_INFO: u32 = 5;
const TOTAL: usize = 24;
const FREE: usize = 32;
const INFO_SIZE: usize = 56;
const FREE_FLAGS: usize = 48;
const OWNER: usize = 40;
/// The caller names the handle instead of asking for one.
const FLAGS_MEMORY_HANDLE_PROVIDED: u32 = 0x4000;
/// The same when it frees.
const FREE_FLAGS_MEMORY_HANDLE_PROVIDED: u32 = 1;

/// Where an allocating function has its fields.
struct Fields {
    attr: usize,
    attr2: usize,
    size: usize,
    limit: usize,
}

const fn fields(function: u32) -> Option<Fields> {
    match function {
        nvos32::FN_ALLOC_SIZE => Some(Fields {
            attr: nvos32::ALLOC_SIZE_ATTR,
            attr2: nvos32::ALLOC_SIZE_ATTR2,
            size: nvos32::ALLOC_SIZE_SIZE,
            limit: 112,
        }),
        nvos32::FN_ALLOC_TILED => Some(Fields {
            attr: nvos32::TILED_ATTR,
            attr2: nvos32::TILED_ATTR2,
            size: nvos32::TILED_SIZE,
            limit: 112,
        }),
        nvos32::FN_ALLOC_SIZE_RANGE => Some(Fields {
            attr: nvos32::RANGE_ATTR,
            attr2: nvos32::RANGE_ATTR2,
            size: nvos32::RANGE_SIZE,
            limit: 104,
        }),
        _ => None,
    }
}

impl Sim {
    /// Answers `VID_HEAP_CONTROL`.
    pub(super) fn vid_heap(&mut self, file: u64, arg: &mut [u8]) {
        let result = self.vid_heap_function(file, arg);
        put_u32(arg, nvos32::STATUS, result.err().unwrap_or(status::OK));
    }

    fn vid_heap_function(&mut self, file: u64, arg: &mut [u8]) -> Result<(), RmStatus> {
        let root = u32_at(arg, nvos32::ROOT);
        let parent = u32_at(arg, nvos32::PARENT);
        let function = u32_at(arg, nvos32::FUNCTION);
        let client = self.client(file, root)?;
        match function {
            nvos32::FN_FREE => {
                if u32_at(arg, FREE_FLAGS) & FREE_FLAGS_MEMORY_HANDLE_PROVIDED == 0 {
                    return Err(status::INVALID_ARGUMENT);
                }
                self.free_object(root, u32_at(arg, nvos32::MEMORY));
                Ok(())
            }
            FN_INFO => {
                let gpu = client.gpu_of(parent).ok_or(status::OBJECT_NOT_FOUND)?;
                let card = self.memory.card(gpu);
                let free = card.capacity.saturating_sub(card.used);
                put_u64(arg, TOTAL, card.capacity);
                put_u64(arg, FREE, free);
                put_u64(arg, INFO_SIZE, free);
                Ok(())
            }
            _ => {
                let fields = fields(function).ok_or(status::INVALID_ARGUMENT)?;
                self.vid_heap_alloc(file, arg, function, &fields)
            }
        }
    }

    fn vid_heap_alloc(
        &mut self,
        file: u64,
        arg: &mut [u8],
        function: u32,
        fields: &Fields,
    ) -> Result<(), RmStatus> {
        let root = u32_at(arg, nvos32::ROOT);
        let parent = u32_at(arg, nvos32::PARENT);
        if u32_at(arg, OWNER) == 0 {
            return Err(status::INVALID_OWNER);
        }
        let flags = u32_at(arg, nvos32::FLAGS);
        let attr = u32_at(arg, fields.attr);
        let wanted = if flags & FLAGS_MEMORY_HANDLE_PROVIDED == 0 {
            0
        } else {
            u32_at(arg, nvos32::MEMORY)
        };
        let size = if function == nvos32::FN_ALLOC_TILED {
            let height = u64::from(u32_at(arg, nvos32::TILED_HEIGHT));
            height * u64::from(u32_at(arg, nvos32::TILED_PITCH))
        } else {
            u64_at(arg, fields.size)
        };
        let in_host = u32_at(arg, fields.attr2) & heap::ATTR2_USE_EGM != 0
            || attr >> heap::ATTR_LOCATION_SHIFT & heap::ATTR_LOCATION_MASK
                != heap::ATTR_LOCATION_VIDMEM;
        let (handle, granted) = if flags & heap::FLAGS_VIRTUAL != 0 {
            let class = class::NV50_MEMORY_VIRTUAL;
            (self.insert(root, parent, wanted, class, Kind::Plain)?, size)
        } else if in_host {
            let kind = Kind::HostMemory { bytes: size };
            let class = class::NV01_MEMORY_SYSTEM;
            (self.insert(root, parent, wanted, class, kind)?, size)
        } else {
            let request = MemoryRequest {
                client: root,
                parent,
                new: wanted,
                class: class::NV01_MEMORY_LOCAL_USER,
                size,
                attr,
            };
            self.alloc_memory(file, &request)?
        };
        put_u32(arg, nvos32::MEMORY, handle);
        put_u64(arg, fields.size, granted);
        put_u64(arg, fields.limit, granted.saturating_sub(1));
        Ok(())
    }
}
