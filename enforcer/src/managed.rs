//! Managed memory: which address ranges of a process are `nvidia-uvm`'s, and moving them to the host.
//!
//! A range is made by a mapping of the `nvidia-uvm` file, and lives as long as the mapping. So what a process has is read
//! off its mappings, also of one that was there before the daemon. One mapping of 2 MiB for each context is libcuda's
//! own: a pool of semaphores.
//!
//! The driver moves a range when the file says so through which it was made. A duplicate of that file, taken from the
//! process (`pidfd_getfd`, kernel 5.6), is that file; of the two that libcuda opens only the initialised one answers.

use std::{fs, io, os::fd::AsRawFd as _, os::unix::fs::MetadataExt as _};

use gpuquota_common::{
    map::DeviceKey,
    nvidia::{status, uvm, uvm_args},
};

use crate::time::act::{ActError, Reach, control_fds};

/// What libcuda maps for itself in each context.
const POOL: u64 = 2 << 20;

/// An address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub base: u64,
    /// Bytes.
    pub length: u64,
}

/// A file as the list of mappings names it: device number and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapped {
    major: u32,
    minor: u32,
    inode: u64,
}

/// Descriptors of a process that are the `nvidia-uvm` node.
pub fn files(tgid: u32, node: DeviceKey) -> Vec<u32> {
    control_fds(tgid, node)
}

/// The managed ranges of a process with so many contexts, largest first.
pub fn ranges(tgid: u32, node: DeviceKey, contexts: u64) -> io::Result<Vec<Range>> {
    let mut mapped = Vec::new();
    for fd in files(tgid, node) {
        let meta = fs::metadata(format!("/proc/{tgid}/fd/{fd}"))?;
        let (major, minor) = (libc::major(meta.dev()), libc::minor(meta.dev()));
        let file = Mapped {
            major,
            minor,
            inode: meta.ino(),
        };
        if !mapped.contains(&file) {
            mapped.push(file);
        }
    }
    if mapped.is_empty() {
        return Ok(Vec::new());
    }
    let maps = fs::read_to_string(format!("/proc/{tgid}/maps"))?;
    Ok(without_pools(parse(&maps, &mapped), contexts))
}

/// Ranges of the files in a list of mappings, as in `/proc/PID/maps`.
fn parse(maps: &str, files: &[Mapped]) -> Vec<Range> {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (addresses, _, _) = (fields.next()?, fields.next()?, fields.next()?);
            let (major, minor) = fields.next()?.split_once(':')?;
            let file = Mapped {
                major: u32::from_str_radix(major, 16).ok()?,
                minor: u32::from_str_radix(minor, 16).ok()?,
                inode: fields.next()?.parse().ok()?,
            };
            let (base, end) = addresses.split_once('-')?;
            let base = u64::from_str_radix(base, 16).ok()?;
            let length = u64::from_str_radix(end, 16).ok()?.checked_sub(base)?;
            files.contains(&file).then_some(Range { base, length })
        })
        .collect()
}

/// Largest first, without one pool for each context.
fn without_pools(mut ranges: Vec<Range>, contexts: u64) -> Vec<Range> {
    for _ in 0..contexts {
        let pool = ranges.iter().position(|range| range.length == POOL);
        if let Some(pool) = pool {
            ranges.remove(pool);
        }
    }
    ranges.sort_by_key(|range| (std::cmp::Reverse(range.length), range.base));
    ranges
}

/// Cuts ranges into pieces of at most `piece` bytes, and as many of them as `most` bytes allow.
pub fn pieces(ranges: &[Range], piece: u64, most: u64) -> Vec<Range> {
    let mut left = most;
    let mut found = Vec::new();
    for range in ranges {
        let mut at = 0;
        while at < range.length && left > 0 {
            let length = piece.min(range.length - at).min(left);
            found.push(Range {
                base: range.base + at,
                length,
            });
            at += length;
            left -= length;
        }
    }
    found
}

/// What is left of ranges after their first `passed` bytes, which is less by those then.
pub fn after(ranges: &[Range], passed: &mut u64) -> Vec<Range> {
    ranges
        .iter()
        .filter_map(|range| {
            let cut = range.length.min(*passed);
            *passed -= cut;
            (cut < range.length).then_some(Range {
                base: range.base + cut,
                length: range.length - cut,
            })
        })
        .collect()
}

