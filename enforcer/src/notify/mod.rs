//! The deny backend that every kernel offers: seccomp user notification.
//!
//! A command started by [`runner`] (or by an OCI runtime with our profile) carries a [`filter`] that stops
//! allocating driver calls until the holder of the filter's listener answers. [`listener`] takes listeners over
//! a socket, [`supervisor`] answers. Works under lockdown and needs no BPF; it governs what was started
//! through us, and all that this starts.
//!
//! # When the daemon is gone
//!
//! The runner keeps a copy of the listener. While no daemon serves it, calls wait; a new daemon gets the
//! listener again and they go on. If none comes within `listener-timeout`, the runner itself refuses them as
//! out of memory. If the runner is gone too, the kernel fails the calls (`ENOSYS`). So nobody waits for ever,
//! and nobody runs without a limit.

pub mod filter;
pub mod listener;
pub mod protocol;
mod recover;
pub mod runner;
pub mod supervisor;

use std::{io, path::PathBuf};

pub use recover::{has_left, restart_waiting_calls};

/// What can go wrong with the notify backend.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// The kernel refuses the filter.
    #[error("the kernel refuses the seccomp filter: {0}")]
    Filter(io::Error),
    /// The socket cannot be used.
    #[error("{path}: {source}")]
    Socket {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon does not take the listener.
    #[error("{0}")]
    Rejected(String),
    /// A message is not as the protocol says.
    #[error("the peer of the listener socket sent something else than the protocol says: {0}")]
    Protocol(String),
    /// The peer has hung up without a word: runtimes look that way whether the socket is there.
    #[error("the peer of the listener socket hung up without sending anything")]
    Silent,
    /// The command cannot be run.
    #[error("{command}: {source}")]
    Command {
        /// Its name.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// A system call fails.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// What the kernel looks at of a register that holds an `unsigned int`.
#[expect(clippy::cast_possible_truncation, reason = "that is the point")]
fn lower_half(register: u64) -> u32 {
    register as u32
}

/// Names the system call that failed.
fn system(what: &'static str) -> impl Fn(io::Error) -> NotifyError {
    move |source| NotifyError::System { what, source }
}
