//! Calls of which the kernel has not shown the end to the programs, as preemptible ones do now and then: what they may have done
//! is charged, and the driver is asked what became of it.
//!
//! Such a call is put here where the programs would have left it. `preemption` waits for the kernel to do it by itself.

use aya::maps::{HashMap, Map, MapData};
use gpuquota_common::{
    map::{InFlight, counter},
    nvidia::class,
};
use gpuquota_enforcer::kernel::PinDir;
use gpuquota_native_tests::{Actor, Bed, PATIENCE};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"4GiB\"\n";
/// A handle that nobody has.
const NOBODYS: u32 = 0x7777;

fn holder(bed: &Bed) -> Actor {
    let mut actor = bed.raw_actor("a");
    assert_eq!(actor.tell("alloc 64MiB"), "allocated 67108864");
    actor
}

/// Leaves an allocation of so much by this process as one whose end was not seen.
fn leave(bed: &Bed, actor: &Actor, bytes: u64) {
    let thread = actor.workload_pid();
    let truth = bed.sim.truth().expect("the truth");
    let client = truth
        .clients
        .iter()
        .find(|client| client.pid == thread)
        .expect("a client");
    let tenant = bed.state()["seats"][0]["index"].as_u64().expect("an index");
    let flight = InFlight {
        wanted: bytes,
        call: gpuquota_common::map::call::ALLOC_MEMORY,
        tenant: u32::try_from(tenant).expect("small"),
        client: client.handle,
        handle: NOBODYS,
        class: class::NV01_MEMORY_LOCAL_USER,
        by: 1,
        ..InFlight::default()
    };
    let pin = PinDir::open(&bed.bpf_directory())
        .expect("pins")
        .map("IN_FLIGHT");
    let data = MapData::from_pin(pin).expect("the pinned map");
    let mut map: HashMap<_, u32, InFlight> = Map::HashMap(data).try_into().expect("its types");
    map.insert(thread, flight, 0).expect("room");
}

#[test]
fn what_the_driver_does_not_have_is_charged_until_it_was_asked() {
    let bed = Bed::new(POLICY);
    let mut actor = holder(&bed);
    leave(&bed, &actor, GIB);
    assert_eq!(actor.tell("alloc 2MiB"), "allocated 2097152");
    assert_eq!(bed.counter(counter::LATE_EXITS), 1);
    assert_eq!(bed.wait_usage("a", 0, |used| used == 66 * MIB), 66 * MIB);
    // It was charged: the highest use says so.
    assert!(
        bed.usage("a", 0).memory_peak >= GIB + 64 * MIB,
        "{}",
        bed.log()
    );
    assert!(bed.log().contains("does not have this memory"));
    // What the driver has stays.
    assert_eq!(actor.tell("free"), "freed 69206016");
    assert_eq!(bed.wait_usage("a", 0, |used| used == 0), 0);
}

#[test]
fn it_counts_against_the_budget_meanwhile() {
    let bed = Bed::new(POLICY);
    let mut actor = holder(&bed);
    leave(&bed, &actor, 4 * GIB - 128 * MIB);
    assert!(actor.tell("alloc 128MiB").starts_with("out of memory"));
    let usage = bed.usage("a", 0);
    assert_eq!((usage.denials, usage.breaches), (1, 0), "{usage:?}");
    assert_eq!(bed.wait_usage("a", 0, |used| used == 64 * MIB), 64 * MIB);
    assert_eq!(actor.tell("alloc 128MiB"), "allocated 134217728");
}

#[test]
fn it_goes_with_its_process() {
    let bed = Bed::new(POLICY);
    let actor = holder(&bed);
    leave(&bed, &actor, GIB);
    drop(actor);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
    assert_eq!(bed.counter(counter::LATE_EXITS), 1);
}
