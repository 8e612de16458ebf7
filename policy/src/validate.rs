//! What can only be told once all files are merged.

use std::collections::{BTreeMap, BTreeSet};

use crate::budget::Layers;
use crate::diagnostic::{Diagnostic, Report, quote};
use crate::gpu::{GpuSelector, Host};
use crate::limits::{Key, Limits};
use crate::policy::{Class, Policy, Tenant};
use crate::source::{Origin, Spanned};
use crate::suggest::nearest;
use crate::values::{Limit, Size};

/// The driver hands out GPU memory in chunks of this size (measured: allocations are rounded to 2 MiB).
pub const MEMORY_CHUNK: u64 = 2 << 20;

/// What a CUDA context takes on an H200, as NVML shows it right after it was made. Other cards take 100 to 500 MiB.
pub const CONTEXT_BYTES: u64 = 520 << 20;

/// A `memory.max` below this leaves hardly anything besides the context.
const LITTLE_MEMORY: u64 = 600 << 20;

/// Whether a key holds for all GPUs of a tenant together: a launch does not say which GPU it is for.
fn is_whole(key: Key) -> bool {
    [Key::LaunchMax, Key::AnomalyFactor, Key::InsightBudget]
        .iter()
        .any(|of| of.split().0 == key.split().0)
}

/// What is checked.
pub(crate) struct Context<'a> {
    pub policy: &'a Policy,
    /// Every selector of every file, with its place.
    pub selectors: &'a [Spanned<GpuSelector>],
    pub host: Option<&'a Host>,
    /// Texts of the files with syntax errors: what is missing may stand there.
    pub broken: &'a [&'a str],
}

pub(crate) fn check(context: &Context<'_>, report: &mut Report) {
    classes(context, report);
    cgroups(context.policy, report);
    memory(context, report);
    whole(context.policy, report);
    if let Some(host) = context.host {
        selectors(context, host, report);
        twice_selected(context.policy, host, report);
        reservations(context.policy, host, report);
    }
}

/// Every class that a tenant names exists.
fn classes(context: &Context<'_>, report: &mut Report) {
    for tenant in context.policy.tenants.values() {
        let Some(class) = &tenant.class else { continue };
        if context.policy.has_class(&class.value)
            || context
                .broken
                .iter()
                .any(|text| text.contains(&class.value))
        {
            continue;
        }
        let names: Vec<&str> = context.policy.class_names().collect();
        let hint = nearest(&class.value, names.iter().copied()).map_or(String::new(), |near| {
            format!("did you mean {}? ", quote(near))
        });
        let names: Vec<String> = names.into_iter().map(quote).collect();
        let message = format!("class = {}: there is no such class", quote(&class.value));
        let help = format!(
            "{hint}the classes are {}; [class.{}] would define it",
            names.join(", "),
            class.value
        );
        report.push(Diagnostic::error(&class.origin, message).help(help));
    }
}

/// No cgroup can be the root of two tenants.
fn cgroups(policy: &Policy, report: &mut Report) {
    let mut exact: BTreeMap<&str, &Tenant> = BTreeMap::new();
    let mut globs: Vec<&Tenant> = Vec::new();
    for tenant in policy.tenants.values() {
        let pattern = &tenant.cgroup.value;
        if pattern.is_nowhere() {
            continue;
        }
        if pattern.is_exact() {
            match exact.entry(pattern.as_str()) {
                std::collections::btree_map::Entry::Occupied(first) => {
                    overlap(first.get(), tenant, report);
                }
                std::collections::btree_map::Entry::Vacant(free) => {
                    free.insert(tenant);
                }
            }
        } else {
            globs.push(tenant);
        }
    }
    for (index, glob) in globs.iter().enumerate() {
        let pattern = &glob.cgroup.value;
        for other in &globs[index + 1..] {
            if pattern.overlaps(&other.cgroup.value) {
                overlap(glob, other, report);
            }
        }
        // Only exact paths below the literal part can match, and they are sorted.
        let prefix = pattern.literal_text();
        for (_, other) in exact
            .range(prefix..)
            .take_while(|(path, _)| path.starts_with(prefix))
        {
            if pattern.matches(other.cgroup.value.as_str()) {
                overlap(glob, other, report);
            }
        }
    }
}

