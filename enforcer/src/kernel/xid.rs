//! The tracepoint of GPU faults.

use aya::{
    maps::{Array, MapData, RingBuf},
    programs::TracePoint,
};
use gpuquota_common::fault::XidPlaces;

use super::{Kernel, KernelError, lock, map_error, program, program_error, take};

/// A tracepoint that tells a device, a code and a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidTracepoint {
    /// Its group.
    pub group: &'static str,
    /// Its name.
    pub event: &'static str,
    /// Where its fields are.
    pub places: XidPlaces,
}

impl Kernel {
    /// Attaches to a tracepoint of GPU faults, for as long as this side lives. Returns the ring that they come by.
    ///
    /// Once only: the ring has one reader.
    pub fn watch_xids(&self, tracepoint: &XidTracepoint) -> Result<RingBuf<MapData>, KernelError> {
        const PROGRAM: &str = "nvidia_xid";
        let mut ebpf = lock(&self.ebpf);
        let mut places: Array<MapData, XidPlaces> = take(&mut ebpf, "XID_PLACES")?;
        places
            .set(0, tracepoint.places, 0)
            .map_err(map_error("XID_PLACES"))?;
        let ring = take(&mut ebpf, "XIDS")?;
        let program: &mut TracePoint = program(&mut ebpf, PROGRAM)?;
        program.load().map_err(program_error(PROGRAM))?;
        program
            .attach(tracepoint.group, tracepoint.event)
            .map_err(program_error(PROGRAM))?;
        Ok(ring)
    }
}
