//! Every way to ask for video memory, against every backend that this kernel offers; and how much of a limit can be used.
//!
//! Prints a line `CELL BACKEND WAY RESULT` for each way, `USABLE BACKEND LIMIT PROCESSES SHARE` for each limit, and
//! `COST BACKEND ALLOCATION FREE` in nanoseconds, from which the virtual machine tests make `docs/coverage.md`; runs the
//! same on this host and inside those machines.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Command, ExitStatus},
};

use gpuquota_enforcer::control::{Backend, BackendState, QuotaChange};
use gpuquota_native_tests::{Actor, Bed, PATIENCE};

const GIB: u64 = 1 << 30;
const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";

/// Ways that a program means, with libcuda; those that keep memory for later come last.
const LIBCUDA: &[&str] = &["malloc", "create", "pitch", "async", "pool"];
/// And without it.
const RAW: &[&str] = &[
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
/// Limits of which it is tried how much can be used, in GiB.
const LIMITS: &[u64] = &[1, 3, 5, 10];

/// What an allocation and a free cost, as a workload tells it: nanoseconds.
fn cost(actor: &mut Actor) -> String {
    let line = actor.tell("measure");
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["measured", "alloc", alloc, "ns", "free", free, "ns"] => format!("{alloc} {free}"),
        _ => panic!("{line}"),
    }
}

/// Results, printed and kept.
#[derive(Default)]
struct Results(String);

impl Results {
    fn say(&mut self, line: &str) {
        println!("{line}");
        self.0.push_str(line);
        self.0.push('\n');
    }

    /// Leaves the results of this host where the virtual machine tests leave theirs. A guest has no such place.
    fn keep(&self) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        if !root.exists() {
            return;
        }
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let release: String = read("/proc/sys/kernel/osrelease")
            .chars()
            .take_while(|c| c.is_ascii_digit() || *c == '.')
            .collect();
        let lockdown = read("/sys/kernel/security/lockdown")
            .split_whitespace()
            .find_map(|mode| mode.strip_prefix('[')?.strip_suffix(']').map(str::to_owned))
            .unwrap_or_else(|| "not known".into());
        let folder = root.join("target/vm/coverage");
        fs::create_dir_all(&folder).expect("a folder");
        let text = format!(
            "KERNEL {release} of the host that the suite ran on, lockdown={lockdown}\n{}",
            self.0
        );
        fs::write(folder.join("host"), text).expect("results");
    }
}

fn backends(bed: &Bed) -> Vec<Backend> {
    bed.call(async |client| client.backends().await)
        .expect("the backends")
}

/// A workload in the tenant's cgroup that no supervisor stands above, unless the backend is that supervisor. It does what
/// it is told.
fn workload(bed: &Bed, backend: &str, libcuda: bool) -> Actor {
    let mut arguments = vec!["interactive"];
    if !libcuda {
        arguments.insert(0, "--raw");
    }
    bed.workload_under(backend, &arguments)
}

/// The signal that ended a workload; `gpuquotactl run` tells it as a shell does.
fn killed_by(status: ExitStatus) -> Option<i32> {
    let told = status
        .code()
        .filter(|code| *code > 128)
        .map(|code| code - 128);
    status.signal().or(told)
}

/// Asks for memory; what became of it, and whether the workload is still there.
fn ask(actor: &mut Actor, size: &str, way: &str) -> (String, bool) {
    let line = actor.tell(&format!("alloc {size} --via {way}"));
    if line.is_empty() {
        let status = actor.ended();
        let told = killed_by(status).map_or_else(
            || format!("error: ended with {status}"),
            |signal| format!("signal {signal}"),
        );
        return (told, false);
    }
    let told = if line.starts_with("out of memory") {
        "out of memory".into()
    } else if line.starts_with("allocated") {
        "allocated".into()
    } else {
        format!("error: {line}")
    };
    (told, true)
}

