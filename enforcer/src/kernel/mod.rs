//! The kernel side as user space sees it: programs, maps, ledger operations, events.
//!
//! [`Kernel`] is the only place that touches BPF objects. It outlives the daemon: maps and links are pinned
//! under the BPF file system, so a restart finds the ledger as it was and nobody runs unobserved meanwhile.

mod clients;
mod deny;
pub mod idle;
pub mod insight;
pub mod launch;
mod leftovers;
mod offsets;
mod pins;
mod preemption;
mod probe;
pub mod profile;
mod table;
mod tracefs;
mod ungoverned;
mod uprobe_multi;
mod xid;

use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering, fence},
    },
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader, RawTracePointRunOptions, TestRun as _,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf},
    programs::{
        ProgramError, RawTracePoint, TracePoint,
        links::{FdLink, LinkError, PinnedLink},
    },
};
use gpuquota_common::{
    claim,
    map::{
        AccountKey, Admitted, Budget, CELLS, Card, Client, Device, DeviceKey, InFlight,
        MAX_TENANTS, NAME_LEN, Object, ObjectKey, PLACES, Process, Settings, TenantName, TenantRow,
        Usage, banked, cell, counter,
    },
    op,
    time::{Frozen, FrozenKey},
    waiting::Queue,
};

use self::{launch::LaunchProgram, table::Table};

pub(crate) use deny::COMPAT_IOCTL;
pub use deny::DenyHook;
pub use launch::{LaunchMaps, LaunchPrograms};
pub use leftovers::Leftovers;
pub use offsets::OffsetError;
pub use pins::PinDir;
pub use probe::Probe;
pub use tracefs::{TracefsError, xid_tracepoint};
pub use xid::XidTracepoint;

/// The programs, embedded.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/gpuquota-ebpf"));

/// Maps that live on across restarts.
const PINNED_MAPS: &[&str] = &[
    "SETTINGS",
    "TENANTS",
    "NAMES",
    "BUDGETS",
    "USAGE",
    "CARDS",
    "CARD_SIZES",
    "CGROUPS",
    "DEVICES",
    "INSTANCES",
    "OBJECTS",
    "CLIENTS",
    "ACCOUNTS",
    "PROCESSES",
    "IN_FLIGHT",
    "ADMITTED",
    "COUNTERS",
    "EVENTS",
    "FROZEN",
    "EXEMPT",
];

/// A hook that the observer needs.
#[derive(Clone, Copy, Debug)]
pub enum Hook {
    /// A tracepoint, by group and name.
    Tracepoint(&'static str, &'static str),
    /// A tracepoint without its record.
    Raw(&'static str),
}

/// Programs and where they go, in the order of attachment: calls are settled before they are counted.
pub const HOOKS: &[(&str, Hook)] = &[
    ("process_exit", Hook::Raw("sched_process_exit")),
    ("process_fork", Hook::Raw("sched_process_fork")),
    ("process_exec", Hook::Raw("sched_process_exec")),
    ("launch_signal", Hook::Raw("signal_generate")),
    ("cgroup_mkdir", Hook::Tracepoint("cgroup", "cgroup_mkdir")),
    ("cgroup_rmdir", Hook::Tracepoint("cgroup", "cgroup_rmdir")),
    ("ioctl_exit", Hook::Tracepoint("syscalls", "sys_exit_ioctl")),
    (
        "ioctl_enter",
        Hook::Tracepoint("syscalls", "sys_enter_ioctl"),
    ),
];

/// More of them, for a kernel that may pass over those on ioctls: each goes before its counterpart above.
pub const LATE_HOOKS: &[(&str, Hook)] = &[
    ("late_enter", Hook::Tracepoint("syscalls", "sys_exit_ioctl")),
    ("late_exit", Hook::Tracepoint("syscalls", "sys_enter_ioctl")),
];

/// The programs for this host, in the order of attachment.
fn hooks() -> impl Iterator<Item = &'static (&'static str, Hook)> {
    let late: &[_] = if preemption::is_preemptible() {
        LATE_HOOKS
    } else {
        &[]
    };
    late.iter().chain(HOOKS)
}

