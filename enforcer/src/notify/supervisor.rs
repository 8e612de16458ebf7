//! Answers the calls that a filter has stopped.
//!
//! One thread a listener: a tenant that makes its own answer slow (by memory that faults for ever, say) waits
//! for itself and for nobody else. What to answer is [`Judge`]'s business.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
};

use gpuquota_common::{
    map::call,
    nvidia::{IoctlCmd, status, status_offset, uvm, uvm_args},
    rm::{self, Call, CallerMemory, Unreadable},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::managed::Range;

/// A driver call that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The calling thread.
    pub thread: u32,
    /// fd of the ioctl.
    pub fd: u32,
    /// Command, after unwrapping.
    pub cmd: IoctlCmd,
    /// Argument, after unwrapping.
    pub arg: u64,
    /// What it means.
    pub call: Call,
    /// The range that `nvidia-uvm` is asked about, if it is that: managed memory, or a context's own pool.
    pub range: Option<Range>,
}

/// What to do with a waiting call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it go on to the driver.
    Continue,
    /// Answer it as the driver would, with this RM status.
    Refuse(u32),
    /// Let the call fail with this error number.
    Fail(i32),
}

/// Decides waiting calls.
pub trait Judge {
    /// What to do with a call. Only calls that allocate memory are asked about.
    fn judge(&self, waiting: &Waiting) -> Verdict;
    /// A call that was to go on is gone: its thread was killed or interrupted.
    fn withdraw(&self, waiting: &Waiting);
}

/// Refuses everything: what remains to be done for a listener without a daemon.
#[derive(Clone, Copy, Debug)]
pub struct RefuseAll;

impl Judge for RefuseAll {
    fn judge(&self, waiting: &Waiting) -> Verdict {
        refusal_of(waiting)
    }
    fn withdraw(&self, _waiting: &Waiting) {}
}

/// The way to refuse a call for good.
///
/// libcuda passes over the driver's status where it asks about managed memory; `EPERM` is the error number that it has a
/// CUDA error of its own for (800, not permitted; measured on 580.159.04).
pub fn refusal_of(waiting: &Waiting) -> Verdict {
    if waiting.range.is_some() {
        Verdict::Fail(libc::EPERM)
    } else {
        Verdict::Refuse(status::NO_MEMORY)
    }
}

/// Memory of a thread whose call waits.
///
/// The file is tied to the address space that it was opened on, so a process id that is used again cannot
/// redirect it.
struct ThreadMemory(File);

impl ThreadMemory {
    fn open(thread: u32) -> io::Result<Self> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{thread}/mem"))
            .map(Self)
    }
}

impl CallerMemory for ThreadMemory {
    fn words<const N: usize>(&self, address: u64) -> Option<[u32; N]> {
        let mut words = [0; N];
        for (word, at) in words.iter_mut().zip((address..).step_by(4)) {
            let mut bytes = [0; 4];
            self.0.read_exact_at(&mut bytes, at).ok()?;
            *word = u32::from_ne_bytes(bytes);
        }
        Some(words)
    }
}

