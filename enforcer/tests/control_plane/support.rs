//! A daemon without kernel side, and the buses to serve it on.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use gpuquota_enforcer::{
    config::Bus,
    control::{
        Backend, BackendState, Control, ControlError, Finding, Gpu, Held, Notice, PolicyLoaded,
        ProcessUse, QuotaChange, Server, Tenant, TenantGpu, Uncontrolled, Verdict,
        idle::{IdleGaps, IdleGpu, IdleProcess, IdleReport, IdleShare, IdleStack, IdleState},
        insight::{HeatRow, MemoryHistory},
        leaks::{LeakFrame, LeakGaps, LeakProcess, LeakReport, LeakSite, Target},
        memory::TenantMemory,
        profile::{ProbeCosts, ProfileGaps, ProfileKernel, ProfileProcess, ProfileReport},
        serve,
    },
    idle::State,
};
use gpuquota_policy::{HostGpu, Layer, Policy, Source};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::broadcast};

pub const GIB: u64 = 1 << 30;
pub const NOBODY: u32 = 65534;

/// A [`Control`] that keeps its state in memory and parses values as the real one does.
pub struct FakeControl {
    pub tenants: Mutex<Vec<Tenant>>,
    pub generation: AtomicU64,
    /// Set: what `reload` answers.
    pub broken_policy: Mutex<Option<String>>,
    /// Calls of `tenants` that were made.
    pub listed: AtomicUsize,
    /// Calls of `doctor` that are running, the most there were, and how long each takes.
    pub running: AtomicUsize,
    pub most_running: AtomicUsize,
    pub doctor_takes: Mutex<Duration>,
    notices: broadcast::Sender<Notice>,
}

impl FakeControl {
    pub fn new() -> Self {
        Self {
            tenants: Mutex::new(tenants()),
            generation: AtomicU64::new(1),
            broken_policy: Mutex::new(None),
            listed: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            doctor_takes: Mutex::new(Duration::ZERO),
            notices: broadcast::channel(256).0,
        }
    }

    pub fn happens(&self, notice: Notice) {
        // Nobody may be listening.
        let _ = self.notices.send(notice);
    }

    pub fn memory_max(&self, tenant: &str, gpu: usize) -> Option<u64> {
        self.tenant(tenant).expect("tenant").gpus[gpu].memory_max
    }
}

/// What the policy crate makes of one `memory.` value.
fn memory_value(key: &str, value: &str) -> Result<Option<u64>, ControlError> {
    let text = format!("[tenant.x]\ncgroup = \"/x\"\n{key} = \"{value}\"\n");
    let source = Source::new("set-property", Layer::Admin, text);
    let loaded = Policy::load(&[source], None)
        .map_err(|problems| ControlError::BadProperty(problems.to_string()))?;
    let gpu = HostGpu {
        index: 0,
        uuid: String::new(),
        memory: 80 * GIB,
    };
    let memory = loaded.policy.effective("x", &gpu).expect("tenant x").memory;
    Ok(if key == "memory.max" {
        memory.max
    } else {
        memory.high
    })
}

/// A look that has found something.
fn leaks(target: &Target) -> LeakReport {
    let frame = |function: Option<&str>| LeakFrame {
        function: function.map(str::to_owned),
        file: "/opt/train".into(),
        address: 0x1234,
    };
    LeakReport {
        target: target.clone(),
        running: false,
        elapsed_usec: 60_000_000,
        limit_usec: 60_000_000,
        processes: vec![LeakProcess {
            pid: 4242,
            comm: "train".into(),
            files: vec!["/usr/lib/libcuda.so.1".into()],
            ended: false,
            trouble: None,
        }],
        sites: vec![LeakSite {
            call: "cuMemAlloc_v2".into(),
            frames: vec![frame(Some("keep_activations")), frame(None)],
            cut: true,
            live: 60,
            live_bytes: 60 << 20,
            peak_bytes: 60 << 20,
            allocations: 61,
            allocated_bytes: 61 << 20,
            oldest_usec: Some(59_000_000),
            median_usec: Some(30_000_000),
            growth: Some(f64::from(1 << 20)),
            survival: vec![(1000, 1.0), (4000, 0.98)],
        }],
        gaps: LeakGaps {
            lost: 3,
            older_frees: 2,
            unnamed: vec!["/opt/train".into()],
            ..LeakGaps::default()
        },
    }
}

