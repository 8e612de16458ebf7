//! A look at the launches of processes: probes in, messages out.
//!
//! One thread for each look. Files of the tenant's may never answer, so whatever touches them (looking for calls, and
//! putting probes in) is done by a thread of its own for each process, as in [`crate::launch::scan`]. So is taking them out,
//! which waits for all processors of the host. They come and go in groups ([`gpuquota_common::profile::group`]), each as
//! [`super::sampling`] says.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File},
    io,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::profile::{
    GRAPH, KernelKey, Launches, MAX_PROCESSES, Named, Spent as HitsSpent, Waited, cookie, group,
    kind, since, told,
};
use tracing::{debug, info, warn};

use super::{
    Host, Unusual,
    book::{Book, Name, ProcessIndex, Wait},
    calls::{self, CALLS, EXPECTED},
    cost::{self, CostError, Costs},
    histogram::Histogram,
    sampling::{Loan, Order, SELDOM_NS, Sampling, Spent},
};
use crate::{
    control::{
        leaks::Target,
        profile::{ProbeCosts, ProfileGaps, ProfileKernel, ProfileProcess, ProfileReport},
    },
    doctor,
    enforcer::monotonic_ns,
    insight::elf::demangle,
    kernel::{
        KernelError, Probe,
        profile::{ProfileKernel as Programs, ProfileProgram},
    },
    launch::{
        process::started,
        scan::{FileId, code_mappings},
        symbols::{self, Cost, Symbol},
    },
};

/// Time between two looks at the messages, and the longest between two at what the probes have cost.
const TICK: Duration = Duration::from_nanos(SELDOM_NS);
/// Time between two looks at who is there and at what was launched.
const SWEEP: Duration = Duration::from_secs(1);
/// Characters of a name that are shown.
const LONGEST_NAME: usize = 400;
/// Part of the budget that the probes of one call that gives out kernels may use up.
const NAMES_SHARE: f64 = 1.0 / 8.0;
/// Threads that take out probes at once: the kernel's waiting is what takes long.
const MOST_TAKING_OUT: usize = 16;
/// Processes that have ended and are still shown.
const MOST_ENDED: usize = 256;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// News for the keeper.
enum Message {
    /// A process may have something to probe, or more of it.
    Seen(u32),
    /// A process was looked at.
    Scanned(u32, io::Result<Found>),
    /// Probes of a group are in, or could not be put in.
    Came(u32, usize, Result<Placed, KernelError>),
    /// The probes of a group are out, which took so much of a processor's time.
    Left(u32, usize, Duration),
    /// End.
    Stop,
}

/// Probes that were put in, and how much of a processor's time that took.
struct Placed {
    probes: Vec<Probe>,
    took: Duration,
}

/// A running or finished look.
pub struct Look {
    target: Target,
    limit: Option<Duration>,
    began: Instant,
    costs: Costs,
    inbox: mpsc::Sender<Message>,
    state: Arc<Mutex<State>>,
}

/// What is known so far.
#[derive(Default)]
struct State {
    book: Book,
    processes: BTreeMap<ProcessIndex, Seen>,
    by_pid: HashMap<u32, ProcessIndex>,
    met: ProcessIndex,
    lost: u64,
    unreadable: u64,
    left_out: u64,
    /// How long it lasted, once it is over.
    lasted: Option<Duration>,
}

/// A process that was met.
struct Seen {
    pid: u32,
    started: Option<u64>,
    comm: String,
    tenant: Arc<str>,
    factor: f64,
    budget: f64,
    /// By group.
    sampling: [Sampling; group::COUNT],
    files: Vec<String>,
    trouble: Option<String>,
    ended: bool,
}

impl Look {
    /// Loads the programs, measures what they cost, puts probes into all processes of a target, and returns.
    ///
    /// Without a limit it lasts until it is let go of.
    pub fn start(
        target: Target,
        limit: Option<Duration>,
        host: Weak<dyn Host>,
    ) -> Result<Self, LookError> {
        let (kernel, ring) = Programs::load()?;
        let costs = cost::measure(&kernel)?;
        debug!(?costs, "what a hit of a probe costs");
        let state = Arc::new(Mutex::new(State::default()));
        let (inbox, messages) = mpsc::channel();
        let began = Instant::now();
        let mut keeper = Keeper {
            target: target.clone(),
            host,
            kernel: Arc::new(kernel),
            ring,
            costs,
            state: Arc::clone(&state),
            messages,
            outbox: inbox.clone(),
            began,
            end: limit.map(|limit| began + limit),
            held: BTreeMap::new(),
            counted: HashMap::new(),
        };
        thread::Builder::new()
            .name("profile-keep".into())
            .spawn(move || keeper.run())
            .map_err(|source| LookError::System {
                what: "starting the thread that keeps profile probes",
                source,
            })?;
        Ok(Self {
            target,
            limit,
            began,
            costs,
            inbox,
            state,
        })
    }