/// What can go wrong with the kernel side.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The object does not load.
    #[error("the eBPF object does not load: {0}")]
    Load(#[from] aya::EbpfError),
    /// A program is refused.
    #[error("program {program}: {source}")]
    Program {
        /// Its name.
        program: &'static str,
        /// Why.
        source: ProgramError,
    },
    /// A link cannot be kept.
    #[error("link of program {program}: {source}")]
    Link {
        /// Name of the program.
        program: &'static str,
        /// Why.
        source: LinkError,
    },
    /// A process cannot be probed.
    #[error("probes in {file}: {source}")]
    Probe {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A pin cannot be made or replaced.
    #[error("pin {path}: {source}")]
    Pin {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A map operation fails.
    #[error("map {map}: {source}")]
    Map {
        /// Which map.
        map: &'static str,
        /// Why.
        source: MapError,
    },
    /// A map cannot be seen in the daemon's memory.
    #[error("mapping {map} into memory: {source}")]
    Mapping {
        /// Its name.
        map: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// No entry of that index.
    #[error("{map} has {entries} entries, and none at {index}")]
    OutOfTable {
        /// The map's name.
        map: &'static str,
        /// The index.
        index: u32,
        /// How many there are.
        entries: u32,
    },
    /// The object lacks something that this version of the daemon expects.
    #[error("the eBPF object has no {0}")]
    Missing(&'static str),
    /// A layout of the running kernel cannot be found.
    #[error(transparent)]
    Offsets(#[from] OffsetError),
    /// A tracepoint's record is not as expected.
    #[error(transparent)]
    Tracefs(#[from] TracefsError),
    /// The CPUs of the host are not told.
    #[error("{path}: {source}")]
    Cpus {
        /// Where they should be.
        path: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A ledger operation did not do what it should.
    #[error("ledger operation {operation} answered {answer}")]
    Operation {
        /// Its number.
        operation: u64,
        /// What it answered.
        answer: u32,
    },
}

/// A charge for memory that no call asks RM for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApartCharge {
    /// Process.
    pub tgid: u32,
    /// GPU.
    pub gpu: u32,
    /// Tenant that pays.
    pub tenant: u32,
    /// Its cgroup.
    pub cgroup: u64,
    /// Bytes from now on.
    pub bytes: u64,
    /// Whether a limit that this exceeds is a breach.
    pub report: bool,
    /// Managed memory; else what the driver takes by itself.
    pub managed: bool,
}

impl ApartCharge {
    fn words(&self, above: u64) -> [u64; 8] {
        [
            op::CHARGE_APART,
            u64::from(self.tgid),
            u64::from(self.tenant),
            u64::from(self.gpu),
            self.bytes,
            self.cgroup,
            above,
            u64::from(self.managed),
        ]
    }
}

/// Answer to a request for admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Reserved: the call may go on.
    Granted,
    /// A budget is in the way.
    Refused,
    /// A budget is in the way now; the caller is to try again.
    Wait,
    /// The exit of the thread's last call was not seen: that is to be settled first ([`Kernel::settle`]).
    Unsettled,
}

/// Programs and maps.
pub struct Kernel {
    ebpf: Mutex<Ebpf>,
    launch: LaunchMaps,
    /// Loaded when a tenant first has a launch budget: the kernel looks at them for long.
    launch_programs: OnceLock<LaunchPrograms>,
    /// The maps' descriptors, by name.
    descriptors: std::collections::HashMap<String, RawFd>,
    /// Links that are not pinned, because there is no BPF file system; dropped with the daemon.
    _links: Vec<FdLink>,
    /// The same for the programs that refuse.
    deny_links: Mutex<Vec<FdLink>>,
    /// The same for the program that closes the GPUs.
    device_link: Mutex<Option<OwnedFd>>,
    settings: Mutex<Array<MapData, Settings>>,
    tenants: Table<TenantRow>,
    names: Table<TenantName>,
    budgets: Table<Budget>,
    cgroups: Mutex<HashMap<MapData, u64, u32>>,
    devices: Mutex<HashMap<MapData, DeviceKey, Device>>,
    instances: Mutex<Array<MapData, u32>>,
    processes: Mutex<HashMap<MapData, u32, Process>>,
    frozen: Mutex<HashMap<MapData, FrozenKey, Frozen>>,
    queues: Mutex<HashMap<MapData, u32, Queue>>,
    /// Whether there is any queue; none outlives the daemon.
    has_queues: AtomicBool,
    exempt: Mutex<HashMap<MapData, u64, u32>>,
    card_sizes: Table<u64>,
    usage: Table<Usage>,
    cards: Table<Card>,
    objects: HashMap<MapData, ObjectKey, Object>,
    clients: HashMap<MapData, u32, Client>,
    accounts: HashMap<MapData, AccountKey, u64>,
    in_flight: HashMap<MapData, u32, InFlight>,
    admitted: HashMap<MapData, u32, Admitted>,
    counters: PerCpuArray<MapData, u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in another thread leaves maps as they are; they hold no half-made state of ours.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a removal failed because there was nothing to remove.
fn is_missing(error: &MapError) -> bool {
    match error {
        MapError::KeyNotFound => true,
        MapError::SyscallError(error) => error.io_error.raw_os_error() == Some(libc::ENOENT),
        _ => false,
    }
}

fn map_error(map: &'static str) -> impl Fn(MapError) -> KernelError {
    move |source| KernelError::Map { map, source }
}

impl Kernel {
    /// Loads the programs, takes over the pinned ledger if there is one, and attaches every hook.
    ///
    /// `pins` is `None` on a host without a BPF file system: everything then ends with the daemon.
    /// Returns the kernel side and the ring of events.
    pub fn attach(pins: Option<&PinDir>) -> Result<(Self, RingBuf<MapData>), KernelError> {
        tracefs::check_records()?;
        let offsets = offsets::lookup(Path::new("/sys/kernel/btf/vmlinux"))?;
        let mut loader = EbpfLoader::new();
        for (name, offset) in &offsets {
            loader.override_global(name, offset, true);
        }
        let number = load_number();
        loader.override_global("LOADED_BY", &number, true);
        if let Some(pins) = pins {
            for map in PINNED_MAPS.iter().chain(launch::PINNED) {
                loader.map_pin_path(map, pins.map(map));
            }
        }
        let mut ebpf = loader.load(OBJECT)?;
        // It holds all types of the kernel, which take more memory than the daemon does afterwards.
        drop(loader);
        crate::heap::give_back();
        load(&mut ebpf)?;
        let descriptors = uprobe_multi::map_descriptors(&ebpf);
        let kernel_maps = Maps::take(&mut ebpf)?;
        let launch = LaunchMaps::take(&mut ebpf)?;
        let links = attach_hooks(&mut ebpf, pins)?;
        let Maps {
            settings,
            tenants,
            names,
            budgets,
            cgroups,
            devices,
            instances,
            processes,
            frozen,
            queues,
            exempt,
            card_sizes,
            usage,
            cards,
            objects,
            clients,
            accounts,
            in_flight,
            admitted,
            counters,
            events,
        } = kernel_maps;
        let kernel = Self {
            ebpf: Mutex::new(ebpf),
            launch,
            launch_programs: OnceLock::new(),
            descriptors,
            _links: links,
            deny_links: Mutex::default(),
            device_link: Mutex::default(),
            queues: Mutex::new(queues),
            has_queues: AtomicBool::new(false),
            exempt: Mutex::new(exempt),
            settings: Mutex::new(settings),
            tenants,
            names,
            budgets,
            cgroups: Mutex::new(cgroups),
            devices: Mutex::new(devices),
            instances: Mutex::new(instances),
            processes: Mutex::new(processes),
            frozen: Mutex::new(frozen),
            card_sizes,
            usage,
            cards,
            objects,
            clients,
            accounts,
            in_flight,
            admitted,
            counters,
        };
        Ok((kernel, events))
    }

    /// The maps of launch budgets.
    pub fn launch(&self) -> &LaunchMaps {
        &self.launch
    }

    /// The launch programs, loaded at first use.
    pub fn launch_programs(&self) -> &LaunchPrograms {
        self.launch_programs
            .get_or_init(|| LaunchPrograms::load(&mut lock(&self.ebpf), &self.descriptors))
    }

    /// Puts launch probes into a process: at places of a file, each with its cookie.
    ///
    /// `thread` is the process itself, or another thread of it once the first has ended.
    pub fn attach_launch(
        &self,
        program: LaunchProgram,
        (process, thread): (u32, u32),
        file: &Path,
        points: &[(u64, u64)],
    ) -> Result<Vec<Probe>, KernelError> {
        let loaded = self.launch_programs();
        let program = match program {
            LaunchProgram::Spin if loaded.no_spin().is_some() => LaunchProgram::Launch,
            other => other,
        };
        let name = program.name();
        if let Some(multi) = loaded.multi.as_ref().filter(|_| process == thread) {
            let returns = program == LaunchProgram::GraphReturn;
            return multi
                .program(program)
                .attach(process, file, points, returns)
                .map(|link| vec![Probe::Many(link)])
                .map_err(|source| KernelError::Probe {
                    file: file.to_owned(),
                    source,
                });
        }
        let mut program = probe::own_handle(&lock(&self.ebpf), name, program.kind())?;
        probe::attach_one_by_one(&mut program, name, thread, file, points)
    }

    /// Fills a bucket.
    pub fn fill_launches(&self, tenant: u32, span: u64) -> Result<(), KernelError> {
        self.run(
            "launch_op",
            &[gpuquota_common::launch::op::RESET, u64::from(tenant), span],
        )
        .map(drop)
    }

    /// The settings as the programs see them.
    pub fn settings(&self) -> Result<Settings, KernelError> {
        lock(&self.settings)
            .get(&0, 0)
            .map_err(map_error("SETTINGS"))
    }

    /// Changes the settings; the daemon is their only writer.
    pub fn update_settings(&self, change: impl FnOnce(&mut Settings)) -> Result<(), KernelError> {
        let mut map = lock(&self.settings);
        let mut settings = map.get(&0, 0).map_err(map_error("SETTINGS"))?;
        change(&mut settings);
        // Whoever reads a new generation reads the tables that were written for it.
        fence(Ordering::Release);
        map.set(0, settings, 0).map_err(map_error("SETTINGS"))
    }

    /// Writes a tenant's row into the bank of `generation`.
    pub fn set_tenant(
        &self,
        generation: u64,
        tenant: u32,
        row: TenantRow,
    ) -> Result<(), KernelError> {
        self.tenants
            .set(banked(generation, tenant, MAX_TENANTS), row)
    }

    /// Reads a tenant's row from the bank of `generation`.
    pub fn tenant(&self, generation: u64, tenant: u32) -> Result<TenantRow, KernelError> {
        self.tenants.get(banked(generation, tenant, MAX_TENANTS))
    }

    /// Writes the name of a tenant; names are at most [`NAME_LEN`] bytes.
    pub fn set_name(&self, tenant: u32, name: &str) -> Result<(), KernelError> {
        let mut padded = [0; NAME_LEN];
        for (slot, byte) in padded.iter_mut().zip(name.bytes()) {
            *slot = byte;
        }
        self.names.set(tenant, padded)
    }

    /// The name of a tenant; empty where none was ever written.
    pub fn name(&self, tenant: u32) -> Result<String, KernelError> {
        let padded = self.names.get(tenant)?;
        let length = padded
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(NAME_LEN);
        Ok(String::from_utf8_lossy(&padded[..length]).into_owned())
    }

    /// Writes limits at a place into the bank of `generation`.
    pub fn set_budget(
        &self,
        generation: u64,
        tenant: u32,
        place: u32,
        budget: Budget,
    ) -> Result<(), KernelError> {
        self.budgets
            .set(banked(generation, cell(tenant, place), CELLS), budget)
    }

    /// Makes the queue in which allocations of a tenant at a place wait; one that is there stays.
    pub fn make_queue(&self, tenant: u32, place: u32) -> Result<(), KernelError> {
        // BPF_NOEXIST: who waits in it keeps the place.
        const IF_NONE: u64 = 1;
        self.has_queues.store(true, Ordering::Relaxed);
        match lock(&self.queues).insert(cell(tenant, place), Queue::default(), IF_NONE) {
            Err(MapError::SyscallError(error))
                if error.io_error.raw_os_error() == Some(libc::EEXIST) =>
            {
                Ok(())
            }
            other => other.map_err(map_error("QUEUES")),
        }
    }

    /// How many allocations wait in each queue, by tenant and place: those that came back within `fresh` before `now_ns`.
    pub fn waiting(&self, now_ns: u64, fresh: Duration) -> BTreeMap<(u32, u32), usize> {
        if !self.has_queues.load(Ordering::Relaxed) {
            return BTreeMap::new();
        }
        let fresh = u64::try_from(fresh.as_nanos()).unwrap_or(u64::MAX);
        lock(&self.queues)
            .iter()
            .filter_map(Result::ok)
            .map(|(cell, queue)| {
                let waiting = queue
                    .slots
                    .iter()
                    .filter(|slot| slot.ticket != 0)
                    .filter(|slot| now_ns.saturating_sub(slot.seen_ns) < fresh)
                    .count();
                ((cell / PLACES, cell % PLACES), waiting)
            })
            .collect()
    }

    /// What a tenant uses at a place.
    pub fn usage(&self, tenant: u32, place: u32) -> Result<Usage, KernelError> {
        let mut usage = self.usage.get(cell(tenant, place))?;
        // Whoever gives back lets go of the claim first, and limits are compared with that.
        usage.memory = usage.memory.min(claim::bytes(claim::used(usage.claim)));
        Ok(usage)
    }

    /// What is claimed of a card.
    pub fn card(&self, gpu: u32) -> Result<Card, KernelError> {
        self.cards.get(gpu)
    }

    /// Says how much may be claimed of a card; `None`: no bound.
    pub fn set_card_size(&self, gpu: u32, size: Option<u64>) -> Result<(), KernelError> {
        self.card_sizes.set(gpu, size.unwrap_or(u64::MAX))
    }

    /// Reserves memory for a tenant at a place, in place of what was reserved before. One caller at a time.
    pub fn reserve(&self, tenant: u32, place: u32, bytes: u64) -> Result<(), KernelError> {
        self.done(&[op::RESERVE, u64::from(tenant), u64::from(place), bytes])
    }

    /// The cgroups that are tenants' roots: id and tenant.
    pub fn cgroups(&self) -> Result<Vec<(u64, u32)>, KernelError> {
        lock(&self.cgroups)
            .iter()
            .collect::<Result<_, _>>()
            .map_err(map_error("CGROUPS"))
    }

    /// Makes a cgroup the root of a tenant, or of none, and drops cached answers.
    pub fn set_cgroup(&self, cgroup: u64, tenant: Option<u32>) -> Result<(), KernelError> {
        {
            let mut map = lock(&self.cgroups);
            match tenant {
                Some(tenant) => map.insert(cgroup, tenant, 0),
                None => match map.remove(&cgroup) {
                    Err(error) if !is_missing(&error) => Err(error),
                    _ => Ok(()),
                },
            }
            .map_err(map_error("CGROUPS"))?;
        }
        self.update_settings(|settings| {
            settings.cgroup_epoch = settings.cgroup_epoch.wrapping_add(1);
        })
    }

    /// Replaces the known devices.
    pub fn set_devices(&self, devices: &[(DeviceKey, Device)]) -> Result<(), KernelError> {
        let mut map = lock(&self.devices);
        let known: Vec<DeviceKey> = map
            .keys()
            .collect::<Result<_, _>>()
            .map_err(map_error("DEVICES"))?;
        for key in known {
            if !devices.iter().any(|(wanted, _)| *wanted == key) {
                map.remove(&key).map_err(map_error("DEVICES"))?;
            }
        }
        for (key, device) in devices {
            map.insert(key, device, 0).map_err(map_error("DEVICES"))?;
        }
        Ok(())
    }

    /// Adds a device of the driver.
    pub fn add_device(&self, key: DeviceKey, device: Device) -> Result<(), KernelError> {
        lock(&self.devices)
            .insert(key, device, 0)
            .map_err(map_error("DEVICES"))
    }

    /// Says which GPU the driver's device instance is.
    pub fn set_instance(&self, instance: u32, gpu: u32) -> Result<(), KernelError> {
        lock(&self.instances)
            .set(instance, gpu, 0)
            .map_err(map_error("INSTANCES"))
    }

    /// All objects of the ledger.
    ///
    /// Not a snapshot: objects that come and go meanwhile may be missed or seen.
    pub fn objects(&self) -> impl Iterator<Item = (ObjectKey, Object)> + '_ {
        self.objects.iter().filter_map(Result::ok)
    }

    /// One object.
    pub fn object(&self, key: ObjectKey) -> Option<Object> {
        self.objects.get(&key, 0).ok()
    }

    /// All accounts: charged bytes by process, tenant and GPU.
    pub fn accounts(&self) -> impl Iterator<Item = (AccountKey, u64)> + '_ {
        self.accounts.iter().filter_map(Result::ok)
    }

    /// Processes that have spoken to the driver or inherited from one that has.
    pub fn processes(&self) -> Vec<(u32, Process)> {
        lock(&self.processes)
            .iter()
            .filter_map(Result::ok)
            .collect()
    }

    /// One process.
    pub fn process(&self, tgid: u32) -> Option<Process> {
        lock(&self.processes).get(&tgid, 0).ok()
    }

    /// Forgets a process. Its accounts are closed separately.
    pub fn forget_process(&self, tgid: u32) -> Result<(), KernelError> {
        match lock(&self.processes).remove(&tgid) {
            Err(error) if !is_missing(&error) => Err(map_error("PROCESSES")(error)),
            _ => Ok(()),
        }
    }

    /// What is frozen, by this daemon or one before it.
    pub fn frozen(&self) -> Vec<(FrozenKey, Frozen)> {
        lock(&self.frozen).iter().filter_map(Result::ok).collect()
    }

    /// Writes down that something is about to be frozen.
    pub fn set_frozen(&self, key: FrozenKey, frozen: Frozen) -> Result<(), KernelError> {
        lock(&self.frozen)
            .insert(key, frozen, 0)
            .map_err(map_error("FROZEN"))
    }

    /// Writes down that something is thawed.
    pub fn clear_frozen(&self, key: FrozenKey) -> Result<(), KernelError> {
        match lock(&self.frozen).remove(&key) {
            Err(source) if !is_missing(&source) => Err(map_error("FROZEN")(source)),
            _ => Ok(()),
        }
    }

    /// Calls between entry and exit, by thread.
    pub fn in_flight(&self) -> impl Iterator<Item = (u32, InFlight)> + '_ {
        self.in_flight.iter().filter_map(Result::ok)
    }

    /// Admissions whose call has not come yet, by thread.
    pub fn admitted(&self) -> impl Iterator<Item = (u32, Admitted)> + '_ {
        self.admitted.iter().filter_map(Result::ok)
    }

    /// The counters, summed over CPUs; see [`counter`].
    pub fn counters(&self) -> Result<[u64; counter::COUNT as usize], KernelError> {
        let mut sums = [0; counter::COUNT as usize];
        for (index, sum) in (0..counter::COUNT).zip(&mut sums) {
            *sum = self.counter(index)?;
        }
        Ok(sums)
    }

    /// One of them.
    pub fn counter(&self, index: u32) -> Result<u64, KernelError> {
        let by_cpu = self
            .counters
            .get(&index, 0)
            .map_err(map_error("COUNTERS"))?;
        Ok(by_cpu.iter().sum())
    }

    /// Whether this kernel may pass over programs, see [`Kernel::passed_over`].
    pub fn may_pass_over() -> bool {
        preemption::is_preemptible()
    }

    /// How often the kernel has passed over the programs that follow ioctls, since they were loaded. It does so while a task
    /// on the same CPU is preempted in the middle of an operation on a map, or since Linux 7.2 in the same program.
    pub fn passed_over(&self) -> Result<u64, KernelError> {
        let ebpf = lock(&self.ebpf);
        let mut sum = 0;
        for name in ["ioctl_enter", "ioctl_exit"] {
            let program: &TracePoint = ebpf
                .program(name)
                .ok_or(KernelError::Missing(name))?
                .try_into()
                .map_err(program_error(name))?;
            let fd = program.fd().map_err(program_error(name))?;
            let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
            // Before Linux 5.12 it is not told.
            let text = std::fs::read_to_string(path).unwrap_or_default();
            sum += text
                .lines()
                .find_map(|line| line.strip_prefix("recursion_misses:"))
                .and_then(|misses| misses.trim().parse::<u64>().ok())
                .unwrap_or(0);
        }
        Ok(sum)
    }

    /// Reserves `bytes` for a thread whose driver call waits for a decision.
    pub fn admit(&self, request: AdmissionRequest) -> Result<Admission, KernelError> {
        let AdmissionRequest {
            thread,
            tenant,
            gpu,
            bytes,
            arg,
            cmd,
        } = request;
        let answer = self.operation(&[
            op::ADMIT,
            u64::from(thread),
            u64::from(tenant),
            u64::from(gpu),
            bytes,
            arg,
            u64::from(cmd),
        ])?;
        match answer {
            op::result::OK => Ok(Admission::Granted),
            op::result::DENIED | op::result::DENIED_AGAIN => Ok(Admission::Refused),
            op::result::WAIT => Ok(Admission::Wait),
            op::result::UNSETTLED => Ok(Admission::Unsettled),
            answer => Err(KernelError::Operation {
                operation: op::ADMIT,
                answer,
            }),
        }
    }

    /// Settles the last call of a thread, whose exit the kernel has not shown to the programs, while it waits in its next one.
    pub fn settle(&self, thread: u32, tgid: u32) -> Result<(), KernelError> {
        self.operation(&[op::SETTLE, u64::from(thread), u64::from(tgid)])
            .map(drop)
    }

    /// Undoes the last admission of a thread: its call will never come.
    pub fn cancel(&self, thread: u32) -> Result<(), KernelError> {
        self.operation(&[op::CANCEL, u64::from(thread), 0])
            .map(drop)
    }

    /// The same if there was no other one meanwhile.
    pub fn cancel_this(&self, thread: u32, admitted: &Admitted) -> Result<(), KernelError> {
        self.operation(&[op::CANCEL, u64::from(thread), admitted.at_ns])
            .map(drop)
    }

    /// Counts and reports that a thread may have no managed memory.
    pub fn refuse_managed(
        &self,
        thread: u32,
        tenant: u32,
        gpu: u32,
        bytes: u64,
    ) -> Result<(), KernelError> {
        self.done(&[
            op::REFUSE_MANAGED,
            u64::from(thread),
            u64::from(tenant),
            u64::from(gpu),
            bytes,
        ])
    }

    /// Releases an object; one that is gone already is fine.
    pub fn release_object(&self, key: ObjectKey) -> Result<(), KernelError> {
        self.operation(&[
            op::RELEASE_OBJECT,
            u64::from(key.client),
            u64::from(key.handle),
        ])
        .map(drop)
    }

    /// Releases an object if it still is this one, and not another one with its name.
    pub fn release_this(&self, key: ObjectKey, object: &Object) -> Result<(), KernelError> {
        self.operation(&[
            op::RELEASE_OBJECT,
            u64::from(key.client),
            u64::from(key.handle),
            object.born_ns,
        ])
        .map(drop)
    }

    /// Releases what is left of an account.
    pub fn release_account(&self, key: AccountKey) -> Result<(), KernelError> {
        self.operation(&[
            op::RELEASE_ACCOUNT,
            u64::from(key.tgid),
            u64::from(key.tenant),
            u64::from(key.gpu),
        ])
        .map(drop)
    }

    /// Moves an object and its charge to another process and tenant. `fd` is that of its client's file there.
    pub fn move_object(
        &self,
        key: ObjectKey,
        tgid: u32,
        tenant: u32,
        fd: u32,
    ) -> Result<(), KernelError> {
        self.operation(&[
            op::MOVE_OBJECT,
            u64::from(key.client),
            u64::from(key.handle),
            u64::from(tgid),
            u64::from(tenant),
            u64::from(fd),
        ])
        .map(drop)
    }

    /// Whether the open file at a kernel address, once a control file's, still is that and open.
    pub fn is_open(&self, file: u64) -> Result<bool, KernelError> {
        self.operation(&[op::IS_OPEN, file])
            .map(|answer| answer == op::result::OK)
    }

    /// Whether a descriptor of this process is the open file at a kernel address.
    pub fn is_file(&self, fd: RawFd, file: u64) -> Result<bool, KernelError> {
        self.operation(&[op::IS_FILE, u64::from(fd.cast_unsigned()), file])
            .map(|answer| answer == op::result::OK)
    }

    /// Notes a process that was there before the observer.
    pub fn adopt_process(
        &self,
        tgid: u32,
        start_ns: u64,
        tenant: u32,
        cgroup: u64,
    ) -> Result<(), KernelError> {
        self.done(&[
            op::ADOPT_PROCESS,
            u64::from(tgid),
            start_ns,
            u64::from(tenant),
            cgroup,
        ])
    }

    /// Takes an object of such a process into the ledger, with its charge; a known one stays as it is.
    pub fn adopt_object(&self, key: ObjectKey, object: &Object) -> Result<(), KernelError> {
        self.done(&[
            op::ADOPT_OBJECT,
            u64::from(key.client),
            u64::from(key.handle),
            u64::from(object.tgid),
            u64::from(object.tenant),
            u64::from(object.gpu),
            u64::from(object.kind),
            u64::from(object.class),
            u64::from(object.parent),
            u64::from(object.fd),
            object.bytes,
            object.cgroup,
        ])
    }

    /// Charges a process for what no call asks RM for, in place of what was charged before.
    pub fn charge_apart(&self, charge: &ApartCharge) -> Result<(), KernelError> {
        let above = if charge.report {
            op::above::BREACH
        } else {
            op::above::CHARGE
        };
        self.done(&charge.words(above))
    }

    /// Charges a process apart, if no limit is in the way; returns whether it did.
    pub fn admit_apart(&self, charge: &ApartCharge) -> Result<bool, KernelError> {
        match self.operation(&charge.words(op::above::REFUSE))? {
            op::result::OK => Ok(true),
            op::result::DENIED => Ok(false),
            answer => Err(KernelError::Operation {
                operation: op::CHARGE_APART,
                answer,
            }),
        }
    }

    /// Runs an operation that has to succeed.
    fn done(&self, words: &[u64]) -> Result<(), KernelError> {
        match self.operation(words)? {
            op::result::OK => Ok(()),
            answer => Err(KernelError::Operation {
                operation: words[0],
                answer,
            }),
        }
    }

    fn operation(&self, words: &[u64]) -> Result<u32, KernelError> {
        self.run("ledger_op", words)
    }

    fn run(&self, name: &'static str, words: &[u64]) -> Result<u32, KernelError> {
        let mut options = RawTracePointRunOptions::new();
        options.args[..words.len()].copy_from_slice(words);
        let ebpf = lock(&self.ebpf);
        let program: &RawTracePoint = ebpf
            .program(name)
            .ok_or(KernelError::Missing(name))?
            .try_into()
            .map_err(program_error(name))?;
        program
            .test_run(options)
            .map(|result| result.return_value)
            .map_err(program_error(name))
    }
}

/// What a deny backend asks the ledger.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest {
    /// The thread that waits in its call.
    pub thread: u32,
    /// Tenant that pays.
    pub tenant: u32,
    /// GPU.
    pub gpu: u32,
    /// Bytes.
    pub bytes: u64,
    /// Argument of the call, after unwrapping: by it the entry hook knows the call again.
    pub arg: u64,
    /// Escape number and size, `nr | size << 16`.
    pub cmd: u32,
}

fn program_error(program: &'static str) -> impl Fn(ProgramError) -> KernelError {
    move |source| KernelError::Program { program, source }
}

/// The maps, taken out of the object.
struct Maps {
    settings: Array<MapData, Settings>,
    tenants: Table<TenantRow>,
    names: Table<TenantName>,
    budgets: Table<Budget>,
    cgroups: HashMap<MapData, u64, u32>,
    devices: HashMap<MapData, DeviceKey, Device>,
    instances: Array<MapData, u32>,
    processes: HashMap<MapData, u32, Process>,
    frozen: HashMap<MapData, FrozenKey, Frozen>,
    queues: HashMap<MapData, u32, Queue>,
    exempt: HashMap<MapData, u64, u32>,
    card_sizes: Table<u64>,
    usage: Table<Usage>,
    cards: Table<Card>,
    objects: HashMap<MapData, ObjectKey, Object>,
    clients: HashMap<MapData, u32, Client>,
    accounts: HashMap<MapData, AccountKey, u64>,
    in_flight: HashMap<MapData, u32, InFlight>,
    admitted: HashMap<MapData, u32, Admitted>,
    counters: PerCpuArray<MapData, u64>,
    events: RingBuf<MapData>,
}

impl Maps {
    fn take(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self {
            settings: take(ebpf, "SETTINGS")?,
            tenants: Table::take(ebpf, "TENANTS")?,
            names: Table::take(ebpf, "NAMES")?,
            budgets: Table::take(ebpf, "BUDGETS")?,
            cgroups: take(ebpf, "CGROUPS")?,
            devices: take(ebpf, "DEVICES")?,
            instances: take(ebpf, "INSTANCES")?,
            processes: take(ebpf, "PROCESSES")?,
            frozen: take(ebpf, "FROZEN")?,
            queues: take(ebpf, "QUEUES")?,
            exempt: take(ebpf, "EXEMPT")?,
            card_sizes: Table::take(ebpf, "CARD_SIZES")?,
            usage: Table::take(ebpf, "USAGE")?,
            cards: Table::take(ebpf, "CARDS")?,
            objects: take(ebpf, "OBJECTS")?,
            clients: take(ebpf, "CLIENTS")?,
            accounts: take(ebpf, "ACCOUNTS")?,
            in_flight: take(ebpf, "IN_FLIGHT")?,
            admitted: take(ebpf, "ADMITTED")?,
            counters: take(ebpf, "COUNTERS")?,
            events: take(ebpf, "EVENTS")?,
        })
    }
}

