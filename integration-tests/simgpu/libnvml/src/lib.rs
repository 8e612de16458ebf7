//! `libnvidia-ml.so.1` for the simulated GPU: the part of NVML that monitoring and the enforcer use.
//!
//! Everything it tells comes from the server's state file in the directory that `SIMGPU_DIR` names (`/dev` if
//! unset). Calls that NVML has and the model has no answer to return `NVML_ERROR_NOT_SUPPORTED`.
#![allow(
    clippy::missing_safety_doc,
    reason = "every function has the contract that NVIDIA documents for it"
)]

mod api;
mod report;
