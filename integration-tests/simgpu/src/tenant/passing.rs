//! Handing the driver's open files to other processes, and letting go of them.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, IoSlice, IoSliceMut},
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use super::TenantError;

/// Files that are sent at a time.
const MOST: usize = 16;

/// What a process has to do with files of others.
#[derive(Debug, Default)]
pub struct Passing {
    listener: Option<UnixListener>,
    received: Vec<OwnedFd>,
}

fn error(what: &'static str) -> impl Fn(io::Error) -> TenantError {
    move |source| TenantError::System { what, source }
}

impl Passing {
    /// Makes a socket to which files can be sent. Until [`Passing::receive`] they wait in it.
    pub fn listen(&mut self, at: &Path) -> Result<String, TenantError> {
        self.listener = Some(UnixListener::bind(at).map_err(error("cannot listen"))?);
        Ok("listening".into())
    }

    /// Takes the files out that were sent.
    pub fn receive(&mut self) -> Result<String, TenantError> {
        let failed = error("cannot receive files");
        let listener = self
            .listener
            .as_ref()
            .ok_or_else(|| TenantError::Usage("listen before you receive".into()))?;
        let (stream, _) = listener.accept().map_err(&failed)?;
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        let mut space = nix::cmsg_space!([RawFd; MOST]);
        let message = recvmsg::<()>(
            stream.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )
        .map_err(|errno| failed(errno.into()))?;
        let mut count = 0;
        for part in message.cmsgs().map_err(|errno| failed(errno.into()))? {
            if let ControlMessageOwned::ScmRights(fds) = part {
                count += fds.len();
                self.received.extend(fds.into_iter().map(|fd| {
                    // SAFETY: the kernel has just made this descriptor for us.
                    unsafe { OwnedFd::from_raw_fd(fd) }
                }));
            }
        }
        Ok(format!("received {count}"))
    }

    /// Closes what was received.
    pub fn close_received(&mut self) -> String {
        let count = self.received.len();
        self.received.clear();
        format!("closed {count}")
    }
}

/// Sends all control files of this process.
pub fn pass(to: &Path) -> Result<String, TenantError> {
    let failed = error("cannot send files");
    let stream = UnixStream::connect(to).map_err(&failed)?;
    let fds = control_fds().map_err(&failed)?;
    let rights = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&[0])],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .map_err(|errno| failed(errno.into()))?;
    Ok(format!("passed {}", fds.len()))
}

/// Closes all control files of this process. Something harmless takes their numbers, which their owners close later.
pub fn let_go() -> Result<String, TenantError> {
    let failed = error("cannot close files");
    let null = File::open("/dev/null").map_err(&failed)?;
    let fds = control_fds().map_err(&failed)?;
    for fd in &fds {
        // SAFETY: both are descriptors of this process; whoever owns `fd` still owns a descriptor of that number.
        if unsafe { libc::dup2(null.as_raw_fd(), *fd) } < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
    }
    Ok(format!("let go of {}", fds.len()))
}

fn control_fds() -> io::Result<Vec<RawFd>> {
    let mut fds = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The descriptor that reads the folder is gone by now.
        let is_control = fs::read_link(entry.path())
            .is_ok_and(|target| target.file_name() == Some(OsStr::new("nvidiactl")));
        if is_control && let Some(fd) = entry.file_name().to_str().and_then(|fd| fd.parse().ok()) {
            fds.push(fd);
        }
    }
    Ok(fds)
}
