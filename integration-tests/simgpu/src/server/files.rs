//! The device files: requests of the kernel turned into calls of the model.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, IoctlFlags,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use gpuquota_common::nvidia::{IoctlCmd, nr};

use super::caller::Process;
use super::later::{Core, Shared, Waiter};
use super::trace;
use crate::bytes::{parse_size, put_u32, put_u64, u32_at, u64_at};
use crate::side;
use crate::sim::{Caller, Node};

/// Inode numbers: unlike those of other file systems, and the same in every run.
const INODE_BASE: u64 = 0x51_6d67_0000;
const CONTROL: u64 = INODE_BASE + 1;
const STATE: u64 = INODE_BASE + 2;
const EVENTS: u64 = INODE_BASE + 3;
const GPUS: u64 = INODE_BASE + 4;
const CTL: u64 = INODE_BASE + 0x10;
const UVM: u64 = INODE_BASE + 0x11;
const GPU0: u64 = INODE_BASE + 0x100;

const DIR_READ: u32 = 2 << 30;
const DIR_WRITE: u32 = 1 << 30;
const DIR_BOTH: u32 = DIR_READ | DIR_WRITE;

/// How long the kernel may keep names and attributes: they never change.
const TTL: Duration = Duration::from_hours(24);

/// Inode number of a device file, as `stat` shows it.
pub fn inode_of(node: Node) -> u64 {
    match node {
        Node::Ctl => CTL,
        Node::Uvm => UVM,
        Node::Gpu(minor) => GPU0 + u64::from(minor),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Device(Node),
    Control,
    State,
    Gpus,
    Events,
}

/// The file system.
pub struct Files {
    core: Arc<Core>,
    gpus: u32,
    next_file: AtomicU64,
    /// Text of the state files as it was when they were opened.
    texts: Mutex<HashMap<u64, Vec<u8>>>,
}

impl Files {
    /// A file system on a model.
    pub fn new(core: Arc<Core>) -> Self {
        let gpus = u32::try_from(core.lock().sim.config().gpus.len()).unwrap_or_default();
        Self {
            core,
            gpus,
            next_file: AtomicU64::new(1),
            texts: Mutex::new(HashMap::new()),
        }
    }

    fn names(&self) -> Vec<(String, u64)> {
        let mut names = vec![
            (Node::Ctl.name(), CTL),
            (Node::Uvm.name(), UVM),
            (side::CONTROL_FILE.to_owned(), CONTROL),
            (side::STATE_FILE.to_owned(), STATE),
            (side::GPUS_FILE.to_owned(), GPUS),
            (side::EVENTS_FILE.to_owned(), EVENTS),
        ];
        names.extend((0..self.gpus).map(|minor| {
            let node = Node::Gpu(minor);
            (node.name(), inode_of(node))
        }));
        names
    }

    fn entry(&self, inode: u64) -> Option<Entry> {
        match inode {
            CTL => Some(Entry::Device(Node::Ctl)),
            UVM => Some(Entry::Device(Node::Uvm)),
            CONTROL => Some(Entry::Control),
            STATE => Some(Entry::State),
            GPUS => Some(Entry::Gpus),
            EVENTS => Some(Entry::Events),
            _ => {
                let minor = u32::try_from(inode.checked_sub(GPU0)?).ok()?;
                (minor < self.gpus).then_some(Entry::Device(Node::Gpu(minor)))
            }
        }
    }

    fn attributes(&self, inode: u64) -> Option<FileAttr> {
        let (kind, perm) = if inode == INodeNo::ROOT.0 {
            (FileType::Directory, 0o755)
        } else {
            let perm = match self.entry(inode)? {
                Entry::Device(_) | Entry::Control => 0o666,
                Entry::State | Entry::Gpus | Entry::Events => 0o444,
            };
            (FileType::RegularFile, perm)
        };
        Some(FileAttr {
            ino: INodeNo(inode),
            // Managed memory is a mapping at the offset of its own address.
            size: if self.entry(inode) == Some(Entry::Device(Node::Uvm)) {
                1 << 62
            } else {
                0
            },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        })
    }

    fn device_ioctl(
        &self,
        node: Node,
        file: u64,
        tid: u32,
        cmd: u32,
        input: &[u8],
        reply: ReplyIoctl,
    ) {
        let number = (cmd & 0xff) as u8;
        if node == Node::Uvm {
            let process = Process::new(tid);
            let Some(argument) = process.ioctl_argument() else {
                return reply.error(Errno::EFAULT);
            };
            let (delay, duration) = self.core.with(|shared| {
                let duration = shared.sim.uvm_duration(file, cmd, argument, &process);
                (shared.delay(number), duration)
            });
            let delay = delay + Duration::from_nanos(duration);
            return self.at(delay, move |core| {
                let process = Process::new(tid);
                let result = core.with(|shared| shared.sim.uvm(file, cmd, argument, &process));
                if let Some(trace) = &core.trace {
                    trace.line(&format!("/dev/nvidia-uvm req={cmd:#x} nr={number:#x}"));
                }
                match result {
                    Ok(()) => reply.ioctl(0, &[]),
                    // The kernel makes ENOTTY of ENOSYS: the one answer that cannot be the driver's.
                    Err(errno) => reply.error(Errno::from_i32(errno)),
                }
            });
        }
        if number == nr::REGISTER_FD {
            return self.register_fd(node, file, tid, cmd, input, reply);
        }
        let delay = self.core.lock().delay(number);
        let input = input.to_vec();
        self.at(delay, move |core| {
            match escape(core, node, file, tid, cmd, input) {
                Ok(output) => reply.ioctl(0, &output),
                Err(errno) => reply.error(Errno::from_i32(errno)),
            }
        });
    }

    /// Does `task` now, or later if something slows it down.
    fn at(&self, delay: Duration, task: impl FnOnce(&Core) + Send + 'static) {
        if delay.is_zero() {
            task(&self.core);
        } else {
            self.core.later(delay, task);
        }
    }

    /// `REGISTER_FD` names another descriptor of the caller. Which open file that is, only the kernel knows:
    /// a duplicate of it is asked, which comes back to us as a request on that file.
    fn register_fd(
        &self,
        node: Node,
        file: u64,
        tid: u32,
        cmd: u32,
        input: &[u8],
        reply: ReplyIoctl,
    ) {
        if IoctlCmd::from_raw(cmd).size != 4 || cmd & DIR_BOTH != DIR_BOTH {
            return reply.error(Errno::EINVAL);
        }
        let fd = u32_at(input, 0).cast_signed();
        let input = input.to_vec();
        let core = Arc::clone(&self.core);
        // Not on this thread: it has to answer the question.
        let spawned = std::thread::Builder::new()
            .name("register".into())
            .spawn(move || {
                let pid = Process::new(tid).pid();
                let registered = file_behind(pid, fd)
                    .is_some_and(|ctl| core.with(|shared| shared.sim.register(file, ctl)));
                if let Some(trace) = &core.trace {
                    trace.line(&format!(
                        "/dev/{} nr={:#x} sz=4",
                        node.name(),
                        nr::REGISTER_FD
                    ));
                }
                if registered {
                    reply.ioctl(0, &input);
                } else {
                    reply.error(Errno::EINVAL);
                }
            });
        if spawned.is_err() {
            // The reply went with the closure, which answers EIO when dropped.
            eprintln!("simgpu: cannot start a thread for REGISTER_FD");
        }
    }

    fn side_ioctl(&self, tid: u32, cmd: u32, input: &[u8], reply: ReplyIoctl) {
        let mut arg = input.to_vec();
        match cmd {
            side::SUBMIT => {
                self.core.with(|shared| submit(shared, &mut arg));
                reply.ioctl(0, &arg);
            }
            side::WAIT => {
                let deadline = self.core.now() + side::wait::MAX_MS * 1_000_000;
                self.core.wait(Waiter {
                    client: u32_at(&arg, side::wait::CLIENT),
                    channel: u32_at(&arg, side::wait::CHANNEL),
                    number: u64_at(&arg, side::wait::NUMBER),
                    deadline,
                    answer: Box::new(move |completed, fault, mark| {
                        put_u64(&mut arg, side::wait::FINISHED_NS, mark);
                        put_u64(&mut arg, side::wait::COMPLETED, completed);
                        put_u32(&mut arg, side::wait::FAULT, fault);
                        reply.ioctl(0, &arg);
                    }),
                });
            }
            side::MANAGED => {
                let pid = Process::new(tid).pid();
                self.core.with(|shared| managed(shared, pid, &mut arg));
                reply.ioctl(0, &arg);
            }
            side::INFO => {
                let shared = self.core.lock();
                let config = shared.sim.config();
                put_u64(
                    &mut arg,
                    side::info::CONTEXT_OVERHEAD,
                    config.context_overhead,
                );
                put_u64(&mut arg, side::info::CONTEXT_HIDDEN, config.context_hidden);
                put_u32(&mut arg, side::info::GPUS, self.gpus);
                drop(shared);
                reply.ioctl(0, &arg);
            }
            _ => reply.error(Errno::ENOTTY),
        }
    }

    fn state_text(&self, clients: bool) -> Vec<u8> {
        let unix_us = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(0));
        let shared = self.core.lock();
        let state = shared.sim.state(self.core.now(), unix_us, clients);
        drop(shared);
        let mut text = serde_json::to_vec(&state).unwrap_or_default();
        text.push(b'\n');
        text
    }

    fn events_text(&self) -> Vec<u8> {
        let shared = self.core.lock();
        let mut text = String::new();
        for event in shared.sim.memory().events() {
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{} {} {} {}",
                event.number, event.pid, event.gpu, event.change
            );
        }
        text.into_bytes()
    }
}

