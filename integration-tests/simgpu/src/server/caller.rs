//! The process behind a request, seen through `/proc`.
//!
//! The kernel names the thread that called, and that thread sleeps until it is answered. So its memory
//! can be read, and `/proc/TID/syscall` shows the argument of its `ioctl`, which the file system
//! protocol keeps to itself for commands without a size.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use crate::sim::{Caller, Fault, Node};

/// How often to look again for a thread that has not gone to sleep yet, and how long to wait between.
const SYSCALL_TRIES: u32 = 2000;
const SYSCALL_PAUSE: Duration = Duration::from_micros(50);
const CAP_SYS_NICE: u32 = 23;

/// A thread that waits for its answer.
pub struct Process {
    tid: u32,
    pid: OnceCell<u32>,
    memory: OnceCell<Option<File>>,
}

impl Process {
    /// The thread `tid`.
    pub fn new(tid: u32) -> Self {
        Self {
            tid,
            pid: OnceCell::new(),
            memory: OnceCell::new(),
        }
    }

    /// Third argument of the system call in which the thread is.
    pub fn ioctl_argument(&self) -> Option<u64> {
        let path = format!("/proc/{}/syscall", self.tid);
        for _ in 0..SYSCALL_TRIES {
            let text = fs::read_to_string(&path).ok()?;
            if text.trim_end() != "running" {
                let argument = text.split_ascii_whitespace().nth(3)?;
                return u64::from_str_radix(argument.trim_start_matches("0x"), 16).ok();
            }
            std::thread::sleep(SYSCALL_PAUSE);
        }
        None
    }

    /// The caller's memory. Unlike `process_vm_readv`, this file is there on every kernel.
    fn memory(&self) -> Result<&File, Fault> {
        self.memory
            .get_or_init(|| {
                let path = format!("/proc/{}/mem", self.tid);
                File::options().read(true).write(true).open(path).ok()
            })
            .as_ref()
            .ok_or(Fault)
    }

    fn status_field(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.tid)).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.trim().to_owned())
    }
}

impl Caller for Process {
    fn pid(&self) -> u32 {
        *self.pid.get_or_init(|| {
            self.status_field("Tgid")
                .and_then(|tgid| tgid.parse().ok())
                .unwrap_or(self.tid)
        })
    }

    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), Fault> {
        self.memory()?
            .read_exact_at(buf, address)
            .map_err(|_| Fault)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.memory()?
            .write_all_at(bytes, address)
            .map_err(|_| Fault)
    }

    fn has_open(&self, node: Node) -> bool {
        // fdinfo tells the inode without asking the file system,
        // which is us.
        let wanted = super::inode_of(node).to_string();
        let Ok(entries) = fs::read_dir(format!("/proc/{}/fdinfo", self.tid)) else {
            return false;
        };
        entries.flatten().any(|entry| {
            fs::read_to_string(entry.path()).is_ok_and(|info| {
                info.lines().any(|line| {
                    line.strip_prefix("ino:")
                        .is_some_and(|ino| ino.trim() == wanted)
                })
            })
        })
    }

    fn may_nice(&self) -> bool {
        self.status_field("CapEff")
            .and_then(|mask| u64::from_str_radix(&mask, 16).ok())
            .is_some_and(|mask| mask >> CAP_SYS_NICE & 1 == 1)
    }
}
