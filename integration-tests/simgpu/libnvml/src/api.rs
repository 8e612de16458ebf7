//! The exported functions.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuquota_simgpu::side;
use gpuquota_simgpu::sim::GpuConfig;
use gpuquota_simgpu::state::{GpuState, State};
use nvml_wrapper_sys::bindings as nvml;

use crate::report;

type Return = nvml::nvmlReturn_t;

const UNINITIALIZED: Return = nvml::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
const INVALID_ARGUMENT: Return = nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: Return = nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NOT_FOUND: Return = nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const INSUFFICIENT_SIZE: Return = nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const DRIVER_NOT_LOADED: Return = nvml::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED;
const TIMEOUT: Return = nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
const UNKNOWN: Return = nvml::nvmlReturn_enum_NVML_ERROR_UNKNOWN;

/// `nvmlEventTypeXidCriticalError`.
const EVENT_XID: c_ulonglong = 8;
/// How often a wait for an event looks.
const EVENT_PAUSE: Duration = Duration::from_millis(100);
/// PCI ids of the card: device and vendor, and the subsystem.
const PCI_DEVICE_ID: c_uint = 0x2335_10de;
/// An instance that a process is not in, when there are none.
const NO_INSTANCE: c_uint = 0xffff_ffff;

static USERS: AtomicU32 = AtomicU32::new(0);

/// An event set: by card, how many of its Xids were seen.
#[derive(Default)]
struct EventSet {
    cards: Mutex<BTreeMap<usize, usize>>,
}

fn read_state() -> Option<State> {
    let dir = std::env::var_os(side::DIR_VARIABLE)
        .filter(|dir| !dir.is_empty())
        .map_or_else(|| PathBuf::from("/dev"), PathBuf::from);
    let text = std::fs::read(dir.join(side::GPUS_FILE)).ok()?;
    serde_json::from_slice(&text).ok()
}

fn state() -> Result<State, Return> {
    if USERS.load(Ordering::Acquire) == 0 {
        return Err(UNINITIALIZED);
    }
    read_state().ok_or(UNKNOWN)
}

/// Handles are indices, one up so that none is null.
fn handle(index: usize) -> nvml::nvmlDevice_t {
    std::ptr::without_provenance_mut(index + 1)
}

fn with_card<T>(
    device: nvml::nvmlDevice_t,
    work: impl FnOnce(&State, &GpuState) -> Result<T, Return>,
) -> Result<T, Return> {
    let state = state()?;
    let gpu = device
        .addr()
        .checked_sub(1)
        .and_then(|index| state.gpus.get(index))
        .ok_or(INVALID_ARGUMENT)?;
    work(&state, gpu)
}

fn out<T>(place: *mut T, value: T) -> Result<(), Return> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: NVML's contract is that a pointer that is not null leads to such a value.
    unsafe { place.write(value) };
    Ok(())
}

fn read<T: Copy>(place: *const T) -> Result<T, Return> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: as in `out`.
    Ok(unsafe { place.read() })
}

fn out_text(place: *mut c_char, length: c_uint, text: &str) -> Result<(), Return> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller says that `place` has room for `length` bytes, which the text and its zero fit in.
    unsafe {
        place
            .cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

/// Writes a list where the caller has room for `count` entries, and their number to `count`.
fn out_list<T>(place: *mut T, count: *mut c_uint, list: Vec<T>) -> Result<(), Return> {
    let room = read(count)? as usize;
    out(count, c_uint::try_from(list.len()).unwrap_or(c_uint::MAX))?;
    if list.len() > room {
        return Err(INSUFFICIENT_SIZE);
    }
    if list.is_empty() {
        return Ok(());
    }
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    for (index, entry) in list.into_iter().enumerate() {
        // SAFETY: the caller says that there is room for `room` entries, checked above.
        unsafe { place.add(index).write(entry) };
    }
    Ok(())
}

fn text<'a>(text: *const c_char) -> Result<&'a str, Return> {
    if text.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: NVML's contract is a string that ends in zero.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| INVALID_ARGUMENT)
}

fn bus_id(gpu: &GpuState) -> String {
    format!("00000000:{:02X}:00.0", gpu.pci_bus)
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut result = [0; N];
    for (place, byte) in result.iter_mut().zip(text.bytes().take(N - 1)) {
        *place = byte.cast_signed();
    }
    result
}

/// Processes with a context on the card and what they hold there.
fn processes(gpu: &GpuState) -> impl Iterator<Item = (u32, u64)> {
    gpu.processes
        .iter()
        .filter(|(_, process)| process.has_context || process.bytes() > 0)
        .map(|(pid, process)| (*pid, process.bytes()))
}

fn find(matches: impl Fn(&GpuState) -> bool) -> Result<nvml::nvmlDevice_t, Return> {
    state()?
        .gpus
        .iter()
        .position(matches)
        .map(handle)
        .ok_or(NOT_FOUND)
}

fn init() -> Result<(), Return> {
    if read_state().is_none() {
        return Err(DRIVER_NOT_LOADED);
    }
    USERS.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

macro_rules! api {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the names are NVML's")]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> Return {
                let work = || -> Result<(), Return> { $body };
                match work() {
                    Ok(()) => nvml::nvmlReturn_enum_NVML_SUCCESS,
                    Err(code) => code,
                }
            }
        )*
    };
}