    /// A process has spoken to the driver, or runs another program.
    pub fn seen(&self, pid: u32) {
        // A look that is over needs no news.
        let _ = self.inbox.send(Message::Seen(pid));
    }

    /// Has the probes removed; returns when they are.
    pub fn stop(&self) {
        let _ = self.inbox.send(Message::Stop);
        let end = Instant::now() + Duration::from_secs(5);
        while !self.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether the probes are gone.
    pub fn is_over(&self) -> bool {
        lock(&self.state).lasted.is_some()
    }

    /// What it has found.
    pub fn report(&self) -> ProfileReport {
        let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let state = lock(&self.state);
        let mut kernels: Vec<ProfileKernel> = state
            .book
            .symbols()
            .map(|(tenant, name, tally)| ProfileKernel {
                tenant: tenant.to_owned(),
                name: readable(name),
                symbol: match name {
                    Name::Known(symbol) => Some((**symbol).to_owned()),
                    Name::Handle(..) | Name::Others => None,
                },
                launches: tally.launches,
                gaps: counts(&tally.gaps),
                durations: counts(&tally.durations),
                late: tally.late,
                usual_usec: tally.watch.usual_ns().map(|usual| usual / 1e3),
                anomalies: tally.watch.anomalies(),
                unusual: tally.watch.is_unusual(),
            })
            .collect();
        kernels.sort_by(|a, b| b.launches.cmp(&a.launches).then(a.name.cmp(&b.name)));
        ProfileReport {
            target: self.target.clone(),
            running: state.lasted.is_none(),
            always: self.limit.is_none(),
            elapsed_usec: micros(state.lasted.unwrap_or_else(|| self.began.elapsed())),
            limit_usec: self.limit.map(micros),
            costs: ProbeCosts {
                entry_nsec: self.costs.entry,
                stepped_nsec: self.costs.stepped,
                return_nsec: self.costs.back,
            },
            processes: state.processes.values().map(shown).collect(),
            kernels,
            gaps: ProfileGaps {
                lost: state.lost,
                unreadable: state.unreadable,
                crowded: state.book.crowded,
                unnamed: state.book.unnamed,
                left_out: state.left_out,
            },
        }
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why a look could not begin.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The kernel side.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// What the probes cost is not known, so that nothing could keep them within their budget.
    #[error("what the probes cost cannot be measured: {0}")]
    Cost(#[from] CostError),
    /// A thread.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn shown(seen: &Seen) -> ProfileProcess {
    let launches = &seen.sampling[group::LAUNCHES];
    ProfileProcess {
        pid: seen.pid,
        comm: seen.comm.clone(),
        tenant: (*seen.tenant).to_owned(),
        files: seen.files.clone(),
        ended: seen.ended,
        cost: launches.cost(),
        budget: seen.budget,
        covered: launches.covered(),
        names_covered: group::NAMES
            .map(|group| seen.sampling[group].covered())
            .into_iter()
            .fold(1.0, f64::min),
        trouble: seen.trouble.clone(),
    }
}

fn counts(histogram: &Histogram) -> Vec<u64> {
    histogram.counts().to_vec()
}

/// Part of the budget that a group may use up. That of launches and waits pays for all others first.
fn share(group: usize) -> f64 {
    if group == group::LAUNCHES {
        1.0
    } else {
        NAMES_SHARE
    }
}

/// The name of a kernel for people. Those of templates are long.
fn readable(name: &Name) -> String {
    match name {
        Name::Known(symbol) => {
            let mut name = demangle(symbol);
            if let Some((end, _)) = name.char_indices().nth(LONGEST_NAME) {
                name.truncate(end);
                name += "...";
            }
            name
        }
        Name::Handle(_, handle) if handle & GRAPH != 0 => format!("graph@{:#x}", handle & !GRAPH),
        Name::Handle(_, handle) => format!("kernel@{handle:#x}"),
        Name::Others => "(others)".to_owned(),
    }
}

impl State {
    /// Meets a process.
    fn meet(&mut self, pid: u32, host: &dyn Host) -> ProcessIndex {
        let rules = host.rules(pid);
        let index = self.met;
        self.met = self.met.wrapping_add(1);
        self.processes.insert(
            index,
            Seen {
                pid,
                started: started(pid),
                comm: doctor::comm(pid),
                tenant: rules.tenant,
                factor: rules.factor,
                budget: rules.budget,
                sampling: std::array::from_fn(|group| {
                    let loan = if group == group::LAUNCHES {
                        Loan::SHORT
                    } else {
                        Loan::LONG
                    };
                    Sampling::new(rules.budget * share(group), loan)
                }),
                files: Vec::new(),
                trouble: None,
                ended: false,
            },
        );
        self.by_pid.insert(pid, index);
        index
    }

    fn of(&mut self, pid: u32) -> Option<&mut Seen> {
        let index = self.by_pid.get(&pid)?;
        self.processes.get_mut(index)
    }

    fn end(&mut self, pid: u32) {
        let Some(index) = self.by_pid.remove(&pid) else {
            return;
        };
        if let Some(seen) = self.processes.get_mut(&index) {
            seen.ended = true;
        }
        self.book.end(index);
        let ended: Vec<ProcessIndex> = self
            .processes
            .iter()
            .filter(|(_, seen)| seen.ended)
            .map(|(index, _)| *index)
            .collect();
        for index in ended.iter().rev().skip(MOST_ENDED) {
            self.processes.remove(index);
        }
    }
}

/// A file with calls, and the places of its probes.
struct Probed {
    file: File,
    points: [Points; group::COUNT],
}

/// Places of the probes of each program, with their cookies.
type Points = BTreeMap<ProfileProgram, Vec<(u64, u64)>>;

impl Probed {
    /// Puts in the probes of a group. Returns first: a call that is seen to begin is seen to end.
    fn attach(&self, kernel: &Programs, pid: u32, group: usize) -> Result<Vec<Probe>, KernelError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let mut probes = Vec::new();
        for program in ProfileProgram::RETURNS_FIRST {
            if let Some(points) = self.points[group].get(&program) {
                probes.extend(kernel.attach(program, pid, &path, points)?);
            }
        }
        Ok(probes)
    }
}

/// Puts in the probes of a group in files.
fn put_in(
    kernel: &Programs,
    pid: u32,
    files: &[Arc<Probed>],
    group: usize,
) -> Result<Placed, KernelError> {
    let before = thread_time();
    let mut probes = Vec::new();
    for file in files {
        probes.extend(file.attach(kernel, pid, group)?);
    }
    Ok(Placed {
        probes,
        took: thread_time().saturating_sub(before),
    })
}

/// Takes out probes, all at once: each waits for the processors of the host. Returns how much of a processor's time it took.
fn take_out(probes: Vec<Probe>) -> Duration {
    let mut lanes: Vec<Vec<Probe>> = Vec::new();
    for (at, probe) in probes.into_iter().rev().enumerate() {
        match lanes.get_mut(at % MOST_TAKING_OUT) {
            Some(lane) => lane.push(probe),
            None => lanes.push(vec![probe]),
        }
    }
    let timed = |lane: Vec<Probe>| {
        let before = thread_time();
        drop(lane);
        thread_time().saturating_sub(before)
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = lanes
            .into_iter()
            .map(|lane| scope.spawn(move || timed(lane)))
            .collect();
        lanes.into_iter().filter_map(|lane| lane.join().ok()).sum()
    })
}

/// What the current thread has used of processors. What it does to a process that it changes, that waits for or does too.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes a structure of ours, which lives until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos)
}

