//! Metrics for Prometheus: what is scraped is rendered from the state at that moment.
//!
//! [`Snapshot`] is plain data, [`render`] the pure part, [`server`] the endpoint. Because nothing is registered
//! ahead of a scrape, the series of a tenant exist from the start of the tenant and end with it. Labels are
//! bounded by the policy and the host: tenants, GPUs, classes, and the fixed words of `reason` and `map`.
//! `docs/metrics.md` describes every family.

mod baseline;
mod faults;
pub mod own;
mod profile;
pub mod server;
mod text;

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use self::text::{Exposition, Kind};
use crate::{
    baseline::Usual,
    control::{Pressure, TenantTime, launch::TenantLaunch},
    faults::tally::Counts,
};

/// Everything that one scrape shows.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Version of the daemon.
    pub version: String,
    /// Version of the NVIDIA driver.
    pub driver_version: String,
    /// Whether anything is refused.
    pub enforcing: bool,
    /// Whether NVML has answered lately.
    pub nvml_up: bool,
    /// The policy.
    pub policy: PolicySample,
    /// GPUs of the host, by index.
    pub gpus: Vec<GpuSample>,
    /// Tenants of the policy in force, by name.
    pub tenants: Vec<TenantSample>,
    /// Maps of the kernel side that can run full.
    pub maps: Vec<MapFill>,
    /// Events that were served, since the daemon runs.
    pub events: u64,
    /// Time that they waited until they were served, summed.
    pub event_lag: Duration,
    /// Events that were lost, since the ledger exists.
    pub events_lost: u64,
    /// Driver calls that were decoded, since the ledger exists.
    pub driver_calls: u64,
    /// Frees of handles that nobody knew, since the ledger exists.
    pub unknown_frees: u64,
    /// Scheduling controls that tenants issued on their own channels, since the ledger exists.
    pub own_controls: u64,
    /// What could not be accounted for, by reason, since the ledger exists.
    pub unaccounted: Vec<(&'static str, u64)>,
    /// What the daemon itself costs; absent if `/proc` does not tell.
    pub daemon: Option<own::Cost>,
}

