//! The simulated GPU as a whole: file system, libcuda and workload. Needs root, since it mounts.
#![allow(clippy::unwrap_used, reason = "a test panics")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Output, Stdio};
use std::time::{Duration, Instant};

use gpuquota_common::nvidia::{IoctlCmd, ctrl, disable_channels, nr, nvos54, status};
use gpuquota_simgpu::bytes::{put_u32, put_u64, u32_at};
use gpuquota_simgpu::fixture::{Options, SimGpu};
use gpuquota_simgpu::sim::Node;
use gpuquota_simgpu::state::State;

const GIB: u64 = 1 << 30;
const SOON: Duration = Duration::from_secs(1);
const CUDA_WAYS: [&str; 7] = [
    "malloc", "async", "pool", "create", "managed", "pitch", "host",
];
const RAW_WAYS: [&str; 10] = [
    "nvos64",
    "nvos21",
    "xfer",
    "odd-bits",
    "heap",
    "heap-range",
    "heap-tiled",
    "legacy",
    "dup",
    "subdevice",
];

fn sim() -> SimGpu {
    SimGpu::spawn(&Options::default()).unwrap()
}

fn text(output: &Output) -> String {
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A workload that takes its steps one by one.
struct Tenant {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Tenant {
    fn start(sim: &SimGpu, arguments: &[&str]) -> Self {
        let mut child = sim
            .tenant()
            .args(arguments)
            .arg("interactive")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn ask(&mut self, step: &str) -> String {
        self.say(step);
        self.answer()
    }

    fn say(&mut self, step: &str) {
        writeln!(self.input, "{step}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn every_way_of_allocating_takes_and_returns_memory() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    assert_eq!(tenant.ask("context"), "context");
    assert_eq!(tenant.ask("slice 1000"), "slice 1000");
    let before = sim.truth().unwrap().used();
    for way in CUDA_WAYS.into_iter().chain(RAW_WAYS) {
        let step = format!("alloc 1GiB --via {way} --count 2");
        assert_eq!(tenant.ask(&step), format!("allocated {}", 2 * GIB), "{way}");
        // Host memory is the host's; the legacy call gives a window on what is there.
        let takes_none = matches!(way, "host" | "legacy");
        let expected = if takes_none { 0 } else { 2 * GIB };
        assert_eq!(sim.truth().unwrap().used() - before, expected, "{way}");
        assert_eq!(tenant.ask("free"), format!("freed {}", 2 * GIB), "{way}");
        assert_eq!(sim.truth().unwrap().used(), before, "{way}");
    }
}

#[test]
fn a_full_card_is_out_of_memory_by_every_way() {
    let sim = SimGpu::spawn(&Options {
        memory: 2 * GIB,
        ..Options::default()
    })
    .unwrap();
    for way in CUDA_WAYS
        .into_iter()
        .filter(|way| !matches!(*way, "managed" | "host"))
    {
        let output = sim
            .tenant()
            .args(["alloc", "2GiB", "--via", way])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{way}: {output:?}");
        assert_eq!(
            text(&output).trim_end(),
            format!(
                "out of memory (CUDA_ERROR_OUT_OF_MEMORY) asking for {} after 0",
                2 * GIB
            ),
            "{way}"
        );
    }
    for way in RAW_WAYS.into_iter().filter(|way| *way != "legacy") {
        let output = sim
            .tenant()
            .args(["alloc", "3GiB", "--via", way])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{way}: {output:?}");
        assert!(text(&output).contains("NV_ERR_NO_MEMORY"), "{way}");
    }
    let output = sim
        .tenant()
        .args(["fill", "--chunk", "64MiB"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let got: u64 = text(&output)
        .trim_end()
        .strip_prefix("filled ")
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        got <= 2 * GIB - (520 << 20) && got > 2 * GIB - (600 << 20),
        "{got}"
    );
    assert!(sim.truth().unwrap().gpus[0].peak <= 2 * GIB);
}

#[test]
fn libcuda_reacts_to_statuses_as_the_real_one() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    // One refusal is asked again.
    sim.control("fail alloc 0x51").unwrap();
    assert_eq!(tenant.ask("alloc 1GiB"), format!("allocated {GIB}"));
    sim.control("fail alloc 0x51 2").unwrap();
    let line = tenant.ask("alloc 1GiB");
    assert!(
        line.starts_with("out of memory (CUDA_ERROR_OUT_OF_MEMORY)"),
        "{line}"
    );
    sim.control("fail alloc 0x1a").unwrap();
    let line = tenant.ask("alloc 1GiB");
    assert!(line.starts_with("out of memory"), "{line}");
    sim.control("fail alloc 0x1b").unwrap();
    let line = tenant.ask("alloc 1GiB");
    assert_eq!(line, "failed: cuMemAlloc_v2: CUDA_ERROR_NOT_PERMITTED");
    // Busy: it waits and asks again.
    sim.control("fail alloc 0x03 2").unwrap();
    let start = Instant::now();
    assert_eq!(tenant.ask("alloc 1GiB"), format!("allocated {GIB}"));
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(500) && waited < Duration::from_secs(5),
        "{waited:?}"
    );
}

#[test]
fn small_allocations_share_a_block() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    let before = sim.truth().unwrap();
    tenant.ask("alloc 1KiB --count 2048");
    let after = sim.truth().unwrap();
    assert_eq!(after.used() - before.used(), 2 << 20);
    assert_eq!(after.gpus[0].allocations - before.gpus[0].allocations, 1);
    tenant.ask("free");
    assert_eq!(sim.truth().unwrap().used(), before.used());
}

#[test]
fn a_killed_process_holds_nothing() {
    let sim = sim();
    for _ in 0..20 {
        let output = sim
            .tenant()
            .args(["script", "alloc 4GiB; die"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), None);
        let state = sim.wait_until(SOON, |state| state.used() == 0).unwrap();
        assert_eq!(state.used(), 0);
        assert_eq!(state.clients, []);
    }
}

#[test]
fn a_process_that_is_killed_while_it_waits_goes_at_once() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    tenant.say("burst --kernels 1000 --kernel-us 1000000");
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    drop(tenant);
    assert!(start.elapsed() < SOON);
    assert_eq!(
        sim.wait_until(SOON, |state| state.used() == 0)
            .unwrap()
            .used(),
        0
    );
}

#[test]
fn a_child_keeps_the_files_and_so_the_memory() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("alloc 1GiB");
    let line = tenant.ask("fork");
    let child: i32 = line.strip_prefix("forked ").unwrap().parse().unwrap();
    let used = sim.truth().unwrap().used();
    drop(tenant);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(sim.truth().unwrap().used(), used);
    // SAFETY: the child is ours by way of the tenant, and does nothing else.
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(
        sim.wait_until(SOON, |state| state.used() == 0)
            .unwrap()
            .used(),
        0
    );
}

#[test]
fn a_forked_child_cannot_use_the_parent_s_context() {
    let sim = sim();
    let script = "alloc 64MiB; spawn 'alloc 64MiB'";
    let output = sim.tenant().args(["script", script]).output().unwrap();
    // A new program can, with a context of its own.
    assert!(
        text(&output).contains("spawned exit status: 0; allocated 67108864"),
        "{output:?}"
    );
}

#[test]
fn devices_are_chosen_as_usual() {
    let sim = sim();
    let uuid = sim.truth().unwrap().gpus[1].uuid.clone();
    for visible in ["1", uuid.as_str()] {
        let output = sim
            .tenant()
            .env("CUDA_VISIBLE_DEVICES", visible)
            .args(["script", "alloc 1GiB; info"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let state = sim.truth().unwrap();
    assert_eq!(state.gpus[0].granted, 0);
    assert!(state.gpus[1].granted >= 2 * GIB);
    let output = sim
        .tenant()
        .args(["--device", "1", "alloc", "1GiB"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let granted = sim.truth().unwrap().gpus[1].granted;
    assert!(granted > state.gpus[1].granted + GIB);
    let output = sim
        .tenant()
        .args(["--device", "2", "alloc", "1GiB"])
        .output()
        .unwrap();
    assert_eq!(
        text(&output),
        "failed: cuDevicePrimaryCtxRetain: CUDA_ERROR_INVALID_DEVICE\n"
    );
}

/// A duplicate of a process's descriptor for a path.
fn duplicate(pid: u32, path: &std::path::Path) -> OwnedFd {
    let fd = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .find(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
        .unwrap();
    let fd: i32 = fd.file_name().to_str().unwrap().parse().unwrap();
    // SAFETY: system calls on numbers; the descriptors that they return are new.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(pidfd >= 0);
        let pidfd = OwnedFd::from_raw_fd(i32::try_from(pidfd).unwrap());
        let duplicate = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0);
        assert!(duplicate >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(i32::try_from(duplicate).unwrap())
    }
}

fn control(fd: &OwnedFd, client: u32, object: u32, cmd: u32, params: &mut [u8]) -> u32 {
    let mut arg = [0; 32];
    put_u32(&mut arg, nvos54::CLIENT, client);
    put_u32(&mut arg, nvos54::OBJECT, object);
    put_u32(&mut arg, nvos54::CMD, cmd);
    put_u64(&mut arg, nvos54::PARAMS, params.as_mut_ptr() as u64);
    put_u32(
        &mut arg,
        nvos54::PARAMS_SIZE,
        u32::try_from(params.len()).unwrap(),
    );
    let cmd = IoctlCmd {
        nr: nr::RM_CONTROL,
        size: nvos54::SIZE,
    };
    // SAFETY: `arg` is as long as the command says.
    let result = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            libc::c_ulong::from(cmd.to_raw()),
            arg.as_mut_ptr(),
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    u32_at(&arg, nvos54::STATUS)
}

fn compute_group(state: &State, pid: u32) -> (u32, u32) {
    let client = state
        .clients
        .iter()
        .find(|client| client.pid == pid)
        .unwrap();
    (client.handle, client.groups[0].handle)
}

fn set_disabled(fd: &OwnedFd, state: &State, pid: u32, disabled: bool) {
    let client = state
        .clients
        .iter()
        .find(|client| client.pid == pid)
        .unwrap();
    let mut arg = [0; disable_channels::SIZE];
    arg[disable_channels::DISABLE] = disabled.into();
    let channels: Vec<u32> = client
        .groups
        .iter()
        .flat_map(|group| group.channels.iter().map(|channel| channel.handle))
        .collect();
    assert_eq!(channels.len(), 20);
    put_u32(&mut arg, disable_channels::COUNT, 20);
    for (index, channel) in channels.into_iter().enumerate() {
        put_u32(
            &mut arg,
            disable_channels::CLIENTS + 4 * index,
            client.handle,
        );
        put_u32(&mut arg, disable_channels::CHANNELS + 4 * index, channel);
    }
    // The subdevice of the first GPU, as recorded.
    let subdevice = 0x5c00_0003;
    let status = control(
        fd,
        client.handle,
        subdevice,
        ctrl::FIFO_DISABLE_CHANNELS,
        &mut arg,
    );
    assert_eq!(status, status::OK);
}

#[test]
fn a_controller_acts_through_a_duplicate_and_only_so() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    let (client, group) = compute_group(&sim.truth().unwrap(), tenant.pid());
    let path = sim.devices().join(Node::Ctl.name());
    let own: OwnedFd = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap()
        .into();
    let mut slice = [0; 8];
    let status = control(&own, client, group, ctrl::TSG_GET_TIMESLICE, &mut slice);
    assert_eq!(status, status::INVALID_CLIENT);
    let theirs = duplicate(tenant.pid(), &path);
    let status = control(&theirs, client, group, ctrl::TSG_GET_TIMESLICE, &mut slice);
    assert_eq!((status, u64::from_ne_bytes(slice)), (status::OK, 2048));
    // The duplicate keeps the client alive.
    drop(tenant);
    std::thread::sleep(Duration::from_millis(200));
    assert_ne!(sim.truth().unwrap().used(), 0);
    drop(theirs);
    assert_eq!(
        sim.wait_until(SOON, |state| state.used() == 0)
            .unwrap()
            .used(),
        0
    );
}

fn completed(state: &State, pid: u32) -> u64 {
    let client = state
        .clients
        .iter()
        .find(|client| client.pid == pid)
        .unwrap();
    let channels = client.groups.iter().flat_map(|group| &group.channels);
    channels.map(|channel| channel.completed).sum()
}

#[test]
fn shares_of_time_follow_slices_and_freezes() {
    let sim = sim();
    let mut tenants = [Tenant::start(&sim, &[]), Tenant::start(&sim, &[])];
    for tenant in &mut tenants {
        tenant.ask("context");
    }
    let state = sim.truth().unwrap();
    let path = sim.devices().join(Node::Ctl.name());
    let fds = [0, 1].map(|index: usize| duplicate(tenants[index].pid(), &path));
    let pids = [0, 1].map(|index: usize| tenants[index].pid());
    for (index, slice) in [1000u64, 3000].into_iter().enumerate() {
        let (client, group) = compute_group(&state, pids[index]);
        let mut slice = slice.to_ne_bytes();
        let status = control(
            &fds[index],
            client,
            group,
            ctrl::TSG_SET_TIMESLICE,
            &mut slice,
        );
        assert_eq!(status, status::OK);
    }
    for tenant in &mut tenants {
        tenant.say("launch --for 4s --kernel-us 500");
    }
    let measure = |span: Duration| {
        let before = sim.truth().unwrap();
        std::thread::sleep(span);
        let after = sim.truth().unwrap();
        let share = |pid| completed(&after, pid) - completed(&before, pid);
        (share(pids[0]), share(pids[1]))
    };
    std::thread::sleep(Duration::from_millis(300));
    let (a, b) = measure(Duration::from_millis(1500));
    let share = a * 1000 / (a + b);
    assert!((230..=270).contains(&share), "{a}:{b}");
    set_disabled(&fds[0], &state, pids[0], true);
    let (a, b) = measure(Duration::from_millis(500));
    assert_eq!(a, 0);
    assert!(b > 900, "{b}");
    set_disabled(&fds[0], &state, pids[0], false);
    let (a, _) = measure(Duration::from_millis(500));
    assert!(a > 100, "{a}");
    for tenant in &mut tenants {
        assert!(tenant.answer().starts_with("launched "));
    }
}

#[test]
fn launches_keep_their_rate() {
    let sim = sim();
    for way in ["kernel", "ex", "cooperative", "graph"] {
        let output = sim
            .tenant()
            .args(["launch", "--rate", "2000/s", "--for", "500ms", "--via", way])
            .output()
            .unwrap();
        let line = text(&output);
        let launched: u64 = line.split(' ').nth(1).unwrap().parse().unwrap();
        assert!((900..=1001).contains(&launched), "{way}: {line}");
    }
}

#[test]
fn an_xid_ends_the_work_of_its_process() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    sim.control(&format!("xid 0 31 {}", tenant.pid())).unwrap();
    assert_eq!(
        tenant.ask("launch --for 1s"),
        "failed: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"
    );
    assert_eq!(sim.truth().unwrap().gpus[0].xids.len(), 1);
}

#[test]
fn the_driver_can_be_slowed_down() {
    let sim = sim();
    let mut tenant = Tenant::start(&sim, &[]);
    tenant.ask("context");
    let delay = Duration::from_secs(2);
    sim.control(&format!("delay 0x2b {}", delay.as_millis()))
        .unwrap();
    let start = Instant::now();
    assert_eq!(tenant.ask("alloc 1GiB"), format!("allocated {GIB}"));
    assert!(start.elapsed() >= delay);
    sim.control("delay 0x2b 0").unwrap();
    let start = Instant::now();
    tenant.ask("alloc 1GiB");
    assert!(start.elapsed() < delay);
    assert!(sim.control("delay nonsense 3").is_err());
}

#[test]
fn random_sequences_end_at_zero() {
    let sim = sim();
    for seed in 0..10 {
        let script = format!("random --seed {seed} --ops 200; free");
        let output = sim.tenant().args(["script", &script]).output().unwrap();
        assert!(output.status.success(), "seed {seed}: {output:?}");
        let state = sim.wait_until(SOON, |state| state.used() == 0).unwrap();
        assert_eq!(state.used(), 0, "seed {seed}");
    }
    let state = sim.truth().unwrap();
    assert!(state.gpus[0].peak <= state.gpus[0].capacity);
}

#[test]
fn files_have_the_same_inode_in_every_server() {
    let (first, second) = (sim(), sim());
    for node in [Node::Ctl, Node::Gpu(0), Node::Gpu(1), Node::Uvm] {
        let (a, b) = (
            first.identity(node).unwrap(),
            second.identity(node).unwrap(),
        );
        assert_eq!(a.1, b.1);
        assert_ne!(a.0, b.0);
    }
}

#[test]
fn nothing_is_left_however_the_server_ends() {
    let mounted = |path: &std::path::Path| {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.contains(path.to_str().unwrap())
    };
    for signal in [0, libc::SIGTERM, libc::SIGKILL] {
        let sim = sim();
        let path = sim.devices().to_owned();
        assert!(mounted(&path));
        let mut tenant = Tenant::start(&sim, &[]);
        tenant.ask("context");
        if signal != 0 {
            // SAFETY: the server is a child of this test.
            unsafe { libc::kill(i32::try_from(sim.server_pid()).unwrap(), signal) };
            std::thread::sleep(Duration::from_millis(200));
            assert!(tenant.ask("alloc 1GiB").starts_with("failed: "));
        }
        if signal == libc::SIGTERM {
            assert!(!mounted(&path));
        }
        drop(sim);
        assert!(!mounted(&path));
        assert!(!path.exists());
    }
}
