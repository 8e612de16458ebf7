//! The driver's model: open files, clients and their objects, memory, and the answers to every call.
//!
//! [`Sim`] is pure. It is given a call, the time and a [`Caller`] through which it reads and writes the
//! memory of the process that called, and answers as driver 580.159.04 does:
//!
//! - only number and size of a command count, and the size must be exact;
//! - a call that the driver understands returns 0 with an RM status in its structure, one that it does
//!   not understands fails with an errno;
//! - a client is usable only through the open file that made it;
//! - memory returns when the last reference to it goes, by whatever way.

mod control;
mod escape;
mod heap;
mod object;
mod uvm;
pub mod vidmem;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use gpuquota_common::nvidia::{class, status};

use crate::scheduler::{GroupId, Progress, Scheduler, Timing};
use crate::state;
use object::{Client, Kind, Object};
use vidmem::{Purpose, VideoMemory};

/// Handle of the first client.
pub const FIRST_CLIENT: u32 = 0xc1d0_0001;
/// Time slice of a channel group that nobody set, microseconds.
pub const DEFAULT_SLICE_US: u64 = 1024;
/// Driver version that the model follows.
pub const DRIVER_VERSION: &str = "580.159.04";

/// A file of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// `nvidiactl`.
    Ctl,
    /// `nvidiaN`.
    Gpu(u32),
    /// `nvidia-uvm`.
    Uvm,
}

impl Node {
    /// Name of the file.
    pub fn name(self) -> String {
        match self {
            Self::Ctl => "nvidiactl".into(),
            Self::Gpu(minor) => format!("nvidia{minor}"),
            Self::Uvm => "nvidia-uvm".into(),
        }
    }
}

/// The memory of the caller could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// The process behind a call.
pub trait Caller {
    /// Its process id (not the thread's).
    fn pid(&self) -> u32;
    /// Reads its memory.
    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), Fault>;
    /// Writes its memory.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault>;
    /// Whether it has the given file open, by whatever way it came to it.
    fn has_open(&self, node: Node) -> bool;
    /// Whether it may raise priorities (`CAP_SYS_NICE`).
    fn may_nice(&self) -> bool;
}

/// How the cards and the driver are set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The cards.
    pub gpus: Vec<GpuConfig>,
    /// What NVML shows for a process that has a context and nothing else, bytes.
    pub context_overhead: u64,
    /// The part of it that the driver takes by itself, bytes.
    pub context_hidden: u64,
    /// Scheduler costs.
    pub timing: Timing,
}

/// What NVML showed for a fresh context on the recorded card.
pub const CONTEXT_OVERHEAD: u64 = 520 << 20;
/// What the recorded context's memory objects do not explain of it.
pub const CONTEXT_HIDDEN: u64 = 2 << 20;

/// A card.
#[derive(Clone, Debug)]
pub struct GpuConfig {
    /// Bytes.
    pub memory: u64,
    /// UUID, without the `GPU-`.
    pub uuid: [u8; 16],
    /// Marketing name.
    pub name: String,
}

impl GpuConfig {
    /// The UUID as NVML writes it.
    pub fn uuid_text(&self) -> String {
        let mut hex = String::new();
        for byte in self.uuid {
            // Writing to a string does not fail.
            let _ = write!(hex, "{byte:02x}");
        }
        format!(
            "GPU-{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        )
    }

    /// Reads a UUID, with or without `GPU-`.
    pub fn parse_uuid(text: &str) -> Result<[u8; 16], String> {
        let wrong = || format!("{text:?} is not a UUID");
        let hex: String = text
            .trim_start_matches("GPU-")
            .chars()
            .filter(|c| *c != '-')
            .collect();
        if hex.len() != 32 || !hex.is_ascii() {
            return Err(wrong());
        }
        let mut uuid = [0; 16];
        for (index, byte) in uuid.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).map_err(|_| wrong())?;
        }
        Ok(uuid)
    }

    /// A card with the UUID that the index has by default.
    pub fn numbered(index: u32, memory: u64) -> Self {
        let mut uuid = *b"\x51\x3a\x6d\x1e\x0c\x0d\x4e\x00\x9a\x70simgpu";
        uuid[7] = u8::try_from(index).unwrap_or(u8::MAX);
        Self {
            memory,
            uuid,
            name: "Simulated H200".into(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            gpus: (0..2)
                .map(|index| GpuConfig::numbered(index, 16 << 30))
                .collect(),
            context_overhead: CONTEXT_OVERHEAD,
            context_hidden: CONTEXT_HIDDEN,
            timing: Timing::default(),
        }
    }
}

