//! A client of the driver that leaves its GPU idle: `stalling` does what it is told, line by line, and answers each. Compiled
//! by the test that uses it, so it uses no crate.
//!
//! `lock N`, `data N`, `sleep N`, `spin N`: N rounds of a kernel of 20 ms and some 180 ms in which the program waits for
//! a mutex, for a pipe, for time to pass, or computes. `hand N` is the same with two threads that wait for each other all the time. `launch N` launches N kernels as fast as it may. `names N` has N threads
//! that wait for ever.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    hint::black_box,
    io::{BufRead, Read, Write},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
const WAIT: Duration = Duration::from_millis(180);

struct Cuda {
    library: *mut c_void,
    long: *mut c_void,
    short: *mut c_void,
}

/// Calls a function of the driver, whose arguments are given as the API has them, and expects success.
macro_rules! call {
    ($library:expr, $name:ident($($value:expr => $type:ty),*)) => {{
        let name = CString::new(stringify!($name)).expect("a name");
        // SAFETY: the library is open, the name ends in zero, and the type is that of the function in cuda.h.
        let result = unsafe {
            let function = dlsym($library, name.as_ptr());
            assert!(!function.is_null(), "no {}", stringify!($name));
            let function: unsafe extern "C" fn($($type),*) -> c_int = std::mem::transmute(function);
            function($($value),*)
        };
        assert_eq!(result, 0, "{}", stringify!($name));
    }};
}

impl Cuda {
    fn open() -> Self {
        let name = CString::new("libcuda.so.1").expect("a name");
        // SAFETY: the name ends in zero.
        let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW) };
        assert!(!library.is_null(), "no libcuda");
        let mut context = 0_usize;
        call!(library, cuInit(0 => c_uint));
        call!(library, cuCtxCreate_v2(&raw mut context => *mut usize, 0 => c_uint, 0 => c_int));
        let text = CString::new(".entry spin_20ms .entry spin_1us").expect("a text");
        let mut module = std::ptr::null_mut::<c_void>();
        call!(library, cuModuleLoadData(&raw mut module => *mut *mut c_void, text.as_ptr() => *const c_char));
        let function = |name: &str| {
            let name = CString::new(name).expect("a name");
            let mut function = std::ptr::null_mut::<c_void>();
            call!(library, cuModuleGetFunction(&raw mut function => *mut *mut c_void, module => *mut c_void, name.as_ptr() => *const c_char));
            function
        };
        let (long, short) = (function("spin_20ms"), function("spin_1us"));
        Self { library, long, short }
    }

    fn launch(&self, function: *mut c_void) {
        let none = std::ptr::null_mut::<c_void>();
        call!(self.library, cuLaunchKernel(function => *mut c_void,
            1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, none => *mut c_void, none => *mut c_void, none => *mut c_void));
    }

    fn step(&self) {
        self.launch(self.long);
        call!(self.library, cuCtxSynchronize());
        // Some milliseconds of work, as programs have between steps: else a thread of the library's may seem to lead.
        black_box((0..3_000_000_u64).fold(1, |sum: u64, number| black_box(sum.wrapping_mul(31).wrapping_add(number))));
    }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn wait_for_lock() -> u64 {
    let shared = Mutex::new(0_u64);
    let (told, tell) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let shared = &shared;
        scope.spawn(move || {
            let mut value = shared.lock().expect("no panic");
            told.send(()).expect("somebody waits");
            thread::sleep(WAIT);
            *value += 1;
        });
        tell.recv().expect("told");
        black_box(*shared.lock().expect("no panic")) + 1
    })
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn wait_for_data() -> u64 {
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    let mut byte = [0];
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(WAIT);
            writer.write_all(b"1").expect("written");
        });
        reader.read_exact(&mut byte).expect("read");
    });
    u64::from(black_box(byte)[0])
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn wait_for_time() -> u64 {
    thread::sleep(WAIT);
    black_box(1)
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn hand_to_and_fro() -> u64 {
    let (mut there, mut to) = std::io::pipe().expect("a pipe");
    let (mut back, mut from) = std::io::pipe().expect("a pipe");
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut byte = [0];
            while there.read_exact(&mut byte).is_ok() {
                from.write_all(&byte).expect("written");
            }
        });
        let began = Instant::now();
        let mut byte = [7];
        while began.elapsed() < WAIT {
            to.write_all(&byte).expect("written");
            back.read_exact(&mut byte).expect("read");
        }
        drop(to);
        u64::from(black_box(byte)[0])
    })
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn prepare_batch() -> u64 {
    let began = Instant::now();
    let mut sum = 0_u64;
    while began.elapsed() < WAIT {
        for number in 0..10_000_u64 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(number));
        }
    }
    sum
}

fn main() {
    let cuda = Cuda::open();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("readable");
        let mut words = line.split_whitespace();
        let order = words.next().unwrap_or_default();
        let count: usize = words.next().map_or(1, |count| count.parse().expect("a number"));
        for _ in 0..count {
            let wait = match order {
                "lock" => wait_for_lock,
                "data" => wait_for_data,
                "sleep" => wait_for_time,
                "spin" => prepare_batch,
                "hand" => hand_to_and_fro,
                "launch" => {
                    cuda.launch(cuda.short);
                    continue;
                }
                "names" => {
                    thread::spawn(|| loop {
                        thread::park();
                    });
                    continue;
                }
                _ => continue,
            };
            cuda.step();
            black_box(wait());
        }
        println!("did {line}");
        std::io::stdout().flush().expect("written");
    }
}
