//! Managed memory: charging it by its ranges, refusing it, and finding what was mapped without asking.

use std::collections::BTreeMap;

use gpuquota_common::map::{DeviceKey, MAX_GPUS, NO_TENANT, managed_key, settings_flags};
use gpuquota_policy::{Managed, OnBreach};
use tracing::{error, warn};

use super::{
    Enforcer,
    contexts::{Homes, KnownByPlace, contexts_in},
    watching::process_of,
};
use crate::{
    control::{Finding, Notice, Verdict},
    doctor,
    driver::{Driver as _, nvidia::Nvidia},
    ending::GRACE,
    kernel::{ApartCharge, KernelError},
    managed::{self, Range},
    notify::supervisor::Waiting,
};

impl Enforcer {
    /// Whether a process may keep the range that it has just mapped and asks the driver about.
    ///
    /// What it has besides is read off its mappings first: nothing else tells when managed memory is freed.
    pub(super) fn admits_managed(&self, waiting: &Waiting, tenant: u32, range: Range) -> bool {
        let tgid = process_of(waiting.thread);
        let (Some(node), Some(process)) = (self.uvm_node(), self.kernel.process(tgid)) else {
            return true;
        };
        if range.base == process.pool || process.home >= MAX_GPUS {
            return true;
        }
        let gpu = process.home;
        let Some(budget) = self.memory_budget(tenant, gpu) else {
            return true;
        };
        let answer = match budget.managed {
            Managed::Ignore => Ok(true),
            Managed::Deny => self
                .kernel
                .refuse_managed(waiting.thread, tenant, gpu, range.length)
                .map(|()| false),
            Managed::Charge => self.charge_range(tgid, (tenant, gpu), node, range),
        };
        answer.unwrap_or_else(|error| {
            error!(%error, tgid, "the ledger does not answer; refused managed memory");
            false
        })
    }

    /// Charges a range that is mapped already, if the budget allows it.
    fn charge_range(
        &self,
        tgid: u32,
        (tenant, gpu): (u32, u32),
        node: DeviceKey,
        range: Range,
    ) -> Result<bool, KernelError> {
        let Some((_, cgroup)) = self.home(tgid) else {
            return Ok(true);
        };
        let others: u64 = managed::ranges(tgid, node, self.contexts_of(tgid))
            .unwrap_or_default()
            .iter()
            .filter(|other| other.base != range.base)
            .map(|other| other.length)
            .sum();
        let charge = |bytes| ApartCharge {
            tgid,
            gpu,
            tenant,
            cgroup,
            bytes,
            report: false,
            managed: true,
        };
        let charged = self
            .kernel
            .object(managed_key(tgid, gpu))
            .map_or(0, |object| object.bytes);
        if others < charged {
            self.kernel.charge_apart(&charge(others))?;
        }
        self.kernel.admit_apart(&charge(others + range.length))
    }

