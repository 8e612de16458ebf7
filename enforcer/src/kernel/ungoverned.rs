//! Closing the GPUs to processes in no tenant.

use std::{
    collections::BTreeSet,
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::programs::CgroupDevice;

use super::{
    Kernel, KernelError, PinDir, deny::unpin, is_missing, lock, map_error, program, program_error,
};

/// The program.
const PROGRAM: &str = "ungoverned";

impl Kernel {
    /// Attaches the program to the root of the hierarchy, beside those of others, in the place of an earlier daemon's.
    pub fn close_to_ungoverned(
        &self,
        root: &Path,
        pins: Option<&PinDir>,
    ) -> Result<(), KernelError> {
        let failed = |source| KernelError::Pin {
            path: root.to_owned(),
            source,
        };
        let mut ebpf = lock(&self.ebpf);
        let program: &mut CgroupDevice = program(&mut ebpf, PROGRAM)?;
        program.load().map_err(program_error(PROGRAM))?;
        let code = program.fd().map_err(program_error(PROGRAM))?;
        let folder = File::open(root).map_err(failed)?;
        let link = link(code.as_fd(), folder.as_fd()).map_err(failed)?;
        let Some(pins) = pins else {
            *lock(&self.device_link) = Some(link);
            return Ok(());
        };
        let path = pins.link(PROGRAM);
        // The new link is in force already: nothing is open in between.
        unpin(&path)?;
        pin(&link, &path).map_err(|source| KernelError::Pin { path, source })
    }

    /// Detaches what an earlier daemon attached.
    pub fn open_to_ungoverned(&self, pins: Option<&PinDir>) -> Result<(), KernelError> {
        pins.map_or(Ok(()), |pins| unpin(&pins.link(PROGRAM)))
    }

    /// Replaces the cgroups that may open the GPUs without being a tenant's.
    pub fn set_exempt(&self, cgroups: &BTreeSet<u64>) -> Result<(), KernelError> {
        let mut map = lock(&self.exempt);
        let known: Vec<u64> = map
            .keys()
            .collect::<Result<_, _>>()
            .map_err(map_error("EXEMPT"))?;
        for id in cgroups {
            map.insert(id, 1, 0).map_err(map_error("EXEMPT"))?;
        }
        for id in known.iter().filter(|id| !cgroups.contains(id)) {
            match map.remove(id) {
                Err(error) if !is_missing(&error) => return Err(map_error("EXEMPT")(error)),
                _ => {}
            }
        }
        Ok(())
    }
}

/// `bpf_attr` of `BPF_LINK_CREATE`, as far as it is used.
#[repr(C)]
struct LinkCreate {
    program: i32,
    target: i32,
    attach_type: u32,
    flags: u32,
}

/// `bpf_attr` of `BPF_OBJ_PIN`.
#[repr(C)]
struct ObjPin {
    path: u64,
    fd: i32,
    flags: u32,
}

/// Attaches a device program to a cgroup. A link leaves the programs of others where they are (kernel 5.7).
///
/// By hand because aya's link of this kind cannot be pinned.
fn link(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const BPF_LINK_CREATE: u32 = 28;
    const BPF_CGROUP_DEVICE: u32 = 6;
    let attr = LinkCreate {
        program: program.as_raw_fd(),
        target: cgroup.as_raw_fd(),
        attach_type: BPF_CGROUP_DEVICE,
        flags: 0,
    };
    let fd = bpf(BPF_LINK_CREATE, &attr)?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin(link: &OwnedFd, path: &Path) -> io::Result<()> {
    const BPF_OBJ_PIN: u32 = 6;
    let name = CString::new(path.as_os_str().as_bytes())?;
    let attr = ObjPin {
        path: name.as_ptr() as u64,
        fd: link.as_raw_fd(),
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &attr).map(drop)
}

fn bpf<T>(command: u32, attr: &T) -> io::Result<i32> {
    // SAFETY: `attr` is the beginning of the kernel's structure for the command; it takes the rest for zero.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attr),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // A descriptor or zero.
    i32::try_from(result).map_err(io::Error::other)
}
