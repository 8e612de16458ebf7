//! The policy of gpuquota: TOML files in, validated budgets per tenant and GPU out.
//!
//! The crate does no input or output. The caller reads the files, orders them with [`merge_order`] and hands their text to
//! [`Policy::load`], which reports every problem of every file at once, or gives a [`Policy`] whose
//! [`effective`](Policy::effective) budgets the daemon puts into the kernel.
//!
//! ```
//! use gpuquota_policy::{HostGpu, Layer, Policy, Source};
//!
//! let text = r#"
//!     [tenant.vision]
//!     cgroup = "/gpu.slice/vision.slice"
//!     class = "guaranteed"
//!     memory.max = "40GiB"
//! "#;
//! let source = Source::new("/etc/gpuquota/policy.d/50-teams.toml", Layer::Admin, text);
//! let policy = Policy::load(&[source], None)?.policy;
//! let gpu = HostGpu { index: 0, uuid: "GPU-8b3f1c2e-0000-4000-8000-000000000001".into(), memory: 80 << 30 };
//! let budget = policy.effective("vision", &gpu).expect("the tenant is in the policy");
//! assert_eq!(budget.memory.max, Some(40 << 30));
//! assert_eq!(budget.time.weight, 800); // from the class
//! # Ok::<(), gpuquota_policy::Diagnostics>(())
//! ```
//!
//! The words, keys, units and the merge order are described for administrators in `docs/policy.md`.

mod budget;
mod builtin;
mod cgroup;
mod diagnostic;
pub mod dropin;
mod gpu;
mod limits;
mod load;
mod name;
mod policy;
mod print;
mod profile;
pub mod property;
mod raw;
mod source;
mod suggest;
mod validate;
mod values;
mod xids;

pub use budget::{
    Budget, ExplainedValue, FaultBudget, LaunchBudget, Level, MemoryBudget, OnGpu, OnGpus,
    ProfileBudget, TimeBudget,
};
pub use builtin::{BUILTIN_CLASSES, DEFAULT_CLASS};
pub use cgroup::{CgroupPattern, CgroupPatternError};
pub use diagnostic::{Diagnostic, Diagnostics, Related, Severity};
pub use gpu::{GpuSelector, GpuSelectorError, Host, HostGpu};
pub use limits::{Key, Limits, Written};
pub use load::{Loaded, MAX_FILE_BYTES};
pub use name::is_name;
pub use policy::{Class, Policy, Tenant};
pub use profile::{Factor, Share};
pub use source::{Layer, Origin, Source, Spanned, merge_order};
pub use validate::{CONTEXT_BYTES, MEMORY_CHUNK};
pub use values::{
    GraphCost, Limit, Managed, OnBreach, OnHigh, OnLaunchMax, OnMemoryMax, OnXid, Pace, Percent,
    Rate, RateUnit, Signal, Size, ValueError, Weight, format_duration, parse_duration,
};
pub use xids::Xids;
