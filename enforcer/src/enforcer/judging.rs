//! Decisions about allocations that wait at a supervisor.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use gpuquota_common::{
    map::{MAX_GPUS, ObjectKey, device, host_place},
    nvidia::{class, status},
};
use tracing::{error, warn};

use super::{Enforcer, watching::process_of};
use crate::{
    cgroup,
    kernel::{Admission, AdmissionRequest},
    notify::{
        listener::{Enroll, Peer},
        protocol::{Metadata, ProcessState},
        supervisor::{Judge, Verdict, Waiting, refusal_of},
    },
};

impl Enforcer {
    fn decide(&self, waiting: &Waiting) -> Verdict {
        // Without it the programs in the kernel decide, about this process as about every other.
        if !self.choice.supervised {
            return Verdict::Continue;
        }
        let Some(device) = self.device_of(waiting.thread, waiting.fd) else {
            return Verdict::Continue;
        };
        let Ok(path) = self.hierarchy.of_process(waiting.thread) else {
            // Gone: the answer finds nobody.
            return Verdict::Continue;
        };
        let Some(tenant) = self.tenant_at(&path) else {
            return Verdict::Continue;
        };
        if let Some(range) = waiting.range {
            return if device == device::UVM && !self.admits_managed(waiting, tenant, range) {
                refusal_of(waiting)
            } else {
                Verdict::Continue
            };
        }
        if waiting.call.opaque != 0 {
            warn!(
                thread = waiting.thread,
                "refused an allocation with serialised parameters"
            );
            return Verdict::Refuse(status::NO_MEMORY);
        }
        let Some(gpu) = self.gpu_of(waiting) else {
            warn!(
                thread = waiting.thread,
                parent = waiting.call.parent,
                "refused an allocation whose GPU is not known"
            );
            return Verdict::Refuse(status::NO_MEMORY);
        };
        let request = AdmissionRequest {
            thread: waiting.thread,
            tenant,
            gpu: if class::is_host_memory(waiting.call.class) {
                host_place(gpu)
            } else {
                gpu
            },
            bytes: waiting.call.wanted,
            arg: waiting.arg,
            cmd: u32::from(waiting.cmd.nr) | u32::from(waiting.cmd.size) << 16,
        };
        let settled = match self.kernel.admit(request) {
            Ok(Admission::Unsettled) => self
                .kernel
                .settle(waiting.thread, process_of(waiting.thread))
                .and_then(|()| self.kernel.admit(request)),
            outcome => outcome,
        };
        match settled {
            Ok(Admission::Granted) => Verdict::Continue,
            Ok(Admission::Wait) => Verdict::Refuse(status::BUSY_RETRY),
            // Nobody else settles the thread's calls while it waits.
            Ok(Admission::Refused | Admission::Unsettled) => Verdict::Refuse(status::NO_MEMORY),
            Err(error) => {
                error!(%error, "the ledger does not answer; refused an allocation");
                Verdict::Refuse(status::NO_MEMORY)
            }
        }
    }

    /// Cancels what was reserved for calls that will never come: of threads that have ended or were interrupted, or whose answer
    /// a daemon before this one took with it.
    pub(super) fn cancel_stale_admissions(&self) {
        for (thread, admitted) in self.kernel.admitted() {
            if crate::notify::has_left(thread)
                && let Err(error) = self.kernel.cancel_this(thread, &admitted)
            {
                error!(%error, thread, "a reservation stays until the next look");
            }
        }
    }

    /// The kind of the driver's device behind a descriptor; `None` for every other file.
    fn device_of(&self, thread: u32, fd: u32) -> Option<u32> {
        let path = format!("/proc/{thread}/fd/{fd}");
        let key = crate::driver::nvidia::key_of(std::path::Path::new(&path)).ok()?;
        if self.uvm_node() == Some(key) {
            return Some(device::UVM);
        }
        self.topology
            .devices
            .iter()
            .find(|(device, _)| *device == key)
            .map(|(_, device)| device.kind)
    }

