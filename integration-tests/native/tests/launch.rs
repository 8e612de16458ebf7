//! Launch budgets on unmodified programs: rates, bursts, who is touched and who is not, and that nobody stays stopped.
//!
//! Rates are what the workloads themselves count. The bound above is the issue's; the one below is wider, since here
//! tenants, daemon and GPU share a few CPUs: a tenant that gets no CPU cannot launch. `integration-tests/gpu/run.sh launches`
//! measures the real thing.

use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::{
    control::launch::TenantLaunch,
    launch::{process, symbols},
};
use gpuquota_native_tests::{Actor, Bed, PATIENCE, binary};

/// As fast as it goes; kernels that take the GPU next to nothing.
const FAST: &str = "launch --rate max --kernel-us 1 --for";

fn tenants(list: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, properties) in list {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "[tenant.{name}]\ncgroup = \"@/{name}.slice\"\n{properties}"
        );
    }
    text
}

fn launches(bed: &Bed, tenant: &str) -> TenantLaunch {
    bed.tenant(tenant).launch.expect("a launch budget")
}

/// Actors with a context and with probes.
fn ready(bed: &Bed, tenant: &str, count: usize) -> Vec<Actor> {
    let mut actors: Vec<Actor> = (0..count).map(|_| bed.actor(tenant)).collect();
    for actor in &mut actors {
        actor.order("context");
    }
    for actor in &mut actors {
        actor.answer();
        wait_for("probes", || has_breakpoint(actor.workload_pid()));
    }
    actors
}

fn assert_all_live(pids: &[u32]) {
    // A process that has ended has no program.
    let live = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok();
    assert!(pids.iter().all(live), "somebody has ended");
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "no {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Launches and seconds of an answer such as `launched 6017 in 3.000 s, …, begun at 512.250 s`.
fn parse(answer: &str) -> (f64, f64) {
    let (launched, seconds, _) = parse_all(answer);
    (launched, seconds)
}

/// The same, and when they began on the clock that all processes have in common.
fn parse_all(answer: &str) -> (f64, f64, f64) {
    let number = |text: &str| text.parse().expect("a number");
    let words: Vec<&str> = answer.split_whitespace().collect();
    match words.as_slice() {
        [
            "launched",
            count,
            "in",
            seconds,
            ..,
            "begun",
            "at",
            begun,
            "s",
        ] => (number(count), number(seconds), number(begun)),
        _ => panic!("{answer:?}"),
    }
}

/// All launch at once for so long; launches, and the time from the first begin to the last end. They do not begin together
/// where there are fewer CPUs than processes.
fn together(actors: &mut [Actor], step: &str) -> (f64, f64) {
    for actor in actors.iter_mut() {
        actor.order(step);
    }
    let (launched, first, last) = actors
        .iter_mut()
        .map(|actor| parse_all(&actor.answer()))
        .fold(
            (0.0, f64::MAX, 0.0),
            |(sum, first, last), (count, seconds, begun)| {
                (
                    sum + count,
                    begun.min(first),
                    f64::max(begun + seconds, last),
                )
            },
        );
    (launched, last - first)
}

/// The instruction at the place where a probe goes in `cuLaunchKernel` of a process.
fn instruction(pid: u32) -> u8 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    for line in maps.lines().filter(|line| line.contains(" r-xp ")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let Some(path) = fields.get(5).filter(|path| path.starts_with('/')) else {
            continue;
        };
        let Ok(file) = fs::File::open(path) else {
            continue;
        };
        let Ok(Some(found)) = symbols::find(&file) else {
            continue;
        };
        let hex = |text: &str| u64::from_str_radix(text, 16).expect("hexadecimal");
        let (from, to) = fields[0].split_once('-').expect("a range");
        let mapped_from = hex(fields[2]);
        let symbol = found
            .launches
            .iter()
            .find(|symbol| symbol.name == "cuLaunchKernel")
            .expect("the library has it");
        let mapped = mapped_from..mapped_from + (hex(to) - hex(from));
        if mapped.contains(&symbol.offset) {
            let mut byte = [0];
            fs::File::open(format!("/proc/{pid}/mem"))
                .and_then(|memory| {
                    memory.read_exact_at(&mut byte, hex(from) + symbol.offset - mapped_from)
                })
                .expect("readable");
            return byte[0];
        }
    }
    panic!("process {pid} has no library with launch calls")
}

