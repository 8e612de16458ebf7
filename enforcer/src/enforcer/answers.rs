//! Answers to users: the [`Control`] of a running daemon.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use gpuquota_common::{
    claim,
    map::{MAX_GPUS, MAX_TENANTS, NO_TENANT, counter, host_place, of_place},
};
use gpuquota_policy::MemoryBudget;
use serde_json::json;
use tokio::sync::broadcast;

use super::{Enforcer, EnforcerError};
use crate::{
    backend,
    config::MemoryBackend,
    control::{
        Backend, BackendState, Control, ControlError, Finding, Gpu, Held, Notice, PolicyLoaded,
        ProcessUse, QuotaChange, Tenant, TenantGpu, Verdict,
        idle::IdleReport,
        insight::{HeatRow, MemoryHistory},
        leaks::{LeakReport, Target},
        memory::TenantMemory,
        profile::ProfileReport,
    },
    doctor,
    time::Reason,
};

/// Charged bytes of processes by tenant index and place.
type Holdings = BTreeMap<(u32, u32), Vec<(u32, u64)>>;

impl Control for Enforcer {
    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").to_owned()
    }

    fn backends(&self) -> Vec<Backend> {
        let mut backends =
            backend::describe(self.config.enforcement.memory, &self.lacking, self.choice);
        if !self.enforcing && self.config.enforcement.memory != MemoryBackend::Observe {
            for backend in &mut backends {
                if backend.state == BackendState::Available {
                    "the driver version is not known: nothing is refused; see gpu.accept-driver"
                        .clone_into(&mut backend.reason);
                }
            }
        }
        backends
    }

    fn policy_generation(&self) -> u64 {
        self.read().generation
    }

    fn gpus(&self) -> Vec<Gpu> {
        let latest = self.telemetry.latest();
        self.topology
            .gpus
            .iter()
            .map(|gpu| Gpu {
                index: gpu.card.index,
                uuid: gpu.card.uuid.clone(),
                name: gpu.card.name.clone(),
                memory_total: gpu.card.memory_total,
                memory_used: latest.as_ref().and_then(|snapshot| {
                    let card = snapshot
                        .cards
                        .iter()
                        .find(|card| card.uuid == gpu.card.uuid)?;
                    Some(card.memory_used)
                }),
            })
            .collect()
    }

    fn tenants(&self) -> Vec<Tenant> {
        let holdings = self.holdings();
        let names: Vec<String> = self.read().policy.tenants.keys().cloned().collect();
        names
            .iter()
            .filter_map(|name| self.describe(name, &holdings))
            .collect()
    }

    fn tenant(&self, name: &str) -> Result<Tenant, ControlError> {
        self.describe(name, &self.holdings())
            .ok_or_else(|| ControlError::NoSuchTenant(name.to_owned()))
    }

    fn tenant_by_pid(&self, pid: u32) -> Result<Tenant, ControlError> {
        let path = self
            .hierarchy
            .of_process(pid)
            .map_err(|_| ControlError::NoSuchProcess(pid))?;
        let index = self.tenant_at(&path).ok_or(ControlError::Ungoverned(pid))?;
        self.tenant(&self.name_of(index))
    }

    fn set_quota(&self, change: &QuotaChange) -> Result<PathBuf, ControlError> {
        self.known_tenant(&change.tenant)?;
        if let Some(gpu) = &change.gpu {
            self.known_gpus(gpu)?;
        }
        self.change_properties(change).map_err(control_error)
    }

    fn reset_quota(&self, tenant: &str, properties: &[String]) -> Result<(), ControlError> {
        self.known_tenant(tenant)?;
        self.reset_properties(tenant, properties)
            .map_err(control_error)
    }

    fn reload(&self) -> Result<PolicyLoaded, ControlError> {
        self.reload_policy().map_err(control_error)
    }

    fn freeze(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ControlError> {
        self.hold(tenant, gpu, Reason::Command, true)
    }

    fn thaw(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ControlError> {
        // Whatever froze it for good, an admin's word undoes it.
        self.hold(tenant, gpu, Reason::Fault, false)?;
        // Whoever crossed memory.high may go on by command as well.
        self.hold(tenant, gpu, Reason::MemoryHigh, false)?;
        self.hold(tenant, gpu, Reason::Command, false)
    }

    fn doctor(&self) -> Vec<Finding> {
        let mut findings = doctor::host();
        findings.extend(self.own_findings());
        findings
    }

    fn memory_history(
        &self,
        tenant: Option<&str>,
        since: Duration,
    ) -> Result<Vec<MemoryHistory>, ControlError> {
        self.remembered(tenant, since)
    }

    fn memory_heat_map(&self, since: Duration, columns: u32) -> Vec<HeatRow> {
        self.heat(since, columns)
    }

    fn start_leaks(&self, target: Target, limit: Duration) -> Result<(), ControlError> {
        self.start_look(&target, limit)
    }

    fn leaks(&self, target: &Target) -> Result<LeakReport, ControlError> {
        Ok(self.leaks.report(target)?)
    }

    fn stop_leaks(&self, target: &Target) -> Result<LeakReport, ControlError> {
        Ok(self.leaks.stop(target)?)
    }

    fn leak_targets(&self) -> Vec<Target> {
        self.leaks.targets()
    }

    fn start_profile(&self, target: Target, limit: Duration) -> Result<(), ControlError> {
        self.known_target(&target)?;
        Ok(self.profiles.start(&target, limit)?)
    }

    fn profile(&self, target: &Target) -> Result<ProfileReport, ControlError> {
        Ok(self.profiles.report(target)?)
    }

    fn stop_profile(&self, target: &Target) -> Result<ProfileReport, ControlError> {
        Ok(self.profiles.stop(target)?)
    }

    fn profile_targets(&self) -> Vec<Target> {
        self.profiles.targets()
    }

    fn start_idle(&self, target: Target, limit: Duration) -> Result<(), ControlError> {
        self.known_target(&target)?;
        Ok(self.idle.start(&target, limit)?)
    }

    fn idle(&self, target: &Target) -> Result<IdleReport, ControlError> {
        Ok(self.idle.report(target)?)
    }

    fn stop_idle(&self, target: &Target) -> Result<IdleReport, ControlError> {
        Ok(self.idle.stop(target)?)
    }

    fn idle_targets(&self) -> Vec<Target> {
        self.idle.targets()
    }

    fn dump_state(&self) -> serde_json::Value {
        let now = self.read();
        let seats: Vec<_> = now
            .seating
            .all()
            .map(|(index, seat)| {
                json!({"index": index, "name": seat.name, "parent": seat.parent, "in_force": seat.in_force})
            })
            .collect();
        let roots: Vec<_> = now
            .roots
            .iter()
            .map(|(id, (index, path))| json!({"id": id, "tenant": index, "path": path}))
            .collect();
        let objects: Vec<_> = self
            .kernel
            .objects()
            .map(|(key, object)| {
                json!({
                    "client": key.client, "handle": key.handle, "kind": object.kind, "class": object.class,
                    "parent": object.parent, "bytes": object.bytes, "tgid": object.tgid, "gpu": of_place(object.gpu).0,
                    "tenant": (object.tenant != NO_TENANT).then_some(object.tenant), "cgroup": object.cgroup,
                })
            })
            .collect();
        let accounts: Vec<_> = self
            .kernel
            .accounts()
            .map(|(key, bytes)| {
                let (gpu, host) = of_place(u32::from(key.gpu));
                json!({"tgid": key.tgid, "tenant": key.tenant, "gpu": gpu, "host": host, "bytes": bytes})
            })
            .collect();
        let usage: Vec<_> = now
            .seating
            .all()
            .flat_map(|(index, _)| (0..self.gpu_count()).map(move |gpu| (index, gpu)))
            .flat_map(|(index, gpu)| [(index, gpu), (index, host_place(gpu))])
            .filter_map(|(index, place)| {
                let usage = self.kernel.usage(index, place).ok()?;
                let (gpu, host) = of_place(place);
                Some(json!({
                    "tenant": index, "gpu": gpu, "host": host, "memory": usage.memory, "peak": usage.peak,
                    "claim": claim::bytes(claim::used(usage.claim)),
                    "reserved": claim::bytes(claim::reserved(usage.claim)),
                }))
            })
            .collect();
        let cards: Vec<_> = (0..self.gpu_count())
            .filter_map(|gpu| {
                let card = self.kernel.card(gpu).ok()?;
                Some(json!({"gpu": gpu, "claim": claim::bytes(claim::used(card.claim))}))
            })
            .collect();
        json!({
            "generation": now.generation,
            "cards": cards,
            "seats": seats,
            "cgroups": roots,
            "objects": objects,
            "accounts": accounts,
            "usage": usage,
            "in_flight": self.kernel.in_flight().count(),
            "admitted": self.kernel.admitted().count(),
            "processes": self.kernel.processes().len(),
            "counters": self.kernel.counters().ok(),
            "time": self.time.dump(),
        })
    }

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }
}

