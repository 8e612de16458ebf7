//! Where a process is: what is needed of its registers to walk its stack.

#![allow(
    unexpected_cfgs,
    reason = "aya's build passes bpf_target_arch, which the compiler does not know by itself"
)]

use aya_ebpf::bindings::pt_regs;

/// Program counter, stack pointer, frame pointer.
#[derive(Clone, Copy)]
pub struct Registers {
    pub pc: u64,
    pub sp: u64,
    pub fp: u64,
}

/// The registers of a probe's context.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn read(regs: *const pt_regs) -> Registers {
    // SAFETY: the context of a running program; the verifier checks each access.
    unsafe {
        Registers {
            pc: (*regs).rip,
            sp: (*regs).rsp,
            fp: (*regs).rbp,
        }
    }
}

/// On other processors nothing walks stacks.
#[cfg(not(bpf_target_arch = "x86_64"))]
#[inline(always)]
pub fn read(_: *const pt_regs) -> Registers {
    Registers {
        pc: 0,
        sp: 0,
        fp: 0,
    }
}
