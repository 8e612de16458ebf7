//! Charging what the driver takes for processes by itself, and finding what got past the ledger.

use std::{
    collections::BTreeMap,
    sync::{MutexGuard, PoisonError},
    time::Instant,
};

use gpuquota_common::{
    event::Event,
    map::{MAX_GPUS, NO_TENANT, ObjectKey, context_key, kind, process_flags},
    nvidia::class,
};
use tracing::{error, warn};

use super::{Enforcer, EnforcerError};
use crate::{
    context::{Charge, Contexts, Holder, Look},
    kernel::ApartCharge,
    lifecycle::{ProcessView as _, Roll},
    stir::Witness,
};

/// A context of libcuda has so many channel groups.
const GROUPS_OF_CONTEXT: u64 = 4;

/// By process and GPU.
pub(super) type KnownByPlace = BTreeMap<(u32, u32), Known>;
/// By process: birth of its youngest channel group, and the GPU that it is on.
pub(super) type Homes = BTreeMap<u32, (u64, u32)>;

/// What is known of contexts.
#[derive(Debug, Default)]
pub(super) struct ContextState {
    contexts: Contexts,
    /// The telemetry that was looked at last.
    looked: Option<Instant>,
    /// Charged for managed memory by tenant index and GPU.
    managed: BTreeMap<(u32, u32), u64>,
    /// Managed memory that was found once and that nobody was asked about, by process.
    suspects: BTreeMap<u32, u64>,
}

/// By tenant index and GPU, nested tenants included.
pub(super) type SumsByPlace = BTreeMap<(u32, u32), Sums>;

/// What a tenant's processes have on a GPU, as of the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    /// Charged for contexts.
    pub context: u64,
    /// Charged for managed memory.
    pub managed: u64,
    /// What NVML shows, less what is charged.
    pub drift: i64,
}

/// What one process adds to [`Sums`].
#[derive(Clone, Copy, Debug, Default)]
struct Added {
    context: u64,
    managed: u64,
    drift: i128,
}

/// What the ledger has of one process on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    /// In all its accounts.
    charged: u64,
    /// Of that, for contexts.
    context: u64,
    /// Of that, managed memory.
    pub managed: u64,
    /// The tenant that pays for the contexts.
    payer: Option<u32>,
    groups: u64,
}

impl Known {
    fn contexts(&self) -> u64 {
        self.groups.div_ceil(GROUPS_OF_CONTEXT)
    }
}

/// Contexts of a process, on all GPUs.
pub(super) fn contexts_in(known: &KnownByPlace, tgid: u32) -> u64 {
    known
        .range((tgid, 0)..=(tgid, u32::MAX))
        .map(|(_, known)| known.contexts())
        .sum()
}