fn overlap(a: &Tenant, b: &Tenant, report: &mut Report) {
    let (first, second) = if a.cgroup.origin <= b.cgroup.origin {
        (a, b)
    } else {
        (b, a)
    };
    let (ours, theirs) = (&second.cgroup.value, &first.cgroup.value);
    let message = if ours == theirs {
        format!(
            "tenants {} and {} have the same cgroup {}",
            quote(&first.name),
            quote(&second.name),
            quote(ours.as_str())
        )
    } else {
        format!(
            "cgroup {} overlaps with {} of tenant {}",
            quote(ours.as_str()),
            quote(theirs.as_str()),
            quote(&first.name)
        )
    };
    report.push(
        Diagnostic::error(&second.cgroup.origin, message)
            .related(&first.cgroup.origin, format!("the cgroup of tenant {}", quote(&first.name)))
            .help("a cgroup is the root of one tenant; a tenant below another one is fine, each with its own cgroup"),
    );
}

/// `memory.min` and `memory.high` do not exceed `memory.max`, wherever the three come from.
fn memory(context: &Context<'_>, report: &mut Report) {
    let policy = context.policy;
    for class in policy.classes.values() {
        if !class.written().any(may_disagree) {
            continue;
        }
        for selectors in combinations(class.gpu.keys(), std::iter::empty(), context.host) {
            memory_order(&Layers::of_class(policy, &class.name, &selectors), report);
        }
    }
    for tenant in policy.tenants.values() {
        let class = policy.classes.get(tenant.class_name());
        let written = tenant.written();
        let of_class = class.into_iter().flat_map(Class::written);
        if !written.chain(of_class).any(may_disagree) {
            continue;
        }
        let of_class: Vec<&GpuSelector> = class
            .map(|class| class.gpu.keys().collect())
            .unwrap_or_default();
        for selectors in combinations(tenant.gpu.keys(), of_class.into_iter(), context.host) {
            memory_order(&Layers::of_tenant(policy, tenant, &selectors), report);
        }
    }
}

/// Whether a table has anything of which [`memory_order`] could complain, whatever the others say. Most have a hard limit only,
/// and what is built in sets no soft limit and reserves nothing.
fn may_disagree(limits: &Limits) -> bool {
    let is_little = |max: &Limit<Size>| matches!(max, Limit::At(max) if max.0 < LITTLE_MEMORY);
    limits.memory_high.is_some()
        || limits.memory_min.is_some()
        || limits
            .memory_max
            .as_ref()
            .is_some_and(|max| is_little(&max.value))
}

/// The lists of selectors, most specific first, that can be about one GPU.
fn combinations<'a>(
    own: impl Iterator<Item = &'a GpuSelector>,
    of_class: impl Iterator<Item = &'a GpuSelector>,
    host: Option<&Host>,
) -> BTreeSet<Vec<GpuSelector>> {
    let named: BTreeSet<GpuSelector> = own.chain(of_class).cloned().collect();
    let mut found = BTreeSet::new();
    // A GPU that no table names.
    found.insert(vec![GpuSelector::Any]);
    for selector in &named {
        if *selector != GpuSelector::Any {
            found.insert(vec![selector.clone(), GpuSelector::Any]);
        }
    }
    // Of several, which UUID and index are the same GPU only the host tells.
    if found.len() <= 2 {
        return found;
    }
    for gpu in host.into_iter().flat_map(|host| &host.gpus) {
        found.insert(
            GpuSelector::of(gpu)
                .into_iter()
                .filter(|selector| *selector == GpuSelector::Any || named.contains(selector))
                .collect(),
        );
    }
    found
}

