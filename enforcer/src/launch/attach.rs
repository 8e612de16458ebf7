//! Who gets probes: the processes of tenants with a launch budget, from their first call of the driver to their end.
//!
//! One thread holds the table of processes. What takes long (looking at a process, detaching probes) is done by short
//! threads that report back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gpuquota_common::launch::{self, MAX_SLOTS, Slot, notice};
use tracing::{debug, error, info, warn};

use super::{
    Host, Launches, Member, Shown,
    detach::Detacher,
    freezer::Freezer,
    limits::Treatment,
    lock,
    pacer::{Order, Pacer},
    pressure::Counts,
    process::{Process, started, state},
    release::{self, Line},
    scan::{self, FileId, Found, Job, ScanError},
    storm::{self, Sample, Threshold},
};
use crate::{
    cgroup::Hierarchy,
    config::LaunchSettings,
    control::Notice,
    enforcer::monotonic_ns,
    kernel::{KernelError, Probe},
};

/// Time between two looks at everything.
const SWEEP: Duration = Duration::from_secs(1);
/// A process that is throttled all the time is reported so often.
const REPORT: Duration = Duration::from_secs(10);
/// A look at a process that takes longer is said aloud: its files do not answer.
const SCAN_PATIENCE: Duration = Duration::from_secs(5);

/// News for the thread.
pub enum Message {
    /// A process that may need probes, or more of them.
    Seen(u32),
    /// Processes have ended.
    Gone(BTreeSet<u32>),
    /// Look at everything.
    Sweep,
    /// A process was looked at.
    Scanned {
        /// The process.
        tgid: u32,
        /// Its slot then.
        slot: u32,
        /// What came of it.
        outcome: Result<Found, ScanError>,
    },
    /// No probe knows the slot any more.
    Free(u32),
    /// The kernel side has something to say.
    Told(launch::Notice),
    /// End.
    Stop,
}

