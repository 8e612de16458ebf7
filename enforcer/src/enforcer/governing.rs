//! Who is governed: tenants and limits into the kernel, cgroups to tenants.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError},
    time::Instant,
};

use gpuquota_common::{
    claim,
    map::{MAX_TENANTS, NO_TENANT, Object, ObjectKey, TenantRow, host_place, on_max, row},
};
use gpuquota_policy::Loaded;
use tracing::{info, warn};

use super::{Enforcer, EnforcerError, policy};
use crate::{
    control::Notice,
    journal,
    kernel::{Kernel, KernelError},
    launch::limits::Budgets,
    tenancy::{self, Plan, Seat, Seating},
};

/// Who had which index under an earlier daemon, from what it left in the kernel.
pub(super) fn restore_seating(kernel: &Kernel) -> Result<Seating, KernelError> {
    let generation = kernel.settings()?.generation;
    let mut rows: BTreeMap<u32, (TenantRow, String)> = BTreeMap::new();
    for index in 0..MAX_TENANTS {
        let found = kernel.tenant(generation, index)?;
        if found.state != row::ABSENT {
            rows.insert(index, (found, kernel.name(index)?));
        }
    }
    let mut seating = Seating::default();
    for (index, (found, name)) in &rows {
        let parent = rows.get(&found.parent).map(|(_, name)| name.clone());
        seating.restore(
            *index,
            Seat {
                name: name.clone(),
                parent,
                in_force: found.state == row::IN_FORCE,
            },
        );
    }
    Ok(seating)
}

impl Enforcer {
    /// Puts a checked policy into force and returns its generation, and what there is to say of it.
    ///
    /// The new rows and limits are written into the bank that no program reads; one store of the generation
    /// then makes all of them count at once.
    pub(super) fn govern(
        &self,
        loaded: Loaded,
        asked: Instant,
    ) -> Result<(u64, Vec<String>), EnforcerError> {
        let policy = loaded.policy;
        let (seating, generation) = {
            let now = self.read();
            (now.seating.clone(), now.generation)
        };
        let plan = tenancy::plan(&policy, &self.host.gpus, &seating, &self.charged()?)?;
        let next = generation + 1;
        self.write_bank(next, &plan)?;
        let launches = Budgets::new(&policy, &plan.seating);
        self.launches.write_bank(next, &launches)?;
        self.kernel
            .update_settings(|settings| settings.generation = next)?;
        self.reserve(&plan)?;
        self.loads.enforced_after(asked.elapsed());
        let warnings = policy::warnings(&policy, &loaded.warnings, &self.host, self.choice);
        let reseated = plan.seating != seating || self.read().policy.tenants.is_empty();
        self.replace(|now| {
            now.policy = Arc::new(policy);
            now.seating = plan.seating;
            now.generation = next;
            now.warnings.clone_from(&warnings);
        });
        // Where nobody's place has changed, nobody's charge has.
        if self.find_cgroups()? || reseated {
            self.reseat()?;
        }
        self.launches.put_in_force(launches)?;
        self.tell_time_rules();
        Ok((next, warnings))
    }

    fn write_bank(&self, generation: u64, plan: &Plan) -> Result<(), KernelError> {
        for index in 0..MAX_TENANTS {
            let wanted = plan.rows.get(&index).copied().unwrap_or(TenantRow {
                state: row::ABSENT,
                parent: NO_TENANT,
            });
            if self.kernel.tenant(generation, index)? != wanted {
                self.kernel.set_tenant(generation, index, wanted)?;
            }
        }
        for (index, seat) in plan.seating.in_force() {
            self.kernel.set_name(index, &seat.name)?;
        }
        for ((index, gpu), budget) in &plan.budgets {
            self.kernel.set_budget(generation, *index, *gpu, *budget)?;
            if budget.on_max == on_max::WAIT {
                self.kernel.make_queue(*index, *gpu)?;
            }
        }
        Ok(())
    }

    /// Reserves what the plan says, for tenants in force; those that are retired have nothing reserved any more.
    fn reserve(&self, plan: &Plan) -> Result<(), KernelError> {
        for gpu in &self.host.gpus {
            let is_reserved = plan.reservations.keys().any(|(_, on)| *on == gpu.index);
            self.cards.reserved(gpu.index, is_reserved);
        }
        self.bound_cards()?;
        for (index, _) in plan.seating.all() {
            for gpu in 0..self.gpu_count() {
                let wanted = plan.reservations.get(&(index, gpu)).copied().unwrap_or(0);
                let now = claim::reserved(self.kernel.usage(index, gpu)?.claim);
                if now != claim::units(wanted) {
                    self.kernel.reserve(index, gpu, wanted)?;
                }
            }
        }
        Ok(())
    }

