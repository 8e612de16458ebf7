//! The thread that continues what was stopped, on time.
//!
//! It does nothing else, waits for no lock that others hold for long, and runs before ordinary threads where the
//! system allows that: a process that is continued late launches less than it may.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::launch::{HEARTBEAT_STALE_NS, Notice, Settings, notice};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tracing::{debug, error, warn};

use super::{attach::Message, freezer::Freezer, process::Process, stopper::Continuation};
use crate::{enforcer::monotonic_ns, kernel::Kernel};

/// How often the thread shows that it lives.
const HEARTBEAT_NS: u64 = 50_000_000;
/// Waits are cut to whole milliseconds; with one more they end after what is waited for, not shortly before.
const ROUNDED: Duration = Duration::from_millis(1);
/// A moment so near is waited for awake: going to sleep and waking takes as long.
const NEAR_NS: u64 = 30_000;
/// Priority among real-time threads: low, but above every ordinary one. The unit's `LimitRTPRIO` allows just that.
const PRIORITY: i32 = 5;

/// Orders to the thread.
pub enum Order {
    /// A process got a slot.
    Watch {
        /// Its slot.
        slot: u32,
        /// The process.
        process: Arc<Process>,
    },
    /// A process left its slot; it is continued if it is stopped.
    Forget {
        /// Its slot.
        slot: u32,
        /// Answered when it is done.
        done: mpsc::SyncSender<()>,
    },
    /// End a process for good at a time (`CLOCK_MONOTONIC` nanoseconds).
    Kill {
        /// Its slot.
        slot: u32,
        /// When.
        at_ns: u64,
    },
    /// Another guard.
    Helper(u32),
    /// Continue everybody and end.
    Stop,
}

/// The running thread.
pub struct Pacer {
    orders: mpsc::Sender<Order>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Pacer {
    /// Starts the thread. `word` is what the programs are told, but for the heartbeat; notices of others than stops are
    /// passed on to `told`.
    pub fn start(
        kernel: Arc<Kernel>,
        ring: RingBuf<MapData>,
        word: Settings,
        freezer: Freezer,
        told: mpsc::Sender<Message>,
    ) -> io::Result<Self> {
        let wake = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
        )?);
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        let (orders, received) = mpsc::channel();
        let mut state = State {
            kernel,
            ring,
            timer,
            wake: Arc::clone(&wake),
            orders: received,
            told,
            word,
            next_beat_ns: 0,
            slots: BTreeMap::new(),
            due: BTreeSet::new(),
            kills: BTreeSet::new(),
            freezer,
        };
        let thread = thread::Builder::new()
            .name("launch-pacer".into())
            .spawn(move || {
                let _guard = AbortOnPanic;
                go_before_others();
                state.run();
            })?;
        Ok(Self {
            orders,
            wake,
            thread: Some(thread),
        })
    }

    /// Gives an order.
    pub fn order(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            // Only a counter at its maximum refuses, and then the thread is awake anyway.
            let _ = self.wake.write(1);
        }
    }

    /// Takes a process off its slot and waits until it is not stopped by us any more.
    pub fn forget(&self, slot: u32) {
        let (done, answer) = mpsc::sync_channel(1);
        self.order(Order::Forget { slot, done });
        // A thread that is gone has continued everybody.
        let _ = answer.recv_timeout(Duration::from_secs(1));
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.order(Order::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the pacer panicked");
        }
    }
}

/// A pacer that panics must not leave a daemon behind that does not continue anybody: the guard does it then.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// Real-time priority, else the best that there is.
fn go_before_others() {
    let priority = libc::sched_param {
        sched_priority: PRIORITY,
    };
    // SAFETY: the structure lives through the call; 0 is the calling thread.
    let refused = unsafe {
        libc::sched_setscheduler(
            0,
            libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
            &raw const priority,
        )
    } != 0;
    if refused {
        let why = io::Error::last_os_error();
        // SAFETY: no memory is involved; 0 is the calling thread.
        let nice = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
        warn!(%why, nice = nice == 0, "no real-time priority: launches are paced less evenly under load");
    }
}

