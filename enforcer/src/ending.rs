//! Ending processes: asked first, given a grace, then killed.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};

/// How long a process has to end by itself.
pub const GRACE: Duration = Duration::from_secs(5);

/// The processes that are being ended.
#[derive(Clone, Debug, Default)]
pub struct Endings(Arc<Mutex<BTreeSet<u32>>>);

impl Endings {
    /// Ends a process: SIGTERM, and SIGKILL if it is still there after `grace`. One that is being ended already is left
    /// to that.
    ///
    /// `is_meant` is asked once the process is held by a descriptor: whether it is still the one in question, since a
    /// process id may have been used again.
    pub fn end(&self, pid: u32, grace: Duration, is_meant: impl FnOnce() -> bool) {
        let Some(process) = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            return;
        };
        if !is_meant() || !self.begin(pid) {
            return;
        }
        let endings = self.clone();
        let spawned = thread::Builder::new().name("ending".into()).spawn(move || {
            if let Err(error) = end(&process, grace) {
                warn!(pid, %error, "could not be ended");
            } else {
                info!(pid, "ended");
            }
            endings.done(pid);
        });
        if let Err(error) = spawned {
            warn!(pid, %error, "no thread to end a process");
            self.done(pid);
        }
    }

    fn begin(&self, pid: u32) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pid)
    }

    fn done(&self, pid: u32) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&pid);
    }
}

fn end(process: &OwnedFd, grace: Duration) -> io::Result<()> {
    pidfd_send_signal(process, Signal::TERM)?;
    if has_ended(process, grace)? {
        return Ok(());
    }
    pidfd_send_signal(process, Signal::KILL)?;
    Ok(())
}

fn has_ended(process: &OwnedFd, patience: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut fds, patience) {
            Err(nix::Error::EINTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::ExitStatusExt as _,
        process::{Command, ExitStatus},
    };

    use super::*;

    fn ended(script: &str, grace: Duration) -> ExitStatus {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell");
        // The script says when its trap is set.
        let mut first = [0];
        io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut first).expect("a byte");
        Endings::default().end(child.id(), grace, || true);
        child.wait().expect("waited for")
    }

    #[test]
    fn who_ends_when_asked_is_not_killed() {
        let status = ended(
            "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done",
            Duration::from_secs(20),
        );
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn who_does_not_end_is_killed() {
        let status = ended(
            "trap '' TERM; echo; while :; do sleep 0.01; done",
            Duration::from_millis(100),
        );
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn another_process_with_the_same_id_is_left_alone() {
        let mut child = Command::new("/bin/sleep")
            .arg("20")
            .spawn()
            .expect("a process");
        Endings::default().end(child.id(), Duration::ZERO, || false);
        thread::sleep(Duration::from_millis(50));
        assert!(child.try_wait().expect("asked").is_none());
        child.kill().expect("ours");
        child.wait().expect("waited for");
    }
}