/// RM's id of the card with an index.
pub fn gpu_id(index: usize) -> u32 {
    u32::from(pci_bus(index)) << 8
}

/// PCI bus of the card with an index.
pub fn pci_bus(index: usize) -> u8 {
    u8::try_from(index + 1).unwrap_or(u8::MAX)
}

/// State of an open file of the driver.
#[derive(Debug)]
struct OpenFile {
    node: Node,
    pid: u32,
    /// Control file that `REGISTER_FD` tied this one to.
    registered: Option<u64>,
    /// Closed by user space, but another file still refers to it.
    closed: bool,
    uvm: uvm::Space,
}

/// Video memory that is asked for, by whichever call.
struct MemoryRequest {
    client: u32,
    parent: u32,
    new: u32,
    class: u32,
    size: u64,
    attr: u32,
}

/// An RM status other than OK.
type RmStatus = u32;

/// The model.
#[derive(Debug)]
pub struct Sim {
    config: Config,
    files: HashMap<u64, OpenFile>,
    clients: BTreeMap<u32, Client>,
    next_client: u32,
    memory: VideoMemory,
    /// Memory that no call asked for, by process and card.
    hidden: BTreeMap<(u32, usize), vidmem::BlockId>,
    schedulers: Vec<Scheduler>,
    xids: Vec<Vec<state::XidState>>,
    failures: Vec<(RmStatus, u64)>,
    calls: BTreeMap<(Node, u32), u64>,
    names_one: bool,
}

impl Sim {
    /// A driver that was just loaded.
    pub fn new(config: Config) -> Self {
        Self {
            files: HashMap::new(),
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            memory: VideoMemory::new(config.gpus.iter().map(|gpu| gpu.memory)),
            hidden: BTreeMap::new(),
            schedulers: config
                .gpus
                .iter()
                .map(|_| Scheduler::new(config.timing))
                .collect(),
            xids: vec![Vec::new(); config.gpus.len()],
            failures: Vec::new(),
            calls: BTreeMap::new(),
            names_one: false,
            config,
        }
    }

    /// How it was set up.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The memory of the cards.
    pub fn memory(&self) -> &VideoMemory {
        &self.memory
    }

    /// The memory of the cards, to change it from outside.
    pub fn memory_mut(&mut self) -> &mut VideoMemory {
        &mut self.memory
    }

    /// Runs the cards to `now` nanoseconds.
    pub fn advance(&mut self, now: u64) {
        for scheduler in &mut self.schedulers {
            scheduler.advance(now);
        }
    }

    /// A process opened a file; `file` identifies the open file from now on.
    pub fn open(&mut self, file: u64, node: Node, pid: u32) {
        self.files.insert(
            file,
            OpenFile {
                node,
                pid,
                registered: None,
                closed: false,
                uvm: uvm::Space::default(),
            },
        );
    }

    /// Whether a process opened the node itself and the file is still open.
    fn opened_by(&self, node: Node, pid: u32) -> bool {
        self.files
            .values()
            .any(|file| file.node == node && file.pid == pid && !file.closed)
    }

    /// The last descriptor of an open file is gone.
    pub fn release(&mut self, file: u64) {
        let Some(open) = self.files.get_mut(&file) else {
            return;
        };
        open.closed = true;
        let registered = open.registered.take();
        if !self.is_referenced(file) {
            self.drop_file(file);
        }
        if let Some(ctl) = registered
            && self.files.get(&ctl).is_some_and(|open| open.closed)
            && !self.is_referenced(ctl)
        {
            self.drop_file(ctl);
        }
    }

