//! Managed memory: charged by its ranges, denied, moved to the host.

use std::{
    fs,
    os::unix::{fs::symlink, process::ExitStatusExt as _},
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::control::QuotaChange;
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
    // It counts against the limit for every way to ask for memory.
    assert!(actor.tell("alloc 5GiB").starts_with("out of memory"));
    let told = actor.tell("alloc 6GiB --via managed");
    assert!(told.contains("CUDA_ERROR_NOT_PERMITTED"), "{told}");
    let usage = bed.usage("a", 0);
    assert_eq!((usage.breaches, usage.memory.managed), (0, 3 * GIB));
    assert!(actor.tell("free").starts_with("freed"));
    // What was freed a moment ago is looked up, not remembered.
    assert!(
        actor
            .tell("alloc 7GiB --via managed")
            .starts_with("allocated")
    );
    assert!(bed.usage("a", 0).memory_used >= 7 * GIB, "charged at once");
    bed.wait_tenant("a", 0, |usage| usage.memory.managed == 7 * GIB);
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
fn who_may_have_none_is_refused_it_and_who_need_not_pay_does_not() {
    let bed = Bed::new(
        "[tenant.none]\ncgroup = \"@/n.slice\"\nmemory.managed = \"deny\"\n\
         [tenant.free]\ncgroup = \"@/f.slice\"\nmemory.max = \"1GiB\"\nmemory.managed = \"ignore\"\n",
    );
    let mut free = bed.actor("free");
    assert!(
        free.tell("alloc 2GiB --via managed")
            .starts_with("allocated")
    );
    let mut none = bed.actor("none");
    assert!(none.tell("alloc 1GiB").starts_with("allocated"));
    let told = none.tell("alloc 64MiB --via managed");
    assert!(told.contains("CUDA_ERROR_NOT_PERMITTED"), "{told}");
    let usage = bed.usage("none", 0);
    assert_eq!(
        (usage.denials, usage.breaches, usage.memory.managed),
        (1, 0, 0)
    );
    // It goes on, and nothing that it was refused is found later.
    assert!(none.tell("alloc 1GiB").starts_with("allocated"));
    thread::sleep(Duration::from_secs(1));
    assert!(none.tell("free").starts_with("freed"), "{}", bed.log());
    let change = QuotaChange {
        tenant: "none".into(),
        gpu: None,
        properties: vec![("memory.managed".into(), "charge".into())],
        runtime: true,
    };
    bed.call(async |client| client.set_quota(&change).await)
        .expect("another policy");
    assert!(
        none.tell("alloc 64MiB --via managed")
            .starts_with("allocated")
    );
    // The other one was looked at just as often.
    assert_eq!(bed.usage("free", 0).memory.managed, 0);
    assert!(free.tell("free").starts_with("freed"));
}

#[test]
fn who_maps_without_a_supervisor_is_ended() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.managed = \"deny\"\n");
    bed.hierarchy()
        .create(&bed.cgroup("/a.slice"))
        .expect("a cgroup");
    let mut actor = bed.workload_under("signal", &["interactive"]);
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    actor.order("alloc 64MiB --via managed");
    assert_eq!(actor.ended().signal(), Some(libc::SIGTERM), "{}", bed.log());
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
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
    let resident = || bed.managed_on_gpu();
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
    // What it grows by above the limit goes as well, although that is no crossing.
    let left = resident();
    assert!(actor.tell("alloc 512MiB").starts_with("allocated"));
    let end = Instant::now() + PATIENCE;
    while resident() > left - GIB / 2 && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    assert!(resident() <= left - GIB / 2, "{}", bed.log());
    assert!(resident() > left - GIB, "not more than it grew by");
    // The range is still there, and charged.
    assert_eq!(bed.usage("a", 0).memory.managed, 3 * GIB);
    assert!(actor.tell("free").starts_with("freed"));
}

#[test]
fn managed_memory_that_comes_above_memory_high_goes_to_the_host_too() {
    let bed = Bed::new(&policy(
        "memory.high = \"4GiB\"\nmemory.on-high = \"reclaim\"\n",
    ));
    let mut actor = bed.actor("a");
    // There is nothing to move yet.
    assert!(actor.tell("alloc 5GiB").starts_with("allocated"));
    bed.wait_tenant("a", 0, |usage| usage.memory_used >= 5 * GIB);
    thread::sleep(Duration::from_millis(300));
    assert!(
        actor
            .tell("alloc 1GiB --via managed")
            .starts_with("allocated")
    );
    let end = Instant::now() + PATIENCE;
    while bed.managed_on_gpu() > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(bed.managed_on_gpu(), 0, "{}", bed.log());
}

#[test]
fn a_node_that_is_made_after_the_start_is_found() {
    let mut bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.managed = \"deny\"\n");
    bed.signal_daemon(libc::SIGTERM);
    let devices = bed.sim.devices().to_owned();
    let few = bed.sim.scratch().join("few");
    fs::create_dir(&few).expect("a folder");
    for entry in fs::read_dir(&devices).expect("the nodes") {
        let entry = entry.expect("a node");
        if entry.file_name() != "nvidia-uvm" {
            symlink(entry.path(), few.join(entry.file_name())).expect("a link");
        }
    }
    let settings = fs::read_to_string(bed.settings()).expect("settings");
    let changed = settings.replace(&devices.display().to_string(), &few.display().to_string());
    fs::write(bed.settings(), changed).expect("settings");
    bed.start();
    let managed = |bed: &Bed| {
        let findings = bed
            .call(async |client| client.doctor().await)
            .expect("findings");
        let found = findings
            .into_iter()
            .find(|finding| finding.subject == "managed memory");
        found.expect("a finding").detail
    };
    assert!(
        managed(&bed).contains("no nvidia-uvm node"),
        "{}",
        managed(&bed)
    );
    symlink(devices.join("nvidia-uvm"), few.join("nvidia-uvm")).expect("a link");
    let end = Instant::now() + PATIENCE;
    while managed(&bed).contains("no nvidia-uvm node") && Instant::now() < end {
        thread::sleep(Duration::from_millis(50));
    }
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 1GiB").starts_with("allocated"));
    let told = actor.tell("alloc 64MiB --via managed");
    assert!(told.contains("CUDA_ERROR_NOT_PERMITTED"), "{told}");
}
