//! The launch profile on an unmodified program: kernels are counted and named, a slow one is one event, the probes cost no
//! more than they may, and nothing is left in the process when nobody looks.

use std::{
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::{
    client::looks::Profile,
    control::{
        leaks::Target,
        profile::{ProfileKernel, ProfileReport},
    },
    profile::calls::CALLS,
};
use gpuquota_native_tests::{
    Actor, Bed,
    look::{self, LONG, loaded, wait_for},
};

const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\n[tenant.b]\ncgroup = \"@/b.slice\"\n";

/// A workload in a tenant, with a context.
fn workload(bed: &Bed, tenant: &str) -> Actor {
    let mut actor = bed.actor(tenant);
    assert_eq!(actor.tell("context"), "context");
    actor
}

fn has_breakpoint(pid: u32) -> bool {
    look::has_breakpoint(pid, "cuLaunchKernel", CALLS)
}

fn start(bed: &Bed, target: &Target) {
    bed.call(async |client| client.start_look::<Profile>(target, LONG).await)
        .expect("a look");
}

fn report(bed: &Bed, target: &Target) -> ProfileReport {
    bed.call(async |client| client.look::<Profile>(target).await)
        .expect("a look")
}

fn stop(bed: &Bed, target: &Target) -> ProfileReport {
    bed.call(async |client| client.stop_look::<Profile>(target).await)
        .expect("a look")
}

fn kernel<'a>(report: &'a ProfileReport, name: &str) -> &'a ProfileKernel {
    report
        .kernels
        .iter()
        .find(|kernel| kernel.name == name)
        .unwrap_or_else(|| panic!("no {name} in {report:#?}"))
}

fn waited(kernel: &ProfileKernel) -> u64 {
    kernel.durations.iter().sum()
}

/// The same with those that began late, as they do where a busy host lets the thread wait for a processor.
fn waits_of(kernel: &ProfileKernel) -> u64 {
    waited(kernel) + kernel.late
}

/// `gpuquotactl monitor`, whose lines of one kind are wanted.
struct Monitor(Child);

impl Monitor {
    fn start(bed: &Bed) -> Self {
        let child = bed
            .command("gpuquotactl")
            .args(["--bus", &bed.bus(), "monitor", "--json"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("gpuquotactl");
        // It says nothing until something happens.
        thread::sleep(Duration::from_millis(500));
        Self(child)
    }

    fn of(mut self, event: &str) -> Vec<serde_json::Value> {
        // The last events are on their way.
        thread::sleep(Duration::from_millis(500));
        self.0.kill().expect("it runs");
        let output = self.0.wait_with_output().expect("its end");
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|line| line["event"] == event)
            .collect()
    }
}

/// The count of a tenant's anomalies, as it is scraped.
fn anomalies(address: &str, tenant: &str) -> String {
    // Scrapes in quick succession get the same answer.
    thread::sleep(Duration::from_millis(250));
    let answer = gpuquota_native_tests::scrape(address);
    let wanted = format!("gpuquota_tenant_anomalies_total{{tenant=\"{tenant}\"}} ");
    answer
        .lines()
        .find_map(|line| line.strip_prefix(&wanted).map(str::to_owned))
        .expect("a series")
}

#[test]
fn launches_are_counted_named_and_timed() {
    // Whatever a probe costs where this runs, none comes out for its cost: all launches are to be counted.
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\ninsight.budget = \"100%\"\n");
    let mut actor = workload(&bed, "a");
    let pid = actor.workload_pid();
    let target = Target::Tenant("a".into());
    // Given out before the look: without a name in it.
    assert_eq!(actor.tell("rounds 3 --kernel-us 100"), "rounds 3");
    let before = loaded(&bed);
    assert!(!has_breakpoint(pid), "nobody looks");