/// Why launch budgets could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kernel side.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A thread, a descriptor or the guard.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// The running threads; they end when it is dropped, with nobody left stopped.
pub struct Running {
    inbox: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Sees to what an earlier daemon left, and starts.
    pub fn start(
        launches: &Arc<Launches>,
        host: &Arc<dyn Host>,
        hierarchy: &Hierarchy,
        settings: &LaunchSettings,
    ) -> Result<Self, StartError> {
        let system = |what| move |source| StartError::System { what, source };
        let kernel = Arc::clone(&launches.kernel);
        let record = &kernel.launch().record;
        let left = release::everybody(record, hierarchy)?;
        if left > 0 {
            info!(left, "continued what an earlier daemon had stopped");
        }
        for pid in kernel.launch().pids() {
            kernel.launch().forget_pid(pid)?;
        }
        for (at, _) in record.slots() {
            record.set_slot(at, Slot::default())?;
        }
        let ring = kernel
            .launch()
            .take_notices()
            .ok_or(KernelError::Missing("LAUNCH_NOTICES"))?;
        let guard = release::start_guard(record, hierarchy, host.frozen().as_ref())
            .map_err(system("starting the guard of stopped processes"))?;
        let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let word = launch::Settings {
            heartbeat_ns: 0,
            max_delay_ns: nanos(settings.max_delay),
            spin_max_ns: nanos(settings.spin_max),
            helper_tgid: guard.guard(),
            reserved: 0,
        };
        let (inbox, messages) = mpsc::channel();
        let freezer = Freezer::new(Arc::clone(host), Arc::clone(&kernel));
        let pacer = Pacer::start(kernel, ring, word, freezer, inbox.clone())
            .map_err(system("starting the pacer"))?;
        let attacher = Attacher {
            launches: Arc::clone(launches),
            host: Arc::clone(host),
            pacer,
            detacher: Detacher::start()
                .map_err(system("starting the thread that detaches launch probes"))?,
            guard: Some(guard),
            root: hierarchy.root().to_owned(),
            messages,
            outbox: inbox.clone(),
            processes: BTreeMap::new(),
            free: Vec::new(),
            next_slot: 0,
            threshold: Threshold {
                factor: settings.storm_factor,
                window: settings.storm_window,
            },
        };
        *lock(&launches.inbox) = Some(inbox.clone());
        let thread = thread::Builder::new()
            .name("launch-attach".into())
            .spawn(move || attacher.run())
            .map_err(system("starting the thread that attaches launch probes"))?;
        Ok(Self {
            inbox,
            thread: Some(thread),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A thread that has ended needs no word.
        let _ = self.inbox.send(Message::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the thread that attaches launch probes panicked");
        }
    }
}

/// A process with probes, or about to have some.
struct Attached {
    slot: u32,
    member: Member,
    treatment: Treatment,
    process: Arc<Process>,
    started: u64,
    /// The thread whose memory the probes are for.
    thread: u32,
    links: Vec<Probe>,
    files: Vec<scan::FoundFile>,
    trouble: Option<String>,
    /// Since when it is being looked at.
    scanning: Option<Instant>,
    /// Something happened meanwhile.
    again: bool,
    watch: storm::Watch,
    delayed: u64,
    reported: Option<Instant>,
}

struct Attacher {
    launches: Arc<Launches>,
    host: Arc<dyn Host>,
    pacer: Pacer,
    detacher: Detacher,
    guard: Option<Line>,
    root: std::path::PathBuf,
    messages: mpsc::Receiver<Message>,
    outbox: mpsc::Sender<Message>,
    processes: BTreeMap<u32, Attached>,
    /// Slots that were used and are free again.
    free: Vec<u32>,
    next_slot: u32,
    threshold: Threshold,
}

impl Attacher {
    fn run(mut self) {
        let mut next_sweep = Instant::now();
        loop {
            let now = Instant::now();
            if now >= next_sweep {
                self.sweep();
                next_sweep = Instant::now() + SWEEP;
            }
            let patience = next_sweep.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(patience) {
                Ok(Message::Seen(tgid)) => self.consider(tgid, true),
                Ok(Message::Gone(tgids)) => {
                    for tgid in tgids {
                        self.detach(tgid);
                    }
                }
                Ok(Message::Sweep) => next_sweep = Instant::now(),
                Ok(Message::Scanned {
                    tgid,
                    slot,
                    outcome,
                }) => self.scanned(tgid, slot, outcome),
                Ok(Message::Free(slot)) => self.free.push(slot),
                Ok(Message::Told(told)) if told.kind == notice::TOLD => self.told_to_end(&told),
                Ok(Message::Told(_)) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        *lock(&self.launches.inbox) = None;
        lock(&self.launches.shown).clear();
    }

    fn available(&self) -> bool {
        self.launches
            .kernel
            .launch_programs()
            .unavailable()
            .is_none()
    }

    /// Gives a process probes, takes them away or looks for more, whatever its tenant's budget asks for.
    fn consider(&mut self, tgid: u32, look: bool) {
        let wanted = self.host.member(tgid).and_then(|member| {
            let treatment = self.launches.budgets().treatment(member.tenant)?;
            Some((member, treatment))
        });
        let Some((member, treatment)) = wanted.filter(|_| self.available()) else {
            self.detach(tgid);
            return;
        };
        let Some(attached) = self.processes.get_mut(&tgid) else {
            self.attach(tgid, member, treatment);
            return;
        };
        if attached.started != started(tgid).unwrap_or(0) || attached.treatment != treatment {
            // Another process with its number, or other programs for the same one.
            self.detach(tgid);
            self.attach(tgid, member, treatment);
            return;
        }
        if attached.member != member {
            attached.member = member;
            let (slot, row) = (attached.slot, row(tgid, attached));
            if let Err(error) = self.launches.kernel.launch().record.set_slot(slot, row) {
                error!(tgid, %error, "its launches go on another tenant's account");
            }
            self.show(tgid);
        }
        if look {
            self.look(tgid);
        }
    }

    fn attach(&mut self, tgid: u32, member: Member, treatment: Treatment) {
        // Opened before it is looked at: if it is another one by then, it is gone.
        let Ok(process) = Process::open(tgid) else {
            return;
        };
        let Some(started) = started(tgid) else { return };
        let Some(slot) = self.free_slot() else {
            error!(tgid, "no slot left: its launches are not paced");
            return;
        };
        let attached = Attached {
            slot,
            member,
            treatment,
            process: Arc::new(process),
            started,
            thread: tgid,
            links: Vec::new(),
            files: Vec::new(),
            trouble: None,
            scanning: None,
            again: false,
            watch: storm::Watch::default(),
            delayed: 0,
            reported: None,
        };
        if let Err(error) = self.occupy(tgid, &attached) {
            error!(tgid, %error, "its launches are not paced");
            self.free.push(slot);
            return;
        }
        self.processes.insert(tgid, attached);
        self.show(tgid);
        self.look(tgid);
    }

    fn occupy(&self, tgid: u32, attached: &Attached) -> Result<(), KernelError> {
        let maps = self.launches.kernel.launch();
        maps.record.clear(attached.slot)?;
        maps.record.set_slot(attached.slot, row(tgid, attached))?;
        maps.set_pid(tgid, attached.slot)?;
        self.pacer.order(Order::Watch {
            slot: attached.slot,
            process: Arc::clone(&attached.process),
        });
        Ok(())
    }

    fn free_slot(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let slot = self.next_slot;
            (slot < MAX_SLOTS).then(|| {
                self.next_slot += 1;
                slot
            })
        })
    }

    /// Has a thread look at a process.
    fn look(&mut self, tgid: u32) {
        let Some(attached) = self.processes.get_mut(&tgid) else {
            return;
        };
        if attached.scanning.is_some() {
            attached.again = true;
            return;
        }
        let job = Job {
            tgid,
            thread: attached.thread,
            slot: attached.slot,
            treatment: attached.treatment,
            known: attached
                .files
                .iter()
                .map(|file| file.id)
                .collect::<BTreeSet<FileId>>(),
        };
        let kernel = Arc::clone(&self.launches.kernel);
        let cache = Arc::clone(&self.launches.cache);
        let outbox = self.outbox.clone();
        let attaching = self.detacher.attaching();
        let spawned = thread::Builder::new()
            .name("launch-scan".into())
            .spawn(move || {
                let outcome = scan::run(&kernel, &cache, &job);
                drop(attaching);
                let message = Message::Scanned {
                    tgid: job.tgid,
                    slot: job.slot,
                    outcome,
                };
                // Nobody to tell: what was attached goes with the message.
                let _ = outbox.send(message);
            });
        match spawned {
            Ok(_) => {
                attached.scanning = Some(Instant::now());
                attached.again = false;
            }
            Err(error) => {
                attached.trouble = Some(format!("it could not be looked at: {error}"));
                self.show(tgid);
            }
        }
    }

    fn scanned(&mut self, tgid: u32, slot: u32, outcome: Result<Found, ScanError>) {
        let Some(attached) = self
            .processes
            .get_mut(&tgid)
            .filter(|attached| attached.slot == slot)
        else {
            // It has left its slot meanwhile; the slot is free once these are gone.
            let links = outcome.map(|found| found.links).unwrap_or_default();
            self.let_go(links, Some(slot));
            return;
        };
        attached.scanning = None;
        match outcome {
            Ok(found) => {
                for file in &found.files {
                    info!(
                        tgid,
                        file = %file.name.display(),
                        missing = file.missing.join(","),
                        slow = file.stepped.join(","),
                        "launches are paced"
                    );
                }
                attached.links.extend(found.links);
                attached.files.extend(found.files);
                attached.trouble = trouble(attached, &found.unreadable);
            }
            // Gone before it was looked at.
            Err(ScanError::Maps(error)) => debug!(tgid, %error, "gone"),
            Err(error) => {
                warn!(tgid, %error, "its launches are not paced");
                attached.trouble = Some(format!("its launches are not paced: {error}"));
            }
        }
        let again = attached.again;
        self.show(tgid);
        if again {
            self.look(tgid);
        }
    }

    /// Takes a process off its slot, with nobody left stopped. Its probes are detached by another thread: the kernel
    /// waits for every CPU to pass by.
    fn detach(&mut self, tgid: u32) {
        let Some(attached) = self.processes.remove(&tgid) else {
            return;
        };
        lock(&self.launches.shown).remove(&tgid);
        let slot = attached.slot;
        let maps = self.launches.kernel.launch();
        let left = maps
            .record
            .set_slot(slot, Slot::default())
            .and_then(|()| maps.forget_pid(tgid));
        if let Err(error) = left {
            error!(tgid, %error, "its slot could not be given back");
        }
        self.pacer.forget(slot);
        // A look that is under way may attach more; whoever takes its result frees the slot.
        let free = attached.scanning.is_none().then_some(slot);
        self.let_go(attached.links, free);
    }

    /// Detaches probes some time, and has their slot free after that.
    fn let_go(&self, links: Vec<Probe>, free: Option<u32>) {
        let outbox = self.outbox.clone();
        self.detacher.detach(links, move || {
            if let Some(slot) = free {
                // Nobody to tell at the end.
                let _ = outbox.send(Message::Free(slot));
            }
        });
    }

    fn sweep(&mut self) {
        // Without a budget nobody gets probes.
        if !self.launches.budgets().is_empty() {
            for tgid in self.host.processes() {
                if !self.processes.contains_key(&tgid) {
                    self.consider(tgid, true);
                }
            }
        }
        for tgid in self.processes.keys().copied().collect::<Vec<_>>() {
            self.consider(tgid, false);
            self.follow_leader(tgid);
            self.note_slow_scan(tgid);
            self.observe(tgid);
        }
        self.observe_pressure();
        self.keep_guard();
    }

    fn observe_pressure(&self) {
        let budgets = self.launches.budgets();
        let record = &self.launches.kernel.launch().record;
        let counts: Vec<_> = self
            .processes
            .iter()
            .filter_map(|(tgid, attached)| {
                let calls = record.calls(attached.slot).ok()?;
                let counts = Counts {
                    launches: calls.launches,
                    delay_ns: calls.delay_ns,
                };
                let payers = budgets.around(attached.member.tenant).collect();
                Some((*tgid, payers, counts))
            })
            .collect();
        let mut book = lock(&self.launches.pressure);
        book.observe(monotonic_ns(), &counts);
        book.retain(|tenant| budgets.knows(tenant));
    }

    /// A first thread that has ended takes its memory's probes along, while others of the process go on.
    fn follow_leader(&mut self, tgid: u32) {
        let Some(attached) = self.processes.get_mut(&tgid) else {
            return;
        };
        if !matches!(state(attached.thread), None | Some('Z' | 'X')) {
            return;
        }
        let Some(other) = living_thread(tgid) else {
            return;
        };
        if attached.scanning.is_some() {
            return;
        }
        debug!(tgid, thread = other, "its first thread has ended");
        attached.thread = other;
        attached.files.clear();
        let links = std::mem::take(&mut attached.links);
        self.let_go(links, None);
        self.look(tgid);
    }

    fn note_slow_scan(&mut self, tgid: u32) {
        let Some(attached) = self.processes.get_mut(&tgid) else {
            return;
        };
        let slow = attached
            .scanning
            .is_some_and(|since| since.elapsed() > SCAN_PATIENCE);
        if slow && attached.trouble.is_none() {
            warn!(
                tgid,
                "the files that it has mapped do not answer: its launches are not paced"
            );
            attached.trouble = Some(
                "its launches are not paced, since the files that it has mapped do not answer"
                    .to_owned(),
            );
            self.show(tgid);
        }
    }

    /// Reports a process that is being throttled, and storms.
    fn observe(&mut self, tgid: u32) {
        let maps = self.launches.kernel.launch();
        let Some(attached) = self.processes.get_mut(&tgid) else {
            return;
        };
        let Ok(calls) = maps.record.calls(attached.slot) else {
            return;
        };
        let sample = Sample {
            at_ns: monotonic_ns(),
            launches: calls.launches,
            delayed: calls.delayed,
            delay_ns: calls.delay_ns,
            thinks: calls.thinks,
            think_ns: calls.think_ns,
        };
        let tenant = attached.member.tenant;
        let newly = calls.delayed.saturating_sub(attached.delayed);
        attached.delayed = calls.delayed;
        let symbol = || {
            u32::try_from(calls.symbol)
                .map_or_else(|_| String::new(), |symbol| self.launches.cache.name(symbol))
        };
        if newly > 0
            && attached
                .reported
                .is_none_or(|when| when.elapsed() >= REPORT)
        {
            attached.reported = Some(Instant::now());
            self.host.notify(Notice::Throttled {
                tenant: self.host.name_of(tenant),
                pid: tgid,
                symbol: symbol(),
                delayed: calls.delayed,
                delay_usec: calls.delay_ns / 1000,
            });
        }
        let Some(budget) = self.launches.budgets().rate(tenant) else {
            return;
        };
        if let Some(wanted) = attached.watch.observe(sample, budget, self.threshold) {
            *lock(&self.launches.storms).entry(tenant).or_default() += 1;
            let tenant = self.host.name_of(tenant);
            let symbol = symbol();
            warn!(tenant, pid = tgid, symbol, wanted, budget, "a launch storm");
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "rates are positive and bounded by what a CPU can do"
            )]
            self.host.notify(Notice::Storm {
                tenant,
                pid: tgid,
                symbol,
                wanted: wanted as u64,
                budget: budget as u64,
            });
        }
    }

