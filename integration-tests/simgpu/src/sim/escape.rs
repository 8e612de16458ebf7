//! The escapes of `nvidiactl` and `nvidiaN`: which file takes which number with which size, and what each does.

use gpuquota_common::nvidia::{
    self as nv, IoctlCmd, card, class, heap, memparams, nr, nvos00, nvos02, nvos55, nvos64, status,
    xfer,
};

use super::object::Kind;
use super::{Caller, Fault, MemoryRequest, Node, RmStatus, Sim, gpu_id, is_host_memory, pci_bus};
use crate::bytes::{put, put_u32, put_u64, u32_at, u64_at};

/// Events tied to a file: the classes that a GPU's file takes too.
const EVENT_CLASSES: [u32; 3] = [0x05, 0x78, 0x79];
/// Largest structure that `IOCTL_XFER_CMD` carries.
const XFER_MAX: usize = 16384;
/// `NV_OS_DESC_MEMORY`: limit.
const OS_DESC_LIMIT: usize = 24;
const OS_DESC_SIZE: usize = 40;
/// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS`: size and engine, of which 0 is none.
const GROUP_PARAMS_SIZE: usize = 20;
const GROUP_PARAMS_ENGINE: usize = 12;
/// What a real driver answered to the flag for serialised parameters with plain ones.
const NOT_SERIALISED: RmStatus = 0x6a;
/// What a real driver answered to the legacy call for a register aperture.
const NO_APERTURE: RmStatus = 0x29;
/// A register aperture, known to the legacy call.
const NV01_MEMORY_LOCAL_PRIVILEGED: u32 = 0x3f;
/// Size that a legacy address range has whatever was asked.
const VIRTUAL_SIZE: u64 = 1 << 40;
/// `NV0080_ALLOC_PARAMETERS`: device instance.
const DEVICE_ALLOC_ID: usize = 0;

/// Where an escape is accepted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Ctl,
    Gpu,
    Any,
}

impl Sim {
    /// Answers an escape. `arg` holds the structure and takes the answer.
    ///
    /// # Errors
    /// The errno that the call fails with.
    pub fn escape(
        &mut self,
        file: u64,
        cmd: IoctlCmd,
        arg: &mut [u8],
        caller: &dyn Caller,
    ) -> Result<(), i32> {
        let node = self.files.get(&file).ok_or(libc::EBADF)?.node;
        if usize::from(cmd.size) != arg.len() {
            return Err(libc::EINVAL);
        }
        if cmd.nr == nr::IOCTL_XFER_CMD {
            return self.transfer(file, node, arg, caller);
        }
        self.plain_escape(file, node, u32::from(cmd.nr), arg, caller)
    }

    /// `IOCTL_XFER_CMD`: another escape by pointer. It does not nest.
    fn transfer(
        &mut self,
        file: u64,
        node: Node,
        arg: &[u8],
        caller: &dyn Caller,
    ) -> Result<(), i32> {
        if arg.len() != usize::from(xfer::SIZE) {
            return Err(libc::EINVAL);
        }
        let inner = u32_at(arg, xfer::CMD);
        let size = u32_at(arg, xfer::INNER_SIZE) as usize;
        let pointer = u64_at(arg, xfer::PTR);
        if size > XFER_MAX {
            return Err(libc::EINVAL);
        }
        let mut buf = vec![0; size];
        caller
            .read(pointer, &mut buf)
            .map_err(|Fault| libc::EFAULT)?;
        self.plain_escape(file, node, inner, &mut buf, caller)?;
        caller.write(pointer, &buf).map_err(|Fault| libc::EFAULT)
    }

