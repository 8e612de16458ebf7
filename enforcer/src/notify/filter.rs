//! The seccomp filter: which system calls wait for an answer.

use std::{
    io,
    os::fd::{FromRawFd as _, OwnedFd, RawFd},
};

use gpuquota_common::nvidia::{IoctlCmd, nr, nvos02, nvos32, nvos64, uvm, xfer};
use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_ERRNO, SECCOMP_RET_USER_NOTIF, sock_filter, sock_fprog,
};

/// Number and size of an ioctl command; type and direction are ignored by the driver, so by us.
const CMD_MASK: u32 = 0x3fff_00ff;

/// The driver calls that can take video memory, pin host memory or make managed memory, whichever file they go to.
const ALLOCATING: [IoctlCmd; 6] = [
    IoctlCmd {
        nr: nr::RM_ALLOC,
        size: nvos64::SIZE,
    },
    IoctlCmd {
        nr: nr::RM_ALLOC,
        size: nvos64::SIZE_NVOS21,
    },
    IoctlCmd {
        nr: nr::RM_ALLOC_MEMORY,
        size: nvos02::SIZE,
    },
    IoctlCmd {
        nr: nr::RM_VID_HEAP_CONTROL,
        size: nvos32::SIZE,
    },
    IoctlCmd {
        nr: nr::IOCTL_XFER_CMD,
        size: xfer::SIZE,
    },
    IoctlCmd::from_raw(uvm::VALIDATE_VA_RANGE),
];

/// Whether the filter stops a command.
pub fn stops(cmd: u32) -> bool {
    ALLOCATING.contains(&IoctlCmd::from_raw(cmd))
}

/// How a caller of one architecture names `ioctl`.
struct Abi {
    /// `AUDIT_ARCH_*`.
    arch: u32,
    /// System call number.
    ioctl: u32,
    /// Whether the observer sees its calls. Calls that it cannot see are refused, not let through.
    observed: bool,
}

#[cfg(target_arch = "x86_64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_003e,
        ioctl: 16,
        observed: true,
    },
    // x32: the same architecture, marked in the number (514 | 0x40000000). Syscall tracepoints do not report it.
    Abi {
        arch: 0xc000_003e,
        ioctl: 0x4000_0202,
        observed: false,
    },
    // i386: syscall tracepoints do not report compat calls.
    Abi {
        arch: 0x4000_0003,
        ioctl: 54,
        observed: false,
    },
];
#[cfg(target_arch = "aarch64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_00b7,
        ioctl: 29,
        observed: true,
    },
    Abi {
        arch: 0x4000_0028,
        ioctl: 54,
        observed: false,
    },
];

/// Offsets in `struct seccomp_data`.
mod data {
    pub const NR: u32 = 0;
    pub const ARCH: u32 = 4;
    /// Low half of the second argument; both architectures are little-endian.
    pub const CMD: u32 = 16 + 8;
}

fn op(code: u32, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "opcodes are below 256 by definition"
)]
fn jump(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

/// The filter program.
///
/// For every ABI: not its architecture or not its `ioctl`, on to the next; else the command decides.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a handful of commands, counted at compile time"
)]
pub fn program() -> Vec<sock_filter> {
    const COMMANDS: u8 = ALLOCATING.len() as u8;
    let load = |offset| op(BPF_LD | BPF_W | BPF_ABS, offset);
    let equal = |k, jt, jf| jump(BPF_JMP | BPF_JEQ | BPF_K, k, jt, jf);
    let answer = |value| op(BPF_RET | BPF_K, value);
    // load cmd, mask, the comparisons, allow, stop
    let decision = 2 + COMMANDS + 2;
    let mut program = Vec::new();
    for abi in ABIS {
        program.push(load(data::ARCH));
        program.push(equal(abi.arch, 0, 2 + decision));
        program.push(load(data::NR));
        program.push(equal(abi.ioctl, 0, decision));
        program.push(load(data::CMD));
        program.push(op(BPF_ALU | BPF_AND | BPF_K, CMD_MASK));
        for (index, cmd) in (0..).zip(ALLOCATING) {
            let left: u8 = COMMANDS - index;
            program.push(equal(cmd.to_raw() & CMD_MASK, left, 0));
        }
        program.push(answer(SECCOMP_RET_ALLOW));
        program.push(answer(if abi.observed {
            SECCOMP_RET_USER_NOTIF
        } else {
            SECCOMP_RET_ERRNO | libc::ENOSYS as u32
        }));
    }
    program.push(answer(SECCOMP_RET_ALLOW));
    program
}