    /// `REGISTER_FD`: ties `file` to a control file, which stays alive as long as `file` is open.
    /// Returns false if `ctl` is no control file or `file` has one already.
    pub fn register(&mut self, file: u64, ctl: u64) -> bool {
        if self.files.get(&ctl).map(|open| open.node) != Some(Node::Ctl) {
            return false;
        }
        match self.files.get_mut(&file) {
            Some(open) if open.registered.is_none_or(|before| before == ctl) && file != ctl => {
                open.registered = Some(ctl);
                true
            }
            _ => false,
        }
    }

    /// The next `count` memory allocations fail with `status`.
    pub fn fail_allocations(&mut self, status: u32, count: u64) {
        self.failures.push((status, count));
    }

    /// Whether NVML lays each of its spans at one process.
    pub fn name_one(&mut self, names_one: bool) {
        self.names_one = names_one;
    }

    /// Raises an Xid on a card, and tells when that was; with a process, its channels stop for good.
    pub fn raise_xid(&mut self, gpu: usize, code: u32, pid: Option<u32>) -> u64 {
        let at_ns = self.schedulers[gpu].now();
        self.xids[gpu].push(state::XidState { at_ns, code, pid });
        if let Some(pid) = pid {
            self.schedulers[gpu].fault(pid, code);
        }
        at_ns
    }

    /// Hands in kernels on a channel; returns its progress, or `None` without such a channel.
    pub fn submit(
        &mut self,
        client: u32,
        channel: u32,
        each_ns: u64,
        count: u64,
    ) -> Option<Progress> {
        let (gpu, group) = self.channel(client, channel)?;
        self.schedulers[gpu].submit(group, channel, each_ns, count)?;
        self.schedulers[gpu].progress(group, channel)
    }

    /// Progress of a channel.
    pub fn progress(&self, client: u32, channel: u32) -> Option<Progress> {
        let (gpu, group) = self.channel(client, channel)?;
        self.schedulers[gpu].progress(group, channel)
    }

    /// When a mark on a channel was reached, nanoseconds.
    pub fn mark(&self, client: u32, channel: u32, number: u64) -> Option<u64> {
        let (gpu, group) = self.channel(client, channel)?;
        self.schedulers[gpu].mark(group, channel, number)
    }

    /// When something may change for whoever waits for kernel `number` of a channel.
    pub fn next_event(&self, client: u32, channel: u32, number: u64) -> Option<u64> {
        let (gpu, group) = self.channel(client, channel)?;
        self.schedulers[gpu].next_event(Some((group, channel, number)))
    }

    /// Notes a call for the counters of the state.
    pub fn count_call(&mut self, node: Node, number: u32) {
        *self.calls.entry((node, number)).or_default() += 1;
    }

    fn channel(&self, client: u32, channel: u32) -> Option<(usize, GroupId)> {
        match self.clients.get(&client)?.get(channel)?.kind {
            Kind::Channel { gpu, group } => Some((gpu, (client, group))),
            _ => None,
        }
    }

    fn is_referenced(&self, file: u64) -> bool {
        self.files
            .values()
            .any(|open| open.registered == Some(file))
    }

    fn drop_file(&mut self, file: u64) {
        let Some(open) = self.files.remove(&file) else {
            return;
        };
        let owned: Vec<u32> = self
            .clients
            .iter()
            .filter(|(_, client)| client.file == file)
            .map(|(handle, _)| *handle)
            .collect();
        for handle in owned {
            self.free_client(handle);
        }
        open.uvm.release(&mut self.memory);
    }

    /// The file by which a call counts: a GPU's file acts for the control file it is tied to.
    fn identity(&self, file: u64) -> u64 {
        self.files
            .get(&file)
            .and_then(|open| open.registered)
            .unwrap_or(file)
    }

    /// A client, if it may be used through `file`.
    fn client(&mut self, file: u64, handle: u32) -> Result<&mut Client, RmStatus> {
        let identity = self.identity(file);
        self.clients
            .get_mut(&handle)
            .filter(|client| client.file == identity)
            .ok_or(status::INVALID_CLIENT)
    }