    fn plain_escape(
        &mut self,
        file: u64,
        node: Node,
        number: u32,
        arg: &mut [u8],
        caller: &dyn Caller,
    ) -> Result<(), i32> {
        let number = u8::try_from(number).map_err(|_| libc::EINVAL)?;
        self.count_call(node, number.into());
        let on = accepted(number, arg.len()).ok_or(libc::EINVAL)?;
        let event = number == nr::RM_ALLOC && EVENT_CLASSES.contains(&u32_at(arg, nvos64::CLASS));
        let fits = match on {
            On::Ctl => node == Node::Ctl || (event && matches!(node, Node::Gpu(_))),
            On::Gpu => matches!(node, Node::Gpu(_)),
            On::Any => node != Node::Uvm,
        };
        if !fits {
            return Err(libc::EINVAL);
        }
        match number {
            nr::RM_ALLOC => self.rm_alloc(file, arg, caller),
            nr::RM_FREE => self.rm_free(file, arg),
            nr::RM_CONTROL => self.rm_control(file, arg, caller),
            nr::RM_ALLOC_MEMORY => self.rm_alloc_memory(file, arg),
            nr::RM_ALLOC_OBJECT => {
                let result = self.alloc(
                    file,
                    &Request {
                        client: u32_at(arg, 0),
                        parent: u32_at(arg, 4),
                        new: u32_at(arg, 8),
                        class: u32_at(arg, 12),
                        params: 0,
                    },
                    caller,
                );
                put_u32(arg, 16, result.err().unwrap_or(status::OK));
            }
            nr::RM_DUP_OBJECT => self.rm_dup(file, arg, caller),
            nr::RM_SHARE => {
                let result = self.share(file, u32_at(arg, 0), u32_at(arg, 4));
                put_u32(arg, 20, result.err().unwrap_or(status::OK));
            }
            nr::RM_VID_HEAP_CONTROL => self.vid_heap(file, arg),
            nr::CARD_INFO => self.card_info(arg),
            nr::CHECK_VERSION_STR => put_u32(arg, 4, 1),
            // Memory block size 0: the card's memory is no NUMA node.
            nr::SYS_PARAMS => arg.fill(0),
            _ => {
                if let Some(offset) = other_status_offset(number) {
                    let client = u32_at(arg, 0);
                    let result = self.client(file, client).map(|_| ());
                    put_u32(arg, offset, result.err().unwrap_or(status::OK));
                }
            }
        }
        Ok(())
    }

    /// `RM_ALLOC` in both layouts.
    fn rm_alloc(&mut self, file: u64, arg: &mut [u8], caller: &dyn Caller) {
        let long = arg.len() == usize::from(nvos64::SIZE);
        let result = if long && u32_at(arg, nvos64::FLAGS) & nv::NVOS64_FLAGS_FINN != 0 {
            // Plain parameters have no header of serialised ones.
            Err(NOT_SERIALISED)
        } else {
            self.alloc(
                file,
                &Request {
                    client: u32_at(arg, nvos64::ROOT),
                    parent: u32_at(arg, nvos64::PARENT),
                    new: u32_at(arg, nvos64::NEW),
                    class: u32_at(arg, nvos64::CLASS),
                    params: u64_at(arg, nvos64::PARAMS),
                },
                caller,
            )
        };
        if let Ok(handle) = result {
            put_u32(arg, nvos64::NEW, handle);
        }
        let offset = if long {
            nvos64::STATUS
        } else {
            nvos64::STATUS_NVOS21
        };
        put_u32(arg, offset, result.err().unwrap_or(status::OK));
    }

