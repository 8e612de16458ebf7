//! What a launch costs in arithmetic, and what it costs to find the launch calls of a library.
//!
//! The probe itself is measured where it works: `integration-tests/gpu/run.sh launches cost`.

use std::{hint::black_box, sync::Arc, thread};

use criterion::{Criterion, criterion_group, criterion_main};
use gpuquota_common::launch::{Limit, gap_index, ticks};
use gpuquota_enforcer::launch::{bucket::Chain, scan::code_mappings, symbols};

fn limit(interval_ns: u64, burst: u64) -> Limit {
    Limit {
        interval: ticks(interval_ns),
        span: ticks(interval_ns) * (burst - 1),
        ..Limit::default()
    }
}

fn bucket(c: &mut Criterion) {
    let mut group = c.benchmark_group("bucket");
    for depth in [1, 3, 8] {
        let chain = Chain::new(&vec![limit(50_000, 500); depth]);
        let mut now = 1_000_000_000_000;
        group.bench_function(format!("launch, {depth} tenants deep"), |b| {
            b.iter(|| {
                now += 60_000;
                black_box(chain.launch(now, 1, u64::MAX))
            });
        });
    }
    let shared = Arc::new(Chain::new(&[limit(50, 1 << 20)]));
    let others: Vec<_> = (1..thread::available_parallelism()
        .map_or(2, usize::from)
        .min(8))
        .map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // Ends when this is the only one that is left.
                while Arc::strong_count(&shared) > 1 && Arc::weak_count(&shared) == 0 {
                    black_box(shared.launch(1, 1, u64::MAX));
                }
            })
        })
        .collect();
    group.bench_function("launch, every CPU at once", |b| {
        b.iter(|| black_box(shared.launch(1, 1, u64::MAX)));
    });
    // A weak handle is the sign to end.
    let _sign = Arc::downgrade(&shared);
    for other in others {
        // A benchmark thread that panicked has measured nothing.
        let _ = other.join();
    }
    group.bench_function("histogram index", |b| {
        let mut gap = 1u64;
        b.iter(|| {
            gap = gap.rotate_left(7) ^ 0x9e37;
            black_box(gap_index(gap))
        });
    });
    group.finish();
}

fn scan(c: &mut Criterion) {
    let mut group = c.benchmark_group("scan");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("own mappings");
    group.bench_function("mappings of a process", |b| {
        b.iter(|| black_box(code_mappings(&maps)));
    });
    let own = std::fs::File::open("/proc/self/exe").expect("own program");
    group.bench_function("a file without launch calls", |b| {
        b.iter(|| black_box(symbols::find(&own)));
    });
    // push rbp; mov rbp,rsp; push r15 …: the entry of a driver function.
    let code = [
        0x55, 0x48, 0x89, 0xe5, 0x41, 0x57, 0x41, 0x56, 0x41, 0x55, 0xc3,
    ]
    .repeat(64);
    group.bench_function("where a probe goes", |b| {
        b.iter(|| black_box(symbols::cheapest(&code)));
    });
    group.finish();
}

criterion_group!(benches, bucket, scan);
criterion_main!(benches);
