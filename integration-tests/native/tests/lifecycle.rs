//! Charges go when what they are for goes, whatever way that is; and nobody depends on the daemon's life.

use std::{
    fs,
    io::Write as _,
    os::{
        fd::AsRawFd as _,
        unix::{net::UnixDatagram, process::CommandExt as _},
    },
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::{
    map::counter,
    nvidia::{IoctlCmd, ctrl, nr, nvos54},
};
use gpuquota_native_tests::{Actor, Bed, PATIENCE};

const GIB: u64 = 1 << 30;
const ONE: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";

#[test]
fn nothing_is_left_within_a_second_of_a_kill() {
    let rounds = 100;
    let bed = Bed::new(ONE);
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let mut actor = bed.actor("a");
        assert!(
            actor.tell("alloc 1GiB").starts_with("allocated"),
            "round {round}"
        );
        assert!(bed.usage("a", 0).memory_used > GIB, "round {round}");
        actor.kill_workload();
        let killed = Instant::now();
        let left = bed.wait_for_nothing(Duration::from_secs(1));
        assert_eq!(left, [], "round {round}");
        slowest = slowest.max(killed.elapsed());
    }
    println!("{rounds} kills, nothing left after {slowest:?} at most");
}

#[test]
fn a_child_that_holds_the_files_keeps_the_charge() {
    let bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let answer = actor.tell("fork --hold 3s");
    assert!(answer.starts_with("forked"), "{answer}");
    let before = bed.usage("a", 0).memory_used;
    actor.kill_workload();
    thread::sleep(Duration::from_millis(800));
    // The driver still has the memory, for the child.
    assert!(bed.sim.truth().expect("the truth").gpus[0].used >= GIB);
    assert_eq!(bed.usage("a", 0).memory_used, before);
    // With the child it goes.
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(6)), []);
    let end = Instant::now() + Duration::from_secs(5);
    // The simulated driver hears of a closed file a little later than whoever looks for it.
    while bed.sim.truth().expect("the truth").gpus[0].used != 0 {
        assert!(Instant::now() < end, "{:?}", bed.sim.truth());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_cgroup_is_governed_whenever_it_appears() {
    let bed = Bed::new(ONE);
    assert!(bed.tenant("a").cgroups.is_empty());
    for _ in 0..3 {
        let refused = bed.run("a", &["alloc", "4GiB"]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert_eq!(bed.tenant("a").cgroups, [bed.cgroup("/a.slice")]);
        // Removed and made again it has another id.
        let folder = bed
            .hierarchy()
            .folder(&bed.cgroup("/a.slice"))
            .expect("a path");
        let end = Instant::now() + Duration::from_secs(5);
        while std::fs::remove_dir(&folder).is_err() && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
        while !bed.tenant("a").cgroups.is_empty() && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
        assert!(bed.tenant("a").cgroups.is_empty());
    }
}

#[test]
fn a_tenant_that_comes_late_pays_for_what_is_there() {
    let bed = Bed::new(ONE);
    bed.hierarchy()
        .create(&bed.cgroup("/late.slice"))
        .expect("a cgroup");
    let mut actor = bed.stranger();
    bed.hierarchy()
        .attach(&bed.cgroup("/late.slice"), actor.pid())
        .expect("moved");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    bed.write_policy(&format!(
        "{ONE}[tenant.late]\ncgroup = \"@/late.slice\"\nmemory.max = \"2GiB\"\n"
    ));
    assert!(bed.ctl(&["reload"]).status.success());
    assert!(bed.usage("late", 0).memory_used > GIB);
    // And gives it back when it leaves the policy again.
    bed.write_policy(ONE);
    assert!(bed.ctl(&["reload"]).status.success());
    assert!(actor.tell("free").starts_with("freed"));
    drop(actor);
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(2)), []);
}

#[test]
fn a_new_daemon_finds_the_ledger_as_it_was() {
    let mut bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let before = bed.usage("a", 0).memory_used;
    bed.signal_daemon(libc::SIGKILL);
    bed.start();
    assert_eq!(bed.usage("a", 0).memory_used, before);
    // The runner has handed its listener over again: the budget holds, and what fits is granted.
    assert!(actor.tell("alloc 2GiB").starts_with("out of memory"));
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    assert_eq!(actor.finish(), Some(2));
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(2)), []);
}

