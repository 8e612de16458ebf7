//! The leak finder and the rest of the daemon: whom it looks at.

use std::{path::Path, sync::Arc, time::Duration};

use super::Enforcer;
use crate::{
    control::{ControlError, Finding, Verdict, leaks::Target},
    doctor,
    insight::Watched,
    launch::Host as _,
};

impl Watched for Enforcer {
    fn processes(&self, target: &Target) -> Vec<u32> {
        let name = match target {
            Target::Process(pid) => return vec![*pid],
            Target::Tenant(name) => name,
        };
        let processes = <Self as crate::launch::Host>::processes(self);
        processes
            .into_iter()
            .filter(|pid| {
                self.member(*pid)
                    .is_some_and(|member| self.is_within(member.tenant, name))
            })
            .collect()
    }
}

impl Enforcer {
    /// Whether a tenant is the one of this name, or in it.
    pub(super) fn is_within(&self, tenant: u32, name: &str) -> bool {
        let now = self.read();
        let mut at = now.seating.seat(tenant).map(|seat| seat.name.clone());
        while let Some(found) = at {
            if found == name {
                return true;
            }
            at = now
                .seating
                .index(&found)
                .and_then(|index| now.seating.seat(index))
                .and_then(|seat| seat.parent.clone());
        }
        false
    }

    /// Lets the leak finder ask whom to look at.
    pub(super) fn offer_insight(self: &Arc<Self>) {
        let own: Arc<dyn Watched> = Arc::clone(self) as _;
        self.leaks.ask(&own);
    }

    /// Whether there is somebody to look at.
    pub(super) fn known_target(&self, target: &Target) -> Result<(), ControlError> {
        match target {
            Target::Process(pid) if !Path::new(&format!("/proc/{pid}")).exists() => {
                Err(ControlError::NoSuchProcess(*pid))
            }
            Target::Tenant(name) if self.read().seating.index(name).is_none() => {
                Err(ControlError::NoSuchTenant(name.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Begins to follow allocations.
    pub(super) fn start_look(&self, target: &Target, limit: Duration) -> Result<(), ControlError> {
        self.known_target(target)?;
        Ok(self.leaks.start(target, limit)?)
    }

    /// A line for `doctor`.
    pub(super) fn leak_finding(&self) -> Finding {
        let detail = if cfg!(not(target_arch = "x86_64")) {
            "follows stacks on x86-64 only".to_owned()
        } else {
            match self.leaks.running() {
                0 => {
                    "off: no process has a probe of it; `gpuquotactl leaks` turns it on".to_owned()
                }
                running => format!("looks that have probes in processes: {running}"),
            }
        };
        doctor::finding("leak finder", Verdict::Info, detail)
    }
}