/// The policy and the attempts to load one.
#[derive(Clone, Debug, Default)]
pub struct PolicySample {
    /// Counts the policies that were put into force.
    pub generation: u64,
    /// When the one in force came into force; absent before the first.
    pub loaded_at: Option<SystemTime>,
    /// From the order to the moment from which every decision was by it.
    pub enforced_after: Option<Duration>,
    /// Attempts that failed since the daemon runs, by reason.
    pub failures: Vec<(&'static str, u64)>,
    /// Warnings about the policy in force.
    pub warnings: u64,
}

/// A GPU.
#[derive(Clone, Debug, Default)]
pub struct GpuSample {
    /// NVML's index.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Bytes on the card.
    pub memory_size: u64,
    /// Bytes in use on the card, by NVML.
    pub memory_used: Option<u64>,
    /// Bytes that processes use, by NVML.
    pub memory_used_by_processes: Option<u64>,
    /// Bytes in the ledger, each counted once: those of governed processes and of the others.
    pub ledger: u64,
    /// What the board draws, milliwatts.
    pub power_mw: Option<u32>,
    /// What the board has used since the driver was loaded, millijoules.
    pub energy_mj: Option<u64>,
    /// Faults by code since the daemon runs; code 0 for those beyond the codes that are told apart.
    pub xids: BTreeMap<u32, u64>,
    /// Joules of the board that nobody used, and those of processes in no tenant, since tenants use the GPU.
    pub energy_of_none_and_others: Option<(f64, f64)>,
}

/// A tenant.
#[derive(Clone, Debug, Default)]
pub struct TenantSample {
    /// Name.
    pub name: String,
    /// Class, or empty.
    pub class: String,
    /// The tenant around it, or empty.
    pub parent: String,
    /// cgroups that exist.
    pub cgroups: u64,
    /// On each GPU.
    pub gpus: Vec<TenantGpuSample>,
    /// Launches; absent while no launch budget holds for it.
    pub launch: Option<TenantLaunch>,
    /// Usual launches a second.
    pub usual_launches: Option<Usual>,
    /// Kernels that took unusually long, since the daemon runs.
    pub anomalies: u64,
}

/// A tenant on a GPU. Usage includes nested tenants.
#[derive(Clone, Debug, Default)]
pub struct TenantGpuSample {
    /// GPU index.
    pub gpu: u32,
    /// Hard limit in bytes.
    pub max: Option<u64>,
    /// Soft limit in bytes.
    pub high: Option<u64>,
    /// Bytes charged now.
    pub used: u64,
    /// Most bytes ever charged.
    pub peak: u64,
    /// Refused allocations.
    pub denials: u64,
    /// Allocations above the limit that nothing could refuse.
    pub breaches: u64,
    /// Bytes that are reserved for it.
    pub min: u64,
    /// Bytes that are charged for contexts.
    pub context: u64,
    /// Bytes that are charged for managed memory.
    pub managed: u64,
    /// What NVML shows for its processes, less what is charged.
    pub drift: i64,
    /// Limit of pinned host memory in bytes.
    pub host_max: Option<u64>,
    /// Bytes of pinned host memory.
    pub host_used: u64,
    /// Refused allocations of pinned host memory.
    pub host_denials: u64,
    /// Processes with memory, without those of nested tenants.
    pub processes: u64,
    /// Time in which allocations waited for memory.
    pub memory_pressure: Pressure,
    /// GPU time; absent while it is not controlled.
    pub time: Option<TenantTime>,
    /// GPU faults.
    pub faults: Counts,
    /// Most bytes charged since the daemon runs.
    pub high_water: u64,
    /// Bytes by which use grew from second to second, summed since the daemon runs.
    pub growth: u64,
    /// Usual bytes; absent before there is enough to tell by.
    pub usual_memory: Option<Usual>,
    /// Usual part of the GPU's time.
    pub usual_time: Option<Usual>,
}

/// How full a map is.
#[derive(Clone, Debug)]
pub struct MapFill {
    /// Which, such as `objects`.
    pub map: &'static str,
    /// Entries in it.
    pub entries: u64,
    /// Entries that fit.
    pub capacity: u64,
}

/// The text that Prometheus reads (exposition format 0.0.4), handed to `sink` in pieces of whole lines until that returns false.
pub fn render(snapshot: &Snapshot, sink: &mut dyn FnMut(String) -> bool) {
    let mut out = Exposition::to(sink);
    daemon(&mut out, snapshot);
    policy(&mut out, snapshot);
    gpus(&mut out, &snapshot.gpus);
    tenants(&mut out, &snapshot.tenants);
    more_memory(&mut out, &snapshot.tenants);
    gpu_time(&mut out, &snapshot.tenants);
    faults::render(&mut out, &snapshot.gpus, &snapshot.tenants);
    baseline::render(&mut out, &snapshot.tenants);
    launches(&mut out, &snapshot.tenants);
    profile::render(&mut out, &snapshot.tenants);
    kernel_side(&mut out, snapshot);
    out.finish();
}

fn daemon(out: &mut Exposition<'_>, snapshot: &Snapshot) {
    out.family(
        "gpuquota_build_info",
        Kind::Gauge,
        "Version of the daemon; always 1.",
    )
    .labelled(&[("version", &snapshot.version)], 1_u64);
    out.family(
        "gpuquota_driver_info",
        Kind::Gauge,
        "Version of the NVIDIA driver; always 1.",
    )
    .labelled(&[("version", &snapshot.driver_version)], 1_u64);
    out.family(
        "gpuquota_enforcing",
        Kind::Gauge,
        "1 if allocations above a limit are refused, 0 if they are only counted.",
    )
    .plain(u64::from(snapshot.enforcing));
    out.family(
        "gpuquota_nvml_up",
        Kind::Gauge,
        "1 if NVML has answered lately.",
    )
    .plain(u64::from(snapshot.nvml_up));
    let Some(cost) = &snapshot.daemon else { return };
    out.family(
        "gpuquota_daemon_cpu_seconds_total",
        Kind::Counter,
        "CPU time of the daemon.",
    )
    .plain(cost.cpu_seconds);
    out.family(
        "gpuquota_daemon_resident_memory_bytes",
        Kind::Gauge,
        "Resident memory of the daemon.",
    )
    .plain(cost.resident_bytes);
    out.family(
        "gpuquota_daemon_threads",
        Kind::Gauge,
        "Threads of the daemon.",
    )
    .plain(cost.threads);
    out.family(
        "gpuquota_daemon_open_fds",
        Kind::Gauge,
        "Open descriptors of the daemon.",
    )
    .plain(cost.open_fds);
    out.family(
        "gpuquota_daemon_start_time_seconds",
        Kind::Gauge,
        "Start of the daemon, in seconds since 1970.",
    )
    .plain(cost.start_time);
}

fn policy(out: &mut Exposition<'_>, snapshot: &Snapshot) {
    let policy = &snapshot.policy;
    let tenants = u64::try_from(snapshot.tenants.len()).unwrap_or(u64::MAX);
    out.family(
        "gpuquota_tenants",
        Kind::Gauge,
        "Tenants of the policy in force.",
    )
    .plain(tenants);
    out.family(
        "gpuquota_policy_generation",
        Kind::Gauge,
        "Number of the policy in force; each one that is loaded counts one up.",
    )
    .plain(policy.generation);
    if let Some(age) = policy
        .loaded_at
        .and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok())
    {
        out.family(
            "gpuquota_policy_loaded_timestamp_seconds",
            Kind::Gauge,
            "When the policy came into force, in seconds since 1970.",
        )
        .plain(age.as_secs_f64());
    }
    if let Some(took) = policy.enforced_after {
        out.family(
            "gpuquota_policy_enforced_seconds",
            Kind::Gauge,
            "From the last order to load or change the policy to the moment from which every decision was by it.",
        )
        .plain(took.as_secs_f64());
    }
    out.family(
        "gpuquota_policy_warnings",
        Kind::Gauge,
        "Warnings about the policy in force; `gpuquotactl doctor` shows them.",
    )
    .plain(policy.warnings);
    let failures = out.family(
        "gpuquota_policy_load_failures_total",
        Kind::Counter,
        "Policies that did not load since the daemon runs; the one in force stayed.",
    );
    for (reason, count) in &policy.failures {
        failures.labelled(&[("reason", reason)], *count);
    }
}

