//! What happens when a tenant's usage rises above `memory.high`.

use std::{
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::{Bed, PATIENCE};

fn policy(on_high: &str) -> String {
    format!(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"8GiB\"\nmemory.high = \"4GiB\"\n\
         memory.on-high = \"{on_high}\"\n"
    )
}

#[test]
fn users_of_the_memory_get_the_signal() {
    let bed = Bed::new(&policy("signal:USR1"));
    let mut small = bed.actor("a");
    assert!(small.tell("alloc 1GiB").starts_with("allocated"));
    thread::sleep(Duration::from_millis(300));
    let mut large = bed.actor("a");
    large.order("alloc 4GiB");
    // It ends both, since neither expects it.
    assert_eq!(large.wait(), Some(128 + libc::SIGUSR1));
    assert_eq!(small.wait(), Some(128 + libc::SIGUSR1));
    // Below the limit again, the next crossing counts again.
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(5)), []);
    thread::sleep(Duration::from_secs(1));
    let mut next = bed.actor("a");
    next.order("alloc 6GiB");
    assert_eq!(next.wait(), Some(128 + libc::SIGUSR1));
}

#[test]
fn the_tenant_is_frozen_until_it_is_thawed() {
    let bed = Bed::new(&policy("freeze"));
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 5GiB").starts_with("allocated"));
    let is_frozen = || {
        let time = bed.usage("a", 0).time;
        time.is_some_and(|time| !time.frozen.is_empty())
    };
    let becomes = |wanted: bool| {
        let end = Instant::now() + PATIENCE;
        while is_frozen() != wanted && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
        }
        is_frozen() == wanted
    };
    assert!(becomes(true), "{}", bed.log());
    let thawed = bed.ctl(&["thaw", "a"]);
    assert!(thawed.status.success(), "{thawed:?}");
    assert!(becomes(false), "{}", bed.log());
}

/// A card of 16 GiB. `low` is above its `memory.high` with 7 GiB that only its program can free, `peer` and `within` hold
/// some as well; the signal is one that ends nobody.
fn crowded() -> Bed {
    Bed::new(
        "[class.high]\npriority = 200\n[class.low]\npriority = 0\n\
         [tenant.urgent]\ncgroup = \"@/u.slice\"\nclass = \"high\"\nmemory.max = \"16GiB\"\n\
         [tenant.low]\ncgroup = \"@/l.slice\"\nclass = \"low\"\nmemory.high = \"2GiB\"\nmemory.on-high = \"signal:URG\"\n\
         [tenant.within]\ncgroup = \"@/w.slice\"\nclass = \"low\"\nmemory.high = \"4GiB\"\nmemory.on-high = \"signal:URG\"\n\
         [tenant.peer]\ncgroup = \"@/p.slice\"\nclass = \"high\"\nmemory.high = \"1GiB\"\nmemory.on-high = \"signal:URG\"\n",
    )
}

fn told(bed: &Bed, tenant: &str, times: usize) -> usize {
    let count = || {
        let log = bed.log();
        log.lines()
            .filter(|line| {
                line.contains("signalled") && line.contains(&format!("tenant=\"{tenant}\""))
            })
            .count()
    };
    let end = Instant::now() + PATIENCE;
    while count() < times && Instant::now() < end {
        thread::sleep(Duration::from_millis(50));
    }
    count()
}

#[test]
fn who_is_above_gives_back_when_the_card_is_full_for_a_higher_class() {
    let bed = crowded();
    let hold = |tenant: &str, size: &str| {
        let mut actor = bed.actor(tenant);
        let answer = actor.tell(&format!("alloc {size}"));
        assert!(answer.starts_with("allocated"), "{tenant}: {answer}");
        actor
    };
    let _low = hold("low", "7GiB");
    let _within = hold("within", "1GiB");
    let _peer = hold("peer", "2GiB");
    assert_eq!(
        told(&bed, "low", 1),
        1,
        "by its own crossing: {}",
        bed.log()
    );
    assert_eq!(told(&bed, "peer", 1), 1, "{}", bed.log());
    let mut urgent = hold("urgent", "1GiB");
    assert!(urgent.tell("alloc 6GiB").starts_with("out of memory"));
    assert_eq!(told(&bed, "low", 2), 2, "{}", bed.log());
    // Who asks in vain for more than a second has waited for the round to end.
    thread::sleep(Duration::from_millis(1500));
    // A lower class gets nobody to give back, and neither does one that is refused by its own budget.
    let mut within = bed.actor("within");
    assert!(within.tell("alloc 6GiB").starts_with("out of memory"));
    assert!(urgent.tell("alloc 30GiB").starts_with("out of memory"));
    thread::sleep(Duration::from_millis(1500));
    for (tenant, times) in [("low", 2), ("peer", 1), ("within", 0)] {
        assert_eq!(told(&bed, tenant, times), times, "{tenant}: {}", bed.log());
    }
}

#[test]
fn managed_memory_goes_before_anybody_is_told() {
    // The reservation of `urgent` keeps others out of what is left: the daemon refuses, not the driver.
    let bed = Bed::new(
        "[class.high]\npriority = 200\n[class.low]\npriority = 0\n\
         [tenant.urgent]\ncgroup = \"@/u.slice\"\nclass = \"high\"\n\
         [tenant.kept]\ncgroup = \"@/k.slice\"\nmemory.min = \"8GiB\"\nmemory.max = \"8GiB\"\n\
         [tenant.low]\ncgroup = \"@/l.slice\"\nclass = \"low\"\nmemory.high = \"1GiB\"\nmemory.on-high = \"signal:URG\"\n",
    );
    let mut low = bed.actor("low");
    assert!(
        low.tell("alloc 3GiB --via managed")
            .starts_with("allocated")
    );
    bed.wait_tenant("low", 0, |usage| usage.memory.managed == 3 << 30);
    assert_eq!(told(&bed, "low", 1), 1, "{}", bed.log());
    let resident = || bed.managed_on_gpu();
    let before = resident();
    let mut urgent = bed.actor("urgent");
    assert!(urgent.tell("alloc 2MiB").starts_with("allocated"));
    assert!(urgent.tell("alloc 7GiB").starts_with("out of memory"));
    let end = Instant::now() + PATIENCE;
    while resident() == before && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    assert!(resident() < before, "{}", bed.log());
    drop(urgent);
}
