//! A test bed: simulated GPUs, a daemon with a policy, cgroups, tenants that are told what to do.
//!
//! Needs root, tracefs, a BPF file system and cgroup v2 (`scripts/prepare-host.sh` mounts what is missing).
//! Everything that a bed makes goes with it: processes, mounts, pins, cgroups.
#![allow(
    clippy::missing_panics_doc,
    reason = "a bed that cannot do what a test asks ends the test, with the reason"
)]

pub mod look;

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::map::{counter, kind};
use gpuquota_enforcer::{
    cgroup::Hierarchy,
    client::Client,
    config::Bus,
    control::{Tenant, TenantGpu},
    kernel::PinDir,
};
use gpuquota_simgpu::fixture::{Options, SimGpu};

/// How long anything may take that should happen at once, also on an emulated processor that shares a busy host.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// How long calls wait for a daemon that is gone.
const PATIENT: &str = "60s";
/// How long a daemon may take to start: without optimization and on an emulated processor it reads kernel types for long.
const STARTING: Duration = Duration::from_mins(5);

/// Beds of this process so far: each has names of its own.
static BEDS: AtomicU32 = AtomicU32::new(0);

/// Everything that one test needs.
pub struct Bed {
    /// The GPUs.
    pub sim: SimGpu,
    daemon: Option<Child>,
    hierarchy: Hierarchy,
    name: String,
    binaries: PathBuf,
    /// For the daemon, beside that of the GPUs.
    environment: Vec<(String, String)>,
    runtime: tokio::runtime::Runtime,
}

impl Bed {
    /// Simulated GPUs and a daemon with this policy. Contexts take nothing that libcuda does not allocate, so that what is
    /// charged is exactly what was asked for.
    ///
    /// `@` in the policy stands for the bed's own cgroup, such as `/gqbed-4711-1.slice`.
    pub fn new(policy: &str) -> Self {
        let options = Options {
            context_hidden: 0,
            ..Options::default()
        };
        Self::with(&options, policy)
    }

    /// As [`Bed::new`], on other GPUs.
    pub fn with(options: &Options, policy: &str) -> Self {
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        let sim = SimGpu::spawn(options).expect("simulated GPUs");
        let binaries = built_directory();
        let mut bed = Self {
            sim,
            daemon: None,
            hierarchy: Hierarchy::open(None).expect("cgroup v2"),
            name: format!("gqbed-{}-{number}.slice", std::process::id()),
            binaries,
            environment: Vec::new(),
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime"),
        };
        bed.hierarchy.create(&bed.cgroup("")).expect("a cgroup");
        bed.write_policy(policy);
        bed.write_settings();
        bed.start();
        bed
    }

    /// The path of a cgroup of this bed.
    pub fn cgroup(&self, below: &str) -> String {
        format!("/{}{below}", self.name)
    }

    /// The mounted cgroups.
    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    fn scratch(&self, name: &str) -> PathBuf {
        self.sim.scratch().join(name)
    }

    /// Where the daemon listens.
    pub fn bus(&self) -> String {
        format!("peer:{}", self.scratch("run/bus").display())
    }

    /// Where the daemon pins its maps.
    pub fn bpf_directory(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(self.name.trim_end_matches(".slice"))
    }

    /// Replaces the policy on disk; `@` as in [`Bed::new`].
    pub fn write_policy(&self, policy: &str) {
        let folder = self.scratch("etc");
        fs::create_dir_all(&folder).expect("a folder");
        let text = policy.replace('@', &self.cgroup(""));
        fs::write(folder.join("50-test.toml"), text).expect("a policy");
    }

    fn write_settings(&self) {
        let scratch = self.sim.scratch();
        let text = format!(
            "bus = \"{bus}\"\n\
             runtime-directory = \"{scratch}/run\"\n\
             bpf-directory = \"{bpf}\"\n\
             [policy]\nvendor = \"{scratch}/none\"\nadmin = \"{scratch}/etc\"\n\
             [gpu]\ndevice-dir = \"{devices}\"\nnvml-library = \"{libraries}/libnvidia-ml.so.1\"\n\
             [faults]\nsource = \"kernel-log\"\nkernel-log = \"{kernel_log}\"\n\
             [enforcement]\nreconcile-interval = \"200ms\"\nlistener-timeout = \"{PATIENT}\"\n",
            kernel_log = self.sim.kernel_log().display(),
            bus = self.bus(),
            scratch = scratch.display(),
            bpf = self.bpf_directory().display(),
            devices = self.sim.devices().display(),
            libraries = self.sim.libraries().display(),
        );
        fs::write(self.scratch("gpuquota.toml"), text).expect("settings");
    }

