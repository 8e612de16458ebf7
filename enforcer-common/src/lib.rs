//! What the eBPF programs and user space have to agree on.
//!
//! [`map`] and [`event`] hold the layouts that cross the border, with tests for size and offsets;
//! [`op`] names the ledger operations that user space asks the kernel side to perform; [`nvidia`]
//! is the driver's ABI as far as it is decoded, and [`rm`] decodes it, for both sides alike; [`launch`] is all of
//! launch budgets, [`waiting`] of the queue of allocations that wait, [`claim`] of what is reserved, [`insight`] of the leak finder,
//! [`profile`] of the launch profile, [`idle`] of what threads do while a GPU is idle.
#![no_std]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    reason = "words of the driver's and the kernel's structures are taken apart by their documented widths, in const \
              functions and for a target where `From` is no help"
)]

pub mod claim;
pub mod event;
pub mod fault;
pub mod idle;
pub mod insight;
pub mod launch;
pub mod map;
pub mod nvidia;
pub mod op;
pub mod profile;
pub mod rm;
pub mod time;
pub mod waiting;
