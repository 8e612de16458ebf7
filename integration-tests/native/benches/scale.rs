//! A daemon at the size that is promised: 1,000 tenants, 8 GPUs, 5,000 processes, 1,000,000 live objects.
//!
//! `make scale` prints the table of docs/benchmarks.md. The processes are real and hold the simulated driver's file; their
//! objects are put into the ledger by the operation with which the daemon takes over what was there before it. Then the daemon
//! is started on that ledger, as after a restart.

#![allow(clippy::cast_precision_loss, reason = "figures for people")]

use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::map::{NO_GPU, Object, ObjectKey, kind};
use gpuquota_enforcer::kernel::{Kernel, PinDir};
use gpuquota_native_tests::Bed;
use gpuquota_simgpu::fixture::Options;

const TENANTS: u32 = 1000;
const GPUS: u32 = 8;
const PROCESSES: u32 = 5000;
/// Of each process; a client, a device and the rest is memory.
const OBJECTS: u32 = 200;
/// What one process has of memory: all objects but its client and its device.
const HELD: u64 = (OBJECTS as u64 - 2) * SIZE;
const SIZE: u64 = 2 << 20;
/// The clients of the first process and, counted up, of the others: beyond those that the simulated driver hands out, to each
/// daemon that starts too. A second client of the same number would be taken for the end of the first.
const CLIENT: u32 = 0xc1d8_0000;
/// Of the objects: a cgroup that there never was, so that the daemon leaves charges with the tenants that they were put to.
const GONE: u64 = u64::MAX >> 1;
/// After so long nothing of what the daemon was doing goes on.
const SETTLED: Duration = Duration::from_secs(8);
/// For so long its CPU time is measured.
const MEASURED: Duration = Duration::from_secs(30);

fn policy(tenants: u32, max: &str) -> String {
    (0..tenants).fold(String::new(), |mut text, number| {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "[tenant.t{number:04}]\ncgroup = \"@/t{number:04}.slice\"\nmemory.max = \"{max}\"\n\
             [tenant.t{number:04}.gpu.\"0\"]\nmemory.max = \"{max}\"\n"
        );
        text
    })
}

/// Field of `/proc/PID/status`, in KiB.
fn status(pid: u32, field: &str) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/status"))
        .expect("the daemon lives")
        .lines()
        .find_map(|line| {
            line.strip_prefix(field)?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .expect("a field of memory")
}

/// CPU time so far.
fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the daemon lives");
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 2..]
        .split(' ')
        .collect();
    let ticks: u64 = [11, 12]
        .iter()
        .map(|field| fields[*field].parse::<u64>().expect("ticks"))
        .sum();
    Duration::from_millis(ticks * 10)
}

/// Part of a core that the daemon takes while nothing happens, once it has settled.
fn idle(bed: &Bed) -> String {
    thread::sleep(SETTLED);
    let before = cpu(bed.daemon_pid());
    thread::sleep(MEASURED);
    let used = cpu(bed.daemon_pid()).saturating_sub(before);
    let load = fs::read_to_string("/proc/loadavg").expect("a load");
    format!(
        "{:.2} % of a core (load {})",
        used.as_secs_f64() / MEASURED.as_secs_f64() * 100.0,
        load.split(' ').next().unwrap_or_default()
    )
}

/// Resident memory once the daemon has given back what it does not keep, and the most so far.
fn resident(bed: &Bed) -> String {
    thread::sleep(SETTLED);
    let [now, most] =
        ["VmRSS:", "VmHWM:"].map(|field| status(bed.daemon_pid(), field) as f64 * 1024.0 / 1e6);
    format!("{now:.1} MB, {most:.1} MB")
}

/// A daemon on these GPUs as it is by default, which looks once a second, with metrics; and their address.
fn daemon(gpus: u32, tenants: u32) -> (Bed, String) {
    let options = Options {
        gpus,
        ..Options::default()
    };
    let mut bed = Bed::with(&options, &policy(tenants, "8GiB"));
    let settings = fs::read_to_string(bed.settings()).expect("settings");
    fs::write(
        bed.settings(),
        settings.replace(
            "reconcile-interval = \"200ms\"",
            "reconcile-interval = \"1s\"",
        ),
    )
    .expect("settings");
    let address = bed.offer_metrics();
    (bed, address)
}

