//! The driver's calls that launch, that wait and that give out kernels, as of CUDA 13.
//!
//! Not followed: launches on several GPUs by one call (`cuLaunchCooperativeKernelMultiDevice`), which name no one kernel;
//! copies to the host that wait by themselves (`cuMemcpyDtoH`); and programs that ask again and again whether a stream or
//! an event is ready instead of waiting.

use gpuquota_common::profile::{group, kind};

use crate::kernel::profile::ProfileProgram;

/// Name and meaning of each call.
pub const CALLS: &[(&str, u32)] = &[
    ("cuLaunchKernel", kind::LAUNCH),
    ("cuLaunchKernel_ptsz", kind::LAUNCH | kind::PER_THREAD),
    ("cuLaunchKernelEx", kind::LAUNCH_EX),
    ("cuLaunchKernelEx_ptsz", kind::LAUNCH_EX | kind::PER_THREAD),
    ("cuLaunchCooperativeKernel", kind::LAUNCH),
    (
        "cuLaunchCooperativeKernel_ptsz",
        kind::LAUNCH | kind::PER_THREAD,
    ),
    ("cuLaunch", kind::LAUNCH_PLAIN),
    ("cuLaunchGrid", kind::LAUNCH_PLAIN),
    ("cuLaunchGridAsync", kind::LAUNCH_GRID),
    ("cuGraphLaunch", kind::LAUNCH_GRAPH),
    ("cuGraphLaunch_ptsz", kind::LAUNCH_GRAPH | kind::PER_THREAD),
    ("cuStreamSynchronize", kind::WAIT_STREAM),
    (
        "cuStreamSynchronize_ptsz",
        kind::WAIT_STREAM | kind::PER_THREAD,
    ),
    ("cuCtxSynchronize", kind::WAIT_CONTEXT),
    ("cuCtxSynchronize_v2", kind::WAIT_CONTEXT),
    ("cuEventSynchronize", kind::WAIT_EVENT),
    ("cuEventRecord", kind::RECORD),
    ("cuEventRecord_ptsz", kind::RECORD | kind::PER_THREAD),
    ("cuEventRecordWithFlags", kind::RECORD),
    (
        "cuEventRecordWithFlags_ptsz",
        kind::RECORD | kind::PER_THREAD,
    ),
    (
        "cuModuleGetFunction",
        kind::grouped(kind::NAME, group::NAMES[0]),
    ),
    (
        "cuLibraryGetKernel",
        kind::grouped(kind::NAME, group::NAMES[1]),
    ),
    (
        "cuKernelGetFunction",
        kind::grouped(kind::ALIAS, group::NAMES[2]),
    ),
];

/// Calls that every driver has: one that is missing from a libcuda is said aloud.
pub const EXPECTED: &[&str] = &[
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuGraphLaunch",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuModuleGetFunction",
];

/// The programs for a call.
pub const fn programs(kind: u32) -> &'static [ProfileProgram] {
    match kind::plain(kind) {
        kind::WAIT_STREAM | kind::WAIT_CONTEXT | kind::WAIT_EVENT => {
            &[ProfileProgram::Wait, ProfileProgram::Waited]
        }
        kind::RECORD => &[ProfileProgram::Wait],
        kind::NAME | kind::ALIAS => &[ProfileProgram::Name, ProfileProgram::Named],
        _ => &[ProfileProgram::Launch],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::symbols;

    #[test]
    fn what_is_expected_is_looked_for() {
        for name in EXPECTED {
            assert!(CALLS.iter().any(|(known, _)| known == name), "{name}");
        }
    }

    #[test]
    fn every_call_that_gives_out_kernels_is_on_its_own() {
        for group in group::NAMES {
            let of_group = CALLS.iter().filter(|(_, kind)| kind::group(*kind) == group);
            assert_eq!(of_group.count(), 1, "{group}");
        }
    }

    #[test]
    fn every_launch_call_that_names_a_kernel_is_followed() {
        for name in symbols::KNOWN {
            let followed = CALLS.iter().any(|(known, _)| known == name);
            assert_eq!(
                followed,
                *name != "cuLaunchCooperativeKernelMultiDevice",
                "{name}"
            );
        }
    }

    #[test]
    fn waits_are_seen_to_end_and_launches_are_not() {
        for (name, kind) in CALLS {
            assert_eq!(
                programs(*kind).contains(&ProfileProgram::Waited),
                name.contains("Synchronize"),
                "{name}"
            );
            assert_eq!(
                programs(*kind) == [ProfileProgram::Launch],
                name.contains("Launch"),
                "{name}"
            );
            let is_name = programs(*kind).contains(&ProfileProgram::Name);
            assert_eq!(is_name, name.contains("Get"), "{name}");
            assert_eq!(
                is_name,
                group::NAMES.contains(&kind::group(*kind)),
                "{name}"
            );
        }
    }
}
