//! The thread that keeps GPU time as it should be.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gpuquota_common::{
    event::{Event, kind},
    map::{DeviceKey, ObjectKey},
};
use tracing::{error, info, warn};

use super::{
    energy::Apart,
    engine::{Engine, Levers as _, Settings},
    gpu::{Gpu, LINGER, Told, chain},
    handles::Place,
    levers::DriverLevers,
    release,
    rules::{Reason, Rule, Rules},
    utilization::{self, Questions, Utilization},
};
use crate::{
    control::{TenantTime, Uncontrolled},
    kernel::Kernel,
    lifecycle::Proc,
    telemetry::EnergyReadings,
};

/// Messages that may wait. More than that, and everything is looked at anew instead.
const INBOX: usize = 16384;
/// How long a command to freeze or thaw may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often what users see is written anew.
const PUBLISH: Duration = Duration::from_millis(200);
/// How often launches are looked at while somebody would have to make room for them.
const LAUNCH_POLL: Duration = Duration::from_millis(2);
/// Who has launched counts as active for so long; longer use of the GPU is seen by NVML.
const LAUNCH_LINGER: Duration = Duration::from_millis(50);

enum Message {
    Event(Event),
    Wake,
    Resync,
    Utilization(Utilization),
    Hold(Hold),
    Stranger(Place, u32, String),
    Ended(u32),
}

/// An order to freeze or thaw.
struct Hold {
    tenant: String,
    gpus: Vec<u32>,
    reason: Reason,
    on: bool,
    done: SyncSender<Held>,
}

/// What came of an order to freeze or thaw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Processes of the tenant that are frozen now.
    pub frozen: Vec<u32>,
    /// Processes of the tenant that are out of reach, and why.
    pub out_of_reach: Vec<(u32, String)>,
}

/// Why an order was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// Time is not controlled at all.
    #[error("GPU time is not controlled; `gpuquotactl doctor` says why")]
    Off,
    /// The thread does not answer.
    #[error("the driver did not carry it out within {PATIENCE:?}")]
    Timeout,
}

/// What users see.
#[derive(Debug, Default)]
struct Status {
    rules: Arc<Rules>,
    /// Tenants of whom there is more to say than what should hold, by tenant index and GPU.
    on: BTreeMap<(u32, u32), TenantTime>,
}

impl Status {
    fn of(&self, tenant: u32, gpu: u32) -> Option<TenantTime> {
        if let Some(known) = self.on.get(&(tenant, gpu)) {
            return Some(known.clone());
        }
        self.rules.get(&tenant)?.gpus.get(&gpu).map(at_rest)
    }
}

/// What there is to say of a tenant that is not on a GPU and never was.
fn at_rest(rule: &Rule) -> TenantTime {
    TenantTime {
        weight: rule.weight,
        max: rule.max,
        ..TenantTime::default()
    }
}

#[derive(Default)]
struct Shared {
    status: Mutex<Status>,
    /// What an admin has to know, by GPU.
    notes: Mutex<Vec<(u32, String)>>,
    /// Energy of nobody and of processes in no tenant, by GPU.
    energy: Mutex<BTreeMap<u32, Apart>>,
    /// For bug reports.
    dump: Mutex<serde_json::Value>,
    /// A policy that came into force.
    rules: Mutex<Option<Rules>>,
    /// Messages were lost: look at everything.
    resync: AtomicBool,
    stop: AtomicBool,
    /// The thread has ended by a fault.
    failed: AtomicBool,
}

/// What the thread needs.
pub struct Parts {
    /// The kernel side.
    pub kernel: Arc<Kernel>,
    /// Processes of the host.
    pub processes: Arc<Proc>,
    /// The driver's control node.
    pub node: DeviceKey,
    /// Round and period.
    pub settings: Settings,
    /// The boards' energy counters.
    pub energy: Arc<EnergyReadings>,
    /// The NVML library.
    pub library: Option<PathBuf>,
    /// When a process launched last, on `CLOCK_MONOTONIC`, if its launches are counted.
    pub last_launch: LastLaunch,
}

/// Tells when a process launched last.
pub type LastLaunch = Box<dyn Fn(u32) -> Option<Duration> + Send>;

/// The thread, seen from outside. Does nothing until it is started.
pub struct TimeControl {
    inbox: SyncSender<Message>,
    waiting: Mutex<Option<Receiver<Message>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    shared: Arc<Shared>,
    started: AtomicBool,
}

