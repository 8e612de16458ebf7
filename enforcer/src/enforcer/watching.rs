//! The threads behind an enforcer: events from the kernel, ends of processes, heartbeat and reconciliation.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::{
    event::{Event, kind},
    map::{
        NO_TENANT, ORPHAN_CLIENT, ObjectKey, RESERVATIONS, counter, kind as object_kind, of_place,
    },
    nvidia::uvm,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::{debug, error, warn};

use super::{Enforcer, EnforcerError, monotonic_ns, system};
use crate::{
    control::{Control as _, Notice},
    launch::attach,
    lifecycle::{self, Fate, Reaper, Roll},
    stir::CALM_PAUSE,
};

/// Time between two signs of life to the kernel side, which waits for two seconds.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// The same while no process uses a GPU.
const CALM_HEARTBEAT: Duration = Duration::from_millis(500);

/// For so long a cgroup may have no path after the kernel has told of it ...
const YOUNG: Duration = Duration::from_secs(1);
/// ... and meanwhile it is looked for this often.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// So many events are served before everything else has its turn again: a tenant that makes events without end keeps the daemon
/// neither from giving signs of life nor from sweeping.
const BATCH: usize = 4096;

/// A sweep is followed by a pause of at least so many times the CPU time that it took, [`CALM_PAUSE`] at most: with thousands of
/// processes that is a good part of a second.
const SWEEP_REST: u32 = 20;

/// The running threads.
pub struct Watch {
    enforcer: Arc<Enforcer>,
    events: Option<JoinHandle<()>>,
    launches: attach::Running,
}

impl Enforcer {
    /// Starts to serve events. The first sweep is done before this returns.
    pub fn watch(self: &Arc<Self>, ring: RingBuf<MapData>) -> Result<Watch, EnforcerError> {
        let reaper = {
            let enforcer = Arc::clone(self);
            Reaper::spawn(move |gone| enforcer.processes_gone(&gone))
                .map_err(system("starting the reaper thread"))?
        };
        // Before anything else: nobody stays frozen because an earlier daemon is gone.
        self.start_time()?;
        let launches = self.start_launches()?;
        self.offer_insight();
        self.offer_idle();
        self.offer_profiles();
        if self.known_driver {
            self.start_adopting()?;
        }
        self.start_faults()?;
        self.start_recording()?;
        // What happened while no daemon was there.
        for tgid in self.sweep() {
            reaper.watch(tgid);
        }
        let enforcer = Arc::clone(self);
        let events = thread::Builder::new()
            .name("events".into())
            .spawn(move || enforcer.serve_events(ring, &reaper))
            .map_err(system("starting the event thread"))?;
        Ok(Watch {
            enforcer: Arc::clone(self),
            events: Some(events),
            launches,
        })
    }

    /// Whether the event thread has gone round within this time. Returns when a question about a tenant has been answered.
    pub fn is_well(&self, patience: Duration) -> bool {
        let name = self.read().policy.tenants.keys().next().cloned();
        if let Some(name) = name {
            // Also that it has just left the policy is an answer.
            let _ = self.tenant(&name);
        }
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        self.kernel
            .settings()
            .is_ok_and(|settings| monotonic_ns().saturating_sub(settings.heartbeat_ns) < patience)
    }

    fn serve_events(self: &Arc<Self>, mut ring: RingBuf<MapData>, reaper: &Reaper) {
        let fd = ring.as_raw_fd();
        let reconcile = self.config.enforcement.reconcile_interval;
        let mut last_sweep = Instant::now();
        let mut rest = Duration::ZERO;
        let mut next_look = Instant::now();
        let mut young = Vec::new();
        let mut lost = self.lost_events();
        let mut claimed = self.claimed();
        while !self.stopping() {
            let beat = monotonic_ns();
            if let Err(error) = self
                .kernel
                .update_settings(|settings| settings.heartbeat_ns = beat)
            {
                error!(%error, "no heartbeat");
            }
            if Instant::now() >= next_look {
                self.observe_waits();
                next_look = Instant::now() + HEARTBEAT;
            }
            // SAFETY: `ring` owns the descriptor and lives as long as this loop.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            let mut fds = [PollFd::new(borrowed.as_fd(), PollFlags::POLLIN)];
            let patience = if !young.is_empty() {
                LOOK_AGAIN
            } else if self.stir.is_calm() {
                CALM_HEARTBEAT
            } else {
                HEARTBEAT
            };
            let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
            // An interrupted wait only means an early look.
            let _ = poll(&mut fds, patience);
            for _ in 0..BATCH {
                let Some(item) = ring.next() else { break };
                if let Some(event) = read_event(&item) {
                    self.handle(&event, reaper, &mut young);
                } else {
                    error!(length = item.len(), "an event of another layout");
                }
            }
            self.look_for_young(&mut young);
            let now_claimed = self.claimed();
            if now_claimed != claimed {
                claimed = now_claimed;
                self.stir.news();
            }
            let now_lost = self.lost_events();
            let since = last_sweep.elapsed();
            let is_due = now_lost != lost || since >= self.stir.interval(reconcile);
            if is_due && since >= rest {
                let begun = thread_cpu();
                if now_lost != lost {
                    warn!(
                        lost = now_lost - lost,
                        "events were lost; looking at everything again"
                    );
                    self.resync();
                }
                lost = now_lost;
                for tgid in self.sweep() {
                    reaper.watch(tgid);
                }
                last_sweep = Instant::now();
                rest = (thread_cpu().saturating_sub(begun) * SWEEP_REST).min(CALM_PAUSE);
            }
        }
    }

