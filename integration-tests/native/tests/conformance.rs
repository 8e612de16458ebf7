//! Every way to ask for video memory, against every backend that this kernel offers.
//!
//! Prints a line `CELL BACKEND WAY RESULT` for each, from which the virtual machine tests make `docs/coverage.md`; runs
//! the same on this host and inside those machines.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Output},
    time::Duration,
};

use gpuquota_enforcer::control::{Backend, BackendState};
use gpuquota_native_tests::{Bed, binary};

const GIB: u64 = 1 << 30;
const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";
/// Exit code of the workload when it was told that there is no memory.
const OUT_OF_MEMORY: i32 = 2;

/// Ways that a program means, with and without libcuda.
const WAYS: &[&str] = &[
    "malloc",
    "async",
    "pool",
    "create",
    "pitch",
    "nvos64",
    "nvos21",
    "xfer",
    "odd-bits",
    "heap",
    "heap-range",
    "heap-tiled",
    "subdevice",
];
/// Ways that a program takes to get past a limit.
const TRICKS: &[&str] = &["cold", "finn", "compat", "race"];

fn backends(bed: &Bed) -> Vec<Backend> {
    bed.call(async |client| client.backends().await)
        .expect("the backends")
}

/// A workload in the tenant's cgroup that no supervisor stands above, unless the backend is that supervisor.
fn workload(bed: &Bed, backend: &str, way: &str, size: &str) -> Output {
    let libcuda = ["malloc", "async", "pool", "create", "pitch"].contains(&way);
    let mut arguments = vec!["alloc", size, "--via", way];
    if !libcuda {
        arguments.insert(0, "--raw");
    }
    if backend == "notify" {
        return bed.run("a", &arguments);
    }
    let folder = bed
        .hierarchy()
        .folder(&bed.cgroup("/a.slice"))
        .expect("a folder");
    let mut command: Command = bed.command("/bin/sh");
    command
        .args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""])
        .arg(folder)
        .arg(binary("simtenant"))
        .args(arguments);
    command.output().expect("a workload")
}

/// The signal that ended a workload; `gpuquotactl run` tells it as a shell does.
fn killed_by(output: &Output) -> Option<i32> {
    let told = output
        .status
        .code()
        .filter(|code| *code > 128)
        .map(|code| code - 128);
    output.status.signal().or(told)
}

/// What became of a workload.
fn outcome(output: &Output) -> String {
    if let Some(signal) = killed_by(output) {
        return format!("signal {signal}");
    }
    match output.status.code() {
        Some(0) => "allocated".into(),
        Some(OUT_OF_MEMORY) => "out of memory".into(),
        _ => {
            let line = String::from_utf8_lossy(&output.stdout)
                .trim()
                .replace(['\n', '\r'], "; ");
            format!("error: {line}")
        }
    }
}

/// Ends the daemon, forgets the ledger, and writes down which backend is wanted next.
fn stop(bed: &mut Bed, next: &str) {
    if bed.is_running() {
        bed.signal_daemon(libc::SIGTERM);
    }
    let output = daemon(bed).arg("--detach-all").output().expect("gpuquotad");
    assert!(output.status.success(), "{output:?}");
    let path = bed.sim.scratch().join("gpuquota.toml");
    let mut settings: String = fs::read_to_string(&path)
        .expect("settings")
        .lines()
        .filter(|line| !line.starts_with("memory = "))
        .flat_map(|line| [line, "\n"])
        .collect();
    writeln!(settings, "memory = \"{next}\"").expect("a string");
    fs::write(path, settings).expect("settings");
}

fn daemon(bed: &Bed) -> Command {
    let mut command = bed.command("gpuquotad");
    command
        .arg("--config")
        .arg(bed.sim.scratch().join("gpuquota.toml"));
    command
}

/// Starts the daemon again with one backend and nothing else.
fn force(bed: &mut Bed, backend: &str) {
    stop(bed, backend);
    bed.start();
    let active: Vec<String> = backends(bed)
        .into_iter()
        .filter(|found| found.state == BackendState::Active)
        .map(|found| found.name)
        .collect();
    assert_eq!(active, [backend], "{}", bed.log());
}

/// A daemon that is told to use what is not there says so and does not start.
fn refuses_to_start(bed: &mut Bed, backend: &Backend) {
    stop(bed, &backend.name);
    let output = daemon(bed).output().expect("gpuquotad");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(78), "{said}");
    assert!(
        said.contains(&backend.reason),
        "{said} does not say: {}",
        backend.reason
    );
}

