//! Memory budgets on unmodified programs: act, enforce, act, release, act.

use std::time::Duration;

use gpuquota_native_tests::Bed;

const GIB: u64 = 1 << 30;

const ONE: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";

#[test]
fn an_allocation_over_the_budget_is_out_of_memory_and_the_program_goes_on() {
    let bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    assert!(
        actor
            .tell("alloc 2GiB")
            .contains("CUDA_ERROR_OUT_OF_MEMORY")
    );
    let usage = bed.usage("a", 0);
    // libcuda asks twice for one allocation; that is one refusal.
    assert_eq!((usage.denials, usage.breaches), (1, 0));
    assert_eq!(usage.processes.len(), 1);
    // Released, the same allocation fits.
    assert!(actor.tell("free").starts_with("freed"));
    assert_eq!(actor.tell("alloc 2GiB"), "allocated 2147483648");
    assert_eq!(actor.finish(), Some(2));
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(2)), []);
}

#[test]
fn a_raised_budget_holds_at_once_and_is_kept() {
    let mut bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 4GiB").starts_with("out of memory"));
    let raised = bed.ctl(&["set-property", "a", "memory.max=6GiB"]);
    assert!(raised.status.success(), "{raised:?}");
    assert_eq!(actor.tell("alloc 4GiB"), "allocated 4294967296");
    bed.signal_daemon(libc::SIGTERM);
    bed.start();
    assert_eq!(bed.usage("a", 0).memory_max, Some(6 * GIB));
    // Lowered under what is used: nothing is taken away, nothing more is given.
    let lowered = bed.ctl(&["set-property", "a", "memory.max=1GiB"]);
    assert!(lowered.status.success(), "{lowered:?}");
    assert!(actor.tell("alloc 64MiB").starts_with("out of memory"));
    assert!(bed.usage("a", 0).memory_used > 4 * GIB);
}

#[test]
fn a_change_that_is_not_acceptable_changes_nothing() {
    let bed = Bed::new(ONE);
    for bad in [
        "memory.max=lots",
        "memory.max=1.5",
        "memory.high=9GiB",
        "no.such=1",
    ] {
        let refused = bed.ctl(&["set-property", "a", bad]);
        assert!(!refused.status.success(), "{bad}");
    }
    assert!(
        !bed.ctl(&["set-property", "nobody", "memory.max=1GiB"])
            .status
            .success()
    );
    let usage = bed.usage("a", 0);
    assert_eq!((usage.memory_max, usage.memory_high), (Some(3 * GIB), None));
    // One GPU's own value counts more than the tenant's: a change that it hides is refused, with the place.
    bed.write_policy(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n[tenant.a.gpu.\"*\"]\nmemory.max = \"3GiB\"\n",
    );
    assert!(bed.ctl(&["reload"]).status.success());
    let hidden = bed.ctl(&["set-property", "a", "memory.max=2GiB"]);
    assert!(
        String::from_utf8_lossy(&hidden.stderr).contains("50-test.toml:5"),
        "{hidden:?}"
    );
    bed.write_policy("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.maxx = \"1GiB\"\n");
    assert!(!bed.ctl(&["reload"]).status.success());
    assert_eq!(bed.usage("a", 0).memory_max, Some(3 * GIB));
}

#[test]
fn four_processes_get_one_budget_together() {
    let bed = Bed::new(ONE);
    let mut actors: Vec<_> = (0..4).map(|_| bed.actor("a")).collect();
    // Before the others take what a context needs: one that fails has had memory that is not seen afterwards.
    for actor in &mut actors {
        assert_eq!(actor.tell("context"), "context");
    }
    for actor in &mut actors {
        actor.order("fill --chunk 64MiB");
    }
    for actor in &mut actors {
        assert!(!actor.answer().is_empty());
    }
    let usage = bed.usage("a", 0);
    assert!(usage.memory_used <= 3 * GIB, "{}", usage.memory_used);
    assert!(usage.memory_peak <= 3 * GIB, "{}", usage.memory_peak);
    assert_eq!(usage.breaches, 0);
    // What the ledger says is what the driver gave, and no more than the budget was ever out.
    let truth = bed.sim.truth().expect("the truth");
    let held: u64 = truth.gpus[0]
        .processes
        .values()
        .map(|process| process.rm_bytes)
        .sum();
    assert_eq!(held, usage.memory_used);
    assert!(
        truth.gpus[0].peak
            <= 3 * GIB
                + truth.gpus[0]
                    .processes
                    .values()
                    .map(|p| p.hidden_bytes)
                    .sum::<u64>()
    );
}

#[test]
fn every_way_to_allocate_is_counted_and_refused() {
    for via in ["malloc", "async", "pool", "create", "pitch"] {
        let bed = Bed::new(ONE);
        let mut actor = bed.actor("a");
        let filled = actor.tell(&format!("fill --chunk 64MiB --via {via}"));
        let bytes: u64 = filled
            .trim_start_matches("filled ")
            .parse()
            .unwrap_or_else(|_| panic!("{via}: {filled}"));
        let usage = bed.usage("a", 0);
        assert!(usage.memory_used <= 3 * GIB, "{via}: {}", usage.memory_used);
        assert!(bytes > 2 * GIB, "{via}: only {bytes}");
        assert!(
            usage.denials >= 1 && usage.breaches == 0,
            "{via}: {usage:?}"
        );
    }
}

#[test]
fn calls_in_disguise_are_counted_and_refused() {
    for via in [
        "nvos64",
        "nvos21",
        "xfer",
        "odd-bits",
        "heap",
        "heap-range",
        "heap-tiled",
        "subdevice",
    ] {
        let bed = Bed::new(ONE);
        let fits = bed.run("a", &["--raw", "alloc", "2GiB", "--via", via]);
        assert!(fits.status.success(), "{via}: {fits:?}");
        let refused = bed.run("a", &["--raw", "alloc", "4GiB", "--via", via]);
        assert_eq!(refused.status.code(), Some(2), "{via}: {refused:?}");
        let usage = bed.usage("a", 0);
        assert!(
            usage.denials >= 1 && usage.breaches == 0,
            "{via}: {usage:?}"
        );
        assert!(usage.memory_peak >= 2 * GIB, "{via}: {usage:?}");
        assert_eq!(bed.wait_for_nothing(Duration::from_secs(2)), [], "{via}");
    }
}

#[test]
fn shared_memory_is_paid_once_and_by_whoever_is_left() {
    let bed = Bed::new(ONE);
    let mut command = bed.run_command("a");
    command
        .arg(gpuquota_native_tests::binary("simtenant"))
        .args(["--raw", "script", "alloc 1GiB --via dup; hold 1500ms"]);
    let mut child = command.spawn().expect("a workload");
    let used = bed.wait_usage("a", 0, |used| used == GIB);
    assert_eq!(used, GIB);
    assert!(child.wait().expect("waited for").success());
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(2)), []);
}