struct Watched {
    process: Arc<Process>,
    /// When it is to be continued, if it is stopped.
    due_ns: Option<u64>,
    /// Stops whose notices have come and that were not yet seen to.
    notices: u64,
}

struct State {
    kernel: Arc<Kernel>,
    ring: RingBuf<MapData>,
    timer: OwnedFd,
    wake: Arc<EventFd>,
    orders: mpsc::Receiver<Order>,
    told: mpsc::Sender<Message>,
    word: Settings,
    next_beat_ns: u64,
    slots: BTreeMap<u32, Watched>,
    /// Moments and slots.
    due: BTreeSet<(u64, u32)>,
    kills: BTreeSet<(u64, u32)>,
    freezer: Freezer,
}

impl State {
    fn run(&mut self) {
        loop {
            self.beat();
            if !self.take_orders() {
                break;
            }
            self.take_notices();
            self.serve_due();
            self.serve_kills();
            self.freezer.serve_due(monotonic_ns());
            self.wait();
        }
        self.word.heartbeat_ns = 0;
        self.say_word();
        for slot in self.slots.keys().copied().collect::<Vec<_>>() {
            self.release(slot);
        }
        self.freezer.thaw_all();
    }

    fn beat(&mut self) {
        let now = monotonic_ns();
        if now >= self.next_beat_ns {
            self.word.heartbeat_ns = now;
            // With nobody to stop, less often: still twice before it is held to be dead.
            let apart = if self.slots.is_empty() {
                HEARTBEAT_STALE_NS / 2
            } else {
                HEARTBEAT_NS
            };
            self.next_beat_ns = now + apart;
            self.say_word();
        }
    }

    /// All of it each time: a guard of an earlier daemon may have had its last word in between.
    fn say_word(&self) {
        let word = self.word;
        if let Err(error) = self
            .kernel
            .launch()
            .record
            .update_settings(|said| *said = word)
        {
            error!(%error, "no heartbeat of the pacer: launches are not delayed");
        }
    }

