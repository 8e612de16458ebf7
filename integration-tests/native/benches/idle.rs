//! What a look at idle GPUs costs a context switch, as a ratio to the same without one, in one run.
//!
//! Two threads hand a byte to and fro through pipes: two switches each time, on one processor. Measured without a look, beside
//! one at somebody else, as everybody on the host is then, and in one.

use std::{
    io::{Read as _, Write as _},
    thread,
    time::Duration,
};

use criterion::{Criterion, criterion_group};
use gpuquota_enforcer::{client::looks::Idle, control::leaks::Target};
use gpuquota_native_tests::{Bed, median};

const FOLDER: &str = "idle";
/// There and back, in one measurement.
const ROUNDS: u32 = 1000;
const WAYS: [&str; 3] = ["without", "beside", "in"];

/// Keeps this thread, and those that it starts, on one processor.
fn stay() {
    // SAFETY: a set of processors that is all zero but for the first, of the size that is told.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn idle(criterion: &mut Criterion) {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\n");
    let actor = bed.actor("a");
    stay();
    let (mut there, mut to) = std::io::pipe().expect("a pipe");
    let (mut back, mut from) = std::io::pipe().expect("a pipe");
    thread::spawn(move || {
        let mut byte = [0];
        while there.read_exact(&mut byte).is_ok() {
            from.write_all(&byte).expect("written");
        }
    });
    let mut round = || {
        let mut byte = [7];
        for _ in 0..ROUNDS {
            to.write_all(&byte).expect("written");
            back.read_exact(&mut byte).expect("read");
        }
    };
    let mut group = criterion.benchmark_group(FOLDER);
    group
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    for way in WAYS {
        let target = match way {
            "beside" => Some(Target::Process(actor.workload_pid())),
            "in" => Some(Target::Process(std::process::id())),
            _ => None,
        };
        if let Some(target) = &target {
            bed.call(async |client| {
                client
                    .start_look::<Idle>(target, Duration::from_mins(30))
                    .await
            })
            .expect("a look");
            thread::sleep(Duration::from_secs(1));
        }
        group.bench_function(way, |bencher| bencher.iter(&mut round));
        if let Some(target) = &target {
            let found = bed
                .call(async |client| client.stop_look::<Idle>(target).await)
                .expect("a look");
            println!(
                "{way}: {} changes and {} stacks were lost",
                found.gaps.lost, found.gaps.stackless
            );
        }
    }
    group.finish();
}

criterion_group!(benches, idle);

fn main() {
    benches();
    let Some(without) = median(FOLDER, WAYS[0]) else {
        return;
    };
    for way in WAYS {
        if let Some(time) = median(FOLDER, way) {
            println!(
                "a switch {way} a look: {:.2} us, times {:.2}",
                time / f64::from(2 * ROUNDS) / 1000.0,
                time / without
            );
        }
    }
}
