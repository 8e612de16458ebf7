//! Native tests on other kernels, those that compile nothing and ask for no figures: everything takes long under emulation.
//!
//! 6.1 is the oldest that is shipped of those whose `sched_switch` tells enough of a wait, and attaches every probe by an event
//! of its own; 6.12 attaches many of them by one link.

use std::time::Duration;

use gpuquota_vm::{Kernel, native};

/// Emulated, with a daemon for every test.
const LIMIT: Duration = Duration::from_mins(10);

fn check(program: &str, on: &str, kernel: Kernel, tests: &[&str]) {
    let script = format!(
        "echo \"KERNEL $(uname -r)\"\nexec {}/{program} --nocapture --test-threads 1 --exact {}",
        native::FOLDER,
        tests.join(" ")
    );
    let outcome = native::machine(&format!("{program}-{on}"), kernel, &[program])
        .and_then(|vm| vm.run(&script, LIMIT))
        .unwrap_or_else(|error| panic!("{error}"));
    outcome.expect_success();
    assert_eq!(outcome.tests(), tests.len());
}

const IDLE: &[&str] = &[
    "who_waits_for_orders_waits_for_io",
    "what_cannot_be_looked_at_is_said",
];
const LAUNCH: &[&str] = &[
    "who_has_no_launch_budget_is_not_touched",
    "every_way_to_launch_is_counted_once",
    "the_death_of_the_daemon_leaves_nothing_frozen",
    "deny_ends_a_process_that_goes_over_its_budget",
];
const PROFILE: &[&str] = &[
    "a_policy_can_ask_for_it_at_all_times",
    "launches_are_counted_named_and_timed",
];

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn idle_on_the_stock_kernel() {
    check("idle", "stock", Kernel::Stock, IDLE);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn idle_on_the_backport_kernel() {
    check("idle", "backport", Kernel::Backport, IDLE);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn launch_on_the_stock_kernel() {
    check("launch", "stock", Kernel::Stock, LAUNCH);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn launch_on_the_backport_kernel() {
    check("launch", "backport", Kernel::Backport, LAUNCH);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn profile_on_the_stock_kernel() {
    check("profile", "stock", Kernel::Stock, PROFILE);
}

#[test]
#[ignore = "takes minutes under emulation; ALL=1 make test SUITE=vm runs it"]
fn profile_on_the_backport_kernel() {
    check("profile", "backport", Kernel::Backport, PROFILE);
}
