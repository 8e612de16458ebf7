//! Charging what the driver takes for processes by itself, and finding what got past the ledger.

use std::{collections::BTreeMap, time::Instant};

use gpuquota_common::{
    event::Event,
    map::{MAX_GPUS, NO_TENANT, ObjectKey, context_key, kind, process_flags},
    nvidia::class,
};
use tracing::{error, warn};

use super::{Enforcer, EnforcerError};
use crate::{
    context::{Charge, Contexts, Holder, Look},
    lifecycle::ProcessView as _,
};

/// A context of libcuda has so many channel groups.
const GROUPS_OF_CONTEXT: u64 = 4;

/// What is known of contexts.
#[derive(Debug, Default)]
pub(super) struct ContextState {
    contexts: Contexts,
    /// The telemetry that was looked at last.
    looked: Option<Instant>,
    /// By tenant index and GPU, nested tenants included.
    sums: BTreeMap<(u32, u32), Sums>,
}

/// What a tenant's processes have on a GPU, as of the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Charged for contexts.
    pub context: u64,
    /// What NVML shows, less what is charged.
    pub drift: i64,
}

/// What the ledger has of one process on one GPU.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// In all its accounts.
    charged: u64,
    /// Of that, for contexts.
    context: u64,
    /// The tenant that pays for the contexts.
    payer: Option<u32>,
    groups: u64,
}

impl Enforcer {
    /// Compares the ledger with the last telemetry, once.
    pub(super) fn charge_contexts(&self) {
        let Some(snapshot) = self.telemetry.latest() else {
            return;
        };
        let mut state = self.contexts();
        if state.looked == Some(snapshot.at) {
            return;
        }
        state.looked = Some(snapshot.at);
        let known = self.known();
        let mut sums: BTreeMap<(u32, u32), Sums> = BTreeMap::new();
        let mut shown: Vec<Holder> = Vec::new();
        for card in &snapshot.cards {
            for (tgid, nvml) in &card.processes {
                let (Some(nvml), Some(started)) = (*nvml, self.processes.started(*tgid)) else {
                    continue;
                };
                let holder = Holder {
                    tgid: *tgid,
                    started,
                    gpu: card.index,
                };
                shown.push(holder);
                let of_process = known.get(&(*tgid, card.index)).copied().unwrap_or_default();
                let Some((tenant, cgroup)) = self.home(*tgid) else {
                    continue;
                };
                let tenant = of_process.payer.unwrap_or(tenant);
                let look = Look {
                    nvml,
                    ledger: of_process.charged.saturating_sub(of_process.context),
                    charged: of_process.context,
                    contexts: of_process.groups.div_ceil(GROUPS_OF_CONTEXT),
                    pays: tenant == NO_TENANT
                        || self
                            .memory_budget(tenant, card.index)
                            .is_some_and(|memory| memory.context),
                    observed: self.kernel.process(*tgid).is_some_and(|process| {
                        process.flags & process_flags::ADOPTED == 0
                            && process.flags & process_flags::ACTIVE != 0
                    }),
                };
                let charge =
                    state
                        .contexts
                        .look(holder, look, self.config.enforcement.context_bound);
                let context = charge.map_or(look.charged, |charge| charge.bytes);
                if let Some(charge) = charge {
                    self.charge_context(holder, (tenant, cgroup), look, charge);
                }
                let drift = i128::from(nvml) - i128::from(look.ledger) - i128::from(context);
                self.add_sums(&mut sums, (tenant, card.index), context, drift);
            }
        }
        for gone in state.contexts.retain(|holder| shown.contains(holder)) {
            let key = context_key(gone.tgid, gone.gpu);
            if let Err(error) = self.kernel.release_object(key) {
                error!(%error, ?gone, "the charge for a context stays until its process ends");
            }
        }
        state.sums = sums;
    }