/// Whether a probe is in the process: `int3`.
fn has_breakpoint(pid: u32) -> bool {
    instruction(pid) == 0xcc
}

fn is_stopped(pid: u32) -> bool {
    process::state(pid) == Some('T')
}

fn send(pid: u32, signal: i32) {
    // SAFETY: processes that this test started.
    let sent = unsafe { libc::kill(pid.cast_signed(), signal) };
    assert_eq!(sent, 0, "signal {signal} to {pid}");
}

/// Rates with 1, 4 and 16 processes under one budget.
fn rates(rate: u32, pace: &str) {
    let bed = Bed::new(&tenants(&[(
        "a",
        &format!("launch.max = \"{rate}/s\"\nlaunch.pace = \"{pace}\""),
    )]));
    let mut actors = ready(&bed, "a", 16);
    let burst = f64::from((rate / 100).max(16));
    for count in [1, 4, 16] {
        // The best of three: others may have the CPUs meanwhile.
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (launched, seconds) = together(&mut actors[..count], &format!("{FAST} 3s"));
            let off = ((launched - burst) / seconds / f64::from(rate) - 1.0) * 100.0;
            println!(
                "{pace} {rate}/s, {count} processes: {launched} in {seconds:.3} s, {off:+.2} % without the burst"
            );
            assert!(off < 1.0, "more than the budget: {off:+.2} %");
            seen.push(off);
            if off > -1.0 {
                break;
            }
        }
        assert!(
            seen.iter().any(|off| *off > -5.0),
            "less than the budget: {seen:?}"
        );
    }
    let counted = launches(&bed, "a");
    assert_eq!((counted.overdue, counted.unheld), (0, 0), "{counted:?}");
    assert!(counted.delayed > 0 && counted.delay_usec > 0);
}

#[test]
fn two_thousand_a_second_are_held() {
    rates(2_000, "signal");
}

#[test]
fn twenty_thousand_a_second_are_held() {
    rates(20_000, "signal");
}

#[test]
fn spinning_holds_the_rate_too() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"5000/s\"\nlaunch.pace = \"spin\"",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let (launched, seconds) = together(&mut actors, &format!("{FAST} 2s"));
    let rate = (launched - 50.0) / seconds;
    println!("spin: {rate:.0}/s of 5000/s");
    assert!((4_500.0..5_050.0).contains(&rate), "{rate}");
    // Nobody was stopped for that.
    assert_eq!(
        fs::read_to_string(format!("/proc/{}/status", actors[0].workload_pid()))
            .map(|status| status.lines().any(|line| line.starts_with("State:\tT")))
            .ok(),
        Some(false)
    );
}

#[test]
fn a_burst_goes_at_once() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"100/s\"\nlaunch.burst = 500",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let (launched, _) = together(&mut actors, &format!("{FAST} 1s"));
    // 500 at once and 100 in the second.
    assert!((590.0..=612.0).contains(&launched), "{launched}");
}

#[test]
fn who_has_no_launch_budget_is_not_touched() {
    let bed = Bed::new(&tenants(&[
        ("a", "launch.max = \"1000/s\""),
        ("b", "memory.max = \"4GiB\""),
    ]));
    let with = ready(&bed, "a", 1);
    let mut without = bed.actor("b");
    let mut stranger = bed.stranger();
    for actor in [&mut without, &mut stranger] {
        actor.tell("context");
        let (launched, seconds) = parse(&actor.tell(&format!("{FAST} 500ms")));
        assert!(launched / seconds > 2_000.0, "{launched}");
    }
    assert!(has_breakpoint(with[0].workload_pid()));
    assert!(!has_breakpoint(without.workload_pid()));
    assert!(!has_breakpoint(stranger.pid()));
    assert_eq!(bed.tenant("b").launch, None);
}

