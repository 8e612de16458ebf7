//! Ways to ask for memory that try to get past whoever watches the calls.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use gpuquota_common::nvidia::{
    IoctlCmd, NVOS64_FLAGS_FINN, class, memparams, nr, nvos00, nvos64, status,
};

use super::{DEVICE, Raw, check, ioctl};
use crate::bytes::{put_u32, put_u64, u32_at};
use crate::tenant::TenantError;

/// Room for argument and parameters.
const PAGE: usize = 4096;
/// Where the parameters are in it.
const PARAMS: usize = 512;
/// What the race asks for while it is looked at.
const HARMLESS: u64 = 2 << 20;
/// How often the race is run.
const TRIES: u32 = 400;
/// How often the race of a free is run.
const FREES: u32 = 300;

/// Memory that is mapped for one call.
struct Mapping(*mut u8);

impl Mapping {
    fn new(flags: i32, fd: i32, call: &'static str) -> Result<Self, TenantError> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(system(call));
        }
        Ok(Self(at.cast()))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has PAGE bytes, is ours, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.0, PAGE) }
    }
}

impl Mapping {
    /// The argument alone: the parameters may be another thread's.
    fn argument(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.0, nvos64::SIZE.into()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

fn system(call: &'static str) -> TenantError {
    TenantError::Ioctl {
        call,
        source: io::Error::last_os_error(),
    }
}

const RM_FREE: IoctlCmd = IoctlCmd {
    nr: nr::RM_FREE,
    size: nvos00::SIZE,
};
const RM_ALLOC: IoctlCmd = IoctlCmd {
    nr: nr::RM_ALLOC,
    size: nvos64::SIZE,
};

impl Raw {
    /// Argument and parameters of an allocation, for a page at `address`.
    fn page(&self, address: u64, handle: u32, size: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        put_u32(&mut page, nvos64::ROOT, self.client);
        put_u32(&mut page, nvos64::PARENT, DEVICE);
        put_u32(&mut page, nvos64::NEW, handle);
        put_u32(&mut page, nvos64::CLASS, class::NV01_MEMORY_LOCAL_USER);
        put_u64(&mut page, nvos64::PARAMS, address + PARAMS as u64);
        page[PARAMS..PARAMS + 128].copy_from_slice(&self.memory_params(size));
        page
    }

    /// With parameters that are not in memory when the call is made.
    pub(super) fn alloc_cold(&self, handle: u32, size: u64) -> Result<(), TenantError> {
        // SAFETY: a name that ends with a zero.
        let fd = unsafe { libc::memfd_create(c"cold".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(system("memfd_create"));
        }
        // SAFETY: just made, and ours.
        let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        file.set_len(PAGE as u64)
            .map_err(|source| TenantError::Ioctl {
                call: "ftruncate",
                source,
            })?;
        let mut mapping = Mapping::new(libc::MAP_SHARED, fd, "mmap")?;
        let page = self.page(mapping.0 as u64, handle, size);
        std::os::unix::fs::FileExt::write_all_at(&file, &page, 0).map_err(|source| {
            TenantError::Ioctl {
                call: "write",
                source,
            }
        })?;
        // SAFETY: the mapping holds an argument of the command's size, and lives through the call.
        let result = unsafe {
            libc::ioctl(
                self.ctl.as_raw_fd(),
                libc::c_ulong::from(RM_ALLOC.to_raw()),
                mapping.0,
            )
        };
        if result < 0 {
            return Err(system("RM_ALLOC"));
        }
        check("RM_ALLOC", u32_at(mapping.bytes(), nvos64::STATUS))
    }

    /// With the flag that says that parameters are serialised.
    pub(super) fn alloc_finn(&self, handle: u32, size: u64) -> Result<(), TenantError> {
        let mut params = self.memory_params(size);
        let class = class::NV01_MEMORY_LOCAL_USER;
        let mut arg = self.alloc_arg(nvos64::SIZE.into(), DEVICE, handle, class, &mut params);
        put_u32(&mut arg, nvos64::FLAGS, NVOS64_FLAGS_FINN);
        ioctl(&self.ctl, "RM_ALLOC", nr::RM_ALLOC, &mut arg)?;
        check("RM_ALLOC", u32_at(&arg, nvos64::STATUS))
    }

    /// By the system call of a 32-bit program.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn alloc_compat(&self, handle: u32, size: u64) -> Result<(), TenantError> {
        const COMPAT_IOCTL: u64 = 54;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
        let mut mapping = Mapping::new(flags, -1, "mmap")?;
        let address = mapping.0 as u64;
        let page = self.page(address, handle, size);
        mapping.bytes().copy_from_slice(&page);
        let mut result = COMPAT_IOCTL;
        // SAFETY: ioctl(fd, cmd, arg) with a pointer below 4 GiB. The kernel keeps every register but eax, and a kernel
        // without this entry sends SIGSEGV, which ends the test. rbx is the compiler's, so it is put back.
        unsafe {
            std::arch::asm!(
                "xchg rbx, {fd}",
                "int 0x80",
                "xchg rbx, {fd}",
                fd = inout(reg) u64::from(self.ctl.as_raw_fd().cast_unsigned()) => _,
                inout("rax") result,
                in("rcx") u64::from(RM_ALLOC.to_raw()),
                in("rdx") address,
                lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _,
            );
        }
        // A 32-bit call answers in the lower half.
        let result = (result & 0xffff_ffff).cast_signed().wrapping_shl(32) >> 32;
        let result = i32::try_from(result).unwrap_or(-libc::EIO);
        if result < 0 {
            return Err(TenantError::Ioctl {
                call: "RM_ALLOC",
                source: io::Error::from_raw_os_error(-result),
            });
        }
        check("RM_ALLOC", u32_at(mapping.bytes(), nvos64::STATUS))
    }

    /// By the system call of a 32-bit program.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn alloc_compat(&self, _handle: u32, _size: u64) -> Result<(), TenantError> {
        Err(TenantError::Ioctl {
            call: "RM_ALLOC",
            source: io::ErrorKind::Unsupported.into(),
        })
    }

    /// With a second thread that raises the size as soon as the call is made, until that succeeds.
    pub(super) fn alloc_race(&self, handle: u32, size: u64) -> Result<(), TenantError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mut mapping = Mapping::new(flags, -1, "mmap")?;
        let page = self.page(mapping.0 as u64, handle, HARMLESS);
        mapping.bytes().copy_from_slice(&page);
        // SAFETY: an aligned word of the mapping, which outlives the thread: it is joined below.
        let asked =
            unsafe { AtomicU64::from_ptr(mapping.0.add(PARAMS + memparams::REQUESTED).cast()) };
        let over = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            let stop = Arc::clone(&over);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    asked.store(size, Ordering::Relaxed);
                    std::hint::spin_loop();
                    asked.store(HARMLESS, Ordering::Relaxed);
                    std::hint::spin_loop();
                }
            });
            let outcome = self.race(&mut mapping, &page, handle, size);
            over.store(true, Ordering::Relaxed);
            outcome
        })
    }

    /// Under a handle that is in use, which the driver refuses; then freed and made again under it.
    pub(super) fn alloc_reuse(&self, handle: u32, size: u64) -> Result<(), TenantError> {
        let class = class::NV01_MEMORY_LOCAL_USER;
        let make = || self.alloc_object(DEVICE, handle, class, &mut self.memory_params(size));
        make()?;
        match make() {
            Err(TenantError::Status {
                status: status::INSERT_DUPLICATE_NAME,
                ..
            }) => {}
            Ok(_) => {
                return Err(TenantError::Usage("a handle was given out twice".into()));
            }
            Err(error) => return Err(error),
        }
        self.free(handle)?;
        make().map(drop)
    }

    /// Frees one of two allocations by a call that a second thread turns to the other one. Tells how often that one
    /// was freed, of how many tries; all that is left is freed in the end.
    pub fn race_free(&mut self, size: u64) -> Result<(u32, u32), TenantError> {
        let (one, other) = (self.next + 1, self.next + 2);
        self.next += 2;
        let class = class::NV01_MEMORY_LOCAL_USER;
        let make = |handle| self.alloc_object(DEVICE, handle, class, &mut self.memory_params(size));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mapping = Mapping::new(flags, -1, "mmap")?;
        // SAFETY: an aligned word of the mapping, which outlives the thread: it is joined below.
        let named = unsafe { AtomicU32::from_ptr(mapping.0.add(nvos00::OBJECT).cast()) };
        named.store(one, Ordering::Relaxed);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    named.store(other, Ordering::Relaxed);
                    std::hint::spin_loop();
                    named.store(one, Ordering::Relaxed);
                    std::hint::spin_loop();
                }
            });
            let outcome = (|| {
                let mut lost = 0;
                for _ in 0..FREES {
                    make(one)?;
                    make(other)?;
                    for (at, word) in [(nvos00::ROOT, self.client), (nvos00::PARENT, DEVICE)] {
                        // SAFETY: four bytes of the mapping that the other thread does not write.
                        unsafe {
                            mapping
                                .0
                                .add(at)
                                .cast::<[u8; 4]>()
                                .write(word.to_ne_bytes());
                        }
                    }
                    // SAFETY: the mapping holds an argument of the command's size, and lives through the call.
                    let result = unsafe {
                        libc::ioctl(
                            self.ctl.as_raw_fd(),
                            libc::c_ulong::from(RM_FREE.to_raw()),
                            mapping.0,
                        )
                    };
                    if result < 0 {
                        return Err(system("RM_FREE"));
                    }
                    // Which one is left shows by whether its handle can be had again.
                    if make(one).is_err() {
                        lost += 1;
                        make(other)?;
                    }
                    self.free(one)?;
                    self.free(other)?;
                }
                Ok((lost, FREES))
            })();
            over.store(true, Ordering::Relaxed);
            outcome
        })
    }

    fn race(
        &self,
        mapping: &mut Mapping,
        page: &[u8],
        handle: u32,
        size: u64,
    ) -> Result<(), TenantError> {
        for _ in 0..TRIES {
            mapping
                .argument()
                .copy_from_slice(&page[..usize::from(nvos64::SIZE)]);
            // SAFETY: as in `alloc_cold`.
            let result = unsafe {
                libc::ioctl(
                    self.ctl.as_raw_fd(),
                    libc::c_ulong::from(RM_ALLOC.to_raw()),
                    mapping.0,
                )
            };
            if result < 0 || u32_at(mapping.argument(), nvos64::STATUS) != status::OK {
                continue;
            }
            // SAFETY: bytes of the mapping, which the other thread does not write.
            let got = u64::from_ne_bytes(unsafe {
                mapping
                    .0
                    .add(PARAMS + memparams::LIMIT)
                    .cast::<[u8; 8]>()
                    .read_volatile()
            });
            let got = got.saturating_add(1);
            if got >= size {
                return Ok(());
            }
            self.free(handle)?;
        }
        Err(TenantError::OutOfMemory {
            code: "NV_ERR_NO_MEMORY".into(),
            asked: size,
            got: 0,
        })
    }
}