/// What was found in a process.
#[derive(Default)]
struct Found {
    files: Vec<(FileId, String, Arc<Probed>)>,
    trouble: Option<String>,
}

/// A process with probes, or about to have some.
#[derive(Default)]
struct Held {
    files: BTreeMap<FileId, Arc<Probed>>,
    /// Names of files of which it is not told yet, since their probes are not in.
    names: Vec<String>,
    /// By group.
    probes: [Vec<Probe>; group::COUNT],
    /// Nanoseconds that it took to put in and to take out those of each group.
    changes: [u64; group::COUNT],
    scanning: bool,
    again: bool,
    /// When to look at what was spent; `None` before there are probes.
    due: Option<Instant>,
}

impl Held {
    fn into_probes(self) -> impl Iterator<Item = Probe> {
        self.probes.into_iter().flatten()
    }

    /// What was spent, of which the program tells that on hits.
    fn spent(&self, hits: HitsSpent, group: usize) -> Spent {
        let others = if group == group::LAUNCHES {
            group::NAMES.map(|name| hits[name].saturating_add(self.changes[name]))
        } else {
            [0; 3]
        };
        Spent {
            hits: hits[group],
            changes: self.changes[group],
            others: others.iter().sum(),
        }
    }
}

/// Has the probes.
struct Keeper {
    target: Target,
    host: Weak<dyn Host>,
    kernel: Arc<Programs>,
    ring: RingBuf<MapData>,
    costs: Costs,
    state: Arc<Mutex<State>>,
    messages: mpsc::Receiver<Message>,
    outbox: mpsc::Sender<Message>,
    began: Instant,
    end: Option<Instant>,
    held: BTreeMap<u32, Held>,
    /// Launches that are in the book.
    counted: HashMap<KernelKey, Launches>,
}