fn gpus(out: &mut Exposition<'_>, gpus: &[GpuSample]) {
    let info = out.family(
        "gpuquota_gpu_info",
        Kind::Gauge,
        "A GPU of the host; always 1.",
    );
    for gpu in gpus {
        let index = gpu.index.to_string();
        info.labelled(
            &[("gpu", &index), ("uuid", &gpu.uuid), ("name", &gpu.name)],
            1_u64,
        );
    }
    let mut per_gpu = |name, help, value: fn(&GpuSample) -> Option<f64>| {
        let family = out.family(name, Kind::Gauge, help);
        for gpu in gpus {
            if let Some(value) = value(gpu) {
                family.labelled(&[("gpu", &gpu.index.to_string())], value);
            }
        }
    };
    per_gpu(
        "gpuquota_gpu_memory_size_bytes",
        "Memory on the card.",
        |gpu| Some(bytes(gpu.memory_size)),
    );
    per_gpu(
        "gpuquota_gpu_memory_used_bytes",
        "Memory in use on the card, by NVML; absent while NVML does not answer.",
        |gpu| gpu.memory_used.map(bytes),
    );
    per_gpu(
        "gpuquota_gpu_ledger_bytes",
        "Memory in the ledger: governed processes and all others, each byte once.",
        |gpu| Some(bytes(gpu.ledger)),
    );
    per_gpu(
        "gpuquota_gpu_ledger_drift_bytes",
        "What processes use by NVML, less the ledger. Contexts and what was there before the daemon are in it.",
        |gpu| Some(bytes(gpu.memory_used_by_processes?) - bytes(gpu.ledger)),
    );
    per_gpu(
        "gpuquota_gpu_power_watts",
        "What the board draws, by NVML.",
        |gpu| Some(f64::from(gpu.power_mw?) / 1000.0),
    );
    energy(out, gpus);
}

fn energy(out: &mut Exposition<'_>, gpus: &[GpuSample]) {
    let board = out.family(
        "gpuquota_gpu_energy_joules_total",
        Kind::Counter,
        "What the board has used since the driver was loaded, by NVML.",
    );
    for gpu in gpus {
        if let Some(millijoules) = gpu.energy_mj {
            board.labelled(
                &[("gpu", &gpu.index.to_string())],
                bytes(millijoules) / 1000.0,
            );
        }
    }
    let apart = out.family(
        "gpuquota_gpu_energy_apart_joules_total",
        Kind::Counter,
        "Energy of no tenant since tenants use the GPU: drawn while nobody used it (idle), or by processes in no tenant (others).",
    );
    for gpu in gpus {
        let index = gpu.index.to_string();
        if let Some((none, others)) = gpu.energy_of_none_and_others {
            for (user, joules) in [("idle", none), ("others", others)] {
                apart.labelled(&[("gpu", &index), ("user", user)], joules);
            }
        }
    }
}

