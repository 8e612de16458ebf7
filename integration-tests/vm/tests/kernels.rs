//! Boots each kernel, locked down and not, and checks what the other suites rely on; then what the harness does when a
//! script fails, hangs or takes the kernel down.

#![allow(
    clippy::unwrap_used,
    reason = "a test says what it expects by unwrapping, in its helpers too"
)]

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use gpuquota_vm::{Error, Kernel, Outcome, Vm, built};

const LIMIT: Duration = Duration::from_mins(1);

/// Boots the kernel, runs `guest-facts` in it and checks what every kernel must offer, and what differs among them.
fn check(name: &str, kernel: Kernel, lockdown: &str, release: &str, overrides: bool) {
    let outcome = Vm::new(name, kernel)
        .cmdline(&format!("lockdown={lockdown}"))
        .binary(env!("CARGO_BIN_EXE_guest-facts"))
        .run("guest-facts", LIMIT)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome.status, 0, "{}", outcome.output);
    let fact = |name: &str| {
        let line = outcome
            .output
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.unwrap_or_else(|| panic!("no {name} in:\n{}", outcome.output))
    };
    assert!(fact("release").starts_with(release), "{}", fact("release"));
    assert!(
        fact("lockdown").contains(&format!("[{lockdown}]")),
        "{}",
        fact("lockdown")
    );
    assert!(
        fact("lsm").split(',').any(|module| module == "bpf"),
        "{}",
        fact("lsm")
    );
    for present in ["btf", "bpffs", "ioctl tracepoint", "fuse", "fuse device"] {
        assert_eq!(fact(present), "true", "{present}");
    }
    assert_eq!(fact("cgroup"), "0::/facts");
    assert_eq!(fact("override"), overrides.to_string());
}

#[test]
fn stock_kernel() {
    check("kernel-stock", Kernel::Stock, "none", "6.1.", false);
}

#[test]
fn stock_kernel_locked_down() {
    check(
        "kernel-stock-locked",
        Kernel::Stock,
        "integrity",
        "6.1.",
        false,
    );
}

#[test]
fn backport_kernel() {
    check("kernel-backport", Kernel::Backport, "none", "6.12.", false);
}

#[test]
#[ignore = "boots whatever kernel is newest today; run with `make test SUITE=vm ALL=1`"]
fn newest_kernel() {
    check("kernel-newest", Kernel::Newest, "none", "7.", false);
}

#[test]
fn override_kernel() {
    check("kernel-override", Kernel::Override, "none", "6.12.", true);
}

/// Lockdown forbids writing to user memory, not the override itself.
#[test]
fn override_kernel_locked_down() {
    check(
        "kernel-override-locked",
        Kernel::Override,
        "integrity",
        "6.12.",
        true,
    );
}

fn script(name: &str, script: &str, limit: Duration) -> Result<Outcome, Error> {
    Vm::new(name, Kernel::Override).run(script, limit)
}

#[test]
fn reports_status_and_output() {
    let outcome = script(
        "script-status",
        "echo to stdout; echo to stderr >&2; printf 'no end'; exit 42",
        LIMIT,
    )
    .unwrap();
    assert_eq!(outcome.status, 42);
    assert_eq!(outcome.output, "to stdout\nto stderr\nno end");
    assert_eq!(fs::read_to_string(&outcome.log).unwrap(), outcome.console);
}

#[test]
fn packs_files_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data");
    fs::write(&file, "from the host\n").unwrap();
    Command::new("chmod")
        .arg("640")
        .arg(&file)
        .status()
        .unwrap();
    let outcome = Vm::new("script-files", Kernel::Override)
        .file(&file, "/srv/deep/data")
        .text("written here\n", "/etc/gpuquota/text")
        .run(
            "cat /srv/deep/data /etc/gpuquota/text; stat -c %a /srv/deep/data",
            LIMIT,
        )
        .unwrap();
    assert_eq!(outcome.output, "from the host\nwritten here\n640\n");
}

#[test]
fn ends_a_script_that_hangs() {
    let start = Instant::now();
    let error = script(
        "script-hangs",
        "echo started; sleep 1000",
        Duration::from_secs(3),
    )
    .unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("started"), "{error}");
    assert!(start.elapsed() < LIMIT, "took {:?}", start.elapsed());
}

#[test]
fn notices_a_panic_under_the_script() {
    let start = Instant::now();
    // The override kernel has no sysrq.
    let error = Vm::new("script-panics", Kernel::Stock)
        .run(
            "echo started; echo c >/proc/sysrq-trigger; sleep 1000",
            LIMIT,
        )
        .unwrap_err();
    assert!(matches!(error, Error::Died { .. }), "{error}");
    assert!(error.to_string().contains("Kernel panic"), "{error}");
    assert!(start.elapsed() < LIMIT, "took {:?}", start.elapsed());
}

#[test]
fn tries_a_boot_that_fails_twice_and_then_gives_up() {
    let error = Vm::new("boot-fails", Kernel::Override)
        .cmdline("rdinit=/nowhere")
        .run("true", LIMIT)
        .unwrap_err();
    assert!(matches!(error, Error::Boot { .. }), "{error}");
}

#[test]
fn names_a_kernel_that_is_not_there() {
    let error = Vm::new("no-kernel", Kernel::Image("/nowhere/bzImage".into()))
        .run("true", LIMIT)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "no kernel '/nowhere/bzImage' to boot: there is no such file"
    );
}

#[test]
fn names_a_program_that_is_not_built() {
    let error = built("no-such-program").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no-such-program is not built: run `cargo build"),
        "{error}"
    );
}
