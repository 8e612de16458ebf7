//! Boots a kernel in QEMU and runs a shell script in it, with programs of this workspace at hand.
//!
//! The host's kernel is one of many that gpuquota has to work on, and it may lack what a test needs (a security module, the
//! override helper, a kernel that is not locked down). A [`Vm`] packs the named programs with their shared libraries
//! into an initial ramdisk, boots the chosen [`Kernel`] under software emulation, runs the script as root and reports its
//! exit status and output. Neither KVM nor root is needed.
//!
//! ```no_run
//! use std::time::Duration;
//! use gpuquota_vm::{Kernel, Vm, built};
//!
//! let outcome = Vm::new("selftest-stock", Kernel::Stock)
//!     .cmdline("lockdown=integrity")
//!     .binary(built("gpuquotactl")?)
//!     .run("gpuquotactl selftest", Duration::from_mins(1))?;
//! assert_eq!(outcome.status, 0, "{}", outcome.output);
//! # Ok::<(), gpuquota_vm::Error>(())
//! ```
//!
//! The whole console of a run is kept in `target/vm/NAME.log`.

mod cpio;
mod elf;
mod error;
mod kernel;
pub mod native;
mod qemu;
mod vm;
mod workspace;

pub use error::Error;
pub use kernel::Kernel;
pub use vm::{Outcome, Vm};
pub use workspace::{built, built_test};
