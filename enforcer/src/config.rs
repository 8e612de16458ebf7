//! Settings of the daemon: `/etc/gpuquota/gpuquota.toml` and its drop-ins.
//!
//! [`Config::load`] reads the files, [`Config::from_sources`] is the pure part. Every file is reported on:
//! an error names `file:line:col`, the offending text and what is allowed there. Settings of the policy
//! (tenants, classes, limits) are elsewhere: see the crate `gpuquota-policy`.

use std::{
    fmt,
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use serde::{Deserialize, Deserializer, de};
use toml::Spanned;

/// Where the settings are unless `--config` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/gpuquota/gpuquota.toml";

/// Where commands hand over their listeners unless the runtime directory is another one.
pub const DEFAULT_LISTENER_SOCKET: &str = "/run/gpuquota/listener.sock";

/// The settings of one daemon, complete and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the D-Bus interface is offered.
    pub bus: Bus,
    /// What must survive a reboot.
    pub state_directory: PathBuf,
    /// Sockets, and what may go at a reboot.
    pub runtime_directory: PathBuf,
    /// Where maps and links are pinned, so that they outlive the daemon; in a BPF file system.
    pub bpf_directory: PathBuf,
    /// Mount point of the cgroup v2 hierarchy; `None`: the first cgroup2 mount.
    pub cgroup_root: Option<PathBuf>,
    /// Where policies are read.
    pub policy: PolicyDirectories,
    /// Where metrics are offered; `None`: nowhere.
    pub metrics_address: Option<SocketAddr>,
    /// The `[gpu]` table.
    pub gpu: GpuSettings,
    /// The `[enforcement]` table.
    pub enforcement: EnforcementSettings,
    /// The `[launch]` table.
    pub launch: LaunchSettings,
    /// The `[time]` table.
    pub time: TimeSettings,
    /// The `[faults]` table.
    pub faults: FaultSettings,
}

/// The `[policy]` table: directories of `*.toml` policy files, each optional on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDirectories {
    /// Shipped by packages; read first.
    pub vendor: PathBuf,
    /// The admin's; `set-property` keeps its drop-ins here.
    pub admin: PathBuf,
    /// Gone at the next boot; `set-property --runtime` keeps its drop-ins here. Read last, wins.
    pub runtime: PathBuf,
}

impl PolicyDirectories {
    /// The directories in merge order: a later one wins.
    pub fn in_order(&self) -> [&Path; 3] {
        [&self.vendor, &self.admin, &self.runtime]
    }
}

/// The `[gpu]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSettings {
    /// Directory of `nvidiactl`, `nvidia0`, `nvidia-uvm`.
    pub device_dir: PathBuf,
    /// The NVML library; `None`: `libnvidia-ml.so.1` by the loader's search path.
    pub nvml_library: Option<PathBuf>,
    /// Driver versions to enforce on although no release of gpuquota was tried with them.
    pub accept_driver: Vec<String>,
}

/// The `[enforcement]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnforcementSettings {
    /// How memory limits are enforced.
    pub memory: MemoryBackend,
    /// What processes in no tenant may do.
    pub ungoverned: Ungoverned,
    /// Cgroups to whose processes, and those below, `ungoverned = "deny"` does not apply.
    pub ungoverned_exempt: Vec<String>,
    /// What holds while no daemon runs.
    pub daemon_loss: DaemonLoss,
    /// How often the ledger is compared with NVML.
    pub reconcile_interval: Duration,
    /// The most that the driver takes for one context by itself, in bytes. What a process has beyond got past the ledger.
    pub context_bound: u64,
    /// How long an allocation may wait for a daemon that is gone before it is refused.
    pub listener_timeout: Duration,
}

/// The `[launch]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchSettings {
    /// The longest time that one launch is delayed.
    pub max_delay: Duration,
    /// The longest delay that `launch.pace = "spin"` spins through.
    pub spin_max: Duration,
    /// A process that wants to launch so many times its budget ...
    pub storm_factor: u32,
    /// ... for so long is reported.
    pub storm_window: Duration,
}

/// The `[time]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeSettings {
    /// The time in which every process with work on a GPU gets one slice.
    pub round: Duration,
    /// The period of `time.max`: a tenant is frozen for the rest of it once its share is used up.
    pub period: Duration,
    /// No slice by weight is shorter. A switch costs some 200 µs on an H200, so a share of short slices is less exact.
    pub least_slice: Duration,
}

