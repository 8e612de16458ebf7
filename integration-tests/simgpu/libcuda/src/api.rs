//! The exported functions.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::driver::{self, Context, Driver, driver};
use crate::error::{self, CuResult};
use crate::kernel::{self, Event, Function, Graph, Module, Stream};
use crate::memory::{GRANULARITY, PITCH_ALIGN};

/// Version of the API that driver 580 has.
const CUDA_VERSION: c_int = 13000;
/// Handles of the default streams: null, legacy, per thread.
const DEFAULT_STREAMS: std::ops::RangeInclusive<usize> = 0..=2;

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

fn done(result: Result<(), CuResult>) -> CuResult {
    match result {
        Ok(()) => error::SUCCESS,
        Err(error) => error,
    }
}

/// Stores a result where the application asked for it.
fn out<T>(place: *mut T, value: T) -> Result<(), CuResult> {
    if place.is_null() {
        return Err(error::INVALID_VALUE);
    }
    // SAFETY: the API's contract is that a pointer that is not null leads to such a value.
    unsafe { place.write(value) };
    Ok(())
}

/// What a handle that this library gave out leads to.
fn behind<'a, T>(handle: *const T) -> Result<&'a T, CuResult> {
    // SAFETY: the API's contract is that a handle is one that was given out and not destroyed.
    unsafe { handle.as_ref() }.ok_or(error::INVALID_HANDLE)
}

/// As [`behind`], to change it.
fn behind_mut<'a, T>(handle: *mut T) -> Result<&'a mut T, CuResult> {
    // SAFETY: as in `behind`; the application does not use one handle from two threads at once.
    unsafe { handle.as_mut() }.ok_or(error::INVALID_HANDLE)
}

/// Takes a handle back.
fn destroy<T>(handle: *mut T) -> Result<(), CuResult> {
    if handle.is_null() {
        return Err(error::INVALID_HANDLE);
    }
    // SAFETY: handles come from `Box::into_raw`, and destroying one is its last use.
    drop(unsafe { Box::from_raw(handle) });
    Ok(())
}

fn give<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn text<'a>(text: *const c_char) -> Result<&'a str, CuResult> {
    if text.is_null() {
        return Err(error::INVALID_VALUE);
    }
    // SAFETY: the API's contract is a string that ends in zero.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| error::INVALID_VALUE)
}

fn current() -> Result<Arc<Context>, CuResult> {
    driver()?;
    CURRENT
        .with_borrow(|stack| stack.last().cloned())
        .ok_or(error::INVALID_CONTEXT)
}

fn device_index(device: c_int) -> Result<usize, CuResult> {
    usize::try_from(device).map_err(|_| error::INVALID_DEVICE)
}

/// Context and channel that a stream handle stands for.
fn with_stream<T>(
    stream: *const Stream,
    work: impl FnOnce(&Arc<Context>, usize) -> Result<T, CuResult>,
) -> Result<T, CuResult> {
    if DEFAULT_STREAMS.contains(&stream.addr()) {
        driver()?;
        return CURRENT.with_borrow(|stack| {
            let context = stack.last().ok_or(error::INVALID_CONTEXT)?;
            work(context, 0)
        });
    }
    let stream = behind(stream)?;
    work(&stream.context, stream.channel)
}

fn launch(
    function: *const Function,
    stream: *const Stream,
    params: *const *const u64,
) -> Result<(), CuResult> {
    let driver = driver()?;
    let function = behind(function)?;
    with_stream(stream, |context, channel| {
        kernel::launch(driver, context, channel, function, || {
            first_argument(params)
        })
    })
}

/// The first kernel argument, if it is one of eight bytes.
fn first_argument(params: *const *const u64) -> u64 {
    if params.is_null() {
        return 0;
    }
    // SAFETY: the kernels that have arguments here have an address first.
    unsafe { params.read().as_ref() }.copied().unwrap_or(0)
}

fn synchronize(stream: *const Stream) -> Result<(), CuResult> {
    let driver = driver()?;
    with_stream(stream, |context, channel| {
        context.launcher.synchronize(channel)
    })?;
    driver.memory.trim(driver);
    Ok(())
}

fn set_current(context: Option<Arc<Context>>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
}

fn forget_context(id: usize) {
    CURRENT.with_borrow_mut(|stack| stack.retain(|context| context.id != id));
}

