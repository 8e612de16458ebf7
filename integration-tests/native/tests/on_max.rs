//! What happens to an allocation above the budget besides being refused: it waits, or its process ends.

use std::{
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::Bed;

const GIB: u64 = 1 << 30;

fn waiting(timeout: &str) -> String {
    format!(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"6GiB\"\nmemory.on-max = \"wait\"\n\
         memory.wait-timeout = \"{timeout}\"\n[tenant.b]\ncgroup = \"@/b.slice\"\nmemory.max = \"3GiB\"\n"
    )
}

#[test]
fn an_allocation_waits_until_there_is_room_and_later_ones_wait_behind_it() {
    let bed = Bed::new(&waiting("30s"));
    let (mut holder, mut first, mut second) = (bed.actor("a"), bed.actor("a"), bed.actor("a"));
    assert!(holder.tell("alloc 3GiB").starts_with("allocated"));
    for actor in [&mut first, &mut second] {
        assert!(actor.tell("context").starts_with("context"));
    }
    let before = bed.usage("a", 0).memory_used;
    first.order("alloc 3GiB");
    thread::sleep(Duration::from_millis(500));
    // This would fit, but it came later.
    second.order("alloc 256MiB");
    thread::sleep(Duration::from_millis(1500));
    let usage = bed.usage("a", 0);
    assert_eq!((usage.memory_used, usage.denials), (before, 0));
    let pressure = usage.memory.pressure;
    assert!(
        pressure.some.total > Duration::from_millis(500)
            && pressure.full.total < pressure.some.total,
        "two of three wait: {pressure:?}"
    );
    // Who waits keeps no other tenant out.
    let mut other = bed.actor("b");
    assert!(other.tell("alloc 2GiB").starts_with("allocated"));
    assert!(holder.tell("free").starts_with("freed"));
    assert_eq!(first.answer(), "allocated 3221225472");
    assert_eq!(second.answer(), "allocated 268435456");
    let usage = bed.usage("a", 0);
    assert!(
        usage.memory_used <= 6 * GIB && usage.denials == 0,
        "{usage:?}"
    );
}

#[test]
fn an_allocation_that_has_waited_long_enough_is_out_of_memory() {
    let bed = Bed::new(&waiting("1s"));
    let mut actor = bed.actor("a");
    let start = Instant::now();
    assert!(actor.tell("alloc 8GiB").starts_with("out of memory"));
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_secs(1) && waited < Duration::from_secs(10),
        "{waited:?}"
    );
    assert_eq!(bed.usage("a", 0).denials, 1);
    // The next one waits anew, and its process can be killed while it does.
    actor.order("alloc 9GiB");
    thread::sleep(Duration::from_millis(400));
    assert_eq!(bed.usage("a", 0).denials, 1);
    actor.kill_workload();
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(5)), []);
}

#[test]
fn a_process_over_its_budget_is_ended_where_the_policy_says_so() {
    let bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\nmemory.on-max = \"kill\"\n",
    );
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    actor.order("alloc 4GiB");
    // It is refused in any case, and is asked to end.
    assert_eq!(actor.wait(), Some(128 + libc::SIGTERM));
    let mut next = bed.actor("a");
    assert!(next.tell("alloc 2GiB").starts_with("allocated"));
    let usage = bed.usage("a", 0);
    assert_eq!((usage.denials, usage.breaches), (1, 0));
}
