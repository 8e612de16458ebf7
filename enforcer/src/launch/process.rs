//! Signals to a process that is meant and no other, and what can be seen of it.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use gpuquota_common::launch::Calls;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::stopper::{Continuation, Send, undisturbed};
use crate::kernel::{KernelError, launch::Record};

/// A process, by a descriptor that never means another one.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
}

impl Process {
    /// The process that has this id now.
    pub fn open(tgid: u32) -> io::Result<Self> {
        let pid = Pid::from_raw(tgid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pidfd: pidfd_open(pid, PidfdFlags::empty())?,
        })
    }

    /// The process that has this id, if it was started then; see [`started`].
    pub fn open_started(tgid: u32, when: u64) -> io::Result<Self> {
        let process = Self::open(tgid)?;
        // Looked at through the id after the descriptor was made: if it is still that one now, it was then.
        match started(tgid) {
            Some(found) if found == when => Ok(process),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Sends a signal. A process that has ended takes none, and that is no error.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        // SAFETY: the descriptor is open; no signal information is passed.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        let error = io::Error::last_os_error();
        if sent == 0 || error.raw_os_error() == Some(libc::ESRCH) {
            Ok(())
        } else {
            Err(error)
        }
    }

    /// Has the process in a slot run again, unless others have stopped it, and returns its record.
    pub fn go_on(
        &self,
        record: &Record,
        slot: u32,
        mut continuation: Continuation,
    ) -> Result<Calls, GoOnError> {
        /// Somebody who sends more signals than that gets what comes of it.
        const ROUNDS: usize = 64;
        let mut before = record.calls(slot)?;
        for _ in 0..ROUNDS {
            match continuation.next(&before) {
                Send::Nothing => {}
                Send::Continue => self.signal(libc::SIGCONT)?,
                Send::ContinueAnd(signal) => {
                    self.signal(libc::SIGCONT)?;
                    self.signal(signal)?;
                }
                Send::Stop => self.signal(libc::SIGSTOP)?,
            }
            let after = record.calls(slot)?;
            if undisturbed(&before, &after) {
                break;
            }
            before = after;
        }
        Ok(before)
    }
}

/// Why a process could not be continued.
#[derive(Debug, thiserror::Error)]
pub enum GoOnError {
    /// The record.
    #[error(transparent)]
    Record(#[from] KernelError),
    /// The signal.
    #[error("a signal could not be sent: {0}")]
    Signal(#[from] io::Error),
}

/// When a process was started, in clock ticks since boot; `None` if it is gone.
pub fn started(tgid: u32) -> Option<u64> {
    stat_field(tgid, 22)?.parse().ok()
}

/// The state of a process or thread as `/proc/PID/stat` shows it.
pub fn state(tgid: u32) -> Option<char> {
    stat_field(tgid, 3)?.chars().next()
}

/// A field of `/proc/PID/stat`, counted as in proc(5).
fn stat_field(tgid: u32, field: usize) -> Option<String> {
    let stat = fs::read(format!("/proc/{tgid}/stat")).ok()?;
    // The name in the second field may hold anything; what follows the last bracket is field 3 on.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = String::from_utf8_lossy(stat.get(end + 2..)?);
    rest.split(' ').nth(field - 3).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_and_its_successor_is_not() {
        let tgid = std::process::id();
        let when = started(tgid).expect("it runs");
        // Its first thread may wait for the one that runs this.
        assert!(matches!(state(tgid), Some('R' | 'S')));
        let process = Process::open_started(tgid, when).expect("it runs");
        process.signal(0).expect("it may be asked");
        assert!(Process::open_started(tgid, when + 1).is_err());
    }

    #[test]
    fn a_process_that_has_ended_takes_signals_and_does_nothing() {
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let process = Process::open(child.id()).expect("not waited for yet");
        child.wait().expect("ends");
        process.signal(libc::SIGCONT).expect("no error");
    }
}
