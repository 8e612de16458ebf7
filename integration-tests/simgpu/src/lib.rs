//! A simulated GPU for tests and demonstrations on hosts without one.
//!
//! - [`sim`]: the driver's object and memory model, [`scheduler`]: the GPU's time. Both are pure: they are
//!   given calls and the time, and answer.
//! - [`side`] and [`state`]: the channel that the simulated libraries and the tests use next to the driver's.
//! - `server`: the file system that gives the model its device files.
//! - `fixture`: starts a server for a test and ends it.
//! - `tenant`: the workload behind `simtenant`.
//!
//! The model does what the recordings of driver 580.159.04 show; where the real driver differs, the model
//! is wrong.

pub mod bytes;
pub mod scheduler;
pub mod side;
pub mod sim;
pub mod state;

#[cfg(feature = "server")]
pub mod fixture;
#[cfg(feature = "server")]
pub mod libraries;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "server")]
pub mod tenant;