#[test]
fn a_nested_tenant_is_charged_to_every_tenant_around_it() {
    let bed = Bed::new(
        "[tenant.outer]\ncgroup = \"@/o.slice\"\nmemory.max = \"3GiB\"\n\
         [tenant.inner]\ncgroup = \"@/o.slice/i.slice\"\nmemory.max = \"2GiB\"\n",
    );
    let mut inner = bed.actor("inner");
    assert!(inner.tell("alloc 1GiB").starts_with("allocated"));
    assert_eq!(
        bed.usage("inner", 0).memory_used,
        bed.usage("outer", 0).memory_used
    );
    // Its own limit.
    assert!(inner.tell("alloc 1GiB").starts_with("out of memory"));
    // The outer one's: what the outer tenant uses itself counts too.
    let mut outer = bed.actor("outer");
    assert!(outer.tell("alloc 768MiB").starts_with("allocated"));
    assert!(inner.tell("alloc 400MiB").starts_with("out of memory"));
    assert!(outer.tell("free").starts_with("freed"));
    assert!(inner.tell("alloc 400MiB").starts_with("allocated"));
}

#[test]
fn a_charge_lands_on_its_gpu() {
    let bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n[tenant.a.gpu.\"1\"]\nmemory.max = \"6GiB\"\n",
    );
    let refused = bed.run("a", &["--device", "0", "alloc", "4GiB"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let fits = bed.run("a", &["--device", "1", "alloc", "4GiB"]);
    assert!(fits.status.success(), "{fits:?}");
    let (zero, one) = (bed.usage("a", 0), bed.usage("a", 1));
    assert!(zero.memory_peak < GIB && one.memory_peak > 4 * GIB);
    assert_eq!((zero.denials, one.denials), (1, 0));
}

#[test]
fn threads_children_and_new_programs_are_governed_alike() {
    let bed = Bed::new(ONE);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    // A new program, started by the workload.
    let answer = actor.tell("spawn 'alloc 1GiB; alloc 1GiB'");
    assert!(answer.contains("out of memory"), "{answer}");
    assert!(bed.usage("a", 0).memory_used <= 3 * GIB);
}