#[test]
fn probes_come_and_go_with_the_policy() {
    let free = tenants(&[("a", "")]);
    let bed = Bed::new(&free);
    let mut actor = bed.actor("a");
    actor.tell("context");
    let pid = actor.workload_pid();
    assert!(!has_breakpoint(pid));
    bed.write_policy(&tenants(&[("a", "launch.max = \"500/s\"")]));
    assert!(bed.ctl(&["reload"]).status.success());
    wait_for("probe", || has_breakpoint(pid));
    let (launched, seconds) = parse(&actor.tell(&format!("{FAST} 1s")));
    assert!((launched - 16.0) / seconds < 510.0, "{launched}");
    bed.write_policy(&free);
    assert!(bed.ctl(&["reload"]).status.success());
    wait_for("untouched library", || !has_breakpoint(pid));
    let (launched, _) = parse(&actor.tell(&format!("{FAST} 500ms")));
    assert!(launched > 1_000.0, "{launched}");
}

#[test]
fn a_slower_budget_is_not_owed_to_a_faster_one() {
    let budget =
        |rate: &str| tenants(&[("a", &format!("launch.max = \"{rate}\"\nlaunch.burst = 1"))]);
    let bed = Bed::new(&budget("2/min"));
    let mut actors = ready(&bed, "a", 1);
    actors[0].tell(&format!("{FAST} 100ms"));
    bed.write_policy(&budget("10000/s"));
    assert!(bed.ctl(&["reload"]).status.success());
    let (launched, _) = parse(&actors[0].tell(&format!("{FAST} 1s")));
    // At the slower one's it would be a single launch.
    assert!(launched > 500.0, "{launched}");
}

#[test]
fn nested_tenants_share_the_budget_around_them() {
    let bed = Bed::new(
        "[tenant.lab]\ncgroup = \"@/lab.slice\"\nlaunch.max = \"2000/s\"\n\
         [tenant.one]\ncgroup = \"@/lab.slice/one.slice\"\nlaunch.max = \"500/s\"\n\
         [tenant.two]\ncgroup = \"@/lab.slice/two.slice\"\n",
    );
    let mut actors = ready(&bed, "one", 1);
    actors.extend(ready(&bed, "two", 1));
    for actor in &mut actors {
        actor.order(&format!("{FAST} 2s"));
    }
    let rates: Vec<f64> = actors
        .iter_mut()
        .map(|actor| parse(&actor.answer()))
        .map(|(launched, seconds)| launched / seconds)
        .collect();
    println!(
        "one {:.0}/s of 500/s, both {:.0}/s of 2000/s",
        rates[0],
        rates[0] + rates[1]
    );
    assert!(rates[0] < 515.0, "{rates:?}");
    assert!(
        (1_800.0..2_040.0).contains(&(rates[0] + rates[1])),
        "{rates:?}"
    );
    // Only the inner one has a budget of its own.
    assert_eq!(launches(&bed, "two").max, None);
    assert!(
        launches(&bed, "lab").launches
            >= launches(&bed, "one").launches + launches(&bed, "two").launches
    );
}

#[test]
fn a_library_is_found_whatever_it_is_called() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"500/s\"")]));
    let copy = bed.sim.scratch().join("innocent.so");
    fs::copy(bed.sim.libraries().join("libcuda.so.1"), &copy).expect("a copy");
    let mut command = bed.run_command("a");
    command
        .arg(binary("simtenant"))
        .arg("--cuda")
        .arg(&copy)
        .arg("interactive");
    let mut actor = Actor::start(command);
    actor.tell("context");
    // Gone from the file system, it is still mapped.
    fs::remove_file(&copy).expect("it was there");
    wait_for("count", || {
        actor.tell(&format!("{FAST} 20ms"));
        launches(&bed, "a").launches > 0
    });
    let (launched, seconds) = parse(&actor.tell(&format!("{FAST} 1s")));
    assert!((launched - 16.0) / seconds < 510.0, "{launched}");
}

