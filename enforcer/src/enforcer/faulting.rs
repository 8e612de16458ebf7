//! GPU faults: listening, laying them to tenants, and what a policy wants to follow.

use std::{
    collections::BTreeSet,
    sync::{Arc, MutexGuard, PoisonError},
    thread,
};

use gpuquota_common::map::{MAX_TENANTS, NO_GPU, of_place};
use gpuquota_policy::{FaultBudget, OnXid};
use tracing::{info, warn};

use super::{Enforcer, EnforcerError, system};
use crate::{
    control::{Finding, Notice, Verdict},
    doctor::finding,
    ending::GRACE,
    faults::{
        Attribution, Certainty, Device, Fault, Parties, Source, attribute, printable,
        source::{self, Choice, KernelLog, Listener},
        tally::Tally,
    },
    kernel::xid_tracepoint,
    time::Reason,
};

/// What is known about faults.
#[derive(Debug, Default)]
pub(super) struct Faults {
    choice: Choice,
    pub(super) tally: Tally,
}

impl Parties for Enforcer {
    fn tenant_of(&self, pid: u32) -> Option<Option<u32>> {
        let payer = self
            .kernel
            .accounts()
            .find(|(key, _)| key.tgid == pid)
            .map(|(key, _)| u32::from(key.tenant));
        // A process that never spoke to the driver cannot have caused it: the number has been used again.
        if payer.is_none() && self.kernel.process(pid).is_none() {
            return None;
        }
        let tenant = match self.hierarchy.of_process(pid) {
            Ok(path) => self.tenant_at(&path),
            // Gone already, as processes are after a fault: who paid for it.
            Err(_) => payer.filter(|tenant| *tenant < MAX_TENANTS),
        };
        Some(tenant)
    }

    fn on_gpu(&self, gpu: u32) -> BTreeSet<u32> {
        self.kernel
            .accounts()
            .filter(|(key, bytes)| *bytes > 0 && of_place(u32::from(key.gpu)).0 == gpu)
            .map(|(key, _)| u32::from(key.tenant))
            .filter(|tenant| *tenant < MAX_TENANTS)
            .collect()
    }
}

impl Enforcer {
    /// Starts to listen for faults. A host that tells of none is served without.
    pub(super) fn start_faults(self: &Arc<Self>) -> Result<(), EnforcerError> {
        let settings = &self.config.faults;
        let (choice, listener) =
            source::choose(settings.source, |source| self.open_fault_source(source));
        self.faults().choice = choice.clone();
        let (Some(source), Some(listener)) = (choice.used, listener) else {
            if !choice.refused.is_empty() {
                warn!("GPU faults are not heard of; `gpuquotactl doctor` says why");
            }
            return Ok(());
        };
        let enforcer = Arc::clone(self);
        thread::Builder::new()
            .name("faults".into())
            .spawn(move || {
                listener.run(
                    |fault| enforcer.fault(source, &fault),
                    || enforcer.stopping(),
                );
            })
            .map(drop)
            .map_err(system("starting the thread of GPU faults"))
    }

    fn open_fault_source(&self, source: Source) -> Result<Listener, String> {
        let settings = &self.config.faults;
        match source {
            Source::Tracepoint => {
                let tracepoint = xid_tracepoint().map_err(|error| error.to_string())?;
                self.kernel
                    .watch_xids(&tracepoint)
                    .map(Listener::Tracepoint)
                    .map_err(|error| error.to_string())
            }
            Source::KernelLog => {
                let is_simulated = self.processes.control().inode != 0;
                if is_simulated && settings.source == crate::config::FaultSource::Auto {
                    return Err(
                        "the nodes in gpu.device-dir are not the kernel's driver's, so the kernel's log says nothing of them"
                            .to_owned(),
                    );
                }
                KernelLog::open(&settings.kernel_log)
                    .map(Listener::KernelLog)
                    .map_err(|error| format!("{}: {error}", settings.kernel_log.display()))
            }
            Source::Nvml => {
                let library = self.config.gpu.nvml_library.clone();
                source::nvml_offers(library.as_deref()).map(|()| Listener::Nvml(library))
            }
        }
    }