    /// The daemon's settings.
    pub fn settings(&self) -> PathBuf {
        self.scratch("gpuquota.toml")
    }

    /// Where the programs of this build are.
    pub fn binaries(&self) -> &Path {
        &self.binaries
    }

    /// Appends to the daemon's settings; takes effect at the next start.
    pub fn add_settings(&self, text: &str) {
        let path = self.settings();
        let settings = fs::read_to_string(&path).expect("settings") + text;
        fs::write(path, settings).expect("settings");
    }

    /// How long calls wait for a daemon that is gone, from the next start on. At first it is longer than any start takes.
    pub fn set_listener_timeout(&self, timeout: &str) {
        let path = self.scratch("gpuquota.toml");
        let settings = fs::read_to_string(&path).expect("settings");
        let changed = settings.replace(
            &format!("listener-timeout = \"{PATIENT}\""),
            &format!("listener-timeout = \"{timeout}\""),
        );
        assert_ne!(changed, settings, "set already");
        fs::write(path, changed).expect("settings");
    }

    /// Restarts the daemon with metrics, and returns where they are.
    pub fn offer_metrics(&mut self) -> String {
        self.signal_daemon(libc::SIGTERM);
        self.add_settings("[metrics]\naddress = \"127.0.0.1:0\"\n");
        self.start();
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(address) = self.metrics_address() {
                return address;
            }
            assert!(Instant::now() < end, "no metrics:\n{}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where the daemon that was started last offers metrics, if it has said so.
    pub fn metrics_address(&self) -> Option<String> {
        self.log()
            .lines()
            .rev()
            .find_map(|line| line.split("metrics at http://").nth(1))
            .and_then(|rest| rest.split('/').next().map(str::to_owned))
    }

    /// A command of this build, in the environment of the GPUs.
    pub fn command(&self, binary: &str) -> Command {
        self.sim.command(self.binaries.join(binary))
    }

    /// `simtenant` in tenant `a`, by itself or, for the backend that needs one, with the supervisor above it.
    pub fn workload_under(&self, backend: &str, arguments: &[&str]) -> Actor {
        let mut command = if backend == "notify" {
            self.run_command("a")
        } else {
            let folder = self
                .hierarchy
                .folder(&self.cgroup("/a.slice"))
                .expect("a folder");
            let mut command = self.command("/bin/sh");
            command
                .args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""])
                .arg(folder);
            command
        };
        command.arg(binary("simtenant")).args(arguments);
        Actor::start(command)
    }

    /// A variable in the environment of daemons that are started from now on.
    pub fn set_environment(&mut self, name: &str, value: impl Into<String>) {
        self.environment.push((name.into(), value.into()));
    }