/// Answers an escape, moving the structure the way the direction bits of the command make necessary:
/// the driver ignores them, the kernel's file system does not.
fn escape(
    core: &Core,
    node: Node,
    file: u64,
    tid: u32,
    cmd: u32,
    input: Vec<u8>,
) -> Result<Vec<u8>, i32> {
    let process = Process::new(tid);
    let parsed = IoctlCmd::from_raw(cmd);
    let usual = cmd & DIR_BOTH == DIR_BOTH;
    let argument = if usual {
        0
    } else {
        process.ioctl_argument().ok_or(libc::EFAULT)?
    };
    let mut arg = input;
    if cmd & DIR_WRITE == 0 {
        arg = vec![0; usize::from(parsed.size)];
        process.read(argument, &mut arg).map_err(|_| libc::EFAULT)?;
    }
    let mut line = core
        .trace
        .as_ref()
        .map(|_| trace::describe(node, parsed, &arg, &process));
    let result = core.with(|shared| shared.sim.escape(file, parsed, &mut arg, &process));
    if let (Some(trace), Some(line)) = (&core.trace, &mut line) {
        line.push_str(&trace::outcome(parsed, &arg, result));
        trace.line(line);
    }
    result?;
    if cmd & DIR_READ == 0 {
        process.write(argument, &arg).map_err(|_| libc::EFAULT)?;
        arg.clear();
    }
    Ok(arg)
}

