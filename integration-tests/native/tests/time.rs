//! GPU time on unmodified programs: weights, ceilings, exclusive classes, freezing, and who survives what.
//!
//! Shares are those that the simulated GPU itself counts. Bounds are wider than on a real GPU, since everything here
//! shares a few CPUs: `integration-tests/gpu/time.sh` measures the real thing.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::{Actor, Bed};

/// Kernels of half a millisecond, as fast as they go.
const SATURATE: &str = "launch --rate max --kernel-us 500 --for";

fn tenants(list: &[(&str, &str)]) -> String {
    list.iter()
        .map(|(name, properties)| format!("[tenant.{name}]\ncgroup = \"@/{name}.slice\"\n{properties}\n"))
        .collect()
}

/// GPU time so far by process, milliseconds.
fn busy(bed: &Bed) -> BTreeMap<u32, f64> {
    let truth = bed.sim.truth().expect("the truth");
    truth.gpus[0]
        .processes
        .iter()
        .map(|(pid, process)| (*pid, ms(process.busy_ns)))
        .collect()
}

fn ms(nanos: u64) -> f64 {
    Duration::from_nanos(nanos).as_secs_f64() * 1e3
}

/// GPU time of these processes in a span, milliseconds.
fn used_in(bed: &Bed, pids: &[u32], span: Duration) -> Vec<f64> {
    let before = busy(bed);
    thread::sleep(span);
    let after = busy(bed);
    pids.iter()
        .map(|pid| after.get(pid).unwrap_or(&0.0) - before.get(pid).unwrap_or(&0.0))
        .collect()
}

/// Shares in percent.
fn shares(used: &[f64]) -> Vec<f64> {
    let sum: f64 = used.iter().sum();
    used.iter().map(|used| 100.0 * used / sum).collect()
}

fn assert_close(got: &[f64], wanted: &[f64], within: f64) {
    let close = got
        .iter()
        .zip(wanted)
        .all(|(got, wanted)| (got - wanted).abs() <= within);
    assert!(close && got.len() == wanted.len(), "{got:?} for {wanted:?}");
}

/// A workload that has a context, in each of these tenants.
fn actors(bed: &Bed, names: &[&str]) -> (Vec<Actor>, Vec<u32>) {
    let mut actors: Vec<Actor> = names.iter().map(|name| bed.actor(name)).collect();
    for actor in &mut actors {
        assert_eq!(actor.tell("context"), "context");
    }
    let pids = actors.iter().map(Actor::workload_pid).collect();
    (actors, pids)
}

fn saturate(actors: &mut [Actor], span: Duration) {
    for actor in actors {
        actor.order(&format!("{SATURATE} {}ms", span.as_millis()));
    }
    // Until all of them are at it.
    thread::sleep(Duration::from_millis(300));
}

/// Time slices of a process's channel groups, microseconds.
fn slices(bed: &Bed, pid: u32) -> Vec<u64> {
    let truth = bed.sim.truth().expect("the truth");
    truth
        .clients
        .iter()
        .filter(|client| client.pid == pid)
        .flat_map(|client| client.groups.iter().map(|group| group.slice_us))
        .collect()
}

/// How many channels of a process are disabled, and how many there are.
fn disabled(bed: &Bed, pid: u32) -> (usize, usize) {
    let truth = bed.sim.truth().expect("the truth");
    let channels: Vec<bool> = truth
        .clients
        .iter()
        .filter(|client| client.pid == pid)
        .flat_map(|client| &client.groups)
        .flat_map(|group| group.channels.iter().map(|channel| channel.disabled))
        .collect();
    (channels.iter().filter(|disabled| **disabled).count(), channels.len())
}

/// Waits until `holds`, and tells how long that took.
fn wait_for(what: &str, patience: Duration, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < patience, "{what}: not within {patience:?}");
        thread::sleep(Duration::from_millis(2));
    }
    start.elapsed()
}

#[test]
fn time_is_shared_by_weight() {
    for (a, b) in [(50, 50), (25, 75), (30, 70), (10, 90)] {
        let bed = Bed::new(&tenants(&[
            ("a", &format!("time.weight = {a}")),
            ("b", &format!("time.weight = {b}")),
        ]));
        let (mut actors, pids) = actors(&bed, &["a", "b"]);
        saturate(&mut actors, Duration::from_millis(3500));
        let mut windows = Vec::new();
        for _ in 0..3 {
            windows.push(used_in(&bed, &pids, Duration::from_secs(1)));
        }
        let wanted = [f64::from(a), f64::from(b)];
        for window in &windows {
            assert_close(&shares(window), &wanted, 4.0);
        }
        let sum: Vec<f64> = (0..2).map(|at| windows.iter().map(|window| window[at]).sum()).collect();
        println!("{a}:{b} {:?}", shares(&sum));
        assert_close(&shares(&sum), &wanted, 2.0);
    }
}