fn allocate(
    place: *mut u64,
    take: impl FnOnce(&Driver, &Context) -> Result<u64, CuResult>,
) -> Result<(), CuResult> {
    if place.is_null() {
        return Err(error::INVALID_VALUE);
    }
    let context = current()?;
    let address = take(driver()?, &context)?;
    out(place, address)
}

fn attribute(device: &driver::Device, attribute: c_int) -> c_int {
    match attribute {
        // Threads per block, warp size, processors, clock kHz.
        1 => 1024,
        10 => 32,
        16 => 132,
        13 => 1_980_000,
        // PCI bus; device and domain are 0.
        33 => c_int::from(device.pci_bus),
        // Compute capability, its major part.
        75 => 9,
        // Can map host memory, unified addressing, managed memory and its concurrent use, virtual memory
        // management, memory pools.
        19 | 41 | 83 | 89 | 102 | 115 => 1,
        // Also the minor part of the compute capability.
        _ => 0,
    }
}

/// `CUDA_KERNEL_NODE_PARAMS`, as far as both versions agree.
#[repr(C)]
pub struct KernelNodeParams {
    func: *const Function,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: *const *const u64,
    extra: *const *const c_void,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *const Stream,
    attributes: *const c_void,
    attribute_count: c_uint,
}

/// `CUmemAllocationProp`, the part that matters here.
#[repr(C)]
pub struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
}

/// Location type: a device.
const LOCATION_DEVICE: c_int = 1;

macro_rules! api {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> CuResult {
                let work = || -> Result<(), CuResult> { $body };
                done(work())
            }
        )*

        /// The functions above by name.
        fn by_name(name: &str) -> Option<*mut c_void> {
            match name {
                $(stringify!($name) => Some($name as *mut c_void),)*
                "cuLaunchKernel" => Some(cuLaunchKernel as *mut c_void),
                "cuLaunchKernel_ptsz" => Some(cuLaunchKernel_ptsz as *mut c_void),
                "cuGraphLaunch" => Some(cuGraphLaunch as *mut c_void),
                _ => None,
            }
        }
    };
}

