//! Putting the chosen backend to work, and what follows when memory was refused or got past a budget.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError},
    thread,
    time::Duration,
};

use gpuquota_common::{
    event::{Event, kind},
    map::{RESERVATIONS, of_place, settings_flags},
};
use gpuquota_policy::{MemoryBudget, OnBreach, OnHigh, OnMemoryMax, Signal};
use rustix::process::{self, Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};

use super::{Enforcer, EnforcerError, watching::process_of};
use crate::{
    backend::{self, Choice, Lacking},
    cgroup,
    config::{Config, DaemonLoss, MemoryBackend},
    ending::GRACE,
    kernel::{DenyHook, Kernel, PinDir},
    managed,
    time::{act::Reach, rules::Reason},
};

/// Managed memory is moved to the host in pieces of this size ...
const RECLAIM_PIECE: u64 = 256 << 20;
/// ... with this pause after each: at most 2 GiB a second.
const RECLAIM_PIECE_TIME: Duration = Duration::from_millis(125);

/// Chooses a backend and attaches its programs.
///
/// A program may load and yet not attach; then the host lacks that backend too, and the next one is chosen.
pub(super) fn establish(
    kernel: &Kernel,
    pins: Option<&PinDir>,
    config: &Config,
    enforcing: bool,
) -> Result<(Choice, Lacking), EnforcerError> {
    let wanted = config.enforcement.memory;
    let mut lacking = backend::host::lacking(kernel);
    let choice = loop {
        let choice = backend::choose(wanted, &lacking)?;
        if !enforcing {
            break Choice::OBSERVE;
        }
        let Some(hook) = hook(choice.everywhere) else {
            break choice;
        };
        match kernel.attach_deny(hook, pins) {
            Ok(()) => break choice,
            Err(error) => lacking.add(choice.everywhere, error.to_string()),
        }
    };
    let mut used: Vec<DenyHook> = hook(choice.everywhere).into_iter().collect();
    let backstop = matches!(
        choice.everywhere,
        MemoryBackend::Override | MemoryBackend::Rewrite
    ) && lacking.reason(MemoryBackend::Lsm).is_none();
    if backstop {
        // What the chosen backend cannot refuse: 32-bit callers, unreadable parameters.
        match kernel.attach_deny(DenyHook::Lsm, pins) {
            Ok(()) => used.push(DenyHook::Lsm),
            Err(error) => warn!(%error, "no security hook beside {}", choice.everywhere),
        }
    }
    let mut flags = 0;
    if config.enforcement.daemon_loss == DaemonLoss::Open {
        flags |= settings_flags::OPEN_WITHOUT_DAEMON;
    }
    if choice.answers_breaches() {
        flags |= settings_flags::ANSWER_BREACHES;
    }
    kernel.update_settings(|settings| {
        settings.deny = choice.deny();
        // What is closed stays closed while a daemon replaces another.
        settings.flags = flags | settings.flags & settings_flags::DENY_UNGOVERNED;
    })?;
    kernel.detach_other_denies(&used, pins)?;
    info!(everywhere = %choice.everywhere, supervised = choice.supervised, "memory backend");
    Ok((choice, lacking))
}

fn hook(backend: MemoryBackend) -> Option<DenyHook> {
    match backend {
        MemoryBackend::Override => Some(DenyHook::Override),
        MemoryBackend::Rewrite => Some(DenyHook::Rewrite),
        MemoryBackend::Lsm => Some(DenyHook::Lsm),
        _ => None,
    }
}

impl Enforcer {
    /// Ends a process that was refused memory under `memory.on-max = "kill"`, or got it past a budget with
    /// `memory.on-breach = "kill"`.
    ///
    /// After a breach the kernel side has signalled it already; here it is seen to that it does end.
    pub(super) fn answer(self: &Arc<Self>, event: &Event) {
        if !self.choice.answers_breaches() {
            return;
        }
        if event.kind == kind::HIGH {
            self.answer_high(event.limited_by, event.gpu);
            return;
        }
        let (pid, payer) = match event.kind {
            kind::DENIED => (process_of(event.tgid), event.tenant),
            kind::BREACHED if event.limited_by == RESERVATIONS => (event.tgid, event.tenant),
            kind::BREACHED => (event.tgid, event.limited_by),
            _ => return,
        };
        let (gpu, _) = of_place(event.gpu);
        let ends = self.memory_budget(payer, gpu).is_some_and(|memory| {
            if event.kind == kind::DENIED {
                memory.on_max == OnMemoryMax::Kill
            } else {
                memory.on_breach == OnBreach::Kill
            }
        });
        if !ends {
            return;
        }
        warn!(
            pid,
            tenant = self.name_of(event.tenant),
            "over its memory budget: it is ended"
        );
        let tenant = event.tenant;
        self.endings.end(pid, GRACE, || {
            self.hierarchy
                .of_process(pid)
                .is_ok_and(|path| self.tenant_at(&path) == Some(tenant))
        });
    }

    pub(super) fn memory_budget(&self, tenant: u32, gpu: u32) -> Option<MemoryBudget> {
        let now = self.read();
        let name = &now.seating.seat(tenant)?.name;
        let gpu = self.host.gpus.iter().find(|found| found.index == gpu)?;
        Some(now.policy.effective(name, gpu)?.memory)
    }

