//! The conformance suite of the native tests, on other kernels: every way to allocate against every backend, and how much
//! of a limit can be used. What it finds is the table in `docs/coverage.md`.

#![allow(
    clippy::unwrap_used,
    reason = "a test says what it expects by unwrapping, in its helpers too"
)]

mod coverage;

use std::time::Duration;

use gpuquota_vm::{Kernel, Outcome, Vm, built_test, native};

const ALL: &str = "override,rewrite,notify,lsm,signal";

/// Emulated, with a daemon for every backend.
const LIMIT: Duration = Duration::from_mins(45);

fn script(tried: &str) -> String {
    format!(
        "export CONFORMANCE_BACKENDS={tried}\n{}",
        include_str!("backends.sh")
    )
}

fn run(vm: &Vm, script: &str) -> Outcome {
    let outcome = vm
        .run(script, LIMIT)
        .unwrap_or_else(|error| panic!("{error}"));
    outcome.expect_success();
    outcome
}

/// Runs the suite with the backends that are `tried`, and checks which backend the daemon takes by itself, and which it has
/// to say that it lacks. `also` are programs of the native tests that have to pass there as well.
fn check(
    name: &str,
    kernel: Kernel,
    lockdown: &str,
    tried: &str,
    by_itself: &str,
    missing: &[&str],
    also: &[&str],
) {
    let mut vm = native::machine(&format!("conformance-{name}"), kernel, &["conformance"])
        .unwrap()
        .cmdline(&format!("lockdown={lockdown}"));
    for program in also {
        vm = vm.binary_at(
            built_test(program).unwrap(),
            format!("/opt/gq/also-{program}"),
        );
    }
    let outcome = run(&vm, &script(tried));
    let lines = |start: &str| -> Vec<String> {
        outcome
            .output
            .lines()
            .filter_map(|line| line.strip_prefix(start))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(lines("AUTO "), [by_itself]);
    let lacking: Vec<String> = lines("MISSING ")
        .iter()
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect();
    assert_eq!(lacking, missing);
    let release = lines("KERNEL ").concat();
    coverage::record(
        name,
        &format!("{release}, lockdown={lockdown}"),
        &outcome.output,
    );
}

#[test]
fn stock_kernel() {
    check(
        "stock",
        Kernel::Stock,
        "none",
        ALL,
        "rewrite",
        &["override"],
        &["ungoverned"],
    );
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn stock_kernel_locked_down() {
    check(
        "stock-locked",
        Kernel::Stock,
        "integrity",
        "override,rewrite,lsm",
        "notify+lsm",
        &["override", "rewrite"],
        &[],
    );
}

#[test]
fn override_kernel() {
    check(
        "override",
        Kernel::Override,
        "none",
        ALL,
        "override",
        &[],
        &[],
    );
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn override_kernel_locked_down() {
    check(
        "override-locked",
        Kernel::Override,
        "integrity",
        "override,rewrite,lsm",
        "notify+lsm",
        &["override", "rewrite"],
        &[],
    );
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn newest_kernel() {
    check(
        "newest",
        Kernel::Newest,
        "none",
        ALL,
        "rewrite",
        &["override"],
        &[],
    );
}

/// This kernel is preemptible, and its programs of system calls are preempted with their tasks.
#[test]
#[ignore = "boots whatever kernel is newest today; ALL=1 make test SUITE=vm runs it"]
fn nothing_is_lost_on_a_preemptible_kernel() {
    let vm = native::machine("preemption", Kernel::Newest, &["preemption"]).unwrap();
    run(
        &vm,
        "export GPUQUOTA_IS_PREEMPTIBLE=1; exec /opt/gq/preemption --nocapture",
    );
}

/// Ways around a budget, by the tests that this host runs natively, with the backend that the kernel's daemon takes.
fn bypasses(name: &str, kernel: Kernel) {
    let vm = native::machine(&format!("bypasses-{name}"), kernel, &["bypasses"]).unwrap();
    // A guest has no compiler for the one that is linked with nothing.
    let script = "exec /opt/gq/bypasses --nocapture --test-threads 1 --skip a_static_program";
    let outcome = run(&vm, script);
    assert!(outcome.output.contains("test result: ok. 9 passed"));
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn bypasses_on_the_stock_kernel() {
    bypasses("stock", Kernel::Stock);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn bypasses_on_the_override_kernel() {
    bypasses("override", Kernel::Override);
}
