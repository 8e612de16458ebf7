//! A look at the threads of processes, for a bounded time.
//!
//! Two threads for each look. The keeper has the programs and takes them away when the time is over, whatever the other
//! does. The reader follows the moments, for which it has to read files of the tenant's, which may never answer. NVML is
//! asked by a third one, for the same reason.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fs, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::idle::{MAX_CHOSEN, Moment, counter, what};
use tracing::{debug, info, warn};

use super::{
    correlate::{Correlator, MOST_STACKS},
    gpu::Use,
    state::{self, State},
    timeline::Sampled,
};
use crate::{
    control::{
        idle::{IdleGaps, IdleGpu, IdleProcess, IdleReport, IdleShare, IdleStack, IdleState},
        leaks::{LeakFrame, Target},
    },
    doctor,
    enforcer::monotonic_ns,
    insight::stack::{AddressSpace, Binaries, Frame, Place},
    kernel::{
        KernelError,
        idle::{IdleKernel, TICKS},
    },
    launch::process::started,
    profile::sampling::{Loan, Order, SELDOM_NS, Sampling, Spent},
    time::{
        gpu::Told,
        levers::wall_us,
        utilization::{self, Questions, Utilization},
    },
};

/// Time between two looks at who is there.
const SWEEP: Duration = Duration::from_millis(500);
/// Time between two looks at what was told.
const READ: Duration = Duration::from_millis(20);
/// How often NVML is asked. It has a sample about every tenth of a second at most.
const ASK: Duration = Duration::from_millis(100);
/// NVML tells use with a delay, and idleness after [`ASK`]'s own longest wait: after the end it is waited for so long.
const AFTERMATH: Duration = Duration::from_secs(5);
/// Moments that are taken at once.
const MOST_MOMENTS: usize = 1 << 16;
/// Stacks of walked addresses whose number is remembered.
const MOST_WALKS: usize = 1 << 14;
/// Names of threads that are remembered.
const MOST_NAMES: usize = 1 << 14;
/// Bytes of names on the stacks that are told apart. Tenants choose the names, and a bus carries no more at once.
const MOST_NAME_BYTES: usize = 16 << 20;
/// Stacks that are told.
const MOST_TOLD: usize = 1000;
/// Number of the stack that stands for those beyond [`MOST_STACKS`].
const OTHERS: u32 = 0;

/// Who there is to look at.
pub trait Watched: Send + Sync {
    /// All processes of a target, also those that have nothing to do with GPUs.
    fn members(&self, target: &Target) -> Vec<u32>;
    /// GPUs and the processes that have a context there.
    fn contexts(&self) -> Vec<(u32, u32)>;
    /// GPUs and the processes whose channels are frozen there by us now.
    fn frozen(&self) -> Vec<(u32, u32)>;
    /// Whether a process that is stopped or frozen now is so by us.
    fn holds(&self, pid: u32) -> bool;
    /// Part of its time that following a process may cost it.
    fn budget(&self, pid: u32) -> f64;
    /// The NVML library, if not where the loader finds it.
    fn library(&self) -> Option<PathBuf>;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a look could not begin.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The kernel side.
    #[error("{0}; it needs Linux 5.18 or later with BTF")]
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

/// A running or finished look.
pub struct Look {
    target: Target,
    limit: Duration,
    began: Instant,
    stop: mpsc::Sender<()>,
    shared: Arc<Shared>,
}

/// What the threads of a look share.
struct Shared {
    known: Mutex<Known>,
    /// When the programs were taken away, `CLOCK_MONOTONIC` nanoseconds; 0 before.
    detached_ns: AtomicU64,
    /// Everything is known that will be.
    over: AtomicBool,
    /// Nobody wants to know any more.
    abandoned: AtomicBool,
    /// Whom NVML is asked about.
    questions: Arc<Questions>,
}

/// What is known so far.
#[derive(Default)]
struct Known {
    correlator: Correlator,
    stacks: Vec<Arc<StackInfo>>,
    /// Bytes of names on them.
    name_bytes: usize,
    processes: Vec<Seen>,
    /// Processes whose threads are to be looked up; true if what is known of them is doubtful.
    look_up: Vec<(u32, bool)>,
    /// Processes that were lost sight of, or are seen again, in the order of time.
    turns: VecDeque<Turn>,
    troubles: BTreeMap<u32, String>,
    losses: [u64; counter::COUNT as usize],
    no_samples: Option<String>,
    left_out: BTreeSet<u32>,
    too_large: Vec<PathBuf>,
}

/// A stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StackInfo {
    thread: String,
    state: State,
    frames: Vec<Frame>,
    cut: bool,
}

