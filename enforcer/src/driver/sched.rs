//! The driver's own controls over the time of a channel, and its answers about objects.
//!
//! All of them work on a client of somebody else if `file` is that client's control file: a duplicate shares the
//! open file, and that is all the driver asks for. Commands and layouts: `ctrla06cgpfifo.h`, `ctrl2080fifo.h`,
//! `ctrl0000client.h`, unchanged from 535 to 595.

use std::os::fd::BorrowedFd;

use gpuquota_common::nvidia::{ctrl, disable_channels, gid_info, handle_info, surface_info};

use super::rm::{RmError, control, get, put, put_long};

/// Sets the time slice of a channel group, microseconds. Holds at once; about 0.3 ms on an H200.
pub fn set_timeslice(
    file: BorrowedFd<'_>,
    client: u32,
    group: u32,
    slice_us: u64,
) -> Result<(), RmError> {
    let mut params = slice_us.to_ne_bytes();
    control(
        file,
        "SET_TIMESLICE",
        (client, group),
        ctrl::TSG_SET_TIMESLICE,
        &mut params,
    )
}

/// The time slice of a channel group, microseconds.
pub fn timeslice(file: BorrowedFd<'_>, client: u32, group: u32) -> Result<u64, RmError> {
    let mut params = [0; 8];
    control(
        file,
        "GET_TIMESLICE",
        (client, group),
        ctrl::TSG_GET_TIMESLICE,
        &mut params,
    )?;
    Ok(u64::from_ne_bytes(params))
}

/// Disables channels, or enables them again. A disabled channel's work stops within a millisecond and goes on
/// where it was.
///
/// At most [`disable_channels::MAX`] channels in one call.
pub fn set_disabled(
    file: BorrowedFd<'_>,
    client: u32,
    subdevice: u32,
    channels: &[u32],
    disabled: bool,
) -> Result<(), RmError> {
    let channels = &channels[..channels.len().min(disable_channels::MAX)];
    let mut params = [0u8; disable_channels::SIZE];
    params[disable_channels::DISABLE] = u8::from(disabled);
    let count = u32::try_from(channels.len()).unwrap_or(0);
    put(&mut params, disable_channels::COUNT, count);
    for (index, channel) in channels.iter().enumerate() {
        put(&mut params, disable_channels::CLIENTS + 4 * index, client);
        put(
            &mut params,
            disable_channels::CHANNELS + 4 * index,
            *channel,
        );
    }
    let name = if disabled {
        "DISABLE_CHANNELS"
    } else {
        "ENABLE_CHANNELS"
    };
    control(
        file,
        name,
        (client, subdevice),
        ctrl::FIFO_DISABLE_CHANNELS,
        &mut params,
    )
}

/// Class of an object.
pub fn class_of(file: BorrowedFd<'_>, client: u32, handle: u32) -> Result<u32, RmError> {
    about(file, client, handle, handle_info::INDEX_CLASS)
}

/// Handle of an object's parent.
pub fn parent_of(file: BorrowedFd<'_>, client: u32, handle: u32) -> Result<u32, RmError> {
    about(file, client, handle, handle_info::INDEX_PARENT)
}

fn about(file: BorrowedFd<'_>, client: u32, handle: u32, what: u32) -> Result<u32, RmError> {
    let mut params = [0u8; handle_info::SIZE];
    put(&mut params, handle_info::OBJECT, handle);
    put(&mut params, handle_info::INDEX, what);
    control(
        file,
        "GET_HANDLE_INFO",
        (client, client),
        ctrl::CLIENT_GET_HANDLE_INFO,
        &mut params,
    )?;
    Ok(get(&params, handle_info::DATA))
}

/// Bytes of a memory object.
pub fn memory_bytes(file: BorrowedFd<'_>, client: u32, memory: u32) -> Result<u64, RmError> {
    let mut pairs = [0u8; 8];
    put(&mut pairs, 0, surface_info::INDEX_PHYS_SIZE);
    let mut params = [0u8; surface_info::SIZE];
    put(&mut params, surface_info::COUNT, 1);
    put_long(&mut params, surface_info::LIST, pairs.as_mut_ptr() as u64);
    control(
        file,
        "GET_SURFACE_INFO",
        (client, memory),
        ctrl::MEMORY_GET_SURFACE_INFO,
        &mut params,
    )?;
    // Written by the driver behind the compiler's back, through the pointer above.
    let units = std::hint::black_box(&pairs);
    Ok(u64::from(get(units, 4)) << 12)
}

/// UUID of the GPU behind a subdevice, as NVML writes it.
pub fn gpu_uuid(file: BorrowedFd<'_>, client: u32, subdevice: u32) -> Result<String, RmError> {
    let mut params = [0u8; gid_info::SIZE];
    control(
        file,
        "GET_GID_INFO",
        (client, subdevice),
        ctrl::GPU_GET_GID_INFO,
        &mut params,
    )?;
    let length = (get(&params, gid_info::LENGTH) as usize).min(gid_info::SIZE - gid_info::DATA);
    let text = &params[gid_info::DATA..gid_info::DATA + length];
    let end = text
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}