/// The open file of the model behind a descriptor of a process.
fn file_behind(pid: u32, fd: i32) -> Option<u64> {
    // SAFETY: plain system calls on numbers; each descriptor is owned by the OwnedFd made of it.
    let pidfd = unsafe { owned(libc::syscall(libc::SYS_pidfd_open, pid, 0)) }?;
    // SAFETY: as above.
    let duplicate = unsafe {
        owned(libc::syscall(
            libc::SYS_pidfd_getfd,
            pidfd.as_raw_fd(),
            fd,
            0,
        ))
    }?;
    let mut file = [0u8; 8];
    // SAFETY: WHO writes eight bytes, which `file` has.
    let result = unsafe {
        libc::ioctl(
            duplicate.as_raw_fd(),
            libc::c_ulong::from(side::WHO),
            file.as_mut_ptr(),
        )
    };
    (result == 0).then(|| u64::from_ne_bytes(file))
}

/// # Safety
/// `result` must be a new descriptor or negative.
unsafe fn owned(result: libc::c_long) -> Option<OwnedFd> {
    let fd = i32::try_from(result).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the caller says that the descriptor is new and nobody else's.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn submit(shared: &mut Shared, arg: &mut [u8]) {
    use side::submit::{
        CHANNEL, CLIENT, COMPLETED, COUNT, EACH_NS, ENTRIES, ENTRY, FAULT, KERNELS, MAX,
    };
    let client = u32_at(arg, CLIENT);
    let count = (u32_at(arg, COUNT) as usize).min(MAX);
    for index in 0..count {
        let at = ENTRIES + index * ENTRY;
        let progress = shared.sim.submit(
            client,
            u32_at(arg, at + CHANNEL),
            u64_at(arg, at + EACH_NS),
            u32_at(arg, at + KERNELS).into(),
        );
        let completed = progress.map_or(u64::MAX, |progress| progress.completed);
        put_u64(arg, at + COMPLETED, completed);
        if let Some(fault) = progress.and_then(|progress| progress.fault) {
            put_u32(arg, FAULT, fault);
        }
    }
}

