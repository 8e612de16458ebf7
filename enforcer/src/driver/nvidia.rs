//! NVIDIA's driver.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
};

use gpuquota_common::{
    map::{Device, DeviceKey, MAX_GPUS, NO_GPU, device},
    nvidia::{IoctlCmd, card, class, ctrl, nr, nvos00, nvos64},
};
use nix::sys::stat::{major, minor};

use super::{
    Driver, DriverError, Gpu, Topology,
    rm::{self, RmError, get, put},
};
use crate::telemetry::Card;

/// Major versions whose headers were read; the layouts in `gpuquota_common::nvidia` hold for all of them.
const KNOWN_MAJORS: [u32; 8] = [535, 550, 560, 570, 575, 580, 590, 595];

/// The driver whose nodes are in one folder.
#[derive(Debug)]
pub struct Nvidia {
    device_dir: PathBuf,
}

impl Nvidia {
    /// The driver behind the nodes in `device_dir`, usually `/dev`.
    pub fn new(device_dir: &Path) -> Self {
        Self {
            device_dir: device_dir.to_owned(),
        }
    }

    fn node(&self, name: &str) -> PathBuf {
        self.device_dir.join(name)
    }
}

impl Driver for Nvidia {
    fn discover(&self, cards: &[Card]) -> Result<Topology, DriverError> {
        if cards.len() > MAX_GPUS as usize {
            return Err(DriverError::TooMany { found: cards.len() });
        }
        let mut devices = vec![node(&self.node("nvidiactl"), device::CONTROL, NO_GPU)?];
        devices.extend(self.managed_node());
        for card in cards {
            let path = self.node(&format!("nvidia{}", card.minor));
            devices.push(node(&path, device::GPU, card.index)?);
        }
        let instances = Control::open(&self.node("nvidiactl"))
            .and_then(|control| control.instances())
            .unwrap_or_else(|error| {
                tracing::warn!(%error, "the driver does not tell device instances; taking the order of the nodes");
                BTreeMap::new()
            });
        let gpus = cards
            .iter()
            .map(|card| {
                let known = instances.get(&card.minor).copied();
                Gpu {
                    card: card.clone(),
                    instance: known.unwrap_or(card.minor),
                    instance_known: known.is_some(),
                }
            })
            .collect();
        Ok(Topology { devices, gpus })
    }

    fn managed_node(&self) -> Option<(DeviceKey, Device)> {
        node(&self.node("nvidia-uvm"), device::UVM, NO_GPU).ok()
    }

    fn knows_version(&self, version: &str) -> bool {
        version
            .split('.')
            .next()
            .and_then(|major| major.parse().ok())
            .is_some_and(|major: u32| KNOWN_MAJORS.contains(&major))
    }
}

fn node(path: &Path, kind: u32, gpu: u32) -> Result<(DeviceKey, Device), DriverError> {
    let key = key_of(path).map_err(|source| DriverError::NoNode {
        path: path.to_owned(),
        source,
    })?;
    Ok((key, Device { kind, gpu }))
}

/// What the kernel side sees of a file: its device number, or file system and inode of a simulated node.
pub(crate) fn key_of(path: &Path) -> io::Result<DeviceKey> {
    Ok(key_of_metadata(&fs::metadata(path)?))
}

/// As [`key_of`], of an open file.
pub(crate) fn key_of_fd(fd: BorrowedFd<'_>) -> io::Result<DeviceKey> {
    let file = File::from(fd.try_clone_to_owned()?);
    Ok(key_of_metadata(&file.metadata()?))
}

fn key_of_metadata(metadata: &fs::Metadata) -> DeviceKey {
    if metadata.file_type().is_char_device() {
        DeviceKey {
            inode: 0,
            dev: kernel_dev(metadata.rdev()),
            reserved: 0,
        }
    } else {
        DeviceKey {
            inode: metadata.ino(),
            dev: kernel_dev(metadata.dev()),
            reserved: 0,
        }
    }
}

/// `dev_t` as the kernel holds it: 12 bits of major, 20 of minor.
#[expect(
    clippy::cast_possible_truncation,
    reason = "both parts are bounded by the kernel's own 32-bit type"
)]
fn kernel_dev(dev: u64) -> u32 {
    ((major(dev) as u32) << 20) | (minor(dev) as u32 & 0xf_ffff)
}

/// The handle of a client that was made just now, and is gone again: others were given out before it.
pub(crate) fn fresh_client(device_dir: &Path) -> Result<u32, DriverError> {
    Control::open(&device_dir.join("nvidiactl")).map(|control| control.client)
}

/// A client of our own, for questions to the driver.
struct Control {
    path: PathBuf,
    file: File,
    client: u32,
}

