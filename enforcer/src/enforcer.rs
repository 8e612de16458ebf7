//! The enforcement core: one policy in force, the cgroups that it governs, and every question about them.
//!
//! [`Enforcer`] ties the pure parts (policy, tenancy, lifecycle) to the kernel side. It is shared by the threads
//! that serve events, listeners and the bus; each of its locks is held for a computation or a map update, never
//! for a tenant.

mod adopting;
mod answers;
mod auditing;
mod closing;
mod contexts;
mod faulting;
mod giving_back;
mod governing;
mod idling;
mod insight;
mod judging;
mod launching;
mod managing;
mod measuring;
mod policy;
mod profiling;
mod recording;
mod refusing;
mod timing;
mod waits;
mod watching;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::map::{DeviceKey, MAX_GPUS};
use gpuquota_policy::{Diagnostics, Host, HostGpu, Policy};
use tokio::sync::broadcast;
use tracing::warn;

use crate::{
    alone::{Alone, NotAlone},
    backend::{Choice, Lacking, NotOffered},
    baseline::Baselines,
    cards::Cards,
    cgroup::{CgroupError, Hierarchy},
    config::{Config, MemoryBackend},
    control::Notice,
    driver::{Driver, DriverError, Topology, nvidia::Nvidia},
    ending::Endings,
    high::HighWater,
    history::History,
    idle::Idle,
    insight::Leaks,
    kernel::{Kernel, KernelError, PinDir},
    launch::{Launches, attach},
    lifecycle::Proc,
    open_files::OpenFiles,
    policy_files::FileError,
    profile::Profiles,
    stir::Stir,
    telemetry::{EnergyReadings, Telemetry, TelemetryError},
    tenancy::{PathCache, Seating, TenancyError},
    time::TimeControl,
};

pub(crate) use answers::ALARMS;
pub use judging::Enrolment;
pub use watching::Watch;

/// How long NVML may take to answer the first time.
const NVML_PATIENCE: Duration = Duration::from_secs(10);
/// Notices that a slow receiver may be behind.
const NOTICES: usize = 1024;

