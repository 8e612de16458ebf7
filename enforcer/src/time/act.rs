//! Acting on a tenant's channels: the thin shell.
//!
//! A root process that takes a duplicate of the tenant's own control fd (`pidfd_getfd`, kernel 5.6) shares its open
//! file, so the driver takes controls on the tenant's client from it. The duplicate keeps the client alive, so it
//! is held for one call and no longer.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use gpuquota_common::{
    map::DeviceKey,
    nvidia::{disable_channels, status},
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::{
    driver::{nvidia, rm::RmError, sched},
    lifecycle::ProcessView,
};

/// Why a control did not happen.
#[derive(Debug, thiserror::Error)]
pub enum ActError {
    /// The process is gone.
    #[error("process {0} is gone")]
    Gone(u32),
    /// The kernel does not let us at the process's descriptors.
    #[error("fd {fd} of process {tgid} cannot be had: {source}")]
    Descriptor {
        /// Process.
        tgid: u32,
        /// Its descriptor.
        fd: u32,
        /// Why.
        source: io::Error,
    },
    /// None of the process's descriptors is the file that the client was made through.
    #[error("process {tgid} has no control file for client {client:#x}")]
    NoFile {
        /// Process.
        tgid: u32,
        /// Client handle.
        client: u32,
    },
    /// No subdevice of the client is known.
    #[error(
        "process {tgid}, client {client:#x}: no subdevice is known, through which channels could be disabled"
    )]
    NoSubdevice {
        /// Process.
        tgid: u32,
        /// Client handle.
        client: u32,
    },
    /// The driver refuses.
    #[error("process {tgid}, client {client:#x}: {source}")]
    Refused {
        /// Process.
        tgid: u32,
        /// Client handle.
        client: u32,
        /// What the driver said.
        source: RmError,
    },
    /// What is frozen cannot be written down, so nothing is frozen.
    #[error("what is frozen cannot be kept: {0}")]
    Record(#[from] crate::kernel::KernelError),
}

impl ActError {
    /// Whether there is nothing left to act on.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_))
    }

    /// Whether the driver does not know one of the handles: what was believed about the process is out of date.
    pub fn is_stale(&self) -> bool {
        matches!(self, Self::Refused { source, .. }
            if source.is_unknown_object() || source.status() == Some(status::INVALID_CHANNEL))
    }
}

/// A process that stays itself: its number may be used again, this handle then reaches nobody.
#[derive(Debug)]
pub struct Reach {
    tgid: u32,
    started: u64,
    pidfd: OwnedFd,
}

/// A client of a process, with the fd through which it was made as far as that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Handle.
    pub handle: u32,
    /// Descriptor number in the process.
    pub fd: u32,
}

impl Reach {
    /// Opens the process; `started` is its start time in clock ticks, if it is known from before.
    pub fn open(tgid: u32, started: Option<u64>, view: &dyn ProcessView) -> Result<Self, ActError> {
        let gone = || ActError::Gone(tgid);
        let pid = Pid::from_raw(tgid.cast_signed()).ok_or_else(gone)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
        // Only now: whoever has the number at this moment is the process behind the pidfd.
        let now = view.started(tgid).ok_or_else(gone)?;
        if started.is_some_and(|started| started != now) {
            return Err(gone());
        }
        Ok(Self {
            tgid,
            started: now,
            pidfd,
        })
    }

    /// When the process was started, clock ticks since boot.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// The process.
    pub fn tgid(&self) -> u32 {
        self.tgid
    }

    /// Runs one call on a duplicate of descriptor `fd`, if that is the control node `node`.
    ///
    /// `None` if it is another file, or none.
    pub fn with_fd<T>(
        &self,
        node: DeviceKey,
        fd: u32,
        call: impl FnOnce(BorrowedFd<'_>) -> T,
    ) -> Result<Option<T>, ActError> {
        let Ok(number) = i32::try_from(fd) else {
            return Ok(None);
        };
        let duplicate = match pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(duplicate) => duplicate,
            Err(rustix::io::Errno::BADF) => return Ok(None),
            Err(rustix::io::Errno::SRCH) => return Err(ActError::Gone(self.tgid)),
            Err(source) => {
                return Err(ActError::Descriptor {
                    tgid: self.tgid,
                    fd,
                    source: source.into(),
                });
            }
        };
        if nvidia::key_of_fd(duplicate.as_fd()).is_ok_and(|key| key == node) {
            return Ok(Some(call(duplicate.as_fd())));
        }
        Ok(None)
    }

