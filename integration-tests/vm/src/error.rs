//! What can go wrong around a virtual machine, as opposed to inside the script that it runs.

use std::{io, path::PathBuf, time::Duration};

/// Why a virtual machine did not deliver an exit status.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel is neither in the cache nor to be had.
    #[error("no kernel '{kernel}' to boot: {reason}")]
    NoKernel {
        /// The kernel's name in `scripts/vm-kernel.sh`, or its path.
        kernel: String,
        /// What the script that fetches or builds it said.
        reason: String,
    },

    /// A program of the workspace is not in the target directory.
    #[error("{path} is not built: run `cargo build --workspace --exclude gpuquota-ebpf --all-targets` first", path = path.display())]
    NotBuilt {
        /// Where it was looked for.
        path: PathBuf,
    },

    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// A path cannot be put into the ramdisk: it is relative, or lies below a path that is no directory there.
    #[error("{path:?} cannot be put into the ramdisk: {reason}")]
    GuestPath {
        /// The path inside the virtual machine.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A host program that the harness needs is missing or failed.
    #[error("{command} failed: {reason}")]
    Tool {
        /// The command line.
        command: String,
        /// Its error output, or why it could not be started.
        reason: String,
    },

    /// The kernel did not come up, twice. See the console in `log`.
    #[error("the kernel did not come up in two tries: {reason}; console in {log}:\n{tail}", log = log.display())]
    Boot {
        /// What happened the second time.
        reason: String,
        /// The file with the whole console.
        log: PathBuf,
        /// The part of the console that tells most.
        tail: String,
    },

    /// The kernel came up and then panicked, oopsed or powered off before the script ended.
    #[error("the kernel died under the script; console in {log}:\n{tail}", log = log.display())]
    Died {
        /// The file with the whole console.
        log: PathBuf,
        /// The part of the console that tells most.
        tail: String,
    },

    /// The script did not end in time.
    #[error("the script did not end within {limit:?}; console in {log}:\n{tail}", log = log.display())]
    Timeout {
        /// The time that the script was given.
        limit: Duration,
        /// The file with the whole console.
        log: PathBuf,
        /// The part of the console that tells most.
        tail: String,
    },
}

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