fn tenants(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    let info = out.family("gpuquota_tenant_info", Kind::Gauge, "A tenant; always 1.");
    for tenant in tenants {
        let labels = [
            ("tenant", tenant.name.as_str()),
            ("class", &tenant.class),
            ("parent", &tenant.parent),
        ];
        info.labelled(&labels, 1_u64);
    }
    let cgroups = out.family(
        "gpuquota_tenant_cgroups",
        Kind::Gauge,
        "cgroups that are governed now.",
    );
    for tenant in tenants {
        cgroups.labelled(&[("tenant", &tenant.name)], tenant.cgroups);
    }
    let mut on_gpu = |name, kind, help, value| on_gpu(out, tenants, name, kind, help, value);
    on_gpu(
        "gpuquota_tenant_memory_used_bytes",
        Kind::Gauge,
        "Memory charged now, nested tenants included.",
        |gpu| bytes(gpu.used),
    );
    on_gpu(
        "gpuquota_tenant_memory_max_bytes",
        Kind::Gauge,
        "Hard limit; +Inf if there is none.",
        |gpu| limit(gpu.max),
    );
    on_gpu(
        "gpuquota_tenant_memory_high_bytes",
        Kind::Gauge,
        "Soft limit; +Inf if there is none.",
        |gpu| limit(gpu.high),
    );
    on_gpu(
        "gpuquota_tenant_memory_peak_bytes",
        Kind::Gauge,
        "Most memory ever charged.",
        |gpu| bytes(gpu.peak),
    );
    on_gpu(
        "gpuquota_tenant_memory_high_water_bytes",
        Kind::Gauge,
        "Most memory charged since the daemon knows the tenant to use the GPU.",
        |gpu| bytes(gpu.high_water),
    );
    on_gpu(
        "gpuquota_tenant_memory_growth_bytes_total",
        Kind::Counter,
        "Memory by which use grew from second to second, since then.",
        |gpu| bytes(gpu.growth),
    );
    on_gpu(
        "gpuquota_tenant_memory_denials_total",
        Kind::Counter,
        "Allocations that the tenant's limit refused.",
        |gpu| bytes(gpu.denials),
    );
    on_gpu(
        "gpuquota_tenant_memory_breaches_total",
        Kind::Counter,
        "Allocations above the limit that nothing could refuse.",
        |gpu| bytes(gpu.breaches),
    );
    on_gpu(
        "gpuquota_tenant_processes",
        Kind::Gauge,
        "Processes with memory on the GPU, without those of nested tenants.",
        |gpu| bytes(gpu.processes),
    );
    let pressure = out.family(
        "gpuquota_tenant_memory_pressure_seconds_total",
        Kind::Counter,
        "Time in which some allocations of the tenant, or all of its processes, waited for memory.",
    );
    for tenant in tenants {
        for gpu in &tenant.gpus {
            let index = gpu.gpu.to_string();
            for (reason, seconds) in stalled(&gpu.memory_pressure) {
                let labels = [
                    ("tenant", tenant.name.as_str()),
                    ("gpu", &index),
                    ("reason", reason),
                ];
                pressure.labelled(&labels, seconds);
            }
        }
    }
}

/// Seconds of pressure by their label `reason`.
fn stalled(pressure: &Pressure) -> [(&'static str, f64); 2] {
    [
        ("some", pressure.some.total.as_secs_f64()),
        ("full", pressure.full.total.as_secs_f64()),
    ]
}

/// A family with one value for each tenant and GPU.
fn on_gpu(
    out: &mut Exposition<'_>,
    tenants: &[TenantSample],
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&TenantGpuSample) -> f64,
) {
    let family = out.family(name, kind, help);
    for tenant in tenants {
        for gpu in &tenant.gpus {
            let labels = [
                ("tenant", tenant.name.as_str()),
                ("gpu", &gpu.gpu.to_string()),
            ];
            family.labelled(&labels, value(gpu));
        }
    }
}