    /// Makes a client under the next handle; the one that the caller may wish for is ignored.
    fn alloc_client(&mut self, file: u64, caller: &dyn Caller) -> u32 {
        let handle = self.next_client;
        self.next_client += 1;
        let identity = self.identity(file);
        self.clients
            .insert(handle, Client::new(identity, caller.pid()));
        handle
    }

    /// Puts an object into a client's tree and does what its kind needs.
    fn insert(
        &mut self,
        client_handle: u32,
        parent: u32,
        handle: u32,
        class: u32,
        kind: Kind,
    ) -> Result<u32, RmStatus> {
        let client = self
            .clients
            .get_mut(&client_handle)
            .ok_or(status::INVALID_CLIENT)?;
        if parent != client_handle && client.get(parent).is_none() {
            return Err(status::OBJECT_NOT_FOUND);
        }
        check_new(client, client_handle, handle)?;
        let handle = if handle == 0 {
            client.generate()
        } else {
            handle
        };
        let pid = client.pid;
        match kind {
            Kind::Group { gpu, .. } => {
                self.take_context(client_handle, gpu)?;
                self.schedulers[gpu].add_group((client_handle, handle), pid, DEFAULT_SLICE_US);
            }
            Kind::Channel { gpu, group } => {
                if group == handle {
                    // A channel without a group is scheduled as a group of one.
                    self.take_context(client_handle, gpu)?;
                    self.schedulers[gpu].add_group((client_handle, group), pid, DEFAULT_SLICE_US);
                }
                self.schedulers[gpu].add_channel((client_handle, group), handle);
            }
            _ => {}
        }
        if let Some(client) = self.clients.get_mut(&client_handle) {
            client.insert(
                handle,
                Object {
                    class,
                    parent,
                    kind,
                    shared: false,
                },
            );
        }
        Ok(handle)
    }

    fn take_context(&mut self, client_handle: u32, gpu: usize) -> Result<(), RmStatus> {
        let hidden = self.config.context_hidden;
        let Some(client) = self.clients.get_mut(&client_handle) else {
            return Err(status::INVALID_CLIENT);
        };
        if let Some((_, groups)) = client.contexts.get_mut(&gpu) {
            *groups += 1;
            return Ok(());
        }
        let block = self
            .memory
            .take(gpu, hidden, client.pid, Purpose::Context)
            .ok_or(status::NO_MEMORY)?;
        client.contexts.insert(gpu, (block, 1));
        Ok(())
    }

    /// Gives a process memory that none of its calls asked for, in place of what it was given so before.
    pub fn hide(&mut self, gpu: usize, pid: u32, bytes: u64) -> bool {
        if let Some(block) = self.hidden.remove(&(pid, gpu)) {
            self.memory.release(block);
        }
        if bytes == 0 {
            return true;
        }
        let block = self.memory.take(gpu, bytes, pid, Purpose::Context);
        if let Some(block) = block {
            self.hidden.insert((pid, gpu), block);
        }
        block.is_some()
    }

    fn drop_context(&mut self, client_handle: u32, gpu: usize) {
        let Some(client) = self.clients.get_mut(&client_handle) else {
            return;
        };
        if let Some((block, groups)) = client.contexts.get_mut(&gpu) {
            *groups -= 1;
            if *groups == 0 {
                self.memory.release(*block);
                client.contexts.remove(&gpu);
            }
        }
    }

