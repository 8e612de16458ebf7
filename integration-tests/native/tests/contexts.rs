//! What the driver takes by itself, and what got past the ledger: the comparison with NVML.

use std::time::Duration;

use gpuquota_native_tests::Bed;
use gpuquota_simgpu::fixture::Options;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const HIDDEN: u64 = 64 * MIB;

fn bed(policy: &str) -> Bed {
    let options = Options {
        context_hidden: HIDDEN,
        ..Options::default()
    };
    Bed::with(&options, policy)
}

#[test]
fn contexts_are_charged_until_they_end() {
    let bed = bed("[tenant.outer]\ncgroup = \"@/o.slice\"\n\
         [tenant.a]\ncgroup = \"@/o.slice/a.slice\"\nmemory.max = \"4GiB\"\n");
    let mut first = bed.actor("a");
    assert!(first.tell("alloc 1GiB").starts_with("allocated"));
    let truth = bed.sim.truth().expect("the truth");
    let shown: u64 = truth.gpus[0]
        .processes
        .values()
        .map(gpuquota_simgpu::state::ProcessState::bytes)
        .sum();
    let usage = bed.wait_tenant("a", 0, |usage| {
        usage.memory_used == shown && usage.memory.context == HIDDEN && usage.memory.drift == 0
    });
    assert_eq!(usage.memory_used, shown);
    assert_eq!((usage.memory.context, usage.memory.drift), (HIDDEN, 0));
    assert_eq!(bed.usage("outer", 0).memory.context, HIDDEN);

    // It is known by now what a context takes: the next one is charged when it is made.
    let mut second = bed.actor("a");
    assert!(second.tell("context").starts_with("context"));
    let both = bed.wait_tenant("a", 0, |usage| usage.memory.context == 2 * HIDDEN);
    assert_eq!(both.memory.context, 2 * HIDDEN);
    // Nothing of it is a refusal or a breach, and it stays as it is while the process goes on.
    assert!(second.tell("alloc 512MiB").starts_with("allocated"));
    assert!(second.tell("free").starts_with("freed"));
    let after = bed.wait_tenant("a", 0, |usage| usage.memory.drift == 0);
    assert_eq!(after.memory.context, 2 * HIDDEN);
    assert_eq!((after.denials, after.breaches), (0, 0));

    assert_eq!(second.finish(), Some(0));
    let one = bed.wait_tenant("a", 0, |usage| {
        usage.memory_used == shown && usage.memory.context == HIDDEN
    });
    assert_eq!((one.memory_used, one.memory.context), (shown, HIDDEN));
    assert_eq!(first.finish(), Some(0));
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), []);
}

#[test]
fn a_tenant_may_have_its_contexts_for_nothing() {
    let bed =
        bed("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"4GiB\"\nmemory.context = false\n");
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let before = bed.usage("a", 0).memory_used;
    let compared = bed.wait_tenant("a", 0, |usage| usage.memory.drift != 0);
    assert_eq!(compared.memory.drift, i64::try_from(HIDDEN).expect("small"));
    assert_eq!((compared.memory_used, compared.memory.context), (before, 0));
}

#[test]
fn what_got_past_the_ledger_is_charged_and_answered() {
    let policy = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"4GiB\"\nmemory.on-breach = \"notify\"\n";
    let bed = bed(policy);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let pid = actor.workload_pid();
    bed.sim
        .control(&format!("hide 0 {pid} 1GiB"))
        .expect("the simulation obeys");
    // Within the budget it is charged and no more.
    let usage = bed.wait_tenant("a", 0, |usage| usage.memory.context > GIB);
    assert_eq!(usage.memory.context, GIB + HIDDEN, "{}", bed.log());
    assert_eq!(usage.breaches, 0);

    bed.sim
        .control(&format!("hide 0 {pid} 5GiB"))
        .expect("the simulation obeys");
    let usage = bed.wait_tenant("a", 0, |usage| usage.breaches > 0);
    assert_eq!(usage.breaches, 1, "{}", bed.log());
    assert!(usage.memory_used > 6 * GIB, "{usage:?}");
    assert!(actor.tell("alloc 64MiB").starts_with("out of memory"));

    // What it gives back is given back.
    bed.sim
        .control(&format!("hide 0 {pid} 0B"))
        .expect("the simulation obeys");
    let usage = bed.wait_tenant("a", 0, |usage| usage.memory.context == HIDDEN);
    assert_eq!(usage.memory.context, HIDDEN);
    assert!(actor.tell("alloc 64MiB").starts_with("allocated"));

    bed.write_policy(&policy.replace("notify", "kill"));
    assert!(bed.ctl(&["reload"]).status.success());
    bed.sim
        .control(&format!("hide 0 {pid} 5GiB"))
        .expect("the simulation obeys");
    assert_eq!(actor.wait(), Some(128 + libc::SIGTERM), "{}", bed.log());
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), []);
}
