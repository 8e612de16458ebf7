//! Where the current thread is in its own code.

#![allow(
    unexpected_cfgs,
    reason = "aya's build passes bpf_target_arch, which the compiler does not know by itself"
)]

/// System call, program counter, stack pointer, frame pointer.
#[derive(Clone, Copy)]
pub struct Registers {
    pub syscall: u32,
    pub pc: u64,
    pub sp: u64,
    pub fp: u64,
}

/// What the thread had in its registers when it entered the kernel (kernel 5.15).
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
pub fn read() -> Registers {
    use aya_ebpf::{
        bindings::pt_regs,
        helpers::generated::{bpf_get_current_task_btf, bpf_task_pt_regs},
    };
    // SAFETY: the current task has registers; the verifier knows what the helper returns and checks each access.
    unsafe {
        let regs = bpf_task_pt_regs(bpf_get_current_task_btf()) as *const pt_regs;
        Registers {
            syscall: (*regs).orig_rax as u32,
            pc: (*regs).rip,
            sp: (*regs).rsp,
            fp: (*regs).rbp,
        }
    }
}

/// On other processors nothing walks stacks, and calls have other numbers.
#[cfg(not(bpf_target_arch = "x86_64"))]
#[inline(always)]
pub fn read() -> Registers {
    Registers {
        syscall: u32::MAX,
        pc: 0,
        sp: 0,
        fp: 0,
    }
}
