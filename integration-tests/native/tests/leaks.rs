//! The leak finder on an unmodified program: a planted leak is named by its stack, what is freed is not, and nothing is
//! left in the process when nobody looks.

use std::{fs, path::PathBuf, sync::OnceLock, time::Duration};

use gpuquota_enforcer::{
    client::looks::Leaks,
    control::leaks::{LeakReport, LeakSite, Target},
    insight::calls::ALLOCATIONS,
};
use gpuquota_native_tests::{
    Actor, Bed,
    look::{self, LONG, loaded, wait_for},
};

const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\n[tenant.b]\ncgroup = \"@/b.slice\"\n";

/// The client with the leak: optimized, and without frame pointers, as programs are shipped.
fn leaky() -> PathBuf {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    let path = COMPILED.get_or_init(|| look::compiled("leaky"));
    path.clone()
}

/// The client in a tenant, with a context.
fn client(bed: &Bed, tenant: &str) -> Actor {
    let mut command = bed.run_command(tenant);
    command.arg(leaky());
    let mut actor = Actor::start(command);
    assert_eq!(actor.tell("context"), "did context");
    actor
}

fn has_breakpoint(pid: u32) -> bool {
    look::has_breakpoint(pid, "cuMemAlloc_v2", ALLOCATIONS)
}

fn start(bed: &Bed, target: &Target) {
    bed.call(async |client| client.start_look::<Leaks>(target, LONG).await)
        .expect("a look");
}

fn report(bed: &Bed, target: &Target) -> LeakReport {
    bed.call(async |client| client.look::<Leaks>(target).await)
        .expect("a look")
}

fn stop(bed: &Bed, target: &Target) -> LeakReport {
    bed.call(async |client| client.stop_look::<Leaks>(target).await)
        .expect("a look")
}

/// Names of the functions on a stack, the innermost first.
fn names(site: &LeakSite) -> Vec<String> {
    site.frames.iter().map(ToString::to_string).collect()
}

/// The call site whose stack has a function.
fn site<'a>(report: &'a LeakReport, function: &str) -> &'a LeakSite {
    report
        .sites
        .iter()
        .find(|site| names(site).iter().any(|name| name == function))
        .unwrap_or_else(|| panic!("no {function} in {report:#?}"))
}

