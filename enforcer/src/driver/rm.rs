//! Calls to NVIDIA's resource manager through an open control file, whoever opened it.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use gpuquota_common::nvidia::{IoctlCmd, nr, nvos54, status};

/// Why a call did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum RmError {
    /// The ioctl fails.
    #[error("{call}: {source}")]
    Call {
        /// Which call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The driver answers with an error.
    #[error("{call}: status {status:#x}")]
    Status {
        /// Which call.
        call: &'static str,
        /// RM status, see [`status`].
        status: u32,
    },
}

impl RmError {
    /// The driver's status, if it answered.
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Call { .. } => None,
        }
    }

    /// Whether the driver says that it has no such object; any other failure says nothing about that.
    pub fn is_unknown_object(&self) -> bool {
        matches!(
            self.status(),
            Some(status::OBJECT_NOT_FOUND | status::INVALID_OBJECT_HANDLE)
        )
    }
}

/// Makes a call; `status_at` is the offset of the driver's status in the argument.
pub fn call(
    file: BorrowedFd<'_>,
    call: &'static str,
    cmd: IoctlCmd,
    argument: &mut [u8],
    status_at: Option<usize>,
) -> Result<(), RmError> {
    debug_assert_eq!(argument.len(), usize::from(cmd.size));
    // SAFETY: the argument is as long as the size in the command says, and lives through the call.
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::Ioctl::from(cmd.to_raw()),
            argument.as_mut_ptr(),
        )
    };
    if result < 0 {
        return Err(RmError::Call {
            call,
            source: io::Error::last_os_error(),
        });
    }
    match status_at.map(|at| get(argument, at)) {
        None | Some(status::OK) => Ok(()),
        Some(status) => Err(RmError::Status { call, status }),
    }
}

/// `RM_CONTROL`: command `command` on an object of a client that was made through `file`.
pub fn control(
    file: BorrowedFd<'_>,
    name: &'static str,
    (client, object): (u32, u32),
    command: u32,
    params: &mut [u8],
) -> Result<(), RmError> {
    let mut argument = [0u8; nvos54::SIZE as usize];
    put(&mut argument, nvos54::CLIENT, client);
    put(&mut argument, nvos54::OBJECT, object);
    put(&mut argument, nvos54::CMD, command);
    put_long(&mut argument, nvos54::PARAMS, params.as_mut_ptr() as u64);
    let size = u32::try_from(params.len()).unwrap_or(u32::MAX);
    put(&mut argument, nvos54::PARAMS_SIZE, size);
    call(
        file,
        name,
        IoctlCmd {
            nr: nr::RM_CONTROL,
            size: nvos54::SIZE,
        },
        &mut argument,
        Some(nvos54::STATUS),
    )
}

/// Writes a word of an argument.
pub fn put(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
}

/// Writes two words of an argument.
pub fn put_long(bytes: &mut [u8], at: usize, long: u64) {
    bytes[at..at + 8].copy_from_slice(&long.to_ne_bytes());
}

/// Reads a word of an argument.
pub fn get(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}