/// The `[faults]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultSettings {
    /// Where GPU faults are heard of.
    pub source: FaultSource,
    /// The kernel's log, for `source = "kernel-log"`.
    pub kernel_log: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        let runtime_directory = PathBuf::from("/run/gpuquota");
        Self {
            bus: Bus::System,
            state_directory: "/var/lib/gpuquota".into(),
            bpf_directory: "/sys/fs/bpf/gpuquota".into(),
            cgroup_root: None,
            policy: PolicyDirectories {
                vendor: "/usr/lib/gpuquota/policy.d".into(),
                admin: "/etc/gpuquota/policy.d".into(),
                runtime: runtime_directory.join("policy.d"),
            },
            runtime_directory,
            metrics_address: None,
            gpu: GpuSettings {
                device_dir: "/dev".into(),
                nvml_library: None,
                accept_driver: Vec::new(),
            },
            enforcement: EnforcementSettings {
                memory: MemoryBackend::Auto,
                ungoverned: Ungoverned::Allow,
                ungoverned_exempt: vec![
                    "/user.slice/user-0.slice".to_owned(),
                    "/system.slice/nvidia-persistenced.service".to_owned(),
                ],
                daemon_loss: DaemonLoss::Keep,
                reconcile_interval: Duration::from_secs(1),
                context_bound: 256 << 20,
                listener_timeout: Duration::from_secs(30),
            },
            launch: LaunchSettings {
                max_delay: Duration::from_secs(1),
                spin_max: Duration::from_micros(200),
                storm_factor: 10,
                storm_window: Duration::from_secs(5),
            },
            time: TimeSettings {
                round: Duration::from_millis(10),
                period: Duration::from_millis(100),
                least_slice: Duration::from_micros(500),
            },
            faults: FaultSettings {
                source: FaultSource::Auto,
                kernel_log: "/dev/kmsg".into(),
            },
        }
    }
}

/// Where the D-Bus interface is found.
///
/// Parses from and prints as `system`, `session`, `peer:PATH`, or a D-Bus address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bus {
    /// The system bus.
    System,
    /// The session bus of the calling user.
    Session,
    /// A bus at an address such as `unix:path=/run/user/1000/bus`.
    Address(String),
    /// A private Unix socket without a bus behind it.
    Peer(PathBuf),
}

impl FromStr for Bus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const ALLOWED: &str = "allowed are \"system\", \"session\", \"peer:PATH\", or a D-Bus address such as \"unix:path=/run/dbus/socket\"";
        match text {
            "system" => return Ok(Self::System),
            "session" => return Ok(Self::Session),
            _ => {}
        }
        if let Some(path) = text.strip_prefix("peer:") {
            if path.is_empty() || path.contains('\0') {
                return Err(format!("no path after \"peer:\"; {ALLOWED}"));
            }
            return Ok(Self::Peer(path.into()));
        }
        match zbus::Address::from_str(text) {
            Ok(_) => Ok(Self::Address(text.to_owned())),
            Err(_) => Err(format!("{text:?} names no bus; {ALLOWED}")),
        }
    }
}

impl fmt::Display for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("system"),
            Self::Session => f.write_str("session"),
            Self::Address(address) => f.write_str(address),
            Self::Peer(path) => write!(f, "peer:{}", path.display()),
        }
    }
}

/// How memory limits are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryBackend {
    /// The first of the others that works on this host.
    Auto,
    /// The call returns "out of memory" before the driver sees it (`bpf_override_return`).
    Override,
    /// The requested size is raised so that the driver refuses it (sleepable LSM program).
    Rewrite,
    /// Calls over budget are answered through seccomp user notification.
    Notify,
    /// The call fails with `ENOMEM` (LSM program).
    Lsm,
    /// A process over its budget gets a signal.
    Signal,
    /// Nothing is refused; usage and breaches are counted.
    Observe,
}

impl fmt::Display for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Override => "override",
            Self::Rewrite => "rewrite",
            Self::Notify => "notify",
            Self::Lsm => "lsm",
            Self::Signal => "signal",
            Self::Observe => "observe",
        })
    }
}

/// What processes in no tenant may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ungoverned {
    /// They use the GPUs without limits.
    Allow,
    /// The GPU's device files are closed to them.
    Deny,
}

/// What holds while no daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonLoss {
    /// The last limits.
    Keep,
    /// No limits.
    Open,
}