    fn alloc(
        &mut self,
        file: u64,
        request: &Request,
        caller: &dyn Caller,
    ) -> Result<u32, RmStatus> {
        if class::is_client(request.class) {
            return Ok(self.alloc_client(file, caller));
        }
        let &Request {
            client: client_handle,
            parent,
            new,
            class,
            params,
        } = request;
        let client = self.owner(file, client_handle)?;
        let parent_kind = client.get(parent).map(|object| object.kind.clone());
        if parent_kind.is_none() && parent != client_handle {
            return Err(status::OBJECT_NOT_FOUND);
        }
        let kind = match class {
            class::NV01_DEVICE_0 => {
                if parent != client_handle {
                    return Err(status::INVALID_OBJECT_PARENT);
                }
                let instance = if params == 0 {
                    0
                } else {
                    let mut id = [0; 4];
                    read(caller, params + DEVICE_ALLOC_ID as u64, &mut id)?;
                    u32::from_ne_bytes(id)
                };
                if instance as usize >= self.config.gpus.len() {
                    return Err(status::INVALID_CLASS);
                }
                let node = Node::Gpu(instance);
                if !self.opened_by(node, caller.pid()) && !caller.has_open(node) {
                    return Err(status::INSUFFICIENT_PERMISSIONS);
                }
                Kind::Device {
                    gpu: instance as usize,
                }
            }
            class::NV20_SUBDEVICE_0 => match parent_kind {
                Some(Kind::Device { gpu }) => {
                    let taken = client.objects().any(|(_, object)| {
                        object.parent == parent && matches!(object.kind, Kind::Subdevice { .. })
                    });
                    if taken {
                        return Err(status::INSUFFICIENT_RESOURCES);
                    }
                    Kind::Subdevice { gpu }
                }
                _ => return Err(status::INVALID_OBJECT_PARENT),
            },
            class::NV01_MEMORY_LOCAL_USER => {
                return self.alloc_video_memory(file, request, caller);
            }
            class if is_host_memory(class) => {
                let mut buf = [0; memparams::MIN_SIZE];
                read_params(caller, params, &mut buf)?;
                let location = u32_at(&buf, memparams::ATTR) >> heap::ATTR_LOCATION_SHIFT
                    & heap::ATTR_LOCATION_MASK;
                let bytes = u64_at(&buf, memparams::REQUESTED);
                if location == heap::ATTR_LOCATION_VIDMEM || bytes == 0 {
                    return Err(status::INVALID_ARGUMENT);
                }
                put_u64(&mut buf, memparams::LIMIT, bytes - 1);
                write(caller, params, &buf)?;
                Kind::HostMemory { bytes }
            }
            class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => {
                let mut buf = [0; OS_DESC_SIZE];
                read_params(caller, params, &mut buf)?;
                Kind::HostMemory {
                    bytes: u64_at(&buf, OS_DESC_LIMIT).saturating_add(1),
                }
            }
            class::KEPLER_CHANNEL_GROUP_A => {
                let Some(Kind::Device { gpu }) = parent_kind else {
                    return Err(status::INVALID_OBJECT_PARENT);
                };
                let mut buf = [0; GROUP_PARAMS_SIZE];
                read_params(caller, params, &mut buf)?;
                if u32_at(&buf, GROUP_PARAMS_ENGINE) == 0 {
                    return Err(status::INVALID_ARGUMENT);
                }
                Kind::Group { gpu, interleave: 0 }
            }
            class if class::is_channel(class) => match parent_kind {
                Some(Kind::Group { gpu, .. }) => Kind::Channel { gpu, group: parent },
                Some(Kind::Device { gpu }) => {
                    // Its own group, under the handle that it gets.
                    let handle = if new == 0 {
                        self.client(file, client_handle)?.generate()
                    } else {
                        new
                    };
                    let kind = Kind::Channel { gpu, group: handle };
                    return self.insert(client_handle, parent, handle, class, kind);
                }
                _ => return Err(status::INVALID_OBJECT_PARENT),
            },
            _ => Kind::Plain,
        };
        self.insert(client_handle, parent, new, class, kind)
    }

    fn alloc_video_memory(
        &mut self,
        file: u64,
        request: &Request,
        caller: &dyn Caller,
    ) -> Result<u32, RmStatus> {
        let mut buf = [0; memparams::MIN_SIZE];
        read_params(caller, request.params, &mut buf)?;
        let attr = u32_at(&buf, memparams::ATTR);
        let location = attr >> heap::ATTR_LOCATION_SHIFT & heap::ATTR_LOCATION_MASK;
        if location != heap::ATTR_LOCATION_VIDMEM
            || u32_at(&buf, memparams::FLAGS) & heap::FLAGS_VIRTUAL != 0
        {
            return Err(status::INVALID_ARGUMENT);
        }
        let (handle, granted) = self.alloc_memory(
            file,
            &MemoryRequest {
                client: request.client,
                parent: request.parent,
                new: request.new,
                class: request.class,
                size: u64_at(&buf, memparams::REQUESTED),
                attr,
            },
        )?;
        put_u64(&mut buf, memparams::REQUESTED, granted);
        put_u64(&mut buf, memparams::LIMIT, granted - 1);
        if let Err(status) = write(caller, request.params, &buf) {
            self.free_object(request.client, handle);
            return Err(status);
        }
        Ok(handle)
    }

    fn rm_free(&mut self, file: u64, arg: &mut [u8]) {
        let root = u32_at(arg, nvos00::ROOT);
        let object = u32_at(arg, nvos00::OBJECT);
        let result = self.owner(file, root).map(|_| ());
        if result.is_ok() {
            if object == root {
                self.free_client(root);
            } else {
                self.free_object(root, object);
            }
        }
        put_u32(arg, nvos00::STATUS, result.err().unwrap_or(status::OK));
    }

