//! What a hit of the probes costs on this host, measured with the probes themselves on functions of the daemon's own.
//!
//! The breakpoint is most of it, and no counter of the kernel's has that in it. Whether the kernel emulates the instruction
//! under a breakpoint or steps over a copy makes several microseconds, so both are measured. Programs do something else between two
//! launches, and find the kernel's code and data in no near cache then: so does the measurement.

use std::{
    fs,
    hint::black_box,
    io,
    path::Path,
    time::{Duration, Instant},
};

use gpuquota_common::profile::{cookie, kind};

use crate::kernel::{
    KernelError,
    profile::{ProfileKernel, ProfileProgram},
};

/// Calls in one measurement, of which the middle one counts.
const CALLS: usize = 300;
/// Bytes that are gone through between two calls: more than a processor has near it.
const BETWEEN: usize = 128 << 10;
/// Bytes in a line of a cache.
const LINE: usize = 64;

/// Nanoseconds that a hit costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// At the entry of a function, whose instruction there is emulated.
    pub entry: u32,
    /// The same where it is stepped over.
    pub stepped: u32,
    /// At the return.
    pub back: u32,
}

/// Why it could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    /// The daemon's own file.
    #[error("the daemon's own code is not found in its mappings: {0}")]
    Own(#[from] io::Error),
    /// The probes.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Functions that do nothing, and begin with an instruction of either kind.
#[cfg(target_arch = "x86_64")]
mod functions {
    /// Begins with an instruction that the kernel emulates.
    #[unsafe(naked)]
    pub extern "C" fn emulated(_: u64) -> u64 {
        std::arch::naked_asm!("push rbp", "pop rbp", "xor eax, eax", "ret")
    }

    /// Begins with one that it does not emulate.
    #[unsafe(naked)]
    pub extern "C" fn stepped(_: u64) -> u64 {
        std::arch::naked_asm!("mov rax, rdi", "xor eax, eax", "ret")
    }
}

/// Functions that do nothing.
#[cfg(not(target_arch = "x86_64"))]
mod functions {
    /// One.
    #[inline(never)]
    pub extern "C" fn emulated(argument: u64) -> u64 {
        std::hint::black_box(argument) & 0
    }

    /// Another.
    #[inline(never)]
    pub extern "C" fn stepped(argument: u64) -> u64 {
        std::hint::black_box(argument) & 1 & 0
    }
}

type Function = extern "C" fn(u64) -> u64;

/// Measures. Some milliseconds.
pub fn measure(kernel: &ProfileKernel) -> Result<Costs, CostError> {
    let own = std::process::id();
    kernel.admit(own)?;
    kernel.set_since(own, 0)?;
    let measured = with_probes(kernel, own);
    let ours = kernel
        .launches()
        .into_iter()
        .map(|(key, _)| key)
        .filter(|key| key.tgid == u64::from(own));
    kernel.dismiss(own, ours);
    measured
}

fn with_probes(kernel: &ProfileKernel, own: u32) -> Result<Costs, CostError> {
    let probe = |programs: &[(ProfileProgram, u32)], function: Function| {
        let file = Path::new("/proc/self/exe");
        let offset = offset_of(function as usize)?;
        let plain = time(function);
        let mut probes = Vec::new();
        for (program, kind) in programs {
            probes.extend(kernel.attach(*program, own, file, &[(offset, cookie(*kind, 0))])?);
        }
        Ok::<_, CostError>(time(function).saturating_sub(plain))
    };
    let entry = [(ProfileProgram::Launch, kind::LAUNCH)];
    let wait = [
        (ProfileProgram::Launch, kind::LAUNCH),
        (ProfileProgram::Waited, kind::WAIT_CONTEXT),
        (ProfileProgram::Wait, kind::WAIT_CONTEXT),
    ];
    let at_entry = probe(&entry, functions::emulated)?;
    let stepped = probe(&entry, functions::stepped)?;
    let with_return = probe(&wait, functions::emulated)?;
    let nanos = |time: Duration| u32::try_from(time.as_nanos()).unwrap_or(u32::MAX).max(1);
    Ok(Costs {
        entry: nanos(at_entry),
        stepped: nanos(stepped.max(at_entry)),
        back: nanos(with_return.saturating_sub(at_entry)),
    })
}

/// The middle one of some calls.
fn time(function: Function) -> Duration {
    let mut between = vec![1_u8; BETWEEN];
    let mut calls: Vec<Duration> = (0..CALLS)
        .map(|_| {
            for byte in between.iter_mut().step_by(LINE) {
                *byte = byte.wrapping_add(1);
            }
            black_box(&mut between);
            let begin = Instant::now();
            black_box(function(black_box(1)));
            begin.elapsed()
        })
        .collect();
    calls.sort_unstable();
    calls[CALLS / 2]
}

/// Where in its file the code at an address of this process is.
fn offset_of(address: usize) -> io::Result<u64> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let address = address as u64;
    find(&maps, address).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn find(maps: &str, address: u64) -> Option<u64> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let (from, to) = (hex(from)?, hex(to)?);
        let offset = hex(fields.nth(1)?)?;
        (from..to)
            .contains(&address)
            .then(|| address - from + offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_in_its_file() {
        let maps =
            "400000-401000 r--p 00000000 fe:00 1 /a\n401000-403000 r-xp 00001000 fe:00 1 /a\n";
        assert_eq!(find(maps, 0x40_2010), Some(0x2010));
        assert_eq!(find(maps, 0x40_3000), None);
        let offset = offset_of(functions::stepped as *const () as usize).expect("own code");
        let own = fs::read("/proc/self/exe").expect("own file");
        #[cfg(target_arch = "x86_64")]
        assert_eq!(
            own.get(usize::try_from(offset).expect("small")..)
                .and_then(|code| code.get(..3)),
            Some(&[0x48, 0x89, 0xf8][..])
        );
        assert!(own.len() as u64 > offset);
    }

    #[test]
    fn the_functions_return() {
        assert_eq!((functions::emulated(7), functions::stepped(7)), (0, 0));
        assert!(time(functions::emulated) < Duration::from_millis(1));
    }
}
