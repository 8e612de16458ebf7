//! Who has an open file of the driver's.
//!
//! The driver frees a client when its file is closed for the last time, and a file goes where it likes: to a child, through
//! a socket to a stranger, to a process that takes a duplicate. So a charge follows the file. The kernel side knows a file
//! by its address. As long as an open control file is at that address, it is looked for among the descriptors of all
//! processes; the driver says whether it is the client's, or only lies where that one lay.

use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsRawFd as _, BorrowedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    sync::Arc,
};

use gpuquota_common::nvidia::status;
use tracing::warn;

use crate::{
    driver::sched,
    kernel::Kernel,
    lifecycle::Proc,
    time::act::{Reach, control_fds},
};

/// Where the file of a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A process has it.
    Process {
        /// Which.
        tgid: u32,
        /// Under this descriptor.
        fd: u32,
    },
    /// It is open, and no process has it: it waits in a socket, or something in the kernel holds it.
    Unseen,
    /// Nobody has it: another file lies at its address.
    Nobody,
}

/// What the rest of the system has to be asked about open files; the seam for tests.
pub trait FileView {
    /// Whether an open control file is at this address.
    fn is_open(&self, file: u64) -> bool;
    /// Who has the file of this client.
    fn holder(&self, client: u32, file: u64) -> Holder;
}

/// Open files of the processes of this host.
pub struct OpenFiles {
    kernel: Arc<Kernel>,
    processes: Arc<Proc>,
    /// File name of the control node.
    name: OsString,
}

impl OpenFiles {
    /// `control` is the driver's control node.
    pub fn new(kernel: Arc<Kernel>, processes: Arc<Proc>, control: &Path) -> Self {
        Self {
            kernel,
            processes,
            name: control.file_name().unwrap_or_default().to_owned(),
        }
    }

    /// Descriptors of a process whose file has the name of the control node. Their links are only read: to ask the files
    /// themselves may wait for whatever file system a tenant has opened them on.
    fn named(&self, tgid: u32) -> Vec<u32> {
        let Ok(entries) = fs::read_dir(format!("/proc/{tgid}/fd")) else {
            return Vec::new();
        };
        entries
            .filter_map(Result::ok)
            .filter(|entry| {
                fs::read_link(entry.path()).is_ok_and(|target| {
                    target
                        .file_name()
                        // A node that was removed has more behind its name.
                        .is_some_and(|name| name.as_bytes().starts_with(self.name.as_bytes()))
                })
            })
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }

    /// Whether a descriptor of ours is the file at an address; if it is, whether it is the client's.
    fn compare(&self, fd: BorrowedFd<'_>, client: u32, file: u64) -> Option<bool> {
        match self.kernel.is_file(fd.as_raw_fd(), file) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                warn!(%error, "open files cannot be compared");
                return None;
            }
        }
        let answer = sched::class_of(fd, client, client);
        // Whatever else it says, it knows the client.
        Some(!answer.is_err_and(|error| error.status() == Some(status::INVALID_CLIENT)))
    }
}

impl FileView for OpenFiles {
    fn is_open(&self, file: u64) -> bool {
        self.kernel.is_open(file).unwrap_or_else(|error| {
            warn!(%error, "an open file cannot be looked at; taking it for open");
            true
        })
    }

    fn holder(&self, client: u32, file: u64) -> Holder {
        let node = self.processes.control();
        let own = std::process::id();
        for fd in control_fds(own, node) {
            // SAFETY: only the number is used if the descriptor is closed meanwhile, and then the calls fail.
            let fd = unsafe { BorrowedFd::borrow_raw(fd.cast_signed()) };
            match self.compare(fd, client, file) {
                None => {}
                // A duplicate that is held for one call: gone when it is looked at again.
                Some(true) => return Holder::Unseen,
                Some(false) => return Holder::Nobody,
            }
        }
        let Ok(pids) = process_ids() else {
            return Holder::Unseen;
        };
        for tgid in pids.filter(|tgid| *tgid != own) {
            let fds = self.named(tgid);
            if fds.is_empty() {
                continue;
            }
            let Ok(reach) = Reach::open(tgid, None, &*self.processes) else {
                continue;
            };
            for fd in fds {
                let compared =
                    reach.with_fd(node, fd, |duplicate| self.compare(duplicate, client, file));
                match compared {
                    Ok(Some(Some(true))) => return Holder::Process { tgid, fd },
                    Ok(Some(Some(false))) => return Holder::Nobody,
                    _ => {}
                }
            }
        }
        Holder::Unseen
    }
}

fn process_ids() -> io::Result<impl Iterator<Item = u32>> {
    Ok(fs::read_dir("/proc")?
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}