fn scrape(address: &str) -> (Duration, String) {
    let begun = Instant::now();
    let text = gpuquota_native_tests::scrape(address);
    (begun.elapsed(), text)
}

/// Changes the limit of every tenant and reloads, several times; prints how long it took at best, until every decision was
/// by the new policy and until the answer.
fn reload(bed: &Bed, address: &str, tenants: u32, of: &str) {
    let mut best = (f64::MAX, Duration::MAX);
    for max in ["9GiB", "10GiB", "11GiB", "12GiB", "13GiB"] {
        bed.write_policy(&policy(tenants, max));
        let begun = Instant::now();
        bed.call(async |client| client.reload().await)
            .expect("loads");
        best.1 = best.1.min(begun.elapsed());
        let enforced = scrape(address)
            .1
            .lines()
            .find_map(|line| {
                let value = line.strip_prefix("gpuquota_policy_enforced_seconds ")?;
                value.parse::<f64>().ok()
            })
            .expect("a metric");
        best.0 = best.0.min(enforced);
    }
    row(
        &format!("{of}: reload that changes all limits, call to every decision by them"),
        &format!("{:.1} ms", best.0 * 1e3),
    );
    row(
        &format!("{of}: reload that changes all limits, call to answer"),
        &format!("{:.1?}", best.1),
    );
}

/// Processes that hold the driver's file and do nothing.
fn sleepers(control: &File) -> Vec<Child> {
    (0..PROCESSES)
        .map(|_| {
            Command::new("sleep")
                .arg("600")
                .stdin(control.try_clone().expect("a descriptor"))
                .stdout(Stdio::null())
                .spawn()
                .expect("sleep")
        })
        .collect()
}

fn start_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    stat[stat.rfind(')').expect("a name") + 2..]
        .split(' ')
        .nth(19)
        .and_then(|field| field.parse().ok())
        .expect("a start")
}

/// Puts clients, devices and memory of these processes into the ledger.
fn fill(kernel: &Kernel, processes: &[Child]) {
    for (number, process) in (0u32..).zip(processes) {
        let tgid = process.id();
        let tenant = number % TENANTS;
        let gpu = number % GPUS;
        kernel
            .adopt_process(tgid, start_ticks(tgid) * 10_000_000, tenant, GONE)
            .expect("a process");
        let client = CLIENT + number;
        for handle in 0..OBJECTS {
            let (handle, kind, bytes, gpu, parent) = match handle {
                0 => (client, kind::CLIENT, 0, NO_GPU, 0),
                1 => (1, kind::DEVICE, 0, gpu, client),
                handle => (handle, kind::MEMORY, SIZE, gpu, 1),
            };
            let object = Object {
                bytes,
                cgroup: GONE,
                tgid,
                tenant,
                gpu,
                kind,
                class: 0x40,
                parent,
                ..Object::default()
            };
            kernel
                .adopt_object(ObjectKey { client, handle }, &object)
                .expect("an object");
        }
    }
}

fn row(what: &str, value: &str) {
    println!("| {what} | {value} |");
}

fn small() {
    const SMALL: u32 = 64;
    let (bed, address) = daemon(1, SMALL);
    row("64 tenants, idle: CPU", &idle(&bed));
    row("64 tenants: resident memory, most so far", &resident(&bed));
    let folder = bed.cgroup("/t0000.slice");
    bed.hierarchy().create(&folder).expect("a cgroup");
    let mut holder = bed.command("/bin/sh");
    holder
        .args([
            "-c",
            "echo $$ >\"$0/cgroup.procs\" && exec \"$1\" script 'context; alloc 1GiB --hold-stdin'",
        ])
        .arg(bed.hierarchy().folder(&folder).expect("a folder"))
        .arg(bed.binaries().join("simtenant"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut holder = holder.spawn().expect("a tenant");
    let begun = Instant::now();
    while bed.usage("t0000", 0).memory_used < 1 << 30 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "no memory is held"
        );
        thread::sleep(Duration::from_millis(10));
    }
    row(
        "64 tenants, one holds memory and does nothing: CPU",
        &idle(&bed),
    );
    reload(&bed, &address, SMALL, "64 tenants");
    for _ in 0..5 {
        scrape(&address);
        thread::sleep(Duration::from_millis(250));
    }
    row(
        "64 tenants, after five reloads and ten scrapes: resident memory, most so far",
        &resident(&bed),
    );
    drop(holder.stdin.take());
    holder.wait().expect("ends");
}

