//! Policies come into force: from the files, or from a changed property. All or nothing.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use gpuquota_policy::{
    Diagnostic, GpuSelector, Host, Layer, Loaded, OnMemoryMax, Policy, Source, dropin,
    property::Property,
};
use tracing::info;

use super::{Enforcer, EnforcerError};
use crate::{
    backend::Choice,
    config::{MemoryBackend, PolicyDirectories},
    control::{Notice, PolicyLoaded, QuotaChange},
    heap, journal, policy_files,
};

/// Reads and checks the policy on disk.
pub(super) fn load(directories: &PolicyDirectories, host: &Host) -> Result<Loaded, EnforcerError> {
    check(&policy_files::read(directories)?, host)
}

fn check(sources: &[Source], host: &Host) -> Result<Loaded, EnforcerError> {
    Policy::load(sources, Some(host)).map_err(EnforcerError::Policy)
}

impl Enforcer {
    /// Puts the policy on disk into force.
    pub fn reload_policy(&self) -> Result<PolicyLoaded, EnforcerError> {
        let asked = Instant::now();
        let _one_at_a_time = self.change();
        let outcome = load(&self.config.policy, &self.host)
            .and_then(|loaded| self.put_in_force(loaded, asked));
        self.loads.note(outcome)
    }

    /// Changes properties of a tenant, in its drop-in and in force. Returns the drop-in.
    ///
    /// The text is tried first together with all other files; only one that loads is written, and only what
    /// is written comes into force.
    pub(super) fn change_properties(&self, change: &QuotaChange) -> Result<PathBuf, EnforcerError> {
        let asked = Instant::now();
        let _one_at_a_time = self.change();
        let directories = &self.config.policy;
        let path = policy_files::dropin_path(directories, &change.tenant, change.runtime);
        let existing = policy_files::read_optional(&path)?;
        let text = dropin::apply(
            existing.as_deref(),
            &change.tenant,
            change.gpu.as_deref(),
            &change.properties,
        )?;
        let layer = if change.runtime {
            Layer::Runtime
        } else {
            Layer::Admin
        };
        let sources = policy_files::read(directories)?;
        let tried = policy_files::with_file(sources, layer, &path, Some(&text));
        let loaded = check(&tried, &self.host)?;
        self.refuse_shadowed(&loaded.policy, change, &path)?;
        policy_files::write(&path, &text)?;
        self.put_in_force(loaded, asked)?;
        Ok(path)
    }

