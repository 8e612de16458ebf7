//! The driver's calls that obtain and give back memory, as of CUDA 13.
//!
//! Not followed: arrays (`cuArrayCreate` and the like), what a pool holds beyond what was asked of it, and memory that is
//! imported from another process, which is its owner's.

use gpuquota_common::insight::call;

/// Name and meaning of each call; the place in this list is its index.
pub const ALLOCATIONS: &[(&str, u32)] = &[
    ("cuMemAlloc_v2", call::ALLOC),
    ("cuMemAllocPitch_v2", call::ALLOC_PITCH),
    ("cuMemAllocManaged", call::ALLOC),
    ("cuMemAllocAsync", call::ALLOC),
    ("cuMemAllocAsync_ptsz", call::ALLOC),
    ("cuMemAllocFromPoolAsync", call::ALLOC),
    ("cuMemAllocFromPoolAsync_ptsz", call::ALLOC),
    ("cuMemFree_v2", call::FREE),
    ("cuMemFreeAsync", call::FREE),
    ("cuMemFreeAsync_ptsz", call::FREE),
    ("cuMemCreate", call::CREATE),
    ("cuMemRelease", call::RELEASE),
    ("cuMemRetainAllocationHandle", call::RETAIN),
    ("cuMemMap", call::MAP),
    ("cuMemUnmap", call::UNMAP),
    ("cuMemAllocHost_v2", call::HOST_ALLOC),
    ("cuMemHostAlloc", call::HOST_ALLOC),
    ("cuMemFreeHost", call::HOST_FREE),
    ("cuMemHostRegister_v2", call::REGISTER),
    ("cuMemHostUnregister", call::UNREGISTER),
    ("cuCtxDestroy_v2", call::CONTEXT_END),
    ("cuDevicePrimaryCtxReset_v2", call::CONTEXT_END),
];

/// Calls that every driver has: one that is missing from a libcuda is said aloud.
pub const EXPECTED: &[&str] = &[
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemHostAlloc",
    "cuMemFreeHost",
];

/// The name of a call.
pub fn name(index: u32) -> &'static str {
    usize::try_from(index)
        .ok()
        .and_then(|index| ALLOCATIONS.get(index))
        .map_or("?", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_is_looked_for() {
        for name in EXPECTED {
            assert!(ALLOCATIONS.iter().any(|(known, _)| known == name), "{name}");
        }
        assert_eq!(name(0), "cuMemAlloc_v2");
        assert_eq!(name(u32::MAX), "?");
    }
}
