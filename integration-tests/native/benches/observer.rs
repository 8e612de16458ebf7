//! What the observer costs a process in no tenant: a system call with it as a ratio to the same without it, and the time that
//! it adds.
//!
//! A system call that is no ioctl, an ioctl that concerns no GPU, one whose number and size are the driver's but whose file is
//! another, and calls that the simulated driver answers. Rounds with and without in turn, so that what else the host does
//! meets both; the median over the rounds of what a round has for its quickest tenth. What an allocation costs is in `backends`.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    os::fd::AsRawFd as _,
    path::Path,
    time::Instant,
};

use gpuquota_common::nvidia::{IoctlCmd, class, ctrl, nr, nvos00, nvos54, nvos64};
use gpuquota_native_tests::Bed;

const ROUNDS: usize = 15;
/// Batches in a round, and calls in a batch.
const BATCHES: usize = 100;
const CALLS: u32 = 500;

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

/// Nanoseconds of a call, by the quickest tenth of the batches.
fn quickest(batches: usize, calls: u32, mut call: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..calls {
                call();
            }
            start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[batches / 10]
}

/// Every call once: what it is, and its nanoseconds.
fn measure(devices: &Path) -> [(&'static str, f64); 5] {
    let null = File::open("/dev/null").expect("exists");
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open(devices.join("nvidiactl"))
        .expect("the simulated driver");
    let of = |number, size| IoctlCmd { nr: number, size }.to_raw();
    let rm_control = of(nr::RM_CONTROL, nvos54::SIZE);
    let mut argument = [0u8; 64];
    let client = client(&control);
    let mut call = [0u8; nvos54::SIZE as usize];
    call[..4].copy_from_slice(&client.to_ne_bytes());
    call[nvos54::OBJECT..nvos54::OBJECT + 4].copy_from_slice(&client.to_ne_bytes());
    call[nvos54::CMD..nvos54::CMD + 4].copy_from_slice(&ctrl::GPU_GET_ATTACHED_IDS.to_ne_bytes());
    // Of an object that is not there: the driver says so, and the observer has looked for it.
    let mut free = [0u8; nvos00::SIZE as usize];
    free[..4].copy_from_slice(&client.to_ne_bytes());
    [
        (
            "no ioctl (getppid)",
            // SAFETY: takes nothing and changes nothing.
            quickest(BATCHES, CALLS, || _ = unsafe { libc::getppid() }),
        ),
        (
            "no GPU's number",
            quickest(BATCHES, CALLS, || ioctl(&null, 0x5413, &mut argument)),
        ),
        (
            "another file",
            quickest(BATCHES, CALLS, || ioctl(&null, rm_control, &mut argument)),
        ),
        (
            "driver: control",
            quickest(BATCHES, CALLS / 10, || {
                ioctl(&control, rm_control, &mut call);
            }),
        ),
        (
            "driver: free",
            quickest(BATCHES, CALLS / 10, || {
                ioctl(&control, of(nr::RM_FREE, nvos00::SIZE), &mut free);
            }),
        ),
    ]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"8GiB\"\n");
    let mut rounds: BTreeMap<&str, Vec<[f64; 2]>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let with = measure(bed.sim.devices());
        bed.signal_daemon(libc::SIGTERM);
        bed.detach();
        let without = measure(bed.sim.devices());
        bed.start();
        for ((what, with), (_, without)) in with.into_iter().zip(without) {
            rounds.entry(what).or_default().push([without, with]);
        }
    }
    println!(
        "\n{:<20} {:>12} {:>12} {:>8} {:>10}",
        "system call", "without", "with", "ratio", "added"
    );
    for (what, times) in rounds {
        let of = |value: fn(&[f64; 2]) -> f64| median(times.iter().map(value).collect());
        println!(
            "{what:<20} {:>9.0} ns {:>9.0} ns {:>8.3} {:>7.0} ns",
            of(|time| time[0]),
            of(|time| time[1]),
            of(|time| time[1] / time[0]),
            of(|time| time[1] - time[0]),
        );
    }
}