fn memory_order(layers: &Layers<'_>, report: &mut Report) {
    let Some(Spanned {
        value: Limit::At(max),
        origin: max_origin,
    }) = layers.first(|limits| &limits.memory_max)
    else {
        return;
    };
    let there = format!("memory.max = {max}");
    let mut above = |key: &str, value: Size, origin: &Origin, help: &str| {
        if value > *max {
            // The one that was written last is what the admin looks at.
            let message = format!("{key} = {value} is above memory.max = {max}");
            let (at, other, other_text) = if max_origin > origin {
                (max_origin, origin, format!("{key} = {value}"))
            } else {
                (origin, max_origin, there.clone())
            };
            report.push(
                Diagnostic::error(at, message)
                    .related(other, other_text)
                    .help(help),
            );
        }
    };
    if let Some(Spanned {
        value: Limit::At(high),
        origin,
    }) = layers.first(|limits| &limits.memory_high)
    {
        above(
            "memory.high",
            *high,
            origin,
            "the soft limit is reached before the hard one: make it smaller, or \"max\" for none",
        );
    }
    if let Some(Spanned { value: min, origin }) = layers.first(|limits| &limits.memory_min) {
        above(
            "memory.min",
            *min,
            origin,
            "a tenant can't reserve more than it may use",
        );
    }
    let charged = layers
        .first(|limits| &limits.memory_context)
        .is_none_or(|context| context.value);
    if max.0 > 0 && max.0 < LITTLE_MEMORY && charged && !max_origin.is_builtin() {
        report.push(
            Diagnostic::warning(
                max_origin,
                format!("memory.max = {max} leaves little or nothing to allocate: a CUDA context alone takes about {} MiB on an H200", CONTEXT_BYTES >> 20),
            )
            .help("allow at least 600MiB, or do not charge contexts (memory.context = false)"),
        );
    }
}

/// The tables for some GPUs, of tenants and classes.
fn tables(policy: &Policy) -> impl Iterator<Item = &BTreeMap<GpuSelector, Box<Limits>>> {
    policy
        .tenants
        .values()
        .map(|tenant| &tenant.gpu)
        .chain(policy.classes.values().map(|class| &class.gpu))
}

/// A key that holds for all GPUs together and is set for a single one.
fn whole(policy: &Policy, report: &mut Report) {
    let single = tables(policy)
        .flatten()
        .filter(|(selector, _)| **selector != GpuSelector::Any)
        .flat_map(|(_, limits)| limits.iter());
    for (key, _, origin) in single.filter(|(key, ..)| is_whole(*key)) {
        report.push(
            Diagnostic::warning(origin, format!("{key} has no effect for a single GPU"))
                .help("a launch does not say which GPU it is for: set it for all of them"),
        );
    }
}

/// GPUs that are not there.
fn selectors(context: &Context<'_>, host: &Host, report: &mut Report) {
    let there: Vec<String> = host
        .gpus
        .iter()
        .map(|gpu| format!("{} ({})", gpu.index, gpu.uuid))
        .collect();
    for Spanned { value, origin } in context.selectors {
        if *value == GpuSelector::Any || host.gpus.iter().any(|gpu| value.matches(gpu)) {
            continue;
        }
        let help = match there.as_slice() {
            [] => "the host has no GPU".to_owned(),
            there => format!("the GPUs are {}", there.join(", ")),
        };
        report.push(
            Diagnostic::warning(
                origin,
                format!(
                    "GPU {} is not on this host; the rest of the policy holds",
                    quote(&value.to_string())
                ),
            )
            .help(help),
        );
    }
}

/// One GPU by its index and by its UUID in one tenant or class: the UUID wins, which is easily overlooked.
fn twice_selected(policy: &Policy, host: &Host, report: &mut Report) {
    let gpus: Vec<_> = host.gpus.iter().map(GpuSelector::of).collect();
    for table in tables(policy).filter(|table| table.len() > 1) {
        for [uuid, index, _] in &gpus {
            let (Some(by_uuid), Some(by_index)) = (table.get(uuid), table.get(index)) else {
                continue;
            };
            for (key, value, origin) in by_index.iter() {
                if let Some((other, other_origin)) = by_uuid.get(key)
                    && other != value
                {
                    report.push(
                        Diagnostic::warning(origin, format!("{key} = {value} for GPU {index} has no effect: the table of its UUID says {other}"))
                            .related(other_origin, format!("{key} = {other}")),
                    );
                }
            }
        }
    }
}

/// Whether any table asks for a reservation; most policies have none.
fn reserves(policy: &Policy) -> bool {
    let of_tenants = policy.tenants.values().flat_map(Tenant::written);
    let of_classes = policy.classes.values().flat_map(Class::written);
    of_tenants
        .chain(of_classes)
        .any(|limits| limits.memory_min.is_some())
}

