//! Processes that were there before the daemon: taken into the ledger, and under control of their GPU time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    thread,
};

use gpuquota_common::map::{NO_TENANT, kind};
use tracing::{info, warn};

use super::{Enforcer, EnforcerError, auditing::Audit, system};
use crate::{
    driver::nvidia,
    lifecycle::ProcessView as _,
    stir::Stir,
    time::{
        act::Reach,
        adopt::{self, AdoptError},
    },
};

/// What was looked at.
#[derive(Default)]
struct Seen {
    /// Processes, by number and start.
    settled: BTreeSet<(u32, u64)>,
    /// Those that could not be adopted.
    out_of_reach: BTreeSet<u32>,
}

impl Enforcer {
    /// Starts to look for processes that NVML knows and the ledger does not.
    pub(super) fn start_adopting(self: &Arc<Self>) -> Result<(), EnforcerError> {
        let enforcer = Arc::downgrade(self);
        let stir = Arc::clone(&self.stir);
        thread::Builder::new()
            .name("adopt".into())
            .spawn(move || look(&enforcer, &stir))
            .map(drop)
            .map_err(system("starting the thread that adopts processes"))
    }

    fn adopt_strangers(&self, seen: &mut Seen) {
        let Some(snapshot) = self.telemetry.latest() else {
            return;
        };
        let mut here = BTreeSet::new();
        let mut strangers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for card in &snapshot.cards {
            for (tgid, _) in &card.processes {
                // Its number is of another namespace, or it is gone.
                let Some(started) = self.processes.started(*tgid) else {
                    continue;
                };
                here.insert((*tgid, started));
                if !seen.settled.contains(&(*tgid, started)) {
                    strangers.entry(*tgid).or_default().push(card.index);
                }
            }
        }
        seen.settled.retain(|process| here.contains(process));
        seen.out_of_reach.retain(|tgid| {
            let lives = here.iter().any(|(here, _)| here == tgid);
            if !lives {
                self.time.ended(*tgid);
            }
            lives
        });
        if strangers.is_empty() {
            return;
        }
        let structure = self.kernel.structure();
        let with = |wanted: u32| -> BTreeSet<u32> {
            structure
                .iter()
                .filter(|(_, object)| object.kind == wanted)
                .map(|(_, object)| object.tgid)
                .collect()
        };
        let (known, clients) = (with(kind::CHANNEL_GROUP), with(kind::CLIENT));
        let since = self.processes.started(std::process::id());
        for (tgid, gpus) in strangers {
            let Some(process) = here.iter().find(|(here, _)| *here == tgid) else {
                continue;
            };
            // Who is in no tenant now may come into one with the next policy.
            let Some((tenant, cgroup)) = self.governed(tgid) else {
                continue;
            };
            seen.settled.insert(*process);
            // One that came after the daemon was seen from its first call on: without a channel there is nothing to control.
            let is_younger = since.is_some_and(|since| process.1 > since);
            if known.contains(&tgid) || is_younger && clients.contains(&tgid) {
                continue;
            }
            match self.adopt(tgid, tenant, cgroup) {
                Ok(objects) => {
                    info!(tgid, objects, "was there before the daemon: taken over");
                    self.time.resync();
                }
                Err(AdoptError::Act(error)) if error.is_gone() => {}
                Err(error) => {
                    seen.out_of_reach.insert(tgid);
                    for gpu in gpus {
                        self.time.stranger(gpu, tgid, tenant, error.to_string());
                    }
                }
            }
        }
    }

    fn governed(&self, tgid: u32) -> Option<(u32, u64)> {
        let path = self.hierarchy.of_process(tgid).ok()?;
        let tenant = self.tenant_at(&path)?;
        let cgroup = self.hierarchy.id(&path).ok()??;
        (tenant != NO_TENANT).then_some((tenant, cgroup))
    }

    fn adopt(&self, tgid: u32, tenant: u32, cgroup: u64) -> Result<usize, AdoptError> {
        let node = self.processes.control();
        let reach = Reach::open(tgid, None, &*self.processes)?;
        let others: BTreeSet<u32> = self
            .kernel
            .structure()
            .into_iter()
            .filter(|(key, object)| object.kind == kind::CLIENT && key.client == key.handle)
            .map(|(key, _)| key.client)
            .collect();
        let gpus: BTreeMap<String, u32> = self
            .host
            .gpus
            .iter()
            .map(|gpu| (gpu.uuid.clone(), gpu.index))
            .collect();
        let own = nvidia::fresh_client(&self.config.gpu.device_dir).unwrap_or(0);
        let found = adopt::find(&reach, node, &others, own, &gpus)?;
        let start_ns = self.processes.start_ns(reach.started());
        self.kernel
            .adopt_process(tgid, start_ns, tenant, cgroup)
            .map_err(crate::time::act::ActError::from)?;
        let mut taken = 0;
        for (key, mut object) in found {
            object.tenant = tenant;
            object.cgroup = cgroup;
            match self.kernel.adopt_object(key, &object) {
                Ok(()) => taken += 1,
                Err(error) => {
                    warn!(%error, tgid, "an object of a process that was there before is not recorded");
                }
            }
        }
        Ok(taken)
    }
}

fn look(enforcer: &Weak<Enforcer>, stir: &Stir) {
    let mut seen = Seen::default();
    let mut audit = Audit::default();
    loop {
        let interval = {
            let Some(enforcer) = enforcer.upgrade() else {
                return;
            };
            if enforcer.stopping() {
                return;
            }
            enforcer.adopt_strangers(&mut seen);
            enforcer.audit(&mut audit);
            enforcer.config.enforcement.reconcile_interval
        };
        stir.pause(interval);
    }
}
