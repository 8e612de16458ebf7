//! Budgets beside `memory.max`: pinned host memory, reservations.

use std::time::Duration;

use gpuquota_native_tests::Bed;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn pinned_memory_is_a_budget_of_its_own() {
    let bed = Bed::new(
        "[tenant.outer]\ncgroup = \"@/o.slice\"\nmemory.host = \"512MiB\"\n\
         [tenant.inner]\ncgroup = \"@/o.slice/i.slice\"\nmemory.max = \"3GiB\"\nmemory.host = \"300MiB\"\n",
    );
    let mut inner = bed.actor("inner");
    assert!(
        inner
            .tell("alloc 64MiB --via host")
            .starts_with("allocated")
    );
    let before = bed.usage("inner", 0);
    // A context pins some itself.
    assert!(before.memory.host_used >= 64 * MIB, "{before:?}");
    assert_eq!(before.memory.host_max, Some(300 * MIB));
    let by_processes: u64 = before
        .memory
        .host_processes
        .iter()
        .map(|(_, bytes)| bytes)
        .sum();
    assert_eq!(by_processes, before.memory.host_used);

    assert!(
        inner
            .tell("alloc 256MiB --via host")
            .starts_with("out of memory")
    );
    let refused = bed.usage("inner", 0);
    assert_eq!(refused.memory.host_denials, 1);
    assert_eq!((refused.denials, refused.breaches), (0, 0));
    assert_eq!(refused.memory_used, before.memory_used);
    // Its memory on the card is another matter.
    assert!(inner.tell("alloc 1GiB").starts_with("allocated"));

    // The tenant around it pays too.
    let mut outer = bed.actor("outer");
    assert!(
        outer
            .tell("alloc 200MiB --via host")
            .starts_with("allocated")
    );
    assert!(
        inner
            .tell("alloc 100MiB --via host")
            .starts_with("out of memory")
    );
    assert!(outer.tell("free").starts_with("freed"));
    assert!(
        inner
            .tell("alloc 100MiB --via host")
            .starts_with("allocated")
    );
    drop((inner, outer));
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), []);
}

#[test]
fn every_way_to_pin_is_counted_and_refused() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.host = \"256MiB\"\n");
    for (denials, via) in (1..).zip(["system", "legacy-host", "heap-host"]) {
        let fits = bed.run("a", &["--raw", "alloc", "200MiB", "--via", via]);
        assert!(fits.status.success(), "{via}: {fits:?}");
        let refused = bed.run("a", &["--raw", "alloc", "300MiB", "--via", via]);
        assert_eq!(refused.status.code(), Some(2), "{via}: {refused:?}");
        let memory = bed.usage("a", 0).memory;
        assert_eq!(memory.host_denials, denials, "{via}");
        assert_eq!(memory.host_peak, 200 * MIB, "{via}");
        assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), [], "{via}");
    }
}

const RESERVING: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.min = \"6GiB\"\n\
                         [tenant.b]\ncgroup = \"@/b.slice\"\n";

#[test]
fn what_is_reserved_is_there_whoever_came_first() {
    let bed = Bed::new(RESERVING);
    let mut stranger = bed.stranger();
    assert!(stranger.tell("alloc 2GiB").starts_with("allocated"));
    let mut other = bed.actor("b");
    assert!(other.tell("fill --chunk 64MiB").starts_with("filled"));
    let usage = bed.usage("b", 0);
    let free_for_others = 16 * GIB - 6 * GIB - 2 * GIB;
    assert!(usage.memory_used <= free_for_others, "{usage:?}");
    assert!(usage.memory_used > free_for_others - GIB, "{usage:?}");
    assert!(usage.denials >= 1 && usage.breaches == 0, "{usage:?}");

    // All of it, and not more than there is.
    let mut owner = bed.actor("a");
    assert!(owner.tell("alloc 5GiB").starts_with("allocated"));
    assert_eq!(bed.usage("a", 0).memory.min, 6 * GIB);
    assert!(owner.tell("alloc 4GiB").starts_with("out of memory"));
    // What others give back anyone may have, also above a reservation.
    assert!(stranger.tell("free").starts_with("freed"));
    assert!(owner.tell("alloc 1GiB").starts_with("allocated"));
    // And what the owner gives back is kept for it.
    assert!(owner.tell("free").starts_with("freed"));
    assert!(other.tell("alloc 4GiB").starts_with("out of memory"));

    // Until the policy says otherwise.
    bed.write_policy(&RESERVING.replace("6GiB", "1GiB"));
    let reloaded = bed.ctl(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    assert!(other.tell("alloc 4GiB").starts_with("allocated"));
    drop((stranger, other, owner));
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(10)), []);
    let state = bed.state();
    assert_eq!(state["cards"][0]["claim"], GIB, "{}", state["cards"]);
}

#[test]
fn a_reservation_inside_a_tenant_holds_against_that_tenants_own_use() {
    let bed = Bed::new(
        "[tenant.outer]\ncgroup = \"@/o.slice\"\nmemory.max = \"8GiB\"\n\
         [tenant.inner]\ncgroup = \"@/o.slice/i.slice\"\nmemory.min = \"4GiB\"\n",
    );
    let mut outer = bed.actor("outer");
    assert!(outer.tell("fill --chunk 64MiB").starts_with("filled"));
    assert!(bed.usage("outer", 0).memory_used <= 4 * GIB);
    let mut inner = bed.actor("inner");
    assert!(inner.tell("alloc 3GiB").starts_with("allocated"));
    assert!(bed.usage("outer", 0).memory_used > 7 * GIB);
    assert!(inner.tell("alloc 2GiB").starts_with("out of memory"));
}

#[test]
fn reservations_above_the_card_are_refused_when_they_are_loaded() {
    let bed = Bed::new(RESERVING);
    bed.write_policy(&RESERVING.replace("6GiB", "17GiB"));
    let refused = bed.ctl(&["reload"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{refused:?}");
    assert!(said.contains("reserve 17GiB of GPU"), "{said}");
    // What was in force stays.
    assert_eq!(bed.usage("a", 0).memory.min, 6 * GIB);
}
