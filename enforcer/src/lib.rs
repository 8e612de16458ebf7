//! The library behind `gpuquotad` and `gpuquotactl`.

pub mod alone;
pub mod backend;
pub mod cards;
pub mod cgroup;
pub mod client;
pub mod config;
pub mod context;
pub mod control;
pub mod doctor;
pub mod driver;
pub mod ending;
pub mod enforcer;
pub mod high;
pub mod journal;
pub mod kernel;
pub mod kubernetes;
pub mod launch;
pub mod lifecycle;
pub mod managed;
pub mod metrics;
pub mod notify;
pub mod open_files;
pub mod policy_files;
pub mod telemetry;
pub mod tenancy;
pub mod time;
