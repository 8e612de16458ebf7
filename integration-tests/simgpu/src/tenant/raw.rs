//! A client of the driver without libcuda: every way to ask for video memory that the driver has.

mod tricks;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use gpuquota_common::nvidia::{
    IoctlCmd, class, ctrl, disable_channels, heap, memparams, nr, nvos00, nvos02, nvos32, nvos54,
    nvos55, nvos64, status, xfer,
};

use super::TenantError;
use super::step::Via;
use crate::bytes::{put, put_u32, put_u64, u32_at};

const DEVICE: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const GROUP: u32 = 0x5c00_0004;
const FIRST_MEMORY: u32 = 0x5c00_0010;
/// `NVOS32` flag: the caller names the handle.
const HANDLE_PROVIDED: u32 = 0x4000;
/// The engine of a channel group.
const ENGINE_GRAPHICS: u32 = 1;
/// Flags and attributes that libcuda allocates with.
const FLAGS: u32 = 0x1_c101;
/// Attribute: memory of the host.
const IN_HOST: u32 = 1 << heap::ATTR_LOCATION_SHIFT;
const ATTR: u32 = 0x1800_0000;
/// A type byte that nobody uses: the driver does not look at it.
const ODD_TYPE: u32 = 0x11 << 8;

/// A client with one GPU.
pub struct Raw {
    ctl: File,
    gpu: File,
    client: u32,
    next: u32,
}

fn open(path: &Path) -> Result<File, TenantError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|source| TenantError::Open {
            path: path.to_owned(),
            source,
        })
}

fn ioctl_raw(file: &File, call: &'static str, cmd: u32, arg: &mut [u8]) -> Result<(), TenantError> {
    loop {
        // SAFETY: `arg` is at least as long as the command's size, and lives for the call.
        let result =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(cmd), arg.as_mut_ptr()) };
        if result >= 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        // As libcuda does.
        if !matches!(
            source.kind(),
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
        ) {
            return Err(TenantError::Ioctl { call, source });
        }
    }
}

fn ioctl(file: &File, call: &'static str, number: u8, arg: &mut [u8]) -> Result<(), TenantError> {
    let cmd = IoctlCmd {
        nr: number,
        size: u16::try_from(arg.len()).unwrap_or(u16::MAX),
    };
    ioctl_raw(file, call, cmd.to_raw(), arg)
}

fn check(call: &'static str, status: u32) -> Result<(), TenantError> {
    match status {
        status::OK => Ok(()),
        status::NO_MEMORY => Err(TenantError::OutOfMemory {
            code: "NV_ERR_NO_MEMORY".into(),
            asked: 0,
            got: 0,
        }),
        status => Err(TenantError::Status { call, status }),
    }
}

impl Raw {
    /// Opens the devices in `dir` and makes a client on the GPU with a minor number.
    pub fn open(dir: &Path, minor: u32) -> Result<Self, TenantError> {
        let mut raw = Self {
            ctl: open(&dir.join("nvidiactl"))?,
            gpu: open(&dir.join(format!("nvidia{minor}")))?,
            client: 0,
            next: FIRST_MEMORY,
        };
        let mut fd = raw.ctl.as_raw_fd().to_ne_bytes();
        ioctl(&raw.gpu, "REGISTER_FD", nr::REGISTER_FD, &mut fd)?;
        raw.client = raw.alloc_object(0, 0, class::NV01_ROOT_CLIENT, &mut [])?;
        let mut device = [0; 56];
        put_u32(&mut device, 0, minor);
        raw.alloc_object(raw.client, DEVICE, class::NV01_DEVICE_0, &mut device)?;
        raw.alloc_object(DEVICE, SUBDEVICE, class::NV20_SUBDEVICE_0, &mut [0; 4])?;
        Ok(raw)
    }

    fn alloc_arg(
        &self,
        length: usize,
        parent: u32,
        new: u32,
        class: u32,
        params: &mut [u8],
    ) -> Vec<u8> {
        let mut arg = vec![0; length];
        put_u32(&mut arg, nvos64::ROOT, self.client);
        put_u32(&mut arg, nvos64::PARENT, parent);
        put_u32(&mut arg, nvos64::NEW, new);
        put_u32(&mut arg, nvos64::CLASS, class);
        if !params.is_empty() {
            put_u64(&mut arg, nvos64::PARAMS, params.as_mut_ptr() as u64);
        }
        arg
    }

    fn alloc_object(
        &self,
        parent: u32,
        new: u32,
        class: u32,
        params: &mut [u8],
    ) -> Result<u32, TenantError> {
        let mut arg = self.alloc_arg(nvos64::SIZE.into(), parent, new, class, params);
        ioctl(&self.ctl, "RM_ALLOC", nr::RM_ALLOC, &mut arg)?;
        check("RM_ALLOC", u32_at(&arg, nvos64::STATUS))?;
        Ok(u32_at(&arg, nvos64::NEW))
    }