    /// Says how much may be claimed of each card.
    pub(super) fn bound_cards(&self) -> Result<(), KernelError> {
        let latest = self.telemetry.latest();
        for gpu in &self.host.gpus {
            let card = latest
                .as_ref()
                .and_then(|last| last.cards.iter().find(|card| card.uuid == gpu.uuid));
            if let Some(card) = card
                && let Some(by_processes) = card.used_by_processes()
            {
                self.cards.seen(gpu.index, card.memory_used, by_processes);
            }
            self.kernel
                .set_card_size(gpu.index, self.cards.bound(gpu.index, gpu.memory))?;
        }
        Ok(())
    }

    /// Indices that have something charged.
    fn charged(&self) -> Result<BTreeSet<u32>, KernelError> {
        let mut charged: BTreeSet<u32> = self
            .kernel
            .accounts()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(key, _)| u32::from(key.tenant))
            .filter(|tenant| *tenant < MAX_TENANTS)
            .collect();
        // What is charged below a tenant is in its usage; reservations of running calls are there too.
        for (index, _) in self.read().seating.all() {
            for gpu in 0..self.gpu_count() {
                for place in [gpu, host_place(gpu)] {
                    if self.kernel.usage(index, place)?.memory > 0 {
                        charged.insert(index);
                    }
                }
            }
        }
        Ok(charged)
    }

    /// Finds the cgroups of every tenant, and lets go of those that are none any more. Whether anything changed.
    pub(super) fn find_cgroups(&self) -> Result<bool, EnforcerError> {
        let _matching = self.matching();
        let now = self.read();
        let (policy, seating, old) = (&now.policy, &now.seating, &now.roots);
        let mut wanted: BTreeMap<u64, (u32, String)> = BTreeMap::new();
        for tenant in policy.tenants.values() {
            let Some(index) = seating.index(&tenant.name) else {
                continue;
            };
            let pattern = &tenant.cgroup.value;
            let paths = if pattern.is_exact() {
                vec![pattern.as_str().to_owned()]
            } else {
                let mut found = self.hierarchy.walk(pattern.literal_prefix());
                found.retain(|path| pattern.matches(path));
                found
            };
            for path in paths {
                if let Some(id) = self.hierarchy.id(&path)? {
                    wanted.insert(id, (index, path));
                }
            }
        }
        let known: BTreeMap<u64, u32> = self.kernel.cgroups()?.into_iter().collect();
        let changed = *old != wanted;
        for id in known.keys().filter(|id| !wanted.contains_key(id)) {
            self.kernel.set_cgroup(*id, None)?;
            if let Some((index, path)) = old.get(id) {
                self.detached(*index, path);
            }
        }
        for (id, (index, path)) in &wanted {
            if known.get(id) != Some(index) {
                self.kernel.set_cgroup(*id, Some(*index))?;
            }
            if old.get(id).is_none_or(|(before, _)| before != index) {
                self.attached(*index, path);
            }
        }
        // What nobody reads is changed without a copy.
        drop(now);
        if changed {
            self.replace(|now| now.roots = wanted);
        }
        Ok(changed)
    }

    /// A cgroup was made: it is governed from now on if it is a tenant's. Returns false if it has no path, gone or not there yet.
    pub(super) fn cgroup_made(&self, id: u64) -> Result<bool, EnforcerError> {
        let Some(path) = self.hierarchy.path(id) else {
            return Ok(false);
        };
        self.exempt_changed(&path)?;
        if self.attach(id, &path)? {
            // A process may have been quicker than this event.
            self.reseat_cgroup(&path)?;
        }
        Ok(true)
    }

    /// Governs a cgroup from now on if it is a tenant's and is not governed yet. Whether it was so.
    fn attach(&self, id: u64, path: &str) -> Result<bool, EnforcerError> {
        let _matching = self.matching();
        let now = self.read();
        let index = now
            .policy
            .tenants
            .values()
            .find(|tenant| tenant.cgroup.value.matches(path))
            .and_then(|tenant| now.seating.index(&tenant.name));
        let Some(index) = index else {
            return Ok(false);
        };
        if now.roots.get(&id).is_some_and(|(known, _)| *known == index) {
            return Ok(false);
        }
        drop(now);
        self.kernel.set_cgroup(id, Some(index))?;
        self.replace(|now| now.roots.insert(id, (index, path.to_owned())));
        self.attached(index, path);
        Ok(true)
    }

    /// Governs the tenants' cgroups at `path` and above it now, in case the news of one has not been served yet.
    pub(super) fn govern_now(&self, path: &str) -> Result<(), EnforcerError> {
        for above in crate::cgroup::ancestors(path) {
            if let Some(id) = self.hierarchy.id(above)? {
                self.cgroup_made(id)?;
            }
        }
        Ok(())
    }

    /// A cgroup was removed. Its id never comes back.
    pub(super) fn cgroup_removed(&self, id: u64) -> Result<(), EnforcerError> {
        let _matching = self.matching();
        if !self.read().roots.contains_key(&id) {
            return Ok(());
        }
        let Some((index, path)) = self.replace(|now| now.roots.remove(&id)) else {
            return Ok(());
        };
        self.kernel.set_cgroup(id, None)?;
        self.detached(index, &path);
        Ok(())
    }

    fn attached(&self, index: u32, cgroup: &str) {
        let tenant = self.name_of(index);
        info!(
            message_id = journal::CGROUP,
            tenant, cgroup, "governing a cgroup"
        );
        self.notify(Notice::CgroupAttached {
            tenant,
            cgroup: cgroup.to_owned(),
        });
    }

    fn detached(&self, index: u32, cgroup: &str) {
        let tenant = self.name_of(index);
        info!(
            message_id = journal::CGROUP,
            tenant, cgroup, "a governed cgroup is gone"
        );
        self.notify(Notice::CgroupDetached {
            tenant,
            cgroup: cgroup.to_owned(),
        });
    }

    /// Charges every object to the tenant that its cgroup belongs to now.
    ///
    /// That is where it is charged already, but for what was allocated before its cgroup was governed, or
    /// before the policy changed.
    pub(super) fn reseat(&self) -> Result<(), EnforcerError> {
        self.reseat_objects(self.kernel.objects())
    }

    /// The same for what the processes have that are in a cgroup now.
    fn reseat_cgroup(&self, path: &str) -> Result<(), EnforcerError> {
        let inside: BTreeSet<u32> = self
            .hierarchy
            .walk(path)
            .iter()
            .flat_map(|path| self.hierarchy.processes(path))
            .collect();
        if inside.is_empty() {
            return Ok(());
        }
        let objects = self
            .kernel
            .objects_where(|client| client.mixed != 0 || inside.contains(&client.tgid));
        self.reseat_objects(objects)
    }

    fn reseat_objects(
        &self,
        objects: impl IntoIterator<Item = (ObjectKey, Object)>,
    ) -> Result<(), EnforcerError> {
        let mut tenant_of: BTreeMap<u64, Option<u32>> = BTreeMap::new();
        let mut misplaced: Vec<(ObjectKey, u32, u32, u32)> = Vec::new();
        for (key, object) in objects {
            let wanted = *tenant_of.entry(object.cgroup).or_insert_with(|| {
                let path = self.hierarchy.path(object.cgroup)?;
                Some(self.tenant_at(&path).unwrap_or(NO_TENANT))
            });
            // A cgroup that is gone leaves its charges where they are.
            if let Some(wanted) = wanted
                && wanted != object.tenant
            {
                misplaced.push((key, object.tgid, wanted, object.fd));
            }
        }
        let moved = misplaced.len();
        for (key, tgid, wanted, fd) in misplaced {
            self.kernel.move_object(key, tgid, wanted, fd)?;
        }
        if moved > 0 {
            warn!(moved, "objects came to another tenant");
            self.time.resync();
        }
        Ok(())
    }

    /// The index of the innermost tenant that governs a cgroup path.
    pub(super) fn tenant_at(&self, path: &str) -> Option<u32> {
        let now = self.read();
        self.paths
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .tenant(now.generation, path, || {
                let tenant = now.policy.tenant_of(path)?;
                now.seating.index(&tenant.name)
            })
    }

    /// The name of the tenant at an index, retired ones too.
    pub(super) fn name_of(&self, index: u32) -> String {
        self.read()
            .seating
            .seat(index)
            .map_or_else(|| format!("#{index}"), |seat| seat.name.clone())
    }
}
