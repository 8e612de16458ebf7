//! The model under its lock, and the thread that does what is due later.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::kernel_log::KernelLog;
use super::trace::Trace;
use crate::sim::Sim;

/// Something to do at a time.
type Task = Box<dyn FnOnce(&Core) + Send>;

/// A caller that waits for a kernel.
pub struct Waiter {
    /// Client handle.
    pub client: u32,
    /// Channel handle.
    pub channel: u32,
    /// Kernel number.
    pub number: u64,
    /// When it is answered in any case, nanoseconds.
    pub deadline: u64,
    /// Answers it with the kernels finished, the channel's fault and the time of the mark.
    pub answer: Box<dyn FnOnce(u64, u32, u64) + Send>,
}

/// What the lock protects.
pub struct Shared {
    /// The model.
    pub sim: Sim,
    /// Extra time per escape number, and for all others.
    pub delays: BTreeMap<u8, Duration>,
    /// Extra time of escapes without their own.
    pub delay_all: Duration,
    /// What the driver would write.
    pub kernel_log: Option<KernelLog>,
    tasks: BTreeMap<(u64, u64), Task>,
    task_count: u64,
    waiters: Vec<Waiter>,
}

impl Shared {
    /// Extra time of an escape.
    pub fn delay(&self, number: u8) -> Duration {
        self.delays.get(&number).copied().unwrap_or(self.delay_all)
    }

    /// Raises an Xid, and says so as the driver does.
    pub fn raise_xid(&mut self, gpu: usize, code: u32, pid: Option<u32>) {
        let at = Duration::from_nanos(self.sim.raise_xid(gpu, code, pid));
        if let Some(log) = &mut self.kernel_log {
            log.xid(at, crate::sim::pci_bus(gpu), code, pid);
        }
    }

    fn answer_waiters(&mut self, now: u64) {
        let mut index = 0;
        while index < self.waiters.len() {
            let waiter = &self.waiters[index];
            let progress = self.sim.progress(waiter.client, waiter.channel);
            let (completed, fault) = match progress {
                Some(progress) => (progress.completed, progress.fault.unwrap_or(0)),
                // The channel is gone, and with it whatever it was to do.
                None => (waiter.number, 0),
            };
            if completed >= waiter.number || now >= waiter.deadline {
                let waiter = self.waiters.swap_remove(index);
                let mark = self.sim.mark(waiter.client, waiter.channel, waiter.number);
                (waiter.answer)(completed, fault, mark.unwrap_or(0));
            } else {
                index += 1;
            }
        }
    }

    fn next_due(&self) -> Option<u64> {
        let task = self.tasks.keys().next().map(|(at, _)| *at);
        let waiter = self
            .waiters
            .iter()
            .map(|waiter| {
                self.sim
                    .next_event(waiter.client, waiter.channel, waiter.number)
                    .map_or(waiter.deadline, |at| at.min(waiter.deadline))
            })
            .min();
        match (task, waiter) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// The model and its clock.
pub struct Core {
    start: Instant,
    shared: Mutex<Shared>,
    wake: Condvar,
    /// Where calls are written.
    pub trace: Option<Trace>,
}

impl Core {
    /// Starts the clock.
    pub fn new(sim: Sim, trace: Option<Trace>) -> Self {
        Self {
            trace,
            start: Instant::now(),
            shared: Mutex::new(Shared {
                sim,
                delays: BTreeMap::new(),
                delay_all: Duration::ZERO,
                kernel_log: None,
                tasks: BTreeMap::new(),
                task_count: 0,
                waiters: Vec::new(),
            }),
            wake: Condvar::new(),
        }
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The model, run to the present.
    pub fn lock(&self) -> MutexGuard<'_, Shared> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        shared.sim.advance(now);
        shared
    }

    /// Works on the model and then wakes whoever waits for what changed.
    pub fn with<T>(&self, work: impl FnOnce(&mut Shared) -> T) -> T {
        let mut shared = self.lock();
        let result = work(&mut shared);
        if !shared.waiters.is_empty() {
            self.wake.notify_one();
        }
        result
    }

    /// Does `task` after `delay`.
    pub fn later(&self, delay: Duration, task: impl FnOnce(&Self) + Send + 'static) {
        let mut shared = self.lock();
        shared.task_count += 1;
        let at = self.now() + u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX / 2);
        let key = (at, shared.task_count);
        shared.tasks.insert(key, Box::new(task));
        self.wake.notify_one();
    }

    /// Answers `waiter` when its kernel is done or its time is up.
    pub fn wait(&self, waiter: Waiter) {
        let mut shared = self.lock();
        shared.waiters.push(waiter);
        let now = self.now();
        shared.answer_waiters(now);
        self.wake.notify_one();
    }

    /// Does what is due, for ever.
    pub fn run(&self) {
        let mut shared = self.lock();
        loop {
            let now = self.now();
            shared.sim.advance(now);
            shared.answer_waiters(now);
            if let Some(entry) = shared.tasks.first_entry()
                && entry.key().0 <= now
            {
                let task = entry.remove();
                drop(shared);
                task(self);
                shared = self.lock();
                continue;
            }
            shared = match shared.next_due() {
                None => self
                    .wake
                    .wait(shared)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    // A microsecond at least: a wake-up just before the moment would find nothing to do.
                    let pause = Duration::from_nanos(at.saturating_sub(now).max(1000));
                    self.wake
                        .wait_timeout(shared, pause)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}
