//! What tenants give back above `memory.high`: by their own `memory.on-high`, or because a card is full for a higher class.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gpuquota_policy::{OnHigh, Signal};
use rustix::process::{self, Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};

use super::Enforcer;
use crate::{
    cgroup,
    control::Notice,
    high::{self, HighWater, Lender},
    managed,
    time::{act::Reach, rules::Reason},
};

/// Managed memory is moved to the host in pieces of this size ...
const RECLAIM_PIECE: u64 = 256 << 20;
/// ... with this pause after each: at most 2 GiB a second.
const RECLAIM_PIECE_TIME: Duration = Duration::from_millis(125);
/// How long who was told to give back has time until the next one is told.
const TIME_TO_GIVE: Duration = Duration::from_secs(1);

impl Enforcer {
    /// A tenant's usage rose above its `memory.high`: `memory.on-high`, once.
    pub(super) fn answer_high(self: &Arc<Self>, tenant: u32, gpu: u32) {
        if self.high().crossed(tenant, gpu) {
            self.begin_on_high(tenant, gpu, None);
        }
    }

    fn high(&self) -> std::sync::MutexGuard<'_, HighWater> {
        self.high.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what `memory.on-high` of a tenant says on a thread of its own: moving memory and freezing take time, and events go on
    /// meanwhile. `moved` as in [`Self::act_on_high`].
    fn begin_on_high(self: &Arc<Self>, tenant: u32, gpu: u32, moved: Option<u64>) {
        let enforcer = Arc::clone(self);
        let spawned = thread::Builder::new()
            .name("on-high".into())
            .spawn(move || {
                let used = enforcer.used(tenant, gpu);
                let more = enforcer.act_on_high(tenant, gpu, moved);
                enforcer.high().answered(tenant, gpu, used, more);
            });
        if let Err(error) = spawned {
            warn!(%error, "no thread for memory.on-high");
            self.high().answered(tenant, gpu, 0, 0);
        }
    }

    /// Does what `memory.on-high` of a tenant says. Where it has been done before and the tenant has grown since, `moved` are the
    /// bytes that were moved then: only reclaim goes on. Returns how much was moved.
    fn act_on_high(&self, tenant: u32, gpu: u32, moved: Option<u64>) -> u64 {
        let on_high = self.memory_budget(tenant, gpu).map(|memory| memory.on_high);
        match on_high {
            Some(OnHigh::Reclaim) => {
                return self.reclaim(tenant, gpu, u64::MAX, moved.unwrap_or(0), None);
            }
            _ if moved.is_some() => {}
            Some(OnHigh::Signal(signal)) => self.signal_users(tenant, gpu, signal),
            Some(OnHigh::Freeze) => {
                let name = self.name_of(tenant);
                match self.hold(&name, Some(&gpu.to_string()), Reason::MemoryHigh, true) {
                    Ok(_) => info!(
                        tenant = name,
                        gpu, "above memory.high: frozen until it is thawed"
                    ),
                    Err(error) => warn!(tenant = name, gpu, %error, "could not be frozen"),
                }
            }
            Some(OnHigh::Notify) | None => {}
        }
        0
    }

    /// Bytes that are charged to a tenant on a GPU.
    fn used(&self, tenant: u32, gpu: u32) -> u64 {
        self.kernel
            .usage(tenant, gpu)
            .map_or(0, |usage| usage.memory)
    }

    /// A card has no memory left for a tenant that may have more: those of lower classes that are above their
    /// `memory.high` give back. One round at a time for each card.
    pub(super) fn make_room(self: &Arc<Self>, tenant: u32, gpu: u32, wanted: u64) {
        let lenders = self.lenders(tenant, gpu);
        if lenders.is_empty() || !self.making_room().insert(gpu) {
            return;
        }
        let enforcer = Arc::clone(self);
        let spawned = thread::Builder::new()
            .name("make-room".into())
            .spawn(move || {
                enforcer.collect(tenant, gpu, wanted, &lenders);
                enforcer.making_room().remove(&gpu);
            });
        if let Err(error) = spawned {
            warn!(%error, "no thread to make room on a card");
            self.making_room().remove(&gpu);
        }
    }

    fn making_room(&self) -> std::sync::MutexGuard<'_, BTreeSet<u32>> {
        self.making_room
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Who gives back for a tenant, in order.
    fn lenders(&self, tenant: u32, gpu: u32) -> Vec<Lender> {
        let now = self.read();
        let Some(host_gpu) = self.host.gpus.iter().find(|found| found.index == gpu) else {
            return Vec::new();
        };
        let on_gpu = now.policy.on(host_gpu);
        let Some(asking) = now
            .seating
            .seat(tenant)
            .and_then(|seat| on_gpu.budget(&seat.name))
        else {
            return Vec::new();
        };
        let lenders = now.seating.in_force().filter_map(|(index, seat)| {
            let budget = on_gpu.budget(&seat.name)?;
            let used = self.kernel.usage(index, gpu).ok()?.memory;
            Some(Lender {
                tenant: index,
                priority: budget.priority,
                above: used.saturating_sub(budget.memory.high?),
            })
        });
        high::order(lenders, asking.priority)
    }

