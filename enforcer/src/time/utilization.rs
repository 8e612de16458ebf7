//! Asking NVML how much each process uses a GPU.
//!
//! On a thread of its own with a library handle of its own: NVML may block, and nobody waits for it. Only GPUs that
//! tenants use are asked about.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nvml_wrapper::{Nvml, error::NvmlError};
use tracing::{debug, warn};

use crate::telemetry::EnergyReadings;

use super::{
    account::{Answers, Busy, Sample},
    energy::Reading,
    levers::wall_us,
};

/// For so long after somebody was at work, GPUs are asked about as often as while somebody is.
const AWAKE: Duration = Duration::from_secs(3);
/// Time between two questions while nobody is at work. Shorter than what counts as a gap in the answers (`gpu::LONGEST_GAP`).
const SLEEPY: Duration = Duration::from_millis(500);
/// A GPU is divided while nobody uses it, or not at all.
const MIG_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a library that failed is opened again.
const REOPEN: Duration = Duration::from_secs(5);

/// The energy counter is read this often, and GPU time divides what was used meanwhile.
const ENERGY_EVERY: Duration = Duration::from_secs(2);

/// What a question and a reading of the energy counter take at most, or nearly.
const ROOM: Duration = Duration::from_millis(10);
/// What freezing or thawing takes.
const ACTION: Duration = Duration::from_millis(2);

/// What was learned.
#[derive(Clone, Debug)]
pub enum Utilization {
    /// The use of a GPU is known up to `known_us`, microseconds since 1970.
    Used {
        /// Which GPU.
        gpu: u32,
        /// Up to when.
        known_us: u64,
        /// What was used since the last answer.
        busy: Vec<Busy>,
        /// What the board has used since the driver was loaded, millijoules; absent where the board does not count it, and most
        /// times: see [`EnergyReadings`].
        energy: Option<Reading>,
        /// Part of the last moments in which the board ran anything, 0 to 1; absent where the board does not tell.
        board: Option<f64>,
    },
    /// NVML does not tell the use by process on this GPU.
    Unknown {
        /// Which GPU.
        gpu: u32,
        /// Why.
        why: String,
    },
    /// The GPU is divided into instances (MIG): what a process uses of which is not told.
    Divided {
        /// Which GPU.
        gpu: u32,
        /// Whether it is now.
        divided: bool,
    },
}

/// What the thread is to know.
#[derive(Debug, Default)]
struct Order {
    gpus: BTreeSet<u32>,
    /// Somebody is about to work: ask as often as if somebody did.
    stirred: bool,
    stop: bool,
}

/// What the thread is asked to do.
#[derive(Default)]
pub struct Questions {
    order: Mutex<Order>,
    /// When something is to be frozen or thawed next; see [`Questions::keep_clear_of`].
    next: Mutex<Option<Instant>>,
    told: Condvar,
}

impl Questions {
    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// GPUs to ask about.
    pub fn ask_about(&self, gpus: BTreeSet<u32>) {
        self.lock().gpus = gpus;
        self.told.notify_all();
    }

    /// Somebody has a new context, or has launched something.
    pub fn stir(&self) {
        self.lock().stirred = true;
        self.told.notify_all();
    }

    /// Says when the driver will be needed next. A question holds its lock for 2 ms, the energy counter for 8 (measured on an
    /// H200), and who freezes waits for that.
    pub fn keep_clear_of(&self, next: Option<Instant>) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }

    /// Waits until there is time for a question, but not long.
    fn wait_for_room(&self) {
        for _ in 0..2 {
            let next = *self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let until = next.and_then(|next| next.checked_duration_since(Instant::now()));
            match until {
                Some(until) if until < ROOM => thread::sleep(until + ACTION),
                _ => return,
            }
        }
    }

    /// Ends the thread after the question in progress.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.told.notify_all();
    }

    fn stopped(&self) -> bool {
        self.lock().stop
    }

    fn gpus(&self) -> BTreeSet<u32> {
        self.lock().gpus.clone()
    }

    /// Pauses for a time, with nothing to ask about until there is something. A pause for an idle GPU (`sleepy`) ends when
    /// somebody stirs. Whether somebody did.
    fn pause(&self, length: Duration, sleepy: bool) -> bool {
        let end = Instant::now() + length;
        let mut order = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if order.stop || (sleepy && order.stirred) || (left.is_zero() && !order.gpus.is_empty())
            {
                return std::mem::take(&mut order.stirred);
            }
            order = if order.gpus.is_empty() {
                self.told
                    .wait(order)
                    .unwrap_or_else(PoisonError::into_inner)
            } else {
                self.told
                    .wait_timeout(order, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            };
        }
    }
}

/// How often to ask: pure.
#[derive(Debug)]
struct Pace {
    usual: Duration,
    /// Until when somebody counts as at work.
    awake_until: Instant,
}

impl Pace {
    fn new(usual: Duration, now: Instant) -> Self {
        Self {
            usual,
            awake_until: now + AWAKE,
        }
    }

    /// Somebody works, or is about to.
    fn wake(&mut self, now: Instant) {
        self.awake_until = now + AWAKE;
    }

    fn is_sleepy(&self, now: Instant) -> bool {
        now >= self.awake_until
    }

    fn interval(&self, now: Instant) -> Duration {
        if self.is_sleepy(now) {
            self.usual.max(SLEEPY)
        } else {
            self.usual
        }
    }
}