/// Memory beyond one limit and its use.
fn more_memory(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_memory_min_bytes",
        Kind::Gauge,
        "Memory that is reserved for the tenant.",
        |gpu| bytes(gpu.min),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_memory_context_bytes",
        Kind::Gauge,
        "Memory charged for what the driver takes by itself.",
        |gpu| bytes(gpu.context),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_memory_managed_bytes",
        Kind::Gauge,
        "Managed memory that is charged, by its virtual size.",
        |gpu| bytes(gpu.managed),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_memory_drift_bytes",
        Kind::Gauge,
        "What NVML shows for the tenant's processes, less what is charged for them.",
        |gpu| signed(gpu.drift),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_host_memory_used_bytes",
        Kind::Gauge,
        "Host memory pinned for the GPU now, nested tenants included.",
        |gpu| bytes(gpu.host_used),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_host_memory_max_bytes",
        Kind::Gauge,
        "Limit of pinned host memory; +Inf if there is none.",
        |gpu| limit(gpu.host_max),
    );
    on_gpu(
        out,
        tenants,
        "gpuquota_tenant_host_memory_denials_total",
        Kind::Counter,
        "Allocations of pinned host memory that the tenant's limit refused.",
        |gpu| bytes(gpu.host_denials),
    );
}

fn gpu_time(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    let controlled = || {
        tenants.iter().flat_map(|tenant| {
            let gpus = tenant.gpus.iter();
            gpus.filter_map(|gpu| {
                Some((
                    tenant.name.as_str(),
                    gpu.gpu.to_string(),
                    gpu.time.as_ref()?,
                ))
            })
        })
    };
    let mut family = |name, kind, help, value: fn(&TenantTime) -> f64| {
        let family = out.family(name, kind, help);
        for (tenant, gpu, time) in controlled() {
            family.labelled(&[("tenant", tenant), ("gpu", &gpu)], value(time));
        }
    };
    family(
        "gpuquota_tenant_gpu_time_seconds_total",
        Kind::Counter,
        "GPU time used since the daemon knows the tenant, nested tenants included.",
        |time| time.used.as_secs_f64(),
    );
    family(
        "gpuquota_tenant_gpu_energy_joules_total",
        Kind::Counter,
        "Energy of the board by the tenant's GPU time, without what the board draws idle; nested tenants included.",
        |time| time.energy_joules,
    );
    family(
        "gpuquota_tenant_gpu_time_share_ratio",
        Kind::Gauge,
        "Part of the GPU's time in the last 10 seconds.",
        |time| time.share_10s,
    );
    family(
        "gpuquota_tenant_gpu_time_max_ratio",
        Kind::Gauge,
        "Ceiling as a part of the GPU's time; +Inf if there is none.",
        |time| time.max.unwrap_or(f64::INFINITY),
    );
    family(
        "gpuquota_tenant_gpu_time_weight",
        Kind::Gauge,
        "Weight among the tenants beside it.",
        |time| f64::from(time.weight),
    );
    family(
        "gpuquota_tenant_frozen",
        Kind::Gauge,
        "1 while the tenant is frozen on the GPU, for whatever reason.",
        |time| f64::from(u8::from(!time.frozen.is_empty())),
    );
    let pressure = out.family(
        "gpuquota_tenant_gpu_pressure_seconds_total",
        Kind::Counter,
        "Time in which some of the tenant's processes, or all of it, had work and could not do it.",
    );
    for (tenant, gpu, time) in controlled() {
        for (reason, seconds) in stalled(&time.pressure) {
            let labels = [("tenant", tenant), ("gpu", &gpu), ("reason", reason)];
            pressure.labelled(&labels, seconds);
        }
    }
}

