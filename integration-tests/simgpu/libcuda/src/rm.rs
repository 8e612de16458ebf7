//! The calls into the driver: what libcuda asks, in the form in which it asks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpuquota_common::nvidia::{
    IoctlCmd, class, memparams, nr, nvos00, nvos02, nvos54, nvos64, status, uvm, uvm_args,
};
use gpuquota_simgpu::bytes::{put, put_u32, put_u64, u32_at, u64_at};
use gpuquota_simgpu::side;

use crate::error::{self, CuResult};

/// How long libcuda waits after status 0x03 before it asks again.
const BUSY_PAUSE: Duration = Duration::from_millis(250);
/// Space that every control's parameters fit in.
const CONTROL_SPACE: usize = 4096;
/// Space that every UVM structure fits in.
const UVM_SPACE: usize = uvm_args::MAP_EXTERNAL_SIZE + 16;
/// `NVA06C_CTRL_CMD_GPFIFO_SCHEDULE`: bytes of its parameters.
const SCHEDULE_SIZE: usize = 3;

/// Which of the driver's files a call goes to.
#[derive(Clone, Copy)]
pub enum To<'a> {
    /// `nvidiactl`.
    Ctl,
    /// A GPU's file.
    Gpu(&'a File),
}

/// An RM client with its open files.
pub struct Rm {
    dir: PathBuf,
    ctl: File,
    uvm: File,
    /// The second `nvidia-uvm` file; it keeps the address space alive.
    uvm_mm: File,
    side: File,
    /// Client handle.
    pub client: u32,
}

/// What a memory object is asked for.
#[derive(Clone, Copy)]
pub struct MemoryRequest {
    /// Class.
    pub class: u32,
    /// Size in bytes.
    pub size: u64,
    /// `attr`.
    pub attr: u32,
    /// `attr2`.
    pub attr2: u32,
    /// `flags`.
    pub flags: u32,
    /// `type`.
    pub kind: u32,
}

impl MemoryRequest {
    /// Video memory as `cuMemAlloc` asks for it.
    pub fn video(size: u64) -> Self {
        Self {
            class: class::NV01_MEMORY_LOCAL_USER,
            size,
            attr: 0x1800_0000,
            attr2: 0,
            flags: 0x1_c101,
            kind: 0,
        }
    }

    /// Video memory as the pool and `cuMemCreate` ask for it.
    pub fn video_pooled(size: u64) -> Self {
        Self {
            attr: 0x3800_0000,
            ..Self::video(size)
        }
    }