fn managed(shared: &mut Shared, pid: u32, arg: &mut [u8]) {
    use gpuquota_common::nvidia::status;
    use side::managed::{BASE, CREATE, DESTROY, GPU, LENGTH, OP, QUERY, RESIDENT, STATUS, TOUCH};
    let base = u64_at(arg, BASE);
    let gpu = u32_at(arg, GPU) as usize;
    let gpus = shared.sim.config().gpus.len();
    let memory = shared.sim.memory_mut();
    let result = match u32_at(arg, OP) {
        CREATE => {
            memory.create_managed(pid, base, u64_at(arg, LENGTH));
            Some(0)
        }
        TOUCH if gpu < gpus => memory.touch_managed(pid, base, gpu),
        DESTROY => memory.destroy_managed(pid, base).then_some(0),
        QUERY => memory.managed_resident(pid, base),
        _ => None,
    };
    let status = if result.is_some() {
        status::OK
    } else {
        status::INVALID_ARGUMENT
    };
    put_u32(arg, STATUS, status);
    put_u64(arg, RESIDENT, result.unwrap_or(0));
}

/// Obeys one line written to the control file.
fn command(shared: &mut Shared, line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let gpus = shared.sim.config().gpus.len();
    let gpu = |text: &str| {
        text.parse::<usize>()
            .ok()
            .filter(|gpu| *gpu < gpus)
            .ok_or_else(|| format!("{text:?} is no GPU"))
    };
    match words[..] {
        [] => Ok(()),
        ["capacity", index, size] => {
            let (index, size) = (gpu(index)?, parse_size(size)?);
            shared.sim.memory_mut().set_capacity(index, size);
            Ok(())
        }
        ["hide", index, pid, size] => {
            let (index, size) = (gpu(index)?, parse_size(size)?);
            if shared.sim.hide(index, number(pid)?, size) {
                Ok(())
            } else {
                Err("the card is full".into())
            }
        }
        ["fail", "alloc", status] => {
            shared.sim.fail_allocations(number(status)?, 1);
            Ok(())
        }
        ["fail", "alloc", status, count] => {
            let count = number(count)?;
            shared.sim.fail_allocations(number(status)?, count.into());
            Ok(())
        }
        ["delay", which, ms] => {
            let delay = Duration::from_millis(number(ms)?.into());
            if which == "all" {
                shared.delay_all = delay;
                shared.delays.clear();
            } else {
                let nr =
                    u8::try_from(number(which)?).map_err(|_| format!("{which:?}: above 255"))?;
                shared.delays.insert(nr, delay);
            }
            Ok(())
        }
        ["xid", index, code] => {
            shared.raise_xid(gpu(index)?, number(code)?, None);
            Ok(())
        }
        ["xid", index, code, pid] => {
            let pid = Some(number(pid)?);
            shared.raise_xid(gpu(index)?, number(code)?, pid);
            Ok(())
        }
        ["nvml-names", how @ ("one" | "all")] => {
            shared.sim.name_one(how == "one");
            Ok(())
        }
        ["reset-peak"] => {
            shared.sim.memory_mut().reset_peaks();
            Ok(())
        }
        _ => Err(format!("unknown command {line:?}")),
    }
}

fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is not a number"))
}

impl Filesystem for Files {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = (parent == INodeNo::ROOT)
            .then(|| {
                self.names()
                    .into_iter()
                    .find(|(known, _)| name == known.as_str())
            })
            .flatten()
            .and_then(|(_, inode)| self.attributes(inode));
        match found {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino.0) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<fuser::TimeOrNow>,
        _mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // A shell that writes to the control file truncates it first. Nothing changes.
        match self.attributes(ino.0) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (name, inode)) in self.names().into_iter().enumerate().skip(skip) {
            let next = u64::try_from(index + 1).unwrap_or(u64::MAX);
            if reply.add(INodeNo(inode), next, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(entry) = self.entry(ino.0) else {
            return reply.error(Errno::ENOENT);
        };
        let file = self.next_file.fetch_add(1, Ordering::Relaxed);
        let text = match entry {
            Entry::Device(node) => {
                let pid = Process::new(req.pid()).pid();
                self.core.with(|shared| shared.sim.open(file, node, pid));
                None
            }
            Entry::Control => None,
            Entry::State => Some(self.state_text(true)),
            Entry::Gpus => Some(self.state_text(false)),
            Entry::Events => Some(self.events_text()),
        };
        if let Some(text) = text {
            self.texts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(file, text);
        }
        let flags = if entry == Entry::Device(Node::Uvm) {
            // Shared mappings need the page cache.
            FopenFlags::empty()
        } else {
            FopenFlags::FOPEN_DIRECT_IO
        };
        reply.opened(FileHandle(file), flags);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if self.entry(ino.0) == Some(Entry::Device(Node::Uvm)) {
            return reply.data(&vec![0; size as usize]);
        }
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(text) = texts.get(&fh.0) else {
            return reply.error(Errno::EINVAL);
        };
        let start = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(text.len());
        let end = start.saturating_add(size as usize).min(text.len());
        reply.data(&text[start..end]);
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.entry(ino.0) == Some(Entry::Device(Node::Uvm)) {
            // Pages of a mapping that are written back; they stay in the page cache.
            return reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
        }
        if self.entry(ino.0) != Some(Entry::Control) {
            return reply.error(Errno::EINVAL);
        }
        if req.uid() != 0 {
            return reply.error(Errno::EPERM);
        }
        let text = String::from_utf8_lossy(data);
        let result = self
            .core
            .with(|shared| text.lines().try_for_each(|line| command(shared, line)));
        match result {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX)),
            Err(problem) => {
                eprintln!("simgpu: {}: {problem}", side::CONTROL_FILE);
                reply.error(Errno::EINVAL);
            }
        }
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        match self.entry(ino.0) {
            Some(Entry::Device(_)) => self.core.with(|shared| shared.sim.release(fh.0)),
            _ => {
                self.texts
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&fh.0);
            }
        }
        reply.ok();
    }

    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        if cmd == side::WHO && Process::new(req.pid()).pid() == std::process::id() {
            return reply.ioctl(0, &fh.0.to_ne_bytes());
        }
        match self.entry(ino.0) {
            Some(Entry::Device(node)) => {
                self.device_ioctl(node, fh.0, req.pid(), cmd, in_data, reply);
            }
            Some(Entry::Control) => self.side_ioctl(req.pid(), cmd, in_data, reply),
            _ => reply.error(Errno::ENOTTY),
        }
    }
}