#[expect(
    clippy::too_many_lines,
    reason = "one figure after the other, on one daemon"
)]
fn large() {
    let (mut bed, address) = daemon(GPUS, TENANTS);
    row("1,000 tenants, 8 GPUs, idle: CPU", &idle(&bed));
    row(
        "1,000 tenants, 8 GPUs: resident memory, most so far",
        &resident(&bed),
    );
    reload(&bed, &address, TENANTS, "1,000 tenants, 8 GPUs");
    row(
        "1,000 tenants, 8 GPUs, after five reloads and scrapes: resident memory, most so far",
        &resident(&bed),
    );
    let begun = Instant::now();
    bed.call(async |client| {
        client
            .set_quota(&gpuquota_enforcer::control::QuotaChange {
                tenant: "t0500".into(),
                gpu: None,
                properties: vec![("memory.high".into(), "1GiB".into())],
                runtime: true,
            })
            .await
    })
    .expect("set");
    row(
        "1,000 tenants: set-property of one, call to answer",
        &format!("{:.1?}", begun.elapsed()),
    );
    bed.signal_daemon(libc::SIGTERM);
    let begun = Instant::now();
    bed.start();
    row(
        "1,000 tenants, 8 GPUs: start to ready",
        &format!("{:.1?}", begun.elapsed()),
    );
    bed.signal_daemon(libc::SIGTERM);

    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open(bed.sim.devices().join("nvidiactl"))
        .expect("the simulated driver");
    let mut processes = sleepers(&control);
    {
        let pins = PinDir::open(&bed.bpf_directory()).expect("pins");
        let (kernel, _events) = Kernel::attach(Some(&pins)).expect("the ledger");
        let begun = Instant::now();
        fill(&kernel, &processes);
        let count = kernel.object_count();
        eprintln!("{count} objects in {:?}", begun.elapsed());
        assert_eq!(count, u64::from(PROCESSES * OBJECTS));
    }
    let begun = Instant::now();
    bed.start();
    row(
        "1,000,000 objects, 5,000 processes: start to ready",
        &format!("{:.1?}", begun.elapsed()),
    );
    let address = bed.metrics_address().unwrap_or(address);
    let tenants = bed
        .call(async |client| client.tenants().await)
        .expect("tenants");
    let held: u64 = tenants
        .iter()
        .flat_map(|tenant| &tenant.gpus)
        .map(|gpu| gpu.memory_used)
        .sum();
    assert_eq!(
        held,
        u64::from(PROCESSES) * HELD,
        "what the tenants are charged"
    );
    row("the same, idle: CPU", &idle(&bed));
    let (took, text) = scrape(&address);
    row(
        "the same: scrape of the metrics",
        &format!("{took:.1?}, {:.1} MB", text.len() as f64 / 1e6),
    );
    reload(&bed, &address, TENANTS, "the same");
    // The first process is one of the first tenant's, on the first GPU.
    let before = bed.usage("t0000", 0).memory_used;
    assert_eq!(before, u64::from(PROCESSES / TENANTS) * HELD);
    let victim = &mut processes[0];
    let begun = Instant::now();
    victim.kill().expect("killed");
    victim.wait().expect("waited for");
    while bed.usage("t0000", 0).memory_used != before - HELD {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "the charge of a process that ended is left"
        );
        thread::sleep(Duration::from_millis(1));
    }
    row(
        "the same: end of a process to its charge given back",
        &format!("{:.1?} at most", begun.elapsed()),
    );
    row("the same: resident memory, most so far", &resident(&bed));
    for process in &mut processes {
        let _ = process.kill();
    }
    let begun = Instant::now();
    for process in &mut processes {
        let _ = process.wait();
    }
    while bed
        .call(async |client| client.tenants().await)
        .expect("tenants")
        .iter()
        .flat_map(|tenant| &tenant.gpus)
        .any(|gpu| gpu.memory_used > 0)
    {
        assert!(begun.elapsed() < Duration::from_mins(2), "charges are left");
        thread::sleep(Duration::from_millis(50));
    }
    row(
        "the same: all 5,000 processes end at once, until nothing is charged",
        &format!("{:.1?}", begun.elapsed()),
    );
}

fn main() {
    println!("| what | measured |\n|---|---|");
    small();
    large();
}
