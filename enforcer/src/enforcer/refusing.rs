//! Putting the chosen backend to work, and what follows when memory was refused or got past a budget.

use std::sync::Arc;

use gpuquota_common::{
    event::{Event, kind},
    map::{RESERVATIONS, of_place, settings_flags},
    nvidia::uvm,
};
use gpuquota_policy::{MemoryBudget, OnBreach, OnMemoryMax};
use tracing::{info, warn};

use super::{Enforcer, EnforcerError, watching::process_of};
use crate::{
    backend::{self, Choice, Lacking},
    config::{Config, DaemonLoss, MemoryBackend},
    ending::GRACE,
    kernel::{DenyHook, Kernel, PinDir},
};

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
    if used
        .iter()
        .any(|hook| matches!(hook, DenyHook::Override | DenyHook::Lsm))
    {
        flags |= settings_flags::FAILS_CALLS;
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
        match event.kind {
            kind::HIGH => {
                self.answer_high(event.limited_by, event.gpu);
                return;
            }
            kind::CARD_FULL => self.make_room(event.tenant, event.gpu, event.bytes),
            kind::DENIED if event.limited_by == RESERVATIONS => {
                self.make_room(event.tenant, event.gpu, event.bytes);
            }
            _ => {}
        }
        if event.kind == kind::DENIED && event.class == uvm::VALIDATE_VA_RANGE {
            // `memory.on-max` is about amounts.
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
}