    start(&bed, &target);
    wait_for("probes", || has_breakpoint(pid));
    assert!(loaded(&bed).len() > before.len());
    let twice = bed.call(async |client| client.start_look::<Profile>(&target, LONG).await);
    assert!(twice.is_err(), "one look at a time");
    assert_eq!(actor.tell("rounds 5 --kernel-us 2000"), "rounds 5");
    for wait in ["stream", "context", "event", "per-thread"] {
        let step = format!("rounds 30 --kernel-us 2000 --library --wait {wait}");
        assert_eq!(actor.tell(&step), "rounds 30");
    }
    // Who waits for another stream has not waited for these.
    assert_eq!(
        actor.tell("rounds 7 --kernel-us 2000 --wait other"),
        "rounds 7"
    );
    let step = "launch --via graph --nodes 3 --rate 50/s --for 200ms";
    assert!(actor.tell(step).starts_with("launched"));
    wait_for("all launches", || {
        let report = report(&bed, &target);
        let counted = |name: &str| {
            let theirs = report
                .kernels
                .iter()
                .filter(|kernel| kernel.name.starts_with(name));
            theirs.fold((0, 0), |(launches, waits), kernel| {
                (launches + kernel.launches, waits + waits_of(kernel))
            })
        };
        // A graph is one launch, and the last one is waited for.
        let (graphs, waits) = counted("graph@0x");
        counted("") == (132 + graphs, 126) && graphs >= 5 && waits == 1
    });
    let found = stop(&bed, &target);
    assert_eq!(found.kernels.len(), 3, "{found:#?}");
    let named = kernel(&found, "spin_for");
    assert_eq!(named.symbol.as_deref(), Some("spin_for"));
    assert_eq!((named.launches, waits_of(named)), (127, 120));
    assert!(waited(named) > 60, "{named:?}");
    // One for each that has one before it.
    assert_eq!(named.gaps.iter().sum::<u64>(), 127);
    let usual = named.usual_usec.expect("enough of them");
    assert!((2000.0..200_000.0).contains(&usual), "{usual}");
    let bare = found
        .kernels
        .iter()
        .find(|kernel| kernel.name.starts_with("kernel@0x"))
        .expect("the one from before");
    assert_eq!((bare.launches, bare.symbol.as_deref()), (5, None));
    assert_eq!(bare.usual_usec, None, "too few");
    assert!(found.costs.entry_nsec > 0 && found.costs.return_nsec > 0);
    assert!(!found.running && found.gaps.lost == 0, "{found:#?}");

    // Nothing is left: no breakpoint, no map, no program.
    assert!(!has_breakpoint(pid));
    wait_for("end of maps", || loaded(&bed) == before);
    assert_eq!(actor.tell("rounds 3 --kernel-us 100"), "rounds 3");
    assert_eq!(kernel(&report(&bed, &target), "spin_for").launches, 127);
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn a_kernel_that_is_five_times_as_slow_is_one_event() {
    let mut bed = Bed::new(POLICY);
    let address = bed.offer_metrics();
    let mut slow = workload(&bed, "a");
    let mut steady = workload(&bed, "b");
    let monitor = Monitor::start(&bed);
    for tenant in ["a", "b"] {
        start(&bed, &Target::Tenant(tenant.into()));
    }
    for actor in [&slow, &steady] {
        wait_for("probes", || has_breakpoint(actor.workload_pid()));
    }
    assert_eq!(anomalies(&address, "a"), "0");
    let usual = "rounds 30 --kernel-us 50000 --library";
    slow.order(usual);
    steady.order(usual);
    assert_eq!(
        (slow.answer(), steady.answer()),
        ("rounds 30".into(), "rounds 30".into())
    );
    slow.order("rounds 6 --kernel-us 250000");
    steady.order("rounds 30 --kernel-us 50000");
    assert_eq!(
        (slow.answer(), steady.answer()),
        ("rounds 6".into(), "rounds 30".into())
    );
    // Back to the usual.
    assert_eq!(slow.tell("rounds 25 --kernel-us 50000"), "rounds 25");
    let events = monitor.of("anomaly");
    assert_eq!(events.len(), 1, "{events:#?}");
    let event = &events[0];
    assert_eq!(
        (event["tenant"].as_str(), event["kernel"].as_str()),
        (Some("a"), Some("spin_for"))
    );
    assert_eq!(event["pid"], slow.workload_pid());
    let duration = event["duration_usec"].as_u64().expect("a number");
    let usual = event["usual_usec"].as_u64().expect("a number");
    // The two share a GPU.
    assert!(usual >= 50_000 && duration > 3 * usual, "{event}");
    assert_eq!(
        (anomalies(&address, "a"), anomalies(&address, "b")),
        ("1".into(), "0".into())
    );
    let found = stop(&bed, &Target::Tenant("a".into()));
    let spin = kernel(&found, "spin_for");
    assert_eq!((spin.launches, spin.anomalies), (61, 1));
    let other = stop(&bed, &Target::Tenant("b".into()));
    assert_eq!(kernel(&other, "spin_for").anomalies, 0);
    assert!(bed.log().contains("a kernel took unusually long"));
}

#[test]
fn the_factor_is_the_policys_and_the_usual_is_the_tenants() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nanomaly.factor = 20\n");
    let target = Target::Tenant("a".into());
    start(&bed, &target);
    let mut first = workload(&bed, "a");
    wait_for("probes", || has_breakpoint(first.workload_pid()));
    assert_eq!(
        first.tell("rounds 25 --kernel-us 20000 --library"),
        "rounds 25"
    );
    assert_eq!(first.finish(), Some(0));
    // Five times as long, by a process that is new: not twenty times.
    let mut second = workload(&bed, "a");
    wait_for("probes", || has_breakpoint(second.workload_pid()));
    let spin = |found: &ProfileReport| {
        let kernel = kernel(found, "spin_for");
        (waits_of(kernel), kernel.anomalies)
    };
    assert_eq!(
        second.tell("rounds 2 --kernel-us 100000 --library"),
        "rounds 2"
    );
    wait_for("both", || spin(&report(&bed, &target)) == (27, 0));
    bed.write_policy("[tenant.a]\ncgroup = \"@/a.slice\"\nanomaly.factor = 2.5\n");
    assert!(bed.ctl(&["reload"]).status.success());
    wait_for("the new factor", || {
        assert_eq!(second.tell("rounds 1 --kernel-us 100000"), "rounds 1");
        spin(&report(&bed, &target)).1 == 1
    });
}

