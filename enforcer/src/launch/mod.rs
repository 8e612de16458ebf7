//! Launch budgets: how fast the processes of a tenant may launch kernels.
//!
//! Pure: [`limits`] (policy to limits), [`bucket`] (the token bucket outside of the kernel), [`stopper`] (who may be
//! continued), [`symbols`] (where probes go).

pub mod bucket;
pub mod limits;
pub mod stopper;
pub mod symbols;
