//! Idle GPUs and the rest of the daemon: whose threads are followed, and what we do to them.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use gpuquota_common::map::MAX_GPUS;

use super::Enforcer;
use crate::{
    cgroup,
    control::{Finding, Verdict, leaks::Target},
    doctor,
    idle::Watched,
    kernel,
    profile::Host,
};

impl Watched for Enforcer {
    fn members(&self, target: &Target) -> Vec<u32> {
        let name = match target {
            Target::Process(pid) => return vec![*pid],
            Target::Tenant(name) => name,
        };
        let roots: Vec<(u32, String)> = self.read().roots.values().cloned().collect();
        let mut found = BTreeSet::new();
        for (tenant, path) in roots {
            if self.is_within(tenant, name) {
                for below in self.hierarchy.walk(&path) {
                    found.extend(self.hierarchy.processes(&below));
                }
            }
        }
        found.into_iter().collect()
    }

    fn contexts(&self) -> Vec<(u32, u32)> {
        // What a process is charged for on a GPU is known at once, what NVML knows is complete.
        let charged = self
            .kernel
            .accounts()
            .filter(|(key, bytes)| u32::from(key.gpu) < MAX_GPUS && *bytes > 0)
            .map(|(key, _)| (u32::from(key.gpu), key.tgid));
        let mut found: BTreeSet<(u32, u32)> = charged.collect();
        if let Some(snapshot) = self.telemetry.latest() {
            for card in &snapshot.cards {
                found.extend(card.processes.iter().map(|(pid, _)| (card.index, *pid)));
            }
        }
        found.into_iter().collect()
    }

    fn frozen(&self) -> Vec<(u32, u32)> {
        let frozen = self.kernel.frozen();
        let places: BTreeSet<(u32, u32)> = frozen
            .into_iter()
            .map(|(key, _)| (key.gpu, key.tgid))
            .collect();
        places.into_iter().collect()
    }

    fn holds(&self, pid: u32) -> bool {
        if self.launches.stops(pid) {
            return true;
        }
        let frozen = self.kernel.launch().record.frozen();
        if frozen.is_empty() {
            return false;
        }
        let Ok(path) = self.hierarchy.of_process(pid) else {
            return false;
        };
        let now = self.read();
        frozen
            .iter()
            .filter_map(|id| now.roots.get(id))
            .any(|(_, root)| cgroup::is_within(&path, root))
    }

    fn budget(&self, pid: u32) -> f64 {
        Host::rules(self, pid).budget
    }

    fn library(&self) -> Option<PathBuf> {
        self.config.gpu.nvml_library.clone()
    }
}

impl Enforcer {
    /// Lets looks at idle GPUs ask whom they are about.
    pub(super) fn offer_idle(self: &Arc<Self>) {
        let own: Arc<dyn Watched> = Arc::clone(self) as _;
        self.idle.ask(&own);
    }

    /// A line for `doctor`.
    pub(super) fn idle_finding(&self) -> Finding {
        let detail = if cfg!(not(target_arch = "x86_64")) {
            "follows stacks, and tells what calls wait for, on x86-64 only".to_owned()
        } else if let Some((major, minor)) = kernel::idle::too_old() {
            format!(
                "off: looks need Linux 5.18 or later, and this is {major}.{minor}: they are likely to be refused"
            )
        } else {
            match self.idle.running() {
                0 => "off: no program is on the context switches of this host; `gpuquotactl idle` turns it on"
                    .to_owned(),
                running => format!("looks that have a program on the context switches: {running}"),
            }
        };
        doctor::finding("idle GPUs", Verdict::Info, detail)
    }
}