api! {
    /// Starts NVML.
    fn nvmlInit_v2() {
        init()
    }

    /// Starts NVML.
    fn nvmlInit() {
        init()
    }

    /// Starts NVML.
    fn nvmlInitWithFlags(_flags: c_uint) {
        init()
    }

    /// Ends NVML.
    fn nvmlShutdown() {
        USERS
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |users| users.checked_sub(1))
            .map(|_| ())
            .map_err(|_| UNINITIALIZED)
    }

    /// Version of the driver.
    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) {
        out_text(version, length, &state()?.driver_version)
    }

    /// Version of NVML.
    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) {
        out_text(version, length, &format!("13.{}", state()?.driver_version))
    }

    /// Version of CUDA.
    fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) {
        state()?;
        out(version, 13000)
    }

    /// Version of CUDA.
    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        state()?;
        out(version, 13000)
    }

    /// Command of a process.
    fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
        let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
        out_text(name, length, &String::from_utf8_lossy(first))
    }

    /// Number of cards.
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        out(count, c_uint::try_from(state()?.gpus.len()).unwrap_or(0))
    }

    /// A card by index.
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvml::nvmlDevice_t) {
        let index = index as usize;
        if index >= state()?.gpus.len() {
            return Err(INVALID_ARGUMENT);
        }
        out(device, handle(index))
    }

    /// A card by UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvml::nvmlDevice_t) {
        let wanted = GpuConfig::parse_uuid(text(uuid)?).map_err(|_| NOT_FOUND)?;
        out(device, find(|gpu| GpuConfig::parse_uuid(&gpu.uuid) == Ok(wanted))?)
    }

    /// A card by PCI bus id.
    fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut nvml::nvmlDevice_t) {
        let wanted = text(id)?;
        out(device, find(|gpu| bus_id(gpu).eq_ignore_ascii_case(wanted)
            || bus_id(gpu)[4..].eq_ignore_ascii_case(wanted))?)
    }

    /// Name.
    fn nvmlDeviceGetName(device: nvml::nvmlDevice_t, name: *mut c_char, length: c_uint) {
        with_card(device, |_, gpu| out_text(name, length, &gpu.name))
    }

    /// UUID.
    fn nvmlDeviceGetUUID(device: nvml::nvmlDevice_t, uuid: *mut c_char, length: c_uint) {
        with_card(device, |_, gpu| out_text(uuid, length, &gpu.uuid))
    }

    /// Index.
    fn nvmlDeviceGetIndex(device: nvml::nvmlDevice_t, index: *mut c_uint) {
        with_card(device, |_, gpu| out(index, gpu.index))
    }

    /// N of `/dev/nvidiaN`.
    fn nvmlDeviceGetMinorNumber(device: nvml::nvmlDevice_t, minor: *mut c_uint) {
        with_card(device, |_, gpu| out(minor, gpu.index))
    }

    /// Place on the bus.
    fn nvmlDeviceGetPciInfo_v3(device: nvml::nvmlDevice_t, pci: *mut nvml::nvmlPciInfo_t) {
        with_card(device, |_, gpu| {
            let id = bus_id(gpu);
            out(pci, nvml::nvmlPciInfo_t {
                busIdLegacy: chars(&id[4..]),
                domain: 0,
                bus: gpu.pci_bus.into(),
                device: 0,
                pciDeviceId: PCI_DEVICE_ID,
                pciSubSystemId: PCI_DEVICE_ID,
                busId: chars(&id),
            })
        })
    }

    /// Memory.
    fn nvmlDeviceGetMemoryInfo(device: nvml::nvmlDevice_t, memory: *mut nvml::nvmlMemory_t) {
        with_card(device, |_, gpu| out(memory, nvml::nvmlMemory_t {
            total: gpu.capacity,
            free: gpu.capacity.saturating_sub(gpu.used),
            used: gpu.used,
        }))
    }

    /// Memory.
    fn nvmlDeviceGetMemoryInfo_v2(
        device: nvml::nvmlDevice_t,
        memory: *mut nvml::nvmlMemory_v2_t,
    ) {
        with_card(device, |_, gpu| {
            let version = read(memory)?.version;
            out(memory, nvml::nvmlMemory_v2_t {
                version,
                total: gpu.capacity,
                reserved: 0,
                free: gpu.capacity.saturating_sub(gpu.used),
                used: gpu.used,
            })
        })
    }

    /// Use in the last second; that of the memory's bandwidth is not modelled and 0.
    fn nvmlDeviceGetUtilizationRates(
        device: nvml::nvmlDevice_t,
        rates: *mut nvml::nvmlUtilization_t,
    ) {
        with_card(device, |state, gpu| out(rates, nvml::nvmlUtilization_t {
            gpu: report::utilization(state, gpu),
            memory: 0,
        }))
    }

    /// Processes, oldest form.
    fn nvmlDeviceGetComputeRunningProcesses(
        device: nvml::nvmlDevice_t,
        count: *mut c_uint,
        infos: *mut nvml::nvmlProcessInfo_v1_t,
    ) {
        with_card(device, |_, gpu| {
            let list = processes(gpu)
                .map(|(pid, bytes)| nvml::nvmlProcessInfo_v1_t { pid, usedGpuMemory: bytes })
                .collect();
            out_list(infos, count, list)
        })
    }

    /// Processes.
    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvml::nvmlDevice_t,
        count: *mut c_uint,
        infos: *mut nvml::nvmlProcessInfo_v2_t,
    ) {
        running(device, count, infos)
    }

    /// Processes.
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvml::nvmlDevice_t,
        count: *mut c_uint,
        infos: *mut nvml::nvmlProcessInfo_v2_t,
    ) {
        running(device, count, infos)
    }

    /// Processes that draw; there are none.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: nvml::nvmlDevice_t,
        count: *mut c_uint,
        infos: *mut nvml::nvmlProcessInfo_v2_t,
    ) {
        with_card(device, |_, _| out_list(infos, count, Vec::new()))
    }

    /// Processes under MPS; there are none.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: nvml::nvmlDevice_t,
        count: *mut c_uint,
        infos: *mut nvml::nvmlProcessInfo_v2_t,
    ) {
        with_card(device, |_, _| out_list(infos, count, Vec::new()))
    }

    /// Use by process.
    fn nvmlDeviceGetProcessUtilization(
        device: nvml::nvmlDevice_t,
        samples: *mut nvml::nvmlProcessUtilizationSample_t,
        count: *mut c_uint,
        since: c_ulonglong,
    ) {
        with_card(device, |state, gpu| {
            let list: Vec<_> = report::samples(state, gpu, since)
                .into_iter()
                .map(|sample| nvml::nvmlProcessUtilizationSample_t {
                    pid: sample.pid,
                    timeStamp: sample.unix_us,
                    smUtil: sample.percent,
                    memUtil: 0,
                    encUtil: 0,
                    decUtil: 0,
                })
                .collect();
            if list.is_empty() {
                return Err(NOT_FOUND);
            }
            out_list(samples, count, list)
        })
    }

    /// Milliwatts.
    fn nvmlDeviceGetPowerUsage(device: nvml::nvmlDevice_t, milliwatts: *mut c_uint) {
        with_card(device, |state, gpu| {
            out(milliwatts, c_uint::try_from(report::power(state, gpu)).unwrap_or(c_uint::MAX))
        })
    }

    /// Millijoules since the driver was loaded.
    fn nvmlDeviceGetTotalEnergyConsumption(
        device: nvml::nvmlDevice_t,
        millijoules: *mut c_ulonglong,
    ) {
        with_card(device, |state, gpu| out(millijoules, report::energy(state, gpu)))
    }

    /// Kinds of events that there are.
    fn nvmlDeviceGetSupportedEventTypes(
        device: nvml::nvmlDevice_t,
        types: *mut c_ulonglong,
    ) {
        with_card(device, |_, _| out(types, EVENT_XID))
    }

    /// Makes a set of events to wait for.
    fn nvmlEventSetCreate(set: *mut nvml::nvmlEventSet_t) {
        state()?;
        out(set, Box::into_raw(Box::<EventSet>::default()).cast())
    }

    /// Adds the events of a card to a set.
    fn nvmlDeviceRegisterEvents(
        device: nvml::nvmlDevice_t,
        types: c_ulonglong,
        set: nvml::nvmlEventSet_t,
    ) {
        if types & !EVENT_XID != 0 {
            return Err(NOT_SUPPORTED);
        }
        let set = event_set(set)?;
        with_card(device, |_, gpu| {
            set.cards
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(gpu.index as usize, gpu.xids.len());
            Ok(())
        })
    }

    /// Waits for an event.
    fn nvmlEventSetWait_v2(
        set: nvml::nvmlEventSet_t,
        data: *mut nvml::nvmlEventData_t,
        timeout_ms: c_uint,
    ) {
        let set = event_set(set)?;
        let end = Instant::now() + Duration::from_millis(timeout_ms.into());
        loop {
            let state = state()?;
            let mut cards = set.cards.lock().unwrap_or_else(PoisonError::into_inner);
            for (index, seen) in cards.iter_mut() {
                let xid = state.gpus.get(*index).and_then(|gpu| gpu.xids.get(*seen));
                if let Some(xid) = xid {
                    *seen += 1;
                    return out(data, nvml::nvmlEventData_t {
                        device: handle(*index),
                        eventType: EVENT_XID,
                        eventData: xid.code.into(),
                        gpuInstanceId: NO_INSTANCE,
                        computeInstanceId: NO_INSTANCE,
                    });
                }
            }
            drop(cards);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TIMEOUT);
            }
            std::thread::sleep(left.min(EVENT_PAUSE));
        }
    }

    /// Ends a set of events.
    fn nvmlEventSetFree(set: nvml::nvmlEventSet_t) {
        event_set(set)?;
        // SAFETY: sets come from `nvmlEventSetCreate`, and freeing one is its last use.
        drop(unsafe { Box::from_raw(set.cast::<EventSet>()) });
        Ok(())
    }
}