impl Keeper {
    fn run(&mut self) {
        info!(target = %self.target, "launches are profiled");
        let mut next_sweep = Instant::now();
        let mut next_drain = next_sweep;
        loop {
            let now = Instant::now();
            if self.end.is_some_and(|end| now >= end) {
                break;
            }
            if now >= next_drain {
                self.drain();
                next_drain = Instant::now() + TICK;
            }
            self.look_at_costs();
            if now >= next_sweep {
                self.sweep();
                next_sweep = Instant::now() + SWEEP;
            }
            let due = self.held.values().filter_map(|held| held.due).min();
            let until = [self.end, due]
                .into_iter()
                .flatten()
                .fold(next_drain.min(next_sweep), Instant::min);
            let now = Instant::now();
            match self
                .messages
                .recv_timeout(until.saturating_duration_since(now))
            {
                Ok(Message::Seen(pid)) if self.held.contains_key(&pid) => self.scan(pid),
                Ok(Message::Seen(_)) => {
                    if self.may_join() {
                        self.find_processes();
                    }
                }
                Ok(Message::Scanned(pid, outcome)) => self.scanned(pid, outcome),
                Ok(Message::Came(pid, group, outcome)) => self.came(pid, group, outcome),
                Ok(Message::Left(pid, group, took)) => self.left(pid, group, took),
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
        let held = std::mem::take(&mut self.held);
        take_out(held.into_values().flat_map(Held::into_probes).collect());
        self.drain();
        self.count_launches();
        self.note_losses();
        let lasted = self.began.elapsed();
        lock(&self.state).lasted = Some(lasted);
        info!(target = %self.target, "launches are profiled no more");
    }

    /// Whether processes may still join.
    fn may_join(&self) -> bool {
        matches!(self.target, Target::Tenant(_)) || self.held.is_empty()
    }

    /// Sees to it that the probes cost no more than they may.
    fn look_at_costs(&mut self) {
        let began = Instant::now();
        let mut orders = Vec::new();
        let mut state = lock(&self.state);
        for (pid, held) in &mut self.held {
            if held.due.is_none_or(|due| began < due) {
                continue;
            }
            let mut next = SELDOM_NS;
            if let (Some(seen), Ok(hits)) = (state.of(*pid), self.kernel.spent(*pid)) {
                let now = monotonic_ns();
                for (group, sampling) in seen.sampling.iter_mut().enumerate() {
                    let order = sampling.look(now, held.spent(hits, group));
                    next = next.min(sampling.next_ns());
                    if order != Order::Stay {
                        orders.push((*pid, group, order));
                    }
                }
            }
            held.due = Some(Instant::now() + Duration::from_nanos(next));
        }
        drop(state);
        for (pid, group, order) in orders {
            match order {
                Order::Stay => {}
                Order::In => {
                    let files = self.files_of(pid);
                    self.bring(pid, files, vec![group]);
                }
                Order::Out => self.send_away(pid, group),
            }
        }
    }

    fn files_of(&self, pid: u32) -> Vec<Arc<Probed>> {
        self.held
            .get(&pid)
            .map(|held| held.files.values().cloned().collect())
            .unwrap_or_default()
    }

    /// Has a thread put in the probes of some groups in files of a process, one after the other.
    fn bring(&self, pid: u32, files: Vec<Arc<Probed>>, groups: Vec<usize>) {
        if groups.contains(&group::LAUNCHES) {
            self.set_since(pid, since::NOT_YET);
        }
        let (kernel, outbox) = (Arc::clone(&self.kernel), self.outbox.clone());
        let failed = groups.clone();
        let spawned = thread::Builder::new()
            .name("profile-in".into())
            .spawn(move || {
                for group in groups {
                    let outcome = put_in(&kernel, pid, &files, group);
                    // Nobody to tell: what was put in goes with the message.
                    let _ = outbox.send(Message::Came(pid, group, outcome));
                }
            });
        if let Err(error) = spawned {
            warn!(pid, %error, "not all of its launches are profiled for a while");
            if let Some(seen) = lock(&self.state).of(pid) {
                for group in failed {
                    seen.sampling[group].put_off();
                }
            }
        }
    }

    /// Has a thread take out the probes of a group.
    fn send_away(&mut self, pid: u32, group: usize) {
        if group == group::LAUNCHES {
            self.set_since(pid, since::NO_MORE);
        }
        let Some(held) = self.held.get_mut(&pid) else {
            return;
        };
        let probes = std::mem::take(&mut held.probes[group]);
        self.let_go(probes, Some((pid, group)));
    }

    /// Has a thread let go of probes, and tell of it if somebody wants to know.
    fn let_go(&self, probes: Vec<Probe>, of: Option<(u32, usize)>) {
        let outbox = self.outbox.clone();
        let spawned = thread::Builder::new()
            .name("profile-out".into())
            .spawn(move || {
                let took = take_out(probes);
                if let Some((pid, group)) = of {
                    // Nobody to tell: the look is over.
                    let _ = outbox.send(Message::Left(pid, group, took));
                }
            });
        // What the thread was to let go of has gone with it.
        if let (Err(_), Some((pid, group))) = (spawned, of) {
            let _ = self.outbox.send(Message::Left(pid, group, Duration::ZERO));
        }
    }

    fn set_since(&self, pid: u32, at_ns: u64) {
        if let Err(error) = self.kernel.set_since(pid, at_ns) {
            warn!(pid, %error, "what is seen of its launches may be wrong");
        }
    }

    fn sweep(&mut self) {
        self.count_launches();
        self.end_processes();
        self.find_processes();
        self.follow_rules();
        self.note_losses();
    }

    /// Processes may have changed their tenant, and tenants their policy.
    fn follow_rules(&mut self) {
        let Some(host) = self.host.upgrade() else {
            return;
        };
        for pid in self.held.keys() {
            let rules = host.rules(*pid);
            if let Some(seen) = lock(&self.state).of(*pid) {
                for (group, sampling) in seen.sampling.iter_mut().enumerate() {
                    sampling.set_budget(rules.budget * share(group));
                }
                seen.tenant = rules.tenant;
                seen.factor = rules.factor;
                seen.budget = rules.budget;
            }
        }
    }

    fn end_processes(&mut self) {
        let ended: Vec<u32> = {
            let mut state = lock(&self.state);
            self.held
                .keys()
                .filter(|pid| {
                    let known = state.of(**pid);
                    known.is_none_or(|seen| started(**pid) != seen.started)
                })
                .copied()
                .collect()
        };
        if ended.is_empty() {
            return;
        }
        // What they said last.
        self.drain();
        self.count_launches();
        for pid in ended {
            if let Some(held) = self.held.remove(&pid) {
                self.let_go(held.into_probes().collect(), None);
            }
            lock(&self.state).end(pid);
            let theirs: Vec<KernelKey> = self
                .counted
                .keys()
                .filter(|key| key.tgid == u64::from(pid))
                .copied()
                .collect();
            for key in &theirs {
                self.counted.remove(key);
            }
            self.kernel.dismiss(pid, theirs);
        }
    }

    fn find_processes(&mut self) {
        let Some(host) = self.host.upgrade() else {
            return;
        };
        for pid in host.processes(&self.target) {
            match self.held.get(&pid) {
                Some(held) if held.files.is_empty() => self.scan(pid),
                Some(_) => {}
                None => self.meet(pid, &*host),
            }
        }
    }

    fn meet(&mut self, pid: u32, host: &dyn Host) {
        if started(pid).is_none() {
            return;
        }
        let mut state = lock(&self.state);
        // A process that ended is not met again.
        let was_met = matches!(self.target, Target::Process(_)) && state.met > 0;
        if was_met {
            return;
        }
        if self.held.len() >= MAX_PROCESSES as usize {
            state.left_out += 1;
            return;
        }
        state.meet(pid, host);
        let ready = self
            .kernel
            .admit(pid)
            .and_then(|()| self.kernel.set_since(pid, since::NOT_YET));
        if let (Err(error), Some(seen)) = (&ready, state.of(pid)) {
            warn!(pid, %error, "its launches are not profiled");
            seen.trouble = Some(error.to_string());
        }
        drop(state);
        self.held.insert(pid, Held::default());
        self.scan(pid);
    }

    fn note_losses(&self) {
        if let Ok([lost, unreadable]) = self.kernel.losses() {
            let mut state = lock(&self.state);
            (state.lost, state.unreadable) = (lost, unreadable);
        }
    }

    fn scan(&mut self, pid: u32) {
        let Some(held) = self.held.get_mut(&pid) else {
            return;
        };
        if held.scanning {
            held.again = true;
            return;
        }
        (held.scanning, held.again) = (true, false);
        let known: BTreeSet<FileId> = held.files.keys().copied().collect();
        let (costs, outbox) = (self.costs, self.outbox.clone());
        let spawned = thread::Builder::new()
            .name("profile-scan".into())
            .spawn(move || {
                let outcome = find_calls(costs, pid, &known);
                // Nobody to tell: the look is over.
                let _ = outbox.send(Message::Scanned(pid, outcome));
            });
        if let Err(error) = spawned {
            warn!(pid, %error, "it could not be looked at");
            held.scanning = false;
        }
    }

    fn scanned(&mut self, pid: u32, outcome: io::Result<Found>) {
        let Some(held) = self.held.get_mut(&pid) else {
            return;
        };
        held.scanning = false;
        let mut new = Vec::new();
        let mut groups = Vec::new();
        {
            let mut state = lock(&self.state);
            let Some(seen) = state.of(pid) else { return };
            match outcome {
                Ok(found) => {
                    for (id, name, probed) in found.files {
                        debug!(pid, file = name, "its launches are profiled");
                        held.files.insert(id, Arc::clone(&probed));
                        held.names.push(name);
                        new.push(probed);
                    }
                    // Names first: a kernel that is given out and launched at once has one. Groups that are out get the
                    // new files with their next stretch.
                    groups = group::NAMES.to_vec();
                    groups.push(group::LAUNCHES);
                    groups.retain(|group| seen.sampling[*group].is_on());
                    seen.trouble = found.trouble.or_else(|| {
                        held.files.is_empty().then(|| {
                            "no file that it has mapped exports the driver's launch calls (yet)"
                                .to_owned()
                        })
                    });
                }
                Err(error) => debug!(pid, %error, "its mappings cannot be read: gone"),
            }
        }
        let again = held.again;
        if !new.is_empty() {
            self.bring(pid, new, groups);
        }
        if again {
            self.scan(pid);
        }
    }

    /// Probes of a group are in.
    fn came(&mut self, pid: u32, group: usize, outcome: Result<Placed, KernelError>) {
        let Some(held) = self.held.get_mut(&pid) else {
            if let Ok(placed) = outcome {
                self.let_go(placed.probes, None);
            }
            return;
        };
        let hits = self.kernel.spent(pid).unwrap_or_default();
        let mut too_late = Vec::new();
        let mut since = None;
        {
            let mut state = lock(&self.state);
            let Some(seen) = state.of(pid) else { return };
            let now = monotonic_ns();
            match outcome {
                Ok(placed) => {
                    held.changes[group] += nanos(placed.took);
                    let sampling = &mut seen.sampling[group];
                    sampling.came(now, held.spent(hits, group));
                    if sampling.is_on() {
                        held.probes[group].extend(placed.probes);
                        since = (group == group::LAUNCHES).then_some(now);
                        if since.is_some() {
                            seen.files.append(&mut held.names);
                        }
                    } else {
                        // Of a file that was found just before the others were taken out.
                        too_late = placed.probes;
                    }
                }
                Err(error) => {
                    warn!(pid, %error, "not all of its launches are profiled for a while");
                    seen.sampling[group].put_off();
                    seen.trouble = Some(error.to_string());
                }
            }
            // What they cost is not known yet.
            let next = Duration::from_nanos(seen.sampling[group].next_ns());
            let next = Instant::now() + next;
            held.due = Some(held.due.map_or(next, |due| due.min(next)));
        }
        if let Some(now) = since {
            self.set_since(pid, now);
        }
        if !too_late.is_empty() {
            self.let_go(too_late, None);
        }
    }

    /// The probes of a group are out.
    fn left(&mut self, pid: u32, group: usize, took: Duration) {
        let Some(held) = self.held.get_mut(&pid) else {
            return;
        };
        held.changes[group] += nanos(took);
        let hits = self.kernel.spent(pid).unwrap_or_default();
        let spent = held.spent(hits, group);
        if let Some(seen) = lock(&self.state).of(pid) {
            seen.sampling[group].left(monotonic_ns(), spent);
        }
    }

    /// Books what was launched since the last time.
    fn count_launches(&mut self) {
        let now = self.kernel.launches();
        let mut state = lock(&self.state);
        for (key, launches) in now {
            let before = self.counted.insert(key, launches);
            let newly = before.map_or(launches, |before| newly(launches, &before));
            let Some(index) = u32::try_from(key.tgid)
                .ok()
                .and_then(|pid| state.by_pid.get(&pid))
                .copied()
            else {
                continue;
            };
            let Some(tenant) = state
                .processes
                .get(&index)
                .map(|seen| Arc::clone(&seen.tenant))
            else {
                continue;
            };
            if newly.count > 0 {
                state.book.launched(index, &tenant, key.handle, &newly);
            }
        }
    }

    fn drain(&mut self) {
        loop {
            let Some(told) = self.ring.next().map(|item| read(&item)) else {
                return;
            };
            match told {
                Some(Told::Waited(waited)) => self.waited(&waited),
                Some(Told::Named(named)) => self.named(&named),
                // Not of ours.
                None => {}
            }
        }
    }

    fn named(&self, named: &NewName) {
        let mut state = lock(&self.state);
        let Some(index) = state.by_pid.get(&named.pid).copied() else {
            return;
        };
        if named.alias_of == 0 {
            state.book.name(index, named.handle, &named.name);
        } else {
            state.book.alias(index, named.handle, named.alias_of);
        }
    }

    fn waited(&self, waited: &Waited) {
        let wait = Wait {
            launched_ns: waited.launched_ns,
            since_ns: waited.since_ns,
            until_ns: waited.until_ns,
        };
        let found = {
            let mut state = lock(&self.state);
            let Some(index) = state.by_pid.get(&waited.tgid).copied() else {
                return;
            };
            let Some(seen) = state.processes.get(&index) else {
                return;
            };
            let (tenant, factor) = (Arc::clone(&seen.tenant), seen.factor);
            state
                .book
                .waited(index, &tenant, waited.handle, wait, factor)
                .map(|anomaly| (tenant, anomaly))
        };
        let (Some((tenant, anomaly)), Some(host)) = (found, self.host.upgrade()) else {
            return;
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a median of nanoseconds"
        )]
        let usual = Duration::from_nanos(anomaly.usual_ns as u64);
        host.unusual(Unusual {
            tenant,
            pid: waited.tgid,
            kernel: readable(&anomaly.name),
            duration: Duration::from_nanos(anomaly.duration_ns),
            usual,
        });
    }
}

/// Launches since an earlier count.
fn newly(mut now: Launches, before: &Launches) -> Launches {
    now.count = now.count.saturating_sub(before.count);
    for (now, before) in now.gaps.iter_mut().zip(&before.gaps) {
        *now = now.saturating_sub(*before);
    }
    now
}

/// Every file of a process that has calls and is not known yet.
fn find_calls(costs: Costs, pid: u32, known: &BTreeSet<FileId>) -> io::Result<Found> {
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    let mut seen = known.clone();
    let mut found = Found::default();
    let list: Vec<(&str, u32)> = CALLS.to_vec();
    for mapping in code_mappings(&String::from_utf8_lossy(&maps)) {
        let path = PathBuf::from(format!("/proc/{pid}/map_files/{}", mapping.range));
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                found.trouble = Some(format!("{}: {error}", path.display()));
                continue;
            }
        };
        let metadata = file.metadata()?;
        let id = (metadata.dev(), metadata.ino());
        if !metadata.is_file() || !seen.insert(id) {
            continue;
        }
        // A file that cannot be made sense of has no functions that anybody could call.
        let symbols = symbols::find_listed(&file, &list).unwrap_or_default();
        if symbols.is_empty() {
            continue;
        }
        let name = shown_name(&path);
        let missing: Vec<&str> = EXPECTED
            .iter()
            .copied()
            .filter(|name| symbols.iter().all(|(symbol, _)| symbol.name != *name))
            .collect();
        if !missing.is_empty() {
            found.trouble = Some(format!("{name} has no {}", missing.join(", ")));
        }
        let probed = Arc::new(Probed {
            file,
            points: points(&symbols, costs),
        });
        found.files.push((id, name, probed));
    }
    Ok(found)
}