    /// Host memory that the driver allocates.
    pub fn host(size: u64) -> Self {
        Self {
            class: class::NV01_MEMORY_SYSTEM,
            size,
            attr: 0x3a00_0000,
            attr2: 0,
            flags: 0xc001,
            kind: 0,
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// An ioctl that is asked again when a signal interrupts it.
fn ioctl(fd: RawFd, cmd: u32, arg: &mut [u8]) -> Result<(), i32> {
    loop {
        // SAFETY: `arg` is as long as the command says or longer, and lives for the call.
        let result = unsafe { libc::ioctl(fd, libc::c_ulong::from(cmd), arg.as_mut_ptr()) };
        if result >= 0 {
            return Ok(());
        }
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        if errno != libc::EINTR {
            return Err(errno);
        }
    }
}

/// What libcuda makes of an RM status (measured for the allocation path).
pub fn result_of(status: u32) -> CuResult {
    match status {
        status::OK => error::SUCCESS,
        status::NO_MEMORY | 0x1a => error::OUT_OF_MEMORY,
        status::INSUFFICIENT_PERMISSIONS => error::NOT_PERMITTED,
        status::NOT_SUPPORTED => error::NOT_SUPPORTED,
        _ => error::UNKNOWN,
    }
}

impl Rm {
    /// Opens the files as `cuInit` does and makes a client. The recorded probe, a client that is made and
    /// freed at once, comes first, as `probe`.
    pub fn open(dir: &Path) -> Result<Self, CuResult> {
        let files = || -> io::Result<Self> {
            Ok(Self {
                dir: dir.to_owned(),
                ctl: open(&dir.join("nvidiactl"))?,
                uvm: open(&dir.join("nvidia-uvm"))?,
                uvm_mm: open(&dir.join("nvidia-uvm"))?,
                side: open(&dir.join(side::CONTROL_FILE))?,
                client: 0,
            })
        };
        files().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => error::NO_DEVICE,
            _ => error::OPERATING_SYSTEM,
        })
    }

    /// Opens a GPU's file once more and ties it to the control file.
    pub fn open_gpu(&self, minor: u32) -> Result<File, CuResult> {
        let file =
            open(&self.dir.join(format!("nvidia{minor}"))).map_err(|_| error::OPERATING_SYSTEM)?;
        let mut arg = self.ctl.as_raw_fd().to_ne_bytes();
        let cmd = IoctlCmd {
            nr: nr::REGISTER_FD,
            size: 4,
        };
        ioctl(file.as_raw_fd(), cmd.to_raw(), &mut arg).map_err(|_| error::OPERATING_SYSTEM)?;
        Ok(file)
    }

    /// Descriptor of the side channel.
    pub fn side_fd(&self) -> RawFd {
        self.side.as_raw_fd()
    }

    fn fd(&self, to: To<'_>) -> RawFd {
        match to {
            To::Ctl => self.ctl.as_raw_fd(),
            To::Gpu(file) => file.as_raw_fd(),
        }
    }

    /// An escape that carries nothing that matters here.
    pub fn escape(&self, to: To<'_>, number: u8, size: usize) -> Result<Vec<u8>, CuResult> {
        let mut arg = vec![0; size];
        if matches!(
            number,
            nr::RM_MAP_MEMORY | nr::RM_UPDATE_DEVICE_MAPPING_INFO | nr::ALLOC_OS_EVENT
        ) {
            put_u32(&mut arg, 0, self.client);
        }
        let cmd = IoctlCmd {
            nr: number,
            size: u16::try_from(size).map_err(|_| error::INVALID_VALUE)?,
        };
        ioctl(self.fd(to), cmd.to_raw(), &mut arg).map_err(|_| error::OPERATING_SYSTEM)?;
        Ok(arg)
    }

    /// Makes a client and returns its handle.
    pub fn alloc_client(&self) -> Result<u32, CuResult> {
        let mut arg = [0; nvos64::SIZE as usize];
        self.alloc_once(To::Ctl, &mut arg)?;
        match u32_at(&arg, nvos64::STATUS) {
            status::OK => Ok(u32_at(&arg, nvos64::NEW)),
            status => Err(result_of(status)),
        }
    }

    fn alloc_once(
        &self,
        to: To<'_>,
        arg: &mut [u8; nvos64::SIZE as usize],
    ) -> Result<(), CuResult> {
        let cmd = IoctlCmd {
            nr: nr::RM_ALLOC,
            size: nvos64::SIZE,
        };
        loop {
            match ioctl(self.fd(to), cmd.to_raw(), arg) {
                Ok(()) => return Ok(()),
                // As the real one: again at once, for ever.
                Err(libc::EAGAIN) => {}
                Err(_) => return Err(error::OPERATING_SYSTEM),
            }
        }
    }

    /// Makes an object. Status 0x51 is asked once more, 0x03 every 250 ms until it changes.
    pub fn alloc(
        &self,
        to: To<'_>,
        class: u32,
        parent: u32,
        handle: u32,
        params: &mut [u8],
    ) -> Result<(), CuResult> {
        let asked = params.to_vec();
        let mut denials = 0;
        loop {
            params.copy_from_slice(&asked);
            let mut arg = [0; nvos64::SIZE as usize];
            put_u32(&mut arg, nvos64::ROOT, self.client);
            put_u32(&mut arg, nvos64::PARENT, parent);
            put_u32(&mut arg, nvos64::NEW, handle);
            put_u32(&mut arg, nvos64::CLASS, class);
            if !params.is_empty() {
                put_u64(&mut arg, nvos64::PARAMS, params.as_mut_ptr() as u64);
            }
            self.alloc_once(to, &mut arg)?;
            match u32_at(&arg, nvos64::STATUS) {
                status::OK => return Ok(()),
                status::BUSY_RETRY => std::thread::sleep(BUSY_PAUSE),
                status::NO_MEMORY if denials == 0 => denials = 1,
                status => return Err(result_of(status)),
            }
        }
    }

    /// Makes a memory object; returns the bytes granted.
    pub fn alloc_memory(
        &self,
        parent: u32,
        handle: u32,
        request: &MemoryRequest,
    ) -> Result<u64, CuResult> {
        let mut params = [0; 128];
        put_u32(&mut params, 0, self.client);
        put_u32(&mut params, 4, request.kind);
        put_u32(&mut params, memparams::FLAGS, request.flags);
        put_u32(&mut params, memparams::ATTR, request.attr);
        put_u32(&mut params, memparams::ATTR2, request.attr2);
        put_u64(&mut params, memparams::REQUESTED, request.size);
        self.alloc(To::Ctl, request.class, parent, handle, &mut params)?;
        Ok(u64_at(&params, memparams::LIMIT) + 1)
    }

    /// Pins host memory by the legacy call on a GPU's file, as libcuda does.
    pub fn pin(
        &self,
        gpu: &File,
        parent: u32,
        handle: u32,
        address: u64,
        size: u64,
    ) -> Result<(), CuResult> {
        loop {
            let mut arg = [0; nvos02::SIZE as usize];
            put_u32(&mut arg, nvos02::ROOT, self.client);
            put_u32(&mut arg, nvos02::PARENT, parent);
            put_u32(&mut arg, nvos02::NEW, handle);
            put_u32(
                &mut arg,
                nvos02::CLASS,
                class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR,
            );
            put_u64(&mut arg, 24, address);
            put_u64(&mut arg, nvos02::LIMIT, size - 1);
            put(&mut arg, 48, &(-1i32).to_ne_bytes());
            let cmd = IoctlCmd {
                nr: nr::RM_ALLOC_MEMORY,
                size: nvos02::SIZE,
            };
            ioctl(gpu.as_raw_fd(), cmd.to_raw(), &mut arg).map_err(|_| error::OPERATING_SYSTEM)?;
            match u32_at(&arg, nvos02::STATUS) {
                status::OK => return Ok(()),
                status::BUSY_RETRY => std::thread::sleep(BUSY_PAUSE),
                status => return Err(result_of(status)),
            }
        }
    }

    /// Frees an object of the client, or of another one that is being probed.
    pub fn free(&self, client: u32, parent: u32, handle: u32) {
        let mut arg = [0; nvos00::SIZE as usize];
        put_u32(&mut arg, nvos00::ROOT, client);
        put_u32(&mut arg, nvos00::PARENT, parent);
        put_u32(&mut arg, nvos00::OBJECT, handle);
        let cmd = IoctlCmd {
            nr: nr::RM_FREE,
            size: nvos00::SIZE,
        };
        // Freeing has no way to fail that a caller of cuMemFree would learn of.
        let _ = ioctl(self.ctl.as_raw_fd(), cmd.to_raw(), &mut arg);
    }

    /// A control with parameters.
    pub fn control(&self, object: u32, cmd: u32, params: &mut [u8]) -> Result<(), CuResult> {
        self.control_as(self.client, object, cmd, params)
    }

    /// A control on an object of the given client.
    pub fn control_as(
        &self,
        client: u32,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), CuResult> {
        let mut arg = [0; nvos54::SIZE as usize];
        put_u32(&mut arg, nvos54::CLIENT, client);
        put_u32(&mut arg, nvos54::OBJECT, object);
        put_u32(&mut arg, nvos54::CMD, cmd);
        put_u64(&mut arg, nvos54::PARAMS, params.as_mut_ptr() as u64);
        put_u32(
            &mut arg,
            nvos54::PARAMS_SIZE,
            u32::try_from(params.len()).unwrap_or(0),
        );
        let ioctl_cmd = IoctlCmd {
            nr: nr::RM_CONTROL,
            size: nvos54::SIZE,
        };
        ioctl(self.ctl.as_raw_fd(), ioctl_cmd.to_raw(), &mut arg)
            .map_err(|_| error::OPERATING_SYSTEM)?;
        match u32_at(&arg, nvos54::STATUS) {
            status::OK => Ok(()),
            status => Err(result_of(status)),
        }
    }

    /// A control whose parameters do not matter here; whether the driver takes it does not either.
    pub fn control_plain(&self, object: u32, cmd: u32) {
        let mut params = [0; CONTROL_SPACE];
        let _ = self.control(object, cmd, &mut params);
    }

    /// Starts a channel group.
    pub fn schedule(&self, group: u32) -> Result<(), CuResult> {
        use gpuquota_common::nvidia::ctrl::TSG_GPFIFO_SCHEDULE;
        self.control(group, TSG_GPFIFO_SCHEDULE, &mut [1; SCHEDULE_SIZE])
    }

    /// Maps managed memory: the driver wants it at the offset of its own address.
    pub fn map_managed(&self, length: u64) -> Result<u64, CuResult> {
        const ALIGN: usize = 2 << 20;
        let length = usize::try_from(length).map_err(|_| error::OUT_OF_MEMORY)?;
        let room = length.checked_add(ALIGN).ok_or(error::OUT_OF_MEMORY)?;
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                room,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(error::OUT_OF_MEMORY);
        }
        let base = reserved.map_addr(|at| at.next_multiple_of(ALIGN));
        let offset = libc::off_t::try_from(base.addr()).map_err(|_| error::OUT_OF_MEMORY)?;
        // SAFETY: inside what was just reserved; the rest before and behind is given back.
        unsafe {
            let before = base.addr() - reserved.addr();
            if before > 0 {
                libc::munmap(reserved, before);
            }
            libc::munmap(base.byte_add(length), ALIGN - before);
            let mapped = libc::mmap(
                base,
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.uvm.as_raw_fd(),
                offset,
            );
            if mapped == libc::MAP_FAILED {
                libc::munmap(base, length);
                return Err(error::OUT_OF_MEMORY);
            }
        }
        Ok(base.addr() as u64)
    }