    fn lost_events(&self) -> u64 {
        self.kernel.counter(counter::EVENTS_LOST).unwrap_or(0)
    }

    /// What is claimed of each card, by whomever: every charge moves it.
    fn claimed(&self) -> Vec<u64> {
        self.host
            .gpus
            .iter()
            .map(|gpu| self.kernel.card(gpu.index).map_or(0, |card| card.claim))
            .collect()
    }

    /// The kernel may have passed over the news of a cgroup ([`Kernel::passed_over`]): the first call of a process in no tenant is
    /// the last moment to see it.
    ///
    /// [`Kernel::passed_over`]: crate::kernel::Kernel::passed_over
    fn govern_if_missed(&self, event: &Event) -> Result<(), EnforcerError> {
        if event.tenant != NO_TENANT {
            return Ok(());
        }
        match self.hierarchy.of_process(event.tgid) {
            Ok(path) => self.govern_now(&path),
            // Gone, or told of before it had its files.
            Err(_) => Ok(()),
        }
    }

    /// Looks again for cgroups that had no path when they were told of: the kernel tells of one a moment before it can be found.
    /// Those that are not found for a second are gone.
    fn look_for_young(&self, young: &mut Vec<(u64, Instant)>) {
        young.retain(|(id, told)| match self.cgroup_made(*id) {
            Ok(found) => !found && told.elapsed() < YOUNG,
            Err(error) => {
                error!(%error, cgroup = id, "a cgroup could not be governed");
                false
            }
        });
    }

    fn handle(self: &Arc<Self>, event: &Event, reaper: &Reaper, young: &mut Vec<(u64, Instant)>) {
        self.served.note(event.at_ns, monotonic_ns());
        if !matches!(event.kind, kind::CGROUP_MKDIR | kind::CGROUP_RMDIR) {
            self.stir.news();
        }
        self.time.event(event);
        let outcome = match event.kind {
            kind::PROCESS_NEW => {
                reaper.watch(event.tgid);
                self.seen(event.tgid);
                self.govern_if_missed(event)
            }
            kind::PROCESS_EXIT => {
                reaper.watch(event.tgid);
                Ok(())
            }
            kind::CHANNEL_NEW => {
                self.seen(event.tgid);
                self.expect_context(event)
            }
            kind::PROCESS_EXEC => {
                let of_process = self
                    .kernel
                    .clients()
                    .filter(|(_, client)| client.tgid == event.tgid || client.mixed != 0)
                    .map(|(client, _)| client)
                    .collect();
                self.release_closed_clients(of_process);
                Ok(())
            }
            kind::SUBTREE_FREED => lifecycle::release_subtree(
                &self.kernel,
                ObjectKey {
                    client: event.client,
                    handle: event.handle,
                },
            )
            .map(drop)
            .map_err(EnforcerError::from),
            kind::OWNER_FREED => self.hand_to_survivor(event),
            kind::CGROUP_MKDIR => self.cgroup_made(event.cgroup).map(|found| {
                if !found {
                    young.push((event.cgroup, Instant::now()));
                }
            }),
            kind::CGROUP_RMDIR => self.cgroup_removed(event.cgroup),
            _ => {
                self.answer(event);
                if let Some(notice) = self.notice(event) {
                    self.notify(notice);
                }
                Ok(())
            }
        };
        if let Err(error) = outcome {
            error!(%error, ?event, "an event could not be served");
        }
    }

    /// What an event means for a person; `None` for one that only the daemon cares about.
    fn notice(&self, event: &Event) -> Option<Notice> {
        let (gpu, is_host) = of_place(event.gpu);
        let others = event.limited_by == RESERVATIONS;
        let key = match (others, is_host) {
            _ if event.kind == kind::DENIED && event.class == uvm::VALIDATE_VA_RANGE => {
                "memory.managed"
            }
            (true, _) => "memory.min",
            (false, true) => "memory.host",
            (false, false) => "memory.max",
        };
        match event.kind {
            kind::DENIED => Some(Notice::Denied {
                tenant: self.name_of(event.tenant),
                limited_by: if others {
                    String::new()
                } else {
                    self.name_of(event.limited_by)
                },
                key: key.to_owned(),
                gpu,
                pid: process_of(event.tgid),
                requested: event.bytes,
                used: event.used,
                limit: event.limit,
            }),
            kind::BREACHED => Some(Notice::Breached {
                tenant: self.name_of(event.tenant),
                key: key.to_owned(),
                gpu,
                pid: event.tgid,
                requested: event.bytes,
                used: event.used,
                limit: event.limit,
            }),
            kind::HIGH => Some(Notice::HighReached {
                tenant: self.name_of(event.limited_by),
                gpu,
                used: event.used,
                high: event.limit,
            }),
            _ => None,
        }
    }

