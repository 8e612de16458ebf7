//! What each backend that this host offers costs an allocation and a free, as a ratio to the same without any program of
//! ours, on the simulated driver. The backends of other kernels are measured, emulated, by the suite `conformance`.
//!
//! Rounds of all of them in turn, so that what else the host does meets all alike; the median over the rounds of the lower decile in each.

use std::{collections::BTreeMap, fs};

use gpuquota_enforcer::control::BackendState;
use gpuquota_native_tests::{Actor, Bed};

const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";
const ROUNDS: usize = 5;

/// A workload that no program of ours sees, or that is in no tenant while they are attached.
fn ungoverned(bed: &Bed) -> Actor {
    let mut command = bed.sim.tenant();
    command.args(["--raw", "interactive"]);
    Actor::start(command)
}

/// Nanoseconds of an allocation and of a free.
fn measure(actor: &mut Actor) -> [u64; 2] {
    let line = actor.tell("measure --rounds 1000");
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["measured", "alloc", alloc, "ns", "free", free, "ns"] => {
            [alloc, free].map(|number| number.parse().expect("a number"))
        }
        _ => panic!("{line}"),
    }
}

fn force(bed: &mut Bed, backend: &str) {
    if bed.is_running() {
        bed.signal_daemon(libc::SIGTERM);
    }
    let path = bed.sim.scratch().join("gpuquota.toml");
    let settings: String = fs::read_to_string(&path)
        .expect("settings")
        .lines()
        .filter(|line| !line.starts_with("memory = "))
        .flat_map(|line| [line, "\n"])
        .collect();
    fs::write(path, format!("{settings}memory = \"{backend}\"\n")).expect("settings");
    bed.start();
}

fn main() {
    let mut bed = Bed::new(POLICY);
    bed.hierarchy()
        .create(&bed.cgroup("/a.slice"))
        .expect("a cgroup");
    let offered: Vec<String> = bed
        .call(async |client| client.backends().await)
        .expect("the backends")
        .into_iter()
        .filter(|backend| backend.state != BackendState::Unavailable)
        .map(|backend| backend.name)
        .collect();
    let mut times: BTreeMap<String, Vec<[u64; 2]>> = BTreeMap::new();
    let mut note = |name: &str, time| times.entry(name.to_owned()).or_default().push(time);
    for _ in 0..ROUNDS {
        for backend in &offered {
            force(&mut bed, backend);
            note(
                backend,
                measure(&mut bed.workload_under(backend, &["--raw", "interactive"])),
            );
        }
        note("in no tenant", measure(&mut ungoverned(&bed)));
        bed.signal_daemon(libc::SIGTERM);
        bed.detach();
        note("none", measure(&mut ungoverned(&bed)));
    }
    let median = |name: &str| {
        [0, 1].map(|at| {
            let mut sorted: Vec<u64> = times[name].iter().map(|time| time[at]).collect();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        })
    };
    let bare = median("none");
    println!("\n{:<14} {:>22} {:>22}", "backend", "allocation", "free");
    for name in times.keys() {
        let own = median(name);
        let cell = |at: usize| {
            #[expect(clippy::cast_precision_loss, reason = "nanoseconds of one call")]
            let ratio = own[at] as f64 / bare[at] as f64;
            format!("{:>9} ns, x {ratio:.3}", own[at])
        };
        println!("{name:<14} {:>22} {:>22}", cell(0), cell(1));
    }
}