impl Control {
    fn open(path: &Path) -> Result<Self, DriverError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|source| DriverError::NoNode {
                path: path.to_owned(),
                source,
            })?;
        let mut control = Self {
            path: path.to_owned(),
            file,
            client: 0,
        };
        let mut alloc = [0u8; nvos64::SIZE as usize];
        put(&mut alloc, nvos64::CLASS, class::NV01_ROOT_CLIENT);
        control.call(
            "RM_ALLOC",
            IoctlCmd {
                nr: nr::RM_ALLOC,
                size: nvos64::SIZE,
            },
            &mut alloc,
            Some(nvos64::STATUS),
        )?;
        control.client = get(&alloc, nvos64::NEW);
        Ok(control)
    }

    /// Device instances by the minor number of the GPU's node.
    fn instances(&self) -> Result<BTreeMap<u32, u32>, DriverError> {
        // The whole table is the argument, as libcuda passes it.
        let mut entries = [0u8; 32 * card::SIZE];
        let size = u16::try_from(entries.len()).unwrap_or(u16::MAX);
        self.call(
            "CARD_INFO",
            IoctlCmd {
                nr: nr::CARD_INFO,
                size,
            },
            &mut entries,
            None,
        )?;
        entries
            .chunks_exact(card::SIZE)
            .filter(|entry| get(entry, card::VALID) & 0xff != 0)
            .map(|entry| {
                let instance = self.instance(get(entry, card::GPU_ID))?;
                Ok((get(entry, card::MINOR), instance))
            })
            .collect()
    }

    /// The device instance of a GPU; the driver tells it of GPUs that are attached to the asking file.
    fn instance(&self, gpu_id: u32) -> Result<u32, DriverError> {
        const INSTANCE: usize = 8;
        let mut info = [0u8; 32];
        put(&mut info, 0, gpu_id);
        if self
            .control("GPU_GET_ID_INFO_V2", ctrl::GPU_GET_ID_INFO_V2, &mut info)
            .is_err()
        {
            // NV0000_CTRL_GPU_ATTACH_IDS_PARAMS: gpuIds[32], failedId. Unused slots hold the invalid id.
            let mut attach = [0xffu8; 132];
            put(&mut attach, 0, gpu_id);
            self.control("GPU_ATTACH_IDS", ctrl::GPU_ATTACH_IDS, &mut attach)?;
            info = [0; 32];
            put(&mut info, 0, gpu_id);
            self.control("GPU_GET_ID_INFO_V2", ctrl::GPU_GET_ID_INFO_V2, &mut info)?;
        }
        Ok(get(&info, INSTANCE))
    }

    fn control(
        &self,
        name: &'static str,
        command: u32,
        params: &mut [u8],
    ) -> Result<(), DriverError> {
        rm::control(
            self.file.as_fd(),
            name,
            (self.client, self.client),
            command,
            params,
        )
        .map_err(|error| self.error(error))
    }

    fn call(
        &self,
        name: &'static str,
        cmd: IoctlCmd,
        argument: &mut [u8],
        status_at: Option<usize>,
    ) -> Result<(), DriverError> {
        rm::call(self.file.as_fd(), name, cmd, argument, status_at)
            .map_err(|error| self.error(error))
    }

    fn error(&self, error: RmError) -> DriverError {
        let path = self.path.clone();
        match error {
            RmError::Call { call, source } => DriverError::Call { path, call, source },
            RmError::Status { call, status } => DriverError::Status { path, call, status },
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let mut free = [0u8; nvos00::SIZE as usize];
        put(&mut free, nvos00::ROOT, self.client);
        put(&mut free, nvos00::OBJECT, self.client);
        // The driver frees the client with the file anyway.
        let _ = self.call(
            "RM_FREE",
            IoctlCmd {
                nr: nr::RM_FREE,
                size: nvos00::SIZE,
            },
            &mut free,
            None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_known_by_their_major_number() {
        let driver = Nvidia::new(Path::new("/dev"));
        assert!(driver.knows_version("580.159.04"));
        assert!(!driver.knows_version("615.10"));
        assert!(!driver.knows_version("nonsense"));
    }

    #[test]
    fn device_numbers_are_the_kernels() {
        assert_eq!(
            kernel_dev(nix::sys::stat::makedev(195, 255)),
            195 << 20 | 255
        );
    }

    #[test]
    fn a_host_without_the_driver_is_told_what_is_missing() {
        let error = Nvidia::new(Path::new("/nonexistent"))
            .discover(&[])
            .expect_err("no nodes");
        assert!(error.to_string().contains("nvidiactl"), "{error}");
    }
}