    /// A process has spoken to the driver, or made a channel.
    fn seen(&self, tgid: u32) {
        self.launches.seen(tgid);
        self.leaks.seen(tgid);
        self.profiles.seen(tgid);
    }

    fn processes_gone(&self, gone: &BTreeSet<u32>) {
        self.launches.gone(gone);
        if let Err(error) =
            lifecycle::release_processes(&self.kernel, gone, &*self.processes, &self.open_files)
        {
            error!(%error, ?gone, "charges of dead processes are left for the next sweep");
        }
        if !gone.is_empty() {
            self.time.resync();
        }
    }

    /// Memory was freed by its owner while others hold it: the oldest holder pays from now on.
    fn hand_to_survivor(&self, event: &Event) -> Result<(), EnforcerError> {
        let orphan = ObjectKey {
            client: ORPHAN_CLIENT,
            handle: event.limited_by,
        };
        let Some(object) = self.kernel.object(orphan) else {
            return Ok(());
        };
        let survivor = self
            .kernel
            .objects_where(|client| client.dups != 0)
            .into_iter()
            .filter(|(_, dup)| {
                dup.kind == object_kind::DUP
                    && dup.born_ns == object.born_ns
                    && dup.source.client == event.client
                    && dup.source.handle == event.handle
            })
            .min_by_key(|(key, _)| *key);
        if let Some((_, dup)) = survivor {
            self.kernel
                .move_object(orphan, dup.tgid, dup.tenant, dup.fd)?;
        }
        Ok(())
    }

    fn release_closed_clients(&self, clients: Vec<u32>) {
        let loose =
            lifecycle::loose_clients(&self.kernel, clients, &*self.processes, &self.open_files);
        for (client, fate) in loose {
            debug!(?client, ?fate, "its process has let go of its file");
            let outcome = match fate {
                Fate::Release => lifecycle::release_subtree(&self.kernel, client).map(drop),
                Fate::Inherit { tgid, fd } => {
                    lifecycle::hand_over(&self.kernel, client, (tgid, fd), &*self.processes)
                }
            };
            if let Err(error) = outcome {
                error!(%error, ?client, "charges of a client are left for the next sweep");
            }
            self.time.resync();
        }
    }

    /// Finds what no event told: processes that are gone, clients whose file is closed. Returns the processes that have
    /// spoken to the driver.
    pub(super) fn sweep(self: &Arc<Self>) -> Vec<u32> {
        self.look_at_high();
        self.cancel_stale_admissions();
        self.find_managed_node();
        let roll = Roll::call(&self.kernel);
        self.charge_contexts(&roll);
        if let Err(error) = self.bound_cards() {
            error!(%error, "cards could not be bounded");
        }
        self.processes_gone(&lifecycle::dead_processes(
            &self.kernel,
            &roll,
            &*self.processes,
        ));
        self.release_closed_clients(roll.clients.iter().map(|(client, _)| *client).collect());
        roll.processes.iter().map(|(tgid, _)| *tgid).collect()
    }

    /// After lost events: everything that they could have said.
    fn resync(&self) {
        let objects = self.kernel.objects().collect();
        for top in lifecycle::gone(&objects) {
            // The list was read while calls went on, and may lack what has been made meanwhile.
            if self.kernel.object(top).is_none()
                && let Err(error) = lifecycle::release_subtree(&self.kernel, top)
            {
                error!(%error, ?top, "what hung below could not be released");
            }
        }
        if let Err(error) = self.find_cgroups().and_then(|_| self.reseat()) {
            error!(%error, "cgroups could not be looked at again");
        }
        self.time.resync();
    }
}

impl Watch {
    /// Stops the threads. Charges and limits stay where they are, in the kernel.
    pub fn stop(mut self) {
        self.enforcer.stop();
        if let Some(events) = self.events.take()
            && events.join().is_err()
        {
            error!("the event thread panicked");
        }
        self.enforcer.leaks.end();
        self.enforcer.idle.end();
        self.enforcer.profiles.end();
        drop(self.launches);
        self.enforcer.time.stop();
    }
}

/// CPU time of this thread. How long others keep it from running does not count.
fn thread_cpu() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // Neither part is negative on this clock.
    Duration::new(
        used.tv_sec.unsigned_abs(),
        u32::try_from(used.tv_nsec).unwrap_or(0),
    )
}

fn read_event(bytes: &[u8]) -> Option<Event> {
    if bytes.len() != size_of::<Event>() {
        return None;
    }
    // SAFETY: the length was checked, and every bit pattern is an event.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}

/// The process of a thread; the thread itself where it is gone.
pub(super) fn process_of(thread: u32) -> u32 {
    let read = || -> io::Result<Option<u32>> {
        let text = fs::read_to_string(format!("/proc/{thread}/status"))?;
        Ok(text
            .lines()
            .find_map(|line| line.strip_prefix("Tgid:"))
            .and_then(|tgid| tgid.trim().parse().ok()))
    };
    read().ok().flatten().unwrap_or(thread)
}