/// Where GPU faults are heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultSource {
    /// The first of the others that this host offers.
    Auto,
    /// The driver's tracepoint.
    Tracepoint,
    /// The kernel's log.
    KernelLog,
    /// NVML's events, which name no process.
    Nvml,
    /// Nowhere.
    Off,
}

/// The text of one settings file.
#[derive(Clone, Debug)]
pub struct Source {
    /// Where it was read; used in messages only.
    pub path: PathBuf,
    /// The whole file.
    pub text: String,
}

/// The settings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file or a directory could not be read.
    #[error("{path}: {source}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Problems of all files, in the order of the files.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
}

/// One problem of a settings file. Prints as `file:line:col: message` with the source line below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub path: PathBuf,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong and what is allowed.
    pub message: String,
    /// The source line.
    excerpt: String,
    /// Number of characters to underline, at least 1.
    width: usize,
}

impl Problem {
    fn new(source: &Source, span: Option<Range<usize>>, message: &str) -> Self {
        let text = &source.text;
        let span = span.unwrap_or(0..0);
        let start = text.floor_char_boundary(span.start.min(text.len()));
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let end = text.floor_char_boundary(span.end.clamp(start, line_end));
        Self {
            path: source.path.clone(),
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            // toml and serde write some messages over several lines.
            message: message.trim().replace('\n', "; "),
            excerpt: text[line_start..line_end]
                .trim_end_matches('\r')
                .replace(|c: char| c.is_control(), " "),
            width: text[start..end].chars().count().max(1),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            line,
            column,
            message,
            excerpt,
            width,
            ..
        } = self;
        let gutter = line.to_string().len();
        writeln!(f, "{}:{line}:{column}: {message}", self.path.display())?;
        writeln!(f, " {:gutter$} |", "")?;
        writeln!(f, " {line} | {excerpt}")?;
        write!(
            f,
            " {:gutter$} | {:indent$}{}",
            "",
            "",
            "^".repeat(*width),
            indent = column - 1
        )
    }
}

impl Config {
    /// Reads the settings and the drop-ins in `FILE.d/*.toml`, in lexical order; a later file wins key by key.
    ///
    /// `None` reads [`DEFAULT_PATH`], which may be absent. A file that is named must exist.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let main = path.unwrap_or_else(|| Path::new(DEFAULT_PATH));
        let mut sources = Vec::new();
        match std::fs::read(main) {
            Ok(bytes) => sources.push(source(main, bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && path.is_none() => {}
            Err(error) => {
                return Err(ConfigError::Read {
                    path: main.into(),
                    source: error,
                });
            }
        }
        for file in drop_ins(main)? {
            let bytes = std::fs::read(&file).map_err(|source| ConfigError::Read {
                path: file.clone(),
                source,
            })?;
            sources.push(source(&file, bytes)?);
        }
        Self::from_sources(&sources)
    }

    /// Merges the files in order over the built-in values.
    pub fn from_sources(sources: &[Source]) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut problems = Vec::new();
        let mut runtime_policy = None;
        for source in sources {
            match toml::from_str::<File>(&source.text) {
                Ok(mut file) => {
                    runtime_policy = file.policy.runtime.take().or(runtime_policy);
                    file.apply(&mut config, source, &mut problems);
                }
                Err(error) => problems.push(Problem::new(source, error.span(), error.message())),
            }
        }
        config.policy.runtime = runtime_policy.map_or_else(
            || config.runtime_directory.join("policy.d"),
            |AbsolutePath(path)| path,
        );
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(ConfigError::Invalid(problems))
        }
    }

    /// Where `gpuquotactl run` and container runtimes hand over seccomp listeners.
    pub fn listener_socket(&self) -> PathBuf {
        self.runtime_directory.join("listener.sock")
    }

    /// What is set and has no effect in this release, for the log at start-up; one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let default = Self::default();
        let mut warnings = Vec::new();
        let mut warn = |set: bool, key: &str, effect: &str| {
            if set {
                warnings.push(format!("{key} has no effect in this release: {effect}"));
            }
        };
        warn(
            self.state_directory != default.state_directory,
            "state-directory",
            "nothing has to be kept outside the policy directories yet",
        );
        warn(
            self.enforcement.daemon_loss == DaemonLoss::Open
                && self.enforcement.memory == MemoryBackend::Notify,
            "enforcement.daemon-loss = \"open\" with enforcement.memory = \"notify\"",
            "while the daemon is gone calls wait for listener-timeout and are then refused",
        );
        warnings
    }
}