    /// Frees an object and all below it. An unknown handle is accepted.
    fn free_object(&mut self, client_handle: u32, handle: u32) {
        let Some(client) = self.clients.get_mut(&client_handle) else {
            return;
        };
        if client.get(handle).is_none() {
            return;
        }
        for doomed in client.subtree(handle) {
            let Some(object) = self
                .clients
                .get_mut(&client_handle)
                .and_then(|client| client.remove(doomed))
            else {
                continue;
            };
            match object.kind {
                Kind::Memory { block } => self.memory.release(block),
                Kind::Group { gpu, .. } => {
                    self.schedulers[gpu].remove_group((client_handle, doomed));
                    self.drop_context(client_handle, gpu);
                }
                Kind::Channel { gpu, group } => {
                    self.schedulers[gpu].remove_channel((client_handle, group), doomed);
                    if group == doomed {
                        self.schedulers[gpu].remove_group((client_handle, group));
                        self.drop_context(client_handle, gpu);
                    }
                }
                _ => {}
            }
        }
    }

    fn free_client(&mut self, handle: u32) {
        let Some(client) = self.clients.get(&handle) else {
            return;
        };
        let pid = client.pid;
        let top: Vec<u32> = client
            .objects()
            .filter(|(_, object)| object.parent == handle)
            .map(|(object, _)| object)
            .collect();
        for object in top {
            self.free_object(handle, object);
        }
        self.clients.remove(&handle);
        if self.clients.values().all(|client| client.pid != pid) {
            let last: Vec<_> = self
                .hidden
                .keys()
                .filter(|(of, _)| *of == pid)
                .copied()
                .collect();
            for key in last {
                self.hide(key.1, key.0, 0);
            }
        }
    }