    /// The legacy `RM_ALLOC_MEMORY`: the class and the size − 1 in one structure.
    fn rm_alloc_memory(&mut self, file: u64, arg: &mut [u8]) {
        let result = self.legacy_memory(file, arg);
        if let Ok(handle) = result {
            put_u32(arg, nvos02::NEW, handle);
        }
        put_u32(arg, nvos02::STATUS, result.err().unwrap_or(status::OK));
    }

    fn legacy_memory(&mut self, file: u64, arg: &mut [u8]) -> Result<u32, RmStatus> {
        let client_handle = u32_at(arg, nvos02::ROOT);
        let parent = u32_at(arg, nvos02::PARENT);
        let new = u32_at(arg, nvos02::NEW);
        let class = u32_at(arg, nvos02::CLASS);
        let bytes = u64_at(arg, nvos02::LIMIT).wrapping_add(1);
        let client = self.owner(file, client_handle)?;
        match class {
            // Measured: not memory of that size but a window on all memory of the card, as another class.
            class::NV01_MEMORY_LOCAL_USER => {
                let gpu = client.gpu_of(parent).ok_or(status::OBJECT_NOT_FOUND)?;
                let all = self.memory.card(gpu).capacity;
                put_u64(arg, nvos02::LIMIT, all - 1);
                let class = class::NV01_MEMORY_LOCAL_PHYSICAL;
                self.insert(
                    client_handle,
                    parent,
                    new,
                    class,
                    Kind::Window { bytes: all },
                )
            }
            class::NV01_MEMORY_SYSTEM | class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => {
                let kind = Kind::HostMemory { bytes };
                self.insert(client_handle, parent, new, class, kind)
            }
            class::NV01_MEMORY_VIRTUAL => {
                put_u64(arg, nvos02::LIMIT, VIRTUAL_SIZE - 1);
                self.insert(client_handle, parent, new, class, Kind::Plain)
            }
            NV01_MEMORY_LOCAL_PRIVILEGED => Err(NO_APERTURE),
            _ => Err(status::INVALID_CLASS),
        }
    }

    fn rm_dup(&mut self, file: u64, arg: &mut [u8], caller: &dyn Caller) {
        let result = self.dup(file, arg, caller);
        if let Ok(handle) = result {
            put_u32(arg, nvos55::OBJECT, handle);
        }
        put_u32(arg, nvos55::STATUS, result.err().unwrap_or(status::OK));
    }

    fn dup(&mut self, file: u64, arg: &[u8], caller: &dyn Caller) -> Result<u32, RmStatus> {
        let client = u32_at(arg, nvos55::CLIENT);
        let parent = u32_at(arg, nvos55::PARENT);
        let new = u32_at(arg, nvos55::OBJECT);
        let source_client = u32_at(arg, nvos55::CLIENT_SRC);
        let source = u32_at(arg, nvos55::OBJECT_SRC);
        self.client(file, client)?;
        let giver = self
            .clients
            .get(&source_client)
            .ok_or(status::INVALID_OBJECT_HANDLE)?;
        let object = giver.get(source).ok_or(status::OBJECT_NOT_FOUND)?.clone();
        if giver.pid != caller.pid() && !object.shared {
            return Err(status::INSUFFICIENT_PERMISSIONS);
        }
        match object.kind {
            Kind::Memory { block } => {
                let handle =
                    self.insert(client, parent, new, object.class, Kind::Memory { block })?;
                self.memory.refer(block);
                Ok(handle)
            }
            // A second name of a group or channel, by which nothing is scheduled.
            Kind::Group { .. } | Kind::Channel { .. } => {
                self.insert(client, parent, new, object.class, Kind::Plain)
            }
            kind => self.insert(client, parent, new, object.class, kind),
        }
    }

    /// `RM_SHARE`: lets every process duplicate the object.
    fn share(&mut self, file: u64, client: u32, object: u32) -> Result<(), RmStatus> {
        self.client(file, client)?
            .get_mut(object)
            .ok_or(status::OBJECT_NOT_FOUND)?
            .shared = true;
        Ok(())
    }