/// Puts the filter on the calling thread and returns its listener (kernel 5.0; `CONTINUE` needs 5.5).
///
/// Async-signal-safe: makes system calls on what it is given and nothing else, so that it may run between
/// fork and exec. With `no_new_privs` a caller without privileges may use it too.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a filter has a few dozen instructions, a descriptor is an int"
)]
pub fn install(program: &[sock_filter], no_new_privs: bool) -> io::Result<OwnedFd> {
    let fprog = sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    if no_new_privs {
        // SAFETY: plain system call with numbers.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: `fprog` and the program it points to live through the call; the kernel copies them.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const fprog,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a filter as the kernel would.
    fn run(program: &[sock_filter], arch: u32, nr: u32, cmd: u32) -> u32 {
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let op = program[at];
            at += 1;
            match u32::from(op.code) {
                code if code == BPF_LD | BPF_W | BPF_ABS => {
                    accumulator = match op.k {
                        data::ARCH => arch,
                        data::NR => nr,
                        data::CMD => cmd,
                        other => panic!("load at {other}"),
                    }
                }
                code if code == BPF_ALU | BPF_AND | BPF_K => accumulator &= op.k,
                code if code == BPF_JMP | BPF_JEQ | BPF_K => {
                    at += usize::from(if accumulator == op.k { op.jt } else { op.jf });
                }
                code if code == BPF_RET | BPF_K => return op.k,
                other => panic!("opcode {other}"),
            }
        }
    }

    #[test]
    fn allocating_calls_wait_whatever_their_type_and_direction_say() {
        let program = program();
        let abi = &ABIS[0];
        for cmd in ALLOCATING {
            for noise in [0u32, 0xff00, 0xc000_0000, 0x4000_4600] {
                let raw = (cmd.to_raw() & CMD_MASK) | noise;
                assert_eq!(
                    run(&program, abi.arch, abi.ioctl, raw),
                    SECCOMP_RET_USER_NOTIF
                );
            }
        }
    }

    #[test]
    fn nothing_else_waits() {
        let program = program();
        let abi = &ABIS[0];
        for cmd in [0xc010_4629, 0xc020_462a, 0x5401, 0xc028_462b, 21] {
            assert_eq!(run(&program, abi.arch, abi.ioctl, cmd), SECCOMP_RET_ALLOW);
        }
        let alloc = ALLOCATING[0].to_raw();
        assert_eq!(run(&program, abi.arch, 1, alloc), SECCOMP_RET_ALLOW);
        assert_eq!(run(&program, 0x1234, abi.ioctl, alloc), SECCOMP_RET_ALLOW);
    }

    #[test]
    fn calls_that_the_observer_cannot_see_fail() {
        let program = program();
        for abi in ABIS.iter().filter(|abi| !abi.observed) {
            let found = run(&program, abi.arch, abi.ioctl, ALLOCATING[0].to_raw());
            assert_eq!(found, SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
            assert_eq!(
                run(&program, abi.arch, abi.ioctl, 0x5401),
                SECCOMP_RET_ALLOW
            );
        }
    }

    #[test]
    fn the_profile_for_container_runtimes_stops_the_same_calls() {
        let profile = include_str!("../../../packaging/oci/seccomp.json");
        let profile: serde_json::Value = serde_json::from_str(profile).expect("JSON");
        assert_eq!(
            profile["listenerPath"],
            crate::config::DEFAULT_LISTENER_SOCKET
        );
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ALLOW");
        let rules = profile["syscalls"].as_array().expect("rules");
        assert_eq!(rules.len(), ALLOCATING.len());
        for (rule, cmd) in rules.iter().zip(ALLOCATING) {
            let wanted = serde_json::json!({
                "names": ["ioctl"],
                "action": "SCMP_ACT_NOTIFY",
                "args": [{
                    "index": 1,
                    "value": CMD_MASK,
                    "valueTwo": cmd.to_raw() & CMD_MASK,
                    "op": "SCMP_CMP_MASKED_EQ",
                }],
            });
            assert_eq!(*rule, wanted);
        }
    }
}