    /// Whether an allocation was asked to fail.
    fn planned_failure(&mut self) -> Result<(), RmStatus> {
        let Some((status, left)) = self.failures.first_mut() else {
            return Ok(());
        };
        let status = *status;
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.failures.remove(0);
        }
        Err(status)
    }

    /// As [`Self::client`], for calls that make and free objects: they name a client that does not exist
    /// otherwise.
    fn owner(&mut self, file: u64, handle: u32) -> Result<&mut Client, RmStatus> {
        if self.clients.contains_key(&handle) {
            self.client(file, handle)
        } else {
            Err(status::INVALID_OBJECT_HANDLE)
        }
    }

    /// Takes memory on the card of `parent` and makes it an object; returns its handle and size.
    fn alloc_memory(&mut self, file: u64, request: &MemoryRequest) -> Result<(u32, u64), RmStatus> {
        let &MemoryRequest {
            client: client_handle,
            parent,
            new: handle,
            class,
            size,
            attr,
        } = request;
        let client = self.owner(file, client_handle)?;
        let pid = client.pid;
        let gpu = match client.get(parent).map(|object| &object.kind) {
            Some(Kind::Device { gpu } | Kind::Subdevice { gpu }) => *gpu,
            Some(_) => return Err(status::INVALID_OBJECT_PARENT),
            None if parent == client_handle => return Err(status::INVALID_OBJECT_PARENT),
            None => return Err(status::OBJECT_NOT_FOUND),
        };
        check_new(client, client_handle, handle)?;
        if size == 0 {
            return Err(status::INVALID_ARGUMENT);
        }
        self.planned_failure()?;
        // A size that does not fit into 64 bits does not fit onto a card either.
        let granted = vidmem::granted_size(size, attr).unwrap_or(u64::MAX);
        let block = self
            .memory
            .take(gpu, granted, pid, Purpose::Object)
            .ok_or(status::NO_MEMORY)?;
        let result = self.insert(client_handle, parent, handle, class, Kind::Memory { block });
        if result.is_err() {
            self.memory.release(block);
        }
        result.map(|handle| (handle, granted))
    }

    /// Everything there is to know; without `clients` only what concerns the cards.
    pub fn state(&self, now_ns: u64, unix_us: u64, clients: bool) -> state::State {
        state::State {
            driver_version: DRIVER_VERSION.into(),
            now_ns,
            unix_us,
            gpus: (0..self.config.gpus.len())
                .map(|gpu| self.gpu_state(gpu))
                .collect(),
            names_one: self.names_one,
            clients: self
                .clients
                .iter()
                .filter(|_| clients)
                .map(|(handle, client)| self.client_state(*handle, client))
                .collect(),
            files: self.files.values().filter(|file| !file.closed).count() as u64,
            calls: self
                .calls
                .iter()
                .map(|((node, number), count)| (format!("{} {number:#x}", node.name()), *count))
                .collect(),
        }
    }

    fn gpu_state(&self, gpu: usize) -> state::GpuState {
        let config = &self.config.gpus[gpu];
        let card = self.memory.card(gpu);
        let scheduler = &self.schedulers[gpu];
        let (switches, switching_ns) = scheduler.switches();
        let mut processes: BTreeMap<u32, state::ProcessState> = BTreeMap::new();
        for (pid, held) in self.memory.held(gpu) {
            let process = processes.entry(pid).or_default();
            process.rm_bytes = held.objects;
            process.hidden_bytes = held.context;
            process.managed_bytes = held.managed;
        }
        for (pid, busy_ns) in scheduler.busy() {
            processes.entry(*pid).or_default().busy_ns = *busy_ns;
        }
        for client in self.clients.values() {
            if client.contexts.contains_key(&gpu) {
                processes.entry(client.pid).or_default().has_context = true;
            }
        }
        state::GpuState {
            index: u32::try_from(gpu).unwrap_or_default(),
            uuid: config.uuid_text(),
            name: config.name.clone(),
            gpu_id: gpu_id(gpu),
            pci_bus: pci_bus(gpu),
            capacity: card.capacity,
            used: card.used,
            peak: card.peak,
            granted: card.granted,
            allocations: card.allocations,
            refused: card.refused,
            switches,
            switching_ns,
            processes,
            history: scheduler
                .history()
                .map(|bucket| state::SpanState {
                    end_ns: (bucket.index + 1) * crate::scheduler::BUCKET_NS,
                    busy: bucket.busy.clone(),
                })
                .collect(),
            xids: self.xids[gpu].clone(),
        }
    }

    fn client_state(&self, handle: u32, client: &Client) -> state::ClientState {
        let mut result = state::ClientState {
            handle,
            pid: client.pid,
            objects: client.object_count() as u64,
            ..state::ClientState::default()
        };
        for (object_handle, object) in client.objects() {
            match object.kind {
                Kind::Memory { block } => {
                    let (gpu, bytes) = self.memory.block(block).unwrap_or_default();
                    result.memory.push(state::MemoryState {
                        handle: object_handle,
                        class: object.class,
                        gpu: u32::try_from(gpu).unwrap_or_default(),
                        bytes,
                    });
                }
                Kind::Group { gpu, interleave } => {
                    let id = (handle, object_handle);
                    let scheduler = &self.schedulers[gpu];
                    result.groups.push(state::GroupState {
                        handle: object_handle,
                        gpu: u32::try_from(gpu).unwrap_or_default(),
                        slice_us: scheduler.slice_us(id).unwrap_or_default(),
                        interleave,
                        channels: client
                            .objects()
                            .filter(|(_, o)| {
                                matches!(o.kind, Kind::Channel { group, .. } if group == object_handle)
                            })
                            .map(|(channel, _)| {
                                let progress = scheduler.progress(id, channel);
                                state::ChannelState {
                                    handle: channel,
                                    disabled: scheduler.is_disabled(id, channel),
                                    submitted: progress.map_or(0, |p| p.submitted),
                                    completed: progress.map_or(0, |p| p.completed),
                                }
                            })
                            .collect(),
                    });
                }
                _ => {}
            }
        }
        result
    }
}

/// Whether a new object may get a handle; 0 asks for any.
fn check_new(client: &Client, client_handle: u32, handle: u32) -> Result<(), RmStatus> {
    if handle == client_handle {
        Err(status::INVALID_OBJECT_PARENT)
    } else if handle != 0 && client.get(handle).is_some() {
        Err(status::INSERT_DUPLICATE_NAME)
    } else {
        Ok(())
    }
}

/// Whether a class is memory that some host page backs, with `NV_MEMORY_ALLOCATION_PARAMS`.
const fn is_host_memory(class: u32) -> bool {
    matches!(
        class,
        class::NV01_MEMORY_SYSTEM | class::NV_MEMORY_EXTENDED_USER
    )
}
