//! The launch profile and the rest of the daemon: whom it looks at, what holds for them, and whom it tells.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::Enforcer;
use crate::{
    control::{Finding, Notice, Verdict},
    doctor,
    launch::Host as _,
    profile::{self, Host, Rules, Unusual, every_gpu},
};

impl Host for Enforcer {
    fn rules(&self, pid: u32) -> Rules {
        let name = self.member(pid).map(|member| self.name_of(member.tenant));
        let every = every_gpu();
        let own = name.as_deref().and_then(|name| {
            let policy = Arc::clone(&self.read().policy);
            policy.on(&every).budget(name)
        });
        let (factor, budget) = own.map_or_else(
            || {
                (
                    gpuquota_policy::Factor::DEFAULT,
                    gpuquota_policy::Share::DEFAULT,
                )
            },
            |own| (own.profile.factor, own.profile.budget),
        );
        Rules {
            tenant: name.unwrap_or_default().into(),
            factor: factor.get(),
            budget: budget.ratio(),
        }
    }

    fn unusual(&self, found: Unusual) {
        let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        if !self.profiles.count(&found, Instant::now()) {
            return;
        }
        self.notify(Notice::Anomaly {
            tenant: (*found.tenant).to_owned(),
            pid: found.pid,
            kernel: found.kernel,
            duration_usec: micros(found.duration),
            usual_usec: micros(found.usual),
        });
    }
}

impl Enforcer {
    /// Lets the launch profile ask whom to look at, and begins with those whom the policy names.
    pub(super) fn offer_profiles(self: &Arc<Self>) {
        let own: Arc<dyn Host> = Arc::clone(self) as _;
        self.profiles.ask(&own);
        self.follow_profiles();
    }

    /// Looks at whom the policy in force names.
    pub(super) fn follow_profiles(&self) {
        let policy = Arc::clone(&self.read().policy);
        let tenants: BTreeSet<String> = policy.tenants.keys().cloned().collect();
        self.profiles.keep(&tenants);
        self.profiles.follow(&profile::always(&policy));
    }

    /// Lines for `doctor`.
    pub(super) fn profile_findings(&self) -> Vec<Finding> {
        let detail = match self.profiles.running() {
            (0, 0) => {
                "off: no process has a probe of it; `gpuquotactl profile` or insight.profile turns it on"
                    .to_owned()
            }
            (by_command, always) => {
                format!("looks that have probes in processes: {by_command} by command, {always} by policy")
            }
        };
        let subject = "launch profile";
        let mut findings = vec![doctor::finding(subject, Verdict::Info, detail)];
        findings.extend(self.profiles.left_out().into_iter().map(|(tenant, why)| {
            let detail = format!("insight.profile of tenant {tenant} has no effect: {why}");
            doctor::finding(subject, Verdict::Warning, detail)
        }));
        findings
    }
}