api! {
    /// Starts the driver.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(error::INVALID_VALUE);
        }
        driver::init()
    }

    /// Version of the API.
    fn cuDriverGetVersion(version: *mut c_int) {
        out(version, CUDA_VERSION)
    }

    /// Name of an error code.
    fn cuGetErrorName(code: CuResult, name: *mut *const c_char) {
        let found = error::text(code);
        out(name, found.map_or(std::ptr::null(), |(name, _)| name.as_ptr().cast()))?;
        found.map(|_| ()).ok_or(error::INVALID_VALUE)
    }

    /// Description of an error code.
    fn cuGetErrorString(code: CuResult, description: *mut *const c_char) {
        let found = error::text(code);
        out(description, found.map_or(std::ptr::null(), |(_, text)| text.as_ptr().cast()))?;
        found.map(|_| ()).ok_or(error::INVALID_VALUE)
    }

    /// A function of this library by its name without version.
    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        function: *mut *mut c_void,
        _version: c_int,
        flags: u64,
        status: *mut c_int,
    ) {
        const PER_THREAD_STREAM: u64 = 2;
        let name = text(symbol)?;
        let mut names = Vec::new();
        if flags & PER_THREAD_STREAM != 0 {
            names.extend([format!("{name}_v2_ptsz"), format!("{name}_ptsz")]);
        }
        names.extend([format!("{name}_v2"), name.to_owned()]);
        let found = names.iter().find_map(|name| by_name(name));
        out(function, found.unwrap_or(std::ptr::null_mut()))?;
        if !status.is_null() {
            // CU_GET_PROC_ADDRESS_SUCCESS or SYMBOL_NOT_FOUND.
            out(status, c_int::from(found.is_none()))?;
        }
        found.map(|_| ()).ok_or(error::NOT_FOUND)
    }

    /// Number of GPUs.
    fn cuDeviceGetCount(count: *mut c_int) {
        out(count, c_int::try_from(driver()?.devices.len()).unwrap_or(c_int::MAX))
    }

    /// A GPU by number.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        driver()?.device(device_index(ordinal)?)?;
        out(device, ordinal)
    }

    /// Name of a GPU.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        let device = driver()?.device(device_index(device)?)?;
        let length = usize::try_from(length).map_err(|_| error::INVALID_VALUE)?;
        if name.is_null() || length == 0 {
            return Err(error::INVALID_VALUE);
        }
        let bytes = device.name.as_bytes();
        let count = bytes.len().min(length - 1);
        // SAFETY: the application says that `name` has room for `length` bytes.
        unsafe {
            name.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), count);
            name.add(count).write(0);
        }
        Ok(())
    }

    /// Memory of a GPU.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        let memory = driver()?.device(device_index(device)?)?.memory;
        out(bytes, usize::try_from(memory).unwrap_or(usize::MAX))
    }

    /// A property of a GPU.
    fn cuDeviceGetAttribute(value: *mut c_int, name: c_int, device: c_int) {
        out(value, attribute(driver()?.device(device_index(device)?)?, name))
    }

    /// UUID of a GPU.
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        out(uuid, driver()?.device(device_index(device)?)?.uuid)
    }

    /// UUID of a GPU.
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        out(uuid, driver()?.device(device_index(device)?)?.uuid)
    }

    /// Uses the primary context of a GPU.
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        let device = device_index(device)?;
        driver()?.device(device)?;
        out(context, driver()?.retain_primary(device)?)
    }

    /// Gives the primary context of a GPU back.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        driver()?.release_primary(device_index(device)?, false)
    }

    /// Ends the primary context of a GPU whoever uses it.
    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        driver()?.release_primary(device_index(device)?, true)
    }

    /// Makes a context and makes it current.
    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) {
        let made = driver()?.create_context(device_index(device)?)?;
        out(context, made.id)?;
        CURRENT.with_borrow_mut(|stack| stack.push(made));
        Ok(())
    }

    /// Ends a context.
    fn cuCtxDestroy_v2(context: usize) {
        driver()?.destroy_context(context)?;
        forget_context(context);
        Ok(())
    }

    /// Makes a context current instead of the one that is.
    fn cuCtxSetCurrent(context: usize) {
        let context = match context {
            0 => None,
            id => Some(driver()?.context(id)?),
        };
        set_current(context);
        Ok(())
    }

    /// The current context.
    fn cuCtxGetCurrent(context: *mut usize) {
        driver()?;
        out(context, current().map_or(0, |context| context.id))
    }

    /// Makes a context current on top of the one that is.
    fn cuCtxPushCurrent_v2(context: usize) {
        let context = driver()?.context(context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    /// Goes back to the context before.
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        let popped = CURRENT
            .with_borrow_mut(Vec::pop)
            .ok_or(error::INVALID_CONTEXT)?;
        if context.is_null() {
            return Ok(());
        }
        out(context, popped.id)
    }

    /// GPU of the current context.
    fn cuCtxGetDevice(device: *mut c_int) {
        out(device, c_int::try_from(current()?.device).unwrap_or(c_int::MAX))
    }

    /// Waits for all work of the current context.
    fn cuCtxSynchronize() {
        current()?.launcher.synchronize_all()?;
        let driver = driver()?;
        driver.memory.trim(driver);
        Ok(())
    }

    /// Free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (all, left) = driver()?.memory_info(current()?.device)?;
        out(free, usize::try_from(left).unwrap_or(usize::MAX))?;
        out(total, usize::try_from(all).unwrap_or(usize::MAX))
    }

    /// Allocates video memory.
    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        allocate(address, |driver, context| {
            driver.memory.alloc(driver, context, size as u64)
        })
    }

    /// Allocates rows of video memory.
    fn cuMemAllocPitch_v2(
        address: *mut u64,
        pitch: *mut usize,
        width: usize,
        height: usize,
        _element: c_uint,
    ) {
        let row = (width as u64)
            .checked_next_multiple_of(PITCH_ALIGN)
            .ok_or(error::OUT_OF_MEMORY)?;
        let size = row.checked_mul(height as u64).ok_or(error::OUT_OF_MEMORY)?;
        allocate(address, |driver, context| driver.memory.alloc(driver, context, size))?;
        out(pitch, usize::try_from(row).unwrap_or(usize::MAX))
    }

    /// Frees video memory.
    fn cuMemFree_v2(address: u64) {
        let driver = driver()?;
        driver.memory.free(driver, address)
    }

    /// Allocates from the pool of the current GPU.
    fn cuMemAllocAsync(address: *mut u64, size: usize, _stream: *const Stream) {
        allocate(address, |driver, context| {
            driver.memory.alloc_async(driver, context, size as u64)
        })
    }

    /// As `cuMemAllocAsync`, for per-thread streams.
    fn cuMemAllocAsync_ptsz(address: *mut u64, size: usize, stream: *const Stream) {
        // SAFETY: same contract.
        done_result(unsafe { cuMemAllocAsync(address, size, stream) })
    }

    /// Allocates from a pool; there is one for each GPU.
    fn cuMemAllocFromPoolAsync(
        address: *mut u64,
        size: usize,
        _pool: usize,
        stream: *const Stream,
    ) {
        // SAFETY: same contract.
        done_result(unsafe { cuMemAllocAsync(address, size, stream) })
    }

    /// The pool of a GPU.
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) {
        let device = device_index(device)?;
        driver()?.device(device)?;
        out(pool, (device + 1) << 8)
    }

    /// Frees memory of a pool.
    fn cuMemFreeAsync(address: u64, _stream: *const Stream) {
        let driver = driver()?;
        driver.memory.free(driver, address)
    }

    /// As `cuMemFreeAsync`, for per-thread streams.
    fn cuMemFreeAsync_ptsz(address: u64, stream: *const Stream) {
        // SAFETY: same contract.
        done_result(unsafe { cuMemFreeAsync(address, stream) })
    }

    /// Allocates memory that moves between host and GPU.
    fn cuMemAllocManaged(address: *mut u64, size: usize, _flags: c_uint) {
        allocate(address, |driver, context| {
            driver.memory.alloc_managed(driver, context, size as u64)
        })
    }

    /// Allocates pinned host memory.
    fn cuMemAllocHost_v2(address: *mut u64, size: usize) {
        allocate(address, |driver, context| {
            driver.memory.alloc_host(driver, context, size as u64)
        })
    }

    /// Allocates pinned host memory.
    fn cuMemHostAlloc(address: *mut u64, size: usize, _flags: c_uint) {
        allocate(address, |driver, context| {
            driver.memory.alloc_host(driver, context, size as u64)
        })
    }

    /// Frees pinned host memory.
    fn cuMemFreeHost(address: u64) {
        let driver = driver()?;
        driver.memory.unpin(driver, address, true)
    }

    /// Pins memory of the application.
    fn cuMemHostRegister_v2(address: u64, size: usize, _flags: c_uint) {
        let context = current()?;
        let driver = driver()?;
        driver
            .memory
            .register_host(driver, &context, address, size as u64)
    }

    /// Undoes `cuMemHostRegister`.
    fn cuMemHostUnregister(address: u64) {
        let driver = driver()?;
        driver.memory.unpin(driver, address, false)
    }

    /// Sets bytes. Managed memory has contents; video memory has none here.
    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        let driver = driver()?;
        let Some(rest) = driver.memory.managed_rest(address) else {
            current()?;
            return Ok(());
        };
        if count as u64 > rest {
            return Err(error::INVALID_VALUE);
        }
        driver.memory.touch(driver, current()?.device, address)?;
        let address = usize::try_from(address).map_err(|_| error::INVALID_VALUE)?;
        // SAFETY: the range is managed memory that this library mapped, checked above.
        unsafe {
            std::ptr::without_provenance_mut::<u8>(address).write_bytes(value, count);
        }
        Ok(())
    }

    /// Granularity of `cuMemCreate`.
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        _prop: *const AllocationProp,
        _option: c_int,
    ) {
        out(granularity, usize::try_from(GRANULARITY).unwrap_or(usize::MAX))
    }

    /// Allocates video memory without an address.
    fn cuMemCreate(handle: *mut u64, size: usize, prop: *const AllocationProp, _flags: u64) {
        let driver = driver()?;
        let prop = behind(prop).map_err(|_| error::INVALID_VALUE)?;
        if prop.location_type != LOCATION_DEVICE || handle.is_null() {
            return Err(error::INVALID_VALUE);
        }
        let device = device_index(prop.location_id)?;
        out(handle, driver.memory.create(driver, device, size as u64)?)
    }

    /// Gives memory of `cuMemCreate` back.
    fn cuMemRelease(handle: u64) {
        let driver = driver()?;
        driver.memory.release(driver, handle)
    }

    /// Reserves addresses.
    fn cuMemAddressReserve(
        address: *mut u64,
        size: usize,
        _alignment: usize,
        _hint: u64,
        _flags: u64,
    ) {
        if size == 0 || !(size as u64).is_multiple_of(GRANULARITY) {
            return Err(error::INVALID_VALUE);
        }
        out(address, driver()?.take_range(size as u64))
    }

    /// Gives addresses back.
    fn cuMemAddressFree(_address: u64, _size: usize) {
        driver().map(|_| ())
    }

    /// Puts memory at an address.
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, _flags: u64) {
        if offset != 0 {
            return Err(error::INVALID_VALUE);
        }
        driver()?.memory.map(address, size as u64, handle)
    }

    /// Lets the GPU use what is mapped.
    fn cuMemSetAccess(address: u64, size: usize, _access: *const c_void, _count: usize) {
        let driver = driver()?;
        driver.memory.set_access(driver, address, size as u64)
    }

    /// Undoes `cuMemMap`.
    fn cuMemUnmap(address: u64, size: usize) {
        let driver = driver()?;
        driver.memory.unmap(driver, address, size as u64)
    }

    /// Makes a stream.
    fn cuStreamCreate(stream: *mut *mut Stream, _flags: c_uint) {
        let context = current()?;
        driver()?.rm.uvm_plain(0x17)?;
        let channel = context.next_channel();
        out(stream, give(Stream { context, channel }))
    }

    /// Makes a stream with a priority, which has no effect here.
    fn cuStreamCreateWithPriority(stream: *mut *mut Stream, flags: c_uint, _priority: c_int) {
        // SAFETY: same contract.
        done_result(unsafe { cuStreamCreate(stream, flags) })
    }

    /// Ends a stream.
    fn cuStreamDestroy_v2(stream: *mut Stream) {
        destroy(stream)
    }

    /// Waits for a stream's work.
    fn cuStreamSynchronize(stream: *const Stream) {
        synchronize(stream)
    }

    /// As `cuStreamSynchronize`, for per-thread streams.
    fn cuStreamSynchronize_ptsz(stream: *const Stream) {
        synchronize(stream)
    }

    /// Whether a stream's work is done.
    fn cuStreamQuery(stream: *const Stream) {
        driver()?;
        let is_done = with_stream(stream, |context, channel| {
            let last = context.launcher.submitted(channel)?;
            context.launcher.is_done(channel, last)
        })?;
        if is_done { Ok(()) } else { Err(error::NOT_READY) }
    }

    /// Makes an event.
    fn cuEventCreate(event: *mut *mut Event, _flags: c_uint) {
        current()?;
        out(event, give(Event::default()))
    }

    /// Puts an event behind what a stream has to do.
    fn cuEventRecord(event: *mut Event, stream: *const Stream) {
        let event = behind_mut(event)?;
        event.point = Some(with_stream(stream, |context, channel| {
            let number = context.launcher.mark(channel)?;
            Ok((Arc::clone(context), channel, number))
        })?);
        Ok(())
    }

    /// As `cuEventRecord`, for per-thread streams.
    fn cuEventRecord_ptsz(event: *mut Event, stream: *const Stream) {
        // SAFETY: same contract.
        done_result(unsafe { cuEventRecord(event, stream) })
    }

    /// Waits for an event.
    fn cuEventSynchronize(event: *const Event) {
        match &behind(event)?.point {
            Some((context, channel, number)) => context.launcher.wait_for(*channel, *number),
            None => Ok(()),
        }
    }

    /// Whether an event has happened.
    fn cuEventQuery(event: *const Event) {
        match &behind(event)?.point {
            Some((context, channel, number)) if !context.launcher.is_done(*channel, *number)? => {
                Err(error::NOT_READY)
            }
            _ => Ok(()),
        }
    }

    /// Milliseconds between two events.
    fn cuEventElapsedTime(milliseconds: *mut f32, start: *const Event, end: *const Event) {
        let time = |event: *const Event| {
            let (context, channel, number) =
                behind(event)?.point.as_ref().ok_or(error::INVALID_HANDLE)?;
            context.launcher.time_of(*channel, *number)
        };
        let (start, end) = (time(start)?, time(end)?);
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "the API wants a float"
        )]
        out(milliseconds, (end as f64 - start as f64) as f32 / 1e6)
    }

    /// Ends an event.
    fn cuEventDestroy_v2(event: *mut Event) {
        destroy(event)
    }

    /// Loads a module from PTX text.
    fn cuModuleLoadData(module: *mut *mut Module, image: *const c_char) {
        current()?;
        out(module, give(Module::parse(text(image)?)?))
    }

    /// Loads a module from PTX text; the options are for the compiler, which there is none of.
    fn cuModuleLoadDataEx(
        module: *mut *mut Module,
        image: *const c_char,
        _count: c_uint,
        _options: *const c_int,
        _values: *const *const c_void,
    ) {
        // SAFETY: same contract.
        done_result(unsafe { cuModuleLoadData(module, image) })
    }

    /// Gives a module back.
    fn cuModuleUnload(module: *mut Module) {
        destroy(module)
    }

    /// A kernel of a module.
    fn cuModuleGetFunction(
        function: *mut *const Function,
        module: *const Module,
        name: *const c_char,
    ) {
        let found = behind(module)?.get(text(name)?).ok_or(error::NOT_FOUND)?;
        out(function, std::ptr::from_ref(found))
    }

    /// Loads a library, which is a module here; the options are for the compiler, which there is none of.
    fn cuLibraryLoadData(
        library: *mut *mut Module,
        image: *const c_char,
        _compiler: *const c_int,
        _compiler_values: *const *const c_void,
        _compiler_count: c_uint,
        _options: *const c_int,
        _values: *const *const c_void,
        _count: c_uint,
    ) {
        // SAFETY: same contract.
        done_result(unsafe { cuModuleLoadData(library, image) })
    }

    /// Gives a library back.
    fn cuLibraryUnload(library: *mut Module) {
        destroy(library)
    }

    /// A kernel of a library. The real library has handles of another kind for it; what launches takes both.
    fn cuLibraryGetKernel(kernel: *mut *const Function, library: *const Module, name: *const c_char) {
        let found = behind(library)?.get(text(name)?).ok_or(error::NOT_FOUND)?;
        out(kernel, std::ptr::from_ref(found))
    }

    /// The kernel of a library as a function of the current context.
    fn cuKernelGetFunction(function: *mut *const Function, kernel: *const Function) {
        current()?;
        let kernel = behind(kernel)?;
        // Kept for good: the real one lives as long as its library too, which here may be given back first.
        out(function, give(kernel.clone()).cast_const())
    }

    /// As `cuEventRecord`; the flags are about graphs.
    fn cuEventRecordWithFlags(event: *mut Event, stream: *const Stream, _flags: c_uint) {
        // SAFETY: same contract.
        done_result(unsafe { cuEventRecord(event, stream) })
    }

    /// As `cuEventRecordWithFlags`, for per-thread streams.
    fn cuEventRecordWithFlags_ptsz(event: *mut Event, stream: *const Stream, _flags: c_uint) {
        // SAFETY: same contract.
        done_result(unsafe { cuEventRecord(event, stream) })
    }

    /// Launches a kernel.
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: *const Function,
        params: *const *const u64,
        _extra: *const *const c_void,
    ) {
        let config = behind(config).map_err(|_| error::INVALID_VALUE)?;
        launch(function, config.stream, params)
    }

    /// As `cuLaunchKernelEx`, for per-thread streams.
    fn cuLaunchKernelEx_ptsz(
        config: *const LaunchConfig,
        function: *const Function,
        params: *const *const u64,
        extra: *const *const c_void,
    ) {
        // SAFETY: same contract.
        done_result(unsafe { cuLaunchKernelEx(config, function, params, extra) })
    }

    /// Launches a kernel whose blocks run together.
    fn cuLaunchCooperativeKernel(
        function: *const Function,
        _grid_x: c_uint,
        _grid_y: c_uint,
        _grid_z: c_uint,
        _block_x: c_uint,
        _block_y: c_uint,
        _block_z: c_uint,
        _shared: c_uint,
        stream: *const Stream,
        params: *const *const u64,
    ) {
        launch(function, stream, params)
    }

    /// As `cuLaunchCooperativeKernel`, for per-thread streams.
    fn cuLaunchCooperativeKernel_ptsz(
        function: *const Function,
        _grid_x: c_uint,
        _grid_y: c_uint,
        _grid_z: c_uint,
        _block_x: c_uint,
        _block_y: c_uint,
        _block_z: c_uint,
        _shared: c_uint,
        stream: *const Stream,
        params: *const *const u64,
    ) {
        launch(function, stream, params)
    }

    /// Makes a graph.
    fn cuGraphCreate(graph: *mut *mut Graph, _flags: c_uint) {
        out(graph, give(Graph::default()))
    }

    /// Adds a kernel to a graph; kernels run in the order in which they were added.
    fn cuGraphAddKernelNode_v2(
        node: *mut usize,
        graph: *mut Graph,
        _dependencies: *const usize,
        _count: usize,
        params: *const KernelNodeParams,
    ) {
        let graph = behind_mut(graph)?;
        let params = behind(params).map_err(|_| error::INVALID_VALUE)?;
        let function = behind(params.func)?.clone();
        graph.nodes.push((function, first_argument(params.params)));
        out(node, graph.nodes.len())
    }

    /// Makes a graph ready to launch.
    fn cuGraphInstantiateWithFlags(exec: *mut *mut Graph, graph: *const Graph, _flags: u64) {
        out(exec, give(behind(graph)?.clone()))
    }

    /// Makes a graph ready to launch.
    fn cuGraphInstantiate_v2(
        exec: *mut *mut Graph,
        graph: *const Graph,
        _error_node: *mut usize,
        _log: *mut c_char,
        _log_size: usize,
    ) {
        out(exec, give(behind(graph)?.clone()))
    }

    /// As `cuGraphLaunch`, for per-thread streams.
    fn cuGraphLaunch_ptsz(exec: *const Graph, stream: *const Stream) {
        graph_launch(exec, stream)
    }

    /// Ends a graph that was ready.
    fn cuGraphExecDestroy(exec: *mut Graph) {
        destroy(exec)
    }

    /// Ends a graph.
    fn cuGraphDestroy(graph: *mut Graph) {
        destroy(graph)
    }
}