impl Enforcer {
    pub(super) fn known_tenant(&self, name: &str) -> Result<(), ControlError> {
        if self.read().policy.tenants.contains_key(name) {
            return Ok(());
        }
        Err(ControlError::NoSuchTenant(name.to_owned()))
    }

    /// Indices of the GPUs that a selector names.
    pub(super) fn known_gpus(&self, selector: &str) -> Result<Vec<u32>, ControlError> {
        let found: Vec<u32> = gpuquota_policy::GpuSelector::parse(selector)
            .into_iter()
            .flat_map(|selector| {
                self.host
                    .gpus
                    .iter()
                    .filter(move |gpu| selector.matches(gpu))
            })
            .map(|gpu| gpu.index)
            .collect();
        if found.is_empty() {
            return Err(ControlError::NoSuchGpu(selector.to_owned()));
        }
        Ok(found)
    }

    fn holdings(&self) -> Holdings {
        let mut holdings = Holdings::new();
        for (key, bytes) in self.kernel.accounts() {
            if bytes > 0 && u32::from(key.tenant) < MAX_TENANTS {
                holdings
                    .entry((u32::from(key.tenant), u32::from(key.gpu)))
                    .or_default()
                    .push((key.tgid, bytes));
            }
        }
        holdings
    }

    fn describe(&self, name: &str, holdings: &Holdings) -> Option<Tenant> {
        let now = self.read();
        let policy = now.policy.tenants.get(name)?;
        let index = now.seating.index(name)?;
        let gpus = self
            .host
            .gpus
            .iter()
            .filter_map(|gpu| {
                let budget = now.policy.effective(name, gpu)?;
                let usage = self.kernel.usage(index, gpu.index).ok()?;
                let processes = holdings
                    .get(&(index, gpu.index))
                    .into_iter()
                    .flatten()
                    .map(|(pid, bytes)| ProcessUse {
                        pid: *pid,
                        comm: doctor::comm(*pid),
                        memory_used: *bytes,
                    })
                    .collect();
                Some(TenantGpu {
                    gpu: gpu.index,
                    uuid: gpu.uuid.clone(),
                    memory_max: budget.memory.max,
                    memory_high: budget.memory.high,
                    memory_used: usage.memory,
                    memory_peak: usage.peak,
                    denials: usage.denials,
                    breaches: usage.breaches,
                    processes,
                    memory: self.describe_memory(index, gpu.index, &budget.memory, holdings)?,
                    time: self.time.status(index, gpu.index),
                })
            })
            .collect();
        Some(Tenant {
            name: name.to_owned(),
            cgroup: policy.cgroup.value.to_string(),
            class: policy.class.as_ref().map(|class| class.value.clone()),
            parent: now.seating.seat(index)?.parent.clone(),
            cgroups: now
                .roots
                .values()
                .filter(|(root, _)| *root == index)
                .map(|(_, path)| path.clone())
                .collect(),
            gpus,
            launch: self.launches.usage(index),
        })
    }