    fn charge_context(&self, holder: Holder, home: (u32, u64), look: Look, charge: Charge) {
        if charge.hidden {
            warn!(
                pid = holder.tgid,
                gpu = holder.gpu,
                tenant = self.name_of(home.0),
                nvml = look.nvml,
                ledger = look.ledger,
                "has memory that it was never charged for; it is charged now"
            );
        }
        let charged = self.kernel.charge_context(
            (holder.tgid, holder.gpu),
            home,
            charge.bytes,
            charge.hidden,
        );
        if let Err(error) = charged {
            error!(%error, ?holder, "contexts are not charged");
        }
    }

    /// A channel group was made: with the first one of a process comes a context, of which is known by now what it takes.
    pub(super) fn expect_context(&self, event: &Event) -> Result<(), EnforcerError> {
        if event.class != class::KEPLER_CHANNEL_GROUP_A || event.gpu >= MAX_GPUS {
            return Ok(());
        }
        let usual = self.contexts().contexts.usual(event.gpu);
        let pays = self
            .memory_budget(event.tenant, event.gpu)
            .is_some_and(|memory| memory.context);
        let key = ObjectKey {
            client: event.client,
            handle: event.handle,
        };
        let known = self.kernel.object(context_key(event.tgid, event.gpu));
        let Some(group) = self.kernel.object(key) else {
            return Ok(());
        };
        if usual == 0 || !pays || known.is_some() || self.processes.started(event.tgid).is_none() {
            return Ok(());
        }
        let home = (event.tenant, group.cgroup);
        self.kernel
            .charge_context((event.tgid, event.gpu), home, usual, false)?;
        Ok(())
    }

    /// What the ledger has, by process and GPU.
    fn known(&self) -> BTreeMap<(u32, u32), Known> {
        let mut known: BTreeMap<(u32, u32), Known> = BTreeMap::new();
        for (_, object) in self.kernel.structure() {
            let of_process = (object.tgid, object.gpu);
            if object.kind == kind::CONTEXT {
                let entry = known.entry(of_process).or_default();
                entry.context = object.bytes;
                entry.payer = Some(object.tenant);
            } else if object.kind == kind::CHANNEL_GROUP {
                known.entry(of_process).or_default().groups += 1;
            }
        }
        for (key, bytes) in self.kernel.accounts() {
            let gpu = u32::from(key.gpu);
            if gpu < MAX_GPUS {
                known.entry((key.tgid, gpu)).or_default().charged += bytes;
            }
        }
        known
    }

    /// The tenant and the cgroup of a process; `None` if it is gone.
    fn home(&self, tgid: u32) -> Option<(u32, u64)> {
        let path = self.hierarchy.of_process(tgid).ok()?;
        let cgroup = self.hierarchy.id(&path).ok()??;
        Some((self.tenant_at(&path).unwrap_or(NO_TENANT), cgroup))
    }

    fn add_sums(
        &self,
        sums: &mut BTreeMap<(u32, u32), Sums>,
        (tenant, gpu): (u32, u32),
        context: u64,
        drift: i128,
    ) {
        let now = self.read();
        let mut at = Some(tenant);
        while let Some(index) = at {
            let Some(seat) = now.seating.seat(index) else {
                break;
            };
            let sum = sums.entry((index, gpu)).or_default();
            sum.context = sum.context.saturating_add(context);
            let drift = i64::try_from(drift).unwrap_or(i64::MAX);
            sum.drift = sum.drift.saturating_add(drift);
            at = seat
                .parent
                .as_deref()
                .and_then(|parent| now.seating.index(parent));
        }
    }

    /// What a tenant has on a GPU, as of the last look.
    pub(super) fn sums(&self, tenant: u32, gpu: u32) -> Sums {
        self.contexts()
            .sums
            .get(&(tenant, gpu))
            .copied()
            .unwrap_or_default()
    }

    fn contexts(&self) -> std::sync::MutexGuard<'_, ContextState> {
        self.contexts
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