    /// A process has been told to end for its launches.
    fn told_to_end(&mut self, told: &launch::Notice) {
        let budgets = self.launches.budgets();
        let Some(treatment) = budgets.treatment(told.tenant) else {
            return;
        };
        let patience = u64::try_from(treatment.patience.as_nanos()).unwrap_or(u64::MAX);
        self.pacer.order(Order::Kill {
            slot: told.slot,
            at_ns: told.at_ns.saturating_add(patience),
        });
        let tenant = self.host.name_of(told.tenant);
        let symbol = self.launches.cache.name(told.symbol);
        warn!(
            tenant,
            pid = told.tgid,
            symbol,
            "over its launch budget and told to end"
        );
        self.host.notify(Notice::LaunchDenied {
            tenant,
            limited_by: self.host.name_of(told.limited_by),
            pid: told.tgid,
            symbol,
            patience_usec: u64::try_from(treatment.patience.as_micros()).unwrap_or(u64::MAX),
        });
    }

    /// Starts another guard for one that has ended.
    fn keep_guard(&mut self) {
        if self.guard.as_mut().is_some_and(Line::is_up) {
            return;
        }
        let started = Hierarchy::open(Some(&self.root))
            .map_err(|error| std::io::Error::other(error.to_string()))
            .and_then(|hierarchy| {
                let record = &self.launches.kernel.launch().record;
                release::start_guard(record, &hierarchy, self.host.frozen().as_ref())
            });
        match started {
            Ok(line) => {
                warn!("the guard of stopped processes had ended and was started again");
                self.pacer.order(Order::Helper(line.guard()));
                self.guard = Some(line);
            }
            Err(error) => error!(%error, "there is no guard of stopped processes"),
        }
    }

