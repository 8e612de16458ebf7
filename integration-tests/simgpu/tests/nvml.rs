//! The simulated NVML through nvml-wrapper, as the daemon uses it.
#![allow(clippy::unwrap_used, reason = "a test panics")]

use std::time::Duration;

use gpuquota_simgpu::fixture::{Options, SimGpu};
use gpuquota_simgpu::side;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;

const GIB: u64 = 1 << 30;

#[test]
fn nvml_tells_what_the_server_knows() {
    let sim = SimGpu::spawn(&Options::default()).unwrap();
    // SAFETY: the only test of this program, so no other thread reads the environment.
    unsafe { std::env::set_var(side::DIR_VARIABLE, sim.devices()) };
    let library = sim.libraries().join("libnvidia-ml.so.1");
    let nvml = Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .unwrap();
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.159.04");
    assert_eq!(nvml.device_count().unwrap(), 2);
    let device = nvml.device_by_index(0).unwrap();
    let uuid = device.uuid().unwrap();
    assert_eq!(uuid, sim.truth().unwrap().gpus[0].uuid);
    assert_eq!(nvml.device_by_uuid(uuid).unwrap().index().unwrap(), 0);
    assert_eq!(nvml.device_by_index(1).unwrap().minor_number().unwrap(), 1);
    assert_eq!(device.name().unwrap(), "Simulated H200");
    let pci = device.pci_info().unwrap();
    assert_eq!((pci.bus, pci.bus_id.as_str()), (1, "00000000:01:00.0"));
    assert_eq!(
        nvml.device_by_pci_bus_id(pci.bus_id)
            .unwrap()
            .index()
            .unwrap(),
        0
    );
    let memory = device.memory_info().unwrap();
    assert_eq!((memory.total, memory.used), (16 * GIB, 0));
    assert!(device.running_compute_processes().unwrap().is_empty());
    assert!(matches!(
        device.process_utilization_stats(None),
        Err(NvmlError::NotFound)
    ));
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));

    let mut tenant = sim
        .tenant()
        .args([
            "script",
            "alloc 1GiB; launch --for 2500ms --kernel-us 500; hold 1h",
        ])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(2200));
    let processes = device.running_compute_processes().unwrap();
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0].pid, tenant.id());
    // A context costs 520 MiB, and 1 GiB more is exactly 1 GiB more.
    assert_eq!(
        processes[0].used_gpu_memory,
        UsedGpuMemory::Used(GIB + (520 << 20))
    );
    let utilization = device.utilization_rates().unwrap();
    assert!(utilization.gpu >= 90, "{utilization:?}");
    let samples = device.process_utilization_stats(None).unwrap();
    assert!(samples.len() >= 15, "{}", samples.len());
    assert!(samples.iter().all(|sample| sample.pid == tenant.id()));
    let newest = samples.iter().map(|sample| sample.timestamp).max().unwrap();
    let later = device.process_utilization_stats(newest);
    assert!(later.map_or(0, |samples| samples.len()) < 10);
    assert!(device.power_usage().unwrap() > 500_000);
    assert!(device.total_energy_consumption().unwrap() > 500_000);

    let events = device
        .register_events(
            EventTypes::CRITICAL_XID_ERROR,
            nvml.create_event_set().unwrap(),
        )
        .unwrap();
    assert!(matches!(events.wait(10), Err(NvmlError::Timeout)));
    sim.control("xid 0 79").unwrap();
    let event = events.wait(1000).unwrap();
    assert!(
        matches!(event.event_data, Some(XidError::Value(79))),
        "{event:?}"
    );
    tenant.kill().unwrap();
    tenant.wait().unwrap();
    sim.wait_until(Duration::from_secs(1), |state| state.used() == 0)
        .unwrap();
    assert!(device.running_compute_processes().unwrap().is_empty());
}
