//! A client of the driver with a leak: `leaky` does what it is told, line by line, and answers each. Compiled by the test
//! that uses it, so it uses no crate.
//!
//! `keep N` allocates N times and frees nothing, in `keep_activations`; `scratch N` frees what it allocates, in
//! `scratch_buffer`; `hold` keeps a little, so that the driver has room for a scratch buffer at hand; `all` obtains and gives back memory in every way there is.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    hint::black_box,
    io::{BufRead, Write},
};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
const MIB: usize = 1 << 20;

struct Cuda(*mut c_void);

impl Cuda {
    fn open() -> Self {
        let name = CString::new("libcuda.so.1").expect("a name");
        // SAFETY: the name ends in zero.
        let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        assert!(!library.is_null(), "no libcuda");
        Self(library)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let c_name = CString::new(name).expect("a name");
        // SAFETY: the library is open and the name ends in zero.
        let symbol = unsafe { dlsym(self.0, c_name.as_ptr()) };
        assert!(!symbol.is_null(), "no {name}");
        symbol
    }
}

/// Calls a function of the driver, whose arguments are given as the API has them, and expects success.
macro_rules! call {
    ($cuda:expr, $name:ident($($value:expr => $type:ty),*)) => {{
        let function = $cuda.symbol(stringify!($name));
        // SAFETY: the type is that of the function in cuda.h.
        let result = unsafe {
            let function: unsafe extern "C" fn($($type),*) -> c_int = std::mem::transmute(function);
            function($($value),*)
        };
        assert_eq!(result, 0, "{}", stringify!($name));
    }};
}

impl Cuda {
    #[inline(always)]
    fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0_u64;
        call!(self, cuMemAlloc_v2(&raw mut address => *mut u64, bytes => usize));
        address
    }

    fn free(&self, address: u64) {
        call!(self, cuMemFree_v2(address => u64));
    }
}

/// Holds on to what it allocates.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn keep_activations(cuda: &Cuda) -> u64 {
    black_box(cuda.alloc(4 * MIB)) + 1
}

/// Frees what it allocates.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn scratch_buffer(cuda: &Cuda) -> u64 {
    let address = black_box(cuda.alloc(MIB));
    cuda.free(address);
    address + 1
}

/// One step of a training that calls one or the other, with something on its stack.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn training_step(cuda: &Cuda, keeps: bool, some: &[u64; 40]) -> u64 {
    let some = black_box(*some);
    let address = if keeps {
        keep_activations(cuda)
    } else {
        scratch_buffer(cuda)
    };
    address + black_box(some)[7]
}

/// `CUmemAllocationProp`, as far as it matters: pinned memory on device 0.
#[repr(C)]
struct Prop {
    kind: c_uint,
    handles: c_uint,
    location: [c_uint; 2],
    rest: [u64; 2],
}

/// Everything is obtained and given back.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn every_way(cuda: &Cuda) {
    let mut address = 0_u64;
    let mut pitch = 0_usize;
    let stream = std::ptr::null_mut::<c_void>();
    let out = &raw mut address;
    scratch_buffer(cuda);
    call!(cuda, cuMemAllocPitch_v2(out => *mut u64, &raw mut pitch => *mut usize, 1000 => usize, 64 => usize, 4 => c_uint));
    cuda.free(address);
    call!(cuda, cuMemAllocManaged(out => *mut u64, MIB => usize, 1 => c_uint));
    cuda.free(address);
    call!(cuda, cuMemAllocAsync(out => *mut u64, MIB => usize, stream => *mut c_void));
    call!(cuda, cuMemFreeAsync(address => u64, stream => *mut c_void));
    call!(cuda, cuMemAllocAsync_ptsz(out => *mut u64, MIB => usize, stream => *mut c_void));
    call!(cuda, cuMemFreeAsync_ptsz(address => u64, stream => *mut c_void));
    let mut pool = 0_usize;
    call!(cuda, cuDeviceGetDefaultMemPool(&raw mut pool => *mut usize, 0 => c_int));
    call!(cuda, cuMemAllocFromPoolAsync(out => *mut u64, MIB => usize, pool => usize, stream => *mut c_void));
    call!(cuda, cuMemFreeAsync(address => u64, stream => *mut c_void));
    call!(cuda, cuMemAllocHost_v2(out => *mut u64, MIB => usize));
    call!(cuda, cuMemFreeHost(address => u64));
    call!(cuda, cuMemHostAlloc(out => *mut u64, MIB => usize, 0 => c_uint));
    call!(cuda, cuMemFreeHost(address => u64));
    // Memory without an address, which is released while it is mapped and goes with its mapping.
    let prop = Prop { kind: 1, handles: 0, location: [1, 0], rest: [0; 2] };
    let mut handle = 0_u64;
    call!(cuda, cuMemCreate(&raw mut handle => *mut u64, 2 * MIB => usize, &raw const prop => *const Prop, 0 => u64));
    call!(cuda, cuMemAddressReserve(out => *mut u64, 2 * MIB => usize, 0 => usize, 0 => u64, 0 => u64));
    call!(cuda, cuMemMap(address => u64, 2 * MIB => usize, 0 => usize, handle => u64, 0 => u64));
    call!(cuda, cuMemRelease(handle => u64));
    call!(cuda, cuMemUnmap(address => u64, 2 * MIB => usize));
    call!(cuda, cuMemAddressFree(address => u64, 2 * MIB => usize));
}

fn main() {
    let cuda = Cuda::open();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("readable");
        let mut words = line.split_whitespace();
        let order = words.next().unwrap_or_default();
        let count: usize = words.next().map_or(1, |count| count.parse().expect("a number"));
        match order {
            "context" => {
                let mut context = 0_usize;
                call!(cuda, cuInit(0 => c_uint));
                call!(cuda, cuCtxCreate_v2(&raw mut context => *mut usize, 0 => c_uint, 0 => c_int));
            }
            "all" => every_way(&cuda),
            "hold" => {
                black_box(cuda.alloc(1024));
            }
            other => {
                for at in 0..count {
                    black_box(training_step(&cuda, other == "keep", &[at as u64; 40]));
                }
            }
        }
        println!("did {line}");
        std::io::stdout().flush().expect("written");
    }
}
