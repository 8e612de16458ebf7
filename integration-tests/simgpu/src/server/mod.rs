//! The file system that gives the model its device files.
//!
//! One thread answers the kernel's requests, one waits for what is due later: launches that finish, calls
//! that were slowed down. Both work on the model under one lock, and both sleep when there is nothing to do.

mod caller;
mod files;
mod kernel_log;
mod later;
mod trace;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::sim::{Config, Sim};
use trace::Trace;

pub use files::inode_of;

/// Why the server could not start or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The file system could not be mounted.
    #[error("cannot mount the simulated devices at {path}")]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Serving requests failed.
    #[error("serving the simulated devices at {path} failed")]
    Serve {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Serves the devices at `path` until it is unmounted; calls `ready` once they can be opened. Every call that
/// was answered is written to `trace`, and what the driver would say to the kernel's log to `kernel_log`.
///
/// # Errors
/// See [`ServerError`]. The caller unmounts with [`unmount`].
pub fn serve(
    path: &Path,
    config: Config,
    trace: Option<File>,
    kernel_log: Option<File>,
    ready: impl FnOnce(),
) -> Result<(), ServerError> {
    let core = Arc::new(later::Core::new(Sim::new(config), trace.map(Trace::new)));
    core.lock().kernel_log = kernel_log.map(kernel_log::KernelLog::new);
    let waiting = Arc::clone(&core);
    std::thread::Builder::new()
        .name("later".into())
        .spawn(move || waiting.run())
        .map_err(ServerError::Thread)?;
    let mut options = fuser::Config::default();
    options.mount_options = vec![
        fuser::MountOption::FSName("simgpu".into()),
        fuser::MountOption::Subtype("simgpu".into()),
        fuser::MountOption::NoExec,
        fuser::MountOption::NoSuid,
    ];
    options.acl = fuser::SessionACL::All;
    let session =
        fuser::Session::new(files::Files::new(core), path, &options).map_err(|source| {
            ServerError::Mount {
                path: path.to_owned(),
                source,
            }
        })?;
    ready();
    session.run().map_err(|source| ServerError::Serve {
        path: path.to_owned(),
        source,
    })
}

/// Takes the file system away from `path`, also while files are open.
///
/// # Errors
/// What `umount2` says; nothing mounted there is `EINVAL`.
pub fn unmount(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a valid C string for the length of the call.
    if unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
