//! What a thread does at a moment: pure.

use gpuquota_common::idle::what;
use serde::{Deserialize, Serialize};

/// What a thread, or a whole process, does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Runs on a CPU.
    Running,
    /// Could run and has no CPU.
    Queued,
    /// Waits for a file, a pipe, a socket or a device, or for a page of memory that comes from one.
    Io,
    /// Waits in a call of a device's driver (`ioctl`).
    Driver,
    /// Waits for another thread or process: `futex`, which locks, conditions and semaphores come down to, or a file lock.
    Lock,
    /// Waits for time to pass, a child or a signal.
    Asleep,
    /// Stopped or frozen by gpuquota.
    Held,
    /// Stopped or frozen by somebody else.
    Halted,
}

impl State {
    /// How many there are.
    pub const COUNT: usize = 8;
    /// All of them, in the order of their values.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Running,
        Self::Queued,
        Self::Io,
        Self::Driver,
        Self::Lock,
        Self::Asleep,
        Self::Held,
        Self::Halted,
    ];
    /// Its place in an array.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether a thread in it has, or wants, a CPU.
    pub const fn is_runnable(self) -> bool {
        matches!(self, Self::Running | Self::Queued)
    }

    /// A word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Queued => "queued",
            Self::Io => "io",
            Self::Driver => "driver",
            Self::Lock => "lock",
            Self::Asleep => "asleep",
            Self::Held => "held",
            Self::Halted => "halted",
        }
    }

    /// What a thread does from a moment on; `None` if it has ended or nothing changes. See
    /// [`Moment::what`](gpuquota_common::idle::Moment::what).
    pub fn of(what: u32, syscall: u32) -> Option<Self> {
        match what {
            what::RUNS => Some(Self::Running),
            what::QUEUED => Some(Self::Queued),
            what::SLEEPS => Some(Self::in_call(syscall)),
            // A driver that waits without a word to signals does so for its device, and everybody else for a disk.
            what::WAITS if i64::from(syscall) == libc::SYS_ioctl => Some(Self::Driver),
            what::WAITS => Some(Self::Io),
            what::STOPPED | what::FROZEN => Some(Self::Halted),
            _ => None,
        }
    }

    /// What a thread that sleeps in a system call waits for.
    fn in_call(syscall: u32) -> Self {
        match i64::from(syscall) {
            libc::SYS_ioctl => Self::Driver,
            libc::SYS_futex
            | libc::SYS_futex_waitv
            | FUTEX_WAIT
            | libc::SYS_flock
            | libc::SYS_fcntl
            | libc::SYS_semop
            | libc::SYS_semtimedop => Self::Lock,
            call if IO.contains(&call) => Self::Io,
            _ => Self::Asleep,
        }
    }
}

/// `futex_wait` of Linux 6.7.
const FUTEX_WAIT: i64 = 455;

/// Calls that wait for what files, pipes, sockets and devices have or take.
const IO: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    libc::SYS_msync,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_copy_file_range,
    libc::SYS_io_getevents,
    libc::SYS_io_uring_enter,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
];

/// The state of a thread as `/proc` tells it: the letter in `stat`, and the number in `syscall` if it is in a call.
pub fn of_proc(letter: char, syscall: Option<u32>) -> Option<State> {
    let none = u32::MAX;
    match letter {
        'R' => Some(State::Running),
        'S' | 'I' => State::of(what::SLEEPS, syscall.unwrap_or(none)),
        'D' => State::of(what::WAITS, syscall.unwrap_or(none)),
        'T' | 't' => State::of(what::STOPPED, none),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeps(call: i64) -> Option<State> {
        State::of(what::SLEEPS, u32::try_from(call).expect("a number"))
    }

    #[test]
    fn a_call_says_what_is_waited_for() {
        assert_eq!(sleeps(libc::SYS_futex), Some(State::Lock));
        assert_eq!(sleeps(libc::SYS_read), Some(State::Io));
        assert_eq!(sleeps(libc::SYS_ppoll), Some(State::Io));
        assert_eq!(sleeps(libc::SYS_ioctl), Some(State::Driver));
        assert_eq!(sleeps(libc::SYS_clock_nanosleep), Some(State::Asleep));
        assert_eq!(sleeps(libc::SYS_wait4), Some(State::Asleep));
        assert_eq!(State::of(what::SLEEPS, u32::MAX), Some(State::Asleep));
    }

    #[test]
    fn who_cannot_be_interrupted_waits_for_a_device() {
        let call = |number: i64| u32::try_from(number).expect("a number");
        let waits = |number| State::of(what::WAITS, call(number));
        assert_eq!(waits(libc::SYS_ioctl), Some(State::Driver));
        assert_eq!(waits(libc::SYS_mmap), Some(State::Io));
        assert_eq!(State::of(what::QUEUED, 0), Some(State::Queued));
        assert_eq!(State::of(what::FROZEN, 0), Some(State::Halted));
        assert_eq!(State::of(what::ENDED, 0), None);
        assert_eq!(State::of(what::SAMPLE, 0), None);
    }

    #[test]
    fn every_state_has_its_place() {
        for (at, state) in State::ALL.into_iter().enumerate() {
            assert_eq!(state.index(), at);
        }
    }

    #[test]
    fn proc_says_the_same() {
        let call = u32::try_from(libc::SYS_futex).expect("a number");
        assert_eq!(of_proc('S', Some(call)), Some(State::Lock));
        assert_eq!(of_proc('R', None), Some(State::Running));
        assert_eq!(of_proc('D', None), Some(State::Io));
        assert_eq!(of_proc('T', None), Some(State::Halted));
        assert_eq!(of_proc('Z', None), None);
    }
}