    fn card_info(&self, arg: &mut [u8]) {
        arg.fill(0);
        for (index, entry) in arg
            .chunks_exact_mut(card::SIZE)
            .take(self.config.gpus.len())
            .enumerate()
        {
            put(entry, card::VALID, &[1]);
            put(entry, card::PCI_BUS, &[pci_bus(index)]);
            put_u32(entry, card::GPU_ID, gpu_id(index));
            put_u32(entry, card::MINOR, u32::try_from(index).unwrap_or_default());
        }
    }
}

/// What `RM_ALLOC` asks for.
struct Request {
    client: u32,
    parent: u32,
    new: u32,
    class: u32,
    params: u64,
}

fn read(caller: &dyn Caller, address: u64, buf: &mut [u8]) -> Result<(), RmStatus> {
    caller
        .read(address, buf)
        .map_err(|Fault| status::INVALID_ADDRESS)
}

fn write(caller: &dyn Caller, address: u64, bytes: &[u8]) -> Result<(), RmStatus> {
    caller
        .write(address, bytes)
        .map_err(|Fault| status::INVALID_ADDRESS)
}

/// Reads parameters that a class cannot do without.
fn read_params(caller: &dyn Caller, address: u64, buf: &mut [u8]) -> Result<(), RmStatus> {
    if address == 0 {
        return Err(status::INVALID_ARGUMENT);
    }
    read(caller, address, buf)
}

/// On which file a number is accepted, if the size is exactly right.
fn accepted(number: u8, size: usize) -> Option<On> {
    let (on, right) = match number {
        nr::RM_ALLOC_MEMORY => (On::Gpu, size == 56),
        nr::RM_ALLOC_OBJECT => (On::Ctl, size == 20),
        nr::RM_FREE | nr::RM_BIND_CONTEXT_DMA => (On::Ctl, size == 16),
        nr::RM_CONTROL | nr::RM_UNMAP_MEMORY => (On::Ctl, size == 32),
        nr::RM_ALLOC => (On::Ctl, size == 32 || size == 48),
        nr::RM_DUP_OBJECT => (On::Ctl, size == 28),
        nr::RM_SHARE => (On::Ctl, size == 24),
        nr::RM_IDLE_CHANNELS | nr::RM_MAP_MEMORY | nr::RM_ALLOC_CONTEXT_DMA2 => {
            (On::Ctl, size == 56)
        }
        nr::RM_VID_HEAP_CONTROL => (On::Ctl, size == 184),
        nr::RM_MAP_MEMORY_DMA => (On::Ctl, size == 64),
        nr::RM_UNMAP_MEMORY_DMA => (On::Ctl, size == 48),
        nr::RM_UPDATE_DEVICE_MAPPING_INFO => (On::Ctl, size == 40),
        nr::CARD_INFO => (On::Ctl, size > 0 && size.is_multiple_of(card::SIZE)),
        nr::ALLOC_OS_EVENT | nr::FREE_OS_EVENT => (On::Any, size == 16),
        nr::STATUS_CODE => (On::Ctl, size == 12),
        nr::CHECK_VERSION_STR => (On::Ctl, size == 72),
        nr::ATTACH_GPUS_TO_FD => (On::Ctl, size > 0 && size.is_multiple_of(4)),
        nr::QUERY_DEVICE_INTR => (On::Gpu, size == 8),
        nr::SYS_PARAMS => (On::Ctl, size == 8),
        nr::NUMA_INFO => (On::Gpu, size == 560),
        nr::WAIT_OPEN_COMPLETE => (On::Any, size == 8),
        _ => return None,
    };
    right.then_some(on)
}

/// Status of the escapes that name a client first and that the model accepts without more.
const fn other_status_offset(number: u8) -> Option<usize> {
    match number {
        nr::RM_IDLE_CHANNELS | nr::RM_ALLOC_CONTEXT_DMA2 => Some(48),
        nr::RM_MAP_MEMORY | nr::RM_UNMAP_MEMORY_DMA => Some(40),
        nr::RM_UNMAP_MEMORY => Some(24),
        nr::RM_MAP_MEMORY_DMA => Some(56),
        nr::RM_BIND_CONTEXT_DMA | nr::ALLOC_OS_EVENT | nr::FREE_OS_EVENT => Some(12),
        nr::RM_UPDATE_DEVICE_MAPPING_INFO => Some(32),
        _ => None,
    }
}
