//! Times the loading of a policy with many tenants: `cargo run --release -p gpuquota-policy --example thousand -- 1000`.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use gpuquota_policy::{Host, HostGpu, Layer, Policy, Source};

fn main() {
    let tenants: u32 = std::env::args()
        .nth(1)
        .and_then(|count| count.parse().ok())
        .unwrap_or(1000);
    let mut text = String::from("[class.night]\npriority = 1\nexclusive = true\n");
    for n in 0..tenants {
        // Half exact, half globs, some nested.
        let cgroup = match n % 4 {
            0 => format!("/gpu.slice/t{n}.slice"),
            1 => format!("/gpu.slice/t{}.slice/part", n - 1),
            2 => format!("/gpu.slice/job-{n}-*"),
            _ => format!("/kubepods.slice/**/pod{n}_[0-9a-f]*"),
        };
        let _ = write!(
            text,
            "[tenant.t{n}]\ncgroup = \"{cgroup}\"\nclass = \"night\"\nmemory.max = \"40GiB\"\nmemory.high = \"36GiB\"\nmemory.min = \"1MiB\"\n\
             launch.max = \"20000/s\"\ntime.weight = 300\n[tenant.t{n}.gpu.\"0\"]\nmemory.max = \"50GiB\"\n"
        );
    }
    let gpus = (0..8)
        .map(|index| HostGpu {
            index,
            uuid: format!("GPU-8b3f1c2e-0d5a-4e6f-9a1b-00000000000{index}"),
            memory: 141 << 30,
        })
        .collect();
    let host = Host { gpus };
    let source = Source::new("p.toml", Layer::Admin, text);
    // The best of several: the first one also pays for memory that the process does not have yet.
    let mut load = Duration::MAX;
    let mut loaded = Err(gpuquota_policy::Diagnostics::default());
    for _ in 0..20 {
        let start = Instant::now();
        loaded = Policy::load(std::slice::from_ref(&source), Some(&host));
        load = load.min(start.elapsed());
    }
    let policy = match loaded {
        Ok(loaded) => loaded.policy,
        Err(found) => {
            eprintln!("{found}");
            std::process::exit(1);
        }
    };
    let start = Instant::now();
    let budgets: usize = policy
        .tenants
        .keys()
        .map(|tenant| {
            host.gpus
                .iter()
                .filter_map(|gpu| policy.effective(tenant, gpu))
                .count()
        })
        .sum();
    println!(
        "{tenants} tenants, {} bytes: loaded in {load:?}, {budgets} budgets in {:?}",
        source.text.len(),
        start.elapsed()
    );
}