/// Starts the thread; it asks every `interval` and gives what it learns to `tell`, until that returns false. Without `energy` it
/// does not ask for that.
pub fn spawn(
    questions: Arc<Questions>,
    library: Option<PathBuf>,
    interval: Duration,
    energy: Option<Arc<EnergyReadings>>,
    mut tell: impl FnMut(Utilization) -> bool + Send + 'static,
) -> io::Result<()> {
    thread::Builder::new()
        .name("utilization".into())
        .spawn(move || {
            let name = library.unwrap_or_else(|| PathBuf::from("libnvidia-ml.so.1"));
            while !questions.stopped() {
                match open(name.as_os_str()) {
                    Ok(nvml) => {
                        if !ask(&nvml, &questions, interval, energy.as_deref(), &mut tell) {
                            return;
                        }
                    }
                    Err(error) => warn!(%error, "GPU time by process is not known"),
                }
                thread::sleep(REOPEN);
            }
        })
        .map(drop)
}

fn open(name: &OsStr) -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(name).init()
}

/// Asks until the library fails (true) or nobody listens (false).
fn ask(
    nvml: &Nvml,
    questions: &Questions,
    interval: Duration,
    energy: Option<&EnergyReadings>,
    tell: &mut dyn FnMut(Utilization) -> bool,
) -> bool {
    let mut answers: BTreeMap<u32, Answers> = BTreeMap::new();
    let mut divided: BTreeMap<u32, (bool, Instant)> = BTreeMap::new();
    let mut pace = Pace::new(interval, Instant::now());
    let mut read = BTreeMap::new();
    while !questions.stopped() {
        let gpus = questions.gpus();
        if gpus.iter().any(|gpu| !answers.contains_key(gpu)) {
            pace.wake(Instant::now());
        }
        answers.retain(|gpu, _| gpus.contains(gpu));
        divided.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            let Ok(device) = nvml.device_by_index(gpu) else {
                return true;
            };
            let known = divided.get(&gpu).copied();
            let now_divided = match known {
                Some((is_divided, at)) if at.elapsed() < MIG_INTERVAL => is_divided,
                // Not told (on a card that cannot be divided) means that it is not.
                _ => {
                    let is_divided = device.mig_mode().is_ok_and(|mode| mode.current != 0);
                    divided.insert(gpu, (is_divided, Instant::now()));
                    is_divided
                }
            };
            if known.map(|(before, _)| before) != Some(now_divided)
                && !tell(Utilization::Divided {
                    gpu,
                    divided: now_divided,
                })
            {
                return false;
            }
            if now_divided {
                continue;
            }
            questions.wait_for_room();
            let asked = wall_us();
            let follow = answers.entry(gpu).or_insert_with(|| Answers::new(asked));
            let samples = match device.process_utilization_stats(follow.since()) {
                Ok(samples) => samples,
                Err(NvmlError::NotFound) => Vec::new(),
                // More processes than a moment before.
                Err(NvmlError::InsufficientSize(_)) => continue,
                Err(
                    error @ (NvmlError::NotSupported
                    | NvmlError::FailedToLoadSymbol(_)
                    | NvmlError::NoPermission),
                ) => {
                    let why = error.to_string();
                    if !tell(Utilization::Unknown { gpu, why }) {
                        return false;
                    }
                    continue;
                }
                Err(error) => {
                    debug!(%error, gpu, "NVML");
                    return true;
                }
            };
            let samples: Vec<Sample> = samples
                .into_iter()
                .map(|sample| Sample {
                    tgid: sample.pid,
                    at_us: sample.timestamp,
                    percent: sample.sm_util,
                })
                .collect();
            let busy = follow.take(asked, &samples);
            let known_us = follow.since();
            let energy = energy.and_then(|energy| {
                let counter_mj = energy.fresh(gpu, ENERGY_EVERY, &mut read, || {
                    device.total_energy_consumption().ok()
                })?;
                Some(Reading {
                    at_us: wall_us(),
                    counter_mj,
                })
            });
            let board = device
                .utilization_rates()
                .ok()
                .map(|rates| f64::from(rates.gpu) / 100.0);
            if busy.iter().any(|busy| busy.busy_us > 0) || board.is_some_and(|part| part > 0.0) {
                pace.wake(Instant::now());
            }
            if !tell(Utilization::Used {
                gpu,
                known_us,
                busy,
                energy,
                board,
            }) {
                return false;
            }
        }
        let now = Instant::now();
        if questions.pause(pace.interval(now), pace.is_sleepy(now)) {
            pace.wake(Instant::now());
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_rare_while_nobody_works_but_no_gap() {
        let begin = Instant::now();
        let usual = Duration::from_millis(100);
        let mut pace = Pace::new(usual, begin);
        assert_eq!(pace.interval(begin), usual);
        let later = begin + AWAKE;
        assert_eq!(pace.interval(later), SLEEPY);
        assert!(SLEEPY < crate::time::gpu::LONGEST_GAP);
        pace.wake(later);
        assert_eq!(pace.interval(later), usual);
        let slow = Pace::new(Duration::from_secs(1), begin);
        assert_eq!(slow.interval(later), Duration::from_secs(1));
    }

    #[test]
    fn a_pause_ends_when_there_is_something_to_ask() {
        let questions = Arc::new(Questions::default());
        let waiting = Arc::clone(&questions);
        let paused = thread::spawn(move || waiting.pause(Duration::ZERO, false));
        questions.ask_about(BTreeSet::from([0]));
        assert!(!paused.join().expect("no panic"), "nobody has stirred");
        let waiting = Arc::clone(&questions);
        let paused = thread::spawn(move || waiting.pause(Duration::from_hours(1), true));
        questions.stir();
        assert!(paused.join().expect("no panic"));
        questions.ask_about(BTreeSet::new());
        let waiting = Arc::clone(&questions);
        let paused = thread::spawn(move || waiting.pause(Duration::from_hours(1), false));
        questions.stop();
        paused.join().expect("no panic");
        assert!(questions.stopped());
    }
}
