//! What holds for one tenant on one GPU.

use std::fmt;
use std::time::Duration;

use crate::builtin::{self, BURST_NANOS, LEAST_BURST};
use crate::gpu::{GpuSelector, HostGpu};
use crate::limits::{Key, Limits, Written};
use crate::policy::{Policy, Tenant};
use crate::profile::{Factor, Share};
use crate::source::{Origin, Spanned};
use crate::values::{
    GraphCost, Limit, Managed, OnBreach, OnHigh, OnLaunchMax, OnMemoryMax, OnXid, Pace, Percent,
    Rate, Size,
};
use crate::xids::Xids;

/// Everything that holds for one tenant on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The tenant's class.
    pub class: String,
    /// The priority of the class; larger wins.
    pub priority: u32,
    /// Whether lower classes are frozen while a tenant of this class is active.
    pub exclusive: bool,
    /// Memory.
    pub memory: MemoryBudget,
    /// Kernel and graph launches.
    pub launch: LaunchBudget,
    /// GPU time.
    pub time: TimeBudget,
    /// GPU faults.
    pub fault: FaultBudget,
    /// What is looked for in its launches.
    pub profile: ProfileBudget,
}

/// Memory of one tenant on one GPU, in bytes. None is no limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Hard limit.
    pub max: Option<u64>,
    /// Soft limit.
    pub high: Option<u64>,
    /// Reservation, 0 for none.
    pub min: u64,
    /// What happens above `max`.
    pub on_max: OnMemoryMax,
    /// What happens when `high` is crossed.
    pub on_high: OnHigh,
    /// How long an allocation waits when `on_max` is [`OnMemoryMax::Wait`].
    pub wait_timeout: Duration,
    /// What happens to managed memory.
    pub managed: Managed,
    /// Whether the driver's own memory for a process is charged.
    pub context: bool,
    /// Limit of pinned host memory.
    pub host: Option<u64>,
    /// What happens when memory was obtained although it was refused.
    pub on_breach: OnBreach,
}

/// Launches of one tenant on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchBudget {
    /// Highest rate, None for no limit.
    pub max: Option<Rate>,
    /// Launches that may come at once after a pause. Means nothing without `max`.
    pub burst: u32,
    /// What happens to launches above `max`.
    pub on_max: OnLaunchMax,
    /// How long a process has to end when `on_max` is [`OnLaunchMax::Deny`].
    pub patience: Duration,
    /// How launches are delayed.
    pub pace: Pace,
    /// What the launch of a graph costs.
    pub graph_cost: GraphCost,
}

/// GPU time of one tenant on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeBudget {
    /// Share relative to other tenants, 1 to 10000.
    pub weight: u32,
    /// Ceiling even on an idle GPU, None for no limit.
    pub max: Option<Percent>,
    /// How long an exclusive class may keep this tenant from running.
    pub starve_max: Duration,
    /// Latency under which best-effort tenants are squeezed, None for no target.
    pub latency_target: Option<Duration>,
}

/// What follows GPU faults of one tenant on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultBudget {
    /// What happens to who caused one.
    pub on_xid: OnXid,
    /// The Xids that it answers.
    pub xids: Xids,
}

/// How launches of one tenant are profiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileBudget {
    /// How many times the usual duration is an anomaly.
    pub factor: Factor,
    /// Most of a process's time that the probes may cost.
    pub budget: Share,
    /// Whether that happens at all times.
    pub always: bool,
}

/// What gave a value its effect, weakest first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// No file and no class says anything.
    BuiltIn,
    /// The built-in class of this name.
    BuiltInClass(String),
    /// The class of this name.
    Class(String),
    /// The class of this name, for this GPU.
    ClassGpu(String, GpuSelector),
    /// The tenant.
    Tenant,
    /// The tenant, for this GPU.
    TenantGpu(GpuSelector),
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("default"),
            Self::BuiltInClass(name) => write!(f, "built-in class {name}"),
            Self::Class(name) => write!(f, "class {name}"),
            Self::ClassGpu(name, gpu) => write!(f, "class {name}, GPU {gpu}"),
            Self::Tenant => f.write_str("tenant"),
            Self::TenantGpu(gpu) => write!(f, "tenant, GPU {gpu}"),
        }
    }
}