    /// The GPU that the parent of the new memory is on.
    fn gpu_of(&self, waiting: &Waiting) -> Option<u32> {
        if let [only] = self.topology.gpus.as_slice() {
            return Some(only.card.index);
        }
        let parent = ObjectKey {
            client: waiting.call.client,
            handle: waiting.call.parent,
        };
        self.kernel
            .object(parent)
            .map(|object| object.gpu)
            .filter(|gpu| *gpu < MAX_GPUS)
    }

    /// Puts a process into a tenant, if who asks may do that.
    fn admit_process(
        &self,
        peer: Peer,
        state: &ProcessState,
        metadata: Option<&Metadata>,
    ) -> Result<(), String> {
        let Some(Metadata { tenant, again }) = metadata else {
            // An OCI runtime: the container is where the runtime has put it. Only root runs containers here.
            return if peer.uid == 0 {
                Ok(())
            } else {
                Err("only root may hand over the listener of a container".to_owned())
            };
        };
        let pattern = self
            .read()
            .policy
            .tenants
            .get(tenant)
            .map(|tenant| tenant.cgroup.value.clone())
            .ok_or_else(|| {
                format!("no tenant named \"{tenant}\"; `gpuquotactl list` shows those there are")
            })?;
        let path = self
            .hierarchy
            .of_process(state.pid)
            .map_err(|error| format!("process {}: {error}", state.pid))?;
        let inside = pattern.is_exact() && cgroup::is_within(&path, pattern.as_str())
            || cgroup::ancestors(&path).any(|above| pattern.matches(above));
        if *again {
            crate::notify::restart_waiting_calls(&self.hierarchy, state.pid);
        }
        if inside {
            return Ok(());
        }
        if peer.uid != 0 {
            return Err(format!(
                "only root may put a process into tenant \"{tenant}\"; from inside its cgroup everybody may \
                 start commands"
            ));
        }
        if !pattern.is_exact() {
            return Err(format!(
                "tenant \"{tenant}\" is every cgroup like {pattern}: start the command inside one of them"
            ));
        }
        self.hierarchy
            .create(pattern.as_str())
            .and_then(|()| self.hierarchy.attach(pattern.as_str(), state.pid))
            .map_err(|error| error.to_string())
    }
}

/// Judges on behalf of the enforcer, for as long as there is one.
struct Delegate(Weak<Enforcer>);

impl Judge for Delegate {
    fn judge(&self, waiting: &Waiting) -> Verdict {
        self.0
            .upgrade()
            .map_or(refusal_of(waiting), |enforcer| enforcer.decide(waiting))
    }

    fn withdraw(&self, waiting: &Waiting) {
        let Some(enforcer) = self.0.upgrade() else {
            return;
        };
        if let Err(error) = enforcer.kernel.cancel(waiting.thread) {
            error!(%error, thread = waiting.thread, "a reservation stays until the next look");
        }
    }
}

/// Takes listeners for an enforcer.
pub struct Enrolment(pub Arc<Enforcer>);

impl Enroll for Enrolment {
    fn enroll(
        &self,
        peer: Peer,
        state: &ProcessState,
        metadata: Option<&Metadata>,
    ) -> Result<Arc<dyn Judge + Send + Sync>, String> {
        self.0.admit_process(peer, state, metadata)?;
        // Its cgroup may be so new that the programs in the kernel do not know it yet, and it goes on when this returns.
        self.0
            .hierarchy
            .of_process(state.pid)
            .map_err(|error| format!("process {}: {error}", state.pid))
            .and_then(|path| self.0.govern_now(&path).map_err(|error| error.to_string()))?;
        Ok(Arc::new(Delegate(Arc::downgrade(&self.0))))
    }

    fn listener_timeout(&self) -> Duration {
        self.0.config.enforcement.listener_timeout
    }
}