#[test]
fn what_happens_while_no_daemon_is_there_is_known_to_the_next() {
    let mut bed = Bed::new(ONE);
    let mut frees = bed.actor("a");
    let mut dies = bed.actor("a");
    assert!(frees.tell("alloc 512MiB").starts_with("allocated"));
    assert!(dies.tell("alloc 512MiB").starts_with("allocated"));
    let dying = dies.workload_pid();
    bed.signal_daemon(libc::SIGKILL);
    assert!(frees.tell("free").starts_with("freed"));
    // SAFETY: a process that this test started.
    unsafe { libc::kill(dying.cast_signed(), libc::SIGKILL) };
    thread::sleep(Duration::from_millis(300));
    bed.start();
    let truth = bed.sim.truth().expect("the truth");
    let held: u64 = truth.gpus[0]
        .processes
        .values()
        .map(|process| process.rm_bytes)
        .sum();
    assert_eq!(bed.wait_usage("a", 0, |used| used == held), held);
}

#[test]
fn calls_wait_for_a_daemon_and_are_refused_if_none_comes() {
    let mut bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
    bed.signal_daemon(libc::SIGKILL);
    // It waits for a daemon that comes in time …
    actor.order("alloc 512MiB");
    thread::sleep(Duration::from_millis(500));
    bed.set_listener_timeout("3s");
    bed.start();
    assert_eq!(actor.answer(), "allocated 536870912");
    // … and not for ever; libcuda asks twice.
    bed.signal_daemon(libc::SIGKILL);
    let asked = Instant::now();
    let answer = actor.tell("alloc 64MiB");
    assert!(answer.starts_with("out of memory"), "{answer}");
    assert!(
        asked.elapsed() < Duration::from_secs(30),
        "{:?}",
        asked.elapsed()
    );
    bed.start();
    let end = Instant::now() + Duration::from_secs(5);
    while !actor.tell("alloc 64MiB").starts_with("allocated") {
        assert!(Instant::now() < end, "not served again");
    }
}

#[test]
fn a_call_that_a_daemon_took_with_it_is_asked_again() {
    let mut bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
    // Stopped, the daemon cannot answer; the call is its own when it dies.
    // SAFETY: our own daemon.
    unsafe { libc::kill(bed.daemon_pid().cast_signed(), libc::SIGSTOP) };
    actor.order("alloc 128MiB");
    thread::sleep(Duration::from_millis(300));
    bed.signal_daemon(libc::SIGKILL);
    bed.start();
    assert_eq!(actor.answer(), "allocated 134217728");
}

#[test]
fn only_root_may_put_a_process_into_a_tenant() {
    let bed = Bed::new(ONE);
    let mut command = bed.run_command("a");
    command.arg("/bin/true");
    let mut unprivileged = std::process::Command::new("setpriv");
    unprivileged
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(command.get_program())
        .args(command.get_args());
    let output = unprivileged.output().expect("setpriv");
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("only root"), "{text}");
}

#[test]
fn the_commands_exit_code_is_the_runners() {
    let bed = Bed::new(ONE);
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)] {
        let mut command = bed.run_command("a");
        let status = command
            .args(["/bin/sh", "-c", script])
            .status()
            .expect("run");
        assert_eq!(status.code(), Some(code), "{script}");
    }
}