/// One line of [`Policy::explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainedValue {
    /// The key: `cgroup`, `class`, `priority`, `exclusive` or the name of a limit.
    pub key: &'static str,
    /// The value, without quotes.
    pub value: String,
    /// What gave it.
    pub level: Level,
    /// Where it stands. None for what is built in.
    pub origin: Option<Origin>,
}

impl fmt::Display for ExplainedValue {
    /// `memory.max = 40GiB (tenant, /etc/gpuquota/policy.d/50-teams.toml:3:14)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {} ({}", self.key, self.value, self.level)?;
        if let Some(origin) = &self.origin {
            write!(f, ", {origin}")?;
        }
        f.write_str(")")
    }
}

/// A [`Level`] that borrows its names: most questions are about values only.
#[derive(Clone, Copy)]
enum Rung<'a> {
    BuiltIn,
    BuiltInClass(&'a str),
    Class(&'a str),
    ClassGpu(&'a str, &'a GpuSelector),
    Tenant,
    TenantGpu(&'a GpuSelector),
}

impl From<Rung<'_>> for Level {
    fn from(rung: Rung<'_>) -> Self {
        match rung {
            Rung::BuiltIn => Self::BuiltIn,
            Rung::BuiltInClass(name) => Self::BuiltInClass(name.to_owned()),
            Rung::Class(name) => Self::Class(name.to_owned()),
            Rung::ClassGpu(name, gpu) => Self::ClassGpu(name.to_owned(), gpu.clone()),
            Rung::Tenant => Self::Tenant,
            Rung::TenantGpu(gpu) => Self::TenantGpu(gpu.clone()),
        }
    }
}

/// The limits that play a part for one tenant and GPU, strongest first.
pub(crate) struct Layers<'a>(Vec<(Rung<'a>, &'a Limits)>);

impl<'a> Layers<'a> {
    /// Of a tenant, where `selectors` name the GPU, most specific first.
    pub(crate) fn of_tenant(
        policy: &'a Policy,
        tenant: &'a Tenant,
        selectors: &'a [GpuSelector],
    ) -> Self {
        // Most that there can be: tenant, class, built-in class, each plain and by three selectors, and the default.
        let mut layers = Vec::with_capacity(13);
        if !tenant.gpu.is_empty() {
            layers.extend(selectors.iter().filter_map(|selector| {
                let limits = tenant.gpu.get(selector)?;
                Some((Rung::TenantGpu(selector), &**limits))
            }));
        }
        layers.push((Rung::Tenant, &tenant.limits));
        Self(layers).with_class(policy, tenant.class_name(), selectors)
    }

    /// Of a class without a tenant.
    pub(crate) fn of_class(
        policy: &'a Policy,
        class: &'a str,
        selectors: &'a [GpuSelector],
    ) -> Self {
        Self(Vec::new()).with_class(policy, class, selectors)
    }

    fn with_class(
        mut self,
        policy: &'a Policy,
        name: &'a str,
        selectors: &'a [GpuSelector],
    ) -> Self {
        let (own, builtin) = policy.class_layers(name);
        for class in own.into_iter().chain(builtin) {
            if !class.gpu.is_empty() {
                self.0.extend(selectors.iter().filter_map(|selector| {
                    Some((Rung::ClassGpu(name, selector), &**class.gpu.get(selector)?))
                }));
            }
            let rung = if class.origin.is_builtin() {
                Rung::BuiltInClass(name)
            } else {
                Rung::Class(name)
            };
            self.0.push((rung, &class.limits));
        }
        self.0.push((Rung::BuiltIn, builtin::defaults()));
        self
    }

    /// The value that holds.
    pub(crate) fn first<T>(
        &self,
        field: impl Fn(&'a Limits) -> &'a Written<T>,
    ) -> Option<&'a Spanned<T>> {
        self.0
            .iter()
            .find_map(|(_, limits)| field(limits).as_deref())
    }

    /// The plain value that holds.
    fn value<T: Copy + 'a>(&self, field: impl Fn(&'a Limits) -> &'a Written<T>) -> T {
        self.first(field)
            .map(|spanned| spanned.value)
            .expect("the built-in defaults have every key but launch.burst")
    }

    fn text(&self, key: Key) -> Option<(Level, String, Origin)> {
        self.0.iter().find_map(|(level, limits)| {
            limits
                .get(key)
                .map(|(text, origin)| (Level::from(*level), text, origin.clone()))
        })
    }

    fn launch_burst(&self) -> u32 {
        self.first(|limits| &limits.launch_burst).map_or_else(
            || {
                let rate = self.value(|limits| &limits.launch_max).get();
                let events = rate.map_or(0, |rate| rate.events_in(BURST_NANOS));
                u32::try_from(events).unwrap_or(u32::MAX).max(LEAST_BURST)
            },
            |burst| burst.value,
        )
    }
}

