//! The driver API, loaded at run time: the simulated library or the real one.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::TenantError;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

/// A device address.
pub type Address = u64;

/// The library with a context on one GPU.
pub struct Cuda {
    library: Library,
    name: String,
    device: c_int,
    stream: *mut c_void,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Default)]
struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    reserved: [u64; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDesc {
    location_type: c_int,
    location_id: c_int,
    flags: c_int,
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *mut c_void,
    attributes: *mut c_void,
    attribute_count: c_uint,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
struct KernelNodeParams {
    func: *mut c_void,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: *mut c_void,
    context: *mut c_void,
}

/// A kernel.
#[derive(Clone, Copy)]
pub struct Kernel(*mut c_void);

/// A moment in the stream.
#[derive(Clone, Copy)]
pub struct Event(*mut c_void);

/// A graph that is ready to launch.
#[derive(Clone, Copy)]
pub struct GraphExec(*mut c_void);

/// Calls a function of the library by name and turns its code into an error.
macro_rules! call {
    ($self:ident, $name:ident($($arg:expr => $type:ty),* $(,)?)) => {{
        // SAFETY: the type is that of `cuda.h` for this name.
        let function = unsafe {
            $self.library.get::<unsafe extern "C" fn($($type),*) -> c_int>(
                concat!(stringify!($name), "\0").as_bytes(),
            )
        };
        match function {
            // SAFETY: the arguments are what the function's documentation asks for.
            Ok(function) => $self.check(stringify!($name), unsafe { function($($arg),*) }),
            Err(source) => Err($self.lacks(source)),
        }
    }};
}

impl Cuda {
    /// Loads the library and makes a context on a GPU.
    pub fn open(name: &str, device: c_int) -> Result<Self, TenantError> {
        // SAFETY: loading libcuda runs its initialisers, which is what it is for.
        let library = unsafe { Library::new(name) }.map_err(|source| TenantError::Library {
            library: name.to_owned(),
            source,
        })?;
        let mut cuda = Self {
            library,
            name: name.to_owned(),
            device,
            stream: std::ptr::null_mut(),
        };
        call!(cuda, cuInit(0 => c_uint))?;
        let mut context: *mut c_void = std::ptr::null_mut();
        call!(cuda, cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void, device => c_int))?;
        call!(cuda, cuCtxSetCurrent(context => *mut c_void))?;
        let mut stream = std::ptr::null_mut();
        call!(cuda, cuStreamCreate(&raw mut stream => *mut *mut c_void, 0 => c_uint))?;
        cuda.stream = stream;
        Ok(cuda)
    }

    fn lacks(&self, source: libloading::Error) -> TenantError {
        TenantError::Library {
            library: self.name.clone(),
            source,
        }
    }

    fn code_name(&self, code: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the type is that of `cuda.h`; `name` takes a pointer to a static string.
        unsafe {
            if let Ok(function) = self
                .library
                .get::<unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int>(
                    b"cuGetErrorName\0",
                )
            {
                function(code, &raw mut name);
            }
            if name.is_null() {
                format!("error {code}")
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), TenantError> {
        match code {
            0 => Ok(()),
            OUT_OF_MEMORY => Err(TenantError::OutOfMemory {
                code: self.code_name(code),
                asked: 0,
                got: 0,
            }),
            code => Err(TenantError::Call {
                call,
                code: self.code_name(code),
            }),
        }
    }

    /// Free and total bytes.
    pub fn memory_info(&self) -> Result<(u64, u64), TenantError> {
        let (mut free, mut total) = (0usize, 0usize);
        call!(self, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize))?;
        Ok((free as u64, total as u64))
    }

    /// `cuMemAlloc`.
    pub fn alloc(&self, size: u64) -> Result<Address, TenantError> {
        let mut address = 0;
        call!(self, cuMemAlloc_v2(&raw mut address => *mut Address, to_usize(size) => usize))?;
        Ok(address)
    }

    /// `cuMemFree`.
    pub fn free(&self, address: Address) -> Result<(), TenantError> {
        call!(self, cuMemFree_v2(address => Address))
    }

    /// `cuMemAllocAsync`.
    pub fn alloc_async(&self, size: u64) -> Result<Address, TenantError> {
        let mut address = 0;
        call!(self, cuMemAllocAsync(
            &raw mut address => *mut Address,
            to_usize(size) => usize,
            self.stream => *mut c_void,
        ))?;
        Ok(address)
    }

    /// `cuMemAllocFromPoolAsync` on the GPU's default pool.
    pub fn alloc_from_pool(&self, size: u64) -> Result<Address, TenantError> {
        let mut pool: *mut c_void = std::ptr::null_mut();
        call!(self, cuDeviceGetDefaultMemPool(&raw mut pool => *mut *mut c_void, self.device => c_int))?;
        let mut address = 0;
        call!(self, cuMemAllocFromPoolAsync(
            &raw mut address => *mut Address,
            to_usize(size) => usize,
            pool => *mut c_void,
            self.stream => *mut c_void,
        ))?;
        Ok(address)
    }

    /// `cuMemFreeAsync` and a synchronisation, after which the pool has given the memory back.
    pub fn free_async(&self, address: Address) -> Result<(), TenantError> {
        call!(self, cuMemFreeAsync(address => Address, self.stream => *mut c_void))?;
        self.synchronize()
    }

    /// `cuMemCreate` with an address, accessible; returns the address and the handle.
    pub fn create(&self, size: u64) -> Result<(Address, u64), TenantError> {
        let prop = AllocationProp {
            kind: 1,
            location_type: 1,
            location_id: self.device,
            ..AllocationProp::default()
        };
        let mut granularity = 0usize;
        call!(self, cuMemGetAllocationGranularity(
            &raw mut granularity => *mut usize,
            &raw const prop => *const AllocationProp,
            0 => c_int,
        ))?;
        let size = to_usize(size).next_multiple_of(granularity);
        let mut handle = 0u64;
        call!(self, cuMemCreate(
            &raw mut handle => *mut u64,
            size => usize,
            &raw const prop => *const AllocationProp,
            0 => u64,
        ))?;
        let mut address = 0;
        call!(self, cuMemAddressReserve(
            &raw mut address => *mut Address,
            size => usize,
            0 => usize,
            0 => Address,
            0 => u64,
        ))?;
        call!(self, cuMemMap(address => Address, size => usize, 0 => usize, handle => u64, 0 => u64))?;
        let access = AccessDesc {
            location_type: 1,
            location_id: self.device,
            flags: 3,
        };
        call!(self, cuMemSetAccess(
            address => Address,
            size => usize,
            &raw const access => *const AccessDesc,
            1 => usize,
        ))?;
        Ok((address, handle))
    }

    /// Undoes [`Self::create`].
    pub fn destroy(&self, address: Address, handle: u64, size: u64) -> Result<(), TenantError> {
        let size = to_usize(size).next_multiple_of(2 << 20);
        call!(self, cuMemUnmap(address => Address, size => usize))?;
        call!(self, cuMemRelease(handle => u64))?;
        call!(self, cuMemAddressFree(address => Address, size => usize))
    }

    /// `cuMemAllocManaged`.
    pub fn alloc_managed(&self, size: u64) -> Result<Address, TenantError> {
        let mut address = 0;
        call!(self, cuMemAllocManaged(
            &raw mut address => *mut Address,
            to_usize(size) => usize,
            1 => c_uint,
        ))?;
        Ok(address)
    }

    /// `cuMemAllocPitch` of rows as long as the square root of the size.
    pub fn alloc_pitch(&self, size: u64) -> Result<Address, TenantError> {
        let width = to_usize(size.isqrt().max(1));
        let height = to_usize(size.div_ceil(width as u64));
        let (mut address, mut pitch) = (0, 0usize);
        call!(self, cuMemAllocPitch_v2(
            &raw mut address => *mut Address,
            &raw mut pitch => *mut usize,
            width => usize,
            height => usize,
            4 => c_uint,
        ))?;
        Ok(address)
    }

    /// `cuMemAllocHost`.
    pub fn alloc_host(&self, size: u64) -> Result<Address, TenantError> {
        let mut address = 0;
        call!(self, cuMemAllocHost_v2(&raw mut address => *mut Address, to_usize(size) => usize))?;
        Ok(address)
    }

    /// `cuMemFreeHost`.
    pub fn free_host(&self, address: Address) -> Result<(), TenantError> {
        call!(self, cuMemFreeHost(address => Address))
    }

    /// A module's kernel.
    pub fn kernel(&self, ptx: &str, name: &str) -> Result<Kernel, TenantError> {
        let nul = |_| TenantError::Usage("a zero byte in a name".into());
        let text = CString::new(ptx).map_err(nul)?;
        let name = CString::new(name).map_err(nul)?;
        let mut module: *mut c_void = std::ptr::null_mut();
        call!(self, cuModuleLoadData(
            &raw mut module => *mut *mut c_void,
            text.as_ptr() => *const c_char,
        ))?;
        let mut function: *mut c_void = std::ptr::null_mut();
        call!(self, cuModuleGetFunction(
            &raw mut function => *mut *mut c_void,
            module => *mut c_void,
            name.as_ptr() => *const c_char,
        ))?;
        Ok(Kernel(function))
    }

    /// A kernel of a library, as the CUDA runtime gets its own.
    pub fn library_kernel(&self, ptx: &str, name: &str) -> Result<Kernel, TenantError> {
        let nul = |_| TenantError::Usage("a zero byte in a name".into());
        let text = CString::new(ptx).map_err(nul)?;
        let name = CString::new(name).map_err(nul)?;
        let mut library: *mut c_void = std::ptr::null_mut();
        call!(self, cuLibraryLoadData(
            &raw mut library => *mut *mut c_void,
            text.as_ptr() => *const c_char,
            std::ptr::null() => *const c_int,
            std::ptr::null() => *const *const c_void,
            0 => c_uint,
            std::ptr::null() => *const c_int,
            std::ptr::null() => *const *const c_void,
            0 => c_uint,
        ))?;
        let mut kernel: *mut c_void = std::ptr::null_mut();
        call!(self, cuLibraryGetKernel(
            &raw mut kernel => *mut *mut c_void,
            library => *mut c_void,
            name.as_ptr() => *const c_char,
        ))?;
        let mut function: *mut c_void = std::ptr::null_mut();
        call!(self, cuKernelGetFunction(
            &raw mut function => *mut *mut c_void,
            kernel => *mut c_void,
        ))?;
        Ok(Kernel(function))
    }

    /// The function behind a name, to call it often.
    pub fn launcher(&self) -> Result<Launcher<'_>, TenantError> {
        // SAFETY: the type is that of `cuda.h` for this name.
        let function = unsafe { self.library.get(b"cuLaunchKernel\0") }
            .map_err(|source| self.lacks(source))?;
        Ok(Launcher {
            cuda: self,
            function,
        })
    }

    /// `cuLaunchKernelEx`.
    pub fn launch_ex(&self, kernel: Kernel) -> Result<(), TenantError> {
        let config = LaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            stream: self.stream,
            attributes: std::ptr::null_mut(),
            attribute_count: 0,
        };
        call!(self, cuLaunchKernelEx(
            &raw const config => *const LaunchConfig,
            kernel.0 => *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void,
        ))
    }

    /// `cuLaunchCooperativeKernel`.
    pub fn launch_cooperative(&self, kernel: Kernel) -> Result<(), TenantError> {
        call!(self, cuLaunchCooperativeKernel(
            kernel.0 => *mut c_void,
            1 => c_uint, 1 => c_uint, 1 => c_uint,
            1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint,
            self.stream => *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void,
        ))
    }

    /// A graph that launches a kernel so many times.
    pub fn graph(&self, kernel: Kernel, nodes: u32) -> Result<GraphExec, TenantError> {
        let mut graph: *mut c_void = std::ptr::null_mut();
        call!(self, cuGraphCreate(&raw mut graph => *mut *mut c_void, 0 => c_uint))?;
        let params = KernelNodeParams {
            func: kernel.0,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            params: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
            kernel: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
        };
        let mut node: *mut c_void = std::ptr::null_mut();
        for _ in 0..nodes {
            call!(self, cuGraphAddKernelNode_v2(
                &raw mut node => *mut *mut c_void,
                graph => *mut c_void,
                std::ptr::null() => *const *mut c_void,
                0 => usize,
                &raw const params => *const KernelNodeParams,
            ))?;
        }
        let mut exec: *mut c_void = std::ptr::null_mut();
        call!(self, cuGraphInstantiateWithFlags(
            &raw mut exec => *mut *mut c_void,
            graph => *mut c_void,
            0 => u64,
        ))?;
        Ok(GraphExec(exec))
    }

    /// `cuGraphLaunch`.
    pub fn launch_graph(&self, exec: GraphExec) -> Result<(), TenantError> {
        call!(self, cuGraphLaunch(exec.0 => *mut c_void, self.stream => *mut c_void))
    }

    /// Whether the stream has nothing to do.
    pub fn is_idle(&self) -> Result<bool, TenantError> {
        match call!(self, cuStreamQuery(self.stream => *mut c_void)) {
            Ok(()) => Ok(true),
            Err(TenantError::Call { code, .. }) if code == self.code_name(NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `cuLaunchKernel` on the thread's own stream, with one argument of eight bytes.
    pub fn launch_per_thread(&self, kernel: Kernel, argument: &mut u64) -> Result<(), TenantError> {
        let mut pointer: *mut c_void = std::ptr::from_mut(argument).cast();
        call!(self, cuLaunchKernel_ptsz(
            kernel.0 => *mut c_void,
            1 => c_uint, 1 => c_uint, 1 => c_uint,
            1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint,
            std::ptr::null_mut() => *mut c_void,
            &raw mut pointer => *mut *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void,
        ))
    }

    /// Waits for the thread's own stream.
    pub fn synchronize_per_thread(&self) -> Result<(), TenantError> {
        call!(self, cuStreamSynchronize_ptsz(std::ptr::null_mut() => *mut c_void))
    }

    /// Waits for the default stream, which is another one than where kernels are launched.
    pub fn synchronize_default(&self) -> Result<(), TenantError> {
        call!(self, cuStreamSynchronize(std::ptr::null_mut() => *mut c_void))
    }

    /// Waits for the context.
    pub fn synchronize_context(&self) -> Result<(), TenantError> {
        call!(self, cuCtxSynchronize())
    }

    /// Makes an event.
    pub fn event(&self) -> Result<Event, TenantError> {
        let mut event: *mut c_void = std::ptr::null_mut();
        call!(self, cuEventCreate(&raw mut event => *mut *mut c_void, 0 => c_uint))?;
        Ok(Event(event))
    }

    /// Puts an event behind what was launched.
    pub fn record(&self, event: Event) -> Result<(), TenantError> {
        call!(self, cuEventRecord(event.0 => *mut c_void, self.stream => *mut c_void))
    }

    /// Waits for an event.
    pub fn synchronize_event(&self, event: Event) -> Result<(), TenantError> {
        call!(self, cuEventSynchronize(event.0 => *mut c_void))
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<(), TenantError> {
        call!(self, cuStreamSynchronize(self.stream => *mut c_void))
    }
}

type LaunchKernel = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// `cuLaunchKernel`, looked up once.
pub struct Launcher<'a> {
    cuda: &'a Cuda,
    function: libloading::Symbol<'a, LaunchKernel>,
}

impl Launcher<'_> {
    /// Launches a kernel with the given arguments, each of eight bytes.
    pub fn launch(&self, kernel: Kernel, arguments: &mut [u64]) -> Result<(), TenantError> {
        let mut pointers: Vec<*mut c_void> = arguments
            .iter_mut()
            .map(|argument| std::ptr::from_mut(argument).cast())
            .collect();
        let params = if pointers.is_empty() {
            std::ptr::null_mut()
        } else {
            pointers.as_mut_ptr()
        };
        // SAFETY: the kernel is one of the library's, and takes as many arguments as are given.
        let code = unsafe {
            (self.function)(
                kernel.0,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                self.cuda.stream,
                params,
                std::ptr::null_mut(),
            )
        };
        self.cuda.check("cuLaunchKernel", code)
    }
}

fn to_usize(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}
