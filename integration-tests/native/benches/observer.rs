//! What the observer costs an ioctl, as a ratio to the same ioctl without it, in one run.
//!
//! Four ioctls: one that concerns no GPU, one whose number and size look like the driver's but whose file is
//! another, one that the simulated driver answers and the observer follows, and an allocation with its free
//! under a budget (seccomp notification included).

use std::{
    fs::{File, OpenOptions},
    os::fd::AsRawFd as _,
    path::Path,
    time::Duration,
};

use criterion::{Criterion, criterion_group};
use gpuquota_common::nvidia::{IoctlCmd, class, ctrl, nr, nvos54, nvos64};
use gpuquota_native_tests::{Bed, median};

const FOLDER: &str = "observer";

fn ioctl(file: &File, raw: u32, argument: &mut [u8]) {
    // SAFETY: the argument is as long as the size in the command says, and lives through the call.
    unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::Ioctl::from(raw),
            argument.as_mut_ptr(),
        )
    };
}

/// A client of the simulated driver.
fn client(control: &File) -> u32 {
    let mut alloc = [0u8; nvos64::SIZE as usize];
    alloc[nvos64::CLASS..nvos64::CLASS + 4].copy_from_slice(&class::NV01_ROOT_CLIENT.to_ne_bytes());
    let cmd = IoctlCmd {
        nr: nr::RM_ALLOC,
        size: nvos64::SIZE,
    };
    ioctl(control, cmd.to_raw(), &mut alloc);
    u32::from_ne_bytes([alloc[8], alloc[9], alloc[10], alloc[11]])
}

fn measure(criterion: &mut Criterion, with: &str, devices: &Path) {
    let null = File::open("/dev/null").expect("exists");
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open(devices.join("nvidiactl"))
        .expect("the simulated driver");
    let mut group = criterion.benchmark_group(FOLDER);
    group
        .sample_size(50)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    let mut argument = [0u8; 64];
    group.bench_function(format!("no GPU/{with}"), |bencher| {
        bencher.iter(|| ioctl(&null, 0x5413, &mut argument));
    });
    let look_alike = IoctlCmd {
        nr: nr::RM_CONTROL,
        size: nvos54::SIZE,
    };
    group.bench_function(format!("look-alike/{with}"), |bencher| {
        bencher.iter(|| ioctl(&null, look_alike.to_raw(), &mut argument));
    });
    let mut call = [0u8; nvos54::SIZE as usize];
    let client = client(&control);
    call[..4].copy_from_slice(&client.to_ne_bytes());
    call[nvos54::OBJECT..nvos54::OBJECT + 4].copy_from_slice(&client.to_ne_bytes());
    call[nvos54::CMD..nvos54::CMD + 4].copy_from_slice(&ctrl::GPU_GET_ATTACHED_IDS.to_ne_bytes());
    group.bench_function(format!("driver call/{with}"), |bencher| {
        bencher.iter(|| ioctl(&control, look_alike.to_raw(), &mut call));
    });
    group.finish();
}

/// An allocation and its free, by a workload that is told what to do.
fn allocations(criterion: &mut Criterion, with: &str, actor: &mut gpuquota_native_tests::Actor) {
    let mut group = criterion.benchmark_group(FOLDER);
    group
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    group.bench_function(format!("allocate and free/{with}"), |bencher| {
        bencher.iter(|| {
            assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
            assert!(actor.tell("free").starts_with("freed"));
        });
    });
    group.finish();
}

fn observer(criterion: &mut Criterion) {
    let mut bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"8GiB\"\n");
    let mut governed = bed.actor("a");
    allocations(criterion, "with", &mut governed);
    measure(criterion, "with", bed.sim.devices());
    drop(governed);
    bed.signal_daemon(libc::SIGTERM);
    bed.detach();
    let mut free = bed.stranger();
    allocations(criterion, "without", &mut free);
    measure(criterion, "without", bed.sim.devices());
}

criterion_group!(benches, observer);

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
    println!(
        "\n{:<20} {:>12} {:>12} {:>8}",
        "ioctl", "without", "with", "ratio"
    );
    for name in ["no GPU", "look-alike", "driver call", "allocate and free"] {
        if let (Some(without), Some(with)) = (
            median(FOLDER, &format!("{name}/without")),
            median(FOLDER, &format!("{name}/with")),
        ) {
            println!(
                "{name:<20} {without:>9.0} ns {with:>9.0} ns {:>8.3}",
                with / without
            );
        }
    }
}
