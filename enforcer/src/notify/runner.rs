//! `gpuquotactl run`: starts a command under the filter and keeps its listener.

use std::{
    ffi::{CString, OsString},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::{
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask},
        socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
    },
    unistd::{Gid, Pid, Uid, User, getgrouplist, setgroups, setresgid, setresuid},
};
use rustix::process::{PidfdFlags, pidfd_open};

use super::{
    NotifyError, filter,
    protocol::{self, Answer, Metadata, ProcessState, SECCOMP_FD},
    recover,
    supervisor::{self, RefuseAll},
    system,
};
use crate::cgroup::Hierarchy;

/// Time between attempts to reach a daemon that is gone.
const RETRY: Duration = Duration::from_millis(200);

/// What to run, and as whom.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The tenant.
    pub tenant: String,
    /// GPUs that the command shall see, as `CUDA_VISIBLE_DEVICES` names them; empty: all.
    pub gpus: Vec<String>,
    /// User to run as; absent: the caller.
    pub uid: Option<u32>,
    /// Group to run as; absent: the user's.
    pub gid: Option<u32>,
    /// The daemon's listener socket.
    pub socket: PathBuf,
    /// The command.
    pub command: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// Runs the command to its end and returns its exit code, 128 + signal if a signal ended it.
pub fn run(options: &RunOptions) -> Result<u8, NotifyError> {
    let forwarded = forwarded_signals();
    // Blocked before any thread exists, so that only the forwarding thread receives them.
    let before = forwarded
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map_err(|error| system("sigprocmask")(error.into()))?;
    let (ours, theirs) = UnixStream::pair().map_err(system("socketpair"))?;
    let mut command = Command::new(&options.command);
    command.args(&options.args);
    if !options.gpus.is_empty() {
        command.env("CUDA_VISIBLE_DEVICES", options.gpus.join(","));
    }
    let child = ChildSetup {
        program: filter::program(),
        // Without privileges the kernel wants the promise that the command can gain none either.
        no_new_privs: !nix::unistd::geteuid().is_root(),
        identity: identity(options)?,
        mask: before,
        handshake: theirs.as_raw_fd(),
    };
    // SAFETY: the closure makes only async-signal-safe calls, see `ChildSetup::run`.
    unsafe { command.pre_exec(move || child.run()) };
    // `spawn` returns only when the command has been executed, and that waits for the handshake.
    let handshake = {
        let options = options.clone();
        thread::spawn(move || hand_over_first(&ours, &options))
    };
    let spawned = command.spawn();
    drop(theirs);
    let kept = handshake
        .join()
        .map_err(|_| system("handshake")(io::Error::other("its thread panicked")))?;
    let (kept, mut child) = match (kept, spawned) {
        (Ok(kept), Ok(child)) => (kept, child),
        // The reason why the daemon said no is why the command was not executed.
        (Err(error), _) => return Err(error),
        (Ok(_), Err(source)) => {
            return Err(NotifyError::Command {
                command: options.command.to_string_lossy().into_owned(),
                source,
            });
        }
    };
    forward_signals(forwarded, child.id());
    keep(kept, options.clone());
    wait_for_exit(&mut child)
        .map(exit_code)
        .map_err(system("waiting for the command"))
}