/// Why the daemon cannot start, or a policy cannot come into force.
#[derive(Debug, thiserror::Error)]
pub enum EnforcerError {
    /// The backend that is wanted by name is not there.
    #[error(transparent)]
    NotOffered(#[from] NotOffered),
    /// The kernel side.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The cgroups.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// NVML.
    #[error("{0}; without it the GPUs of the host are not known")]
    Telemetry(#[from] TelemetryError),
    /// A policy file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The policy.
    #[error("{0}")]
    Policy(Diagnostics),
    /// The policy does not fit.
    #[error(transparent)]
    Tenancy(#[from] TenancyError),
    /// A property that `set-property` does not take.
    #[error(transparent)]
    Property(#[from] gpuquota_policy::dropin::DropinError),
    /// A property that another file sets later.
    #[error(
        "{key} is set at {winner}, which counts more than what is set by command; change it there"
    )]
    Shadowed {
        /// Which property.
        key: String,
        /// Where it is set.
        winner: String,
    },
    /// Another daemon.
    #[error(transparent)]
    NotAlone(#[from] NotAlone),
    /// Launch budgets.
    #[error(transparent)]
    Launch(#[from] attach::StartError),
    /// The pins.
    #[error("{path}: {source}")]
    Pins {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A thread or a descriptor.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// The policy in force and what follows from it.
#[derive(Clone)]
struct InForce {
    policy: Arc<Policy>,
    seating: Seating,
    generation: u64,
    /// Roots of tenants: cgroup id to tenant index and path.
    roots: BTreeMap<u64, (u32, String)>,
    warnings: Vec<String>,
}

/// The enforcement core.
pub struct Enforcer {
    config: Config,
    kernel: Arc<Kernel>,
    hierarchy: Hierarchy,
    telemetry: Telemetry,
    energy: Arc<EnergyReadings>,
    topology: Topology,
    /// The driver's node for managed memory, once it is there.
    managed_node: OnceLock<DeviceKey>,
    host: Host,
    driver_version: String,
    /// False for a driver that is not known: then everything is observed and nothing refused.
    enforcing: bool,
    choice: Choice,
    lacking: Lacking,
    endings: Endings,
    high: Mutex<HighWater>,
    /// Cards on which lower classes are giving back.
    making_room: Mutex<BTreeSet<u32>>,
    contexts: Mutex<contexts::ContextState>,
    /// What [`Self::contexts`] found, for whoever asks while it is held.
    sums: Mutex<contexts::SumsByPlace>,
    /// How much of each card there is to reserve from.
    cards: Cards,
    /// False for a driver that is not known: then nobody's GPU time is touched.
    known_driver: bool,
    /// Why maps and links are not pinned, if they are not.
    unpinned: Option<String>,
    processes: Arc<Proc>,
    open_files: OpenFiles,
    time: TimeControl,
    launches: Arc<Launches>,
    leaks: Leaks,
    idle: Idle,
    profiles: Profiles,
    /// Read and replaced as a whole: nobody holds this lock while it does anything else, whatever else it holds.
    in_force: Mutex<Arc<InForce>>,
    /// Tenants of cgroup paths, as the policy in force says.
    paths: Mutex<PathCache>,
    /// Held while cgroups are matched with tenants: the news of a cgroup must not come between a walk and its outcome.
    matching: Mutex<()>,
    /// Held while a policy is being changed, from reading the files to the kernel: one change at a time.
    changing: Mutex<()>,
    notices: broadcast::Sender<Notice>,
    loads: measuring::Loads,
    served: measuring::Served,
    waits: Mutex<waits::Waits>,
    faults: Mutex<faulting::Faults>,
    history: Mutex<History>,
    baselines: Mutex<Baselines>,
    stir: Arc<Stir>,
    _alone: Alone,
    stopping: AtomicBool,
}

impl Enforcer {
    /// Looks at the host, attaches the kernel side, and puts the policy on disk into force.
    ///
    /// Returns the enforcer and the ring of events, which [`Enforcer::watch`] serves. Nothing is attached if
    /// the policy does not load.
    pub fn start(config: Config) -> Result<(Arc<Self>, RingBuf<MapData>), EnforcerError> {
        let hierarchy = Hierarchy::open(config.cgroup_root.as_deref())?;
        let energy: Arc<EnergyReadings> = Arc::default();
        let stir = Arc::new(Stir::default());
        let telemetry = Telemetry::nvml(
            config.enforcement.reconcile_interval,
            Arc::clone(&stir),
            config.gpu.nvml_library.as_deref(),
            Arc::clone(&energy),
        )
        .map_err(system("starting the NVML thread"))?;
        let snapshot = telemetry.first(NVML_PATIENCE)?;
        let driver = Nvidia::new(&config.gpu.device_dir);
        let topology = driver.discover(&snapshot.cards)?;
        let host = Host {
            gpus: snapshot
                .cards
                .iter()
                .map(|card| HostGpu {
                    index: card.index,
                    uuid: card.uuid.clone(),
                    memory: card.memory_total,
                })
                .collect(),
        };
        // Everything that an admin can have written wrongly is found before the kernel is touched.
        policy::load(&config.policy, &host)?;
        let known = driver.knows_version(&snapshot.driver_version)
            || config.gpu.accept_driver.contains(&snapshot.driver_version);
        if !known {
            warn!(
                version = snapshot.driver_version,
                "this driver version is not known: OBSERVING ONLY, nothing is enforced; add it to \
                 gpu.accept-driver once you have tried it"
            );
        }
        let memory = config.enforcement.memory;
        let control = config.gpu.device_dir.join("nvidiactl");
        let processes = Proc::new(&control).map_err(system("looking at nvidiactl"))?;
        let alone = Alone::with(&control, processes.control())?;
        let (pins, unpinned) = open_pins(&config)?;
        let (kernel, events) = Kernel::attach(pins.as_ref())?;
        let enforcing = known && memory != MemoryBackend::Observe;
        let (choice, lacking) = refusing::establish(&kernel, pins.as_ref(), &config, enforcing)?;
        let (notices, _) = broadcast::channel(NOTICES);
        let kernel = Arc::new(kernel);
        let processes = Arc::new(processes);
        let open_files = OpenFiles::new(Arc::clone(&kernel), Arc::clone(&processes), &control);
        let enforcer = Arc::new(Self {
            in_force: Mutex::new(Arc::new(InForce {
                policy: Arc::default(),
                seating: governing::restore_seating(&kernel)?,
                generation: kernel.settings()?.generation,
                roots: BTreeMap::new(),
                warnings: Vec::new(),
            })),
            paths: Mutex::default(),
            matching: Mutex::default(),
            config,
            launches: Arc::new(Launches::new(Arc::clone(&kernel))),
            leaks: Leaks::default(),
            idle: Idle::default(),
            profiles: Profiles::default(),
            kernel,
            hierarchy,
            telemetry,
            energy,
            topology,
            managed_node: OnceLock::new(),
            host,
            driver_version: snapshot.driver_version.clone(),
            enforcing,
            choice,
            lacking,
            endings: Endings::default(),
            high: Mutex::default(),
            making_room: Mutex::default(),
            contexts: Mutex::default(),
            sums: Mutex::default(),
            cards: Cards::default(),
            known_driver: known,
            unpinned,
            open_files,
            processes,
            time: TimeControl::default(),
            changing: Mutex::new(()),
            notices,
            loads: measuring::Loads::default(),
            served: measuring::Served::default(),
            waits: Mutex::default(),
            faults: Mutex::default(),
            history: Mutex::default(),
            baselines: Mutex::default(),
            stir,
            _alone: alone,
            stopping: AtomicBool::new(false),
        });
        enforcer.describe_host()?;
        enforcer.reload_policy()?;
        // Last: tenants are known by now.
        enforcer.close_or_open(pins.as_ref())?;
        Ok((enforcer, events))
    }

    /// Checks settings and policy without touching the kernel side. Without a GPU, what depends on the GPUs of
    /// the host is not checked.
    pub fn check(config: &Config) -> Result<(), EnforcerError> {
        let sources = crate::policy_files::read(&config.policy)?;
        Policy::load(&sources, None)
            .map(drop)
            .map_err(EnforcerError::Policy)
    }

    /// Tells the kernel side about devices, GPUs and this daemon.
    fn describe_host(&self) -> Result<(), KernelError> {
        self.kernel.set_devices(&self.topology.devices)?;
        self.find_managed_node();
        for instance in 0..MAX_GPUS {
            let gpu = self
                .topology
                .gpus
                .iter()
                .find(|gpu| gpu.instance == instance)
                .map_or(u32::MAX, |gpu| gpu.card.index);
            self.kernel.set_instance(instance, gpu)?;
        }
        let gpus = self.gpu_count();
        self.kernel.update_settings(|settings| {
            settings.daemon_tgid = std::process::id();
            settings.gpus = gpus;
            settings.heartbeat_ns = monotonic_ns();
        })
    }

    /// GPUs of the host; bounded by the layouts.
    fn gpu_count(&self) -> u32 {
        u32::try_from(self.topology.gpus.len()).unwrap_or(MAX_GPUS)
    }

    /// The settings that the daemon runs with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The kernel side.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Says that the daemon is about to end: threads that ask stop.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Whoever pauses looks at that.
        self.stir.news();
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn notify(&self, notice: Notice) {
        // Nobody listening is fine.
        let _ = self.notices.send(notice);
    }

    fn read(&self) -> Arc<InForce> {
        Arc::clone(&self.in_force.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces what is in force; who has read it before keeps what was.
    fn replace<T>(&self, change: impl FnOnce(&mut InForce) -> T) -> T {
        let mut now = self.in_force.lock().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut now))
    }

    fn matching(&self) -> MutexGuard<'_, ()> {
        self.matching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the pin folder. A host without a BPF file system is served without pins, and says so.
fn open_pins(config: &Config) -> Result<(Option<PinDir>, Option<String>), EnforcerError> {
    match PinDir::open(&config.bpf_directory) {
        Ok(pins) => Ok((Some(pins), None)),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            warn!(%error, "the ledger is not pinned: a restart of the daemon forgets it");
            Ok((None, Some(error.to_string())))
        }
        Err(source) => Err(EnforcerError::Pins {
            path: config.bpf_directory.clone(),
            source,
        }),
    }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> EnforcerError {
    move |source| EnforcerError::System { what, source }
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of the kernel side.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither part is negative on this clock.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
