//! The programs of the launch profile: which kernels a process launches, how often, and how long it waits for them.
//!
//! They are an object of their own, loaded when somebody looks and let go of after, as those of the leak finder are:
//! nothing of it is pinned, and a host on which nobody looks has none of its maps. One file per hook and one for what they
//! share. Minimum kernel: 5.15, for the cookies of probes.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![allow(
    internal_features,
    reason = "atomics with a result are intrinsics on this target; see atomic.rs"
)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "words from the kernel are taken apart by their documented widths"
)]
#![allow(
    clippy::needless_pass_by_value,
    reason = "aya's macros hand every program its context by value"
)]

#[allow(
    dead_code,
    reason = "shared with the programs that enforce, which use all of it"
)]
#[path = "../atomic.rs"]
mod atomic;
mod launch;
mod maps;
mod name;
mod name_return;
#[allow(
    dead_code,
    reason = "shared with the leak finder, which uses all of it"
)]
#[path = "../insight/registers.rs"]
mod registers;
mod wait;
mod wait_return;

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
