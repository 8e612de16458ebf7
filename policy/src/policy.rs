//! The merged policy.

use std::collections::{BTreeMap, BTreeSet};

use crate::builtin::{self, DEFAULT_CLASS};
use crate::cgroup::{CgroupPattern, ancestors};
use crate::gpu::GpuSelector;
use crate::limits::Limits;
use crate::source::{Origin, Spanned};

/// A class of tenants as written in the policy files.
#[derive(Clone, Debug)]
pub struct Class {
    /// Its name.
    pub name: String,
    /// Where it was first mentioned.
    pub origin: Origin,
    /// Larger wins.
    pub priority: Option<Spanned<u32>>,
    /// Whether classes of lower priority are frozen while this one is active.
    pub exclusive: Option<Spanned<bool>>,
    /// Limits of its tenants on every GPU.
    pub limits: Limits,
    /// Limits of its tenants on some GPUs.
    pub gpu: BTreeMap<GpuSelector, Box<Limits>>,
}

impl Class {
    /// All its tables of limits.
    pub(crate) fn written(&self) -> impl Iterator<Item = &Limits> {
        self.gpu
            .values()
            .map(|limits| &**limits)
            .chain([&self.limits])
    }
}

impl PartialEq for Class {
    /// Compares what was said, not where.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && self.priority == other.priority
            && self.exclusive == other.exclusive
            && self.limits == other.limits
            && self.gpu == other.gpu
    }
}

impl Eq for Class {}

/// A tenant as written in the policy files.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Where it was first mentioned.
    pub origin: Origin,
    /// Its cgroups.
    pub cgroup: Spanned<CgroupPattern>,
    /// Its class, if it names one. Without, it is in [`DEFAULT_CLASS`].
    pub class: Option<Spanned<String>>,
    /// Limits on every GPU.
    pub limits: Limits,
    /// Limits on some GPUs.
    pub gpu: BTreeMap<GpuSelector, Box<Limits>>,
}

impl Tenant {
    /// The name of its class.
    pub fn class_name(&self) -> &str {
        self.class
            .as_ref()
            .map_or(DEFAULT_CLASS, |class| &class.value)
    }

    /// All its tables of limits.
    pub(crate) fn written(&self) -> impl Iterator<Item = &Limits> {
        self.gpu
            .values()
            .map(|limits| &**limits)
            .chain([&self.limits])
    }
}

impl PartialEq for Tenant {
    /// Compares what was said, not where.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && self.cgroup == other.cgroup
            && self.class == other.class
            && self.limits == other.limits
            && self.gpu == other.gpu
    }
}

impl Eq for Tenant {}

/// All classes and tenants of all policy files, checked. [`Policy::load`] makes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// The classes that the files define. The built-in ones are there besides.
    pub classes: BTreeMap<String, Class>,
    /// The tenants.
    pub tenants: BTreeMap<String, Tenant>,
}

impl Policy {
    /// The class of this name from the files, and the built-in one of this name.
    pub(crate) fn class_layers(&self, name: &str) -> (Option<&Class>, Option<&'static Class>) {
        (self.classes.get(name), builtin::class(name))
    }

    /// Whether a class of this name exists, built-in or not.
    pub fn has_class(&self, name: &str) -> bool {
        self.classes.contains_key(name) || builtin::class(name).is_some()
    }

    /// Names of all classes, the built-in ones included, sorted.
    pub fn class_names(&self) -> impl Iterator<Item = &str> {
        let own = self.classes.keys().map(String::as_str);
        let all: BTreeSet<&str> = own.chain(builtin::BUILTIN_CLASSES).collect();
        all.into_iter()
    }

    /// The priority of a class: of the files, else built in.
    pub fn class_priority(&self, name: &str) -> u32 {
        let (own, builtin) = self.class_layers(name);
        own.and_then(|class| class.priority.as_ref())
            .or_else(|| builtin.and_then(|class| class.priority.as_ref()))
            .map_or(builtin::DEFAULT_PRIORITY, |priority| priority.value)
    }

    /// Whether a class is exclusive: by the files, else built in.
    pub fn class_exclusive(&self, name: &str) -> bool {
        let (own, builtin) = self.class_layers(name);
        own.and_then(|class| class.exclusive.as_ref())
            .or_else(|| builtin.and_then(|class| class.exclusive.as_ref()))
            .is_some_and(|exclusive| exclusive.value)
    }

    /// The tenant that the cgroup at `path` is in: the one with the nearest root at or above it.
    pub fn tenant_of(&self, path: &str) -> Option<&Tenant> {
        std::iter::once(path).chain(ancestors(path)).find_map(|at| {
            self.tenants
                .values()
                .find(|tenant| tenant.cgroup.value.matches(at))
        })
    }

    /// For every tenant the tenants whose subtree it lies in, nearest first, as far as the patterns alone tell.
    ///
    /// A tenant with a glob is known to lie in another when the part before its first wildcard does.
    pub fn nesting(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut exact: BTreeMap<&str, &Tenant> = BTreeMap::new();
        // By the text that every match starts with, so that few globs have to be tried for a path.
        let mut globs: BTreeMap<&str, Vec<&Tenant>> = BTreeMap::new();
        for tenant in self.tenants.values() {
            let pattern = &tenant.cgroup.value;
            if pattern.is_exact() {
                exact.insert(pattern.as_str(), tenant);
            } else {
                globs
                    .entry(pattern.literal_text())
                    .or_default()
                    .push(tenant);
            }
        }
        let lengths: BTreeSet<usize> = globs.keys().map(|text| text.len()).collect();
        let root_at = |path: &str| {
            let by_glob = || {
                lengths
                    .iter()
                    .filter_map(|length| globs.get(path.get(..*length)?))
                    .flatten()
                    .find(|tenant| tenant.cgroup.value.matches(path))
            };
            exact.get(path).or_else(by_glob).copied()
        };
        self.tenants
            .values()
            .map(|tenant| {
                let pattern = &tenant.cgroup.value;
                let prefix = pattern.literal_prefix();
                // The prefix of a glob is itself above every match.
                let own = (!pattern.is_exact()).then_some(prefix);
                let mut above: Vec<&str> = Vec::new();
                for path in own.into_iter().chain(ancestors(prefix)) {
                    if let Some(root) = root_at(path)
                        && root.name != tenant.name
                        && !above.contains(&root.name.as_str())
                    {
                        above.push(&root.name);
                    }
                }
                (tenant.name.as_str(), above)
            })
            .collect()
    }
}
