//! Waking threads whose answer died with a daemon.
//!
//! A notification that a daemon has received and not answered is never delivered again: its thread would wait
//! for ever. A ptrace interrupt makes the kernel restart the system call of such a thread, and the restarted
//! call is a new notification. The thread itself notices nothing.

use std::{fs, io};

use nix::{
    sys::{
        ptrace,
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};

use super::filter;
use crate::cgroup::Hierarchy;

/// Restarts the waiting calls of every thread in the cgroup of `pid` and below it.
///
/// Returns how many threads were interrupted. One that is in the driver instead, or gone meanwhile, does not
/// mind.
pub fn restart_waiting_calls(hierarchy: &Hierarchy, pid: u32) -> usize {
    let Ok(path) = hierarchy.of_process(pid) else {
        return 0;
    };
    hierarchy
        .walk(&path)
        .iter()
        .filter_map(|cgroup| hierarchy.folder(cgroup).ok())
        .filter_map(|folder| fs::read_to_string(folder.join("cgroup.threads")).ok())
        .flat_map(|threads| {
            threads
                .lines()
                .filter_map(|line| line.parse::<i32>().ok())
                .collect::<Vec<_>>()
        })
        .filter(|thread| waits_in_allocation(*thread))
        .filter(|thread| interrupt(Pid::from_raw(*thread)).is_ok())
        .count()
}

/// Whether a thread is inside a call that the filter stops: `/proc/TID/syscall` shows number and arguments.
fn waits_in_allocation(thread: i32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{thread}/syscall")) else {
        return false;
    };
    let mut words = text.split_ascii_whitespace();
    let is_ioctl = words.next().and_then(|word| word.parse::<i64>().ok()) == Some(libc::SYS_ioctl);
    let cmd = words
        .nth(1)
        .and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    is_ioctl && cmd.is_some_and(|cmd| filter::stops(super::lower_half(cmd)))
}

fn interrupt(thread: Pid) -> io::Result<()> {
    ptrace::seize(thread, ptrace::Options::empty())?;
    // Stops only: the end of a thread that may be this process's child is for whoever waits for that.
    let stops = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
    let stopped = ptrace::interrupt(thread)
        .and_then(|()| waitid(Id::Pid(thread), stops))
        .map(drop);
    let detached = ptrace::detach(thread, None);
    stopped.and(detached).map_err(io::Error::from)
}