fn shown_name(path: &Path) -> String {
    fs::read_link(path)
        .unwrap_or_else(|_| path.to_owned())
        .display()
        .to_string()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Where the probes of each group go.
fn points(symbols: &[(Symbol, usize)], costs: Costs) -> [Points; group::COUNT] {
    let mut points: [Points; group::COUNT] = Default::default();
    for (symbol, index) in symbols {
        let Some((_, what)) = CALLS.get(*index) else {
            continue;
        };
        // Arguments are where the calling convention has them only at the very entry.
        let is_emulated = symbol.offset == symbol.entry && symbol.cost == Cost::Emulated;
        let entry = if is_emulated {
            costs.entry
        } else {
            costs.stepped
        };
        let programs = calls::programs(*what);
        // The probe at the entry books what that at the return will cost.
        let back = if programs.len() > 1 { costs.back } else { 0 };
        for program in programs {
            points[kind::group(*what)]
                .entry(*program)
                .or_default()
                .push((symbol.entry, cookie(*what, entry.saturating_add(back))));
        }
    }
    points
}

/// A message.
enum Told {
    Waited(Waited),
    Named(NewName),
}

/// A kernel that was given out.
struct NewName {
    pid: u32,
    handle: u64,
    alias_of: u64,
    name: String,
}

/// A message from an item of the ring.
fn read(item: &[u8]) -> Option<Told> {
    let what = u32::from_ne_bytes(*item.first_chunk()?);
    match what {
        told::WAITED if item.len() >= size_of::<Waited>() => {
            // SAFETY: as many bytes as the structure has, all of them integers; it need not be aligned.
            let waited = unsafe { item.as_ptr().cast::<Waited>().read_unaligned() };
            Some(Told::Waited(waited))
        }
        told::NAMED if item.len() >= size_of::<Named>() => {
            // SAFETY: as above.
            let named = unsafe { item.as_ptr().cast::<Named>().read_unaligned() };
            Some(Told::Named(NewName {
                pid: named.tgid,
                handle: named.handle,
                alias_of: named.alias_of,
                name: name_of(&named),
            }))
        }
        _ => None,
    }
}

/// The name of a kernel; one that did not fit is told apart by its handle.
fn name_of(named: &Named) -> String {
    let end = named.name.iter().position(|byte| *byte == 0);
    let bytes = &named.name[..end.unwrap_or(named.name.len())];
    // It is the tenant's to choose, and goes to logs.
    let name = String::from_utf8_lossy(bytes).replace(char::is_control, "\u{fffd}");
    if bytes.len() + 1 >= named.name.len() {
        format!("{name}...@{:#x}", named.handle)
    } else {
        name
    }
}

#[cfg(test)]
mod tests {
    use gpuquota_common::profile::NAME_BYTES;

    use super::*;

    fn message(name: &[u8]) -> Vec<u8> {
        let mut named = Named {
            told: told::NAMED,
            tgid: 7,
            handle: 0x10,
            alias_of: 0,
            name: [0; NAME_BYTES],
        };
        named.name[..name.len()].copy_from_slice(name);
        let bytes = (&raw const named).cast::<u8>();
        // SAFETY: the bytes of a structure of integers without padding, which lives until the end of this function.
        unsafe { std::slice::from_raw_parts(bytes, size_of::<Named>()) }.to_vec()
    }

    fn read_name(item: &[u8]) -> NewName {
        match read(item) {
            Some(Told::Named(named)) => named,
            _ => panic!("no name"),
        }
    }

    #[test]
    fn names_end_where_they_end() {
        let named = read_name(&message(b"gemm"));
        assert_eq!(
            (named.pid, named.handle, named.name.as_str()),
            (7, 0x10, "gemm")
        );
        let long = read_name(&message(&[b'x'; NAME_BYTES - 1])).name;
        assert!(long.ends_with("x...@0x10"), "{long}");
        let odd = read_name(&message(&[0xff, b'a', 0x1b])).name;
        assert_eq!(odd, "\u{fffd}a\u{fffd}");
        for other in [&message(b"gemm")[..100], &[9; 40], &[]] {
            assert!(read(other).is_none());
        }
    }

    #[test]
    fn probes_are_booked_at_what_they_cost() {
        let costs = Costs {
            entry: 100,
            stepped: 1000,
            back: 30,
        };
        let symbol = |name: &str, offset, cost| Symbol {
            name: name.to_owned(),
            offset,
            entry: 0x40,
            cost,
        };
        let index = |wanted: &str| {
            CALLS
                .iter()
                .position(|(name, _)| *name == wanted)
                .expect("listed")
        };
        let symbols = [
            (
                symbol("cuLaunchKernel", 0x40, Cost::Emulated),
                index("cuLaunchKernel"),
            ),
            (
                symbol("cuLaunchKernelEx", 0x47, Cost::Emulated),
                index("cuLaunchKernelEx"),
            ),
            (
                symbol("cuCtxSynchronize", 0x40, Cost::Stepped),
                index("cuCtxSynchronize"),
            ),
        ];
        let points = &points(&symbols, costs)[group::LAUNCHES];
        assert_eq!(
            points[&ProfileProgram::Launch],
            [
                (0x40, cookie(kind::LAUNCH, 100)),
                (0x40, cookie(kind::LAUNCH_EX, 1000))
            ]
        );
        let wait = [(0x40, cookie(kind::WAIT_CONTEXT, 1030))];
        assert_eq!(points[&ProfileProgram::Wait], wait);
        assert_eq!(points[&ProfileProgram::Waited], wait);
    }

    #[test]
    fn launches_are_booked_once() {
        let mut before = Launches {
            count: 3,
            gaps: [0; gpuquota_common::launch::GAPS],
        };
        before.gaps[4] = 2;
        let mut now = before;
        now.count = 10;
        now.gaps[4] = 5;
        let newly = newly(now, &before);
        assert_eq!((newly.count, newly.gaps[4]), (7, 3));
    }
}
