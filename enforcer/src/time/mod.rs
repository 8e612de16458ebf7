//! GPU time: weights, ceilings, exclusive classes, latency targets and the accounts behind them.
//!
//! The pure parts say what should hold, the thread in [`controller`] asks them whenever something changed or is
//! due, and [`act`] does it: by controls of the driver on a short-lived duplicate of the tenant's own control fd.

pub mod account;
pub mod act;
pub mod adopt;
pub mod ceiling;
pub mod controller;
pub mod energy;
pub mod engine;
pub mod gpu;
pub mod handles;
pub mod latency;
pub mod levers;
pub mod presence;
pub mod pressure;
pub mod priority;
pub mod release;
pub mod rules;
pub mod slices;
pub mod took;
pub mod utilization;

pub use controller::{HoldError, Parts, TimeControl};
pub use engine::Settings;
pub use rules::{Reason, rules};
