//! Managed memory: charged by its ranges, denied, moved to the host.

use std::{
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::{Bed, PATIENCE};

const GIB: u64 = 1 << 30;

fn policy(more: &str) -> String {
    format!("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"8GiB\"\n{more}")
}

#[test]
fn ranges_are_charged_while_they_are_mapped() {
    let bed = Bed::new(&policy("memory.on-breach = \"notify\"\n"));
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let before = bed.usage("a", 0).memory_used;
    assert!(
        actor
            .tell("alloc 3GiB --via managed")
            .starts_with("allocated")
    );
    let usage = bed.wait_tenant("a", 0, |usage| usage.memory.managed == 3 * GIB);
    assert_eq!(usage.memory.managed, 3 * GIB, "{}", bed.log());
    assert_eq!(usage.memory_used, before + 3 * GIB);
    assert_eq!(usage.breaches, 0);
    // It counts against the limit for what can be refused, and above it is a breach.
    assert!(actor.tell("alloc 5GiB").starts_with("out of memory"));
    assert!(
        actor
            .tell("alloc 6GiB --via managed")
            .starts_with("allocated")
    );
    let usage = bed.wait_tenant("a", 0, |usage| usage.breaches > 0);
    assert_eq!((usage.breaches, usage.memory.managed), (1, 9 * GIB));
    assert!(actor.tell("free").starts_with("freed"));
    let usage = bed.wait_tenant("a", 0, |usage| usage.memory.managed == 0);
    assert_eq!(usage.memory.managed, 0);
    assert!(actor.tell("alloc 5GiB").starts_with("allocated"));
    assert!(
        actor
            .tell("alloc 1GiB --via managed")
            .starts_with("allocated")
    );
    bed.wait_tenant("a", 0, |usage| usage.memory.managed == GIB);
    drop(actor);
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), []);
}

#[test]
fn who_may_have_none_is_ended_for_it_and_who_need_not_pay_does_not() {
    let bed = Bed::new(
        "[tenant.none]\ncgroup = \"@/n.slice\"\nmemory.managed = \"deny\"\n\
         [tenant.free]\ncgroup = \"@/f.slice\"\nmemory.managed = \"ignore\"\n",
    );
    let mut free = bed.actor("free");
    assert!(
        free.tell("alloc 1GiB --via managed")
            .starts_with("allocated")
    );
    let mut none = bed.actor("none");
    assert!(none.tell("alloc 1GiB").starts_with("allocated"));
    none.order("alloc 64MiB --via managed");
    assert_eq!(none.wait(), Some(128 + libc::SIGTERM), "{}", bed.log());
    // The other one was looked at just as often.
    assert_eq!(bed.usage("free", 0).memory.managed, 0);
    assert!(free.tell("free").starts_with("freed"));
}

#[test]
fn managed_memory_goes_to_the_host_above_memory_high() {
    let bed = Bed::new(&policy(
        "memory.high = \"4GiB\"\nmemory.on-high = \"reclaim\"\n",
    ));
    let mut actor = bed.actor("a");
    assert!(
        actor
            .tell("alloc 3GiB --via managed")
            .starts_with("allocated")
    );
    let resident = || {
        let truth = bed.sim.truth().expect("the truth");
        let processes = truth.gpus[0].processes.values();
        processes.map(|process| process.managed_bytes).sum::<u64>()
    };
    assert_eq!(resident(), 3 * GIB);
    bed.wait_tenant("a", 0, |usage| usage.memory.managed == 3 * GIB);
    assert!(actor.tell("alloc 2GiB").starts_with("allocated"));
    let used = bed.usage("a", 0).memory_used;
    // As much as brings the tenant 5 % below.
    let above = used - (4 * GIB - 4 * GIB / 20);
    let end = Instant::now() + PATIENCE;
    while resident() > 3 * GIB - above && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    assert!(
        resident() <= 3 * GIB - above,
        "{} {}",
        resident(),
        bed.log()
    );
    assert!(resident() > GIB, "not more than has to go: {}", resident());
    // The range is still there, and charged.
    assert_eq!(bed.usage("a", 0).memory.managed, 3 * GIB);
    assert!(actor.tell("free").starts_with("freed"));
}
