//! What threads do while their GPU is idle, on an unmodified program: each way to leave it idle is named, with the function
//! that does, and nothing is left on the host when nobody looks.

use std::{fs, path::PathBuf, process::Stdio, sync::OnceLock, thread, time::Duration};

use gpuquota_enforcer::{
    client::looks::Idle,
    control::{
        idle::{IdleReport, IdleShare},
        leaks::Target,
    },
    idle::State,
};
use gpuquota_native_tests::{
    Actor, Bed,
    look::{self, LONG, loaded, wait_for},
};

const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\n\
    [tenant.b]\ncgroup = \"@/b.slice\"\nlaunch.max = \"20/s\"\nlaunch.burst = 1\nlaunch.pace = \"signal\"\n";

/// The client: optimized, and without frame pointers, as programs are shipped.
fn stalling() -> PathBuf {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    let path = COMPILED.get_or_init(|| look::compiled("stalling"));
    path.clone()
}

/// The client in a tenant, with a context.
fn client(bed: &Bed, tenant: &str) -> Actor {
    let mut command = bed.run_command(tenant);
    command.arg(stalling());
    let mut actor = Actor::start(command);
    assert_eq!(actor.tell("ready"), "did ready");
    actor
}

fn start(bed: &Bed, target: &Target) {
    bed.call(async |client| client.start_look::<Idle>(target, LONG).await)
        .expect("a look");
}

fn report(bed: &Bed, target: &Target) -> IdleReport {
    bed.call(async |client| client.look::<Idle>(target).await)
        .expect("a look")
}

fn stop(bed: &Bed, target: &Target) -> IdleReport {
    bed.call(async |client| client.stop_look::<Idle>(target).await)
        .expect("a look")
}

/// What is told of a process on the first GPU.
fn share(report: &IdleReport, pid: u32) -> &IdleShare {
    report
        .gpus
        .first()
        .and_then(|gpu| gpu.shares.iter().find(|share| share.pid == pid))
        .unwrap_or_else(|| panic!("nothing of {pid} in {report:#?}"))
}

/// The part of the idle time that a process spent in a state: the least, the estimate.
fn part(share: &IdleShare, state: State) -> (f64, f64) {
    let found = share.states[state.index()];
    assert_eq!(found.state, state);
    #[expect(clippy::cast_precision_loss, reason = "seconds of microseconds")]
    let of_idle = |usec: u64| usec as f64 / share.idle_usec as f64;
    (of_idle(found.least_usec), of_idle(found.idle_usec))
}

/// Microseconds on stacks with a function, in a state.
fn on_stack(report: &IdleReport, function: &str, state: State) -> u64 {
    report
        .stacks
        .iter()
        .filter(|stack| stack.state == state)
        .filter(|stack| {
            let is_named = |name: &Option<String>| name.as_deref() == Some(function);
            stack.frames.iter().any(|frame| is_named(&frame.function))
        })
        .map(|stack| stack.idle_usec)
        .sum()
}

/// Has the client do something and tells what was seen of it; its times add up.
fn seen(bed: &Bed, actor: &mut Actor, order: &str) -> IdleReport {
    let target = Target::Process(actor.workload_pid());
    start(bed, &target);
    assert_eq!(actor.tell(order), format!("did {order}"));
    let report = stop(bed, &target);
    let share = share(&report, actor.workload_pid());
    assert!(share.context && share.idle_usec > 500_000, "{share:#?}");
    let about = |sum: u64, whole: u64| sum.abs_diff(whole) < 20;
    assert!(
        about(
            share.used_usec + share.others_usec + share.idle_usec,
            share.known_usec
        ),
        "{share:#?}"
    );
    let (mut time, mut idle) = (0, 0);
    for state in &share.states {
        time += state.time_usec;
        idle += state.idle_usec;
        assert!(state.least_usec <= state.idle_usec + 1 && state.idle_usec <= state.most_usec + 1);
    }
    assert!(
        about(time, share.known_usec) && about(idle, share.idle_usec),
        "{share:#?}"
    );
    assert_eq!(report.gaps.no_samples, None);
    report
}