fn launches(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    let mut family = |name, help, value: fn(&TenantLaunch) -> f64| {
        let family = out.family(name, Kind::Counter, help);
        for tenant in tenants {
            if let Some(launch) = &tenant.launch {
                family.labelled(&[("tenant", &tenant.name)], value(launch));
            }
        }
    };
    family(
        "gpuquota_tenant_launches_total",
        "Kernel launches on all GPUs, a graph as one.",
        |launch| bytes(launch.launches),
    );
    family(
        "gpuquota_tenant_launches_delayed_total",
        "Launches that had to wait for the budget.",
        |launch| bytes(launch.delayed),
    );
    family(
        "gpuquota_tenant_launch_delay_seconds_total",
        "Time that launches were made to wait.",
        |launch| bytes(launch.delay_usec) / 1e6,
    );
    family(
        "gpuquota_tenant_launches_denied_total",
        "Launches over the budget whose processes are ended for it.",
        |launch| bytes(launch.denied),
    );
    family(
        "gpuquota_tenant_launches_unheld_total",
        "Launches over the budget that went at once, because no daemon was there or the delay was too long.",
        |launch| bytes(launch.unheld.saturating_add(launch.overdue)),
    );
    family(
        "gpuquota_tenant_launches_evaded_total",
        "Launches of processes that somebody else had continued before their time.",
        |launch| bytes(launch.evaded),
    );
    family(
        "gpuquota_tenant_launch_storms_total",
        "Launch storms: processes that wanted far more launches than they may have, for long.",
        |launch| bytes(launch.storms),
    );
    let pressure = out.family(
        "gpuquota_tenant_launch_pressure_seconds_total",
        Kind::Counter,
        "Time in which some of the tenant's processes, or all that launch, were made to wait with their launches.",
    );
    for tenant in tenants {
        if let Some(launch) = &tenant.launch {
            for (reason, seconds) in stalled(&launch.pressure) {
                let labels = [("tenant", tenant.name.as_str()), ("reason", reason)];
                pressure.labelled(&labels, seconds);
            }
        }
    }
}

fn kernel_side(out: &mut Exposition<'_>, snapshot: &Snapshot) {
    let entries = out.family(
        "gpuquota_map_entries",
        Kind::Gauge,
        "Entries in a map of the kernel side.",
    );
    for fill in &snapshot.maps {
        entries.labelled(&[("map", fill.map)], fill.entries);
    }
    let capacity = out.family(
        "gpuquota_map_capacity_entries",
        Kind::Gauge,
        "Entries that fit into a map of the kernel side.",
    );
    for fill in &snapshot.maps {
        capacity.labelled(&[("map", fill.map)], fill.capacity);
    }
    let unaccounted = out.family(
        "gpuquota_unaccounted_total",
        Kind::Counter,
        "What could not be accounted for, since the ledger exists.",
    );
    for (reason, count) in &snapshot.unaccounted {
        unaccounted.labelled(&[("reason", reason)], *count);
    }
    out.family(
        "gpuquota_event_lag_seconds_total",
        Kind::Counter,
        "Time from an event in the kernel until the daemon served it, summed since the daemon runs.",
    )
    .plain(snapshot.event_lag.as_secs_f64());
    let mut counter = |name, help, value| {
        out.family(name, Kind::Counter, help).plain(value);
    };
    counter(
        "gpuquota_events_total",
        "Events of the kernel side that the daemon served since it runs.",
        snapshot.events,
    );
    counter(
        "gpuquota_events_lost_total",
        "Events of the kernel side that found no room; each loss is followed by a look at everything.",
        snapshot.events_lost,
    );
    counter(
        "gpuquota_driver_calls_total",
        "Driver calls for objects, memory and scheduling that were decoded, since the ledger exists.",
        snapshot.driver_calls,
    );
    counter(
        "gpuquota_unknown_frees_total",
        "Frees of handles that are not in the ledger; they change nothing.",
        snapshot.unknown_frees,
    );
    counter(
        "gpuquota_own_controls_total",
        "Scheduling controls that tenants issued, and those on channels that processes in no tenant did.",
        snapshot.own_controls,
    );
}

/// Exact below 2^53, which is 8 PiB.
#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus keeps every value as a 64-bit float"
)]
fn bytes(value: u64) -> f64 {
    value as f64
}

/// As exact as [`bytes`].
#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus keeps every value as a 64-bit float"
)]
fn signed(value: i64) -> f64 {
    value as f64
}