/// Kills the daemon at random moments while four workloads allocate and free, and compares the ledger with the driver's
/// truth after each start.
fn kill_the_daemon_under_load(rounds: u32) {
    const TENANTS: [&str; 4] = ["a", "a", "b", "inner"];
    let seed = std::env::var("GPUQUOTA_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| u64::from(std::process::id()) << 17 | 1);
    println!("GPUQUOTA_SEED={seed}");
    let mut state = seed;
    let mut random = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    let mut bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"2GiB\"\n\
         [tenant.b]\ncgroup = \"@/b.slice\"\nmemory.max = \"2GiB\"\n\
         [tenant.inner]\ncgroup = \"@/b.slice/inner.slice\"\nmemory.max = \"1GiB\"\n",
    );
    // One that answers has its listener with the daemon, and its runner takes it to the next.
    let working = |bed: &Bed, name: &str| {
        let mut actor = bed.actor(name);
        let answer = actor.tell("alloc 2MiB");
        assert!(answer.starts_with("allocated"), "{name}: {answer}");
        actor
    };
    let mut actors: Vec<Actor> = TENANTS.iter().map(|name| working(&bed, name)).collect();
    let mut tenants_killed = 0;
    for round in 0..rounds {
        for actor in &mut actors {
            let seed = random(1 << 30);
            actor.order(&format!("random --seed {seed} --ops 120 --largest 64MiB"));
        }
        thread::sleep(Duration::from_millis(random(120)));
        bed.signal_daemon(libc::SIGKILL);
        // Now and then a workload dies as well while nobody looks.
        let victim = (random(8) == 0).then(|| usize::try_from(random(4)).expect("small"));
        let victim = victim.map(|victim| {
            let pid = actors[victim].workload_pid();
            actors[victim].kill_workload();
            tenants_killed += 1;
            (victim, pid)
        });
        bed.start();
        for (number, actor) in actors.iter_mut().enumerate() {
            let answer = actor.answer();
            if victim.is_none_or(|(victim, _)| victim != number) {
                assert!(answer.starts_with("random seed"), "round {round}: {answer}");
            }
        }
        // Not before: while the others work, or what the dead one had is not given back, there may be nothing left for it.
        if let Some((victim, pid)) = victim {
            bed.wait_tenant(TENANTS[victim], 0, |usage| {
                usage.processes.iter().all(|process| process.pid != pid)
            });
            // A new process wants 416 MiB for its context, and the others may have grown into what the dead one had.
            for (number, actor) in actors.iter_mut().enumerate() {
                if number != victim {
                    let answer = actor.tell("free");
                    assert!(answer.starts_with("freed"), "round {round}: {answer}");
                }
            }
            actors[victim] = working(&bed, TENANTS[victim]);
        }
        let truth = bed.sim.truth().expect("the truth");
        let held = |name: &str| -> u64 {
            TENANTS
                .iter()
                .zip(&actors)
                .filter(|(tenant, _)| **tenant == name || (name == "b" && **tenant == "inner"))
                .filter_map(|(_, actor)| truth.gpus[0].processes.get(&actor.workload_pid()))
                .map(|process| process.rm_bytes)
                .sum()
        };
        for name in ["a", "b", "inner"] {
            let wanted = held(name);
            let used = bed.wait_usage(name, 0, |used| used == wanted);
            assert_eq!(
                used,
                wanted,
                "round {round}, tenant {name}, seed {seed}; {}",
                bed.differences()
            );
        }
    }
    for name in ["a", "b", "inner"] {
        let usage = bed.usage(name, 0);
        assert_eq!(usage.breaches, 0, "{name}");
        assert!(usage.memory_peak > 256 << 20, "{name} was hardly used");
    }
    for actor in actors {
        actor.finish();
    }
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(5)), []);
    println!("{rounds} kills of the daemon, {tenants_killed} of workloads meanwhile");
}

#[test]
fn the_ledger_is_the_drivers_truth_however_often_the_daemon_dies() {
    kill_the_daemon_under_load(20);
}

#[test]
#[ignore = "takes five minutes: a start takes more than a second without optimization"]
fn the_ledger_is_the_drivers_truth_after_two_hundred_deaths() {
    kill_the_daemon_under_load(200);
}

/// A call that waits for its supervisor is broken off by a signal and made again, at the very moment of the answer too.
#[test]
fn calls_that_are_interrupted_are_charged_once() {
    let bed = Bed::new(ONE);
    let mut actors: Vec<Actor> = (0..3).map(|_| bed.actor("a")).collect();
    for actor in &mut actors {
        assert_eq!(actor.tell("alloc 2MiB"), "allocated 2097152");
    }
    let pids: Vec<u32> = actors.iter().map(Actor::workload_pid).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for pid in &pids {
                    for signal in [libc::SIGSTOP, libc::SIGCONT] {
                        // SAFETY: workloads of this test.
                        unsafe { libc::kill(pid.cast_signed(), signal) };
                    }
                }
                thread::sleep(Duration::from_micros(100));
            }
        });
        for actor in &mut actors {
            actor.order("random --seed 7 --ops 1000 --largest 64MiB --via create");
        }
        let answers: Vec<String> = actors.iter_mut().map(Actor::answer).collect();
        over.store(true, Ordering::Relaxed);
        for answer in answers {
            assert!(answer.starts_with("random seed"), "{answer}");
        }
    });
    let truth = bed.sim.truth().expect("the truth");
    let held: u64 = pids
        .iter()
        .map(|pid| truth.gpus[0].processes[pid].rm_bytes)
        .sum();
    let used = bed.wait_usage("a", 0, |used| used == held);
    assert_eq!(used, held, "{}", bed.differences());
    drop(actors);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

