//! NVML as a [`Source`].

use std::{ffi::OsStr, path::Path, time::Instant};

use nvml_wrapper::{Device, Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use super::{Card, Snapshot, Source, TelemetryError};

/// The library, initialised.
pub struct NvmlSource(Nvml);

impl NvmlSource {
    /// Loads `library`, or what the loader finds under the usual name, and initialises it.
    pub fn open(library: Option<&Path>) -> Result<Self, TelemetryError> {
        let name = library.map_or(OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
        Nvml::builder()
            .lib_path(name)
            .init()
            .map(Self)
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
    fn snapshot(&self) -> Result<Snapshot, NvmlError> {
        let cards = (0..self.0.device_count()?)
            .map(|index| card(index, &self.0.device_by_index(index)?))
            .collect::<Result<_, _>>()?;
        Ok(Snapshot {
            driver_version: self.0.sys_driver_version()?,
            cards,
            at: Instant::now(),
        })
    }
}

fn card(index: u32, device: &Device<'_>) -> Result<Card, NvmlError> {
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
        uuid: device.uuid()?,
        name: device.name()?,
        minor: device.minor_number()?,
        memory_total: memory.total,
        memory_used: memory.used,
        power_mw: device.power_usage().ok(),
        energy_mj: device.total_energy_consumption().ok(),
        processes,
    })
}