fn limit(value: Option<u64>) -> f64 {
    value.map_or(f64::INFINITY, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(snapshot: &Snapshot) -> String {
        let mut text = String::new();
        render(snapshot, &mut |piece| {
            text.push_str(&piece);
            true
        });
        text
    }

    fn snapshot() -> Snapshot {
        Snapshot {
            version: "1.2.3".into(),
            driver_version: "580.95.05".into(),
            enforcing: true,
            nvml_up: true,
            policy: PolicySample {
                generation: 4,
                loaded_at: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1500)),
                enforced_after: Some(Duration::from_micros(7500)),
                failures: vec![("policy", 2), ("io", 0)],
                warnings: 1,
            },
            gpus: vec![
                GpuSample {
                    index: 0,
                    uuid: "GPU-a".into(),
                    name: "NVIDIA \"H200\" \\ NVL".into(),
                    memory_size: 150_754_820_096,
                    memory_used: Some(3 << 30),
                    memory_used_by_processes: Some(2 << 30),
                    ledger: 3 << 30,
                    power_mw: Some(71_500),
                    energy_mj: Some(3_000_500),
                    xids: BTreeMap::from([(31, 2), (0, 1)]),
                    energy_of_none_and_others: Some((70.0, 0.5)),
                },
                GpuSample {
                    index: 1,
                    ..GpuSample::default()
                },
            ],
            tenants: vec![TenantSample {
                name: "vision".into(),
                class: "guaranteed".into(),
                gpus: vec![TenantGpuSample {
                    max: Some(40 << 30),
                    used: 12 << 30,
                    usual_memory: Some(Usual {
                        median: 1024.0,
                        mad: 64.0,
                    }),
                    growth: 4096,
                    denials: 3,
                    time: Some(TenantTime {
                        weight: 300,
                        max: Some(0.5),
                        used: Duration::from_millis(2500),
                        share_10s: 0.25,
                        frozen: vec!["ceiling".into()],
                        ..TenantTime::default()
                    }),
                    ..TenantGpuSample::default()
                }],
                launch: Some(TenantLaunch {
                    max: None,
                    burst: 0,
                    launches: 20_000,
                    delayed: 7,
                    delay_usec: 1_500_000,
                    overdue: 1,
                    denied: 0,
                    unheld: 2,
                    storms: 0,
                    evaded: 0,
                    pressure: Pressure::default(),
                    gaps: Vec::new(),
                    processes: Vec::new(),
                }),
                ..TenantSample::default()
            }],
            maps: vec![MapFill {
                map: "objects",
                entries: 7,
                capacity: 1 << 20,
            }],
            unaccounted: vec![("objects-full", 0)],
            daemon: Some(own::Cost {
                cpu_seconds: 1.25,
                ..own::Cost::default()
            }),
            ..Snapshot::default()
        }
    }

    #[test]
    fn the_text_is_as_prometheus_wants_it() {
        insta::assert_snapshot!(text_of(&snapshot()));
    }

    #[test]
    fn a_tenant_that_is_gone_has_no_series() {
        let mut snapshot = snapshot();
        assert!(text_of(&snapshot).contains("tenant=\"vision\""));
        snapshot.tenants.clear();
        assert!(!text_of(&snapshot).contains("vision"));
    }

    #[test]
    fn what_nvml_does_not_tell_is_absent_and_not_zero() {
        let text = text_of(&snapshot());
        assert!(text.contains("gpuquota_gpu_memory_used_bytes{gpu=\"0\"}"));
        assert!(!text.contains("gpuquota_gpu_memory_used_bytes{gpu=\"1\"}"));
        assert!(!text.contains("gpuquota_gpu_ledger_drift_bytes{gpu=\"1\"}"));
        assert!(text.contains("gpuquota_gpu_ledger_drift_bytes{gpu=\"0\"} -1073741824\n"));
    }

    /// Words that start with `gpuquota_`.
    fn names(text: &str) -> std::collections::BTreeSet<&str> {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("gpuquota_"))
            .collect()
    }

    #[test]
    fn alerts_dashboard_and_documentation_speak_of_what_there_is() {
        let text = text_of(&snapshot());
        let families = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let families: std::collections::BTreeSet<&str> = families.collect();
        let documented = names(include_str!("../../docs/metrics.md"));
        let missing: Vec<_> = families.difference(&documented).collect();
        assert!(missing.is_empty(), "not documented: {missing:?}");
        for (file, text) in [
            ("docs/metrics.md", include_str!("../../docs/metrics.md")),
            (
                "config/prometheus-rules.yaml",
                include_str!("../../config/prometheus-rules.yaml"),
            ),
            (
                "config/grafana-dashboard.json",
                include_str!("../../config/grafana-dashboard.json"),
            ),
        ] {
            // The prefix alone is how the documentation speaks of all of them.
            let unknown: Vec<_> = names(text)
                .into_iter()
                .filter(|name| *name != "gpuquota_" && !families.contains(name))
                .collect();
            assert!(unknown.is_empty(), "{file} speaks of {unknown:?}");
        }
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../config/grafana-dashboard.json"))
                .expect("JSON");
        let panels = dashboard["panels"].as_array().expect("panels");
        assert!(
            panels
                .iter()
                .all(|panel| panel["targets"][0]["expr"].is_string())
        );
    }
}