    /// Charges managed memory by the ranges that processes have mapped; returns what is charged by tenant and GPU.
    ///
    /// A range that may be waiting for its answer at this moment is taken for one that nobody was asked about only if it is
    /// still there at the next look.
    pub(super) fn charge_managed(
        &self,
        known: &KnownByPlace,
        homes: &Homes,
        suspects: &mut BTreeMap<u32, u64>,
    ) -> BTreeMap<(u32, u32), u64> {
        let mut sums = BTreeMap::new();
        let Some(node) = self.uvm_node() else {
            return sums;
        };
        let suspected = std::mem::take(suspects);
        for (tgid, (_, gpu)) in homes {
            let of_process = known.get(&(*tgid, *gpu)).copied().unwrap_or_default();
            let Some((tenant, cgroup)) =
                self.home(*tgid).filter(|(tenant, _)| *tenant != NO_TENANT)
            else {
                continue;
            };
            let Some(budget) = self.memory_budget(tenant, *gpu) else {
                continue;
            };
            let ranges = match budget.managed {
                Managed::Ignore => Ok(Vec::new()),
                _ => managed::ranges(*tgid, node, contexts_in(known, *tgid)),
            };
            // A process that is gone gives its charges back in another way.
            let Ok(ranges) = ranges else { continue };
            let bytes: u64 = ranges.iter().map(|range| range.length).sum();
            let grows = bytes > of_process.managed;
            let is_asked_about = self.choice.supervised || budget.managed == Managed::Deny;
            if grows && is_asked_about && suspected.get(tgid).is_none_or(|seen| *seen < bytes) {
                suspects.insert(*tgid, bytes);
                *sums.entry((tenant, *gpu)).or_default() += of_process.managed;
                continue;
            }
            *sums.entry((tenant, *gpu)).or_default() += bytes;
            if bytes == of_process.managed {
                continue;
            }
            let charged = self.kernel.charge_apart(&ApartCharge {
                tgid: *tgid,
                gpu: *gpu,
                tenant,
                cgroup,
                bytes,
                report: grows && self.is_observed(*tgid),
                managed: true,
            });
            if let Err(error) = charged {
                error!(%error, tgid, "managed memory is not charged");
            }
            if grows && budget.managed == Managed::Deny {
                self.answer_managed(tenant, *gpu, *tgid, bytes);
            }
        }
        sums
    }

    /// What happens to managed memory on this host.
    pub(super) fn managed_finding(&self) -> Finding {
        if self.uvm_node().is_none() {
            return doctor::finding(
                "managed memory",
                Verdict::Warning,
                "is not charged: the driver has no nvidia-uvm node; `nvidia-modprobe -u -c 0` makes it, and it is found then"
                    .to_owned(),
            );
        }
        let fails = self
            .kernel
            .settings()
            .is_ok_and(|settings| settings.flags & settings_flags::FAILS_CALLS != 0);
        let refuses = match (self.choice.supervised, fails) {
            (true, true) => {
                "started by `gpuquotactl run` are refused it above memory.max, and all where memory.managed denies it"
            }
            (true, false) => {
                "started by `gpuquotactl run` are refused it above memory.max or where memory.managed denies it"
            }
            (false, true) => "are refused it where memory.managed denies it",
            (false, false) => "are not refused it on this host",
        };
        doctor::finding(
            "managed memory",
            Verdict::Info,
            format!(
                "processes {refuses}; else it is charged by what they have mapped, when the ledger is compared with NVML, and \
                 memory.on-breach answers"
            ),
        )
    }

    /// A process has managed memory although its tenant may have none, and no backend was asked.
    fn answer_managed(&self, tenant: u32, gpu: u32, tgid: u32, bytes: u64) {
        self.notify(Notice::Breached {
            tenant: self.name_of(tenant),
            key: "memory.managed".to_owned(),
            gpu,
            pid: tgid,
            requested: bytes,
            used: bytes,
            limit: 0,
        });
        let kills = self
            .memory_budget(tenant, gpu)
            .is_some_and(|memory| memory.on_breach == OnBreach::Kill);
        if kills && self.choice.answers_breaches() && self.is_observed(tgid) {
            warn!(
                pid = tgid,
                tenant = self.name_of(tenant),
                "has managed memory, which memory.managed denies: it is ended"
            );
            self.endings.end(tgid, GRACE, || {
                self.home(tgid).is_some_and(|(home, _)| home == tenant)
            });
        }
    }

    /// The driver's node for managed memory, once it is there.
    pub(super) fn uvm_node(&self) -> Option<DeviceKey> {
        self.managed_node.get().copied()
    }

    /// Looks for that node, which the driver makes on the first use of managed memory, perhaps long after the daemon's start.
    pub(super) fn find_managed_node(&self) {
        if self.managed_node.get().is_some() {
            return;
        }
        let Some((key, device)) = Nvidia::new(&self.config.gpu.device_dir).managed_node() else {
            return;
        };
        match self.kernel.add_device(key, device) {
            Ok(()) => {
                let _ = self.managed_node.set(key);
            }
            Err(error) => error!(%error, "managed memory is not charged"),
        }
    }
}