    fn describe_memory(
        &self,
        index: u32,
        gpu: u32,
        budget: &MemoryBudget,
        holdings: &Holdings,
    ) -> Option<TenantMemory> {
        let place = host_place(gpu);
        let usage = self.kernel.usage(index, place).ok()?;
        let sums = self.sums(index, gpu);
        Some(TenantMemory {
            context: sums.context,
            managed: sums.managed,
            drift: sums.drift,
            pressure: self.memory_pressure(index, gpu).into(),
            min: budget.min,
            host_max: budget.host,
            host_used: usage.memory,
            host_peak: usage.peak,
            host_denials: usage.denials,
            host_breaches: usage.breaches,
            host_processes: holdings.get(&(index, place)).cloned().unwrap_or_default(),
        })
    }

    /// What only the running daemon knows.
    fn own_findings(&self) -> Vec<Finding> {
        let mut findings = vec![doctor::driver_version(&self.driver_version, self.enforcing)];
        findings.extend(self.backends().iter().map(doctor::backend));
        if self.enforcing {
            findings.push(doctor::compat(self.refuses_compat()));
        }
        findings.extend(self.topology.gpus.iter().map(doctor::gpu));
        findings.extend(self.time_findings());
        findings.extend(self.fault_findings());
        findings.push(match &self.unpinned {
            None => doctor::finding(
                "pins",
                Verdict::Ok,
                format!(
                    "the ledger outlives the daemon in {}",
                    self.config.bpf_directory.display()
                ),
            ),
            Some(why) => doctor::finding(
                "pins",
                Verdict::Warning,
                format!("{why}; a restart of the daemon forgets the ledger"),
            ),
        });
        findings.push(if self.telemetry.latest().is_some() {
            doctor::finding("NVML", Verdict::Ok, "answers".to_owned())
        } else {
            doctor::finding(
                "NVML",
                Verdict::Warning,
                "has not answered lately; enforcement goes on, usage of the cards is not shown"
                    .to_owned(),
            )
        });
        findings.push(self.managed_finding());
        if let Ok(counters) = self.kernel.counters() {
            findings.extend(doctor::counters(&counters));
        }
        findings.extend(self.kernel.passed_over().ok().and_then(doctor::passed_over));
        findings.extend(self.launches.findings());
        findings.push(self.leak_finding());
        findings.push(self.idle_finding());
        findings.extend(self.profile_findings());
        findings.extend(self.ungoverned());
        let now = self.read();
        findings.extend(
            now.warnings
                .iter()
                .map(|warning| doctor::finding("policy", Verdict::Warning, warning.clone())),
        );
        for tenant in now.policy.tenants.values() {
            let exists = now
                .seating
                .index(&tenant.name)
                .is_some_and(|index| now.roots.values().any(|(root, _)| *root == index));
            if !exists {
                findings.push(doctor::finding(
                    &format!("tenant {}", tenant.name),
                    Verdict::Info,
                    format!(
                        "no cgroup {} yet; it is governed from the moment it appears",
                        tenant.cgroup.value
                    ),
                ));
            }
        }
        findings
    }