    /// False once there is nothing more to do.
    fn take_orders(&mut self) -> bool {
        loop {
            match self.orders.try_recv() {
                Ok(Order::Watch { slot, process }) => {
                    let watched = Watched {
                        process,
                        due_ns: None,
                        notices: 0,
                    };
                    self.slots.insert(slot, watched);
                }
                Ok(Order::Forget { slot, done }) => {
                    self.release(slot);
                    self.slots.remove(&slot);
                    self.kills.retain(|(_, at)| *at != slot);
                    // Whoever asked may have given up.
                    let _ = done.try_send(());
                }
                Ok(Order::Kill { slot, at_ns }) => {
                    self.kills.insert((at_ns, slot));
                }
                Ok(Order::Helper(pid)) => {
                    self.word.helper_tgid = pid;
                    self.say_word();
                }
                Err(mpsc::TryRecvError::Empty) => return true,
                Ok(Order::Stop) | Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take_notices(&mut self) {
        let mut fresh = Vec::new();
        while let Some(item) = self.ring.next() {
            if let Some(told) = read_notice(&item) {
                fresh.push(told);
            } else {
                error!(length = item.len(), "a launch notice of another layout");
            }
        }
        for told in fresh {
            match told.kind {
                notice::STOPPED => self.stopped(&told),
                notice::FREEZE => self.freezer.freeze(told.limited_by, told.until_ns),
                // Whoever listens does not care any more once it has ended.
                _ => drop(self.told.send(Message::Told(told))),
            }
        }
    }

    fn stopped(&mut self, told: &Notice) {
        let Some(watched) = self.slots.get_mut(&told.slot) else {
            // Its slot was taken away while it was stopped.
            if let Ok(process) = Process::open(told.tgid) {
                let _ = process.go_on(
                    &self.kernel.launch().record,
                    told.slot,
                    Continuation::default(),
                );
            }
            return;
        };
        watched.notices += 1;
        let due = watched
            .due_ns
            .map_or(told.until_ns, |due| due.max(told.until_ns));
        if let Some(before) = watched.due_ns.replace(due) {
            self.due.remove(&(before, told.slot));
        }
        self.due.insert((due, told.slot));
    }

    fn serve_due(&mut self) {
        while let Some(&(due, slot)) = self.due.first() {
            if due > monotonic_ns() {
                break;
            }
            self.due.pop_first();
            self.go_on(slot);
        }
    }

    /// Has a process run again whose time is over.
    fn go_on(&mut self, slot: u32) {
        let Some(watched) = self.slots.get_mut(&slot) else {
            return;
        };
        watched.due_ns = None;
        let seen_to = std::mem::take(&mut watched.notices);
        let record = &self.kernel.launch().record;
        let outcome = watched
            .process
            .go_on(record, slot, Continuation::default())
            .and_then(|_| {
                let continued = record.continued(slot)?;
                Ok(record.set_continued(slot, continued + seen_to)?)
            });
        if let Err(error) = outcome {
            error!(slot, %error, "could not be continued; trying again");
            watched.notices += seen_to;
            let again = monotonic_ns() + HEARTBEAT_NS;
            watched.due_ns = Some(again);
            self.due.insert((again, slot));
        }
    }

    /// Has a process run again at once, if it is stopped.
    fn release(&mut self, slot: u32) {
        let Some(watched) = self.slots.get(&slot) else {
            return;
        };
        if let Some(due) = watched.due_ns {
            self.due.remove(&(due, slot));
            self.go_on(slot);
        }
        let record = &self.kernel.launch().record;
        // A stop whose notice is still on its way.
        if let (Ok(calls), Ok(continued), Some(watched)) = (
            record.calls(slot),
            record.continued(slot),
            self.slots.get(&slot),
        ) && calls.stops != continued
            && watched
                .process
                .go_on(record, slot, Continuation::default())
                .is_ok()
        {
            // Nothing to be done about a map that cannot be written.
            let _ = record.set_continued(slot, calls.stops);
        }
    }

    fn serve_kills(&mut self) {
        while let Some(&(at, slot)) = self.kills.first() {
            if at > monotonic_ns() {
                break;
            }
            self.kills.pop_first();
            if let Some(watched) = self.slots.get(&slot)
                && let Err(error) = watched.process.signal(libc::SIGKILL)
            {
                error!(slot, %error, "could not be killed");
            }
        }
    }

    fn wait(&mut self) {
        let next = [
            self.due.first().map(|(at, _)| *at),
            self.kills.first().map(|(at, _)| *at),
            self.freezer.next_due(),
        ]
        .into_iter()
        .flatten()
        .min();
        let now = monotonic_ns();
        if let Some(at) = next {
            if at <= now + NEAR_NS {
                return;
            }
            if let Err(error) = self.set_alarm(at) {
                debug!(%error, "no timer; looking again at once");
                return;
            }
        } else {
            // An old alarm that cannot be put off only means an early look.
            let _ = self.set_alarm(0);
        }
        // SAFETY: the ring owns the descriptor and lives as long as this call.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        let mut fds = [
            PollFd::new(ring, PollFlags::POLLIN),
            PollFd::new(self.timer.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        // Orders and notices wake it; else there is only the next sign of life to give.
        let patience = Duration::from_nanos(self.next_beat_ns.saturating_sub(monotonic_ns()));
        let patience = PollTimeout::try_from(patience + ROUNDED).unwrap_or(PollTimeout::ZERO);
        // An interrupted wait only means an early look.
        let _ = poll(&mut fds, patience);
        // Empty is fine for both.
        let _ = self.wake.read();
    }
}

impl State {
    /// Sets the alarm to a moment, or with 0 off.
    fn set_alarm(&self, at_ns: u64) -> rustix::io::Result<()> {
        let alarm = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: (at_ns / 1_000_000_000).cast_signed(),
                tv_nsec: (at_ns % 1_000_000_000).cast_signed(),
            },
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &alarm).map(drop)
    }
}

fn read_notice(bytes: &[u8]) -> Option<Notice> {
    if bytes.len() != size_of::<Notice>() {
        return None;
    }
    // SAFETY: the length was checked, and every bit pattern is a notice.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_allows_the_priority() {
        let unit = include_str!("../../../systemd/gpuquotad.service");
        let limit = format!("LimitRTPRIO={PRIORITY}");
        assert!(unit.lines().any(|line| line == limit), "no {limit}");
    }
}