/// Ends the daemon, and writes down which backend is wanted next.
fn stop(bed: &mut Bed, next: &str) {
    if bed.is_running() {
        bed.signal_daemon(libc::SIGTERM);
    }
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
///
/// Returns that answer, and whether the workload is still there.
fn check_way(bed: &Bed, backend: &str, actor: &mut Actor, way: &str) -> (String, bool) {
    let fits = ask(actor, "2GiB", way);
    assert_eq!(fits.0, "allocated", "{backend}, {way}\n{}", bed.log());
    let before = bed.usage("a", 0);
    assert!(
        before.memory_used >= 2 * GIB && before.memory_used <= 3 * GIB,
        "{backend}, {way}: {before:?}"
    );
    assert!(actor.tell("free").starts_with("freed"), "{backend}, {way}");
    // Of another size than the last one: the same again at once is taken for libcuda's second try.
    let over = format!("{}MiB", 4096 + 2 * (before.denials % 2));
    let (told, lives) = ask(actor, &over, way);
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
            assert_eq!(told, "out of memory", "{backend}, {way}");
        }
        assert!(lives, "{backend}, {way}");
        assert_eq!(after.breaches, before.breaches, "{backend}, {way}");
        assert!(
            after.memory_used < 2 * GIB,
            "{backend}, {way}: nothing was given back: {after:?}"
        );
        // libcuda asks twice for one allocation; that is one refusal.
        assert_eq!(after.denials, before.denials + 1, "{backend}, {way}");
    }
    (told, lives)
}

/// Ways to get past a limit: nobody gets more than the limit and keeps it.
fn check_trick(bed: &Bed, backend: &str, actor: &mut Actor, way: &str) -> (String, bool) {
    let before = bed.usage("a", 0);
    let (told, lives) = ask(actor, "4GiB", way);
    let after = bed.usage("a", 0);
    assert!(told != "allocated", "{backend}, {way}: {after:?}");
    assert!(
        !lives || after.breaches == before.breaches,
        "{backend}, {way}: got past the limit and was not ended: {after:?}"
    );
    (told, lives)
}

/// Managed memory that the tenant may not have: refused where a backend can fail the question about its range, else the
/// process is ended once its mappings have been looked at.
fn check_managed(bed: &Bed, backend: &str, way: &str, is_refused: bool, results: &mut Results) {
    let (property, value, size) = match way {
        "managed" => ("memory.max", "3GiB", "4GiB"),
        _ => ("memory.managed", "deny", "64MiB"),
    };
    let change = QuotaChange {
        tenant: "a".into(),
        gpu: None,
        properties: vec![(property.into(), value.into())],
        runtime: true,
    };
    bed.call(async |client| client.set_quota(&change).await)
        .expect("another policy");
    let mut actor = workload(bed, backend, true);
    let (told, lives) = ask(&mut actor, "1GiB", "malloc");
    assert_eq!((told.as_str(), lives), ("allocated", true), "{backend}");
    let before = bed.usage("a", 0);
    let (mut told, lives) = ask(&mut actor, size, "managed");
    let after = bed.usage("a", 0);
    if is_refused {
        assert!(
            told.contains("CUDA_ERROR_NOT_PERMITTED"),
            "{backend}: {told}\n{}",
            bed.log()
        );
        assert!(lives, "{backend}");
        assert_eq!(after.denials, before.denials + 1, "{backend}");
        assert_eq!(after.memory.managed, before.memory.managed, "{backend}");
        assert!(
            actor.tell("alloc 512MiB").starts_with("allocated"),
            "{backend}"
        );
        "CUDA error 800".clone_into(&mut told);
    } else {
        // It may be ended before it can say that it has got it.
        if told == "allocated" {
            let status = actor.ended();
            assert_eq!(
                killed_by(status),
                Some(libc::SIGTERM),
                "{backend}\n{}",
                bed.log()
            );
            "signal 15".clone_into(&mut told);
        }
        assert_eq!(told, "signal 15", "{backend}");
    }
    results.say(&format!("CELL {backend} {way} {told}"));
    drop(actor);
    bed.call(async |client| client.reset_quota("a", &[property.into()]).await)
        .expect("the policy as it was");
    assert_eq!(bed.wait_for_nothing(PATIENCE), [], "{backend}");
}

/// Runs all ways of a kind against a backend.
fn check_ways(
    bed: &Bed,
    backend: &str,
    libcuda: bool,
    ways: &[&str],
    mut check: impl FnMut(&mut Actor, &str) -> (String, bool),
    results: &mut Results,
) {
    let mut actor = None;
    for way in ways {
        let doing = actor.get_or_insert_with(|| workload(bed, backend, libcuda));
        let (told, lives) = check(doing, way);
        results.say(&format!("CELL {backend} {way} {told}"));
        if !lives {
            actor = None;
        }
    }
    drop(actor);
    assert_eq!(bed.wait_for_nothing(PATIENCE), [], "{backend}");
}

/// Bytes that workloads take together, each in ever smaller pieces until there is no more.
fn fill(actors: &mut [&mut Actor], most: Option<u64>) -> u64 {
    let mut total = 0;
    for chunk in ["256MiB", "16MiB", "2MiB"] {
        let most = most.map_or_else(String::new, |most| format!(" --most {}", most - total));
        for actor in actors.iter_mut() {
            actor.order(&format!("fill --chunk {chunk}{most}"));
        }
        for actor in actors.iter_mut() {
            let line = actor.answer();
            let bytes: u64 = line
                .strip_prefix("filled ")
                .and_then(|bytes| bytes.parse().ok())
                .unwrap_or_else(|| panic!("{line}"));
            total += bytes;
        }
    }
    total
}