#[test]
fn a_library_in_a_mount_namespace_of_its_own_is_found() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"500/s\"")]));
    let place = bed.sim.scratch().join("private");
    fs::create_dir(&place).expect("a folder");
    let script = "mount -t tmpfs none \"$1\" && cp \"$2\" \"$1/libx.so\" && exec \"$0\" --cuda \"$1/libx.so\" interactive";
    let mut command = bed.run_command("a");
    command
        .args(["unshare", "--mount", "sh", "-c", script])
        .arg(binary("simtenant"))
        .arg(&place)
        .arg(bed.sim.libraries().join("libcuda.so.1"));
    let mut actor = Actor::start(command);
    let answer = actor.tell("context");
    assert!(answer.starts_with("context"), "{answer}");
    // Nobody else sees it.
    assert!(!place.join("libx.so").exists());
    wait_for("count", || {
        actor.tell(&format!("{FAST} 20ms"));
        launches(&bed, "a").launches > 0
    });
    let (launched, seconds) = parse(&actor.tell(&format!("{FAST} 1s")));
    assert!((launched - 16.0) / seconds < 510.0, "{launched}");
}

#[test]
fn every_way_to_launch_is_counted_once() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"1M/s\"")]));
    let mut actors = ready(&bed, "a", 1);
    for via in ["kernel", "ex", "cooperative", "graph"] {
        let before = launches(&bed, "a").launches;
        let (launched, _) = parse(&actors[0].tell(&format!("{FAST} 100ms --via {via}")));
        let counted = launches(&bed, "a").launches - before;
        #[expect(
            clippy::cast_precision_loss,
            reason = "a test does not launch 2^53 times"
        )]
        let counted = counted as f64;
        assert!(
            (counted - launched).abs() < 0.5,
            "{via}: {counted} of {launched}"
        );
    }
}

#[test]
fn graphs_cost_one_or_their_nodes() {
    let budget = |cost: &str| {
        tenants(&[(
            "a",
            &format!("launch.max = \"1000/s\"\nlaunch.graph-cost = \"{cost}\""),
        )])
    };
    for (cost, replays) in [("one", 1_000.0), ("nodes", 20.0)] {
        let bed = Bed::new(&budget(cost));
        let mut actors = ready(&bed, "a", 1);
        let (launched, seconds) =
            parse(&actors[0].tell(&format!("{FAST} 2s --via graph --nodes 50")));
        let rate = (launched - if cost == "one" { 16.0 } else { 0.0 }) / seconds;
        println!("graphs of 50 kernels at 1000/s, cost {cost}: {rate:.1}/s");
        // The other cost is fifty times as much.
        assert!(
            rate < 1.06 * replays && rate > 0.5 * replays,
            "{cost}: {rate}"
        );
    }
}

#[test]
fn a_process_started_by_another_is_found() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"500/s\"")]));
    let mut actors = ready(&bed, "a", 1);
    let answer = actors[0].tell("spawn \"context; hold 1s; launch --for 2s --kernel-us 1\"");
    println!("{answer}");
    let counted = launches(&bed, "a");
    // 500/s for two seconds, the burst, and what it launched before it was found.
    assert!(
        (500..1_200).contains(&counted.launches),
        "{answer}: {counted:?}"
    );
}

