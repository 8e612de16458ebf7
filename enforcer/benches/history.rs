//! What a day of history keeps resident, in a process of its own: the memory before and after, for some numbers of tenants
//! that have used one GPU all day, and how long a second of it takes.

use std::{collections::BTreeMap, fs, hint::black_box, time::Instant};

use gpuquota_enforcer::history::{History, LONGEST};

const TENANTS: [u32; 2] = [64, 1000];

/// Resident memory of this process, in KiB.
fn resident() -> u64 {
    fs::read_to_string("/proc/self/status")
        .expect("own status")
        .lines()
        .find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .expect("a field of memory")
}

fn main() {
    // Whatever is asked for by name is not this.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    for tenants in TENANTS {
        let mut used: BTreeMap<(String, u32), (u64, u64)> = (0..tenants)
            .map(|number| ((format!("tenant-{number:04}"), 0), (0, 0)))
            .collect();
        let before = resident();
        let mut history = History::default();
        let began = Instant::now();
        for second in 0..LONGEST {
            for (number, (bytes, peak)) in (0_u64..).zip(used.values_mut()) {
                *bytes = (1 + (second * 7 + number * 13) % 4096) << 20;
                *peak = (*peak).max(*bytes);
            }
            history.sample(second, &used);
        }
        let took = began.elapsed();
        let after = resident();
        println!(
            "{tenants} tenants, a day: {} KiB more resident, {} KiB by its own count; {:.1} us a second",
            after.saturating_sub(before),
            history.bytes() / 1024,
            1e6 * took.as_secs_f64() / f64::from(u32::try_from(LONGEST).expect("a day")),
        );
        black_box(history);
    }
}