impl StackInfo {
    fn name_bytes(&self) -> usize {
        let of_frame =
            |frame: &Frame| frame.file.len() + frame.function.as_ref().map_or(0, String::len);
        self.thread.len() + self.frames.iter().map(of_frame).sum::<usize>()
    }
}

/// A process that was met.
struct Seen {
    pid: u32,
    started: Option<u64>,
    comm: String,
    ended: bool,
    budget: f64,
    /// When it is followed.
    sampling: Sampling,
}

/// A process is not followed for a while, or is again.
struct Turn {
    pid: u32,
    at_ns: u64,
    /// What its threads did then, if it is followed again.
    found: Option<Vec<(u32, State)>>,
}

impl Look {
    /// Loads the programs, follows all processes of a target, and returns.
    pub fn start(
        target: Target,
        limit: Duration,
        watched: &Weak<dyn Watched>,
    ) -> Result<Self, LookError> {
        let system = |what| move |source| LookError::System { what, source };
        let (kernel, ring) = IdleKernel::load()?;
        let shared = Arc::new(Shared {
            known: Mutex::new(Known::new(kernel.no_ticks.clone())),
            detached_ns: AtomicU64::new(0),
            over: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            questions: Arc::default(),
        });
        let began = Instant::now();
        let (stop, stopped) = mpsc::channel();
        let mut keeper = Keeper {
            target: target.clone(),
            watched: Weak::clone(watched),
            kernel,
            shared: Arc::clone(&shared),
            chosen: BTreeMap::new(),
        };
        // Before the first answer, so that those who ask at once are told whom it is about.
        keeper.sweep();
        let reader = Reader {
            ring,
            watched: Weak::clone(watched),
            shared: Arc::clone(&shared),
            spaces: HashMap::new(),
            binaries: Binaries::default(),
            walks: HashMap::new(),
            stacks: HashMap::new(),
            names: HashMap::new(),
            frozen_to: monotonic_ns(),
        };
        let library = watched.upgrade().and_then(|watched| watched.library());
        let told = Arc::downgrade(&shared);
        utilization::spawn(
            Arc::clone(&shared.questions),
            library,
            ASK,
            None,
            move |news| told.upgrade().is_some_and(|shared| shared.told(news)),
        )
        .map_err(system("starting the thread that asks NVML"))?;
        thread::Builder::new()
            .name("idle-read".into())
            .spawn(move || reader.run())
            .map_err(system("starting the thread that follows threads"))?;
        thread::Builder::new()
            .name("idle-keep".into())
            .spawn(move || keeper.run(began + limit, &stopped))
            .map_err(system("starting the thread that keeps programs"))?;
        Ok(Self {
            target,
            limit,
            began,
            stop,
            shared,
        })
    }