fn source(path: &Path, bytes: Vec<u8>) -> Result<Source, ConfigError> {
    String::from_utf8(bytes)
        .map(|text| Source {
            path: path.into(),
            text,
        })
        .map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let text = String::from_utf8_lossy(error.as_bytes()).into_owned();
            let source = Source {
                path: path.into(),
                text,
            };
            ConfigError::Invalid(vec![Problem::new(
                &source,
                Some(at..at),
                "not valid UTF-8; settings files are UTF-8 text",
            )])
        })
}

fn drop_ins(main: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut directory = main.as_os_str().to_owned();
    directory.push(".d");
    let directory = PathBuf::from(directory);
    let failed = |source| ConfigError::Read {
        path: directory.clone(),
        source,
    };
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|ext| ext == "toml") && !hidden {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// One file as written: every key optional.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    #[serde(deserialize_with = "bus")]
    bus: Option<Bus>,
    state_directory: Option<AbsolutePath>,
    runtime_directory: Option<AbsolutePath>,
    bpf_directory: Option<AbsolutePath>,
    cgroup_root: Option<AbsolutePath>,
    policy: PolicyTable,
    metrics: MetricsTable,
    gpu: GpuTable,
    enforcement: EnforcementTable,
    launch: LaunchTable,
    time: TimeTable,
    faults: FaultTable,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct PolicyTable {
    vendor: Option<AbsolutePath>,
    admin: Option<AbsolutePath>,
    runtime: Option<AbsolutePath>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct MetricsTable {
    #[serde(deserialize_with = "socket_address")]
    address: Option<SocketAddr>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct GpuTable {
    device_dir: Option<AbsolutePath>,
    nvml_library: Option<AbsolutePath>,
    accept_driver: Option<Vec<Spanned<String>>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct EnforcementTable {
    memory: Option<MemoryBackend>,
    ungoverned: Option<Ungoverned>,
    ungoverned_exempt: Option<Vec<Spanned<String>>>,
    daemon_loss: Option<DaemonLoss>,
    reconcile_interval: Option<Spanned<Interval>>,
    context_bound: Option<Amount>,
    listener_timeout: Option<Spanned<Interval>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct LaunchTable {
    max_delay: Option<Spanned<Interval>>,
    spin_max: Option<Spanned<Interval>>,
    storm_factor: Option<Spanned<u32>>,
    storm_window: Option<Spanned<Interval>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct TimeTable {
    round: Option<Spanned<Interval>>,
    period: Option<Spanned<Interval>>,
    least_slice: Option<Spanned<Interval>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct FaultTable {
    source: Option<FaultSource>,
    kernel_log: Option<AbsolutePath>,
}

impl File {
    fn apply(self, config: &mut Config, source: &Source, problems: &mut Vec<Problem>) {
        set(&mut config.bus, self.bus);
        set(&mut config.state_directory, self.state_directory);
        set(&mut config.runtime_directory, self.runtime_directory);
        set(&mut config.bpf_directory, self.bpf_directory);
        set_some(&mut config.cgroup_root, self.cgroup_root);
        set(&mut config.policy.vendor, self.policy.vendor);
        set(&mut config.policy.admin, self.policy.admin);
        set_some(&mut config.metrics_address, self.metrics.address);

        set(&mut config.gpu.device_dir, self.gpu.device_dir);
        set_some(&mut config.gpu.nvml_library, self.gpu.nvml_library);
        set(
            &mut config.gpu.accept_driver,
            self.gpu
                .accept_driver
                .map(|versions| driver_versions(versions, source, problems)),
        );

        self.faults.apply(&mut config.faults);
        set(&mut config.enforcement.memory, self.enforcement.memory);
        set(
            &mut config.enforcement.ungoverned,
            self.enforcement.ungoverned,
        );
        set(
            &mut config.enforcement.ungoverned_exempt,
            self.enforcement
                .ungoverned_exempt
                .map(|paths| cgroup_paths(paths, source, problems)),
        );
        set(
            &mut config.enforcement.daemon_loss,
            self.enforcement.daemon_loss,
        );

        if let Some(factor) = self.launch.storm_factor {
            if (2..=1000).contains(factor.get_ref()) {
                config.launch.storm_factor = *factor.get_ref();
            } else {
                problems.push(Problem::new(
                    source,
                    Some(factor.span()),
                    "out of range; allowed is 2 to 1000",
                ));
            }
        }

        if let Some(Amount(bytes)) = self.enforcement.context_bound {
            config.enforcement.context_bound = bytes;
        }

        let (micros, millis) = (Duration::from_micros, Duration::from_millis);
        let enforcement = &mut config.enforcement;
        let (launch, time) = (&mut config.launch, &mut config.time);
        let intervals = [
            (
                &mut enforcement.reconcile_interval,
                self.enforcement.reconcile_interval,
                millis(100)..=millis(3_600_000),
            ),
            (
                &mut enforcement.listener_timeout,
                self.enforcement.listener_timeout,
                millis(1_000)..=millis(600_000),
            ),
            (
                &mut launch.max_delay,
                self.launch.max_delay,
                millis(1)..=millis(60_000),
            ),
            (
                &mut launch.spin_max,
                self.launch.spin_max,
                micros(1)..=millis(10),
            ),
            (
                &mut launch.storm_window,
                self.launch.storm_window,
                millis(1_000)..=millis(600_000),
            ),
            (&mut time.round, self.time.round, millis(1)..=millis(1_000)),
            (
                &mut time.period,
                self.time.period,
                millis(10)..=millis(10_000),
            ),
            (
                &mut time.least_slice,
                self.time.least_slice,
                micros(100)..=millis(10),
            ),
        ];
        for (target, value, allowed) in intervals {
            if let Some(value) = value {
                set_interval(target, &value, &allowed, source, problems);
            }
        }
    }
}

fn set_interval(
    target: &mut Duration,
    value: &Spanned<Interval>,
    allowed: &RangeInclusive<Duration>,
    source: &Source,
    problems: &mut Vec<Problem>,
) {
    let Interval(duration) = *value.get_ref();
    if allowed.contains(&duration) {
        *target = duration;
        return;
    }
    let message = format!(
        "out of range; allowed is {} to {}",
        Interval(*allowed.start()),
        Interval(*allowed.end())
    );
    problems.push(Problem::new(source, Some(value.span()), &message));
}

impl FaultTable {
    fn apply(self, faults: &mut FaultSettings) {
        set(&mut faults.source, self.source);
        set(&mut faults.kernel_log, self.kernel_log);
    }
}

/// The versions, each of which is reported if it can be no driver's.
fn driver_versions(
    versions: Vec<Spanned<String>>,
    source: &Source,
    problems: &mut Vec<Problem>,
) -> Vec<String> {
    for version in versions
        .iter()
        .filter(|version| !is_driver_version(version.get_ref()))
    {
        problems.push(Problem::new(
            source,
            Some(version.span()),
            "no driver version; allowed are numbers with dots, such as \"580.95.05\"",
        ));
    }
    versions.into_iter().map(Spanned::into_inner).collect()
}

/// The paths, each of which is reported if it can be no cgroup's.
fn cgroup_paths(
    paths: Vec<Spanned<String>>,
    source: &Source,
    problems: &mut Vec<Problem>,
) -> Vec<String> {
    for path in paths.iter().filter(|path| !is_cgroup_path(path.get_ref())) {
        problems.push(Problem::new(
            source,
            Some(path.span()),
            "no cgroup; allowed are absolute paths such as \"/system.slice/dcgm.service\"",
        ));
    }
    paths.into_iter().map(Spanned::into_inner).collect()
}

/// Absolute, and without parts that a cgroup's own path never has.
fn is_cgroup_path(path: &str) -> bool {
    path == "/"
        || path
            .strip_prefix('/')
            .is_some_and(|rest| rest.split('/').all(|part| !matches!(part, "" | "." | "..")))
}

fn set<T>(target: &mut T, value: Option<impl Into<T>>) {
    if let Some(value) = value {
        *target = value.into();
    }
}

fn set_some<T>(target: &mut Option<T>, value: Option<impl Into<T>>) {
    if let Some(value) = value {
        *target = Some(value.into());
    }
}

fn is_driver_version(text: &str) -> bool {
    text.split('.')
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
        && text.contains('.')
}

/// A path that does not depend on the working directory.
struct AbsolutePath(PathBuf);

impl From<AbsolutePath> for PathBuf {
    fn from(AbsolutePath(path): AbsolutePath) -> Self {
        path
    }
}

impl<'de> Deserialize<'de> for AbsolutePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let path = PathBuf::deserialize(deserializer)?;
        if path.is_absolute() {
            Ok(Self(path))
        } else {
            Err(de::Error::custom(format!(
                "\"{}\" is no absolute path; it has to start with \"/\"",
                path.display()
            )))
        }
    }
}

/// An amount of memory with a unit: `256MiB`.
#[derive(Clone, Copy)]
struct Amount(u64);

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse()
            .map(|gpuquota_policy::Size(bytes)| Self(bytes))
            .map_err(|error| error.to_string())
    }
}

/// A time span with a unit: `10ms`, `1s`, `2min`.
#[derive(Clone, Copy)]
struct Interval(Duration);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const ALLOWED: &str = "allowed is a whole number with us, ms, s or min, such as \"100ms\"";
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(format!("{text:?} is no time; {ALLOWED}"));
        }
        let micros_per_unit = match unit.trim_start() {
            "us" | "µs" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            "min" => 60_000_000,
            "" => return Err(format!("{text:?} has no unit; {ALLOWED}")),
            other => return Err(format!("unknown unit {other:?}; {ALLOWED}")),
        };
        number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(micros_per_unit))
            .map(|micros| Self(Duration::from_micros(micros)))
            .ok_or_else(|| format!("{text:?} is too long; {ALLOWED}"))
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        for (unit, name) in [(60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")] {
            if micros != 0 && micros.is_multiple_of(unit) {
                return write!(f, "{}{name}", micros / unit);
            }
        }
        write!(f, "{micros}us")
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Text {
            expected: "an amount of memory such as \"256MiB\"",
            parse: str::parse::<Amount>,
        })
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Text {
            expected: "a time with a unit, such as \"100ms\"",
            parse: str::parse::<Interval>,
        })
    }
}