    fn daemon_command(&self) -> Command {
        let mut command = self.command("gpuquotad");
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.scratch("daemon.log"))
            .expect("a log");
        command
            .arg("--config")
            .arg(self.scratch("gpuquota.toml"))
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stderr(log);
        command
    }

    /// Starts the daemon and waits until it answers.
    pub fn start(&mut self) {
        assert!(self.daemon.is_none(), "the daemon runs");
        self.daemon = Some(self.daemon_command().spawn().expect("gpuquotad"));
        let end = Instant::now() + STARTING;
        while self
            .try_call(async |client| client.version().await)
            .is_none()
        {
            let ended = self
                .daemon
                .as_mut()
                .and_then(|daemon| daemon.try_wait().ok().flatten());
            assert!(
                ended.is_none() && Instant::now() < end,
                "the daemon does not start:\n{}",
                self.log()
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the daemon wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch("daemon.log")).unwrap_or_default()
    }

    /// Whether a daemon was started and not ended.
    pub fn is_running(&self) -> bool {
        self.daemon.is_some()
    }

    /// The daemon's process.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("the daemon runs").id()
    }

    /// Ends the daemon by a signal and waits for its end.
    pub fn signal_daemon(&mut self, signal: i32) {
        let mut daemon = self.daemon.take().expect("the daemon runs");
        // SAFETY: a signal to our own child, which has not been waited for.
        unsafe { libc::kill(daemon.id().cast_signed(), signal) };
        daemon.wait().expect("waited for");
    }

    /// Takes every program off the kernel, as an admin does who removes the daemon.
    pub fn detach(&self) {
        let status = self.daemon_command().arg("--detach-all").status();
        assert!(status.expect("gpuquotad").success(), "{}", self.log());
    }

    /// Asks the daemon; `None` if it does not answer.
    fn try_call<T, E>(&self, ask: impl AsyncFnOnce(Client) -> Result<T, E>) -> Option<T> {
        let bus: Bus = self.bus().parse().expect("an address");
        self.runtime.block_on(async {
            let client = Client::connect(&bus).await.ok()?;
            ask(client).await.ok()
        })
    }

    /// Asks the daemon.
    pub fn call<T, E: std::fmt::Debug>(
        &self,
        ask: impl AsyncFnOnce(Client) -> Result<T, E>,
    ) -> Result<T, E> {
        let bus: Bus = self.bus().parse().expect("an address");
        self.runtime.block_on(async {
            let end = Instant::now() + PATIENCE;
            // The daemon gives a client a few seconds to introduce itself, which an emulated one does not always make.
            let client = loop {
                match Client::connect(&bus).await {
                    Ok(client) => break client,
                    Err(error) => assert!(Instant::now() < end, "{error}"),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            ask(client).await
        })
    }

    /// A tenant as the daemon tells it.
    pub fn tenant(&self, name: &str) -> Tenant {
        self.call(async |client| client.tenant(name).await)
            .expect("a tenant")
    }

    /// A tenant on one GPU.
    pub fn usage(&self, name: &str, gpu: u32) -> TenantGpu {
        self.tenant(name)
            .gpus
            .into_iter()
            .find(|found| found.gpu == gpu)
            .expect("a GPU")
    }

    /// Waits until a tenant's charge on a GPU is what `wanted` says; returns the last one in any case.
    pub fn wait_usage(&self, name: &str, gpu: u32, wanted: impl Fn(u64) -> bool) -> u64 {
        let end = Instant::now() + PATIENCE;
        loop {
            let used = self.usage(name, gpu).memory_used;
            if wanted(used) || Instant::now() >= end {
                return used;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until what the daemon tells of a tenant on a GPU is what `wanted` says; returns the last in any case.
    pub fn wait_tenant(
        &self,
        name: &str,
        gpu: u32,
        wanted: impl Fn(&TenantGpu) -> bool,
    ) -> TenantGpu {
        let end = Instant::now() + PATIENCE;
        loop {
            let usage = self.usage(name, gpu);
            if wanted(&usage) || Instant::now() >= end {
                return usage;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Every number of the ledger that should be zero once nobody holds anything: name and value.
    pub fn residue(&self) -> Vec<(String, u64)> {
        let state = self.state();
        let mut found = Vec::new();
        let mut add = |name: String, value: &serde_json::Value| {
            let value = value.as_u64().unwrap_or(u64::MAX);
            if value > 0 {
                found.push((name, value));
            }
        };
        let mut reserved = false;
        for list in ["objects", "accounts", "usage"] {
            for item in state[list].as_array().expect("a list") {
                match list {
                    "usage" => {
                        add(format!("usage {item}"), &item["memory"]);
                        add(format!("claim {item}"), &item["claim"]);
                        reserved |= item["reserved"] != 0;
                    }
                    "accounts" => add(format!("account {item}"), &item["bytes"]),
                    _ => add(format!("object {item}"), &serde_json::json!(1)),
                }
            }
        }
        for card in state["cards"].as_array().expect("a list") {
            if !reserved {
                add(format!("card {card}"), &card["claim"]);
            }
        }
        add("calls in flight".into(), &state["in_flight"]);
        add("admissions".into(), &state["admitted"]);
        found
    }

    /// A counter of the programs, one of [`gpuquota_common::map::counter`].
    pub fn counter(&self, index: u32) -> u64 {
        self.state()["counters"][index as usize]
            .as_u64()
            .expect("a counter")
    }

    /// Memory of the cards in the ledger, by client, handle and bytes, that the driver does not have.
    pub fn only_charged(&self) -> BTreeSet<(u64, u64, u64)> {
        let state = self.state();
        &charged(&state) - &self.held()
    }

    /// What explains a ledger that is not the driver's truth: memory that only one of them has, what the processes are charged,
    /// and how often something was passed over.
    pub fn differences(&self) -> String {
        let state = self.state();
        let (charged, held) = (charged(&state), self.held());
        let [entries, exits] = [counter::LATE_ENTRIES, counter::LATE_EXITS]
            .map(|index| state["counters"][index as usize].to_string());
        format!(
            "client, handle and bytes that are only charged: {:x?}, only held: {:x?}; accounts {}; usage {}; {entries} late \
             entries, {exits} late exits",
            &charged - &held,
            &held - &charged,
            state["accounts"],
            state["usage"],
        )
    }

    /// Everything that the daemon knows.
    pub fn state(&self) -> serde_json::Value {
        self.call(async |client| client.dump_state().await)
            .expect("the state")
    }

    /// Memory that the driver has, by client, handle and bytes.
    fn held(&self) -> BTreeSet<(u64, u64, u64)> {
        let truth = self.sim.truth().expect("the truth");
        truth
            .clients
            .iter()
            .flat_map(|client| {
                client
                    .memory
                    .iter()
                    .map(|memory| (client.handle.into(), memory.handle.into(), memory.bytes))
            })
            .collect()
    }

    /// Waits until nothing is left in the ledger, and tells what is.
    pub fn wait_for_nothing(&self, patience: Duration) -> Vec<(String, u64)> {
        let end = Instant::now() + patience;
        loop {
            let left = self.residue();
            if left.is_empty() || Instant::now() >= end {
                return left;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// What systemd runs when the daemon has ended.
    pub fn release_all(&self) -> Output {
        let mut command = self.daemon_command();
        command
            .arg("--release-all")
            .output()
            .expect("gpuquotad --release-all")
    }

    /// Takes everything out of the kernel; the daemon must not run.
    pub fn detach_all(&self) {
        let mut command = self.daemon_command();
        let ended = command.arg("--detach-all").status();
        assert!(ended.expect("gpuquotad --detach-all").success());
    }

    /// `gpuquotactl` with these arguments, to its end.
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        self.command("gpuquotactl")
            .args(["--bus", &self.bus()])
            .args(arguments)
            .output()
            .expect("gpuquotactl")
    }

    /// Bytes of managed memory that are on the first GPU and not on the host.
    pub fn managed_on_gpu(&self) -> u64 {
        let truth = self.sim.truth().expect("the truth");
        let processes = truth.gpus[0].processes.values();
        processes.map(|process| process.managed_bytes).sum()
    }

    /// `gpuquotactl` is expected to fail and to say this.
    pub fn refuses(&self, arguments: &[&str], text: &str) {
        let output = self.ctl(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(text), "{said}");
    }

    /// `gpuquotactl run` in a tenant; the command's own arguments are still to be added.
    pub fn run_command(&self, tenant: &str) -> Command {
        let mut command = self.command("gpuquotactl");
        command
            .args(["--bus", &self.bus(), "run", "--socket"])
            .arg(self.scratch("run/listener.sock"))
            .args(["--tenant", tenant, "--"]);
        command
    }

    /// Runs a workload in a tenant to its end.
    pub fn run(&self, tenant: &str, arguments: &[&str]) -> Output {
        self.run_command(tenant)
            .arg(self.binaries.join("simtenant"))
            .args(arguments)
            .output()
            .expect("gpuquotactl run")
    }

    /// A workload in a tenant that does what it is told, line by line.
    pub fn actor(&self, tenant: &str) -> Actor {
        let mut command = self.run_command(tenant);
        command
            .arg(self.binaries.join("simtenant"))
            .arg("interactive");
        Actor::start(command)
    }

    /// A workload in a tenant that speaks to the driver's files itself.
    pub fn raw_actor(&self, tenant: &str) -> Actor {
        let mut command = self.run_command(tenant);
        command
            .arg(self.binaries.join("simtenant"))
            .args(["--raw", "interactive"]);
        Actor::start(command)
    }

    /// A workload in no tenant, as far as we are concerned, that does what it is told.
    pub fn stranger(&self) -> Actor {
        let mut command = self.sim.tenant();
        command.arg("interactive");
        Actor::start(command)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
        if let Some(daemon) = &mut self.daemon {
            // It is ended one way or the other; what it leaves is removed below.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        self.daemon = None;
        let _ = PinDir::remove_all(&self.bpf_directory());
        remove_cgroups(&self.hierarchy, &self.cgroup(""));
    }
}

/// Memory of the cards in the ledger, by client, handle and bytes.
fn charged(state: &serde_json::Value) -> BTreeSet<(u64, u64, u64)> {
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    state["objects"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|object| number(&object["kind"]) == u64::from(kind::MEMORY))
        .map(|object| {
            let [client, handle, bytes] =
                ["client", "handle", "bytes"].map(|key| number(&object[key]));
            (client, handle, bytes)
        })
        .filter(|(.., bytes)| *bytes > 0)
        .collect()
}

/// Kills what is left in these cgroups and removes them.
fn remove_cgroups(hierarchy: &Hierarchy, top: &str) {
    let end = Instant::now() + PATIENCE;
    let mut cgroups = hierarchy.walk(top);
    cgroups.sort_by_key(|path| std::cmp::Reverse(path.len()));
    for path in cgroups {
        let Ok(folder) = hierarchy.folder(&path) else {
            continue;
        };
        while fs::remove_dir(&folder).is_err() && folder.exists() && Instant::now() < end {
            for pid in fs::read_to_string(folder.join("cgroup.procs"))
                .unwrap_or_default()
                .lines()
                .filter_map(|line| line.parse().ok())
            {
                // SAFETY: processes of this test's own cgroups.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where cargo put the binaries.
fn built_directory() -> PathBuf {
    let test = std::env::current_exe().expect("the running test");
    test.ancestors()
        .find(|folder| folder.join("gpuquotad").exists())
        .unwrap_or_else(|| {
            panic!(
                "gpuquotad is not built beside {}: run `cargo build` first",
                test.display()
            )
        })
        .to_owned()
}

/// A workload that does what it is told.
pub struct Actor {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Actor {
    /// Starts a workload whose command ends in `interactive`.
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a workload");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self {
            child,
            input,
            output,
        }
    }

    /// Gives an order without waiting for the answer.
    pub fn order(&mut self, step: &str) {
        let input = self.input.as_mut().expect("still running");
        // A workload that is gone answers nothing, which `answer` shows.
        let _ = writeln!(input, "{step}").and_then(|()| input.flush());
    }

    /// The next answer; empty if the workload has ended.
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("readable");
        line.trim_end().to_owned()
    }

    /// Gives an order and waits for the answer.
    pub fn tell(&mut self, step: &str) -> String {
        self.order(step);
        self.answer()
    }

    /// Process id of what was started: the runner, for a workload in a tenant.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Process id of the workload behind its runner.
    pub fn workload_pid(&self) -> u32 {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(pid) = child_of(self.child.id()) {
                return pid;
            }
            assert!(
                Instant::now() < end,
                "no workload behind {}",
                self.child.id()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the workload, not its runner.
    pub fn kill_workload(&self) {
        // SAFETY: a process that this test started.
        unsafe { libc::kill(self.workload_pid().cast_signed(), libc::SIGKILL) };
    }

    /// Waits for its end without telling it to end, and returns how that was.
    pub fn ended(&mut self) -> ExitStatus {
        self.child.wait().expect("waited for")
    }

    /// Waits for its end without telling it to end, and returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("waited for").code()
    }

    /// Ends the input and waits for the end; returns the exit code, or `None` for a signal.
    pub fn finish(mut self) -> Option<i32> {
        drop(self.input.take());
        self.child.wait().expect("waited for").code()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        drop(self.input.take());
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            thread::sleep(Duration::from_millis(20));
        }
        // Gone already is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Median of a benchmark of a group in nanoseconds, as criterion has just saved it.
pub fn median(group: &str, name: &str) -> Option<f64> {
    let target = std::env::var("CARGO_TARGET_DIR")
        .unwrap_or_else(|_| format!("{}/../../target", env!("CARGO_MANIFEST_DIR")));
    let path = format!(
        "{target}/criterion/{group}/{}/new/estimates.json",
        name.replace('/', "_")
    );
    let text = fs::read_to_string(path).ok()?;
    let estimates: serde_json::Value = serde_json::from_str(&text).ok()?;
    estimates["median"]["point_estimate"].as_f64()
}

/// What a daemon's metrics endpoint answers, head and all.
pub fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the endpoint");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

/// A tool that `scripts/setup.sh` has unpacked beside this build, or that the host has.
pub fn tool(name: &str) -> PathBuf {
    let unpacked = built_directory()
        .parent()
        .map(|target| target.join("tools/usr/bin").join(name));
    unpacked
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

/// Path of a binary of this build.
pub fn binary(name: &str) -> PathBuf {
    built_directory().join(name)
}

/// The first child of a process. Not from `/proc/PID/task/PID/children`, which small kernels lack.
fn child_of(parent: u32) -> Option<u32> {
    let parent = parent.to_string();
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The state, and then the parent, follow the name.
        let (_, after) = stat.rsplit_once(')')?;
        (after.split_whitespace().nth(1)? == parent).then_some(pid)
    })
}
