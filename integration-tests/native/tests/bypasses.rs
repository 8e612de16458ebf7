//! Ways around a budget that are none: where files go, who moves, and what is named by handles.

use std::{
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::map::counter;
use gpuquota_native_tests::{Actor, Bed, PATIENCE, binary};

const GIB: u64 = 1 << 30;
const TWO: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n\
                   [tenant.b]\ncgroup = \"@/b.slice\"\nmemory.max = \"3GiB\"\n";

fn socket(bed: &Bed) -> PathBuf {
    bed.sim.scratch().join("files.sock")
}

/// A workload to which files can be sent.
fn receiver(bed: &Bed, mut actor: Actor) -> Actor {
    let answer = actor.tell(&format!("listen {}", socket(bed).display()));
    assert_eq!(answer, "listening");
    actor
}

/// A workload of tenant a that has 1 GiB and has sent its control file to the socket.
fn sender(bed: &Bed) -> Actor {
    let mut actor = bed.raw_actor("a");
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    let answer = actor.tell(&format!("pass {}", socket(bed).display()));
    assert_eq!(answer, "passed 1");
    actor
}

fn used(bed: &Bed, tenant: &str) -> u64 {
    bed.usage(tenant, 0).memory_used
}

/// Waits until the charges of tenant a are all there, as those of one process.
fn wait_for_owner(bed: &Bed, pid: u32) {
    let end = Instant::now() + PATIENCE;
    loop {
        let usage = bed.usage("a", 0);
        let owners: Vec<u32> = usage
            .processes
            .iter()
            .filter(|process| process.memory_used > 0)
            .map(|process| process.pid)
            .collect();
        if owners == [pid] && usage.memory_used == GIB {
            return;
        }
        assert!(
            Instant::now() < end,
            "{} of {owners:?} instead of {GIB} of {pid}",
            usage.memory_used
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// The driver has the memory still; without it a test would show nothing.
fn driver_has(bed: &Bed) -> u64 {
    bed.sim.truth().expect("the truth").gpus[0].used
}

#[test]
fn a_file_that_went_to_another_tenant_keeps_its_charge() {
    let bed = Bed::new(TWO);
    let mut other = receiver(&bed, bed.raw_actor("b"));
    let first = sender(&bed);
    assert_eq!(other.tell("receive"), "received 1");
    assert_eq!(first.finish(), Some(0));
    wait_for_owner(&bed, other.workload_pid());
    assert!(driver_has(&bed) >= GIB);
    assert_eq!(used(&bed, "b"), 0);
    // Who has allocated pays, as long as the memory is there.
    let mut next = bed.raw_actor("a");
    assert!(next.tell("alloc 2560MiB").starts_with("out of memory"));
    assert_eq!(other.tell("close-received"), "closed 1");
    assert_eq!(bed.wait_usage("a", 0, |used| used == 0), 0);
    assert_eq!(next.tell("alloc 2560MiB"), "allocated 2684354560");
    drop((next, other));
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

#[test]
fn a_file_that_waits_in_a_socket_keeps_its_charge() {
    let bed = Bed::new(TWO);
    let mut stranger = receiver(&bed, bed.stranger());
    let first = sender(&bed);
    assert_eq!(first.finish(), Some(0));
    wait_for_owner(&bed, 0);
    assert!(driver_has(&bed) >= GIB);
    // It arrives, in no tenant.
    assert_eq!(stranger.tell("receive"), "received 1");
    wait_for_owner(&bed, stranger.pid());
    drop(stranger);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
    assert_eq!(driver_has(&bed), 0);
}

#[test]
fn a_file_that_its_process_lets_go_of_keeps_its_charge_where_it_went() {
    let bed = Bed::new(TWO);
    let mut other = receiver(&bed, bed.raw_actor("b"));
    let mut first = sender(&bed);
    assert_eq!(other.tell("receive"), "received 1");
    assert_eq!(first.tell("let-go"), "let go of 1");
    wait_for_owner(&bed, other.workload_pid());
    assert!(driver_has(&bed) >= GIB);
    // Closed for the last time; its first process lives on.
    assert_eq!(other.tell("close-received"), "closed 1");
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
    assert_eq!(first.tell("hold 1ms"), "held");
}

#[test]
fn what_a_child_allocates_in_its_parents_client_stays_charged() {
    let bed = Bed::new(TWO);
    let mut actor = bed.raw_actor("a");
    assert_eq!(actor.tell("alloc 2MiB"), "allocated 2097152");
    assert_eq!(actor.tell("free"), "freed 2097152");
    let answer = actor.tell("child-alloc 1GiB");
    assert!(answer.ends_with("ended with 0"), "{answer}");
    wait_for_owner(&bed, actor.workload_pid());
    assert!(driver_has(&bed) >= GIB);
    drop(actor);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

#[test]
fn a_process_that_moves_pays_from_where_it_allocates() {
    let bed = Bed::new(TWO);
    let mut actor = bed.raw_actor("a");
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    let hierarchy = bed.hierarchy();
    let sibling = bed.cgroup("/b.slice");
    hierarchy.create(&sibling).expect("a cgroup");
    let folder = hierarchy.folder(&sibling).expect("a folder");
    let pid = actor.workload_pid().to_string();
    std::fs::write(folder.join("cgroup.procs"), pid).expect("moved");
    // What it has stays where it was charged; what it takes now is its new tenant's.
    assert_eq!(actor.tell("alloc 2GiB"), "allocated 2147483648");
    assert_eq!((used(&bed, "a"), used(&bed, "b")), (GIB, 2 * GIB));
    assert!(actor.tell("alloc 1088MiB").starts_with("out of memory"));
    assert_eq!(actor.tell("free"), "freed 3221225472");
    assert_eq!((used(&bed, "a"), used(&bed, "b")), (0, 0));
}

#[test]
fn handles_are_charged_for_what_they_name_now() {
    let bed = Bed::new(TWO);
    let mut actor = bed.raw_actor("a");
    assert_eq!(actor.tell("alloc 1GiB --via reuse"), "allocated 1073741824");
    assert_eq!(used(&bed, "a"), GIB);
    let before = bed.counter(counter::UNKNOWN_FREES);
    assert_eq!(actor.tell("free-unknown"), "freed nothing");
    assert_eq!(bed.counter(counter::UNKNOWN_FREES), before + 1);
    assert_eq!(used(&bed, "a"), GIB);
    assert_eq!(actor.tell("free"), "freed 1073741824");
    assert_eq!(used(&bed, "a"), 0);
}

/// A free that names one object when it is looked at and another one when the driver looks. The ledger may keep too much until
/// the driver was asked.
#[test]
fn a_free_that_is_changed_while_it_is_made_gives_nothing_back() {
    let bed = Bed::new(TWO);
    let mut actor = bed.raw_actor("a");
    let answer = actor.tell("race-free 2MiB");
    assert!(answer.starts_with("the other one was freed"), "{answer}");
    println!(
        "{answer}; {} were noticed",
        bed.counter(counter::CHANGED_FREES)
    );
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    assert!(used(&bed, "a") >= GIB);
    let end = Instant::now() + PATIENCE;
    while !bed.only_charged().is_empty() {
        assert!(Instant::now() < end, "{}", bed.differences());
        thread::sleep(Duration::from_millis(50));
    }
    drop(actor);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

/// A program without shared libraries, which no preloaded library and no probe on libcuda would see.
#[test]
fn a_static_program_is_governed_alike() {
    let bed = Bed::new(TWO);
    let program = bed.sim.scratch().join("static-client");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/static_client.rs");
    let compiled = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition", "2024", "-C", "target-feature=+crt-static"])
        .args(["-C", "panic=abort", "-o"])
        .arg(&program)
        .arg(source)
        .output()
        .expect("rustc");
    assert!(compiled.status.success(), "{compiled:?}");
    let run = |gib: &str| {
        bed.run_command("a")
            .arg(&program)
            .arg(bed.sim.devices())
            .arg(gib)
            .output()
            .expect("gpuquotactl run")
    };
    let fits = run("2");
    assert_eq!(fits.status.code(), Some(0), "{fits:?}");
    assert!(bed.usage("a", 0).memory_peak >= 2 * GIB);
    let over = run("4");
    assert_eq!(over.status.code(), Some(2), "{over:?}");
    let usage = bed.usage("a", 0);
    assert_eq!((usage.denials, usage.breaches), (1, 0), "{usage:?}");
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}

/// Whoever can open a GPU can disable and enable the channels of everybody (measured on an H200).
#[test]
fn a_stranger_that_thaws_a_frozen_tenant_is_undone() {
    let bed = Bed::new(TWO);
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("context"), "context");
    let pid = actor.workload_pid();
    let held = bed.ctl(&["freeze", "a"]);
    assert!(held.status.success(), "{held:?}");
    let channels = || -> Vec<(u32, u32, bool)> {
        let truth = bed.sim.truth().expect("the truth");
        truth
            .clients
            .iter()
            .filter(|client| client.pid == pid)
            .flat_map(|client| client.groups.iter().map(|group| (client.handle, group)))
            .flat_map(|(client, group)| {
                group
                    .channels
                    .iter()
                    .map(move |channel| (client, channel.handle, channel.disabled))
            })
            .collect()
    };
    let frozen = channels();
    assert!(!frozen.is_empty() && frozen.iter().all(|(_, _, disabled)| *disabled));
    let mut command = bed.sim.tenant();
    command.args(["--raw", "interactive"]);
    let mut stranger = Actor::start(command);
    let list: Vec<String> = frozen
        .iter()
        .map(|(_, channel, _)| channel.to_string())
        .collect();
    let before = bed.counter(counter::OWN_CONTROLS);
    let answer = stranger.tell(&format!(
        "channels {} {} --enable",
        frozen[0].0,
        list.join(" ")
    ));
    assert_eq!(answer, format!("changed {}", frozen.len()));
    assert_eq!(bed.counter(counter::OWN_CONTROLS), before + 1);
    let end = Instant::now() + PATIENCE;
    while !channels().iter().all(|(_, _, disabled)| *disabled) {
        assert!(Instant::now() < end, "still thawed: {:?}", channels());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Without a supervisor, by the rung of the ladder that every host has.
#[test]
fn a_file_that_went_away_keeps_its_charge_without_a_supervisor() {
    let bed = Bed::new(TWO);
    let listener = std::os::unix::net::UnixListener::bind(socket(&bed)).expect("a socket");
    let folder = bed.cgroup("/a.slice");
    bed.hierarchy().create(&folder).expect("a cgroup");
    let folder = bed.hierarchy().folder(&folder).expect("a folder");
    let mut command = bed.command("/bin/sh");
    command
        .args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""])
        .arg(folder)
        .arg(binary("simtenant"))
        .args(["--raw", "interactive"]);
    let mut actor = Actor::start(command);
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    let answer = actor.tell(&format!("pass {}", socket(&bed).display()));
    assert_eq!(answer, "passed 1");
    drop(actor);
    wait_for_owner(&bed, 0);
    drop(listener);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}