    fn show(&self, tgid: u32) {
        if let Some(attached) = self.processes.get(&tgid) {
            let shown = Shown {
                slot: attached.slot,
                tenant: attached.member.tenant,
                files: attached.files.clone(),
                trouble: attached.trouble.clone(),
            };
            lock(&self.launches.shown).insert(tgid, shown);
        }
    }
}

fn row(tgid: u32, attached: &Attached) -> Slot {
    Slot {
        cgroup: attached.member.cgroup,
        started: attached.started,
        tgid,
        tenant: attached.member.tenant,
        epoch: attached.member.epoch,
        pace: attached.treatment.pace,
    }
}

/// What an admin has to know about a process that was looked at.
fn trouble(
    attached: &Attached,
    unreadable: &[(std::path::PathBuf, std::io::Error)],
) -> Option<String> {
    if let Some((path, error)) = unreadable.first() {
        return Some(format!(
            "{} files that it has mapped cannot be read, so launch calls in them are not counted; {}: {error}",
            unreadable.len(),
            path.display()
        ));
    }
    attached.files.is_empty().then(|| {
        "it speaks to the driver, and no file that it has mapped exports a launch call: its launches are not counted"
            .to_owned()
    })
}

/// A thread of a process that has not ended.
fn living_thread(tgid: u32) -> Option<u32> {
    fs::read_dir(format!("/proc/{tgid}/task"))
        .ok()?
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .find(|thread| !matches!(state(*thread), None | Some('Z' | 'X')))
}