/// Moves a range of a process to the host. Returns false if none of its files answers for it.
pub fn to_host(reach: &Reach, node: DeviceKey, range: Range) -> Result<bool, ActError> {
    for fd in files(reach.tgid(), node) {
        let answer = reach.with_fd(node, fd, |file| migrate(file.as_raw_fd(), range))?;
        if matches!(answer, Some(Ok(status::OK))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `UVM_MIGRATE` to the CPU; returns the driver's status.
fn migrate(fd: i32, range: Range) -> io::Result<u32> {
    let mut arg = [0; uvm_args::MIGRATE_SIZE];
    let mut put = |at: usize, bytes: &[u8]| arg[at..at + bytes.len()].copy_from_slice(bytes);
    put(uvm_args::BASE, &range.base.to_ne_bytes());
    put(uvm_args::LENGTH, &range.length.to_ne_bytes());
    put(uvm_args::MIGRATE_UUID, &uvm_args::CPU_UUID);
    put(uvm_args::MIGRATE_CPU_NODE, &(-1i32).to_ne_bytes());
    // SAFETY: the driver reads and writes no more than the structure, which lives through the call.
    if unsafe { libc::ioctl(fd, libc::Ioctl::from(uvm::MIGRATE), arg.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let status = &arg[uvm_args::MIGRATE_STATUS..][..4];
    Ok(u32::from_ne_bytes([
        status[0], status[1], status[2], status[3],
    ]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAPS: &str = "\
204a00000-204c00000 rw-s 204a00000 00:05 42                             /dev/nvidia-uvm
7f38f6000000-7f3936000000 rw-s 7f38f6000000 00:05 42                     /dev/nvidia-uvm
7f3934000000-7f3934200000 rw-s 7f3934000000 00:05 42                     /dev/nvidia-uvm
7f3940000000-7f3940400000 rw-s 00000000 00:05 43                         /dev/other nvidia-uvm
7f3950000000-7f3950001000 rw-p 00000000 00:00 0
55d0c0a00000-55d0c0b00000 r-xp 00000000 fe:01 42                         /bin/x
";

    #[test]
    fn ranges_are_mappings_of_the_file_itself() {
        let file = Mapped {
            major: 0,
            minor: 5,
            inode: 42,
        };
        let all = parse(MAPS, &[file]);
        assert_eq!(all.len(), 3);
        let managed = without_pools(all, 1);
        assert_eq!(
            managed,
            [
                Range {
                    base: 0x7f38_f600_0000,
                    length: 1 << 30
                },
                Range {
                    base: 0x7f39_3400_0000,
                    length: 2 << 20
                }
            ]
        );
        assert_eq!(parse("nonsense\n\n1-2 rw 0 zz:1 1 x", &[file]), []);
    }

    proptest! {
        /// What was passed over and what comes after it are the ranges.
        #[test]
        fn what_comes_after_is_the_rest(
            lengths in prop::collection::vec(1u64..100, 0..8),
            passed in 0u64..400,
        ) {
            let ranges: Vec<Range> = (0..)
                .zip(&lengths)
                .map(|(index, length)| Range { base: index * 1000, length: *length })
                .collect();
            let mut left = passed;
            let rest = after(&ranges, &mut left);
            let mut all = pieces(&ranges, u64::MAX, passed);
            let whole: u64 = lengths.iter().sum();
            prop_assert_eq!(left, passed.saturating_sub(whole));
            // A range that was cut is in both.
            if let (Some(last), Some(first)) = (all.last_mut(), rest.first())
                && last.base + last.length == first.base
            {
                last.length += first.length;
                all.extend(&rest[1..]);
            } else {
                all.extend(&rest);
            }
            prop_assert_eq!(all, ranges);
        }

        /// Pieces lie in their ranges, in order, without overlap, and are as much as is allowed.
        #[test]
        fn pieces_are_the_ranges_up_to_the_bound(
            lengths in prop::collection::vec(1u64..100, 0..8),
            piece in 1u64..40,
            most in 0u64..400,
        ) {
            let ranges: Vec<Range> = (0..)
                .zip(&lengths)
                .map(|(index, length)| Range { base: index * 1000, length: *length })
                .collect();
            let found = pieces(&ranges, piece, most);
            let sum: u64 = found.iter().map(|range| range.length).sum();
            prop_assert_eq!(sum, most.min(lengths.iter().sum()));
            for range in &found {
                prop_assert!(range.length <= piece && range.length > 0);
                let whole = ranges[usize::try_from(range.base / 1000).expect("small")];
                prop_assert!(range.base + range.length <= whole.base + whole.length);
            }
            for pair in found.windows(2) {
                prop_assert!(pair[0].base + pair[0].length <= pair[1].base);
            }
        }
    }
}