    /// A UVM command whose structure does not matter here.
    pub fn uvm_plain(&self, cmd: u32) -> Result<(), CuResult> {
        let mut arg = vec![0; UVM_SPACE];
        let fd = if cmd == uvm::MM_INITIALIZE {
            put_u32(&mut arg, 0, self.uvm.as_raw_fd().cast_unsigned());
            self.uvm_mm.as_raw_fd()
        } else {
            self.uvm.as_raw_fd()
        };
        ioctl(fd, cmd, &mut arg).map_err(|_| error::OPERATING_SYSTEM)
    }

    /// Names the range of a pool of semaphores.
    pub fn uvm_pool(&self, base: u64, length: u64) -> Result<(), CuResult> {
        let mut arg = vec![0; UVM_SPACE];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        ioctl(self.uvm.as_raw_fd(), uvm::ALLOC_SEMAPHORE_POOL, &mut arg)
            .map_err(|_| error::OPERATING_SYSTEM)
    }

    /// Asks whether a range that was just mapped is one.
    pub fn uvm_validate(&self, base: u64, length: u64) -> Result<(), CuResult> {
        let mut arg = vec![0; UVM_SPACE];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        ioctl(self.uvm.as_raw_fd(), uvm::VALIDATE_VA_RANGE, &mut arg).map_err(|errno| match errno {
            libc::EPERM => error::NOT_PERMITTED,
            _ => error::UNKNOWN,
        })
    }

