//! The programs that look into processes for a while and enforce nothing.
//!
//! They are an object of their own, loaded when somebody looks and let go of after: nothing of it is pinned, and a host
//! on which nobody looks has none of its maps. One file per program and one for what they share. Minimum kernel: 5.15,
//! for the cookies of probes.
#![no_std]
#![no_main]
#![allow(
    clippy::cast_possible_truncation,
    reason = "words from the kernel are taken apart by their documented widths"
)]
#![allow(
    clippy::needless_pass_by_value,
    reason = "aya's macros hand every program its context by value"
)]

mod allocation;
mod allocation_return;
mod maps;
mod registers;

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