/// Serves a listener until nobody carries its filter any more, or `stop` says so.
///
/// `stop` is asked about once a second and after every call.
pub fn serve(listener: &OwnedFd, judge: &dyn Judge, stop: &dyn Fn() -> bool) -> io::Result<()> {
    while !stop() {
        let mut fds = [PollFd::new(
            std::os::fd::AsFd::as_fd(listener),
            PollFlags::POLLIN,
        )];
        match poll(&mut fds, PollTimeout::from(1000u16)) {
            Ok(0) | Err(nix::Error::EINTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let happened = fds[0].revents().unwrap_or(PollFlags::empty());
        if happened.contains(PollFlags::POLLIN) {
            answer_one(listener, judge)?;
        } else if happened.intersects(PollFlags::POLLHUP | PollFlags::POLLERR) {
            // Every task with the filter is gone (kernel 5.8).
            return Ok(());
        }
    }
    Ok(())
}

/// Whether no task carries the filter any more.
pub fn is_deserted(listener: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(
        std::os::fd::AsFd::as_fd(listener),
        PollFlags::POLLIN,
    )];
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds[0]
            .revents()
            .is_some_and(|happened| happened.contains(PollFlags::POLLHUP))
}

/// Receives one notification and answers it.
fn answer_one(listener: &OwnedFd, judge: &dyn Judge) -> io::Result<()> {
    // SAFETY: all-zero is a value of this plain structure, and the one that the kernel asks for.
    let mut notification: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    match request(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &mut notification) {
        Ok(()) => {}
        // Killed or interrupted between poll and here.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {
            return Ok(());
        }
        Err(error) => return Err(error),
    }
    let memory = ThreadMemory::open(notification.pid);
    // Only now is it certain that the memory is the caller's: it was still waiting after the file was opened.
    if !still_waits(listener, notification.id) {
        return Ok(());
    }
    let mut response = libc::seccomp_notif_resp {
        id: notification.id,
        val: 0,
        error: 0,
        flags: 0,
    };
    let mut admitted = None;
    match memory.map_err(|_| Unreadable).and_then(|memory| {
        let waiting = decode(&notification, &memory)?;
        Ok((memory, waiting))
    }) {
        // The driver would fail the copy likewise; what cannot be checked is never let through.
        Err(Unreadable) => response.error = -libc::EFAULT,
        Ok((memory, waiting)) => match decide(judge, &waiting) {
            Verdict::Continue => {
                response.flags = super::lower_half(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE);
                admitted = Some(waiting);
            }
            Verdict::Fail(number) => response.error = -number,
            Verdict::Refuse(code) => {
                if refuse(&memory, &waiting, code).is_err() {
                    response.error = -libc::EFAULT;
                }
            }
        },
    }
    match request(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &mut response) {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
            if let Some(waiting) = admitted {
                judge.withdraw(&waiting);
            }
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn decide(judge: &dyn Judge, waiting: &Waiting) -> Verdict {
    if waiting.call.call != call::ALLOC_MEMORY && waiting.range.is_none() {
        return Verdict::Continue;
    }
    judge.judge(waiting)
}

fn decode(
    notification: &libc::seccomp_notif,
    memory: &ThreadMemory,
) -> Result<Waiting, Unreadable> {
    let [fd, cmd, arg, ..] = notification.data.args;
    // The kernel looks only at the lower halves of fd and command.
    let raw = super::lower_half(cmd);
    let outer = IoctlCmd::from_raw(raw);
    let range = if raw == uvm::VALIDATE_VA_RANGE {
        let word = |at| memory.long(arg + at as u64).ok_or(Unreadable);
        Some(Range {
            base: word(uvm_args::BASE)?,
            length: word(uvm_args::LENGTH)?,
        })
    } else {
        None
    };
    let (cmd, arg) = rm::unwrap_xfer(memory, outer, arg)?;
    let mut call = Call::default();
    rm::decode(memory, cmd, arg, &mut call)?;
    Ok(Waiting {
        thread: notification.pid,
        fd: super::lower_half(fd),
        cmd,
        arg,
        call,
        range,
    })
}

/// Writes the status where the driver would.
fn refuse(memory: &ThreadMemory, waiting: &Waiting, code: u32) -> io::Result<()> {
    let offset = status_offset(waiting.cmd).ok_or(io::ErrorKind::InvalidInput)?;
    memory
        .0
        .write_all_at(&code.to_ne_bytes(), waiting.arg + offset as u64)
}

fn still_waits(listener: &OwnedFd, mut id: u64) -> bool {
    request(listener, libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &mut id).is_ok()
}

fn request<T>(listener: &OwnedFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: `T` is the structure that the request is defined for; it lives through the call.
    if unsafe { libc::ioctl(listener.as_raw_fd(), request, std::ptr::from_mut(argument)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
