//! The D-Bus shapes of the types in [`control`](super): what both the server and the client speak.
//!
//! Things that may grow are dictionaries (`a{sv}`), so that a new key breaks no caller; fixed small records
//! are structs. Bytes are `t`, and [`UNLIMITED`] stands for "no limit".

use std::fmt;

use serde::{Deserialize, Serialize};
use zbus::zvariant::{Type, as_value};

use super::{
    Backend, BackendState, Finding, Gpu, ProcessUse, Tenant, TenantGpu, Verdict,
    wire_launch::LaunchDict, wire_memory::MemoryDict, wire_time::TimeDict,
};

/// Name on the bus.
pub const NAME: &str = "org.gpuquota.Enforcer1";
/// The object that carries [`MANAGER`].
pub const PATH: &str = "/org/gpuquota/Enforcer1";
/// The interface.
pub const MANAGER: &str = "org.gpuquota.Enforcer1.Manager";
/// Prefix of the error names.
pub const ERROR_PREFIX: &str = "org.gpuquota.Enforcer1.Error.";
/// The polkit action that allows changes.
pub const POLKIT_ACTION: &str = "org.gpuquota.enforcer1.manage";
/// A limit of this value is none.
pub const UNLIMITED: u64 = u64::MAX;

/// [`Tenant`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct TenantDict {
    #[serde(with = "as_value")]
    name: String,
    #[serde(with = "as_value")]
    cgroup: String,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    class: Option<String>,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    parent: Option<String>,
    #[serde(with = "as_value")]
    cgroups: Vec<String>,
    #[serde(with = "as_value", rename = "GPUs")]
    gpus: Vec<TenantGpuDict>,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    launch: Option<LaunchDict>,
}

/// [`TenantGpu`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct TenantGpuDict {
    #[serde(with = "as_value")]
    index: u32,
    #[serde(with = "as_value", rename = "UUID")]
    uuid: String,
    #[serde(with = "as_value")]
    memory_max: u64,
    #[serde(with = "as_value")]
    memory_high: u64,
    #[serde(with = "as_value")]
    memory_used: u64,
    #[serde(with = "as_value")]
    memory_peak: u64,
    #[serde(with = "as_value")]
    denials: u64,
    #[serde(with = "as_value")]
    breaches: u64,
    #[serde(with = "as_value")]
    processes: Vec<(u32, String, u64)>,
    #[serde(with = "as_value")]
    memory: MemoryDict,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    time: Option<TimeDict>,
}

/// [`Gpu`] as `a{sv}`.
#[derive(Clone, Debug, Serialize, Deserialize, Type)]
#[zvariant(signature = "a{sv}")]
#[serde(rename_all = "PascalCase")]
pub struct GpuDict {
    #[serde(with = "as_value")]
    index: u32,
    #[serde(with = "as_value", rename = "UUID")]
    uuid: String,
    #[serde(with = "as_value")]
    name: String,
    #[serde(with = "as_value")]
    memory_total: u64,
    #[serde(
        with = "as_value::optional",
        skip_serializing_if = "Option::is_none",
        default
    )]
    memory_used: Option<u64>,
}

/// [`Backend`] and [`Finding`] as `(sss)`.
pub type Triple = (String, String, String);

fn to_wire(limit: Option<u64>) -> u64 {
    limit.unwrap_or(UNLIMITED)
}

fn from_wire(limit: u64) -> Option<u64> {
    (limit != UNLIMITED).then_some(limit)
}

impl From<Tenant> for TenantDict {
    fn from(tenant: Tenant) -> Self {
        Self {
            name: tenant.name,
            cgroup: tenant.cgroup,
            class: tenant.class,
            parent: tenant.parent,
            cgroups: tenant.cgroups,
            gpus: tenant.gpus.into_iter().map(Into::into).collect(),
            launch: tenant.launch.map(Into::into),
        }
    }
}

