//! A look at processes: probes in, calls out, for a bounded time.
//!
//! Two threads for each look. The keeper has the probes and takes them away when the time is over, whatever the other
//! does. The reader follows the calls, for which it has to read files of the tenant's, which may never answer. For the same
//! reason each process is looked at by a thread of its own, as in [`crate::launch::scan`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::insight::{Header, call, cookie};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{debug, info, warn};

use super::{
    calls::{self, ALLOCATIONS, EXPECTED},
    pairing::{Pairing, ProcessIndex, Site, Space, Span},
    stack::{AddressSpace, Binaries, Frame, Place},
};
use crate::{
    control::leaks::{LeakFrame, LeakGaps, LeakProcess, LeakReport, LeakSite, Target},
    doctor,
    enforcer::monotonic_ns,
    kernel::{KernelError, Probe, insight::InsightKernel},
    launch::{
        process::started,
        scan::{FileId, code_mappings},
        symbols,
    },
};

/// Allocations that are remembered at once.
const MOST_LIVE: usize = 1 << 20;
/// Call sites that are told apart.
const MOST_SITES: usize = 4096;
/// Stacks whose call site is remembered.
const MOST_STACKS: usize = 1 << 16;
/// Processes in one look.
const MOST_PROCESSES: usize = 1024;
/// Time between two looks at who is there.
const SWEEP: Duration = Duration::from_secs(1);
/// Time between two looks at what call sites hold: a look of a few seconds is enough to see what grows.
const WEIGH: Duration = Duration::from_millis(250);
/// The reader wakes at least so often, to see whether it is to end.
const READER_PATIENCE: Duration = Duration::from_millis(100);

