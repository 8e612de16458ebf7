//! The library behind `gpuquotad` and `gpuquotactl`.

pub mod config;
pub mod control;