#[test]
fn the_death_of_the_daemon_leaves_nobody_stopped_and_its_return_goes_on_pacing() {
    let mut bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"20/s\"\nlaunch.burst = 1",
    )]));
    let mut actors = ready(&bed, "a", 8);
    let pids: Vec<u32> = actors.iter().map(Actor::workload_pid).collect();
    for actor in &mut actors {
        // Longer than a daemon takes to come back on a busy host.
        actor.order(&format!("{FAST} 600s"));
    }
    wait_for("stop", || {
        pids.iter().filter(|pid| is_stopped(**pid)).count() >= 4
    });
    bed.signal_daemon(libc::SIGKILL);
    let killed = Instant::now();
    let mut last = Duration::ZERO;
    while killed.elapsed() < Duration::from_millis(1500) {
        if pids.iter().any(|pid| is_stopped(*pid)) {
            last = killed.elapsed();
        }
        thread::sleep(Duration::from_millis(1));
    }
    println!("daemon killed: nobody stopped any more after {last:?}");
    assert!(last < Duration::from_secs(1), "{last:?}");
    bed.start();
    wait_for("pacing", || {
        pids.iter().filter(|pid| is_stopped(**pid)).count() >= 4
    });
    assert_all_live(&pids);
}

#[test]
fn a_daemon_that_hangs_leaves_nobody_stopped() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"20/s\"\nlaunch.burst = 1",
    )]));
    let mut actors = ready(&bed, "a", 4);
    let pids: Vec<u32> = actors.iter().map(Actor::workload_pid).collect();
    for actor in &mut actors {
        actor.order(&format!("{FAST} 600s"));
    }
    wait_for("stop", || pids.iter().any(|pid| is_stopped(*pid)));
    send(bed.daemon_pid(), libc::SIGSTOP);
    thread::sleep(Duration::from_secs(2));
    let stopped = pids.iter().filter(|pid| is_stopped(**pid)).count();
    send(bed.daemon_pid(), libc::SIGCONT);
    assert_eq!(stopped, 0);
    wait_for("pacing again", || pids.iter().any(|pid| is_stopped(*pid)));
    assert!(launches(&bed, "a").unheld > 0);
    assert_all_live(&pids);
}

#[test]
fn what_is_left_of_daemon_and_guard_is_released_by_hand() {
    let mut bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"20/s\"\nlaunch.burst = 1",
    )]));
    let mut actors = ready(&bed, "a", 4);
    let pids: Vec<u32> = actors.iter().map(Actor::workload_pid).collect();
    for actor in &mut actors {
        actor.order(&format!("{FAST} 3s"));
    }
    wait_for("stop", || pids.iter().any(|pid| is_stopped(*pid)));
    // As the kernel does it that kills a whole cgroup for want of memory.
    let guards = guards_of(bed.daemon_pid());
    assert_eq!(guards.len(), 1);
    send(guards[0], libc::SIGKILL);
    bed.signal_daemon(libc::SIGKILL);
    thread::sleep(Duration::from_millis(500));
    let output = bed.release_all();
    assert!(output.status.success(), "{output:?}");
    assert!(pids.iter().all(|pid| !is_stopped(*pid)));
    for actor in &mut actors {
        parse(&actor.answer());
    }
}

/// Children of the daemon.
fn guards_of(daemon: u32) -> Vec<u32> {
    fs::read_dir(format!("/proc/{daemon}/task"))
        .expect("threads")
        .filter_map(Result::ok)
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|text| {
            text.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect()
}

#[test]
fn who_is_stopped_by_others_stays_stopped() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"2000/s\"")]));
    let mut actors = ready(&bed, "a", 1);
    let pid = actors[0].workload_pid();
    for round in 0..20 {
        actors[0].order(&format!("{FAST} 400ms"));
        // Some of them come while it is stopped by us, some while it runs.
        thread::sleep(Duration::from_millis(50 + round * 7));
        send(pid, libc::SIGSTOP);
        thread::sleep(Duration::from_millis(60));
        for _ in 0..20 {
            assert!(is_stopped(pid), "round {round}: it was continued");
            thread::sleep(Duration::from_millis(2));
        }
        send(pid, libc::SIGCONT);
        parse(&actors[0].answer());
    }
}