fn event_set<'a>(set: nvml::nvmlEventSet_t) -> Result<&'a EventSet, Return> {
    // SAFETY: NVML's contract is that a set is one that was made and not freed.
    unsafe { set.cast::<EventSet>().as_ref() }.ok_or(INVALID_ARGUMENT)
}

fn running(
    device: nvml::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvml::nvmlProcessInfo_v2_t,
) -> Result<(), Return> {
    with_card(device, |_, gpu| {
        let list = processes(gpu)
            .map(|(pid, bytes)| nvml::nvmlProcessInfo_v2_t {
                pid,
                usedGpuMemory: bytes,
                gpuInstanceId: NO_INSTANCE,
                computeInstanceId: NO_INSTANCE,
            })
            .collect();
        out_list(infos, count, list)
    })
}

/// Text of a return code.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is NVML's")]
pub extern "C" fn nvmlErrorString(code: Return) -> *const c_char {
    let text = match code {
        nvml::nvmlReturn_enum_NVML_SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        TIMEOUT => c"Timeout",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// Calls without an answer in the model. Their arguments are not looked at.
macro_rules! not_supported {
    ($($name:ident)*) => {
        $(
            /// Not modelled.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the name is NVML's")]
            pub extern "C" fn $name() -> Return {
                NOT_SUPPORTED
            }
        )*
    };
}

not_supported! {
    nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingPids nvmlDeviceGetAccountingStats
    nvmlDeviceGetArchitecture nvmlDeviceGetAttributes_v2 nvmlDeviceGetBAR1MemoryInfo
    nvmlDeviceGetBoardId nvmlDeviceGetBrand nvmlDeviceGetClockInfo nvmlDeviceGetComputeMode
    nvmlDeviceGetCudaComputeCapability nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    nvmlDeviceGetDisplayMode nvmlDeviceGetEccMode nvmlDeviceGetEnforcedPowerLimit
    nvmlDeviceGetFanSpeed nvmlDeviceGetFieldValues nvmlDeviceGetGpuInstanceId
    nvmlDeviceGetMaxClockInfo nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex
    nvmlDeviceGetMigMode nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode
    nvmlDeviceGetPowerManagementLimit nvmlDeviceGetProcessesUtilizationInfo nvmlDeviceGetSamples
    nvmlDeviceGetSerial nvmlDeviceGetTemperature nvmlDeviceIsMigDeviceHandle
    nvmlDeviceSetAccountingMode nvmlDeviceSetComputeMode nvmlDeviceSetPersistenceMode
    nvmlDeviceSetPowerManagementLimit nvmlSystemGetHicVersion
}