impl From<TenantDict> for Tenant {
    fn from(dict: TenantDict) -> Self {
        Self {
            name: dict.name,
            cgroup: dict.cgroup,
            class: dict.class,
            parent: dict.parent,
            cgroups: dict.cgroups,
            gpus: dict.gpus.into_iter().map(Into::into).collect(),
            launch: dict.launch.map(Into::into),
        }
    }
}

impl From<TenantGpu> for TenantGpuDict {
    fn from(gpu: TenantGpu) -> Self {
        Self {
            index: gpu.gpu,
            uuid: gpu.uuid,
            memory_max: to_wire(gpu.memory_max),
            memory_high: to_wire(gpu.memory_high),
            memory_used: gpu.memory_used,
            memory_peak: gpu.memory_peak,
            denials: gpu.denials,
            breaches: gpu.breaches,
            processes: gpu
                .processes
                .into_iter()
                // A NUL would make the whole message invalid.
                .map(|p| (p.pid, p.comm.replace('\0', "\u{fffd}"), p.memory_used))
                .collect(),
            memory: gpu.memory.into(),
            time: gpu.time.map(Into::into),
        }
    }
}

impl From<TenantGpuDict> for TenantGpu {
    fn from(dict: TenantGpuDict) -> Self {
        Self {
            gpu: dict.index,
            uuid: dict.uuid,
            memory_max: from_wire(dict.memory_max),
            memory_high: from_wire(dict.memory_high),
            memory_used: dict.memory_used,
            memory_peak: dict.memory_peak,
            denials: dict.denials,
            breaches: dict.breaches,
            processes: dict
                .processes
                .into_iter()
                .map(|(pid, comm, memory_used)| ProcessUse {
                    pid,
                    comm,
                    memory_used,
                })
                .collect(),
            memory: dict.memory.into(),
            time: dict.time.map(Into::into),
        }
    }
}

impl From<Gpu> for GpuDict {
    fn from(gpu: Gpu) -> Self {
        Self {
            index: gpu.index,
            uuid: gpu.uuid,
            name: gpu.name,
            memory_total: gpu.memory_total,
            memory_used: gpu.memory_used,
        }
    }
}

impl From<GpuDict> for Gpu {
    fn from(dict: GpuDict) -> Self {
        Self {
            index: dict.index,
            uuid: dict.uuid,
            name: dict.name,
            memory_total: dict.memory_total,
            memory_used: dict.memory_used,
        }
    }
}

/// A word of an enumeration that this release does not know.
#[derive(Debug, thiserror::Error)]
#[error("the daemon sent the {what} {word:?}, which this release of gpuquotactl does not know")]
pub struct UnknownWord {
    what: &'static str,
    word: String,
}

impl fmt::Display for BackendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Active => "active",
            Self::Available => "available",
            Self::Unavailable => "unavailable",
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// [`Backend`] as (name, state, reason).
pub fn backend_to_wire(backend: Backend) -> Triple {
    (backend.name, backend.state.to_string(), backend.reason)
}

/// The opposite of [`backend_to_wire`].
pub fn backend_from_wire((name, state, reason): Triple) -> Result<Backend, UnknownWord> {
    let state = [
        BackendState::Active,
        BackendState::Available,
        BackendState::Unavailable,
    ]
    .into_iter()
    .find(|known| known.to_string() == state)
    .ok_or(UnknownWord {
        what: "backend state",
        word: state,
    })?;
    Ok(Backend {
        name,
        state,
        reason,
    })
}

/// [`Finding`] as (subject, verdict, detail).
pub fn finding_to_wire(finding: Finding) -> Triple {
    (finding.subject, finding.verdict.to_string(), finding.detail)
}