    /// Runs one call on a duplicate of the file through which the client was made.
    ///
    /// That is looked for under the number that it had then, and among all descriptors of the process if it is
    /// not there any more.
    pub fn with_client<T>(
        &self,
        node: DeviceKey,
        client: Client,
        mut call: impl FnMut(BorrowedFd<'_>) -> Result<T, RmError>,
    ) -> Result<T, ActError> {
        let refused = |source| ActError::Refused {
            tgid: self.tgid,
            client: client.handle,
            source,
        };
        let elsewhere = |error: &RmError| error.status() == Some(status::INVALID_CLIENT);
        match self.with_fd(node, client.fd, &mut call)? {
            Some(Err(error)) if elsewhere(&error) => {}
            Some(answer) => return answer.map_err(refused),
            None => {}
        }
        for fd in control_fds(self.tgid, node) {
            if fd == client.fd {
                continue;
            }
            match self.with_fd(node, fd, &mut call)? {
                Some(Err(error)) if elsewhere(&error) => {}
                Some(answer) => return answer.map_err(refused),
                None => {}
            }
        }
        Err(ActError::NoFile {
            tgid: self.tgid,
            client: client.handle,
        })
    }

    /// Sets the time slice of a channel group.
    pub fn set_timeslice(
        &self,
        node: DeviceKey,
        client: Client,
        group: u32,
        slice_us: u64,
    ) -> Result<(), ActError> {
        self.with_client(node, client, |file| {
            sched::set_timeslice(file, client.handle, group, slice_us)
        })
    }

    /// Disables or enables channels.
    pub fn set_disabled(
        &self,
        node: DeviceKey,
        client: Client,
        subdevice: u32,
        channels: &[u32],
        disabled: bool,
    ) -> Result<(), ActError> {
        for some in channels.chunks(disable_channels::MAX) {
            self.with_client(node, client, |file| {
                sched::set_disabled(file, client.handle, subdevice, some, disabled)
            })?;
        }
        Ok(())
    }
}

/// Descriptors of a process that are the control node.
pub fn control_fds(tgid: u32, node: DeviceKey) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{tgid}/fd")) else {
        return Vec::new();
    };
    let mut found: Vec<u32> = entries
        .filter_map(Result::ok)
        .filter(|entry| nvidia::key_of(&entry.path()).is_ok_and(|key| key == node))
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    struct View(Option<u64>);

    impl ProcessView for View {
        fn started(&self, _tgid: u32) -> Option<u64> {
            self.0
        }
        fn holds_control(&self, _tgid: u32, _fd: u32) -> bool {
            false
        }
        fn holds_any_control(&self, _tgid: u32) -> bool {
            false
        }
    }

    #[test]
    fn a_number_that_was_used_again_is_not_the_process() {
        let own = std::process::id();
        assert!(Reach::open(own, Some(7), &View(Some(7))).is_ok());
        let error = Reach::open(own, Some(7), &View(Some(8))).expect_err("another process");
        assert!(error.is_gone());
        assert!(
            Reach::open(own, None, &View(None))
                .expect_err("gone")
                .is_gone()
        );
    }

    #[test]
    fn only_the_control_node_is_ever_called() {
        let file = tempfile::tempfile().expect("a file");
        let other = tempfile::NamedTempFile::new().expect("another");
        let fd = {
            use std::os::fd::AsRawFd as _;
            u32::try_from(file.as_raw_fd()).expect("a number")
        };
        let reach = Reach::open(std::process::id(), None, &View(Some(1))).expect("ourselves");
        let node = nvidia::key_of(other.path()).expect("a key");
        let called = reach.with_fd(node, fd, |_| ()).expect("readable");
        assert_eq!(called, None);
        let node = nvidia::key_of_fd(file.as_fd()).expect("a key");
        assert_eq!(reach.with_fd(node, fd, |_| 7).expect("readable"), Some(7));
        assert!(control_fds(std::process::id(), node).contains(&fd));
    }

    #[test]
    fn a_client_without_its_file_is_not_controllable() {
        let other = tempfile::NamedTempFile::new().expect("a file");
        let node = nvidia::key_of(other.path()).expect("a key");
        drop(other);
        let reach = Reach::open(std::process::id(), None, &View(Some(1))).expect("ourselves");
        let client = Client {
            handle: 0xc1d0_0001,
            fd: 0,
        };
        let error = reach
            .set_timeslice(node, client, 1, 1000)
            .expect_err("no such file");
        assert!(
            matches!(
                error,
                ActError::NoFile {
                    client: 0xc1d0_0001,
                    ..
                }
            ),
            "{error}"
        );
    }
}