    /// Lets lenders give back until `wanted` is there: managed memory of all first, then each by its `memory.on-high`.
    fn collect(&self, asking: u32, gpu: u32, wanted: u64, lenders: &[Lender]) {
        let mut left = wanted;
        for lender in lenders {
            left = left.saturating_sub(self.reclaim(lender.tenant, gpu, left, 0, Some(asking)));
            if left == 0 {
                return;
            }
        }
        for lender in lenders {
            info!(
                tenant = self.name_of(lender.tenant),
                gpu,
                wanted_by = self.name_of(asking),
                left,
                "the card is full for a higher class: memory.on-high"
            );
            let before = self.used(lender.tenant, gpu);
            self.act_on_high(lender.tenant, gpu, None);
            let end = Instant::now() + TIME_TO_GIVE;
            let given = || before.saturating_sub(self.used(lender.tenant, gpu));
            while given() < left && Instant::now() < end {
                thread::sleep(TIME_TO_GIVE / 20);
            }
            left = left.saturating_sub(given());
            if left == 0 {
                return;
            }
        }
    }

    /// Moves managed memory of a tenant's processes to the host, as much as it is above its `memory.high` but `most` at
    /// most, largest ranges first and no faster than [`RECLAIM_PIECE`] and [`RECLAIM_PIECE_TIME`] allow. `passed` bytes were
    /// moved before, and are passed over. Returns how much.
    fn reclaim(
        &self,
        tenant: u32,
        gpu: u32,
        most: u64,
        mut passed: u64,
        wanted_by: Option<u32>,
    ) -> u64 {
        let (Some(node), Some(high)) = (
            self.uvm_node(),
            self.memory_budget(tenant, gpu)
                .and_then(|memory| memory.high),
        ) else {
            return 0;
        };
        // As far below as the next crossing counts.
        let mut left = self
            .used(tenant, gpu)
            .saturating_sub(high::floor(high))
            .saturating_sub(passed)
            .min(most);
        let mut moved = 0;
        for pid in self.users(&self.roots_of(tenant), gpu) {
            let Ok(reach) = Reach::open(pid, None, &*self.processes) else {
                continue;
            };
            let ranges = managed::ranges(pid, node, self.contexts_of(pid)).unwrap_or_default();
            let ranges = managed::after(&ranges, &mut passed);
            for piece in managed::pieces(&ranges, RECLAIM_PIECE, left) {
                match managed::to_host(&reach, node, piece) {
                    Ok(true) => {
                        moved += piece.length;
                        left -= piece.length;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        warn!(pid, %error, "managed memory could not be moved");
                        break;
                    }
                }
                thread::sleep(RECLAIM_PIECE_TIME);
            }
        }
        if moved > 0 {
            self.notify(Notice::Reclaimed {
                tenant: self.name_of(tenant),
                gpu,
                moved,
                wanted_by: wanted_by.map_or_else(String::new, |asking| self.name_of(asking)),
            });
        }
        moved
    }

    /// The cgroups that are a tenant's roots.
    fn roots_of(&self, tenant: u32) -> Vec<String> {
        self.read()
            .roots
            .values()
            .filter(|(index, _)| *index == tenant)
            .map(|(_, path)| path.clone())
            .collect()
    }

    fn is_below(&self, pid: u32, roots: &[String]) -> bool {
        self.hierarchy
            .of_process(pid)
            .is_ok_and(|path| roots.iter().any(|root| cgroup::is_within(&path, root)))
    }

    /// Processes below these cgroups that have memory on a GPU.
    fn users(&self, roots: &[String], gpu: u32) -> BTreeSet<u32> {
        self.kernel
            .accounts()
            .filter(|(key, bytes)| u32::from(key.gpu) == gpu && *bytes > 0)
            .map(|(key, _)| key.tgid)
            .filter(|pid| self.is_below(*pid, roots))
            .collect()
    }

    /// Who has fallen below its `memory.high` again, and who has grown above it?
    pub(super) fn look_at_high(self: &Arc<Self>) {
        let grown = {
            let mut high = self.high();
            if high.is_empty() {
                return;
            }
            high.look(|tenant, gpu| {
                let limit = self.memory_budget(tenant, gpu)?.high?;
                Some((self.kernel.usage(tenant, gpu).ok()?.memory, limit))
            })
        };
        for high::Grown { tenant, gpu, moved } in grown {
            self.begin_on_high(tenant, gpu, Some(moved));
        }
    }

    /// Signals the processes of a tenant, nested tenants' too, that have memory on a GPU.
    fn signal_users(&self, tenant: u32, gpu: u32, signal: Signal) {
        let Some(number) = process::Signal::from_named_raw(signal.number()) else {
            return;
        };
        let roots = self.roots_of(tenant);
        for pid in self.users(&roots, gpu) {
            let Some(handle) = i32::try_from(pid)
                .ok()
                .and_then(Pid::from_raw)
                .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            else {
                continue;
            };
            // Asked once the process is held: its number may have been used again.
            if self.is_below(pid, &roots) {
                match pidfd_send_signal(&handle, number) {
                    Ok(()) => {
                        info!(pid, %signal, tenant = self.name_of(tenant), "above memory.high: signalled");
                    }
                    Err(error) => warn!(pid, %error, "could not be signalled"),
                }
            }
        }
    }
}