#[test]
fn who_continues_itself_gains_nothing() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"1000/s\"\nlaunch.burst = 10",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let pid = actors[0].workload_pid();
    actors[0].order(&format!("{FAST} 2s"));
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        send(pid, libc::SIGCONT);
        thread::sleep(Duration::from_micros(50));
    }
    let (launched, seconds) = parse(&actors[0].answer());
    let counted = launches(&bed, "a");
    println!(
        "continued all the time: {:.0}/s of 1000/s, {} evasions",
        launched / seconds,
        counted.evaded
    );
    assert!(
        (launched - 10.0) / seconds < 1_100.0,
        "{launched} {counted:?}"
    );
}

#[test]
fn no_delay_is_longer_than_the_longest() {
    let mut bed = Bed::new(&tenants(&[("a", "launch.max = \"1/h\"\nlaunch.burst = 1")]));
    bed.signal_daemon(libc::SIGTERM);
    bed.add_settings("[launch]\nmax-delay = \"100ms\"\n");
    bed.start();
    let mut actors = ready(&bed, "a", 1);
    let start = Instant::now();
    let (launched, _) = parse(&actors[0].tell(&format!("{FAST} 1s")));
    assert!(
        (8.0..=12.0).contains(&launched),
        "{launched} in {:?}",
        start.elapsed()
    );
    assert!(launches(&bed, "a").overdue >= 7);
}

#[test]
fn deny_ends_a_process_that_goes_over_its_budget() {
    let bed = Bed::new(&tenants(&[(
        "a",
        // A burst as large as what is launched within the rate: on a busy host that may come late and all at once.
        "launch.max = \"1000/s\"\nlaunch.burst = 500\nlaunch.on-max = \"deny\"\nlaunch.patience = \"500ms\"",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let within = actors[0].tell("launch --rate 500/s --kernel-us 1 --for 1s");
    assert!(within.starts_with("launched"), "{within}");
    let pid = actors[0].workload_pid();
    let start = Instant::now();
    assert_eq!(actors[0].tell(&format!("{FAST} 10s")), "");
    println!("ended after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(8));
    assert!(
        !Path::new(&format!("/proc/{pid}/mem")).exists()
            || process::state(pid).is_none_or(|state| state == 'Z')
    );
    assert!(launches(&bed, "a").denied > 0);
}

#[test]
fn who_does_not_end_when_told_is_killed_after_the_patience() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"1000/s\"\nlaunch.on-max = \"deny\"\nlaunch.patience = \"800ms\"",
    )]));
    let mut command = bed.run_command("a");
    command
        .args(["sh", "-c", "trap '' TERM; exec \"$0\" interactive"])
        .arg(binary("simtenant"));
    let mut actor = Actor::start(command);
    actor.tell("context");
    wait_for("probe", || has_breakpoint(actor.workload_pid()));
    actor.order(&format!("{FAST} 10s"));
    let start = Instant::now();
    assert_eq!(actor.answer(), "");
    let ended = start.elapsed();
    println!("killed after {ended:?}");
    assert!(
        ended > Duration::from_millis(700) && ended < Duration::from_secs(8),
        "{ended:?}"
    );
    // Until then it was held to its rate.
    let launched = launches(&bed, "a").launches;
    assert!(u128::from(launched) < ended.as_millis() + 100, "{launched}");
}

#[test]
fn freezing_holds_the_rate_and_leaves_a_frozen_cgroup_frozen() {
    let bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"2000/s\"\nlaunch.pace = \"freeze\"",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let (launched, seconds) = together(&mut actors, &format!("{FAST} 2s"));
    let rate = (launched - 20.0) / seconds;
    println!("freeze: {rate:.0}/s of 2000/s");
    assert!((1_600.0..2_200.0).contains(&rate), "{rate}");
    let file = freeze_file(&bed, "/a.slice");
    actors[0].order(&format!("{FAST} 1s"));
    thread::sleep(Duration::from_millis(200));
    fs::write(&file, "1").expect("frozen by an admin");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(fs::read_to_string(&file).expect("readable").trim(), "1");
    fs::write(&file, "0").expect("thawed by an admin");
    parse(&actors[0].answer());
}