    /// Has the programs taken away, and returns when all is known: NVML tells of the last moments a little later.
    pub fn stop(&self) {
        // A keeper that has ended needs no word.
        let _ = self.stop.send(());
        let end = Instant::now() + AFTERMATH + Duration::from_secs(2);
        while !self.is_over() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Has the programs taken away, whatever is known by then, and returns when they are.
    pub fn abandon(&self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
        let _ = self.stop.send(());
        let end = Instant::now() + Duration::from_secs(5);
        while self.is_attached() && Instant::now() < end {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether the programs are there.
    pub fn is_attached(&self) -> bool {
        self.shared.detached_ns.load(Ordering::Acquire) == 0
    }

    /// Whether everything is known that will be.
    pub fn is_over(&self) -> bool {
        self.shared.over.load(Ordering::Acquire)
    }

    /// What it has found.
    pub fn report(&self) -> IdleReport {
        let elapsed = self.began.elapsed().min(self.limit);
        let detached = self.shared.detached_ns.load(Ordering::Acquire);
        let since_end = Duration::from_nanos(match detached {
            0 => 0,
            then => monotonic_ns().saturating_sub(then),
        });
        let elapsed = elapsed.min(self.began.elapsed().saturating_sub(since_end));
        let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let known = lock(&self.shared.known);
        IdleReport {
            target: self.target.clone(),
            running: detached == 0,
            elapsed_usec: micros(elapsed),
            limit_usec: micros(self.limit),
            gpus: known.gpus(),
            processes: known
                .processes
                .iter()
                .map(|seen| IdleProcess {
                    pid: seen.pid,
                    comm: seen.comm.clone(),
                    ended: seen.ended,
                    cost: seen.sampling.cost(),
                    budget: seen.budget,
                    covered: seen.sampling.covered(),
                })
                .collect(),
            stacks: known.stacks(),
            gaps: known.gaps(),
        }
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Shared {
    /// News of a GPU. Whether there may be more.
    fn told(&self, news: Utilization) -> bool {
        // Nanoseconds from the clock of programs to that of NVML, which may be set at any time.
        let apart = i128::from(wall_us()) * 1000 - i128::from(monotonic_ns());
        let ns = |us: u64| u64::try_from(i128::from(us) * 1000 - apart).unwrap_or(0);
        let mut known = lock(&self.known);
        match news {
            Utilization::Used {
                gpu,
                known_us,
                busy,
                energy,
                board,
            } => {
                let told = Told {
                    known_us,
                    busy: &busy,
                    energy,
                    board,
                };
                let missed = told.is_silent();
                let uses: Vec<Use> = busy
                    .iter()
                    .map(|busy| Use {
                        pid: busy.tgid,
                        from_ns: ns(busy.from_us),
                        to_ns: ns(busy.to_us),
                        busy_ns: busy.busy_us * 1000,
                    })
                    .collect();
                known.troubles.remove(&gpu);
                if missed {
                    known.correlator.missed(gpu, ns(known_us));
                } else {
                    known.correlator.told(gpu, ns(known_us), &uses);
                }
            }
            Utilization::Unknown { gpu, why } => {
                let trouble = format!("NVML does not tell its use by process: {why}");
                known.troubles.insert(gpu, trouble);
            }
            Utilization::Divided { gpu, divided: true } => {
                let trouble =
                    "it is divided into instances (MIG), whose use NVML does not tell by process";
                known.troubles.insert(gpu, trouble.to_owned());
            }
            Utilization::Divided { gpu, .. } => {
                known.troubles.remove(&gpu);
            }
        }
        !self.over.load(Ordering::Relaxed)
    }
}

/// Nanoseconds as they are told.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times of a look, which are not negative and last an hour at most"
)]
fn usec(ns: f64) -> u64 {
    (ns / 1000.0).round() as u64
}

impl Known {
    fn new(no_samples: Option<String>) -> Self {
        let others = StackInfo {
            thread: String::new(),
            state: State::Asleep,
            frames: Vec::new(),
            cut: true,
        };
        Self {
            stacks: vec![Arc::new(others)],
            no_samples,
            ..Self::default()
        }
    }

    /// A process that is followed.
    fn seen(&mut self, pid: u32) -> Option<&mut Seen> {
        self.processes
            .iter_mut()
            .find(|seen| seen.pid == pid && !seen.ended)
    }

    fn gpus(&self) -> Vec<IdleGpu> {
        let mut found: Vec<IdleGpu> = self
            .correlator
            .gpus()
            .map(|(index, gpu)| IdleGpu {
                gpu: index,
                step_usec: gpu.step_ns().map(usec),
                untold_usec: usec(gpu.untold_ns()),
                shares: Vec::new(),
                trouble: self.troubles.get(&index).cloned(),
            })
            .collect();
        for (gpu, pid, context, tally) in self.correlator.tallies() {
            let Some(place) = found.iter_mut().find(|place| place.gpu == gpu) else {
                continue;
            };
            place.shares.push(IdleShare {
                pid,
                context,
                known_usec: usec(tally.wall),
                used_usec: usec(tally.used),
                others_usec: usec(tally.others),
                idle_usec: usec(tally.idle),
                states: State::ALL
                    .into_iter()
                    .map(|state| IdleState {
                        state,
                        time_usec: usec(tally.time[state.index()]),
                        idle_usec: usec(tally.idle_in[state.index()]),
                        least_usec: usec(tally.least[state.index()]),
                        most_usec: usec(tally.most[state.index()]),
                    })
                    .collect(),
            });
        }
        for place in &mut found {
            place.shares.retain(|share| share.known_usec > 0);
            place.shares.sort_by_key(|share| {
                (
                    !share.context,
                    std::cmp::Reverse(share.used_usec),
                    share.pid,
                )
            });
        }
        found
    }

    fn stacks(&self) -> Vec<IdleStack> {
        let shown = |frame: &Frame| LeakFrame {
            function: frame.function.clone(),
            file: frame.file.clone(),
            address: frame.address,
        };
        let mut found: Vec<IdleStack> = self
            .correlator
            .stacks()
            .filter_map(|(pid, stack, time)| {
                let info = self.stacks.get(stack as usize)?;
                Some(IdleStack {
                    pid,
                    thread: info.thread.clone(),
                    state: info.state,
                    frames: info.frames.iter().map(shown).collect(),
                    cut: info.cut,
                    idle_usec: usec(time),
                })
            })
            .collect();
        found.sort_by(|a, b| {
            (b.idle_usec, a.pid, &a.thread, &a.frames).cmp(&(
                a.idle_usec,
                b.pid,
                &b.thread,
                &b.frames,
            ))
        });
        found.truncate(MOST_TOLD);
        found
    }

    fn gaps(&self) -> IdleGaps {
        let unnamed: BTreeSet<&String> = self
            .stacks
            .iter()
            .flat_map(|stack| &stack.frames)
            .filter(|frame| frame.function.is_none())
            .map(|frame| &frame.file)
            .collect();
        IdleGaps {
            lost: self.losses[counter::LOST as usize],
            stackless: self.losses[counter::STACKLESS as usize],
            crowded: self.correlator.crowded(),
            uncounted_usec: usec(self.correlator.uncounted_ns),
            processes: self.left_out.len() as u64,
            no_samples: self.no_samples.clone(),
            unnamed: unnamed.into_iter().cloned().collect(),
            too_large: self
                .too_large
                .iter()
                .map(|path| path.display().to_string())
                .collect(),
        }
    }

    /// A process is not followed for a while, or is again.
    fn turn(&mut self, turn: &Turn) {
        match &turn.found {
            None => self.correlator.lose_sight(turn.pid, turn.at_ns),
            Some(found) => self.correlator.see_again(turn.pid, turn.at_ns, found),
        }
    }

    /// The place of a stack among those that are told apart.
    fn number(&mut self, stack: Arc<StackInfo>) -> u32 {
        let bytes = self.name_bytes + stack.name_bytes();
        if self.stacks.len() >= MOST_STACKS || bytes > MOST_NAME_BYTES {
            return OTHERS;
        }
        self.name_bytes = bytes;
        self.stacks.push(stack);
        u32::try_from(self.stacks.len() - 1).unwrap_or(OTHERS)
    }
}

/// Has the programs.
struct Keeper {
    target: Target,
    watched: Weak<dyn Watched>,
    kernel: IdleKernel,
    shared: Arc<Shared>,
    /// Processes that are followed, with pauses, and when to look at what that has cost them.
    chosen: BTreeMap<u32, Instant>,
}

impl Keeper {
    fn run(mut self, end: Instant, stopped: &mpsc::Receiver<()>) {
        info!(target = %self.target, "threads are followed");
        let mut next_sweep = Instant::now() + SWEEP;
        loop {
            let due = self.chosen.values().copied().fold(next_sweep, Instant::min);
            let now = Instant::now();
            let left = due.min(end).saturating_duration_since(now);
            let over =
                now >= end || stopped.recv_timeout(left) != Err(mpsc::RecvTimeoutError::Timeout);
            if over {
                break;
            }
            self.look_at_costs();
            if Instant::now() >= next_sweep {
                self.sweep();
                next_sweep = Instant::now() + SWEEP;
            }
        }
        self.note_losses();
        let (target, shared) = (self.target.clone(), Arc::clone(&self.shared));
        drop(self);
        shared.detached_ns.store(monotonic_ns(), Ordering::Release);
        info!(%target, "threads are followed no more");
    }

    fn sweep(&mut self) {
        let Some(watched) = self.watched.upgrade() else {
            return;
        };
        let there: BTreeSet<u32> = watched.members(&self.target).into_iter().collect();
        let contexts = watched.contexts();
        let ended: Vec<u32> = {
            let known = lock(&self.shared.known);
            known
                .processes
                .iter()
                .filter(|seen| !seen.ended)
                .filter(|seen| !there.contains(&seen.pid) || started(seen.pid) != seen.started)
                .map(|seen| seen.pid)
                .collect()
        };
        for pid in ended {
            self.chosen.remove(&pid);
            if let Err(error) = self.kernel.forget(pid) {
                warn!(pid, %error, "goes on to be followed");
            }
            let mut known = lock(&self.shared.known);
            known.correlator.end(pid, monotonic_ns());
            for seen in known.processes.iter_mut().filter(|seen| seen.pid == pid) {
                seen.ended = true;
            }
        }
        for pid in there {
            if self.chosen.contains_key(&pid) {
                let budget = watched.budget(pid);
                let mut known = lock(&self.shared.known);
                if let Some(seen) = known.seen(pid) {
                    seen.budget = budget;
                    seen.sampling.set_budget(budget);
                }
            } else {
                self.meet(pid, watched.budget(pid));
            }
        }
        let gpus = {
            let mut known = lock(&self.shared.known);
            for (gpu, pid) in contexts {
                known.correlator.uses(gpu, pid);
            }
            known.correlator.gpus().map(|(index, _)| index).collect()
        };
        self.shared.questions.ask_about(gpus);
        self.note_losses();
    }

    /// Follows a process from now on.
    fn meet(&mut self, pid: u32, budget: f64) {
        let Some(since) = started(pid) else {
            return;
        };
        let mut known = lock(&self.shared.known);
        // A process is met once; another one of the same number is not told apart from it and left out.
        if known.correlator.knows(pid) || known.processes.len() >= MAX_CHOSEN as usize {
            known.left_out.insert(pid);
            return;
        }
        let now = monotonic_ns();
        let mut sampling = Sampling::new(budget, Loan::SHORT);
        sampling.came(now, Spent::default());
        let next = Duration::from_nanos(sampling.next_ns());
        known.correlator.meet(pid, now);
        known.processes.push(Seen {
            pid,
            started: Some(since),
            comm: doctor::comm(pid),
            ended: false,
            budget,
            sampling,
        });
        drop(known);
        let admitted = self.kernel.admit(pid);
        if let Err(error) = admitted.and_then(|()| self.kernel.choose(pid)) {
            warn!(pid, %error, "is not followed");
        }
        self.chosen.insert(pid, Instant::now() + next);
        lock(&self.shared.known).look_up.push((pid, false));
    }

    /// Sees to it that processes are followed no more than they have time for.
    fn look_at_costs(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> = self
            .chosen
            .iter()
            .filter(|(_, due)| **due <= now)
            .map(|(pid, _)| *pid)
            .collect();
        for pid in due {
            let next = self.look_at_cost(pid).unwrap_or(SELDOM_NS);
            self.chosen
                .insert(pid, Instant::now() + Duration::from_nanos(next));
        }
    }

    /// Looks at what following a process has cost it; returns when to look again, nanoseconds from now.
    fn look_at_cost(&mut self, pid: u32) -> Option<u64> {
        let spent = |kernel: &IdleKernel| {
            kernel.spent(pid).map(|hits| Spent {
                hits,
                ..Spent::default()
            })
        };
        let mut before = spent(&self.kernel).ok()?;
        let order = lock(&self.shared.known)
            .seen(pid)?
            .sampling
            .look(monotonic_ns(), before);
        let changed = match order {
            Order::Stay => Ok(()),
            Order::Out => self.kernel.pause(pid),
            Order::In => self.kernel.choose(pid),
        };
        if let Err(error) = changed {
            warn!(pid, %error, "is followed as it was");
        }
        // What threads do is looked up once nothing of what they do next is missed. These are files of the kernel's.
        let found = (order == Order::In).then(|| found_threads(pid));
        if order == Order::Out {
            before = spent(&self.kernel).unwrap_or(before);
        }
        let now = monotonic_ns();
        let mut known = lock(&self.shared.known);
        let sampling = &mut known.seen(pid)?.sampling;
        match order {
            Order::Stay => {}
            Order::Out => sampling.left(now, before),
            Order::In => sampling.came(now, before),
        }
        let next = sampling.next_ns();
        if order != Order::Stay {
            known.turns.push_back(Turn {
                pid,
                at_ns: now,
                found,
            });
        }
        Some(next)
    }

    fn note_losses(&self) {
        let Ok(losses) = self.kernel.losses() else {
            return;
        };
        let mut known = lock(&self.shared.known);
        if losses[counter::LOST as usize] > known.losses[counter::LOST as usize] {
            let all: Vec<(u32, bool)> = self.chosen.keys().map(|pid| (*pid, true)).collect();
            known.look_up = all;
        }
        known.losses = losses;
    }
}

/// A stack as it was met: process, how often its mappings had changed, thread, state, addresses.
type WalkKey = (u32, u64, u32, State, Vec<u64>);

/// Follows the moments.
struct Reader {
    ring: RingBuf<MapData>,
    watched: Weak<dyn Watched>,
    shared: Arc<Shared>,
    spaces: HashMap<u32, AddressSpace>,
    binaries: Binaries,
    walks: HashMap<WalkKey, u32>,
    stacks: HashMap<(u32, Arc<StackInfo>), u32>,
    names: HashMap<u32, String>,
    frozen_to: u64,
}

/// What the correlator is told.
enum News {
    Change(Option<State>, Option<Sampled>),
    Sample(u32),
}

impl Reader {
    fn run(mut self) {
        work_in_the_background();
        let period = 1_000_000_000 / u64::from(TICKS);
        loop {
            let detached = self.shared.detached_ns.load(Ordering::Acquire);
            // What is told before this moment is in the ring by now, or comes within microseconds.
            let until = match detached {
                0 => monotonic_ns().saturating_sub(1_000_000),
                then => then,
            };
            self.look_up();
            let turns = std::mem::take(&mut lock(&self.shared.known).turns);
            let mut turns: VecDeque<Turn> =
                turns.into_iter().map(|turn| self.named(turn)).collect();
            let news = self.drain();
            // Whether there may be moments before the last turns that were not taken yet.
            let is_behind = news.len() >= MOST_MOMENTS;
            let frozen = self
                .watched
                .upgrade()
                .map(|watched| watched.frozen())
                .unwrap_or_default();
            let mut known = lock(&self.shared.known);
            for (moment, news) in news {
                while let Some(turn) = turns.pop_front_if(|turn| turn.at_ns <= moment.at_ns) {
                    known.turn(&turn);
                }
                let (pid, tid) = (moment.tgid, moment.tid);
                match news {
                    News::Change(state, stack) => {
                        known
                            .correlator
                            .change((pid, tid), moment.at_ns, state, stack);
                    }
                    News::Sample(stack) => {
                        known.correlator.sampled(pid, moment.at_ns, stack, period);
                    }
                }
            }
            if is_behind {
                for turn in turns.into_iter().rev() {
                    known.turns.push_front(turn);
                }
            } else {
                for turn in turns {
                    known.turn(&turn);
                }
            }
            for (gpu, pid) in frozen {
                known.correlator.frozen(gpu, pid, self.frozen_to, until);
            }
            self.frozen_to = until;
            known.correlator.advance(until);
            known.too_large.clone_from(&self.binaries.too_large);
            let is_known = known
                .correlator
                .known_ns()
                .is_none_or(|known| known >= until);
            drop(known);
            if detached > 0 {
                let late = Duration::from_nanos(monotonic_ns().saturating_sub(detached));
                let abandoned = self.shared.abandoned.load(Ordering::Relaxed);
                if is_known || abandoned || late >= AFTERMATH {
                    break;
                }
            }
            thread::sleep(READ);
        }
        self.shared.questions.stop();
        self.shared.over.store(true, Ordering::Release);
    }

    /// Looks up what threads do of which nothing was told yet.
    fn look_up(&mut self) {
        let due = std::mem::take(&mut lock(&self.shared.known).look_up);
        for (pid, doubtful) in due {
            let found: Vec<(u32, State)> = found_threads(pid)
                .into_iter()
                .map(|(tid, state)| (tid, self.whose(pid, state)))
                .collect();
            let mut known = lock(&self.shared.known);
            for (tid, state) in found {
                known.correlator.found((pid, tid), state, doubtful);
            }
        }
    }

    /// A turn, of whose threads it is known who holds them.
    fn named(&self, turn: Turn) -> Turn {
        let pid = turn.pid;
        let whose = |(tid, state)| (tid, self.whose(pid, state));
        Turn {
            found: turn
                .found
                .map(|found| found.into_iter().map(whose).collect()),
            ..turn
        }
    }

    /// Who stops a thread is known to the daemon.
    fn whose(&self, pid: u32, state: State) -> State {
        let is_ours = state == State::Halted
            && self
                .watched
                .upgrade()
                .is_some_and(|watched| watched.holds(pid));
        if is_ours { State::Held } else { state }
    }

    fn drain(&mut self) -> Vec<(Moment, News)> {
        let mut found = Vec::new();
        while found.len() < MOST_MOMENTS {
            let next = self
                .ring
                .next()
                .map(|item| split(&item).map(|(moment, stack)| (moment, stack.to_vec())));
            match next {
                Some(Some((moment, stack))) => {
                    let news = self.take(&moment, &stack);
                    found.push((moment, news));
                }
                // Not of ours.
                Some(None) => {}
                None => break,
            }
        }
        found
    }

    fn take(&mut self, moment: &Moment, stack: &[u8]) -> News {
        if moment.what == what::SAMPLE {
            return News::Sample(self.stack(moment, State::Running, stack));
        }
        if moment.what == what::ENDED {
            self.names.remove(&moment.tid);
        }
        let state =
            State::of(moment.what, moment.syscall).map(|state| self.whose(moment.tgid, state));
        let sampled = match state {
            Some(state) if moment.stands_for > 0 => {
                let stands_for = u32::try_from(moment.stands_for).unwrap_or(u32::MAX);
                Some((self.stack(moment, state, stack), f64::from(stands_for)))
            }
            _ => None,
        };
        News::Change(state, sampled)
    }

    /// The number of a stack.
    fn stack(&mut self, moment: &Moment, state: State, bytes: &[u8]) -> u32 {
        let pid = moment.tgid;
        let space = self
            .spaces
            .entry(pid)
            .or_insert_with(|| AddressSpace::new(pid));
        let place = Place {
            pc: moment.pc,
            sp: moment.sp,
            fp: moment.fp,
            is_return: false,
        };
        let walked = space.walk(&mut self.binaries, place, bytes);
        let key = (pid, space.changes(), moment.tid, state, walked.addresses);
        if let Some(number) = self.walks.get(&key) {
            return *number;
        }
        let frames = key
            .4
            .iter()
            .map(|address| space.frame(&mut self.binaries, *address))
            .collect();
        let info = StackInfo {
            thread: self.name(pid, moment.tid),
            state,
            frames,
            cut: walked.cut,
        };
        let number = self.number(pid, info);
        if self.walks.len() >= MOST_WALKS {
            self.walks.clear();
        }
        self.walks.insert(key, number);
        number
    }

    /// The number of a stack among those that are told apart.
    fn number(&mut self, pid: u32, info: StackInfo) -> u32 {
        let key = (pid, Arc::new(info));
        if let Some(number) = self.stacks.get(&key) {
            return *number;
        }
        let number = lock(&self.shared.known).number(Arc::clone(&key.1));
        if number != OTHERS {
            self.stacks.insert(key, number);
        }
        number
    }

    fn name(&mut self, pid: u32, tid: u32) -> String {
        if self.names.len() >= MOST_NAMES {
            self.names.clear();
        }
        self.names
            .entry(tid)
            .or_insert_with(|| {
                fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"))
                    .map_or_else(|_| tid.to_string(), |name| name.trim_end().to_owned())
            })
            .clone()
    }
}

/// The current thread takes no processor from a thread that runs there: walking stacks is not urgent.
fn work_in_the_background() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads a structure of ours, which lives until the call returns.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
    if result != 0 {
        let error = io::Error::last_os_error();
        debug!(%error, "stacks are walked as what runs in the foreground");
    }
}

/// What the threads of a process do now.
fn found_threads(pid: u32) -> Vec<(u32, State)> {
    threads(pid)
        .into_iter()
        .filter_map(|(tid, letter, syscall)| Some((tid, state::of_proc(letter, syscall)?)))
        .collect()
}

/// The threads of a process: number, letter of the state, number of the system call.
fn threads(pid: u32) -> Vec<(u32, char, Option<u32>)> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let tid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let letter = crate::launch::process::state(tid)?;
            let call = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall"))
                .ok()
                .and_then(|text| text.split_whitespace().next()?.parse().ok());
            Some((tid, letter, call))
        })
        .collect()
}

