//! A client of the driver that is linked with nothing: `static_client FOLDER GIB` allocates and ends with 0, or with 2 if it
//! was told that there is no memory. Compiled by the test that uses it, so it uses no crate.

use std::{
    ffi::{c_int, c_ulong, c_void},
    fs::{File, OpenOptions},
    os::fd::AsRawFd,
    process::exit,
};

unsafe extern "C" {
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
}

const RM_ALLOC: c_ulong = 0xc030_462b;
const REGISTER_FD: c_ulong = 0xc004_46c9;

fn open(folder: &str, name: &str) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("{folder}/{name}"))
        .expect("a device file")
}

fn put(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
}

/// Makes an object; returns its handle, or the driver's status.
fn alloc(
    control: &File,
    [client, parent, handle, class]: [u32; 4],
    params: &mut [u8],
) -> Result<u32, u32> {
    let mut arg = [0u8; 48];
    for (index, word) in [client, parent, handle, class].into_iter().enumerate() {
        put(&mut arg, 4 * index, word);
    }
    if !params.is_empty() {
        arg[16..24].copy_from_slice(&(params.as_mut_ptr() as u64).to_ne_bytes());
    }
    // SAFETY: the argument is as long as the number says, and lives through the call.
    let result = unsafe { ioctl(control.as_raw_fd(), RM_ALLOC, arg.as_mut_ptr().cast::<c_void>()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let word = |at: usize| u32::from_ne_bytes(arg[at..at + 4].try_into().expect("four bytes"));
    match word(40) {
        0 => Ok(word(8)),
        status => Err(status),
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let gib: u64 = arguments[2].parse().expect("a number");
    let (control, gpu) = (open(&arguments[1], "nvidiactl"), open(&arguments[1], "nvidia0"));
    let mut fd = control.as_raw_fd();
    // SAFETY: the argument is a descriptor number, and lives through the call.
    let result = unsafe { ioctl(gpu.as_raw_fd(), REGISTER_FD, &raw mut fd) };
    assert_eq!(result, 0);
    let client = alloc(&control, [0, 0, 0, 0x41], &mut []).expect("a client");
    alloc(&control, [client, client, 2, 0x80], &mut [0; 56]).expect("a device");
    let mut params = [0u8; 128];
    put(&mut params, 0, client);
    put(&mut params, 8, 0x1_c101);
    put(&mut params, 24, 0x1800_0000);
    params[64..72].copy_from_slice(&(gib << 30).to_ne_bytes());
    match alloc(&control, [client, 2, 16, 0x40], &mut params) {
        Ok(_) => {}
        Err(0x51) => exit(2),
        Err(status) => panic!("status {status:#x}"),
    }
}