fn memory(layers: &Layers<'_>) -> MemoryBudget {
    let bytes = |limit: Limit<Size>| limit.get().map(|size| size.0);
    MemoryBudget {
        max: bytes(layers.value(|limits| &limits.memory_max)),
        high: bytes(layers.value(|limits| &limits.memory_high)),
        min: layers.value(|limits| &limits.memory_min).0,
        on_max: layers.value(|limits| &limits.memory_on_max),
        on_high: layers.value(|limits| &limits.memory_on_high),
        wait_timeout: layers.value(|limits| &limits.memory_wait_timeout),
        managed: layers.value(|limits| &limits.memory_managed),
        context: layers.value(|limits| &limits.memory_context),
        host: bytes(layers.value(|limits| &limits.memory_host)),
        on_breach: layers.value(|limits| &limits.memory_on_breach),
    }
}

fn launch(layers: &Layers<'_>) -> LaunchBudget {
    LaunchBudget {
        max: layers.value(|limits| &limits.launch_max).get(),
        burst: layers.launch_burst(),
        on_max: layers.value(|limits| &limits.launch_on_max),
        patience: layers.value(|limits| &limits.launch_patience),
        pace: layers.value(|limits| &limits.launch_pace),
        graph_cost: layers.value(|limits| &limits.launch_graph_cost),
    }
}

fn time(layers: &Layers<'_>) -> TimeBudget {
    TimeBudget {
        weight: layers.value(|limits| &limits.time_weight).get(),
        max: layers.value(|limits| &limits.time_max).get(),
        starve_max: layers.value(|limits| &limits.time_starve_max),
        latency_target: layers.value(|limits| &limits.time_latency_target).get(),
    }
}

/// A policy as it is for one GPU.
pub struct OnGpu<'a> {
    policy: &'a Policy,
    selectors: [GpuSelector; 3],
}

impl<'a> OnGpu<'a> {
    /// Everything that holds for a tenant on this GPU. None if there is no such tenant.
    ///
    /// For each key the first of these that has it counts: the tenant's table for the GPU's UUID, for its index, for `"*"`; the
    /// tenant; the same four of its class; the built-in class of that name; the built-in default.
    pub fn budget(&self, tenant: &str) -> Option<Budget> {
        let policy = self.policy;
        let tenant = policy.tenants.get(tenant)?;
        let layers = self.layers(tenant);
        Some(Budget {
            class: tenant.class_name().to_owned(),
            priority: policy.class_priority(tenant.class_name()),
            exclusive: policy.class_exclusive(tenant.class_name()),
            memory: memory(&layers),
            launch: launch(&layers),
            time: time(&layers),
            fault: FaultBudget {
                on_xid: layers.value(|limits| &limits.fault_on_xid),
                xids: layers.value(|limits| &limits.fault_xids),
            },
            profile: ProfileBudget {
                factor: layers.value(|limits| &limits.anomaly_factor),
                budget: layers.value(|limits| &limits.insight_budget),
                always: layers.value(|limits| &limits.insight_profile),
            },
        })
    }

    /// What of a tenant's budget is about launches.
    pub fn launch(&self, tenant: &str) -> Option<LaunchBudget> {
        Some(launch(&self.layers(self.policy.tenants.get(tenant)?)))
    }

    fn layers(&self, tenant: &'a Tenant) -> Layers<'_> {
        Layers::of_tenant(self.policy, tenant, &self.selectors)
    }
}

/// A policy as it is for several GPUs: what holds where no table names a GPU is found once for all of them.
pub struct OnGpus<'a>(Vec<(u32, OnGpu<'a>)>);