    fn memory_params(&self, size: u64) -> [u8; 128] {
        let mut params = [0; 128];
        put_u32(&mut params, 0, self.client);
        put_u32(&mut params, memparams::FLAGS, FLAGS);
        put_u32(&mut params, memparams::ATTR, ATTR);
        put_u64(&mut params, memparams::REQUESTED, size);
        params
    }

    /// Allocates video memory; returns its handle.
    pub fn alloc(&mut self, via: Via, size: u64) -> Result<u32, TenantError> {
        self.next += 1;
        let handle = self.next;
        let class = class::NV01_MEMORY_LOCAL_USER;
        match via {
            Via::Nvos21 | Via::OddBits => {
                let mut params = self.memory_params(size);
                let length = usize::from(nvos64::SIZE_NVOS21);
                let mut arg = self.alloc_arg(length, DEVICE, handle, class, &mut params);
                let cmd = if via == Via::OddBits {
                    // None, write only, read only: it does not look at the direction either.
                    ((handle % 3) << 30)
                        | ODD_TYPE
                        | (u32::from(nvos64::SIZE_NVOS21) << 16)
                        | u32::from(nr::RM_ALLOC)
                } else {
                    IoctlCmd {
                        nr: nr::RM_ALLOC,
                        size: nvos64::SIZE_NVOS21,
                    }
                    .to_raw()
                };
                ioctl_raw(&self.ctl, "RM_ALLOC", cmd, &mut arg)?;
                check("RM_ALLOC", u32_at(&arg, nvos64::STATUS_NVOS21))?;
            }
            Via::Xfer => {
                let mut params = self.memory_params(size);
                let length = usize::from(nvos64::SIZE);
                let mut inner = self.alloc_arg(length, DEVICE, handle, class, &mut params);
                let mut outer = [0; xfer::SIZE as usize];
                put_u32(&mut outer, xfer::CMD, nr::RM_ALLOC.into());
                put_u32(&mut outer, xfer::INNER_SIZE, nvos64::SIZE.into());
                put_u64(&mut outer, xfer::PTR, inner.as_mut_ptr() as u64);
                ioctl(&self.ctl, "IOCTL_XFER_CMD", nr::IOCTL_XFER_CMD, &mut outer)?;
                check("RM_ALLOC", u32_at(&inner, nvos64::STATUS))?;
            }
            Via::Heap | Via::HeapRange | Via::HeapTiled | Via::HeapHost => {
                self.alloc_heap(via, handle, size)?;
            }
            Via::System => {
                let class = class::NV01_MEMORY_SYSTEM;
                let mut params = self.memory_params(size);
                put_u32(&mut params, memparams::ATTR, ATTR | IN_HOST);
                self.alloc_object(DEVICE, handle, class, &mut params)?;
            }
            Via::Legacy | Via::LegacyHost => {
                let mut arg = [0; nvos02::SIZE as usize];
                put_u32(&mut arg, nvos02::ROOT, self.client);
                put_u32(&mut arg, nvos02::PARENT, DEVICE);
                put_u32(&mut arg, nvos02::NEW, handle);
                if via == Via::LegacyHost {
                    put_u32(&mut arg, nvos02::CLASS, class::NV01_MEMORY_SYSTEM);
                } else {
                    put_u32(&mut arg, nvos02::CLASS, class);
                    put_u32(&mut arg, nvos02::FLAGS, 2 << 8);
                }
                put_u64(&mut arg, nvos02::LIMIT, size - 1);
                put(&mut arg, 48, &(-1i32).to_ne_bytes());
                ioctl(&self.gpu, "RM_ALLOC_MEMORY", nr::RM_ALLOC_MEMORY, &mut arg)?;
                check("RM_ALLOC_MEMORY", u32_at(&arg, nvos02::STATUS))?;
            }
            Via::Dup => {
                self.alloc_object(DEVICE, handle, class, &mut self.memory_params(size))?;
                self.next += 1;
                let mut arg = [0; nvos55::SIZE as usize];
                put_u32(&mut arg, nvos55::CLIENT, self.client);
                put_u32(&mut arg, nvos55::PARENT, DEVICE);
                put_u32(&mut arg, nvos55::OBJECT, self.next);
                put_u32(&mut arg, nvos55::CLIENT_SRC, self.client);
                put_u32(&mut arg, nvos55::OBJECT_SRC, handle);
                ioctl(&self.ctl, "RM_DUP_OBJECT", nr::RM_DUP_OBJECT, &mut arg)?;
                check("RM_DUP_OBJECT", u32_at(&arg, nvos55::STATUS))?;
                self.free(handle)?;
                return Ok(self.next);
            }
            Via::Cold => self.alloc_cold(handle, size)?,
            Via::Finn => self.alloc_finn(handle, size)?,
            Via::Compat => self.alloc_compat(handle, size)?,
            Via::Race => self.alloc_race(handle, size)?,
            Via::Reuse => self.alloc_reuse(handle, size)?,
            Via::Subdevice => {
                self.alloc_object(SUBDEVICE, handle, class, &mut self.memory_params(size))?;
            }
            _ => {
                self.alloc_object(DEVICE, handle, class, &mut self.memory_params(size))?;
            }
        }
        Ok(handle)
    }

