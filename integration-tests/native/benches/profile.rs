//! What the launch profile costs a launch that is waited for, and launches in a row, as a ratio to the same without it, in one
//! run. The budget is all of the time, so that the probes are in the process throughout: this is what it is there to bound.

use std::time::Duration;

use criterion::{Criterion, criterion_group};
use gpuquota_enforcer::{client::looks::Profile, control::leaks::Target};
use gpuquota_native_tests::{Actor, Bed, median};

const FOLDER: &str = "profile";
const STEPS: [(&str, &str); 2] = [
    ("launch and wait", "rounds 200 --kernel-us 1"),
    (
        "launches in a row",
        "burst --kernels 500 --kernel-us 1 --for 1ms",
    ),
];

fn measure(criterion: &mut Criterion, with: &str, actor: &mut Actor) {
    let mut group = criterion.benchmark_group(FOLDER);
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    for (what, step) in STEPS {
        group.bench_function(format!("{what}/{with}"), |bencher| {
            bencher.iter(|| assert!(!actor.tell(step).is_empty()));
        });
    }
    group.finish();
}

fn profile(criterion: &mut Criterion) {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\ninsight.budget = \"100%\"\n");
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("context"), "context");
    measure(criterion, "without", &mut actor);
    let target = Target::Tenant("a".into());
    bed.call(async |client| {
        client
            .start_look::<Profile>(&target, Duration::from_mins(30))
            .await
    })
    .expect("a look");
    while bed
        .call(async |client| client.look::<Profile>(&target).await)
        .expect("a look")
        .processes
        .iter()
        .all(|process| process.files.is_empty())
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    measure(criterion, "with", &mut actor);
    let found = bed
        .call(async |client| client.stop_look::<Profile>(&target).await)
        .expect("a look");
    let launches: u64 = found.kernels.iter().map(|kernel| kernel.launches).sum();
    let process = &found.processes[0];
    println!(
        "{launches} launches, probes in for {:.0} % of the time, {} lost; costs {:?}",
        100.0 * process.covered,
        found.gaps.lost,
        found.costs
    );
}

criterion_group!(benches, profile);

fn main() {
    benches();
    for (what, _) in STEPS {
        let (without, with) = (
            median(FOLDER, &format!("{what}/without")),
            median(FOLDER, &format!("{what}/with")),
        );
        if let (Some(without), Some(with)) = (without, with) {
            println!(
                "{what}: times {:.2} with the launch profile",
                with / without
            );
        }
    }
}