/// Waits for the end of the command, and takes nothing else for it.
///
/// A plain wait would also return when another thread of the runner stops the command to have its call
/// asked again ([`recover`]): Linux reports the stops of a traced child to the whole tracing process.
fn wait_for_exit(child: &mut Child) -> io::Result<ExitStatus> {
    // A child that has not been waited for keeps its id.
    let pid = rustix::process::Pid::from_child(child);
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    while let Err(error) = poll(&mut ended, PollTimeout::NONE) {
        if error != nix::Error::EINTR {
            return Err(error.into());
        }
    }
    child.wait()
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// What happens between fork and exec.
struct ChildSetup {
    program: Vec<libc::sock_filter>,
    no_new_privs: bool,
    identity: Option<Identity>,
    mask: SigSet,
    handshake: RawFd,
}

/// A user to become.
struct Identity {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

fn identity(options: &RunOptions) -> Result<Option<Identity>, NotifyError> {
    if options.uid.is_none() && options.gid.is_none() {
        return Ok(None);
    }
    let uid = options.uid.map_or_else(nix::unistd::getuid, Uid::from_raw);
    let user = User::from_uid(uid).map_err(|error| system("getpwuid")(error.into()))?;
    let gid = match (options.gid, &user) {
        (Some(gid), _) => Gid::from_raw(gid),
        (None, Some(user)) => user.gid,
        (None, None) => Gid::from_raw(uid.as_raw()),
    };
    let groups = match user.and_then(|user| CString::new(user.name).ok()) {
        Some(name) => {
            getgrouplist(&name, gid).map_err(|error| system("getgrouplist")(error.into()))?
        }
        None => vec![gid],
    };
    Ok(Some(Identity { uid, gid, groups }))
}

impl ChildSetup {
    /// Installs the filter, hands the listener to the parent, waits for its word, becomes the user.
    ///
    /// Async-signal-safe: system calls on memory that was prepared before the fork.
    fn run(&self) -> io::Result<()> {
        let listener = filter::install(&self.program, self.no_new_privs)?;
        let fds = [listener.as_raw_fd()];
        let pid = std::process::id().to_ne_bytes();
        sendmsg::<()>(
            self.handshake,
            &[io::IoSlice::new(&pid)],
            &[ControlMessage::ScmRights(&fds)],
            MsgFlags::MSG_NOSIGNAL,
            None,
        )?;
        drop(listener);
        let mut word = [0; 1];
        // SAFETY: reads into a buffer of that size.
        let read = unsafe { libc::read(self.handshake, word.as_mut_ptr().cast(), 1) };
        if read != 1 {
            // The parent reports the reason.
            return Err(io::Error::from_raw_os_error(libc::ECANCELED));
        }
        if let Some(Identity { uid, gid, groups }) = &self.identity {
            setgroups(groups)?;
            setresgid(*gid, *gid, *gid)?;
            setresuid(*uid, *uid, *uid)?;
        }
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask), None)?;
        Ok(())
    }
}

/// A listener that a daemon serves, and the connection whose end tells that it no longer does.
struct Kept {
    pid: u32,
    listener: OwnedFd,
    link: UnixStream,
    timeout: Duration,
}

/// Takes the listener from the child, gives it to the daemon, and lets the child go on.
fn hand_over_first(child: &UnixStream, options: &RunOptions) -> Result<Kept, NotifyError> {
    let kept = offer(child, options);
    if kept.is_err() {
        // The child holds a copy of this end too, so only a shutdown ends its wait.
        let _ = child.shutdown(Shutdown::Both);
    }
    kept
}

fn offer(child: &UnixStream, options: &RunOptions) -> Result<Kept, NotifyError> {
    let (pid, listener) = receive_from_child(child)?;
    let (link, timeout) = hand_over(options, pid, &listener, false)?;
    (&mut &*child)
        .write_all(&[1])
        .map_err(system("handshake with the command"))?;
    Ok(Kept {
        pid,
        listener,
        link,
        timeout,
    })
}