fn done_result(code: CuResult) -> Result<(), CuResult> {
    if code == error::SUCCESS {
        Ok(())
    } else {
        Err(code)
    }
}

fn graph_launch(exec: *const Graph, stream: *const Stream) -> Result<(), CuResult> {
    let driver = driver()?;
    let graph = behind(exec)?;
    with_stream(stream, |context, channel| {
        graph.nodes.iter().try_for_each(|(function, argument)| {
            kernel::launch(driver, context, channel, function, || *argument)
        })
    })
}

unsafe extern "C" fn launch_kernel(
    function: *const Function,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    stream: *const Stream,
    params: *const *const u64,
    _extra: *const *const c_void,
) -> CuResult {
    done(launch(function, stream, params))
}

unsafe extern "C" fn launch_graph(exec: *const Graph, stream: *const Stream) -> CuResult {
    done(graph_launch(exec, stream))
}

/// Functions on whose first instruction probes are placed begin with `push %rbp`, as in the real library: the
/// kernel emulates that one instead of stepping over it.
macro_rules! entry {
    ($(#[$meta:meta])* $name:ident($($arg:ident: $type:ty),* $(,)?) => $target:ident) => {
        $(#[$meta])*
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> CuResult {
            std::arch::naked_asm!("push rbp", "pop rbp", "jmp {target}", target = sym $target)
        }

        $(#[$meta])*
        #[cfg(not(target_arch = "x86_64"))]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> CuResult {
            // SAFETY: same contract.
            unsafe { $target($($arg),*) }
        }
    };
}

entry! {
    /// Launches a kernel.
    cuLaunchKernel(
        function: *const Function,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: *const Stream,
        params: *const *const u64,
        extra: *const *const c_void,
    ) => launch_kernel
}

entry! {
    /// As `cuLaunchKernel`, for per-thread streams.
    cuLaunchKernel_ptsz(
        function: *const Function,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: *const Stream,
        params: *const *const u64,
        extra: *const *const c_void,
    ) => launch_kernel
}

entry! {
    /// Launches a graph.
    cuGraphLaunch(exec: *const Graph, stream: *const Stream) => launch_graph
}