    fn uvm_call(&self, cmd: u32, arg: &mut [u8], status_at: usize) -> Result<(), CuResult> {
        ioctl(self.uvm.as_raw_fd(), cmd, arg).map_err(|_| error::OPERATING_SYSTEM)?;
        match u32_at(arg, status_at) {
            status::OK => Ok(()),
            status => Err(result_of(status)),
        }
    }

    /// Registers a GPU by UUID.
    pub fn uvm_register_gpu(&self, uuid: [u8; 16]) -> Result<(), CuResult> {
        let mut arg = [0; 40];
        put(&mut arg, uvm_args::REGISTER_GPU_UUID, &uuid);
        self.uvm_call(uvm::REGISTER_GPU, &mut arg, uvm_args::REGISTER_GPU_STATUS)
    }

    /// Makes an address range.
    pub fn uvm_range(&self, base: u64, length: u64) -> Result<(), CuResult> {
        let mut arg = [0; 24];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        self.uvm_call(uvm::CREATE_EXTERNAL_RANGE, &mut arg, uvm_args::RANGE_STATUS)
    }

    /// Maps an RM memory object into a range.
    pub fn uvm_map(&self, base: u64, length: u64, memory: u32) -> Result<(), CuResult> {
        let mut arg = vec![0; uvm_args::MAP_EXTERNAL_SIZE];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        put_u32(
            &mut arg,
            uvm_args::MAP_EXTERNAL_CTL_FD,
            self.ctl.as_raw_fd().cast_unsigned(),
        );
        put_u32(&mut arg, uvm_args::MAP_EXTERNAL_CLIENT, self.client);
        put_u32(&mut arg, uvm_args::MAP_EXTERNAL_MEMORY, memory);
        self.uvm_call(
            uvm::MAP_EXTERNAL_ALLOCATION,
            &mut arg,
            uvm_args::MAP_EXTERNAL_STATUS,
        )
    }