fn receive_from_child(child: &UnixStream) -> Result<(u32, OwnedFd), NotifyError> {
    let mut pid = [0; 4];
    let mut control = nix::cmsg_space!(RawFd);
    let mut buffers = [io::IoSliceMut::new(&mut pid)];
    let message = recvmsg::<()>(
        child.as_raw_fd(),
        &mut buffers,
        Some(&mut control),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .map_err(|error| system("handshake with the command")(error.into()))?;
    let fd = message
        .cmsgs()
        .map_err(|error| system("handshake with the command")(error.into()))?
        .find_map(|part| match part {
            ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
            _ => None,
        })
        // The child could not install the filter; its own error comes with `spawn`.
        .ok_or_else(|| NotifyError::Filter(io::ErrorKind::Unsupported.into()))?;
    // SAFETY: the kernel has just put this descriptor into this process.
    let listener = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok((u32::from_ne_bytes(pid), listener))
}

/// Gives the listener to the daemon and reads its answer.
fn hand_over(
    options: &RunOptions,
    pid: u32,
    listener: &OwnedFd,
    again: bool,
) -> Result<(UnixStream, Duration), NotifyError> {
    let socket_error = |source| NotifyError::Socket {
        path: options.socket.clone(),
        source,
    };
    let stream = UnixStream::connect(&options.socket).map_err(socket_error)?;
    let metadata = Metadata {
        tenant: options.tenant.clone(),
        again,
    };
    let state = ProcessState {
        oci_version: "1.1.0".into(),
        fds: vec![SECCOMP_FD.into()],
        pid,
        metadata: serde_json::to_string(&metadata)
            .map_err(|error| NotifyError::Protocol(error.to_string()))?,
        ..ProcessState::default()
    };
    protocol::send(&stream, &state, listener.as_fd()).map_err(socket_error)?;
    let mut line = String::new();
    BufReader::new(&stream)
        .take(64 << 10)
        .read_line(&mut line)
        .map_err(socket_error)?;
    let answer: Answer =
        serde_json::from_str(&line).map_err(|error| NotifyError::Protocol(error.to_string()))?;
    match answer.error {
        Some(error) => Err(NotifyError::Rejected(error)),
        None => Ok((stream, Duration::from_millis(answer.listener_timeout_ms))),
    }
}

/// Watches over the listener for as long as the command runs, on a thread of its own.
fn keep(kept: Kept, options: RunOptions) {
    thread::spawn(move || {
        let mut kept = kept;
        loop {
            // The daemon sends nothing more; the end of the stream is the end of the daemon.
            let mut byte = [0; 1];
            while matches!((&kept.link).read(&mut byte), Ok(1)) {}
            // A daemon also hangs up when the last task with the filter is gone. As long as there is one, the
            // listener stays open, whatever failed: without it every stopped call would fail as unknown.
            if supervisor::is_deserted(&kept.listener) {
                return;
            }
            find_daemon(&mut kept, &options);
        }
    });
}

/// Looks for a new daemon, and answers the calls itself once they have waited long enough. Returns when there is
/// one again, or when nobody carries the filter any more.
fn find_daemon(kept: &mut Kept, options: &RunOptions) {
    let gone_since = Instant::now();
    while gone_since.elapsed() < kept.timeout {
        if reconnect(kept, options) {
            return;
        }
        thread::sleep(RETRY);
    }
    // Calls that the daemon had received come again; then all that wait are refused as out of memory.
    if let Ok(hierarchy) = Hierarchy::open(None) {
        let pid = kept.pid;
        thread::spawn(move || recover::restart_waiting_calls(&hierarchy, pid));
    }
    let found = std::cell::Cell::new(None);
    let served = supervisor::serve(&kept.listener, &RefuseAll, &|| match hand_over(
        options,
        kept.pid,
        &kept.listener,
        true,
    ) {
        Ok(link) => {
            found.set(Some(link));
            true
        }
        Err(_) => false,
    });
    if let Some((link, timeout)) = found.into_inner() {
        kept.link = link;
        kept.timeout = timeout;
    } else if let Err(error) = served {
        eprintln!("gpuquotactl run: answering driver calls: {error}");
    }
}

fn reconnect(kept: &mut Kept, options: &RunOptions) -> bool {
    let Ok((link, timeout)) = hand_over(options, kept.pid, &kept.listener, true) else {
        return false;
    };
    kept.link = link;
    kept.timeout = timeout;
    true
}

/// Signals that a user sends to the runner and means for the command.
fn forwarded_signals() -> SigSet {
    [
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
    ]
    .into_iter()
    .collect()
}

/// Passes signals on. A terminal sends its own to the command as well, so those are only kept off the runner.
fn forward_signals(signals: SigSet, child: u32) {
    thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            let from_terminal = matches!(signal, Signal::SIGINT | Signal::SIGQUIT)
                && io::IsTerminal::is_terminal(&io::stdin());
            if !from_terminal {
                // The command may be gone; then the runner is about to end.
                let _ = kill(Pid::from_raw(child.cast_signed()), signal);
            }
        }
    });
}
