//! NVML as a [`Source`].

use std::{
    ffi::OsStr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nvml_wrapper::{Device, Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use crate::faults::PciAddress;

use super::{Card, EnergyReadings, Snapshot, Source, TelemetryError};

/// The energy counter of a GPU that no tenant uses is read this often.
const ENERGY_EVERY: Duration = Duration::from_secs(10);

/// The library, initialised.
pub struct NvmlSource {
    nvml: Nvml,
    /// What does not change while a card is there, by index; asked once, since every question costs the driver's lock.
    plates: Vec<Plate>,
    energy: Arc<EnergyReadings>,
}

/// The lasting facts of a card.
struct Plate {
    uuid: String,
    name: String,
    minor: u32,
    pci: Option<PciAddress>,
}

impl NvmlSource {
    /// Loads `library`, or what the loader finds under the usual name, and initialises it.
    pub fn open(
        library: Option<&Path>,
        energy: Arc<EnergyReadings>,
    ) -> Result<Self, TelemetryError> {
        let name = library.map_or(OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
        Nvml::builder()
            .lib_path(name)
            .init()
            .map(|nvml| Self {
                nvml,
                plates: Vec::new(),
                energy,
            })
            .map_err(|error| TelemetryError::Nvml(format!("{}: {error}", name.to_string_lossy())))
    }
}

impl Source for NvmlSource {
    fn read(&mut self) -> Result<Snapshot, TelemetryError> {
        self.snapshot()
            .map_err(|error| TelemetryError::Nvml(error.to_string()))
    }
}

impl NvmlSource {
    fn snapshot(&mut self) -> Result<Snapshot, NvmlError> {
        let count = self.nvml.device_count()?;
        let known = u32::try_from(self.plates.len()).unwrap_or(u32::MAX);
        if count != known {
            self.plates = (0..count)
                .map(|index| plate(&self.nvml.device_by_index(index)?))
                .collect::<Result<_, _>>()?;
        }
        let cards = (0..count)
            .zip(&self.plates)
            .map(|(index, plate)| {
                card(
                    index,
                    plate,
                    &self.nvml.device_by_index(index)?,
                    &self.energy,
                )
            })
            .collect::<Result<_, _>>()?;
        Ok(Snapshot {
            driver_version: self.nvml.sys_driver_version()?,
            cards,
            at: Instant::now(),
        })
    }
}

fn plate(device: &Device<'_>) -> Result<Plate, NvmlError> {
    Ok(Plate {
        uuid: device.uuid()?,
        name: device.name()?,
        minor: device.minor_number()?,
        pci: device
            .pci_info()
            .ok()
            .and_then(|pci| pci.bus_id.parse().ok()),
    })
}

fn card(
    index: u32,
    plate: &Plate,
    device: &Device<'_>,
    energy: &EnergyReadings,
) -> Result<Card, NvmlError> {
    let memory = device.memory_info()?;
    let processes = device
        .running_compute_processes()?
        .into_iter()
        .map(|process| {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            (process.pid, bytes)
        })
        .collect();
    Ok(Card {
        index,
        uuid: plate.uuid.clone(),
        name: plate.name.clone(),
        minor: plate.minor,
        pci: plate.pci,
        memory_total: memory.total,
        memory_used: memory.used,
        power_mw: device.power_usage().ok(),
        energy_mj: energy.read(index, ENERGY_EVERY, || {
            device.total_energy_consumption().ok()
        }),
        processes,
    })
}