/// Who there is to look at.
pub trait Watched: Send + Sync {
    /// The processes of a target that have spoken to the driver.
    fn processes(&self, target: &Target) -> Vec<u32>;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// News for the keeper.
enum Message {
    /// A process may have something to probe, or more of it.
    Seen(u32),
    /// A process was looked at.
    Scanned(u32, Result<Found, ScanError>),
    /// End.
    Stop,
}

/// A running or finished look.
pub struct Look {
    target: Target,
    limit: Duration,
    began: Instant,
    /// How long it lasted, once it is over.
    ended: Mutex<Option<Duration>>,
    inbox: mpsc::Sender<Message>,
    state: Arc<Mutex<State>>,
}

/// What is known so far.
struct State {
    pairing: Pairing,
    sites: Vec<SiteInfo>,
    processes: Vec<Seen>,
    by_pid: HashMap<u32, ProcessIndex>,
    crowded: u64,
    contexts_ended: u64,
    lost: u64,
    too_large: Vec<PathBuf>,
    /// The moment that ages are counted to, once the look is over.
    until_ns: Option<u64>,
}

/// A call site.
struct SiteInfo {
    call: u32,
    frames: Vec<Frame>,
    cut: bool,
}

/// A process that was met.
struct Seen {
    pid: u32,
    started: Option<u64>,
    comm: String,
    files: Vec<String>,
    trouble: Option<String>,
    ended: bool,
}

impl Look {
    /// Loads the programs, puts probes into all processes of a target, and returns.
    pub fn start(
        target: Target,
        limit: Duration,
        watched: Weak<dyn Watched>,
    ) -> Result<Self, LookError> {
        let system = |what| move |source| LookError::System { what, source };
        let (kernel, ring) = InsightKernel::load()?;
        let kernel = Arc::new(kernel);
        let state = Arc::new(Mutex::new(State::new()));
        let over = Arc::new(AtomicBool::new(false));
        let (inbox, messages) = mpsc::channel();
        let reader = Reader {
            ring,
            state: Arc::clone(&state),
            over: Arc::clone(&over),
            spaces: HashMap::new(),
            binaries: Binaries::default(),
            stacks: HashMap::new(),
            sites: HashMap::new(),
        };
        let began = Instant::now();
        let mut keeper = Keeper {
            target: target.clone(),
            watched,
            kernel,
            state: Arc::clone(&state),
            over,
            messages,
            outbox: inbox.clone(),
            end: began + limit,
            held: BTreeMap::new(),
        };
        thread::Builder::new()
            .name("leaks-read".into())
            .spawn(move || reader.run())
            .map_err(system("starting the thread that reads allocations"))?;
        thread::Builder::new()
            .name("leaks-keep".into())
            .spawn(move || keeper.run())
            .map_err(system("starting the thread that keeps allocation probes"))?;
        Ok(Self {
            target,
            limit,
            began,
            ended: Mutex::default(),
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
        let over = lock(&self.state).until_ns.is_some();
        if over {
            lock(&self.ended).get_or_insert_with(|| self.began.elapsed().min(self.limit));
        }
        over
    }

    /// What it has found.
    pub fn report(&self) -> LeakReport {
        let running = !self.is_over();
        let elapsed = lock(&self.ended).unwrap_or_else(|| self.began.elapsed());
        let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let state = lock(&self.state);
        let now = state.until_ns.unwrap_or_else(monotonic_ns);
        let mut unnamed = BTreeSet::new();
        for frame in state.sites.iter().flat_map(|site| &site.frames) {
            if frame.function.is_none() {
                unnamed.insert(frame.file.clone());
            }
        }
        let mut sites: Vec<LeakSite> = state
            .pairing
            .sites(now)
            .into_iter()
            .filter_map(|(site, tally, ages)| {
                let info = state.sites.get(site as usize)?;
                Some(LeakSite {
                    call: calls::name(info.call).to_owned(),
                    frames: info.frames.iter().map(shown).collect(),
                    cut: info.cut,
                    live: tally.live,
                    live_bytes: tally.live_bytes,
                    peak_bytes: tally.peak_bytes,
                    allocations: tally.allocations,
                    allocated_bytes: tally.allocated_bytes,
                    oldest_usec: ages.last().map(|age| age / 1000),
                    median_usec: ages.get(ages.len() / 2).map(|age| age / 1000),
                    growth: tally.trend.growth(),
                    survival: tally
                        .ends
                        .curve(&ages)
                        .into_iter()
                        .map(|(age, share)| (age / 1000, share))
                        .collect(),
                })
            })
            .collect();
        sites.sort_by(|a, b| {
            (b.live_bytes, b.live, b.allocations).cmp(&(a.live_bytes, a.live, a.allocations))
        });
        LeakReport {
            target: self.target.clone(),
            running,
            elapsed_usec: micros(elapsed),
            limit_usec: micros(self.limit),
            processes: state
                .processes
                .iter()
                .map(|seen| LeakProcess {
                    pid: seen.pid,
                    comm: seen.comm.clone(),
                    files: seen.files.clone(),
                    ended: seen.ended,
                    trouble: seen.trouble.clone(),
                })
                .collect(),
            sites,
            gaps: LeakGaps {
                lost: state.lost,
                overflowed: state.pairing.overflowed,
                crowded: state.crowded,
                older_frees: state.pairing.unknown_frees,
                contexts_ended: state.contexts_ended,
                unnamed: unnamed.into_iter().collect(),
                too_large: state
                    .too_large
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect(),
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
    /// A thread.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn shown(frame: &Frame) -> LeakFrame {
    LeakFrame {
        function: frame.function.clone(),
        file: frame.file.clone(),
        address: frame.address,
    }
}

impl State {
    fn new() -> Self {
        Self {
            pairing: Pairing::new(MOST_LIVE),
            sites: Vec::new(),
            processes: Vec::new(),
            by_pid: HashMap::new(),
            crowded: 0,
            contexts_ended: 0,
            lost: 0,
            too_large: Vec::new(),
            until_ns: None,
        }
    }

    /// The index of a process that is there now.
    fn process(&mut self, pid: u32) -> ProcessIndex {
        if let Some(index) = self.by_pid.get(&pid) {
            return *index;
        }
        let index = u32::try_from(self.processes.len()).unwrap_or(u32::MAX);
        self.processes.push(Seen {
            pid,
            started: started(pid),
            comm: doctor::comm(pid),
            files: Vec::new(),
            trouble: None,
            ended: false,
        });
        self.by_pid.insert(pid, index);
        index
    }

    fn end(&mut self, pid: u32) {
        if let Some(index) = self.by_pid.remove(&pid) {
            self.processes[index as usize].ended = true;
            self.pairing.end(index, monotonic_ns());
        }
    }
}

/// What was found in a process, and the probes.
struct Found {
    probes: Vec<Probe>,
    files: Vec<(FileId, String)>,
    trouble: Option<String>,
}

/// Why a process could not be probed.
#[derive(Debug, thiserror::Error)]
enum ScanError {
    /// Its mappings cannot be read.
    #[error("its mappings cannot be read: {0}")]
    Maps(#[from] io::Error),
    /// The kernel refuses a probe.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// A process with probes, or about to have some.
#[derive(Default)]
struct Held {
    probes: Vec<Probe>,
    files: BTreeSet<FileId>,
    scanning: bool,
    again: bool,
}

/// Has the probes.
struct Keeper {
    target: Target,
    watched: Weak<dyn Watched>,
    kernel: Arc<InsightKernel>,
    state: Arc<Mutex<State>>,
    over: Arc<AtomicBool>,
    messages: mpsc::Receiver<Message>,
    outbox: mpsc::Sender<Message>,
    end: Instant,
    held: BTreeMap<u32, Held>,
}

impl Keeper {
    fn run(&mut self) {
        info!(target = %self.target, "allocations are followed");
        let mut next_sweep = Instant::now();
        let mut next_weighing = next_sweep;
        loop {
            let now = Instant::now();
            if now >= self.end {
                break;
            }
            if now >= next_sweep {
                self.sweep();
                next_sweep = Instant::now() + SWEEP;
            }
            if now >= next_weighing {
                self.weigh();
                next_weighing = Instant::now() + WEIGH;
            }
            let next = next_sweep.min(next_weighing).min(self.end);
            let patience = next.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(patience) {
                Ok(Message::Seen(pid)) if self.held.contains_key(&pid) => self.scan(pid),
                Ok(Message::Seen(_)) => {
                    if self.is_ours() {
                        self.sweep();
                    }
                }
                Ok(Message::Scanned(pid, outcome)) => self.scanned(pid, outcome),
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
        self.held.clear();
        self.note_losses();
        self.over.store(true, Ordering::Release);
        lock(&self.state).until_ns = Some(monotonic_ns());
        info!(target = %self.target, "allocations are followed no more");
    }

    /// Whether processes may still join.
    fn is_ours(&self) -> bool {
        matches!(self.target, Target::Tenant(_)) || self.held.is_empty()
    }

    fn sweep(&mut self) {
        let there: Vec<u32> = match &self.target {
            Target::Process(pid) => vec![*pid],
            tenant @ Target::Tenant(_) => self
                .watched
                .upgrade()
                .map(|watched| watched.processes(tenant))
                .unwrap_or_default(),
        };
        let ended: Vec<u32> = {
            let state = lock(&self.state);
            self.held
                .keys()
                .filter(|pid| {
                    let known = state
                        .by_pid
                        .get(pid)
                        .and_then(|index| state.processes.get(*index as usize));
                    known.is_none_or(|seen| started(**pid) != seen.started)
                })
                .copied()
                .collect()
        };
        for pid in ended {
            self.held.remove(&pid);
            lock(&self.state).end(pid);
        }
        for pid in there {
            let is_new = !self.held.contains_key(&pid);
            let has_none = |held: &Held| held.files.is_empty();
            if is_new && self.held.len() < MOST_PROCESSES && started(pid).is_some() {
                // A process that ended is not met again.
                let was_met = matches!(self.target, Target::Process(_))
                    && lock(&self.state)
                        .processes
                        .iter()
                        .any(|seen| seen.pid == pid && seen.ended);
                if was_met {
                    continue;
                }
                lock(&self.state).process(pid);
                self.held.insert(pid, Held::default());
                self.scan(pid);
            } else if self.held.get(&pid).is_some_and(has_none) {
                self.scan(pid);
            }
        }
        self.note_losses();
    }

    /// Looks at what call sites hold.
    fn weigh(&self) {
        let now = monotonic_ns();
        lock(&self.state).pairing.look(now);
    }

    fn note_losses(&self) {
        if let Ok(losses) = self.kernel.losses() {
            lock(&self.state).lost = losses.iter().sum();
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
        let known = held.files.clone();
        let kernel = Arc::clone(&self.kernel);
        let outbox = self.outbox.clone();
        let spawned = thread::Builder::new()
            .name("leaks-scan".into())
            .spawn(move || {
                let outcome = probe(&kernel, pid, &known);
                // Nobody to tell: what was attached goes with the message.
                let _ = outbox.send(Message::Scanned(pid, outcome));
            });
        if let Err(error) = spawned {
            warn!(pid, %error, "it could not be looked at");
            held.scanning = false;
        }
    }

    fn scanned(&mut self, pid: u32, outcome: Result<Found, ScanError>) {
        let Some(held) = self.held.get_mut(&pid) else {
            return;
        };
        held.scanning = false;
        let mut state = lock(&self.state);
        let index = state.process(pid) as usize;
        let seen = &mut state.processes[index];
        match outcome {
            Ok(found) => {
                held.probes.extend(found.probes);
                for (id, name) in found.files {
                    debug!(pid, file = name, "its allocations are followed");
                    held.files.insert(id);
                    seen.files.push(name);
                }
                seen.trouble = found.trouble.or_else(|| {
                    held.files.is_empty().then(|| {
                        "no file that it has mapped exports the driver's allocation calls (yet)"
                            .to_owned()
                    })
                });
            }
            Err(ScanError::Maps(error)) => debug!(pid, %error, "gone"),
            Err(error) => {
                warn!(pid, %error, "its allocations are not followed");
                seen.trouble = Some(error.to_string());
            }
        }
        drop(state);
        if held.again {
            self.scan(pid);
        }
    }
}

/// Puts probes into every file of a process that has calls and no probes yet.
fn probe(kernel: &InsightKernel, pid: u32, known: &BTreeSet<FileId>) -> Result<Found, ScanError> {
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    let mut seen = known.clone();
    let mut found = Found {
        probes: Vec::new(),
        files: Vec::new(),
        trouble: None,
    };
    for mapping in code_mappings(&String::from_utf8_lossy(&maps)) {
        let path = PathBuf::from(format!("/proc/{pid}/map_files/{}", mapping.range));
        let file = match fs::File::open(&path) {
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
        let symbols = symbols::find_listed(&file, ALLOCATIONS).unwrap_or_default();
        if symbols.is_empty() {
            continue;
        }
        let points: Vec<(u64, u64)> = symbols
            .iter()
            .filter_map(|(symbol, index)| {
                let (_, what) = ALLOCATIONS.get(*index)?;
                // Arguments are where the calling convention has them only at the very entry.
                Some((symbol.entry, cookie(*what, u32::try_from(*index).ok()?)))
            })
            .collect();
        found
            .probes
            .extend(kernel.attach((pid, pid), &path, &points)?);
        let name = fs::read_link(&path).unwrap_or(path).display().to_string();
        let missing: Vec<&str> = EXPECTED
            .iter()
            .copied()
            .filter(|name| symbols.iter().all(|(symbol, _)| symbol.name != *name))
            .collect();
        if !missing.is_empty() {
            found.trouble = Some(format!("{name} has no {}", missing.join(", ")));
        }
        found.files.push((id, name));
    }
    Ok(found)
}

/// A stack as it was met: process, how often its mappings had changed, call, addresses.
type StackKey = (ProcessIndex, u64, u32, Vec<u64>);

/// Follows the calls.
struct Reader {
    ring: RingBuf<MapData>,
    state: Arc<Mutex<State>>,
    over: Arc<AtomicBool>,
    spaces: HashMap<ProcessIndex, AddressSpace>,
    binaries: Binaries,
    stacks: HashMap<StackKey, Site>,
    sites: HashMap<(u32, Vec<Frame>), Site>,
}

impl Reader {
    fn run(mut self) {
        loop {
            // What was told before the end is read before it.
            let over = self.over.load(Ordering::Acquire);
            self.drain();
            if over {
                return;
            }
            let timeout = Timespec::try_from(READER_PATIENCE).ok();
            let fd = self.ring.as_fd();
            let mut wait = [PollFd::new(&fd, PollFlags::IN)];
            if let Err(error) = poll(&mut wait, timeout.as_ref())
                && error != rustix::io::Errno::INTR
            {
                warn!(%error, "allocations cannot be waited for");
                thread::sleep(READER_PATIENCE);
            }
        }
    }

    fn drain(&mut self) {
        loop {
            let call = self
                .ring
                .next()
                .map(|item| split(&item).map(|(header, stack)| (header, stack.to_vec())));
            match call {
                Some(Some((header, stack))) => self.take(&header, &stack),
                // Not of ours.
                Some(None) => {}
                None => return,
            }
        }
    }

    fn take(&mut self, header: &Header, stack: &[u8]) {
        let process = lock(&self.state).process(header.tgid);
        let span = Span {
            entered: header.entered_ns,
            returned: header.returned_ns,
        };
        if call::obtains(header.call) {
            let site = self.site(process, header, stack);
            let space = match header.call {
                call::CREATE => Space::Handle,
                call::HOST_ALLOC => Space::Host,
                call::REGISTER => Space::Registered,
                _ => Space::Device,
            };
            lock(&self.state).pairing.obtain(
                process,
                (space, header.address),
                header.bytes,
                site,
                span,
            );
            return;
        }
        let mut state = lock(&self.state);
        let pairing = &mut state.pairing;
        let at = header.address;
        match header.call {
            call::FREE => pairing.give_back(process, (Space::Device, at), span),
            call::HOST_FREE => pairing.give_back(process, (Space::Host, at), span),
            call::UNREGISTER => pairing.give_back(process, (Space::Registered, at), span),
            call::RELEASE => pairing.release(process, at, span),
            call::RETAIN => pairing.retain(process, at, span),
            call::MAP => pairing.map(process, at, header.bytes, header.fourth),
            call::UNMAP => pairing.unmap(process, at, header.bytes, span.returned),
            call::CONTEXT_END => state.contexts_ended += 1,
            _ => {}
        }
    }

    fn site(&mut self, process: ProcessIndex, header: &Header, stack: &[u8]) -> Site {
        let space = self
            .spaces
            .entry(process)
            .or_insert_with(|| AddressSpace::new(header.tgid));
        let walked = space.walk(&mut self.binaries, Place::from(header), stack);
        let key = (
            process,
            space.changes(),
            header.index,
            walked.addresses.clone(),
        );
        if let Some(site) = self.stacks.get(&key) {
            return *site;
        }
        let frames: Vec<Frame> = walked
            .addresses
            .iter()
            .map(|address| space.frame(&mut self.binaries, *address))
            .collect();
        let site = self.site_of(header.index, frames, walked.cut);
        if self.stacks.len() >= MOST_STACKS {
            self.stacks.clear();
        }
        self.stacks.insert(key, site);
        site
    }

    fn site_of(&mut self, call: u32, frames: Vec<Frame>, cut: bool) -> Site {
        let mut state = lock(&self.state);
        state.too_large.clone_from(&self.binaries.too_large);
        let mut key = (call, frames);
        if !self.sites.contains_key(&key) && self.sites.len() >= MOST_SITES {
            state.crowded += 1;
            key.1 = Vec::new();
        }
        if let Some(site) = self.sites.get(&key) {
            return *site;
        }
        let site = u32::try_from(state.sites.len()).unwrap_or(u32::MAX);
        state.sites.push(SiteInfo {
            call,
            frames: key.1.clone(),
            cut: cut || key.1.is_empty(),
        });
        self.sites.insert(key, site);
        site
    }
}

/// A call and the stack behind it, from an item of the ring.
fn split(item: &[u8]) -> Option<(Header, &[u8])> {
    let (header, stack) = item.split_at_checked(size_of::<Header>())?;
    // SAFETY: as many bytes as the structure has, all of them integers; it need not be aligned.
    let header = unsafe { header.as_ptr().cast::<Header>().read_unaligned() };
    let length = usize::try_from(header.stack_len).ok()?.min(stack.len());
    Some((header, &stack[..length]))
}
