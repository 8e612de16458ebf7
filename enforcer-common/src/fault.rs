//! GPU faults as the driver's tracepoint tells them.

/// Bytes of a PCI address with its end, `0000:41:00.0`; domains may be longer than four digits.
pub const DEVICE_LEN: usize = 32;
/// Bytes of a message that are kept. The process is named in the first sixty.
pub const MESSAGE_LEN: usize = 256;

/// Where the fields of `nvidia:nvidia_dev_xid` are, from its `format` file. The two strings are `__data_loc` words: 16 bits of
/// length above 16 bits of offset, both in the record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XidPlaces {
    /// `dev`: the PCI address.
    pub device: u32,
    /// `error_code`.
    pub code: u32,
    /// `msg`: what the driver says, from `pid=` on.
    pub message: u32,
    /// Always 0.
    pub reserved: u32,
}

/// One Xid. Both texts end with a NUL.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidRecord {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub at_ns: u64,
    /// The code.
    pub code: u32,
    /// Always 0.
    pub reserved: u32,
    /// The PCI address.
    pub device: [u8; DEVICE_LEN],
    /// What the driver says.
    pub message: [u8; MESSAGE_LEN],
}

impl Default for XidRecord {
    fn default() -> Self {
        Self {
            at_ns: 0,
            code: 0,
            reserved: 0,
            device: [0; DEVICE_LEN],
            message: [0; MESSAGE_LEN],
        }
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: repr(C), only integers, no padding (see the layout test).
    unsafe impl aya::Pod for super::XidPlaces {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout() {
        assert_eq!(core::mem::size_of::<XidPlaces>(), 16);
        assert_eq!(core::mem::size_of::<XidRecord>(), 304);
        assert_eq!(core::mem::offset_of!(XidRecord, code), 8);
        assert_eq!(core::mem::offset_of!(XidRecord, device), 16);
        assert_eq!(core::mem::offset_of!(XidRecord, message), 48);
    }
}