    /// Takes a mapping away.
    pub fn uvm_unmap(&self, base: u64, length: u64) {
        let mut arg = [0; 40];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        let _ = self.uvm_call(
            uvm::UNMAP_EXTERNAL,
            &mut arg,
            uvm_args::UNMAP_EXTERNAL_STATUS,
        );
    }

    /// Ends a range.
    pub fn uvm_free(&self, base: u64, length: u64) {
        let mut arg = [0; 24];
        put_u64(&mut arg, uvm_args::BASE, base);
        put_u64(&mut arg, uvm_args::LENGTH, length);
        let _ = self.uvm_call(uvm::FREE, &mut arg, uvm_args::RANGE_STATUS);
    }

    /// Tells the model about managed memory; returns the bytes that are on a GPU.
    pub fn managed(&self, op: u32, gpu: u32, base: u64, length: u64) -> Result<u64, CuResult> {
        use side::managed as layout;
        let mut arg = [0; layout::SIZE];
        put_u32(&mut arg, layout::OP, op);
        put_u32(&mut arg, layout::CLIENT, self.client);
        put_u32(&mut arg, layout::GPU, gpu);
        put_u64(&mut arg, layout::BASE, base);
        put_u64(&mut arg, layout::LENGTH, length);
        ioctl(self.side.as_raw_fd(), side::MANAGED, &mut arg)
            .map_err(|_| error::OPERATING_SYSTEM)?;
        match u32_at(&arg, layout::STATUS) {
            status::OK => Ok(u64_at(&arg, layout::RESIDENT)),
            status => Err(result_of(status)),
        }
    }

    /// What a context costs: overall, and what the driver takes by itself.
    pub fn context_cost(&self) -> Result<(u64, u64), CuResult> {
        let mut arg = [0; side::info::SIZE];
        ioctl(self.side.as_raw_fd(), side::INFO, &mut arg).map_err(|_| error::OPERATING_SYSTEM)?;
        Ok((
            u64_at(&arg, side::info::CONTEXT_OVERHEAD),
            u64_at(&arg, side::info::CONTEXT_HIDDEN),
        ))
    }
}

/// Hands in kernels through the side channel: `(channel, kernels, nanoseconds each)`. Returns for each entry
/// how many kernels its channel has finished, and the Xid that stopped one of the channels.
pub fn submit(fd: RawFd, client: u32, entries: &[(u32, u32, u64)]) -> Result<(Vec<u64>, u32), i32> {
    use side::submit as layout;
    let mut arg = [0; layout::SIZE];
    let entries = &entries[..entries.len().min(layout::MAX)];
    put_u32(
        &mut arg,
        layout::COUNT,
        u32::try_from(entries.len()).unwrap_or(0),
    );
    put_u32(&mut arg, layout::CLIENT, client);
    for (index, (channel, kernels, each_ns)) in entries.iter().enumerate() {
        let at = layout::ENTRIES + index * layout::ENTRY;
        put_u32(&mut arg, at + layout::CHANNEL, *channel);
        put_u32(&mut arg, at + layout::KERNELS, *kernels);
        put_u64(&mut arg, at + layout::EACH_NS, *each_ns);
    }
    ioctl(fd, side::SUBMIT, &mut arg)?;
    let completed = (0..entries.len())
        .map(|index| {
            u64_at(
                &arg,
                layout::ENTRIES + index * layout::ENTRY + layout::COMPLETED,
            )
        })
        .collect();
    Ok((completed, u32_at(&arg, layout::FAULT)))
}

/// How far a channel is.
pub struct Answer {
    /// Kernels that it has finished.
    pub completed: u64,
    /// The Xid that stopped it, 0 for none.
    pub fault: u32,
    /// When the kernel asked about ended if it was a mark, nanoseconds of the model's clock.
    pub finished_ns: u64,
}

/// Waits a while for a kernel.
pub fn wait(fd: RawFd, client: u32, channel: u32, number: u64) -> Result<Answer, i32> {
    use side::wait as layout;
    let mut arg = [0; layout::SIZE];
    put_u32(&mut arg, layout::CLIENT, client);
    put_u32(&mut arg, layout::CHANNEL, channel);
    put_u64(&mut arg, layout::NUMBER, number);
    ioctl(fd, side::WAIT, &mut arg)?;
    Ok(Answer {
        completed: u64_at(&arg, layout::COMPLETED),
        fault: u32_at(&arg, layout::FAULT),
        finished_ns: u64_at(&arg, layout::FINISHED_NS),
    })
}
