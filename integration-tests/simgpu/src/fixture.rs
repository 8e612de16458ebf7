//! Simulated GPUs for a test: a server on a directory of its own, ended and unmounted however the test ends.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::libraries::{Links, built_directory};
use crate::server;
use crate::side;
use crate::sim::Node;
use crate::state::State;

/// How long the server may take to start and to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// File of what the driver would write to the kernel's log, in the scratch directory.
const KERNEL_LOG: &str = "kmsg";

/// File of the calls in the scratch directory.
const TRACE: &str = "trace.txt";

/// Why a fixture could not be started or asked.
#[derive(Debug, thiserror::Error)]
pub enum FixtureError {
    /// A binary or library is not where the build puts it.
    #[error("{path} is not there: build the packages gpuquota-simgpu, -libcuda and -libnvml first")]
    NotBuilt {
        /// Where it should be.
        path: PathBuf,
    },
    /// Files could not be made, read or written.
    #[error("{path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The server did not start.
    #[error("the server on {path} did not become ready")]
    NotReady {
        /// Its directory.
        path: PathBuf,
    },
    /// The state could not be understood.
    #[error("the state of the server on {path} makes no sense")]
    State {
        /// Its directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

/// How the simulated GPUs are set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of GPUs.
    pub gpus: u32,
    /// Bytes on each.
    pub memory: u64,
    /// What NVML shows for a process that has a context and nothing else.
    pub context_overhead: u64,
    /// The part of it that the driver takes by itself.
    pub context_hidden: u64,
    /// Whether the server writes every call to [`SimGpu::trace`].
    pub trace: bool,
    /// Directory of the binaries and libraries; found from the running executable if `None`.
    pub binaries: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gpus: 2,
            memory: 16 << 30,
            context_overhead: crate::sim::CONTEXT_OVERHEAD,
            context_hidden: crate::sim::CONTEXT_HIDDEN,
            trace: false,
            binaries: None,
        }
    }
}

/// A running server.
pub struct SimGpu {
    dir: TempDir,
    devices: PathBuf,
    libraries: PathBuf,
    binaries: PathBuf,
    server: Child,
    /// The server ends when this does, also if the test is killed.
    input: Option<ChildStdin>,
    _links: Links,
}

impl SimGpu {
    /// Starts a server. Needs root, since it mounts.
    pub fn spawn(options: &Options) -> Result<Self, FixtureError> {
        let binaries = match &options.binaries {
            Some(path) => path.clone(),
            None => built_directory().map_err(file_error(Path::new("/proc/self/exe")))?,
        };
        let dir = TempDir::with_prefix("simgpu-").map_err(|source| FixtureError::File {
            path: std::env::temp_dir(),
            source,
        })?;
        let devices = dir.path().join("dev");
        let libraries = dir.path().join("lib");
        fs::create_dir(&devices).map_err(file_error(&devices))?;
        // Readable for tenants that are not root.
        open_up(dir.path())?;
        let links = Links::create(&binaries, &libraries).map_err(file_error(&libraries))?;
        let program = built(&binaries, "simgpu")?;
        let mut command = Command::new(&program);
        if options.trace {
            command.arg("--trace").arg(dir.path().join(TRACE));
        }
        let mut server = command
            .arg("--dir")
            .arg(&devices)
            .args(["--gpus", &options.gpus.to_string()])
            .args(["--memory", &options.memory.to_string()])
            .args(["--context-overhead", &options.context_overhead.to_string()])
            .args(["--context-hidden", &options.context_hidden.to_string()])
            .arg("--kernel-log")
            .arg(dir.path().join(KERNEL_LOG))
            .arg("--exit-with-stdin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(file_error(&program))?;
        let input = server.stdin.take();
        let output = server.stdout.take();
        // From here on Drop cleans up.
        let sim = Self {
            dir,
            devices,
            libraries,
            binaries,
            server,
            input,
            _links: links,
        };
        let mut line = String::new();
        let answered = output
            .map(BufReader::new)
            .is_some_and(|mut output| output.read_line(&mut line).is_ok());
        if answered && line.trim_end() == "ready" {
            Ok(sim)
        } else {
            Err(FixtureError::NotReady {
                path: sim.devices.clone(),
            })
        }
    }

    /// Directory of the device files: the value for `SIMGPU_DIR`.
    pub fn devices(&self) -> &Path {
        &self.devices
    }

    /// Directory of `libcuda.so.1` and `libnvidia-ml.so.1`: the value for `LD_LIBRARY_PATH`.
    pub fn libraries(&self) -> &Path {
        &self.libraries
    }

    /// A directory for the test's own files, removed with the fixture.
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// File of what the driver would write to the kernel's log, in the form of `/dev/kmsg`.
    pub fn kernel_log(&self) -> PathBuf {
        self.dir.path().join(KERNEL_LOG)
    }

    /// Process id of the server.
    pub fn server_pid(&self) -> u32 {
        self.server.id()
    }

    /// File system and inode of a device file, by which the eBPF programs know it.
    pub fn identity(&self, node: Node) -> Result<(u64, u64), FixtureError> {
        let path = self.devices.join(node.name());
        let metadata = fs::metadata(&path).map_err(file_error(&path))?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// A command with the environment in which it finds the simulated GPUs.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env(side::DIR_VARIABLE, &self.devices)
            .env("LD_LIBRARY_PATH", &self.libraries);
        command
    }

    /// The workload program.
    pub fn tenant(&self) -> Command {
        self.command(self.binaries.join("simtenant"))
    }

    /// What the server knows.
    pub fn truth(&self) -> Result<State, FixtureError> {
        let path = self.devices.join(side::STATE_FILE);
        let text = fs::read(&path).map_err(file_error(&path))?;
        serde_json::from_slice(&text).map_err(|source| FixtureError::State {
            path: self.devices.clone(),
            source,
        })
    }

    /// Waits until the server knows what `condition` wants; returns the last state in any case.
    pub fn wait_until(
        &self,
        patience: Duration,
        condition: impl Fn(&State) -> bool,
    ) -> Result<State, FixtureError> {
        let end = Instant::now() + patience;
        loop {
            let state = self.truth()?;
            if condition(&state) || Instant::now() >= end {
                return Ok(state);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The calls that were answered so far, if [`Options::trace`] was set.
    pub fn trace(&self) -> Result<String, FixtureError> {
        let path = self.dir.path().join(TRACE);
        fs::read_to_string(&path).map_err(file_error(&path))
    }

    /// Gives the server a command, see [`crate::side`].
    pub fn control(&self, line: &str) -> Result<(), FixtureError> {
        let path = self.devices.join(side::CONTROL_FILE);
        fs::write(&path, line).map_err(file_error(&path))
    }
}

impl Drop for SimGpu {
    fn drop(&mut self) {
        drop(self.input.take());
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && matches!(self.server.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Both do nothing after an orderly end.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = server::unmount(&self.devices);
    }
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> FixtureError {
    let path = path.to_owned();
    move |source| FixtureError::File { path, source }
}

fn open_up(path: &Path) -> Result<(), FixtureError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(file_error(path))
}

fn built(binaries: &Path, name: &str) -> Result<PathBuf, FixtureError> {
    let path = binaries.join(name);
    if path.exists() {
        Ok(path)
    } else {
        Err(FixtureError::NotBuilt { path })
    }
}