#[test]
fn probes_cost_no_more_than_they_may() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\ninsight.budget = \"5%\"\n");
    let target = Target::Tenant("a".into());
    let mut actor = workload(&bed, "a");
    let pid = actor.workload_pid();
    start(&bed, &target);
    wait_for("probes", || has_breakpoint(pid));
    // As fast as it goes, which probes at every launch would cost far more than that.
    actor.order("launch --rate max --for 6s --kernel-us 1");
    let mut out = false;
    let mut back = false;
    let end = Instant::now() + Duration::from_secs(6);
    while Instant::now() < end {
        let is_in = has_breakpoint(pid);
        back |= out && is_in;
        out |= !is_in;
        thread::sleep(Duration::from_millis(10));
    }
    assert!(actor.answer().starts_with("launched"), "it ends well");
    let found = stop(&bed, &target);
    let process = &found.processes[0];
    assert!(out, "they were taken out: {process:?}");
    assert!(back, "and put in again: {process:?}");
    assert!(process.covered < 0.9, "{process:?}");
    // A look may come late on a busy host, and so may the end of the breakpoints.
    assert!(process.cost < 0.05 + 0.01, "{process:?}");
    assert!(kernel(&found, "spin_1us").launches > 0);
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn launch_budgets_and_the_profile_share_a_process() {
    // Probes are in all the time, whatever they cost on this host.
    let bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nlaunch.max = \"500/s\"\ninsight.budget = \"100%\"\n",
    );
    let target = Target::Tenant("a".into());
    let mut actor = workload(&bed, "a");
    start(&bed, &target);
    wait_for("probes", || {
        report(&bed, &target)
            .processes
            .iter()
            .any(|process| !process.files.is_empty())
    });
    assert!(
        actor
            .tell("launch --rate max --for 2s --kernel-us 1")
            .starts_with("launched")
    );
    let found = stop(&bed, &target);
    let counted = bed.tenant("a").launch.expect("a budget").launches;
    assert_eq!(kernel(&found, "spin_1us").launches, counted);
    assert!((800..1700).contains(&counted), "{counted}");
    // Those of the budget stay.
    assert!(has_breakpoint(actor.workload_pid()));
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn a_policy_can_ask_for_it_at_all_times() {
    let mut bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\n");
    let target = Target::Tenant("a".into());
    let mut actor = workload(&bed, "a");
    let pid = actor.workload_pid();
    let before = loaded(&bed);
    // As above: all launches are to be counted.
    let says = |value: &str| {
        format!(
            "[tenant.a]\ncgroup = \"@/a.slice\"\ninsight.budget = \"100%\"\ninsight.profile = {value}\n"
        )
    };
    bed.write_policy(&says("true"));
    assert!(bed.ctl(&["reload"]).status.success());
    wait_for("probes", || has_breakpoint(pid));
    assert_eq!(
        actor.tell("rounds 4 --kernel-us 1000 --library"),
        "rounds 4"
    );
    wait_for("launches", || {
        let found = report(&bed, &target);
        found.always && found.kernels.iter().any(|kernel| kernel.launches == 4)
    });
    let refused = bed.ctl(&["profile", "a", "--for", "1s"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("insight.profile = true"), "{said}");
    let refused = bed.ctl(&["profile", "a", "--stop"]);
    assert!(!refused.status.success());
    // Under emulation its first answer comes too late.
    wait_for("doctor's word", || {
        let doctor = bed.ctl(&["doctor"]);
        String::from_utf8_lossy(&doctor.stdout).contains("0 by command, 1 by policy")
    });

    // It goes on after a restart, and ends with the policy.
    bed.signal_daemon(libc::SIGKILL);
    wait_for("the end", || !has_breakpoint(pid));
    bed.start();
    wait_for("probes", || has_breakpoint(pid));
    bed.write_policy(&says("false"));
    assert!(bed.ctl(&["reload"]).status.success());
    wait_for("the end", || !has_breakpoint(pid));
    wait_for("end of maps", || loaded(&bed).len() == before.len());
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn what_cannot_be_profiled_is_said() {
    let bed = Bed::new(POLICY);
    bed.refuses(&["profile", "nobody"], "no tenant named \"nobody\"");
    bed.refuses(&["profile", "4194303"], "no process 4194303");
    bed.refuses(
        &["profile", "a", "--so-far"],
        "not profiled and were not lately",
    );
    bed.refuses(
        &["profile", "a", "--for", "48h"],
        "may last from 1 s to 24 h",
    );
    bed.refuses(
        &["set-property", "a", "anomaly.factor=1"],
        "a factor is a number from 1.01 to 1000",
    );
    bed.refuses(
        &["set-property", "a", "insight.budget=2"],
        "the percent sign is missing",
    );
}