impl Enforcer {
    /// Compares the ledger with the last telemetry, once.
    pub(super) fn charge_contexts(&self, roll: &Roll) {
        let (known, homes) = self.known(roll);
        self.stir.testify(
            Witness::Ledger,
            known
                .values()
                .any(|known| known.charged > 0 || known.groups > 0),
        );
        let mut state = self.contexts();
        let managed = self.charge_managed(&known, &homes, &mut state.suspects);
        let moved = managed != state.managed;
        state.managed = managed;
        let Some(snapshot) = self.telemetry.latest() else {
            return;
        };
        if state.looked == Some(snapshot.at) {
            return;
        }
        state.looked = Some(snapshot.at);
        let known = if moved {
            self.known(&Roll::call(&self.kernel)).0
        } else {
            known
        };
        let mut sums = SumsByPlace::new();
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
                    // NVML shows managed memory for no process.
                    ledger: of_process
                        .charged
                        .saturating_sub(of_process.context)
                        .saturating_sub(of_process.managed),
                    charged: of_process.context,
                    contexts: of_process.contexts(),
                    pays: tenant == NO_TENANT
                        || self
                            .memory_budget(tenant, card.index)
                            .is_some_and(|memory| memory.context),
                    observed: self.is_observed(*tgid),
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
                let added = Added {
                    context,
                    drift,
                    managed: 0,
                };
                self.add_sums(&mut sums, (tenant, card.index), added);
            }
        }
        for (place, managed) in &state.managed {
            let added = Added {
                managed: *managed,
                ..Added::default()
            };
            self.add_sums(&mut sums, *place, added);
        }
        for gone in state.contexts.retain(|holder| shown.contains(holder)) {
            let key = context_key(gone.tgid, gone.gpu);
            if let Err(error) = self.kernel.release_object(key) {
                error!(%error, ?gone, "the charge for a context stays until its process ends");
            }
        }
        *self.all_sums() = sums;
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
        let charged = self.kernel.charge_apart(&ApartCharge {
            tgid: holder.tgid,
            gpu: holder.gpu,
            tenant: home.0,
            cgroup: home.1,
            bytes: charge.bytes,
            report: charge.hidden,
            managed: false,
        });
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
        self.kernel.charge_apart(&ApartCharge {
            tgid: event.tgid,
            gpu: event.gpu,
            tenant: event.tenant,
            cgroup: group.cgroup,
            bytes: usual,
            report: false,
            managed: false,
        })?;
        Ok(())
    }

    /// Contexts of a process, on all GPUs.
    pub(super) fn contexts_of(&self, tgid: u32) -> u64 {
        contexts_in(&self.known(&Roll::call(&self.kernel)).0, tgid)
    }

    /// Whether all that a process did was seen.
    pub(super) fn is_observed(&self, tgid: u32) -> bool {
        self.kernel.process(tgid).is_some_and(|process| {
            process.flags & process_flags::ADOPTED == 0
                && process.flags & process_flags::ACTIVE != 0
        })
    }

    /// What the ledger has, by process and GPU; and the GPU of the youngest context of each process.
    fn known(&self, roll: &Roll) -> (KnownByPlace, Homes) {
        let mut known = KnownByPlace::new();
        let mut homes = Homes::new();
        for (_, object) in self.kernel.structure_below(&roll.clients) {
            let of_process = (object.tgid, object.gpu);
            if object.kind == kind::CONTEXT {
                let entry = known.entry(of_process).or_default();
                entry.context = object.bytes;
                entry.payer = Some(object.tenant);
            } else if object.kind == kind::MANAGED {
                known.entry(of_process).or_default().managed = object.bytes;
            } else if object.kind == kind::CHANNEL_GROUP && object.gpu < MAX_GPUS {
                known.entry(of_process).or_default().groups += 1;
                let home = homes.entry(object.tgid).or_default();
                *home = (*home).max((object.born_ns, object.gpu));
            }
        }
        for (key, bytes) in &roll.accounts {
            let gpu = u32::from(key.gpu);
            if gpu < MAX_GPUS {
                known.entry((key.tgid, gpu)).or_default().charged += bytes;
            }
        }
        (known, homes)
    }

    /// The tenant and the cgroup of a process; `None` if it is gone.
    pub(super) fn home(&self, tgid: u32) -> Option<(u32, u64)> {
        let path = self.hierarchy.of_process(tgid).ok()?;
        let cgroup = self.hierarchy.id(&path).ok()??;
        Some((self.tenant_at(&path).unwrap_or(NO_TENANT), cgroup))
    }

    fn add_sums(&self, sums: &mut SumsByPlace, (tenant, gpu): (u32, u32), added: Added) {
        let now = self.read();
        let mut at = Some(tenant);
        while let Some(index) = at {
            let Some(seat) = now.seating.seat(index) else {
                break;
            };
            let sum = sums.entry((index, gpu)).or_default();
            sum.context = sum.context.saturating_add(added.context);
            sum.managed = sum.managed.saturating_add(added.managed);
            let drift = i64::try_from(added.drift).unwrap_or(i64::MAX);
            sum.drift = sum.drift.saturating_add(drift);
            at = seat
                .parent
                .as_deref()
                .and_then(|parent| now.seating.index(parent));
        }
    }

    /// What a tenant has on a GPU, as of the last look.
    pub(super) fn sums(&self, tenant: u32, gpu: u32) -> Sums {
        self.all_sums()
            .get(&(tenant, gpu))
            .copied()
            .unwrap_or_default()
    }

    fn all_sums(&self) -> MutexGuard<'_, SumsByPlace> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contexts(&self) -> MutexGuard<'_, ContextState> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