impl Default for TimeControl {
    fn default() -> Self {
        let (inbox, waiting) = mpsc::sync_channel(INBOX);
        Self {
            inbox,
            waiting: Mutex::new(Some(waiting)),
            thread: Mutex::new(None),
            shared: Arc::default(),
            started: AtomicBool::new(false),
        }
    }
}

impl TimeControl {
    /// Thaws what an earlier daemon left frozen, and starts the thread.
    pub fn start(&self, parts: Parts) -> io::Result<()> {
        let Some(inbox) = take(&self.waiting) else {
            return Ok(());
        };
        release::thaw_all(&mut &*parts.kernel, parts.node, &*parts.processes);
        let questions = Arc::new(Questions::default());
        let sender = self.inbox.clone();
        let interval = parts.settings.period.max(Duration::from_millis(100));
        utilization::spawn(
            Arc::clone(&questions),
            parts.library.clone(),
            interval,
            Some(Arc::clone(&parts.energy)),
            move |news| {
                !matches!(
                    sender.try_send(Message::Utilization(news)),
                    Err(TrySendError::Disconnected(_))
                )
            },
        )?;
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("time".into()).spawn(move || {
            let (kernel, processes, node) = (
                Arc::clone(&parts.kernel),
                Arc::clone(&parts.processes),
                parts.node,
            );
            let work = || Worker::new(parts, Arc::clone(&shared), questions).run(&inbox);
            if panic::catch_unwind(AssertUnwindSafe(work)).is_err() {
                error!("GPU time is not controlled any more: restart the daemon");
                shared.failed.store(true, Ordering::Relaxed);
                release::thaw_all(&mut &*kernel, node, &*processes);
            }
        })?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        self.started.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Thaws everybody and ends the thread.
    pub fn stop(&self) {
        let Some(thread) = take(&self.thread) else {
            return;
        };
        self.shared.stop.store(true, Ordering::Relaxed);
        self.tell(Message::Wake);
        if thread.join().is_err() {
            error!("the time thread panicked");
        }
    }

    fn tell(&self, message: Message) {
        if self.started.load(Ordering::Relaxed)
            && matches!(self.inbox.try_send(message), Err(TrySendError::Full(_)))
        {
            self.shared.resync.store(true, Ordering::Relaxed);
        }
    }

    /// Something happened in the kernel.
    pub fn event(&self, event: &Event) {
        if matches!(
            event.kind,
            kind::CHANNEL_NEW | kind::SUBTREE_FREED | kind::OWN_CONTROL
        ) {
            self.tell(Message::Event(*event));
        }
    }

    /// Objects have changed in ways that no event tells.
    pub fn resync(&self) {
        self.tell(Message::Resync);
    }

    /// A policy came into force.
    pub fn rules(&self, rules: Rules) {
        *self
            .shared
            .rules
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(rules);
        self.tell(Message::Wake);
    }

    /// A process that was there before the daemon is out of reach.
    pub fn stranger(&self, gpu: u32, tgid: u32, tenant: u32, why: String) {
        self.tell(Message::Stranger(Place { gpu, tgid }, tenant, why));
    }

    /// Such a process has ended.
    pub fn ended(&self, tgid: u32) {
        self.tell(Message::Ended(tgid));
    }

    /// Freezes or thaws a tenant on some GPUs, and waits until it is done.
    pub fn hold(
        &self,
        tenant: &str,
        gpus: Vec<u32>,
        reason: Reason,
        on: bool,
    ) -> Result<Held, HoldError> {
        if !self.started.load(Ordering::Relaxed) {
            return Err(HoldError::Off);
        }
        let (done, answer) = mpsc::sync_channel(1);
        let hold = Hold {
            tenant: tenant.to_owned(),
            gpus,
            reason,
            on,
            done,
        };
        match self.inbox.try_send(Message::Hold(hold)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(HoldError::Timeout),
            Err(TrySendError::Disconnected(_)) => return Err(HoldError::Off),
        }
        answer
            .recv_timeout(PATIENCE)
            .map_err(|_| HoldError::Timeout)
    }

    /// What users see of a tenant on a GPU.
    pub fn status(&self, tenant: u32, gpu: u32) -> Option<TenantTime> {
        self.shared
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .of(tenant, gpu)
    }

    /// What an admin has to know, by GPU.
    pub fn notes(&self) -> Vec<(u32, String)> {
        self.shared
            .notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Energy of a GPU that is no tenant's; `None` where it is not known.
    pub fn energy_apart(&self, gpu: u32) -> Option<Apart> {
        self.shared
            .energy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&gpu)
            .copied()
    }

    /// The state for bug reports.
    pub fn dump(&self) -> serde_json::Value {
        self.shared
            .dump
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether time is controlled.
    pub fn is_on(&self) -> bool {
        self.started.load(Ordering::Relaxed) && !self.shared.failed.load(Ordering::Relaxed)
    }
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

struct Worker {
    engine: Engine,
    levers: DriverLevers,
    kernel: Arc<Kernel>,
    shared: Arc<Shared>,
    questions: Arc<Questions>,
    asked: BTreeSet<u32>,
    divided: BTreeSet<u32>,
    unknown: BTreeMap<u32, String>,
    published: Option<Duration>,
    /// Whether all was at rest when it was published.
    published_at_rest: bool,
    last_launch: LastLaunch,
}

impl Worker {
    fn new(parts: Parts, shared: Arc<Shared>, questions: Arc<Questions>) -> Self {
        let Parts {
            kernel,
            processes,
            node,
            settings,
            last_launch,
            ..
        } = parts;
        Self {
            engine: Engine::new(settings),
            levers: DriverLevers::new(Arc::clone(&kernel), processes, node),
            kernel,
            shared,
            questions,
            asked: BTreeSet::new(),
            divided: BTreeSet::new(),
            unknown: BTreeMap::new(),
            published: None,
            published_at_rest: false,
            last_launch,
        }
    }

    fn run(mut self, inbox: &Receiver<Message>) {
        self.engine.replace(self.kernel.structure());
        let mut wait = Duration::ZERO;
        loop {
            let first = match inbox.recv_timeout(wait) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if first.is_some() {
                self.published_at_rest = false;
            }
            let mut holds = Vec::new();
            for message in first.into_iter().chain(inbox.try_iter().take(INBOX)) {
                match message {
                    Message::Hold(hold) => {
                        for gpu in &hold.gpus {
                            self.engine.hold(&hold.tenant, *gpu, hold.reason, hold.on);
                        }
                        holds.push(hold);
                    }
                    other => self.take(other),
                }
            }
            if self.shared.stop.load(Ordering::Relaxed) {
                break;
            }
            if let Some(rules) = take(&self.shared.rules) {
                self.engine.set_rules(rules);
                self.published = None;
            }
            if self.shared.resync.swap(false, Ordering::Relaxed) {
                self.engine.replace(self.kernel.structure());
            }
            let probed = self.look_at_launches();
            wait = self.engine.step(&mut self.levers);
            self.questions
                .keep_clear_of(Instant::now().checked_add(wait));
            if probed {
                wait = wait.min(LAUNCH_POLL);
            }
            if !holds.is_empty() {
                // Who asks next sees what came of it.
                self.published = None;
            }
            self.ask();
            let now = self.levers.now();
            // Where nobody is, nothing changes before there is news.
            let at_rest = self.engine.is_at_rest();
            let is_due = |before| now >= before + PUBLISH && !(at_rest && self.published_at_rest);
            if self.published.is_none_or(is_due) {
                self.published = Some(now);
                self.published_at_rest = at_rest;
                self.publish();
                self.compare_frozen();
            }
            for hold in holds {
                // Who asked may have gone.
                let _ = hold.done.try_send(self.outcome(&hold));
            }
            if at_rest && !self.published_at_rest {
                wait = wait.min(PUBLISH);
            }
        }
        self.questions.stop();
        self.engine.thaw_all(&mut self.levers);
    }

    /// Freezes again what somebody else thawed.
    fn compare_frozen(&mut self) {
        if !self.engine.has_frozen() {
            return;
        }
        let recorded = self
            .kernel
            .frozen()
            .into_iter()
            .map(|(key, _)| Place {
                gpu: key.gpu,
                tgid: key.tgid,
            })
            .collect();
        self.engine.compare_frozen(&recorded);
    }

    /// Sees at once when a tenant launches for whom others have to make room, as far as launches are counted. Whether
    /// there are such tenants.
    fn look_at_launches(&mut self) -> bool {
        let mut probed = false;
        for tgid in self.engine.privileged() {
            if let Some(last) = (self.last_launch)(tgid) {
                probed = true;
                self.engine.launched(tgid, last, LAUNCH_LINGER);
            }
        }
        // Slices are set no faster than telemetry comes, so this needs no poll of its own.
        for tgid in self.engine.targeted() {
            if let Some(last) = (self.last_launch)(tgid) {
                self.engine.launched(tgid, last, LINGER);
            }
        }
        probed
    }

    fn take(&mut self, message: Message) {
        let now = self.levers.now();
        match message {
            Message::Event(event) => self.event(&event, now),
            Message::Resync => self.engine.replace(self.kernel.structure()),
            Message::Utilization(news) => self.utilization(news, now),
            Message::Stranger(place, tenant, why) => {
                self.engine.stranger(place, tenant, why);
                self.published = None;
            }
            Message::Ended(tgid) => self.engine.ended(tgid),
            Message::Hold(_) | Message::Wake => {}
        }
    }

    fn event(&mut self, event: &Event, now: Duration) {
        let key = ObjectKey {
            client: event.client,
            handle: event.handle,
        };
        match event.kind {
            kind::OWN_CONTROL => self.engine.own_control(event.tgid, key, event.class, now),
            kind::SUBTREE_FREED => self.engine.remove(key),
            _ => {
                self.questions.stir();
                self.made(key);
            }
        }
    }

    /// An object was made; what it hangs below may not be known yet.
    fn made(&mut self, key: ObjectKey) {
        let mut handle = key.handle;
        // Group, device, client: a channel is four levels deep.
        for _ in 0..6 {
            let at = ObjectKey {
                client: key.client,
                handle,
            };
            if handle != key.handle && self.engine.knows(at) {
                return;
            }
            let Some(object) = self.kernel.object(at) else {
                return;
            };
            self.engine.insert(at, object);
            if handle == key.client {
                return;
            }
            handle = object.parent;
        }
    }

    /// Counters of GPUs that are not asked about any more are old.
    fn energy_apart(&self) -> BTreeMap<u32, Apart> {
        let mut apart = self.engine.energy_apart();
        for (gpu, apart) in &mut apart {
            if !self.asked.contains(gpu) {
                apart.board_mj = None;
            }
        }
        apart
    }

    fn utilization(&mut self, news: Utilization, now: Duration) {
        match news {
            Utilization::Used {
                gpu,
                known_us,
                busy,
                energy,
                board,
            } => {
                self.unknown.remove(&gpu);
                let told = Told {
                    known_us,
                    busy: &busy,
                    energy,
                    board,
                };
                // Who is idle matters while others are not.
                if told.is_at_work() {
                    self.look_at_cpus(gpu, now);
                }
                self.engine.used(gpu, &told, now, self.levers.wall_us());
            }
            Utilization::Unknown { gpu, why } => {
                if self.unknown.insert(gpu, why.clone()).is_none() {
                    warn!(
                        gpu,
                        why,
                        "NVML does not tell GPU time by process: ceilings are kept without measuring"
                    );
                }
                self.engine.unmeasured(gpu);
            }
            Utilization::Divided { gpu, divided } => {
                if divided && self.divided.insert(gpu) {
                    info!(
                        gpu,
                        "is divided into instances (MIG): time is divided inside an instance, and not measured"
                    );
                    self.engine.unmeasured(gpu);
                } else if !divided {
                    self.divided.remove(&gpu);
                }
            }
        }
    }

    /// Looks what processes do besides: who uses no CPU launches nothing.
    fn look_at_cpus(&mut self, gpu: u32, now: Duration) {
        let members = self.engine.gpu(gpu).map_or(&[][..], Gpu::members);
        let used: Vec<(u32, Duration)> = members
            .iter()
            .filter_map(|member| Some((member.tgid, self.levers.cpu_time(member.tgid)?)))
            .collect();
        for (tgid, used) in used {
            self.engine.ran(gpu, tgid, used, now);
        }
    }

    fn ask(&mut self) {
        let gpus = self.engine.gpus_in_use();
        if gpus != self.asked {
            self.questions.ask_about(gpus.clone());
            self.asked = gpus;
        }
    }

    fn outcome(&self, hold: &Hold) -> Held {
        let mut outcome = Held::default();
        for gpu in &hold.gpus {
            outcome
                .frozen
                .extend(self.engine.frozen_in(&hold.tenant, *gpu));
            for tenant in self.engine.tenants_in(&hold.tenant) {
                outcome.out_of_reach.extend(
                    self.engine
                        .uncontrolled_in(tenant, *gpu)
                        .map(|(tgid, why)| (tgid, why.to_owned())),
                );
            }
        }
        outcome
    }

    /// Tenants of whom there is more to say than what should hold, and the GPUs.
    fn noteworthy(&self) -> BTreeSet<(u32, u32)> {
        let mut found: BTreeSet<(u32, u32)> = self
            .engine
            .uncontrolled()
            .map(|(place, tenant, _)| (tenant, place.gpu))
            .collect();
        for (gpu, state) in self.engine.gpus() {
            found.extend(state.accounted().map(|tenant| (tenant, gpu)));
            found.extend(state.members().iter().map(|member| (member.tenant, gpu)));
            let held: BTreeSet<u32> = state.held().collect();
            if !held.is_empty() {
                // Those inside are frozen with them.
                let rules = self.engine.rules();
                found.extend(
                    rules
                        .keys()
                        .filter(|tenant| {
                            chain(rules, **tenant).any(|around| held.contains(&around))
                        })
                        .map(|tenant| (*tenant, gpu)),
                );
            }
        }
        found
    }

    fn publish(&self) {
        let mut status = Status {
            rules: Arc::clone(self.engine.rules()),
            on: BTreeMap::new(),
        };
        for (tenant, gpu) in self.noteworthy() {
            let Some(rule) = status
                .rules
                .get(&tenant)
                .and_then(|rules| rules.gpus.get(&gpu))
            else {
                continue;
            };
            let time = self.time_of(tenant, gpu, rule);
            status.on.insert((tenant, gpu), time);
        }
        *self
            .shared
            .energy
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = self.energy_apart();
        let mut notes: Vec<(u32, String)> = self
            .unknown
            .iter()
            .map(|(gpu, why)| {
                let note = format!("NVML does not tell its use by process ({why}): ceilings are kept without measuring, and nothing is accounted");
                (*gpu, note)
            })
            .collect();
        notes.extend(self.divided.iter().map(|gpu| {
            let note = "divided into instances (MIG), whose use NVML does not tell by process: weights and ceilings hold \
                        as if all tenants were in one instance, and nothing is accounted";
            (*gpu, note.to_owned())
        }));
        let uncontrolled: BTreeSet<(u32, u32, u32, &str)> = self
            .engine
            .uncontrolled()
            .filter(|(place, tenant, _)| {
                self.asked.contains(&place.gpu) && self.engine.rules().contains_key(tenant)
            })
            .map(|(place, tenant, why)| (place.gpu, tenant, place.tgid, why))
            .collect();
        notes.extend(
            uncontrolled.into_iter().map(|(gpu, _, tgid, why)| {
                (gpu, format!("process {tgid} is not controlled: {why}"))
            }),
        );
        *self
            .shared
            .notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = notes;
        let mut dump = self.levers.took();
        dump["places"] = self.engine.dump();
        *self
            .shared
            .dump
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = dump;
        *self
            .shared
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn time_of(&self, tenant: u32, gpu: u32, rule: &Rule) -> TenantTime {
        let mut time = at_rest(rule);
        if let Some(state) = self.engine.gpu(gpu) {
            if let Some(account) = state.account(tenant) {
                let share = |seconds| {
                    account
                        .meter
                        .share(state.known_us(), Duration::from_secs(seconds))
                };
                time.used = account.meter.total();
                time.share_1s = share(1);
                time.share_10s = share(10);
                time.share_60s = share(60);
                time.pressure = account.pressure.into();
                time.energy_joules = account.energy.joules;
                time.power_watts = account.energy.watts;
            }
            time.frozen = state
                .reasons(self.engine.rules(), tenant)
                .iter()
                .map(ToString::to_string)
                .collect();
            for member in state.members() {
                if member.tenant != tenant {
                    continue;
                }
                time.own_controls += self.engine.own_controls(member.tgid);
                if let Some(slice) = state.division().slices.get(&member.tgid) {
                    time.slices.push((member.tgid, *slice));
                }
            }
        }
        time.uncontrolled = self
            .engine
            .uncontrolled_in(tenant, gpu)
            .map(|(pid, why)| Uncontrolled {
                pid,
                why: why.to_owned(),
            })
            .collect();
        time
    }
}