/// A policy gives a cgroup to another tenant while its processes allocate and free.
#[test]
fn charges_that_are_moved_while_they_are_freed_stay_whole() {
    let policy = |a: &str, b: &str| {
        format!(
            "[tenant.a]\ncgroup = \"@/{a}.slice\"\nmemory.max = \"8GiB\"\n\
             [tenant.b]\ncgroup = \"@/{b}.slice\"\nmemory.max = \"8GiB\"\n"
        )
    };
    let policies = [policy("a", "b"), policy("b", "a")];
    let bed = Bed::new(&policies[0]);
    let mut actors: Vec<Actor> = (0..3).map(|_| bed.actor("a")).collect();
    for actor in &mut actors {
        actor.order("random --seed 11 --ops 1500 --largest 8MiB --via create");
    }
    for policy in policies.iter().cycle().take(30) {
        bed.write_policy(policy);
        assert!(bed.ctl(&["reload"]).status.success());
    }
    for actor in &mut actors {
        let answer = actor.answer();
        assert!(answer.starts_with("random seed"), "{answer}");
    }
    let truth = bed.sim.truth().expect("the truth");
    let held: u64 = actors
        .iter()
        .map(|actor| truth.gpus[0].processes[&actor.workload_pid()].rm_bytes)
        .sum();
    // The last policy has the cgroup in the second tenant.
    let used = bed.wait_usage("b", 0, |used| used == held);
    assert_eq!(used, held, "{}", bed.differences());
    assert_eq!(bed.wait_usage("a", 0, |used| used == 0), 0);
    drop(actors);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

#[test]
fn a_second_daemon_for_the_same_driver_does_not_start() {
    let bed = Bed::new(ONE);
    let scratch = bed.sim.scratch();
    let settings = std::fs::read_to_string(scratch.join("gpuquota.toml")).expect("settings");
    // All of its own but the driver.
    let other = settings.replace("/run", "/run2").replace(
        "bpf-directory = \"/sys/fs/bpf/",
        "bpf-directory = \"/sys/fs/bpf/second-",
    );
    let file = scratch.join("second.toml");
    std::fs::write(&file, other).expect("settings");
    let output = bed
        .command("gpuquotad")
        .arg("--config")
        .arg(&file)
        .output()
        .expect("gpuquotad");
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    let holder = format!("process {}", bed.daemon_pid());
    assert!(
        text.contains("another gpuquotad governs") && text.contains(&holder),
        "{text}"
    );
    // The first one goes on, and nothing of the second is left.
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
}

/// One thread of a process that stands still as long as this lives, as one does that waits for a lock for ever.
struct Halted(i32);

impl Halted {
    fn new(process: u32, name: &str) -> Self {
        let tid: i32 = fs::read_dir(format!("/proc/{process}/task"))
            .expect("threads")
            .flatten()
            .find(|task| {
                fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
            })
            .and_then(|task| task.file_name().to_str()?.parse().ok())
            .expect("a thread of that name");
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            // SAFETY: a request about our own child's thread that touches no memory.
            let done = unsafe { libc::ptrace(request, tid, 0, 0) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        }
        let mut status = 0;
        // SAFETY: waits for that thread to stand still.
        unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) };
        Self(tid)
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        // SAFETY: lets go of the thread, which goes on.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

/// Where systemd would listen; and the daemon started again with its watchdog.
struct Watchdog(UnixDatagram);

impl Watchdog {
    fn of(bed: &mut Bed, limit: Duration) -> Self {
        let path = bed.sim.scratch().join("notify.sock");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        bed.signal_daemon(libc::SIGTERM);
        bed.set_environment("NOTIFY_SOCKET", path.to_str().expect("a path"));
        bed.set_environment("WATCHDOG_USEC", limit.as_micros().to_string());
        bed.start();
        Self(socket)
    }

    fn sign_within(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut text = [0; 256];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = left.max(Duration::from_millis(1));
            self.0.set_read_timeout(Some(timeout)).expect("a timeout");
            match self.0.recv(&mut text) {
                Ok(length) if text[..length].starts_with(b"WATCHDOG=1") => return true,
                Ok(_) if !left.is_zero() => {}
                _ => return false,
            }
        }
    }
}