/// The opposite of [`finding_to_wire`].
pub fn finding_from_wire((subject, verdict, detail): Triple) -> Result<Finding, UnknownWord> {
    let verdict = [Verdict::Ok, Verdict::Info, Verdict::Warning, Verdict::Error]
        .into_iter()
        .find(|known| known.to_string() == verdict)
        .ok_or(UnknownWord {
            what: "verdict",
            word: verdict,
        })?;
    Ok(Finding {
        subject,
        verdict,
        detail,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use zbus::zvariant::{LE, Value, serialized::Context, to_bytes};

    use super::*;

    fn tenant() -> Tenant {
        Tenant {
            name: "vision".into(),
            cgroup: "/gpu.slice/vision.slice".into(),
            class: None,
            parent: Some("lab".into()),
            cgroups: vec!["/gpu.slice/vision.slice".into()],
            gpus: vec![TenantGpu {
                gpu: 1,
                uuid: "GPU-1".into(),
                memory_max: Some(40 << 30),
                memory_high: None,
                memory_used: 3,
                memory_peak: 4,
                denials: 5,
                breaches: 6,
                processes: vec![ProcessUse {
                    pid: 7,
                    comm: "python3".into(),
                    memory_used: 3,
                }],
                memory: crate::control::memory::TenantMemory {
                    min: 9,
                    host_max: Some(10),
                    host_processes: vec![(7, 8)],
                    ..Default::default()
                },
                time: Some(crate::control::TenantTime {
                    weight: 300,
                    ..Default::default()
                }),
            }],
            launch: None,
        }
    }

    #[test]
    fn a_tenant_survives_the_bus() {
        let context = Context::new_dbus(LE, 0);
        let bytes = to_bytes(context, &TenantDict::from(tenant())).expect("encode");
        let (dict, _): (TenantDict, _) = bytes.deserialize().expect("decode");
        assert_eq!(Tenant::from(dict), tenant());
    }

    #[test]
    fn no_limit_is_the_largest_number_and_no_class_is_no_key() {
        let context = Context::new_dbus(LE, 0);
        let bytes = to_bytes(context, &TenantDict::from(tenant())).expect("encode");
        let (raw, _): (HashMap<String, Value<'_>>, _) = bytes.deserialize().expect("decode");
        assert!(!raw.contains_key("Class"));
        let gpu =
            to_bytes(context, &TenantGpuDict::from(tenant().gpus[0].clone())).expect("encode");
        let (raw, _): (HashMap<String, Value<'_>>, _) = gpu.deserialize().expect("decode");
        assert_eq!(raw["MemoryHigh"], Value::U64(u64::MAX));
        assert_eq!(raw["MemoryMax"], Value::U64(40 << 30));
    }

    #[test]
    fn a_key_of_a_later_release_is_passed_over() {
        let gpu: HashMap<&str, Value<'_>> = HashMap::from([
            ("Index", 0_u32.into()),
            ("UUID", "GPU-0".into()),
            ("Name", "GPU".into()),
            ("MemoryTotal", 1_u64.into()),
            ("Future", vec![(1_u32, "x")].into()),
        ]);
        let bytes = to_bytes(Context::new_dbus(LE, 0), &gpu).expect("encode");
        let (dict, _): (GpuDict, _) = bytes.deserialize().expect("decode");
        assert_eq!(Gpu::from(dict).memory_used, None);
    }

    #[test]
    fn words_go_both_ways() {
        for state in [
            BackendState::Active,
            BackendState::Available,
            BackendState::Unavailable,
        ] {
            let backend = Backend {
                name: "notify".into(),
                state,
                reason: String::new(),
            };
            let back = backend_from_wire(backend_to_wire(backend.clone())).expect("known");
            assert_eq!(back, backend);
            assert_eq!(
                serde_json::to_value(state).expect("json"),
                state.to_string()
            );
        }
        for verdict in [Verdict::Ok, Verdict::Info, Verdict::Warning, Verdict::Error] {
            let finding = Finding {
                subject: "x".into(),
                verdict,
                detail: String::new(),
            };
            let back = finding_from_wire(finding_to_wire(finding.clone())).expect("known");
            assert_eq!(back, finding);
            assert_eq!(
                serde_json::to_value(verdict).expect("json"),
                verdict.to_string()
            );
        }
        assert!(backend_from_wire((String::new(), "odd".into(), String::new())).is_err());
    }
}
