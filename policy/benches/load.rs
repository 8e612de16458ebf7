//! What a reload costs before the kernel hears of it: a policy of 1,000 tenants on 8 GPUs.

use std::fmt::Write as _;

use criterion::{Criterion, criterion_group, criterion_main};
use gpuquota_policy::{Host, HostGpu, Layer, Policy, Source};

fn sources() -> Vec<Source> {
    let text = (0..1000).fold(String::new(), |mut text, number| {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "[tenant.t{number:04}]\ncgroup = \"/t{number:04}.slice\"\nmemory.max = \"8GiB\"\n\
             [tenant.t{number:04}.gpu.\"0\"]\nmemory.max = \"9GiB\"\n"
        );
        text
    });
    vec![Source::new("/policy.d/50.toml", Layer::Admin, text)]
}

fn host() -> Host {
    Host {
        gpus: (0..8)
            .map(|index| HostGpu {
                index,
                uuid: format!("GPU-00000000-0000-4000-8000-00000000000{index}"),
                memory: 16 << 30,
            })
            .collect(),
    }
}

fn load(criterion: &mut Criterion) {
    let (sources, host) = (sources(), host());
    let mut group = criterion.benchmark_group("policy of 1,000 tenants, 8 GPUs");
    group.bench_function("read and check", |bencher| {
        bencher.iter(|| Policy::load(&sources, Some(&host)).expect("valid"));
    });
    let policy = Policy::load(&sources, Some(&host)).expect("valid").policy;
    group.bench_function("all budgets", |bencher| {
        bencher.iter(|| {
            host.gpus
                .iter()
                .flat_map(|gpu| {
                    policy
                        .tenants
                        .keys()
                        .filter_map(|name| policy_budget(&policy, name, gpu))
                })
                .count()
        });
    });
    group.finish();
}

fn policy_budget(policy: &Policy, name: &str, gpu: &HostGpu) -> Option<u64> {
    policy.effective(name, gpu)?.memory.max
}

criterion_group!(benches, load);
criterion_main!(benches);