/// Ways that a program means: what fits is given and paid for, what does not fit is answered as the backend can.
fn check_way(bed: &Bed, backend: &str, way: &str) -> String {
    let before = bed.usage("a", 0);
    let fits = workload(bed, backend, way, "2GiB");
    assert!(
        fits.status.success(),
        "{backend}, {way}: {fits:?}\n{}",
        bed.log()
    );
    assert!(
        bed.usage("a", 0).memory_peak >= 2 * GIB,
        "{backend}, {way}: not charged"
    );
    let over = workload(bed, backend, way, "4GiB");
    let told = outcome(&over);
    let after = bed.usage("a", 0);
    if backend == "signal" {
        assert_eq!(told, "signal 15", "{backend}, {way}");
        assert!(
            after.breaches > before.breaches,
            "{backend}, {way}: {after:?}"
        );
    } else {
        if backend == "lsm" {
            assert!(told.starts_with("error"), "{backend}, {way}: {told}");
        } else {
            assert_eq!(told, "out of memory", "{backend}, {way}: {over:?}");
        }
        assert_eq!(after.breaches, before.breaches, "{backend}, {way}");
        assert!(after.memory_peak <= 3 * GIB, "{backend}, {way}: {after:?}");
        // libcuda asks twice for one allocation; that is one refusal.
        assert_eq!(after.denials, before.denials + 1, "{backend}, {way}");
    }
    told
}

/// Ways to get past a limit: nobody gets more than the limit and keeps it.
fn check_trick(bed: &Bed, backend: &str, way: &str) -> String {
    let before = bed.usage("a", 0);
    let over = workload(bed, backend, way, "4GiB");
    let told = outcome(&over);
    let after = bed.usage("a", 0);
    let ended = killed_by(&over).is_some();
    assert!(told != "allocated", "{backend}, {way}: {over:?} {after:?}");
    assert!(
        ended || after.breaches == before.breaches,
        "{backend}, {way}: got past the limit and was not ended: {after:?}"
    );
    told
}

/// Whether this kernel serves 32-bit system calls, and the backend sees them.
fn applies(backend: &str, way: &str, lsm: bool) -> bool {
    if way != "compat" {
        return true;
    }
    if !serves_compat() {
        return false;
    }
    // Syscall tracepoints do not report such calls, so without a security hook or a filter nobody does.
    lsm || backend == "override" || backend == "notify"
}

/// A kernel without the entry kills who uses it.
fn serves_compat() -> bool {
    cfg!(target_arch = "x86_64") && {
        // SAFETY: the child does nothing but two system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // getpid of a 32-bit program.
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the system call takes no arguments and changes eax alone.
            unsafe {
                std::arch::asm!(
                    "int 0x80", inout("rax") 20u64 => _,
                    lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _,
                );
            }
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: our own child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        status == 0
    }
}

#[test]
fn every_way_to_allocate_against_every_backend() {
    let mut bed = Bed::new(POLICY);
    bed.hierarchy()
        .create(&bed.cgroup("/a.slice"))
        .expect("a cgroup");
    let offered = backends(&bed);
    let wanted: Option<BTreeSet<String>> = std::env::var("CONFORMANCE_BACKENDS")
        .ok()
        .map(|names| names.split(',').map(str::to_owned).collect());
    let lsm = offered
        .iter()
        .any(|backend| backend.name == "lsm" && backend.state != BackendState::Unavailable);
    let by_itself: Vec<&str> = offered
        .iter()
        .filter(|backend| backend.state == BackendState::Active)
        .map(|backend| backend.name.as_str())
        .collect();
    println!("\nAUTO {}", by_itself.join("+"));
    for backend in &offered {
        let name = backend.name.as_str();
        if backend.state == BackendState::Unavailable {
            println!("MISSING {name} {}", backend.reason);
        }
        if wanted.as_ref().is_some_and(|wanted| !wanted.contains(name)) {
            continue;
        }
        if backend.state == BackendState::Unavailable {
            refuses_to_start(&mut bed, backend);
            continue;
        }
        force(&mut bed, name);
        for way in WAYS {
            let told = check_way(&bed, name, way);
            assert_eq!(
                bed.wait_for_nothing(Duration::from_secs(5)),
                [],
                "{name}, {way}"
            );
            println!("CELL {name} {way} {told}");
        }
        for way in TRICKS {
            // A security hook stands beside override and rewrite, where there is one.
            let beside = lsm && ["override", "rewrite", "lsm"].contains(&name);
            if !applies(name, way, beside) {
                println!("CELL {name} {way} not applicable");
                continue;
            }
            let told = check_trick(&bed, name, way);
            assert_eq!(
                bed.wait_for_nothing(Duration::from_secs(5)),
                [],
                "{name}, {way}"
            );
            println!("CELL {name} {way} {told}");
        }
    }
}
