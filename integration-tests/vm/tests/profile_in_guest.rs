//! The launch profile on other kernels: 6.1 attaches every probe by an event of its own, 6.12 many of them by one link.
//!
//! Programs of the native tests, those that ask for no figures: everything takes long under emulation.

#![allow(
    clippy::unwrap_used,
    reason = "a test says what it expects by unwrapping, in its helpers too"
)]

use std::time::Duration;

use gpuquota_vm::{Kernel, Vm, built, built_test};

/// Emulated, with a daemon for every test.
const LIMIT: Duration = Duration::from_mins(10);

fn check(name: &str, kernel: Kernel) {
    let mut vm = Vm::new(format!("profile-{name}"), kernel)
        .memory(1024)
        .binary_at(built_test("profile").unwrap(), "/opt/gq/profile");
    for binary in [
        "gpuquotad",
        "gpuquotactl",
        "simgpu",
        "simtenant",
        "libcuda.so",
        "libnvidia_ml.so",
    ] {
        vm = vm.binary_at(built(binary).unwrap(), format!("/opt/gq/{binary}"));
    }
    let outcome = vm
        .run(include_str!("profile_in_guest.sh"), LIMIT)
        .unwrap_or_else(|error| panic!("{error}"));
    println!("{}", outcome.output);
    assert_eq!(outcome.status, 0, "{}", outcome.output);
    let ran = outcome
        .output
        .lines()
        .filter(|line| line.starts_with("test ") && line.contains(" ... "))
        .count();
    assert!(ran >= 2, "only {ran} tests ran");
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn stock_kernel() {
    check("stock", Kernel::Stock);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn backport_kernel() {
    check("backport", Kernel::Backport);
}
