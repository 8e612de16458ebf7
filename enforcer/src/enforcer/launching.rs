//! Launch budgets and the rest of the daemon: what [`crate::launch`] asks, and where it begins.

use std::{path::PathBuf, sync::Arc};

use gpuquota_common::map::process_flags;

use super::{Enforcer, EnforcerError};
use crate::{
    control::Notice,
    launch::{Host, Member, attach},
    time::release::Whereabouts,
};

impl Host for Enforcer {
    fn member(&self, pid: u32) -> Option<Member> {
        if !self.known_driver {
            return None;
        }
        // Read first: a change of the cgroups meanwhile makes the answer out of date, not wrong.
        let epoch = self.kernel.settings().ok()?.cgroup_epoch;
        let path = self.hierarchy.of_process(pid).ok()?;
        let tenant = self.tenant_at(&path)?;
        let cgroup = self.hierarchy.id(&path).ok()??;
        Some(Member {
            tenant,
            cgroup,
            epoch,
        })
    }

    fn processes(&self) -> Vec<u32> {
        self.kernel
            .processes()
            .into_iter()
            .filter(|(_, process)| process.flags & process_flags::ACTIVE != 0)
            .map(|(tgid, _)| tgid)
            .collect()
    }

    fn roots(&self, tenant: u32) -> Vec<(u64, PathBuf)> {
        self.read()
            .roots
            .iter()
            .filter(|(_, (index, _))| *index == tenant)
            .filter_map(|(id, (_, path))| Some((*id, self.hierarchy.folder(path).ok()?)))
            .collect()
    }

    fn name_of(&self, tenant: u32) -> String {
        Enforcer::name_of(self, tenant)
    }

    fn notify(&self, notice: Notice) {
        Enforcer::notify(self, notice);
    }

    fn frozen(&self) -> Option<Whereabouts> {
        self.unpinned.is_none().then(|| Whereabouts {
            pins: self.config.bpf_directory.clone(),
            device_dir: self.config.gpu.device_dir.clone(),
        })
    }
}

impl Enforcer {
    /// Starts to count and delay launches, for those tenants that have a budget.
    ///
    /// A daemon for a driver that is not known delays nobody.
    pub(super) fn start_launches(self: &Arc<Self>) -> Result<attach::Running, EnforcerError> {
        let host: Arc<dyn Host> = Arc::clone(self) as _;
        Ok(attach::Running::start(
            &self.launches,
            &host,
            &self.hierarchy,
            &self.config.launch,
        )?)
    }
}