fn take<M: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, KernelError> {
    ebpf.take_map(name)
        .ok_or(KernelError::Missing(name))?
        .try_into()
        .map_err(map_error(name))
}

/// A number for this load of the programs: another one than that of the programs that they replace.
fn load_number() -> u32 {
    let low = crate::enforcer::monotonic_ns() & u64::from(u32::MAX);
    u32::try_from(low).unwrap_or(0) | 1
}

/// Loads every program, so that a kernel that refuses one refuses before anything is attached.
fn load(ebpf: &mut Ebpf) -> Result<(), KernelError> {
    for (name, hook) in hooks() {
        match hook {
            Hook::Tracepoint(..) => program::<TracePoint>(ebpf, name)?
                .load()
                .map_err(program_error(name))?,
            Hook::Raw(_) => program::<RawTracePoint>(ebpf, name)?
                .load()
                .map_err(program_error(name))?,
        }
    }
    for name in ["ledger_op", "launch_op"] {
        program::<RawTracePoint>(ebpf, name)?
            .load()
            .map_err(program_error(name))?;
    }
    Ok(())
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, KernelError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    ebpf.program_mut(name)
        .ok_or(KernelError::Missing(name))?
        .try_into()
        .map_err(program_error(name))
}

/// Attaches the new programs first and drops the old daemon's links after: no call goes unobserved, and the
/// hooks do not mind to run twice for one.
fn attach_hooks(ebpf: &mut Ebpf, pins: Option<&PinDir>) -> Result<Vec<FdLink>, KernelError> {
    let mut links = Vec::new();
    for (name, hook) in hooks() {
        let link: FdLink = match hook {
            Hook::Tracepoint(group, event) => {
                let program: &mut TracePoint = program(ebpf, name)?;
                let id = program.attach(group, event).map_err(program_error(name))?;
                program
                    .take_link(id)
                    .map_err(program_error(name))?
                    .try_into()
                    .map_err(|source| KernelError::Link {
                        program: name,
                        source,
                    })?
            }
            Hook::Raw(event) => {
                let program: &mut RawTracePoint = program(ebpf, name)?;
                let id = program.attach(event).map_err(program_error(name))?;
                program.take_link(id).map_err(program_error(name))?.into()
            }
        };
        links.push((*name, link));
    }
    let Some(pins) = pins else {
        return Ok(links.into_iter().map(|(_, link)| link).collect());
    };
    for (name, link) in links {
        replace_pin(&pins.link(name), link)?;
    }
    Ok(Vec::new())
}

/// Puts a link in the place of an older one.
fn replace_pin(path: &Path, link: FdLink) -> Result<(), KernelError> {
    let pin_error = |source| KernelError::Pin {
        path: path.to_owned(),
        source,
    };
    if let Ok(old) = PinnedLink::from_pin(path) {
        drop(old.unpin().map_err(pin_error)?);
    }
    link.pin(path)
        .map(drop)
        .map_err(|source| pin_error(std::io::Error::other(source)))
}