/// A profile with something unusual in it.
fn profile(target: &Target) -> ProfileReport {
    let kernel = |name: &str, symbol: Option<&str>, launches| ProfileKernel {
        tenant: "vision".into(),
        name: name.into(),
        symbol: symbol.map(str::to_owned),
        launches,
        gaps: vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, launches - 1],
        durations: Vec::new(),
        late: 0,
        usual_usec: None,
        anomalies: 0,
        unusual: false,
    };
    let mut gemm = kernel("gemm<float>(int)", Some("_Z4gemmIfEvi"), 12_000);
    gemm.durations = vec![0; 16];
    gemm.durations.extend([90, 9, 0, 0, 1]);
    gemm.usual_usec = Some(50.5);
    gemm.anomalies = 1;
    gemm.unusual = true;
    ProfileReport {
        target: target.clone(),
        running: true,
        always: false,
        elapsed_usec: 12_000_000,
        limit_usec: Some(30_000_000),
        costs: ProbeCosts {
            entry_nsec: 900,
            stepped_nsec: 4_000,
            return_nsec: 1_200,
        },
        processes: vec![ProfileProcess {
            pid: 4242,
            comm: "train".into(),
            tenant: "vision".into(),
            files: vec!["/usr/lib/libcuda.so.1".into()],
            ended: false,
            cost: 0.0081,
            budget: 0.01,
            covered: 0.25,
            names_covered: 1.0,
            trouble: None,
        }],
        kernels: vec![gemm, kernel("kernel@0x5555aa10", None, 7)],
        gaps: ProfileGaps {
            lost: 2,
            ..ProfileGaps::default()
        },
    }
}

/// A look at threads that has found something.
fn idle(target: &Target) -> IdleReport {
    let share = |pid, context, used_usec, spent: [(u64, u64, u64); State::COUNT]| IdleShare {
        pid,
        context,
        known_usec: 10_000_000,
        used_usec,
        others_usec: 500_000,
        idle_usec: 6_000_000,
        states: State::ALL
            .into_iter()
            .zip(spent)
            .map(|(state, (least_usec, idle_usec, most_usec))| IdleState {
                state,
                time_usec: most_usec,
                idle_usec,
                least_usec,
                most_usec,
            })
            .collect(),
    };
    let none = (0, 0, 0);
    let main = [
        (0, 600_000, 1_000_000),
        none,
        (4_000_000, 4_800_000, 5_400_000),
        none,
        (300_000, 600_000, 900_000),
        none,
        none,
        none,
    ];
    let worker = [
        (6_000_000, 6_000_000, 6_000_000),
        none,
        none,
        none,
        none,
        none,
        none,
        none,
    ];
    let frame = |function: Option<&str>| LeakFrame {
        function: function.map(str::to_owned),
        file: "/opt/train".into(),
        address: 0x1234,
    };
    let process = |pid: u32, comm: &str| IdleProcess {
        pid,
        comm: comm.into(),
        ended: false,
        cost: 0.0098,
        budget: 0.01,
        covered: 0.42,
    };
    IdleReport {
        target: target.clone(),
        running: false,
        elapsed_usec: 10_000_000,
        limit_usec: 10_000_000,
        gpus: vec![
            IdleGpu {
                gpu: 0,
                step_usec: Some(100_000),
                untold_usec: 3_000_000,
                shares: vec![
                    share(4242, true, 3_500_000, main),
                    share(4243, false, 0, worker),
                ],
                trouble: None,
            },
            IdleGpu {
                gpu: 1,
                step_usec: None,
                untold_usec: 0,
                shares: Vec::new(),
                trouble: Some("NVML does not tell its use by process: not supported".into()),
            },
        ],
        processes: vec![process(4242, "train"), process(4243, "loader")],
        stacks: vec![IdleStack {
            pid: 4242,
            thread: "main".into(),
            state: State::Io,
            frames: vec![frame(Some("read")), frame(Some("next_batch")), frame(None)],
            cut: true,
            idle_usec: 4_700_000,
        }],
        gaps: IdleGaps {
            lost: 3,
            no_samples: Some("program tick: perf_event_open: not permitted".into()),
            unnamed: vec!["/opt/train".into()],
            ..IdleGaps::default()
        },
    }
}