fn bus<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bus>, D::Error> {
    let bus: Bus = deserializer.deserialize_any(Text {
        expected: "the name of a bus, such as \"system\"",
        parse: str::parse::<Bus>,
    })?;
    match &bus {
        Bus::Peer(path) if !path.is_absolute() => Err(de::Error::custom(format!(
            "\"{}\" is no absolute path; write \"peer:/…\"",
            path.display()
        ))),
        _ => Ok(Some(bus)),
    }
}

fn socket_address<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    deserializer
        .deserialize_any(Text {
            expected: "an address with a port, such as \"127.0.0.1:9835\"",
            parse: |text: &str| {
                text.parse().map_err(|_| {
                    format!("{text:?} is no address with a port; allowed is IP:PORT, such as \"127.0.0.1:9835\" or \"[::1]:9835\"")
                })
            },
        })
        .map(Some)
}

/// Reads a string through a parse function, and says what was expected if it is no string.
struct Text<F> {
    expected: &'static str,
    parse: F,
}

impl<T, F: FnOnce(&str) -> Result<T, String>> de::Visitor<'_> for Text<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(texts: &[&str]) -> Result<Config, Vec<Problem>> {
        let sources: Vec<_> = texts
            .iter()
            .enumerate()
            .map(|(i, text)| Source {
                path: format!("{i}.toml").into(),
                text: (*text).to_owned(),
            })
            .collect();
        Config::from_sources(&sources).map_err(|error| match error {
            ConfigError::Invalid(problems) => problems,
            other @ ConfigError::Read { .. } => panic!("{other}"),
        })
    }

    #[track_caller]
    fn complaint(text: &str) -> String {
        let problems = parse(&[text]).expect_err("the text is wrong");
        let [problem] = problems.as_slice() else {
            panic!("one problem expected: {problems:?}")
        };
        problem.to_string()
    }

    #[test]
    fn nothing_written_means_the_documented_values() {
        let config = parse(&[]).expect("defaults");
        assert_eq!(config, Config::default());
        assert_eq!(config.policy.runtime, Path::new("/run/gpuquota/policy.d"));
        assert_eq!(config.listener_socket(), Path::new(DEFAULT_LISTENER_SOCKET));
        assert!(config.warnings().is_empty());
    }

    #[test]
    fn every_key_is_read() {
        let config = parse(&[r#"
            bus = "peer:/run/q/bus"
            state-directory = "/s"
            runtime-directory = "/r"
            bpf-directory = "/b"
            cgroup-root = "/c"
            [policy]
            vendor = "/v"
            admin = "/a"
            [metrics]
            address = "[::1]:9835"
            [gpu]
            device-dir = "/d"
            nvml-library = "/l.so"
            accept-driver = ["580.95.05", "610.1"]
            [enforcement]
            memory = "notify"
            ungoverned = "deny"
            ungoverned-exempt = ["/x.slice/y"]
            daemon-loss = "open"
            reconcile-interval = "250 ms"
            context-bound = "512MiB"
            listener-timeout = "2min"
            [launch]
            max-delay = "250ms"
            spin-max = "90us"
            storm-factor = 4
            storm-window = "30s"
            [time]
            round = "20ms"
            period = "1s"
            least-slice = "200us"
            [faults]
            source = "kernel-log"
            kernel-log = "/k"
        "#])
        .expect("valid");
        let expected = Config {
            bus: Bus::Peer("/run/q/bus".into()),
            state_directory: "/s".into(),
            runtime_directory: "/r".into(),
            bpf_directory: "/b".into(),
            cgroup_root: Some("/c".into()),
            policy: PolicyDirectories {
                vendor: "/v".into(),
                admin: "/a".into(),
                runtime: "/r/policy.d".into(),
            },
            metrics_address: Some("[::1]:9835".parse().expect("address")),
            gpu: GpuSettings {
                device_dir: "/d".into(),
                nvml_library: Some("/l.so".into()),
                accept_driver: vec!["580.95.05".into(), "610.1".into()],
            },
            enforcement: EnforcementSettings {
                memory: MemoryBackend::Notify,
                ungoverned: Ungoverned::Deny,
                ungoverned_exempt: vec!["/x.slice/y".into()],
                daemon_loss: DaemonLoss::Open,
                reconcile_interval: Duration::from_millis(250),
                context_bound: 512 << 20,
                listener_timeout: Duration::from_mins(2),
            },
            launch: LaunchSettings {
                max_delay: Duration::from_millis(250),
                spin_max: Duration::from_micros(90),
                storm_factor: 4,
                storm_window: Duration::from_secs(30),
            },
            time: TimeSettings {
                round: Duration::from_millis(20),
                period: Duration::from_secs(1),
                least_slice: Duration::from_micros(200),
            },
            faults: FaultSettings {
                source: FaultSource::KernelLog,
                kernel_log: "/k".into(),
            },
        };
        assert_eq!(config, expected);
        assert_eq!(config.warnings().len(), 2, "{:?}", config.warnings());
    }

    #[test]
    fn backends_are_printed_as_they_are_written() {
        for name in [
            "auto", "override", "rewrite", "notify", "lsm", "signal", "observe",
        ] {
            let config = parse(&[&format!("[enforcement]\nmemory = \"{name}\"")]).expect("valid");
            assert_eq!(config.enforcement.memory.to_string(), name);
        }
    }

    #[test]
    fn a_later_file_wins_key_by_key() {
        let config = parse(&[
            "bus = \"session\"\n[gpu]\ndevice-dir = \"/one\"\nnvml-library = \"/n\"",
            "[gpu]\ndevice-dir = \"/two\"",
        ])
        .expect("valid");
        assert_eq!(config.bus, Bus::Session);
        assert_eq!(config.gpu.device_dir, Path::new("/two"));
        assert_eq!(config.gpu.nvml_library.as_deref(), Some(Path::new("/n")));
    }

    #[test]
    fn problems_of_all_files_are_reported() {
        let problems = parse(&["buss = 1", "bus = \"system\"", "[time]\nround = \"1h\""])
            .expect_err("two are wrong");
        let places: Vec<_> = problems
            .iter()
            .map(|p| format!("{}:{}:{}", p.path.display(), p.line, p.column))
            .collect();
        assert_eq!(places, ["0.toml:1:1", "2.toml:2:9"]);
    }

    #[test]
    fn messages_say_where_what_and_what_is_allowed() {
        let complaints = [
            "\n[enforcement]\nmemory = \"hope\"\n",
            "[gpu]\ndevice_dir = \"/dev\"",
            "[time]\nperiod = 100",
            "[time]\nperiod = \"100\"",
            "[time]\nperiod = \"11min\"",
            "bus = \"sytem\"",
            "bus = \"peer:run/x\"",
            "[metrics]\naddress = \":9835\"",
            "[gpu]\naccept-driver = [\"580.95.05\", \"latest\"]",
            "bus = \"system\nstate-directory = 3",
        ]
        .map(complaint)
        .join("\n");
        insta::assert_snapshot!(complaints, @r#"
        0.toml:3:10: unknown variant `hope`, expected one of `auto`, `override`, `rewrite`, `notify`, `lsm`, `signal`, `observe`
           |
         3 | memory = "hope"
           |          ^^^^^^
        0.toml:2:1: unknown field `device_dir`, expected one of `device-dir`, `nvml-library`, `accept-driver`
           |
         2 | device_dir = "/dev"
           | ^^^^^^^^^^
        0.toml:2:10: invalid type: integer `100`, expected a time with a unit, such as "100ms"
           |
         2 | period = 100
           |          ^^^
        0.toml:2:10: "100" has no unit; allowed is a whole number with us, ms, s or min, such as "100ms"
           |
         2 | period = "100"
           |          ^^^^^
        0.toml:2:10: out of range; allowed is 10ms to 10s
           |
         2 | period = "11min"
           |          ^^^^^^^
        0.toml:1:7: "sytem" names no bus; allowed are "system", "session", "peer:PATH", or a D-Bus address such as "unix:path=/run/dbus/socket"
           |
         1 | bus = "sytem"
           |       ^^^^^^^
        0.toml:1:7: "run/x" is no absolute path; write "peer:/…"
           |
         1 | bus = "peer:run/x"
           |       ^^^^^^^^^^^^
        0.toml:2:11: ":9835" is no address with a port; allowed is IP:PORT, such as "127.0.0.1:9835" or "[::1]:9835"
           |
         2 | address = ":9835"
           |           ^^^^^^^
        0.toml:2:31: no driver version; allowed are numbers with dots, such as "580.95.05"
           |
         2 | accept-driver = ["580.95.05", "latest"]
           |                               ^^^^^^^^
        0.toml:1:14: invalid basic string, expected `"`
           |
         1 | bus = "system
           |              ^
        "#);
    }

    #[test]
    fn odd_input_gives_an_error_not_a_panic() {
        for text in [
            "\u{feff}=",
            "é = 'ü",
            "\r\nbus=\r\n",
            "[time]\nround=\"9999999999999999999s\"",
            "a\0b",
        ] {
            let problems = parse(&[text]).expect_err("not valid settings");
            assert!(problems.iter().all(|p| !p.to_string().is_empty()));
        }
    }

    #[test]
    fn files_are_found_and_read_in_order() {
        let dir = tempfile::tempdir().expect("tempdir");
        let main = dir.path().join("gpuquota.toml");
        assert!(matches!(
            Config::load(Some(&main)),
            Err(ConfigError::Read { .. })
        ));
        std::fs::write(&main, "state-directory = \"/one\"").expect("write");
        let d = dir.path().join("gpuquota.toml.d");
        std::fs::create_dir(&d).expect("mkdir");
        std::fs::write(d.join("20-b.toml"), "state-directory = \"/three\"").expect("write");
        std::fs::write(d.join("10-a.toml"), "state-directory = \"/two\"").expect("write");
        std::fs::write(d.join("30-c.toml.bak"), "nonsense").expect("write");
        std::fs::write(d.join(".40-swap.toml"), "nonsense").expect("write");
        let config = Config::load(Some(&main)).expect("valid");
        assert_eq!(config.state_directory, Path::new("/three"));

        std::fs::write(d.join("50-latin1.toml"), b"# caf\xe9\n").expect("write");
        let error = Config::load(Some(&main))
            .expect_err("not UTF-8")
            .to_string();
        assert!(
            error.contains("50-latin1.toml:1:6: not valid UTF-8"),
            "{error}"
        );
    }

    #[test]
    fn the_shipped_file_holds_the_built_in_values() {
        let text = include_str!("../../config/gpuquota.toml");
        let shipped = parse(&[text]).expect("valid");
        assert_eq!(shipped, Config::default());

        // Every commented line that looks like a setting must be one, with its documented default.
        let uncommented: String = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase()) => rest,
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let config = parse(&[&uncommented]).expect("valid without the comment marks");
        let optional = Config {
            cgroup_root: Some("/sys/fs/cgroup".into()),
            metrics_address: Some("127.0.0.1:9835".parse().expect("address")),
            gpu: GpuSettings {
                nvml_library: Some("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1".into()),
                ..Config::default().gpu
            },
            ..Config::default()
        };
        assert_eq!(config, optional);
    }
}
