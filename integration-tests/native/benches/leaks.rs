//! What the leak finder costs an allocation with its free, as a ratio to the same without it, in one run.
//!
//! Two kinds: one that the driver's library answers by itself, which is the worst case, and one for which it asks the
//! driver. What both do beside, in the program and its pipe, is the same with and without.

use std::{path::Path, process::Command, time::Duration};

use criterion::{Criterion, criterion_group};
use gpuquota_enforcer::{client::looks::Leaks, control::leaks::Target};
use gpuquota_native_tests::{Actor, Bed, median};

const FOLDER: &str = "leaks";
const PAIRS: u32 = 200;

fn client(bed: &Bed, program: &Path, orders: &[&str]) -> Actor {
    let mut command = bed.run_command("a");
    command.arg(program);
    let mut actor = Actor::start(command);
    for order in orders {
        assert_eq!(actor.tell(order), format!("did {order}"));
    }
    actor
}

fn measure(criterion: &mut Criterion, with: &str, actors: &mut [(&str, Actor)]) {
    let mut group = criterion.benchmark_group(FOLDER);
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    let order = format!("scratch {PAIRS}");
    for (what, actor) in actors {
        group.bench_function(format!("{what}/{with}"), |bencher| {
            bencher.iter(|| assert!(actor.tell(&order).starts_with("did")));
        });
    }
    group.finish();
}

fn leaks(criterion: &mut Criterion) {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\n");
    let program = bed.sim.scratch().join("leaky");
    let compiled = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition", "2024", "-O", "-o"])
        .arg(&program)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/leaky.rs"))
        .status()
        .expect("rustc");
    assert!(compiled.success());
    let mut actors = [
        (
            "at hand",
            client(&bed, &program, &["context", "hold", "scratch 1"]),
        ),
        ("of the driver", client(&bed, &program, &["context"])),
    ];
    measure(criterion, "without", &mut actors);
    let target = Target::Tenant("a".into());
    bed.call(async |client| {
        client
            .start_look::<Leaks>(&target, Duration::from_mins(30))
            .await
    })
    .expect("a look");
    while bed
        .call(async |client| client.look::<Leaks>(&target).await)
        .expect("a look")
        .processes
        .iter()
        .filter(|process| !process.files.is_empty())
        .count()
        < actors.len()
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    measure(criterion, "with", &mut actors);
    let found = bed
        .call(async |client| client.stop_look::<Leaks>(&target).await)
        .expect("a look");
    println!(
        "followed {} allocations; lost {} calls",
        found.sites.iter().map(|site| site.allocations).sum::<u64>(),
        found.gaps.lost
    );
}

criterion_group!(benches, leaks);

fn main() {
    benches();
    for what in ["at hand", "of the driver"] {
        let (without, with) = (
            median(FOLDER, &format!("{what}/without")),
            median(FOLDER, &format!("{what}/with")),
        );
        if let (Some(without), Some(with)) = (without, with) {
            let each = |all: f64| all / f64::from(PAIRS) / 1000.0;
            println!(
                "{what}: {:.2} us without, {:.2} us with, times {:.2}",
                each(without),
                each(with),
                with / without
            );
        }
    }
}
