//! The programs that follow what chosen threads do while a GPU is idle, and enforce nothing.
//!
//! They are an object of their own, loaded when somebody looks and let go of after: nothing of it is pinned, and a host
//! on which nobody looks has neither its maps nor a program on its context switches. Minimum kernel: 5.18, whose
//! `sched_switch` tells the state of the thread that goes.
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
mod maps;
mod registers;
mod sched_switch;
mod tell;
mod tick;

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
