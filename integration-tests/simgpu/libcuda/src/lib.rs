//! `libcuda.so.1` for the simulated GPU: the driver API calls that matter, with the C interface of `cuda.h`.
//!
//! It asks the driver what the recorded library asks, in the same order. Which directory holds the devices is
//! told by `SIMGPU_DIR`; `CUDA_VISIBLE_DEVICES` works as usual. Not modelled: copies and the contents of
//! video memory, since a kernel here computes nothing.
#![allow(
    clippy::missing_safety_doc,
    reason = "every function has the contract that NVIDIA documents for it"
)]

mod api;
mod driver;
mod error;
mod kernel;
mod launch;
mod memory;
mod recorded;
mod rm;