/// A moment and the stack behind it, from an item of the ring.
fn split(item: &[u8]) -> Option<(Moment, &[u8])> {
    let (moment, stack) = item.split_at_checked(size_of::<Moment>())?;
    // SAFETY: as many bytes as the structure has, all of them integers; it need not be aligned.
    let moment = unsafe { moment.as_ptr().cast::<Moment>().read_unaligned() };
    let length = usize::try_from(moment.stack_len).ok()?.min(stack.len());
    Some((moment, &stack[..length]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(name: String) -> Arc<StackInfo> {
        Arc::new(StackInfo {
            thread: "main".to_owned(),
            state: State::Io,
            frames: vec![Frame {
                function: Some(name),
                file: String::new(),
                address: 0,
            }],
            cut: false,
        })
    }

    #[test]
    fn stacks_and_their_names_are_bounded() {
        let mut known = Known::new(None);
        assert_eq!(known.number(stack("a".to_owned())), 1);
        // What is too long is not told apart, and what is short still is.
        assert_eq!(known.number(stack("x".repeat(MOST_NAME_BYTES))), OTHERS);
        assert_eq!(known.number(stack("b".to_owned())), 2);
        for number in 0..2 * MOST_STACKS {
            known.number(stack(number.to_string()));
        }
        assert_eq!(known.stacks.len(), MOST_STACKS);
        assert!(known.name_bytes <= MOST_NAME_BYTES);
    }

    #[test]
    fn what_the_ring_has_is_taken_apart() {
        assert_eq!(split(&[0; 63]), None);
        let mut item = vec![0; size_of::<Moment>() + 1024];
        item[8] = 7;
        // The length of the stack: more than there is.
        item[56..64].copy_from_slice(&u64::MAX.to_le_bytes());
        let (moment, stack) = split(&item).expect("long enough");
        assert_eq!((moment.tgid, stack.len()), (7, 1024));
    }

    #[test]
    fn threads_of_this_process_are_seen() {
        let found = threads(std::process::id());
        assert!(
            found.iter().any(|(_, letter, _)| *letter == 'R'),
            "{found:?}"
        );
    }
}
