//! The simulated GPU works in the guest: its files appear, and a workload gets memory from it.

#![allow(
    clippy::unwrap_used,
    reason = "a test says what it expects by unwrapping, in its helpers too"
)]

use std::time::Duration;

use gpuquota_vm::{Kernel, Vm, built};

fn check(name: &str, kernel: Kernel) {
    let outcome = Vm::new(name, kernel)
        .binary(built("simgpu").unwrap())
        .run(include_str!("simgpu_in_guest.sh"), Duration::from_mins(1))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome.status, 0, "{}", outcome.output);
}

#[test]
fn stock_kernel() {
    check("simgpu-stock", Kernel::Stock);
}

#[test]
fn override_kernel() {
    check("simgpu-override", Kernel::Override);
}