impl Control for FakeControl {
    fn version(&self) -> String {
        "1.2.3".into()
    }

    fn backends(&self) -> Vec<Backend> {
        let backend = |name: &str, state, reason: &str| Backend {
            name: name.into(),
            state,
            reason: reason.into(),
        };
        vec![
            backend(
                "override",
                BackendState::Unavailable,
                "the kernel lacks BPF_KPROBE_OVERRIDE",
            ),
            backend("notify", BackendState::Active, "listeners are accepted"),
        ]
    }

    fn policy_generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    fn gpus(&self) -> Vec<Gpu> {
        (0..2)
            .map(|index| Gpu {
                index,
                uuid: uuid(index),
                name: "Simulated GPU".into(),
                memory_total: 80 * GIB,
                memory_used: (index == 0).then_some(13 * GIB),
            })
            .collect()
    }

    fn tenants(&self) -> Vec<Tenant> {
        self.listed.fetch_add(1, Ordering::SeqCst);
        self.tenants.lock().expect("lock").clone()
    }

    fn tenant(&self, name: &str) -> Result<Tenant, ControlError> {
        let tenants = self.tenants.lock().expect("lock");
        let found = tenants.iter().find(|tenant| tenant.name == name);
        found
            .cloned()
            .ok_or_else(|| ControlError::NoSuchTenant(name.into()))
    }

    fn tenant_by_pid(&self, pid: u32) -> Result<Tenant, ControlError> {
        match pid {
            4242 => self.tenant("vision"),
            1 => Err(ControlError::Ungoverned(pid)),
            _ => Err(ControlError::NoSuchProcess(pid)),
        }
    }

    fn set_quota(&self, change: &QuotaChange) -> Result<PathBuf, ControlError> {
        let mut tenant = self.tenant(&change.tenant)?;
        let gpu = match change.gpu.as_deref() {
            None => None,
            Some("0") => Some(0),
            Some("1") => Some(1),
            Some(other) => return Err(ControlError::NoSuchGpu(other.into())),
        };
        for (key, value) in &change.properties {
            gpuquota_policy::property::check(key, value)
                .map_err(|error| ControlError::BadProperty(error.to_string()))?;
            let bytes = memory_value(key, value)?;
            for of_gpu in &mut tenant.gpus {
                if gpu.is_none_or(|gpu| gpu == of_gpu.gpu) {
                    match key.as_str() {
                        "memory.max" => of_gpu.memory_max = bytes,
                        _ => of_gpu.memory_high = bytes,
                    }
                }
            }
        }
        let mut tenants = self.tenants.lock().expect("lock");
        for old in tenants.iter_mut().filter(|old| old.name == tenant.name) {
            old.clone_from(&tenant);
        }
        let root = if change.runtime { "/run" } else { "/etc" };
        Ok(format!(
            "{root}/gpuquota/policy.d/90-set-property-{}.toml",
            change.tenant
        )
        .into())
    }

