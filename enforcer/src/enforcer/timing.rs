//! GPU time: what the enforcer tells the time thread, and asks it.

use std::collections::BTreeSet;

use super::{Enforcer, EnforcerError, system};
use crate::{
    control::{ControlError, Held, Uncontrolled},
    time::{Parts, Reason, Settings, rules},
};

impl Enforcer {
    /// Starts to keep GPU time. What an earlier daemon left frozen is thawed before this returns.
    pub(super) fn start_time(&self) -> Result<(), EnforcerError> {
        if !self.known_driver {
            return Ok(());
        }
        self.time
            .start(Parts {
                kernel: self.kernel.clone(),
                processes: self.processes.clone(),
                node: self.processes.control(),
                settings: Settings {
                    round: self.config.time.round,
                    period: self.config.time.period,
                },
                library: self.config.gpu.nvml_library.clone(),
            })
            .map_err(system("starting the time thread"))?;
        self.tell_time_rules();
        Ok(())
    }

    /// Tells the time thread what the policy in force says.
    pub(super) fn tell_time_rules(&self) {
        let rules = {
            let now = self.read();
            rules(&now.policy, &now.seating, &self.host.gpus)
        };
        self.time.rules(rules);
    }

    /// Freezes or thaws a tenant on one GPU or on all.
    pub(super) fn hold(
        &self,
        tenant: &str,
        gpu: Option<&str>,
        reason: Reason,
        on: bool,
    ) -> Result<Held, ControlError> {
        self.known_tenant(tenant)?;
        let gpus = match gpu {
            Some(selector) => self.known_gpus(selector)?,
            None => self.host.gpus.iter().map(|gpu| gpu.index).collect(),
        };
        let held = self.time.hold(tenant, gpus, reason, on)?;
        let frozen: BTreeSet<u32> = held.frozen.into_iter().collect();
        Ok(Held {
            frozen: frozen.into_iter().collect(),
            uncontrolled: held
                .out_of_reach
                .into_iter()
                .map(|(pid, why)| Uncontrolled { pid, why })
                .collect(),
        })
    }
}
