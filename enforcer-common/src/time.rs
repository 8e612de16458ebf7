//! What is kept in the kernel about GPU time, so that it outlives the daemon.

/// Key of something frozen: a client's channels on one GPU. Names everything that is needed to thaw them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrozenKey {
    /// Process.
    pub tgid: u32,
    /// Client handle.
    pub client: u32,
    /// GPU index.
    pub gpu: u32,
    /// Subdevice through which they were disabled.
    pub subdevice: u32,
}

/// What else is known of it. Written by user space only: no program reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    /// When the process was started, clock ticks since boot: the number alone may be used again.
    pub started: u64,
    /// Descriptor through which the client was made.
    pub fd: u32,
    /// Unused; zero.
    pub reserved: u32,
}

#[cfg(feature = "user")]
mod pod {
    use super::{Frozen, FrozenKey};

    // SAFETY: repr(C), only integers, no padding (see the layout test).
    unsafe impl aya::Pod for FrozenKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Frozen {}
}

#[cfg(test)]
mod tests {
    use core::mem::size_of;

    use super::*;

    #[test]
    fn layouts_have_no_padding() {
        assert_eq!(size_of::<FrozenKey>(), 16);
        assert_eq!(size_of::<Frozen>(), 16);
    }
}
