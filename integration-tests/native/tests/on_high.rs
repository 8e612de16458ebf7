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