fn freeze_file(bed: &Bed, below: &str) -> PathBuf {
    bed.hierarchy()
        .folder(&bed.cgroup(below))
        .expect("a cgroup")
        .join("cgroup.freeze")
}

#[test]
fn the_death_of_the_daemon_leaves_nothing_frozen() {
    let mut bed = Bed::new(&tenants(&[(
        "a",
        "launch.max = \"20/s\"\nlaunch.burst = 1\nlaunch.pace = \"freeze\"",
    )]));
    let mut actors = ready(&bed, "a", 1);
    let file = freeze_file(&bed, "/a.slice");
    let is_frozen = || fs::read_to_string(&file).is_ok_and(|text| text.trim() == "1");
    actors[0].order(&format!("{FAST} 3s"));
    wait_for("freeze", is_frozen);
    bed.signal_daemon(libc::SIGKILL);
    thread::sleep(Duration::from_millis(900));
    assert!(!is_frozen());
    parse(&actors[0].answer());
}

#[test]
fn storms_and_throttling_are_told() {
    let mut bed = Bed::new(&tenants(&[("a", "launch.max = \"1000/s\"")]));
    bed.signal_daemon(libc::SIGTERM);
    bed.add_settings("[launch]\nstorm-window = \"1s\"\n");
    bed.start();
    let mut monitor = Command::new(binary("gpuquotactl"))
        .args(["--bus", &bed.bus(), "monitor", "--json"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("gpuquotactl monitor");
    thread::sleep(Duration::from_millis(500));
    let mut actors = ready(&bed, "a", 1);
    together(&mut actors, &format!("{FAST} 5s"));
    monitor.kill().expect("it runs");
    let output = monitor.wait_with_output().expect("its output");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let of = |event: &str| -> Vec<serde_json::Value> {
        text.lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|notice| notice["event"] == event)
            .collect()
    };
    let pid = actors[0].workload_pid();
    let throttled = of("throttled");
    assert_eq!(throttled.len(), 1, "{text}");
    assert_eq!(throttled[0]["pid"], pid);
    assert_eq!(throttled[0]["symbol"], "cuLaunchKernel");
    let told = launches(&bed, "a");
    assert_eq!(told.storms, 1);
    let pressure = told.pressure;
    // It is the only process, and held back for as long as the host lets it launch faster than it may: half of that has not
    // faded from ten seconds yet.
    assert!(
        pressure.full.total > Duration::from_secs(1)
            && pressure.some.avg10 > pressure.some.total.as_secs_f64() / 20.0,
        "{pressure:?}"
    );
    let storms = of("storm");
    assert_eq!(storms.len(), 1, "{text}");
    assert_eq!(storms[0]["budget"], 1000);
    assert!(
        storms[0]["wanted"]
            .as_u64()
            .is_some_and(|wanted| wanted >= 10_000),
        "{storms:?}"
    );
}

#[test]
fn hundreds_of_processes_get_their_probes_at_once() {
    let bed = Bed::new(&tenants(&[("a", "launch.max = \"1000/s\"")]));
    // Many come and go while others start: probes of the dead must not keep the living waiting.
    for _ in 0..3 {
        let actors = ready(&bed, "a", 24);
        drop(actors);
    }
    let mut late = Vec::new();
    for _ in 0..5 {
        let mut actor = bed.actor("a");
        actor.tell("context");
        let pid = actor.workload_pid();
        let start = Instant::now();
        wait_for("probe", || has_breakpoint(pid));
        late.push(start.elapsed());
    }
    println!("probes after {late:?}");
    assert!(
        late.iter().all(|late| *late < Duration::from_secs(1)),
        "{late:?}"
    );
}