    fn reset_quota(&self, tenant: &str, properties: &[String]) -> Result<(), ControlError> {
        self.tenant(tenant)?;
        for key in properties {
            gpuquota_policy::property::Property::parse(key)
                .map_err(|error| ControlError::BadProperty(error.to_string()))?;
        }
        *self.tenants.lock().expect("lock") = tenants();
        Ok(())
    }

    fn reload(&self) -> Result<PolicyLoaded, ControlError> {
        if let Some(problems) = &*self.broken_policy.lock().expect("lock") {
            return Err(ControlError::BadPolicy(problems.clone()));
        }
        let loaded = PolicyLoaded {
            generation: self.generation.fetch_add(1, Ordering::SeqCst) + 1,
            tenants: 2,
            warnings: vec!["/etc/gpuquota/policy.d/a.toml:3:1: warning: no GPU 7".into()],
        };
        self.happens(Notice::PolicyLoaded(loaded.clone()));
        Ok(loaded)
    }

    fn freeze(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ControlError> {
        self.tenant(tenant)?;
        match gpu {
            None | Some("0" | "1") => {}
            Some(other) => return Err(ControlError::NoSuchGpu(other.into())),
        }
        Ok(Held {
            frozen: vec![4242, 4243],
            uncontrolled: vec![Uncontrolled {
                pid: 4244,
                why: "no subdevice is known".into(),
            }],
        })
    }

    fn thaw(&self, tenant: &str, _gpu: Option<&str>) -> Result<Held, ControlError> {
        self.tenant(tenant)?;
        Ok(Held::default())
    }

    fn start_leaks(&self, target: Target, _limit: Duration) -> Result<(), ControlError> {
        match target {
            Target::Tenant(name) => self.tenant(&name).map(drop),
            Target::Process(pid) => Err(ControlError::NoSuchProcess(pid)),
        }
    }

    fn leaks(&self, target: &Target) -> Result<LeakReport, ControlError> {
        Ok(leaks(target))
    }

    fn stop_leaks(&self, target: &Target) -> Result<LeakReport, ControlError> {
        Ok(leaks(target))
    }

    fn leak_targets(&self) -> Vec<Target> {
        vec![Target::Tenant("vision".into())]
    }

    fn start_profile(&self, target: Target, limit: Duration) -> Result<(), ControlError> {
        self.start_leaks(target, limit)
    }

    fn profile(&self, target: &Target) -> Result<ProfileReport, ControlError> {
        Ok(profile(target))
    }

    fn stop_profile(&self, target: &Target) -> Result<ProfileReport, ControlError> {
        Ok(profile(target))
    }

    fn profile_targets(&self) -> Vec<Target> {
        vec![Target::Tenant("vision".into())]
    }

    fn start_idle(&self, target: Target, limit: Duration) -> Result<(), ControlError> {
        self.start_leaks(target, limit)
    }

    fn idle(&self, target: &Target) -> Result<IdleReport, ControlError> {
        Ok(idle(target))
    }

    fn stop_idle(&self, target: &Target) -> Result<IdleReport, ControlError> {
        Ok(idle(target))
    }

    fn idle_targets(&self) -> Vec<Target> {
        vec![Target::Tenant("vision".into())]
    }

    fn doctor(&self) -> Vec<Finding> {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        std::thread::sleep(*self.doctor_takes.lock().expect("lock"));
        self.running.fetch_sub(1, Ordering::SeqCst);
        let finding = |subject: &str, verdict, detail: &str| Finding {
            subject: subject.into(),
            verdict,
            detail: detail.into(),
        };
        vec![
            finding(
                "tracepoint sys_enter_ioctl",
                Verdict::Ok,
                "attached, 12 ns per call",
            ),
            finding(
                "lsm file_ioctl",
                Verdict::Warning,
                "bpf is not in the list of active LSMs; boot with lsm=…,bpf",
            ),
        ]
    }

    fn memory_history(
        &self,
        tenant: Option<&str>,
        since: Duration,
    ) -> Result<Vec<MemoryHistory>, ControlError> {
        if let Some(name) = tenant {
            self.tenant(name)?;
        }
        Ok(vec![MemoryHistory {
            tenant: "vision".into(),
            used: 12 << 30,
            high_water: 40 << 30,
            growth_rate: 1 << 20,
            objects: 40,
            small_objects: 4,
            small_bytes: 1 << 18,
            step_sec: 10,
            start_usec: since.as_secs() * 1_000_000,
            mean: vec![Some(1 << 30), None, Some(12 << 30)],
            peak: vec![Some(2 << 30), None, Some(40 << 30)],
            ..MemoryHistory::default()
        }])
    }

    fn memory_heat_map(&self, _since: Duration, columns: u32) -> Vec<HeatRow> {
        vec![HeatRow {
            tenant: "vision".into(),
            gpu: 0,
            full: 40 << 30,
            peaks: (0..u64::from(columns))
                .map(|column| Some(column << 30))
                .collect(),
        }]
    }

    fn dump_state(&self) -> serde_json::Value {
        serde_json::json!({ "generation": self.policy_generation() })
    }

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }
}