    /// Whether something in the kernel refuses to tenants the allocations of 32-bit callers.
    fn refuses_compat(&self) -> bool {
        match self.choice.everywhere {
            MemoryBackend::Override | MemoryBackend::Lsm => true,
            // The security hook beside it does, where there is one.
            MemoryBackend::Rewrite => self.lacking.reason(MemoryBackend::Lsm).is_none(),
            _ => false,
        }
    }

    /// GPU clients that no tenant pays for.
    fn ungoverned(&self) -> Option<Finding> {
        let outside: Vec<String> = self
            .kernel
            .accounts()
            .filter(|(key, bytes)| {
                *bytes > 0 && u32::from(key.tenant) >= MAX_TENANTS && u32::from(key.gpu) < MAX_GPUS
            })
            .map(|(key, _)| format!("{} ({})", key.tgid, doctor::comm(key.tgid)))
            .collect();
        (!outside.is_empty()).then(|| {
            doctor::finding(
                "processes outside every tenant",
                Verdict::Warning,
                format!("use GPU memory without a limit: {}", outside.join(", ")),
            )
        })
    }
}

fn control_error(error: EnforcerError) -> ControlError {
    match error {
        EnforcerError::Policy(diagnostics) => ControlError::BadPolicy(diagnostics.to_string()),
        EnforcerError::Tenancy(error) => ControlError::BadPolicy(error.to_string()),
        EnforcerError::Property(error) => ControlError::BadProperty(error.to_string()),
        error @ EnforcerError::Shadowed { .. } => ControlError::BadProperty(error.to_string()),
        EnforcerError::File(error) => ControlError::Io {
            path: error.path,
            source: error.source,
        },
        other => ControlError::Kernel(other.to_string()),
    }
}

/// Counters that an admin has to know about if they are not zero.
pub(crate) const ALARMS: &[(u32, &str, &str)] = &[
    (
        counter::EVENTS_LOST,
        "events lost",
        "healed by looking at everything again",
    ),
    (
        counter::INFLIGHT_FULL,
        "calls not followed",
        "too many at once; their memory is not charged",
    ),
    (
        counter::OBJECTS_FULL,
        "objects not recorded",
        "the map is full; they are released with their process",
    ),
    (
        counter::PROCESSES_FULL,
        "processes not recorded",
        "the map is full",
    ),
    (
        counter::NOT_REFUSED,
        "refusals without effect",
        "the caller's memory could not be written; the call failed with an error number, or went on and was answered by memory.on-breach",
    ),
    (
        counter::CHANGED_FREES,
        "frees that were changed while they were made",
        "nothing was released by them; the driver is asked what it still has",
    ),
    (
        counter::UNKNOWN_GPU,
        "allocations on an unknown GPU",
        "their clients were there before the daemon",
    ),
];
