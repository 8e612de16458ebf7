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
                .filter_map(|line| line.parse::<u32>().ok())
                .collect::<Vec<_>>()
        })
        .filter(|thread| whereabouts(*thread) == Whereabouts::InAllocation)
        .filter(|thread| interrupt(Pid::from_raw(thread.cast_signed())).is_ok())
        .count()
}

/// Where a thread is, by `/proc/TID/syscall`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    /// In a call that the filter stops.
    InAllocation,
    /// In another system call, or not there any more.
    Elsewhere,
    /// It runs.
    Running,
}

fn whereabouts(thread: u32) -> Whereabouts {
    match fs::read_to_string(format!("/proc/{thread}/syscall")) {
        Ok(text) => parse(&text),
        Err(_) if fs::metadata(format!("/proc/{thread}")).is_err() => Whereabouts::Elsewhere,
        Err(_) => Whereabouts::Running,
    }
}

/// What `/proc/TID/syscall` says: number and arguments of the call that the thread waits in, -1 outside of one, or "running".
fn parse(text: &str) -> Whereabouts {
    let mut words = text.split_ascii_whitespace();
    let Some(number) = words.next().and_then(|word| word.parse::<i64>().ok()) else {
        return Whereabouts::Running;
    };
    let cmd = words
        .nth(1)
        .and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    if number == libc::SYS_ioctl && cmd.is_none_or(|cmd| filter::stops(super::lower_half(cmd))) {
        Whereabouts::InAllocation
    } else {
        Whereabouts::Elsewhere
    }
}

/// Whether a thread does not make the call that it was once admitted to.
pub fn has_left(thread: u32) -> bool {
    whereabouts(thread) == Whereabouts::Elsewhere
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

#[cfg(test)]
mod tests {
    use gpuquota_common::nvidia::{IoctlCmd, nr};

    use super::*;

    #[test]
    fn where_a_thread_is_shows() {
        let alloc = IoctlCmd {
            nr: nr::RM_ALLOC,
            size: 48,
        }
        .to_raw();
        let ioctl = |cmd: u32| parse(&format!("16 0x3 {cmd:#x} 0x7ffc0 0x0 0x0 0x0 0x7f 0x7f\n"));
        assert_eq!(ioctl(alloc), Whereabouts::InAllocation);
        // FIONREAD
        assert_eq!(ioctl(0x541b), Whereabouts::Elsewhere);
        assert_eq!(parse("0 0x0 0x7f 0x400 0x0\n"), Whereabouts::Elsewhere);
        assert_eq!(parse("-1 0x7ffc 0x7f\n"), Whereabouts::Elsewhere);
        assert_eq!(parse("running\n"), Whereabouts::Running);
        assert_eq!(parse(""), Whereabouts::Running);
    }

    #[test]
    fn who_is_gone_has_left() {
        assert!(has_left(u32::MAX));
    }
}