pub fn uuid(index: u32) -> String {
    format!("GPU-8b3f1c2e-0000-4000-8000-00000000000{index}")
}

fn tenants() -> Vec<Tenant> {
    let gpu = |gpu, max: Option<u64>, used| TenantGpu {
        gpu,
        uuid: uuid(gpu),
        memory_max: max,
        memory_high: max.map(|max| max - 4 * GIB),
        memory_used: used,
        memory_peak: used + GIB / 2,
        denials: u64::from(gpu == 0) * 3,
        breaches: 0,
        processes: Vec::new(),
        memory: TenantMemory::default(),
        time: None,
    };
    let mut on_zero = gpu(0, Some(40 * GIB), 12 * GIB + GIB / 2);
    on_zero.processes = vec![
        ProcessUse {
            pid: 4243,
            // A program may call itself anything.
            comm: "evil\u{1b}[2J".into(),
            memory_used: GIB / 2,
        },
        ProcessUse {
            pid: 4242,
            comm: "python3".into(),
            memory_used: 12 * GIB,
        },
    ];
    on_zero.memory = TenantMemory {
        host_used: GIB / 4,
        host_peak: GIB,
        context: 24 << 20,
        managed: 2 * GIB,
        ..TenantMemory::default()
    };
    vec![
        Tenant {
            name: "lab".into(),
            cgroup: "/gpu.slice".into(),
            class: None,
            parent: None,
            cgroups: Vec::new(),
            gpus: vec![gpu(0, None, 0), gpu(1, None, 0)],
            launch: None,
        },
        Tenant {
            name: "vision".into(),
            cgroup: "/gpu.slice/vision.slice".into(),
            class: Some("guaranteed".into()),
            parent: Some("lab".into()),
            cgroups: vec!["/gpu.slice/vision.slice".into()],
            gpus: vec![on_zero, gpu(1, Some(70 * GIB), 0)],
            launch: None,
        },
    ]
}

/// An interface that is served in this process.
pub struct Daemon {
    pub control: Arc<FakeControl>,
    pub bus: Bus,
    pub runtime: Runtime,
    server: Option<Server>,
    dir: TempDir,
}

impl Daemon {
    /// On a private socket.
    pub fn on_peer() -> Self {
        let dir = public_dir();
        let bus = Bus::Peer(dir.path().join("bus"));
        Self::on(bus, dir)
    }

    /// On a bus.
    pub fn on_bus(bus: &TestBus) -> Self {
        Self::on(Bus::Address(bus.address.clone()), public_dir())
    }

