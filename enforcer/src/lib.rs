//! The library behind `gpuquotad` and `gpuquotactl`.

pub mod control;
