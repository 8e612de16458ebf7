//! The library behind `gpuquotad` and `gpuquotactl`.

pub mod cgroup;
pub mod client;
pub mod config;
pub mod control;
pub mod kernel;
pub mod notify;
