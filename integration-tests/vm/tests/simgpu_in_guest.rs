//! The simulated GPU works in the guest: its files appear, and a workload gets memory from it, with and without libcuda.

#![allow(
    clippy::unwrap_used,
    reason = "a test says what it expects by unwrapping, in its helpers too"
)]

use std::time::Duration;

use gpuquota_vm::{Kernel, Vm, built};

fn check(name: &str, kernel: Kernel) {
    let outcome = Vm::new(name, kernel)
        .binary(built("simgpu").unwrap())
        .binary(built("simtenant").unwrap())
        .binary_at(built("libcuda.so").unwrap(), "/opt/simgpu/libcuda.so.1")
        .run(include_str!("simgpu_in_guest.sh"), Duration::from_mins(1))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome.status, 0, "{}", outcome.output);
    for way in ["with libcuda: 2", "without libcuda: 2"] {
        // 2 is what simtenant ends with if a request was refused for want of memory, and nothing else went wrong.
        assert!(
            outcome.output.lines().any(|line| line == way),
            "{}",
            outcome.output
        );
    }
    let answers = |start: &str| {
        outcome
            .output
            .lines()
            .filter(|line| line.starts_with(start))
            .count()
    };
    assert_eq!(answers("allocated "), 4, "{}", outcome.output);
    assert_eq!(answers("out of memory "), 2, "{}", outcome.output);
}

#[test]
fn stock_kernel() {
    check("simgpu-stock", Kernel::Stock);
}

#[test]
fn override_kernel() {
    check("simgpu-override", Kernel::Override);
}