#[test]
fn each_way_to_leave_a_gpu_idle_is_named() {
    let bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    // A pool that waits for work that never comes hides nothing.
    assert_eq!(actor.tell("names 20"), "did names 20");
    let pid = actor.workload_pid();
    for (order, state, function) in [
        ("lock 10", State::Lock, "wait_for_lock"),
        ("data 10", State::Io, "wait_for_data"),
        ("sleep 10", State::Asleep, "wait_for_time"),
        ("spin 10", State::Running, "prepare_batch"),
    ] {
        let report = seen(&bed, &mut actor, order);
        assert_eq!(report.gaps.lost, 0, "{:?}", report.gaps);
        let share = share(&report, pid);
        let (mut least, mut estimate) = part(share, state);
        let mut waited = share.states[state.index()].idle_usec;
        if state == State::Running {
            // Who computes on a busy host waits for a CPU too, and is on no stack then.
            let queued = part(share, State::Queued);
            (least, estimate) = (least + queued.0, estimate + queued.1);
        } else {
            waited = share.idle_usec;
        }
        assert!(
            estimate > 0.6 && least > 0.3,
            "{order}: {least} {estimate} {share:#?}"
        );
        // A kernel of 20 ms in each 200.
        #[expect(clippy::cast_precision_loss, reason = "seconds of microseconds")]
        let used = share.used_usec as f64 / share.known_usec as f64;
        assert!((0.03..0.25).contains(&used), "{order}: {used}");
        let found = on_stack(&report, function, state);
        assert!(found * 2 > waited, "{order}: {found} {report:#?}");
        assert!(report.gpus[0].step_usec.is_some_and(|step| step <= 300_000));
    }
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn who_switches_all_the_time_is_followed_as_far_as_the_budget_goes() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\ninsight.budget = \"2%\"\n");
    let mut actor = client(&bed, "a");
    let pid = actor.workload_pid();
    // So many changes that a busy host may lose some, which is told and leaves the rest as it is.
    let report = seen(&bed, &mut actor, "hand 40");
    let process = report
        .processes
        .iter()
        .find(|process| process.pid == pid)
        .expect("followed");
    assert!(
        (process.budget - 0.02).abs() < 1e-9 && process.covered < 0.9 && process.covered > 0.0,
        "{process:?}"
    );
    // A look may come late on a busy host.
    assert!(process.cost < 0.02 + 0.01, "{process:?}");
    // What nobody saw is in no time that is told.
    let share = share(&report, pid);
    assert!(share.known_usec < report.elapsed_usec, "{share:?}");
    let awake = part(share, State::Running).1 + part(share, State::Io).1;
    assert!(awake + part(share, State::Queued).1 > 0.8, "{share:#?}");
    assert!(on_stack(&report, "hand_to_and_fro", State::Io) > 0);
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn who_is_stopped_by_a_launch_budget_is_held() {
    let bed = Bed::new(POLICY);
    let mut actor = client(&bed, "b");
    // The probe has to be there.
    assert_eq!(actor.tell("launch 20"), "did launch 20");
    let pid = actor.workload_pid();
    let report = seen(&bed, &mut actor, "launch 40");
    let (least, estimate) = part(share(&report, pid), State::Held);
    assert!(estimate > 0.6 && least > 0.6, "{report:#?}");
    // Who is stopped by somebody else is not.
    // SAFETY: a process that this test started.
    let signal = |number| unsafe { libc::kill(pid.cast_signed(), number) };
    let target = Target::Process(pid);
    start(&bed, &target);
    signal(libc::SIGSTOP);
    thread::sleep(Duration::from_secs(1));
    signal(libc::SIGCONT);
    let report = stop(&bed, &target);
    let (least, _) = part(share(&report, pid), State::Halted);
    assert!(least > 0.5, "{report:#?}");
    assert_eq!(part(share(&report, pid), State::Held), (0.0, 0.0));
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn who_waits_for_orders_waits_for_io() {
    let bed = Bed::new(POLICY);
    let mut actor = bed.actor("a");
    assert!(!actor.tell("alloc 4MiB").is_empty());
    let target = Target::Tenant("a".into());
    start(&bed, &target);
    thread::sleep(Duration::from_secs(4));
    assert!(!actor.tell("info").is_empty());
    let report = stop(&bed, &target);
    let share = share(&report, actor.workload_pid());
    let (least, _) = part(share, State::Io);
    assert!(share.context && least > 0.5, "{report:#?}");
}

#[test]
fn who_is_frozen_on_the_gpu_is_held() {
    let bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    let pid = actor.workload_pid();
    let target = Target::Tenant("a".into());
    start(&bed, &target);
    let frozen = bed.ctl(&["freeze", "a"]);
    assert!(frozen.status.success(), "{frozen:?}");
    actor.order("spin 2");
    thread::sleep(Duration::from_secs(1));
    assert!(bed.ctl(&["thaw", "a"]).status.success());
    assert_eq!(actor.answer(), "did spin 2");
    let report = stop(&bed, &target);
    let (least, _) = part(share(&report, pid), State::Held);
    assert!(least > 0.3, "{report:#?}");
}

#[test]
fn nothing_is_on_the_host_when_nobody_looks() {
    let mut bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    let other = client(&bed, "a");
    let pids = [actor.workload_pid(), other.workload_pid()];
    let folder = bed.sim.scratch().to_owned();
    let flames = folder.join("folded");
    let before = loaded(&bed);
    let target = Target::Tenant("a".into());
    // The command, to its end.
    let mut command = bed.command("gpuquotactl");
    let looking = command
        .args(["--bus", &bed.bus(), "idle", "a", "--for", "3s", "--json"])
        .arg("--folded")
        .arg(&flames)
        .stdout(Stdio::piped())
        .spawn()
        .expect("gpuquotactl");
    wait_for("programs", || loaded(&bed).len() > before.len());
    let twice = bed.call(async |client| client.start_look::<Idle>(&target, LONG).await);
    assert!(twice.is_err(), "one look at a time");
    assert_eq!(actor.tell("data 20"), "did data 20");
    let output = looking.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?}");
    wait_for("end of programs", || loaded(&bed) == before);
    let told: IdleReport = serde_json::from_slice(&output.stdout).expect("a report");
    assert!(!told.running);
    for pid in pids {
        assert!(share(&told, pid).context, "{told:#?}");
    }
    let text = fs::read_to_string(&flames).expect("written");
    assert!(
        text.lines().any(|line| line.contains(";main;")
            && line.contains(";wait_for_data;")
            && line.contains(";[io] ")),
        "{text}"
    );
    // Nobody waits for the end: it comes by itself, and the end of a process before.
    bed.call(async |client| {
        client
            .start_look::<Idle>(&target, Duration::from_secs(2))
            .await
    })
    .expect("a look");
    assert!(report(&bed, &target).running);
    assert_eq!(other.finish(), Some(0));
    wait_for("the end of one", || {
        let ended = |report: IdleReport| report.processes.iter().any(|process| process.ended);
        ended(report(&bed, &target))
    });
    wait_for("end of programs", || loaded(&bed) == before);
    // A daemon that is killed takes its programs along, and the client goes on.
    start(&bed, &target);
    bed.signal_daemon(libc::SIGKILL);
    bed.start();
    assert_eq!(actor.tell("data 1"), "did data 1");
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn what_cannot_be_looked_at_is_said() {
    let bed = Bed::new(POLICY);
    bed.refuses(&["idle", "nobody"], "no tenant named \"nobody\"");
    bed.refuses(&["idle", "4194303"], "no process 4194303");
    bed.refuses(
        &["idle", "a", "--so-far"],
        "not followed and were not lately",
    );
    bed.refuses(&["idle", "a", "--for", "2h"], "may last from 1 s to 60 min");
    let empty = bed.ctl(&["idle", "a", "--for", "1s"]);
    let said = String::from_utf8_lossy(&empty.stdout).into_owned();
    assert!(
        said.contains("none of them has a context on a GPU"),
        "{said}"
    );
}
