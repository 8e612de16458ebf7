//! The seam to a vendor's driver. NVIDIA is the first.

pub mod nvidia;
pub mod rm;
pub mod sched;

use std::{io, path::PathBuf};

use gpuquota_common::map::{Device, DeviceKey};

use crate::telemetry::Card;

/// What can go wrong with a driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The driver's nodes are not there.
    #[error(
        "{path}: {source}; is the driver loaded, and are its device nodes made (nvidia-modprobe)?"
    )]
    NoNode {
        /// Which node.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A driver call fails.
    #[error("{call} on {path}: {source}")]
    Call {
        /// The node.
        path: PathBuf,
        /// Which call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The driver answers a call with an error.
    #[error("{call} on {path}: status {status:#x}")]
    Status {
        /// The node.
        path: PathBuf,
        /// Which call.
        call: &'static str,
        /// RM status.
        status: u32,
    },
    /// More GPUs than the layouts hold.
    #[error("{found} GPUs; at most {most} are supported", most = gpuquota_common::map::MAX_GPUS)]
    TooMany {
        /// How many there are.
        found: usize,
    },
}

/// A GPU as the programs have to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The card.
    pub card: Card,
    /// Number by which clients name the GPU in the driver's calls.
    pub instance: u32,
    /// Whether the driver said so; else it was guessed from the order of the nodes.
    pub instance_known: bool,
}

/// The driver's nodes and GPUs on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Nodes by what the kernel side sees of them.
    pub devices: Vec<(DeviceKey, Device)>,
    /// GPUs, by index.
    pub gpus: Vec<Gpu>,
}

/// A vendor's driver.
pub trait Driver: Send + Sync {
    /// Finds the driver's nodes and which GPU is which in its calls.
    fn discover(&self, cards: &[Card]) -> Result<Topology, DriverError>;

    /// The node for managed memory, which is made on its first use.
    fn managed_node(&self) -> Option<(DeviceKey, Device)>;

    /// Whether calls of this driver version are understood.
    fn knows_version(&self, version: &str) -> bool;
}