    pub(super) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A GPU has a fault.
    fn fault(&self, source: Source, fault: &Fault) {
        let Some(gpu) = self.gpu_at(fault.device) else {
            warn!(
                ?fault,
                "a fault of a GPU that is not among those of this host"
            );
            return;
        };
        let attributions = attribute(fault.pid, gpu, self);
        self.faults().tally.note(gpu, fault.xid, &attributions);
        for attribution in attributions {
            let action = self.fault_action(&attribution, gpu, fault.xid);
            self.notify(Notice::Xid {
                tenant: attribution
                    .tenant
                    .map_or_else(String::new, |tenant| self.name_of(tenant)),
                gpu,
                xid: fault.xid,
                pid: attribution.pid.unwrap_or(0),
                certainty: attribution.certainty.as_str().to_owned(),
                source: source.to_string(),
                action: action.as_str().to_owned(),
                message: printable(&fault.text),
            });
            // After the notice: it waits for the driver.
            self.quarantine(&attribution, gpu, fault.xid, action);
        }
    }

    /// NVML's index of a GPU.
    fn gpu_at(&self, device: Device) -> Option<u32> {
        let cards = self.topology.gpus.iter().map(|gpu| &gpu.card);
        match device {
            Device::Index(index) => cards.map(|card| card.index).find(|known| *known == index),
            Device::Pci(address) => cards
                .filter(|card| card.pci == Some(address))
                .map(|card| card.index)
                .next(),
        }
        .filter(|gpu| *gpu != NO_GPU)
    }

    /// What the policy wants, for who is certain to have caused it.
    fn fault_action(&self, attribution: &Attribution, gpu: u32, xid: u32) -> OnXid {
        if attribution.certainty != Certainty::Process || !self.enforcing {
            return OnXid::Notify;
        }
        attribution
            .tenant
            .and_then(|tenant| self.fault_budget(tenant, gpu))
            .filter(|budget| budget.xids.contains(xid))
            .map_or(OnXid::Notify, |budget| budget.on_xid)
    }

    fn fault_budget(&self, tenant: u32, gpu: u32) -> Option<FaultBudget> {
        let now = self.read();
        let name = &now.seating.seat(tenant)?.name;
        let gpu = self.host.gpus.iter().find(|found| found.index == gpu)?;
        Some(now.policy.effective(name, gpu)?.fault)
    }

    fn quarantine(&self, attribution: &Attribution, gpu: u32, xid: u32, action: OnXid) {
        let (Some(tenant), Some(pid)) = (attribution.tenant, attribution.pid) else {
            return;
        };
        let name = self.name_of(tenant);
        match action {
            OnXid::Notify => {}
            OnXid::Freeze => match self.hold(&name, Some(&gpu.to_string()), Reason::Fault, true) {
                Ok(_) => info!(
                    tenant = name,
                    gpu, xid, "it caused a GPU fault: frozen until it is thawed"
                ),
                Err(error) => warn!(tenant = name, gpu, xid, %error, "could not be frozen"),
            },
            OnXid::Kill => {
                warn!(
                    pid,
                    tenant = name,
                    xid,
                    "it caused a GPU fault: it is ended"
                );
                self.endings
                    .end(pid, GRACE, || self.tenant_of(pid) == Some(Some(tenant)));
            }
        }
    }

    /// Where faults are heard of, and why not elsewhere.
    pub(super) fn fault_findings(&self) -> Vec<Finding> {
        let choice = self.faults().choice.clone();
        let reasons: Vec<String> = choice
            .refused
            .iter()
            .map(|(source, why)| format!("not by {source}: {why}"))
            .collect();
        let reasons = reasons.join("; ");
        let (verdict, detail) = match choice.used {
            Some(Source::Nvml) => (
                Verdict::Info,
                format!(
                    "heard of by nvml, which names no process: they are laid to every tenant on the GPU, and fault.on-xid does \
                     nothing ({reasons})"
                ),
            ),
            Some(source) if reasons.is_empty() => (
                Verdict::Ok,
                format!("heard of by {source}, with their process"),
            ),
            Some(source) => (
                Verdict::Ok,
                format!("heard of by {source}, with their process ({reasons})"),
            ),
            None if reasons.is_empty() => (
                Verdict::Info,
                "not listened to (faults.source = \"off\")".to_owned(),
            ),
            None => (Verdict::Warning, format!("not heard of: {reasons}")),
        };
        vec![finding("GPU faults", verdict, detail)]
    }
}