    /// Refuses a change that would be written and have no effect, because another file says otherwise later.
    fn refuse_shadowed(
        &self,
        policy: &Policy,
        change: &QuotaChange,
        path: &Path,
    ) -> Result<(), EnforcerError> {
        let selector = change
            .gpu
            .as_deref()
            .and_then(|gpu| GpuSelector::parse(gpu).ok());
        for (key, _) in change
            .properties
            .iter()
            .filter(|(_, value)| !value.is_empty())
        {
            let winners: Vec<_> = self
                .host
                .gpus
                .iter()
                .filter(|gpu| {
                    selector
                        .as_ref()
                        .is_none_or(|selector| selector.matches(gpu))
                })
                .flat_map(|gpu| policy.explain(&change.tenant, gpu))
                .filter(|value| value.key == key)
                .filter_map(|value| value.origin)
                .collect();
            if let Some(winner) = winners.first()
                && winners.iter().all(|origin| *origin.path != *path)
            {
                return Err(EnforcerError::Shadowed {
                    key: key.clone(),
                    winner: winner.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Takes properties out of a tenant's drop-ins; all of them if none is named.
    pub(super) fn reset_properties(
        &self,
        tenant: &str,
        properties: &[String],
    ) -> Result<(), EnforcerError> {
        let asked = Instant::now();
        let _one_at_a_time = self.change();
        let directories = &self.config.policy;
        let mut sources = policy_files::read(directories)?;
        let mut changes = Vec::new();
        for (runtime, layer) in [(false, Layer::Admin), (true, Layer::Runtime)] {
            let path = policy_files::dropin_path(directories, tenant, runtime);
            let Some(existing) = policy_files::read_optional(&path)? else {
                continue;
            };
            let text = if properties.is_empty() {
                None
            } else {
                Some(self.without_properties(&existing, tenant, properties)?)
            };
            sources = policy_files::with_file(sources, layer, &path, text.as_deref());
            changes.push((path, text));
        }
        let loaded = check(&sources, &self.host)?;
        for (path, text) in changes {
            match text {
                Some(text) => policy_files::write(&path, &text)?,
                None => policy_files::remove(&path)?,
            }
        }
        self.put_in_force(loaded, asked).map(drop)
    }

    /// A drop-in's text without some properties, on every GPU and on single ones.
    fn without_properties(
        &self,
        text: &str,
        tenant: &str,
        properties: &[String],
    ) -> Result<String, EnforcerError> {
        let cleared = |keys: &mut dyn Iterator<Item = &String>| -> Vec<(String, String)> {
            keys.map(|key| (key.clone(), String::new())).collect()
        };
        let all = cleared(&mut properties.iter());
        let per_gpu = cleared(
            &mut properties
                .iter()
                .filter(|key| matches!(Property::parse(key), Ok(Property::Limit(_)))),
        );
        let mut text = dropin::apply(Some(text), tenant, None, &all)?;
        let selectors = self
            .host
            .gpus
            .iter()
            .flat_map(|gpu| [gpu.uuid.clone(), gpu.index.to_string()])
            .chain(["*".to_owned()]);
        for selector in selectors {
            text = dropin::apply(Some(&text), tenant, Some(&selector), &per_gpu)?;
        }
        Ok(text)
    }

    /// `asked`: when this was ordered.
    fn put_in_force(&self, loaded: Loaded, asked: Instant) -> Result<PolicyLoaded, EnforcerError> {
        heap::used();
        let tenants = u32::try_from(loaded.policy.tenants.len()).unwrap_or(u32::MAX);
        let (generation, warnings) = self.govern(loaded, asked)?;
        self.follow_profiles();
        let outcome = PolicyLoaded {
            generation,
            tenants,
            warnings,
        };
        info!(
            message_id = journal::POLICY_LOADED,
            generation, tenants, "policy in force"
        );
        for warning in &outcome.warnings {
            tracing::warn!("{warning}");
        }
        self.notify(Notice::PolicyLoaded(outcome.clone()));
        Ok(outcome)
    }
}

/// What an admin has to know of a policy that is in force.
pub(super) fn warnings(
    policy: &Policy,
    warnings: &[Diagnostic],
    host: &Host,
    choice: Choice,
) -> Vec<String> {
    let mut all: Vec<String> = warnings
        .iter()
        .map(|warning| warning.render().trim_end().to_owned())
        .collect();
    all.extend(without_effect(policy, host, choice));
    all
}

/// What a policy asks for and this version of the daemon does not do. An admin must not believe that it holds.
fn without_effect(policy: &Policy, host: &Host, choice: Choice) -> Vec<String> {
    let mut found = Vec::new();
    let Some(on_gpu) = host.gpus.first().map(|gpu| policy.on(gpu)) else {
        return found;
    };
    for tenant in policy.tenants.values() {
        let Some(budget) = on_gpu.budget(&tenant.name) else {
            continue;
        };
        let mut say = |key: &str, instead: &str| {
            found.push(format!(
                "{}: tenant \"{}\" sets {key}, which this version does not enforce: {instead}",
                tenant.origin, tenant.name
            ));
        };
        if budget.memory.on_max == OnMemoryMax::Wait && choice.everywhere == MemoryBackend::Lsm {
            say(
                "memory.on-max",
                "the backend lsm cannot make an allocation wait, it is denied; a command started by `gpuquotactl run` \
                 waits where notify is in use too",
            );
        }
    }
    found
}