impl OnGpus<'_> {
    /// What of a tenant's budget is about memory, by index of the GPU.
    pub fn memory(&self, tenant: &str) -> Vec<(u32, MemoryBudget)> {
        self.each(tenant, memory)
    }

    /// What of it is about GPU time.
    pub fn time(&self, tenant: &str) -> Vec<(u32, TimeBudget)> {
        self.each(tenant, time)
    }

    fn each<T: Clone>(&self, tenant: &str, of: impl Fn(&Layers<'_>) -> T) -> Vec<(u32, T)> {
        let Some((tenant, policy)) = self.0.first().and_then(|(_, on_gpu)| {
            let tenant = on_gpu.policy.tenants.get(tenant)?;
            Some((tenant, on_gpu.policy))
        }) else {
            return Vec::new();
        };
        let class = policy.classes.get(tenant.class_name());
        let named: Vec<&GpuSelector> = tenant
            .gpu
            .keys()
            .chain(class.into_iter().flat_map(|class| class.gpu.keys()))
            .filter(|selector| **selector != GpuSelector::Any)
            .collect();
        let mut unnamed: Option<T> = None;
        let on = |(index, on_gpu): &(u32, OnGpu<'_>)| {
            let is_named = named
                .iter()
                .any(|selector| on_gpu.selectors.contains(*selector));
            let found = match &unnamed {
                Some(known) if !is_named => known.clone(),
                _ => {
                    let found = of(&on_gpu.layers(tenant));
                    if !is_named {
                        unnamed = Some(found.clone());
                    }
                    found
                }
            };
            (*index, found)
        };
        self.0.iter().map(on).collect()
    }
}

impl Policy {
    /// The policy as it is for one GPU: what to ask for the budgets of many tenants.
    pub fn on(&self, gpu: &HostGpu) -> OnGpu<'_> {
        OnGpu {
            policy: self,
            selectors: GpuSelector::of(gpu),
        }
    }

    /// The policy as it is for several GPUs.
    pub fn on_each(&self, gpus: &[HostGpu]) -> OnGpus<'_> {
        OnGpus(gpus.iter().map(|gpu| (gpu.index, self.on(gpu))).collect())
    }

    /// Everything that holds for a tenant on a GPU, as [`OnGpu::budget`] says.
    pub fn effective(&self, tenant: &str, gpu: &HostGpu) -> Option<Budget> {
        self.on(gpu).budget(tenant)
    }

    /// Every value that holds for a tenant on a GPU, and what gave it. Empty if there is no such tenant.
    pub fn explain(&self, tenant: &str, gpu: &HostGpu) -> Vec<ExplainedValue> {
        let Some(tenant) = self.tenants.get(tenant) else {
            return Vec::new();
        };
        let class = tenant.class_name();
        let mut lines = vec![ExplainedValue {
            key: "cgroup",
            value: tenant.cgroup.value.to_string(),
            level: Level::Tenant,
            origin: Some(tenant.cgroup.origin.clone()),
        }];
        lines.push(ExplainedValue {
            key: "class",
            value: class.to_owned(),
            level: if tenant.class.is_some() {
                Level::Tenant
            } else {
                Level::BuiltIn
            },
            origin: tenant.class.as_ref().map(|class| class.origin.clone()),
        });
        let (own, builtin) = self.class_layers(class);
        let of_class =
            |key, value: String, own: Option<&Origin>, is_builtin: bool| ExplainedValue {
                key,
                value,
                level: match own {
                    Some(_) => Level::Class(class.to_owned()),
                    None if is_builtin => Level::BuiltInClass(class.to_owned()),
                    None => Level::BuiltIn,
                },
                origin: own.cloned(),
            };
        let priority = own
            .and_then(|class| class.priority.as_ref())
            .map(|priority| &priority.origin);
        lines.push(of_class(
            "priority",
            self.class_priority(class).to_string(),
            priority,
            builtin.is_some(),
        ));
        let exclusive = own
            .and_then(|class| class.exclusive.as_ref())
            .map(|exclusive| &exclusive.origin);
        lines.push(of_class(
            "exclusive",
            self.class_exclusive(class).to_string(),
            exclusive,
            builtin.is_some(),
        ));

        let selectors = GpuSelector::of(gpu);
        let layers = Layers::of_tenant(self, tenant, &selectors);
        lines.extend(Key::ALL.iter().map(|key| match layers.text(*key) {
            Some((level, text, origin)) => ExplainedValue {
                key: key.name(),
                value: text.trim_matches('"').to_owned(),
                level,
                origin: Some(origin).filter(|origin| !origin.is_builtin()),
            },
            // Only launch.burst has no fixed default.
            None => ExplainedValue {
                key: key.name(),
                value: layers.launch_burst().to_string(),
                level: Level::BuiltIn,
                origin: None,
            },
        }));
        lines
    }
}