/// Reservations fit on the card, and those of nested tenants into the limit of the one above.
fn reservations(policy: &Policy, host: &Host, report: &mut Report) {
    if !reserves(policy) {
        return;
    }
    let nesting = policy.nesting();
    let mut children: BTreeMap<&str, Vec<&Tenant>> = BTreeMap::new();
    let mut top: Vec<&Tenant> = Vec::new();
    for tenant in policy.tenants.values() {
        match nesting
            .get(tenant.name.as_str())
            .and_then(|above| above.first())
        {
            Some(parent) => children.entry(parent).or_default().push(tenant),
            None => top.push(tenant),
        }
    }
    // Most hosts have several cards of one kind: one message for all of them.
    let mut overcommitted: BTreeMap<(Origin, u128, u64), Vec<u32>> = BTreeMap::new();
    for gpu in &host.gpus {
        let selectors = GpuSelector::of(gpu);
        let card = Reservations {
            policy,
            children: &children,
            selectors: &selectors,
        };
        let sum = card.sum(&top, report);
        if sum > u128::from(gpu.memory)
            && let Some((_, largest)) = top
                .iter()
                .filter_map(|tenant| card.largest_below(tenant))
                .max_by_key(|(bytes, min)| (*bytes, min.origin.clone()))
        {
            let same = (largest.origin.clone(), sum, gpu.memory);
            overcommitted.entry(same).or_default().push(gpu.index);
        }
    }
    for ((origin, sum, memory), gpus) in overcommitted {
        let gpus: Vec<String> = gpus.iter().map(ToString::to_string).collect();
        let message = format!(
            "the tenants reserve {} of GPU {}, which has {}",
            shown(sum),
            gpus.join(", "),
            shown(memory.into())
        );
        report.push(Diagnostic::error(&origin, message).help(
            "the sum of memory.min of all tenants is at most the card's memory; this is the largest of them",
        ));
    }
}

/// A sum of sizes for a message.
fn shown(bytes: u128) -> String {
    let text =
        u64::try_from(bytes).map_or_else(|_| bytes.to_string(), |bytes| Size(bytes).to_string());
    if text.ends_with(|c: char| c.is_ascii_digit()) {
        format!("{text} bytes")
    } else {
        text
    }
}

struct Reservations<'a> {
    policy: &'a Policy,
    children: &'a BTreeMap<&'a str, Vec<&'a Tenant>>,
    selectors: &'a [GpuSelector],
}

impl<'a> Reservations<'a> {
    fn layers(&self, tenant: &'a Tenant) -> Layers<'a> {
        Layers::of_tenant(self.policy, tenant, self.selectors)
    }

    fn min(&self, tenant: &'a Tenant) -> Option<&'a Spanned<Size>> {
        self.layers(tenant).first(|limits| &limits.memory_min)
    }

    /// What the tenants and those below them reserve together.
    fn sum(&self, tenants: &[&'a Tenant], report: &mut Report) -> u128 {
        tenants.iter().map(|tenant| self.of(tenant, report)).sum()
    }

    /// A tenant reserves what it says, or what those below it need if that is more.
    fn of(&self, tenant: &'a Tenant, report: &mut Report) -> u128 {
        let own = u128::from(self.min(tenant).map_or(0, |min| min.value.0));
        let Some(children) = self.children.get(tenant.name.as_str()) else {
            return own;
        };
        let below = self.sum(children, report);
        if let Some(Spanned {
            value: Limit::At(max),
            origin,
        }) = self.layers(tenant).first(|limits| &limits.memory_max)
            && below > u128::from(max.0)
            && !origin.is_builtin()
        {
            let largest = children
                .iter()
                .filter_map(|child| self.largest_below(child))
                .max_by_key(|(bytes, _)| *bytes);
            let message = format!(
                "the tenants below {} reserve {}, more than its memory.max = {max}",
                quote(&tenant.name),
                shown(below)
            );
            let diagnostic = Diagnostic::error(origin, message)
                .help("raise memory.max here or lower memory.min below");
            report.push(match largest {
                Some((_, min)) => diagnostic.related(
                    &min.origin,
                    format!("the largest of them, memory.min = {}", min.value),
                ),
                None => diagnostic,
            });
        }
        own.max(below)
    }

    /// The largest reservation of a tenant or one below it.
    fn largest_below(&self, tenant: &'a Tenant) -> Option<(u64, &'a Spanned<Size>)> {
        let own = self
            .min(tenant)
            .filter(|min| !min.origin.is_builtin())
            .map(|min| (min.value.0, min));
        let below = self
            .children
            .get(tenant.name.as_str())
            .into_iter()
            .flatten()
            .filter_map(|child| self.largest_below(child));
        below.chain(own).max_by_key(|(bytes, _)| *bytes)
    }
}