    /// A tenant's usage rose above its `memory.high`: `memory.on-high`, once.
    fn answer_high(self: &Arc<Self>, tenant: u32, gpu: u32) {
        let is_news = self
            .high
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .crossed(tenant, gpu);
        if !is_news {
            return;
        }
        match self.memory_budget(tenant, gpu).map(|memory| memory.on_high) {
            Some(OnHigh::Signal(signal)) => self.signal_users(tenant, gpu, signal),
            Some(OnHigh::Reclaim) => {
                let enforcer = Arc::clone(self);
                let spawned = thread::Builder::new()
                    .name("reclaim".into())
                    .spawn(move || enforcer.reclaim(tenant, gpu));
                if let Err(error) = spawned {
                    warn!(%error, "no thread to reclaim memory");
                }
            }
            Some(OnHigh::Freeze) => {
                let enforcer = Arc::clone(self);
                // The controller answers when it is done; events go on meanwhile.
                let spawned = thread::Builder::new()
                    .name("on-high".into())
                    .spawn(move || {
                        let name = enforcer.name_of(tenant);
                        let held =
                            enforcer.hold(&name, Some(&gpu.to_string()), Reason::MemoryHigh, true);
                        match held {
                            Ok(_) => info!(
                                tenant = name,
                                gpu, "above memory.high: frozen until it is thawed"
                            ),
                            Err(error) => warn!(tenant = name, gpu, %error, "could not be frozen"),
                        }
                    });
                if let Err(error) = spawned {
                    warn!(%error, "no thread to freeze a tenant");
                }
            }
            _ => {}
        }
    }

    /// Moves managed memory of a tenant's processes to the host, as much as it is above its `memory.high`, largest ranges
    /// first and no faster than [`RECLAIM_PIECE`] and [`RECLAIM_PIECE_TIME`] allow.
    fn reclaim(&self, tenant: u32, gpu: u32) {
        let (Some(node), Some(high)) = (
            self.uvm_node(),
            self.memory_budget(tenant, gpu)
                .and_then(|memory| memory.high),
        ) else {
            return;
        };
        let used = self
            .kernel
            .usage(tenant, gpu)
            .map_or(0, |usage| usage.memory);
        // As far below as the next crossing counts.
        let mut left = used.saturating_sub(high - high / 20);
        let mut moved = 0;
        for pid in self.users(tenant, gpu) {
            let Ok(reach) = Reach::open(pid, None, &*self.processes) else {
                continue;
            };
            let ranges = managed::ranges(pid, node, self.contexts_of(pid)).unwrap_or_default();
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
        info!(
            tenant = self.name_of(tenant),
            gpu, moved, left, "above memory.high: managed memory was moved to the host"
        );
    }

    /// Processes of a tenant, nested tenants' too, that have memory on a GPU.
    fn users(&self, tenant: u32, gpu: u32) -> BTreeSet<u32> {
        let roots: Vec<String> = self
            .read()
            .roots
            .values()
            .filter(|(index, _)| *index == tenant)
            .map(|(_, path)| path.clone())
            .collect();
        self.kernel
            .accounts()
            .filter(|(key, bytes)| u32::from(key.gpu) == gpu && *bytes > 0)
            .map(|(key, _)| key.tgid)
            .filter(|pid| {
                self.hierarchy
                    .of_process(*pid)
                    .is_ok_and(|path| roots.iter().any(|root| cgroup::is_within(&path, root)))
            })
            .collect()
    }

    /// Who has fallen below its `memory.high` again?
    pub(super) fn look_at_high(&self) {
        let mut high = self.high.lock().unwrap_or_else(PoisonError::into_inner);
        if high.is_empty() {
            return;
        }
        high.look(|tenant, gpu| {
            let limit = self.memory_budget(tenant, gpu)?.high?;
            Some((self.kernel.usage(tenant, gpu).ok()?.memory, limit))
        });
    }

    /// Signals the processes of a tenant, nested tenants' too, that have memory on a GPU.
    fn signal_users(&self, tenant: u32, gpu: u32, signal: Signal) {
        let Some(number) = process::Signal::from_named_raw(signal.number()) else {
            return;
        };
        let roots: Vec<String> = self
            .read()
            .roots
            .values()
            .filter(|(index, _)| *index == tenant)
            .map(|(_, path)| path.clone())
            .collect();
        let users: BTreeSet<u32> = self
            .kernel
            .accounts()
            .filter(|(key, bytes)| u32::from(key.gpu) == gpu && *bytes > 0)
            .map(|(key, _)| key.tgid)
            .collect();
        for pid in users {
            let Some(handle) = i32::try_from(pid)
                .ok()
                .and_then(Pid::from_raw)
                .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            else {
                continue;
            };
            // Asked once the process is held: its number may have been used again.
            let is_meant = self
                .hierarchy
                .of_process(pid)
                .is_ok_and(|path| roots.iter().any(|root| cgroup::is_within(&path, root)));
            if is_meant {
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
