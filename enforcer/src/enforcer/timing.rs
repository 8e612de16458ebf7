//! GPU time: what the enforcer tells the time thread, and asks it.

use std::{collections::BTreeSet, sync::Arc};

use gpuquota_policy::format_duration;

use super::{Enforcer, EnforcerError, system};
use crate::{
    control::{ControlError, Finding, Held, Uncontrolled, Verdict},
    doctor::finding,
    time::{Parts, Reason, Settings, rules},
};

impl Enforcer {
    /// Starts to keep GPU time. What an earlier daemon left frozen is thawed before this returns.
    pub(super) fn start_time(self: &Arc<Self>) -> Result<(), EnforcerError> {
        if !self.known_driver {
            return Ok(());
        }
        let launches = Arc::clone(&self.launches);
        self.time
            .start(Parts {
                kernel: self.kernel.clone(),
                processes: self.processes.clone(),
                node: self.processes.control(),
                settings: Settings {
                    round: self.config.time.round,
                    period: self.config.time.period,
                    least_slice: self.config.time.least_slice,
                },
                energy: Arc::clone(&self.energy),
                library: self.config.gpu.nvml_library.clone(),
                last_launch: Box::new(move |tgid| launches.last_launch(tgid)),
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

    /// How it stands with the control of GPU time.
    pub(super) fn time_findings(&self) -> Vec<Finding> {
        if !self.time.is_on() {
            let why = if self.known_driver {
                "its thread has ended by a fault, see the log; restart the daemon"
            } else {
                "the driver version is not known; see gpu.accept-driver"
            };
            return vec![finding(
                "GPU time",
                Verdict::Warning,
                format!("not controlled: {why}"),
            )];
        }
        let mut findings = vec![finding(
            "GPU time",
            Verdict::Ok,
            format!(
                "divided by weight in rounds of {}, ceilings in periods of {}",
                format_duration(self.config.time.round),
                format_duration(self.config.time.period)
            ),
        )];
        findings.extend(
            self.time.notes().into_iter().map(|(gpu, note)| {
                finding(&format!("GPU time on GPU {gpu}"), Verdict::Warning, note)
            }),
        );
        findings
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