    pub fn on(bus: Bus, dir: TempDir) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let control = Arc::new(FakeControl::new());
        let server = runtime
            .block_on(serve(&bus, control.clone()))
            .expect("serve");
        Self {
            control,
            bus,
            runtime,
            server: Some(server),
            dir,
        }
    }

    pub fn socket(&self) -> &Path {
        let Bus::Peer(path) = &self.bus else {
            panic!("not on a private socket")
        };
        path
    }

    pub fn stop(&mut self) {
        let server = self.server.take().expect("stopped once");
        self.runtime.block_on(server.shutdown());
    }

    /// `gpuquotactl` towards this daemon.
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        self.ctl_command(arguments).output().expect("gpuquotactl")
    }

    pub fn ctl_command(&self, arguments: &[&str]) -> Command {
        ctl(&self.bus.to_string(), arguments)
    }

    /// `gpuquotactl` as a user who is not root.
    pub fn ctl_as_nobody(&self, arguments: &[&str]) -> Output {
        // The build directory may be closed to other users.
        let copy = self.dir.path().join("gpuquotactl");
        if !copy.exists() {
            // By another process: a test that forks meanwhile would hold the file open for writing, and a file
            // that is open for writing cannot be executed.
            let copied = Command::new("cp")
                .arg(env!("CARGO_BIN_EXE_gpuquotactl"))
                .arg(&copy)
                .status();
            assert!(copied.expect("cp").success());
        }
        let mut command = Command::new(copy);
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
            .args(["--bus", &self.bus.to_string()])
            .args(arguments)
            .env("NO_COLOR", "1")
            .current_dir("/")
            .output()
            .expect("gpuquotactl")
    }
}

pub fn ctl(bus: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpuquotactl"));
    command.args(arguments).env("GPUQUOTA_BUS", bus);
    for name in ["LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR"] {
        command.env_remove(name);
    }
    command
}

/// A directory that other users can enter.
pub fn public_dir() -> TempDir {
    let dir = tempfile::tempdir().expect("tempdir");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    dir
}

pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

#[track_caller]
pub fn stdout(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{:?}: {}",
        output.status,
        stderr(output)
    );
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub fn fails(output: &Output, code: i32, message: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(message), "{text}");
}

/// Waits until something holds; tests never wait for a fixed time instead.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A message bus of our own, with the rules that are shipped.
pub struct TestBus {
    pub address: String,
    process: Child,
    dir: TempDir,
}

impl TestBus {
    /// A bus as strict as the system bus.
    pub fn start() -> Self {
        let dir = public_dir();
        Self::start_in(dir)
    }

    fn start_in(dir: TempDir) -> Self {
        let rules = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../config/org.gpuquota.Enforcer1.conf"
        );
        let config = dir.path().join("bus.conf");
        // The policy of the system bus: nobody owns a name or calls a method unless a rule allows it.
        let text = format!(
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={dir}/bus</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
  </policy>
  <policy user="root">
    <allow own="org.freedesktop.PolicyKit1"/>
    <allow send_destination="org.freedesktop.PolicyKit1"/>
  </policy>
  <include>{rules}</include>
</busconfig>
"#,
            dir = dir.path().display()
        );
        fs::write(&config, text).expect("write");
        let mut process = Command::new("dbus-daemon")
            .args(["--nofork", "--print-address=1", "--config-file"])
            .arg(&config)
            .stdout(Stdio::piped())
            .spawn()
            .expect("dbus-daemon; install the package dbus");
        let mut address = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut address)
            .expect("address");
        // Without the identity of this very process: one that comes back has another.
        let address = address.split([',', '\n']).next().unwrap_or_default();
        let address = address.to_owned();
        assert!(address.starts_with("unix:"), "{address:?}");
        Self {
            address,
            process,
            dir,
        }
    }

    /// Kills the bus and starts another one at the same address.
    pub fn restart(mut self) -> Self {
        self.process.kill().expect("kill");
        self.process.wait().expect("wait");
        let dir = std::mem::replace(&mut self.dir, public_dir());
        drop(self);
        let _ = fs::remove_file(dir.path().join("bus"));
        Self::start_in(dir)
    }
}

impl Drop for TestBus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
