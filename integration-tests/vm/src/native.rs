//! The native tests in a machine: what they start, and how they end there.

use crate::{Error, Kernel, Outcome, Vm, built, built_test};

/// Where the programs are.
pub const FOLDER: &str = "/opt/gq";

/// Memory of a machine that holds all of them.
const MEMORY_MIB: u32 = 1024;

/// A machine with everything that the native tests start, and some programs of theirs.
pub fn machine(name: &str, kernel: Kernel, programs: &[&str]) -> Result<Vm, Error> {
    let mut vm = Vm::new(name, kernel).memory(MEMORY_MIB);
    for binary in [
        "gpuquotad",
        "gpuquotactl",
        "simgpu",
        "simtenant",
        "libcuda.so",
        "libnvidia_ml.so",
    ] {
        vm = vm.binary_at(built(binary)?, format!("{FOLDER}/{binary}"));
    }
    for program in programs {
        vm = vm.binary_at(built_test(program)?, format!("{FOLDER}/{program}"));
    }
    Ok(vm)
}

impl Outcome {
    /// Prints what the tests printed, and checks that they passed. The message says where they failed, which a long output hides.
    ///
    /// # Panics
    ///
    /// If they failed.
    pub fn expect_success(&self) {
        println!("{}", self.output);
        assert_eq!(self.status, 0, "in the machine:\n{}", panics(&self.output));
    }

    /// How many tests ran.
    #[must_use]
    pub fn tests(&self) -> usize {
        self.output
            .lines()
            .filter(|line| line.starts_with("test ") && line.contains(" ... "))
            .count()
    }
}

/// Where programs panicked, each with what it said; the end of the output if none did.
fn panics(output: &str) -> String {
    const TAIL: usize = 20;
    let lines: Vec<&str> = output.lines().collect();
    let said: Vec<&str> = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.contains("' panicked at ") || line.contains(") panicked at "))
        .flat_map(|(at, _)| {
            lines[at..]
                .iter()
                .take_while(|line| {
                    !line.starts_with("stack backtrace:") && !line.starts_with("note: ")
                })
                .take(TAIL)
        })
        .copied()
        .collect();
    if said.is_empty() {
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    } else {
        said.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::panics;

    #[test]
    fn a_failure_is_found_in_a_long_output() {
        let many = "a line\n".repeat(100);
        let output = format!(
            "{many}thread 'a_test' (7) panicked at tests/a.rs:1:5:\nassertion failed\n left: 1\nstack backtrace:\n   0: x\n{many}"
        );
        assert_eq!(
            panics(&output),
            "thread 'a_test' (7) panicked at tests/a.rs:1:5:\nassertion failed\n left: 1"
        );
        assert_eq!(panics("one\ntwo"), "one\ntwo");
    }
}