#[test]
fn a_planted_leak_is_named_by_its_stack() {
    let bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    let pid = actor.workload_pid();
    let target = Target::Tenant("a".into());
    let before = loaded(&bed);
    assert!(!has_breakpoint(pid), "nobody looks");
    // Before the look: not seen, and no harm when it is freed.
    assert_eq!(actor.tell("keep 2"), "did keep 2");

    start(&bed, &target);
    wait_for("probes", || has_breakpoint(pid));
    assert!(loaded(&bed).len() > before.len());
    let twice = bed.call(async |client| client.start_look::<Leaks>(&target, LONG).await);
    assert!(twice.is_err(), "one look at a time");
    assert_eq!(actor.tell("keep 5"), "did keep 5");
    assert_eq!(actor.tell("scratch 20"), "did scratch 20");
    wait_for("all calls", || {
        let report = report(&bed, &target);
        let allocations: u64 = report.sites.iter().map(|site| site.allocations).sum();
        allocations == 25
    });
    let found = stop(&bed, &target);
    let leak = &found.sites[0];
    assert_eq!(
        (
            leak.call.as_str(),
            leak.live,
            leak.live_bytes,
            leak.allocations
        ),
        ("cuMemAlloc_v2", 5, 20 << 20, 5)
    );
    // The whole way down to where the program begins.
    let stack = names(leak);
    assert_eq!(
        stack[..2],
        ["keep_activations", "training_step"],
        "{stack:?}"
    );
    assert!(stack.iter().any(|name| name == "main"), "{stack:?}");
    assert!(!leak.cut, "{stack:?}");
    assert!(leak.oldest_usec >= leak.median_usec && leak.median_usec.is_some());
    let scratch = site(&found, "scratch_buffer");
    assert_eq!((scratch.live, scratch.allocations), (0, 20), "{scratch:?}");
    assert_eq!(scratch.peak_bytes, 1 << 20);
    assert_eq!(found.gaps.lost, 0, "{found:?}");
    assert!(!found.running);

    // Nothing is left: no breakpoint, no map, no program.
    assert!(!has_breakpoint(pid));
    wait_for("end of maps", || loaded(&bed) == before);
    assert_eq!(actor.tell("keep 3"), "did keep 3");
    assert_eq!(site(&report(&bed, &target), "keep_activations").live, 5);
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn whatever_is_given_back_is_no_leak() {
    let bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    let target = Target::Process(actor.workload_pid());
    start(&bed, &target);
    wait_for("probes", || has_breakpoint(actor.workload_pid()));
    assert_eq!(actor.tell("all"), "did all");
    wait_for("all calls", || report(&bed, &target).sites.len() >= 9);
    let found = stop(&bed, &target);
    for site in &found.sites {
        assert_eq!((site.live, site.live_bytes), (0, 0), "{site:#?}");
        assert_eq!(site.allocations, 1, "{site:#?}");
        assert!(
            names(site).iter().any(|name| name == "every_way"),
            "{site:#?}"
        );
    }
    let pitch = found
        .sites
        .iter()
        .find(|site| site.call == "cuMemAllocPitch_v2")
        .expect("rows");
    assert_eq!(
        pitch.allocated_bytes,
        64 * 1024,
        "rows of 1000 bytes, aligned"
    );
    assert_eq!(found.gaps.older_frees, 0, "{:?}", found.gaps);
}

#[test]
fn who_comes_later_is_followed_and_others_are_not() {
    let bed = Bed::new(POLICY);
    let target = Target::Tenant("a".into());
    let mut other = client(&bed, "b");
    start(&bed, &target);
    let mut actor = client(&bed, "a");
    let pid = actor.workload_pid();
    wait_for("probes", || has_breakpoint(pid));
    assert!(!has_breakpoint(other.workload_pid()), "of another tenant");
    assert_eq!(other.tell("keep 9"), "did keep 9");
    assert_eq!(actor.tell("keep 3"), "did keep 3");
    wait_for("the leak", || {
        report(&bed, &target)
            .sites
            .iter()
            .any(|site| site.live == 3)
    });
    // What it held when it ended is still told.
    assert_eq!(actor.finish(), Some(0));
    wait_for("the end", || report(&bed, &target).processes[0].ended);
    let found = stop(&bed, &target);
    assert_eq!(found.processes.len(), 1);
    assert_eq!(site(&found, "keep_activations").live, 3);
}

#[test]
fn probes_go_with_their_time_and_with_the_daemon() {
    let mut bed = Bed::new(POLICY);
    let mut actor = client(&bed, "a");
    let pid = actor.workload_pid();
    let folder = bed.sim.scratch().to_owned();
    let (flames, profile) = (folder.join("folded"), folder.join("pprof"));
    let before = loaded(&bed);
    // The command, to its end.
    let mut command = bed.command("gpuquotactl");
    let looking = command
        .args(["--bus", &bed.bus(), "leaks", "a", "--for", "2s", "--json"])
        .arg("--folded")
        .arg(&flames)
        .arg("--pprof")
        .arg(&profile)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("gpuquotactl");
    wait_for("probes", || has_breakpoint(pid));
    assert_eq!(actor.tell("keep 4"), "did keep 4");
    let output = looking.wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?}");
    assert!(!has_breakpoint(pid));
    let told: LeakReport = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(site(&told, "keep_activations").live, 4);
    let text = fs::read_to_string(&flames).expect("written");
    assert!(
        text.contains("training_step;keep_activations;cuMemAlloc_v2 16777216\n"),
        "{text}"
    );
    assert!(fs::metadata(&profile).expect("written").len() > 100);

    // Nobody waits for the end: it comes by itself.
    let target = Target::Process(pid);
    bed.call(async |client| {
        client
            .start_look::<Leaks>(&target, Duration::from_secs(1))
            .await
    })
    .expect("a look");
    wait_for("probes", || has_breakpoint(pid));
    wait_for("the end", || !has_breakpoint(pid));
    wait_for("end of maps", || loaded(&bed) == before);

    // A daemon that is killed takes its probes along, and the program goes on.
    start(&bed, &target);
    wait_for("probes", || has_breakpoint(pid));
    bed.signal_daemon(libc::SIGKILL);
    wait_for("the end", || !has_breakpoint(pid));
    bed.start();
    assert_eq!(actor.tell("scratch 3"), "did scratch 3");
    assert_eq!(actor.finish(), Some(0));
}

#[test]
fn what_cannot_be_looked_at_is_said() {
    let bed = Bed::new(POLICY);
    bed.refuses(&["leaks", "nobody"], "no tenant named \"nobody\"");
    bed.refuses(&["leaks", "4194303"], "no process 4194303");
    bed.refuses(
        &["leaks", "a", "--so-far"],
        "not followed and were not lately",
    );
    bed.refuses(&["leaks", "a", "--for", "48h"], "may last from 1 s to 24 h");
    bed.refuses(&["leaks", "a", "--for", "soon"], "a number and a unit");
}