#[test]
fn a_daemon_whose_thread_hangs_gives_no_sign_of_life() {
    let mut bed = Bed::new(ONE);
    let watchdog = Watchdog::of(&mut bed, Duration::from_secs(8));
    for _ in 0..3 {
        assert!(
            watchdog.sign_within(Duration::from_secs(8)),
            "{}",
            bed.log()
        );
    }
    let halted = Halted::new(bed.daemon_pid(), "events");
    // What is on its way, and until the last round is too old.
    let end = Instant::now() + Duration::from_secs(7);
    while Instant::now() < end {
        watchdog.sign_within(Duration::from_millis(500));
    }
    assert!(!watchdog.sign_within(Duration::from_secs(5)));
    drop(halted);
    assert!(
        watchdog.sign_within(Duration::from_secs(8)),
        "{}",
        bed.log()
    );
    assert_eq!(bed.tenant("a").name, "a");
}

/// A process in a cgroup that makes one driver call after the other until it is killed, each of which the daemon is told of.
fn flood(bed: &Bed, cgroup: &str) -> thread::JoinHandle<()> {
    let folder = bed
        .hierarchy()
        .folder(&bed.cgroup(cgroup))
        .expect("a cgroup");
    let procs = fs::OpenOptions::new()
        .write(true)
        .open(folder.join("cgroup.procs"))
        .expect("a cgroup");
    let control = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(bed.sim.devices().join("nvidiactl"))
        .expect("the simulated driver");
    let command = IoctlCmd {
        nr: nr::RM_CONTROL,
        size: nvos54::SIZE,
    };
    let mut call = [0u8; nvos54::SIZE as usize];
    call[nvos54::CMD..nvos54::CMD + 4].copy_from_slice(&ctrl::FIFO_DISABLE_CHANNELS.to_ne_bytes());
    let mut flooder = Command::new("/bin/true");
    let endless = move || {
        // 0 is whoever writes it.
        (&procs).write_all(b"0")?;
        loop {
            // SAFETY: the argument is as long as the command says.
            unsafe {
                libc::ioctl(
                    control.as_raw_fd(),
                    libc::Ioctl::from(command.to_raw()),
                    call.as_mut_ptr(),
                );
            }
        }
    };
    // SAFETY: the child makes nothing but system calls until it is killed.
    unsafe { flooder.pre_exec(endless) };
    // Spawning returns once the child is gone.
    thread::spawn(move || drop(flooder.spawn()))
}

#[test]
fn a_flood_of_events_keeps_the_daemon_from_nothing() {
    let mut bed = Bed::new(&format!(
        "{ONE}[tenant.b]\ncgroup = \"@/b.slice\"\nmemory.max = \"3GiB\"\n"
    ));
    let watchdog = Watchdog::of(&mut bed, Duration::from_secs(8));
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    bed.hierarchy()
        .create(&bed.cgroup("/b.slice"))
        .expect("a cgroup");
    let floods = [flood(&bed, "/b.slice"), flood(&bed, "/b.slice")];
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        assert!(
            watchdog.sign_within(Duration::from_secs(8)),
            "{}",
            bed.log()
        );
        assert_eq!(bed.tenant("b").name, "b");
    }
    let events = bed.counter(counter::OWN_CONTROLS);
    assert!(events > 20_000, "only {events} events");
    // Who dies meanwhile is given back, and who comes is governed.
    actor.kill_workload();
    assert_eq!(bed.wait_usage("a", 0, |used| used == 0), 0);
    let mut late = bed.actor("a");
    assert!(late.tell("alloc 4GiB").starts_with("out of memory"));
    for pid in bed.hierarchy().processes(&bed.cgroup("/b.slice")) {
        // SAFETY: a signal to one of the two.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
    }
    for flood in floods {
        flood.join().expect("killed");
    }
}
