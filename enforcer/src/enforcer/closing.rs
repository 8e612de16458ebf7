//! `ungoverned = "deny"`: the GPUs are closed to processes in no tenant.

use std::collections::BTreeSet;

use gpuquota_common::map::settings_flags;
use tracing::info;

use super::{Enforcer, EnforcerError};
use crate::{config::Ungoverned, kernel::PinDir};

impl Enforcer {
    /// Closes the GPUs, or opens what an earlier daemon closed. Exempt cgroups are known before anything is closed.
    pub(super) fn close_or_open(&self, pins: Option<&PinDir>) -> Result<(), EnforcerError> {
        let closes = self.enforcing && self.config.enforcement.ungoverned == Ungoverned::Deny;
        if closes {
            self.find_exempt()?;
            self.kernel
                .close_to_ungoverned(self.hierarchy.root(), pins)?;
        }
        self.kernel.update_settings(|settings| {
            if closes {
                settings.flags |= settings_flags::DENY_UNGOVERNED;
            } else {
                settings.flags &= !settings_flags::DENY_UNGOVERNED;
            }
        })?;
        if closes {
            info!("the GPUs are closed to processes in no tenant");
        } else {
            self.kernel.open_to_ungoverned(pins)?;
        }
        Ok(())
    }

    /// Finds the exempt cgroups that exist, and the daemon's own.
    pub(super) fn find_exempt(&self) -> Result<(), EnforcerError> {
        if self.config.enforcement.ungoverned != Ungoverned::Deny {
            return Ok(());
        }
        let own = self.hierarchy.of_process(std::process::id()).ok();
        let mut exempt = BTreeSet::new();
        // A daemon that was started by hand in the root cgroup does not open the GPUs to everybody.
        for path in self
            .config
            .enforcement
            .ungoverned_exempt
            .iter()
            .chain(own.iter().filter(|path| *path != "/"))
        {
            if let Some(id) = self.hierarchy.id(path)? {
                exempt.insert(id);
            }
        }
        Ok(self.kernel.set_exempt(&exempt)?)
    }

    /// A cgroup was made or is gone: is it one of the exempt?
    pub(super) fn exempt_changed(&self, path: &str) -> Result<(), EnforcerError> {
        if self
            .config
            .enforcement
            .ungoverned_exempt
            .iter()
            .any(|exempt| exempt == path)
        {
            self.find_exempt()?;
        }
        Ok(())
    }
}
