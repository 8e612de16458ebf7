//! Thawing what a daemon left frozen.

use std::{
    io,
    path::{Path, PathBuf},
};

use gpuquota_common::{
    map::{DeviceKey, Object, ObjectKey, kind},
    time::{Frozen, FrozenKey},
};
use tracing::{info, warn};

use super::act::{Client, Reach};
use crate::{
    kernel::{Kernel, KernelError, Leftovers, PinDir},
    lifecycle::{Proc, ProcessView},
};

/// Where it is written what is frozen.
pub trait Ledger {
    /// What is frozen.
    fn frozen(&self) -> Vec<(FrozenKey, Frozen)>;
    /// Channels of a client on a GPU.
    fn channels(&self, client: u32, gpu: u32) -> Vec<u32>;
    /// Writes down that something is thawed.
    fn clear(&mut self, key: FrozenKey) -> Result<(), KernelError>;
}

fn channels(objects: impl Iterator<Item = (ObjectKey, Object)>, client: u32, gpu: u32) -> Vec<u32> {
    objects
        .filter(|(key, object)| {
            key.client == client && object.kind == kind::CHANNEL && object.gpu == gpu
        })
        .map(|(key, _)| key.handle)
        .collect()
}

impl Ledger for &Kernel {
    fn frozen(&self) -> Vec<(FrozenKey, Frozen)> {
        Kernel::frozen(self)
    }
    fn channels(&self, client: u32, gpu: u32) -> Vec<u32> {
        channels(self.objects_of(client).into_iter(), client, gpu)
    }
    fn clear(&mut self, key: FrozenKey) -> Result<(), KernelError> {
        self.clear_frozen(key)
    }
}

impl Ledger for Leftovers {
    fn frozen(&self) -> Vec<(FrozenKey, Frozen)> {
        Self::frozen(self)
    }
    fn channels(&self, client: u32, gpu: u32) -> Vec<u32> {
        channels(self.objects(), client, gpu)
    }
    fn clear(&mut self, key: FrozenKey) -> Result<(), KernelError> {
        self.clear_frozen(key)
    }
}

/// Thaws everything that is written down as frozen, and returns how many clients that were.
///
/// A process that is gone needs nothing: the driver frees its channels with its files. One that cannot be thawed is
/// reported and stays written down, so that the next start tries again.
pub fn thaw_all(ledger: &mut dyn Ledger, node: DeviceKey, view: &dyn ProcessView) -> usize {
    let mut thawed = 0;
    for (key, frozen) in ledger.frozen() {
        match thaw(ledger, node, view, key, frozen) {
            Ok(()) => thawed += 1,
            Err(error) if error.is_gone() => {}
            Err(error) => {
                warn!(tgid = key.tgid, gpu = key.gpu, %error, "left frozen by an earlier daemon, and cannot be thawed");
                continue;
            }
        }
        if let Err(error) = ledger.clear(key) {
            warn!(%error, tgid = key.tgid, "thawed, but still written down as frozen");
        }
    }
    if thawed > 0 {
        info!(thawed, "thawed what an earlier daemon had frozen");
    }
    thawed
}

/// Where somebody else than the daemon finds what is frozen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// Directory of the pins.
    pub pins: PathBuf,
    /// Directory of the driver's nodes.
    pub device_dir: PathBuf,
}

impl Whereabouts {
    /// Thaws everybody, and says in the log if that does not work.
    pub fn thaw(&self) {
        // Opening would make it.
        if !self.pins.exists() {
            return;
        }
        let outcome = PinDir::open(&self.pins)
            .map_err(|source| ReleaseError::Node {
                path: self.pins.clone(),
                source,
            })
            .and_then(|pins| after_daemon(&pins, &self.device_dir));
        if let Err(error) = outcome {
            warn!(%error, "what the daemon froze cannot be thawed");
        }
    }
}

/// Thaws what a daemon that is gone left frozen, from its pins alone. Returns how many clients that were.
pub fn after_daemon(pins: &PinDir, device_dir: &Path) -> Result<usize, ReleaseError> {
    let Some(mut leftovers) = Leftovers::open(pins)? else {
        return Ok(0);
    };
    if leftovers.frozen().is_empty() {
        return Ok(0);
    }
    let control = device_dir.join("nvidiactl");
    let processes = Proc::new(&control).map_err(|source| ReleaseError::Node {
        path: control,
        source,
    })?;
    let node = processes.control();
    Ok(thaw_all(&mut leftovers, node, &processes))
}

/// Why nothing could be thawed.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The pinned maps cannot be read.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The pins or the driver's control node are not there.
    #[error("{path}: {source}")]
    Node {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn thaw(
    ledger: &dyn Ledger,
    node: DeviceKey,
    view: &dyn ProcessView,
    key: FrozenKey,
    frozen: Frozen,
) -> Result<(), super::act::ActError> {
    let reach = Reach::open(key.tgid, Some(frozen.started), view)?;
    let client = Client {
        handle: key.client,
        fd: frozen.fd,
    };
    // One at a time where the list is out of date: a channel that is gone must not keep the others frozen.
    let channels = ledger.channels(key.client, key.gpu);
    match reach.set_disabled(node, client, key.subdevice, &channels, false) {
        Err(error) if error.is_stale() => {
            let mut outcome = Ok(());
            for channel in channels {
                match reach.set_disabled(node, client, key.subdevice, &[channel], false) {
                    Ok(()) => {}
                    Err(error) if error.is_stale() => {}
                    Err(error) => outcome = Err(error),
                }
            }
            outcome
        }
        other => other,
    }
}