/// How much of a limit can be used: at least 99 % of it, and never more than all. And what it costs to ask.
fn check_usable(bed: &Bed, backend: &str, results: &mut Results) {
    let mut actors: Vec<Actor> = (0..4).map(|_| workload(bed, backend, false)).collect();
    for limit in LIMITS {
        let change = QuotaChange {
            tenant: "a".into(),
            gpu: None,
            properties: vec![("memory.max".into(), format!("{limit}GiB"))],
            runtime: true,
        };
        bed.call(async |client| client.set_quota(&change).await)
            .expect("another limit");
        for processes in [1, 4] {
            let mut some: Vec<&mut Actor> = actors.iter_mut().take(processes).collect();
            // Who is only signalled has to know where to stop; it can use the limit to its end.
            let most = (backend == "signal").then_some(limit * GIB / processes as u64);
            let bytes = match most {
                Some(most) => some
                    .iter_mut()
                    .map(|actor| fill(&mut [&mut **actor], Some(most)))
                    .sum(),
                None => fill(&mut some, None),
            };
            let usage = bed.usage("a", 0);
            let truth = bed.sim.truth().expect("the truth");
            let held: u64 = truth.gpus[0]
                .processes
                .values()
                .map(|process| process.rm_bytes)
                .sum();
            // What the ledger says is what the driver gave.
            assert_eq!((usage.memory_used, bytes), (held, held), "{backend}");
            assert!(held <= limit * GIB, "{backend}: {held} of {limit} GiB");
            assert!(
                held * 100 >= limit * GIB * 99,
                "{backend}: only {held} of {limit} GiB, {processes} processes"
            );
            // In hundredths of a percent.
            let share = held * 10_000 / (limit * GIB);
            results.say(&format!(
                "USABLE {backend} {limit} {processes} {}.{:02}",
                share / 100,
                share % 100
            ));
            for actor in some {
                assert!(actor.tell("free").starts_with("freed"));
            }
        }
    }
    results.say(&format!("COST {backend} {}", cost(&mut actors[0])));
    drop(actors);
    bed.call(async |client| client.reset_quota("a", &["memory.max".into()]).await)
        .expect("the limit of the policy");
    assert_eq!(bed.wait_for_nothing(PATIENCE), [], "{backend}");
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
    let mut results = Results::default();
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
    println!();
    results.say(&format!("AUTO {}", by_itself.join("+")));
    for backend in &offered {
        let name = backend.name.as_str();
        if backend.state == BackendState::Unavailable {
            results.say(&format!("MISSING {name} {}", backend.reason));
        }
        if wanted.as_ref().is_some_and(|wanted| !wanted.contains(name)) {
            continue;
        }
        if backend.state == BackendState::Unavailable {
            refuses_to_start(&mut bed, backend);
            continue;
        }
        force(&mut bed, name);
        for (libcuda, ways) in [(true, LIBCUDA), (false, RAW)] {
            let check = |actor: &mut Actor, way: &str| check_way(&bed, name, actor, way);
            check_ways(&bed, name, libcuda, ways, check, &mut results);
        }
        // A security hook stands beside override and rewrite, where there is one.
        let beside = lsm && ["override", "rewrite", "lsm"].contains(&name);
        let (tricks, others): (Vec<&str>, Vec<&str>) =
            TRICKS.iter().partition(|way| applies(name, way, beside));
        for way in others {
            results.say(&format!("CELL {name} {way} not applicable"));
        }
        let check = |actor: &mut Actor, way: &str| check_trick(&bed, name, actor, way);
        check_ways(&bed, name, false, &tricks, check, &mut results);
        // How much there may be only a supervisor can tell, which reads what is mapped before it answers.
        let can_fail = beside || ["override", "notify"].contains(&name);
        check_managed(&bed, name, "managed", name == "notify", &mut results);
        check_managed(&bed, name, "managed-deny", can_fail, &mut results);
        check_usable(&bed, name, &mut results);
    }
    // The same where nobody looks.
    if bed.is_running() {
        bed.signal_daemon(libc::SIGTERM);
    }
    bed.detach_all();
    let mut command = bed.sim.tenant();
    command.args(["--raw", "interactive"]);
    let mut free = Actor::start(command);
    results.say(&format!("COST none {}", cost(&mut free)));
    results.keep();
}
