//! Probes in one process: links, and attaching where the kernel has no links of many probes.

use std::{num::NonZeroU32, os::fd::OwnedFd, path::Path};

use aya::{
    Ebpf,
    programs::{
        ProbeKind, UProbe,
        links::FdLink,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope},
    },
};

use super::{KernelError, program_error};

/// A link; letting go of it detaches.
#[derive(Debug)]
pub enum Probe {
    /// To one place.
    One(FdLink),
    /// To all places in a file.
    Many(OwnedFd),
}

/// A handle of its own on a loaded program, so that many processes are attached to at once.
pub(super) fn own_handle(
    ebpf: &Ebpf,
    name: &'static str,
    kind: ProbeKind,
) -> Result<UProbe, KernelError> {
    let program: &UProbe = ebpf
        .program(name)
        .ok_or(KernelError::Missing(name))?
        .try_into()
        .map_err(program_error(name))?;
    let info = program.info().map_err(program_error(name))?;
    // SAFETY: the program is one that was loaded as a uprobe of this kind from our own object.
    unsafe { UProbe::from_program_info(info, name.into(), kind) }.map_err(program_error(name))
}

/// A probe, and an event of the kernel's, for each place.
pub(super) fn attach_one_by_one(
    program: &mut UProbe,
    name: &'static str,
    thread: u32,
    file: &Path,
    points: &[(u64, u64)],
) -> Result<Vec<Probe>, KernelError> {
    let scope =
        NonZeroU32::new(thread).map_or(UProbeScope::CallingProcess, UProbeScope::OneProcess);
    points
        .iter()
        .map(|&(offset, cookie)| {
            let point = UProbeAttachPoint {
                location: UProbeAttachLocation::AbsoluteOffset(offset),
                cookie: Some(cookie),
            };
            let id = program
                .attach(point, file, scope)
                .map_err(program_error(name))?;
            let link = program.take_link(id).map_err(program_error(name))?;
            FdLink::try_from(link)
                .map(Probe::One)
                .map_err(|source| KernelError::Link {
                    program: name,
                    source,
                })
        })
        .collect()
}