    fn alloc_heap(&self, via: Via, handle: u32, size: u64) -> Result<(), TenantError> {
        let mut arg = [0; nvos32::SIZE as usize];
        put_u32(&mut arg, nvos32::ROOT, self.client);
        put_u32(&mut arg, nvos32::PARENT, DEVICE);
        put_u32(&mut arg, 40, self.client);
        put_u32(&mut arg, nvos32::MEMORY, handle);
        put_u32(&mut arg, nvos32::FLAGS, HANDLE_PROVIDED);
        match via {
            Via::HeapTiled => {
                // The size field is ignored: it says a page, and the product is what counts.
                const PITCH: u64 = 64 << 10;
                let height = u32::try_from(size.div_ceil(PITCH)).unwrap_or(u32::MAX);
                put_u32(&mut arg, nvos32::FUNCTION, nvos32::FN_ALLOC_TILED);
                put_u32(&mut arg, nvos32::TILED_HEIGHT, height);
                put_u32(&mut arg, nvos32::TILED_PITCH, 64 << 10);
                put_u64(&mut arg, nvos32::TILED_SIZE, 4096);
            }
            Via::HeapRange => {
                put_u32(&mut arg, nvos32::FUNCTION, nvos32::FN_ALLOC_SIZE_RANGE);
                put_u64(&mut arg, nvos32::RANGE_SIZE, size);
            }
            _ => {
                if via == Via::HeapHost {
                    put_u32(&mut arg, nvos32::ALLOC_SIZE_ATTR, IN_HOST);
                }
                put_u32(&mut arg, nvos32::FUNCTION, nvos32::FN_ALLOC_SIZE);
                put_u64(&mut arg, nvos32::ALLOC_SIZE_SIZE, size);
            }
        }
        ioctl(
            &self.ctl,
            "VID_HEAP_CONTROL",
            nr::RM_VID_HEAP_CONTROL,
            &mut arg,
        )?;
        check("VID_HEAP_CONTROL", u32_at(&arg, nvos32::STATUS))
    }

    /// Frees an object.
    pub fn free(&self, handle: u32) -> Result<(), TenantError> {
        let mut arg = [0; nvos00::SIZE as usize];
        put_u32(&mut arg, nvos00::ROOT, self.client);
        put_u32(&mut arg, nvos00::PARENT, DEVICE);
        put_u32(&mut arg, nvos00::OBJECT, handle);
        ioctl(&self.ctl, "RM_FREE", nr::RM_FREE, &mut arg)?;
        check("RM_FREE", u32_at(&arg, nvos00::STATUS))
    }

    /// Disables or enables channels of a client, which need not be this one.
    pub fn set_disabled(
        &self,
        client: u32,
        channels: &[u32],
        disabled: bool,
    ) -> Result<(), TenantError> {
        let mut params = [0; disable_channels::SIZE];
        params[disable_channels::DISABLE] = u8::from(disabled);
        let channels = &channels[..channels.len().min(disable_channels::MAX)];
        let count = u32::try_from(channels.len()).unwrap_or_default();
        put_u32(&mut params, disable_channels::COUNT, count);
        for (index, channel) in channels.iter().enumerate() {
            put_u32(&mut params, disable_channels::CLIENTS + 4 * index, client);
            put_u32(
                &mut params,
                disable_channels::CHANNELS + 4 * index,
                *channel,
            );
        }
        self.control(
            "DISABLE_CHANNELS",
            SUBDEVICE,
            ctrl::FIFO_DISABLE_CHANNELS,
            &mut params,
        )
    }

    fn control(
        &self,
        name: &'static str,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), TenantError> {
        let mut arg = [0; nvos54::SIZE as usize];
        put_u32(&mut arg, nvos54::CLIENT, self.client);
        put_u32(&mut arg, nvos54::OBJECT, object);
        put_u32(&mut arg, nvos54::CMD, cmd);
        put_u64(&mut arg, nvos54::PARAMS, params.as_mut_ptr() as u64);
        let size = u32::try_from(params.len()).unwrap_or_default();
        put_u32(&mut arg, nvos54::PARAMS_SIZE, size);
        ioctl(&self.ctl, "RM_CONTROL", nr::RM_CONTROL, &mut arg)?;
        check(name, u32_at(&arg, nvos54::STATUS))
    }

    /// Makes a channel group if there is none yet, and sets its time slice.
    pub fn set_slice(&self, us: u64) -> Result<(), TenantError> {
        let mut params = [0; 20];
        put_u32(&mut params, 12, ENGINE_GRAPHICS);
        match self.alloc_object(DEVICE, GROUP, class::KEPLER_CHANNEL_GROUP_A, &mut params) {
            Ok(_)
            | Err(TenantError::Status {
                status: status::INSERT_DUPLICATE_NAME,
                ..
            }) => {}
            Err(error) => return Err(error),
        }
        let mut slice = us.to_ne_bytes();
        self.control("SET_TIMESLICE", GROUP, ctrl::TSG_SET_TIMESLICE, &mut slice)
    }
}
