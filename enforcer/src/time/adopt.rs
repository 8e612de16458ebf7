//! Adopting a process that was there before the observer.
//!
//! Its client handle is not known, and every wrong guess writes a line into the kernel log. So it is not searched
//! for blindly: libcuda keeps the handle in its own memory, where root may read it, and handles are given out in
//! order, so one of our own tells where others are. The driver is asked about no more than [`MOST_GUESSES`] handles
//! for a process, once. With the client its objects can be asked for by name: classes, parents, sizes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::unix::fs::FileExt as _,
};

use gpuquota_common::{
    map::{DeviceKey, NO_GPU, Object, ObjectKey, host_place, kind},
    nvidia::{class, status},
    rm::object_kind,
};

use super::act::{ActError, Client, Reach, control_fds};
use crate::driver::{rm::RmError, sched};

/// Wrong guesses that one process may cost.
pub const MOST_GUESSES: usize = 48;
/// Client handles lie here.
const CLIENTS: std::ops::Range<u32> = 0xc1d0_0000..0xc1e0_0000;
/// libcuda's own handles begin here, and are given out in order.
const FIRST_HANDLE: u32 = 0x5c00_0001;
/// Last handle that is asked for.
const LAST_HANDLE: u32 = 0x5c0f_ffff;
/// So many unknown handles in a row are the end.
const GAP: u32 = 2048;
/// Most memory of a process that is searched for the handle.
const MOST_SEARCHED: u64 = 256 << 20;
/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// Handles just below one of our own that are worth a guess.
const NEARBY: u32 = 16;

/// Why a process could not be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It cannot be acted on.
    #[error(transparent)]
    Act(#[from] ActError),
    /// It has no control file open.
    #[error("it was there before the daemon, and has no control file open")]
    NoFile,
    /// None of the guesses was right.
    #[error(
        "it was there before the daemon, and its client was not found with {0} guesses; start it again to control it"
    )]
    NoClient(usize),
    /// Its objects cannot be asked for.
    #[error("it was there before the daemon, and the driver does not tell its objects: {0}")]
    Objects(RmError),
    /// It has no channels that were found.
    #[error("it was there before the daemon, and none of its channels was found")]
    NoChannels,
}

/// What was found of a process.
pub type Found = BTreeMap<ObjectKey, Object>;

/// Finds the clients of a process and their objects. `known` are the clients of others; `own` is a client handle that
/// was given out just now; `gpus` are the GPUs by UUID.
pub fn find(
    reach: &Reach,
    node: DeviceKey,
    known: &BTreeSet<u32>,
    own: u32,
    gpus: &BTreeMap<String, u32>,
) -> Result<Found, AdoptError> {
    let fds = control_fds(reach.tgid(), node);
    if fds.is_empty() {
        return Err(AdoptError::NoFile);
    }
    let mut guesses = 0;
    let mut found = Found::new();
    for handle in candidates(reach.tgid(), known, own) {
        for fd in &fds {
            if guesses >= MOST_GUESSES {
                break;
            }
            let client = Client { handle, fd: *fd };
            let ask = |handle| {
                reach.with_fd(node, *fd, |file| {
                    sched::class_of(file, client.handle, handle)
                })
            };
            match ask(handle)? {
                Some(Err(error)) if error.status() == Some(status::INVALID_CLIENT) => {
                    guesses += 1;
                    continue;
                }
                None => continue,
                Some(Err(error)) => return Err(AdoptError::Objects(error)),
                Some(Ok(_)) => {}
            }
            found.append(&mut objects(reach, node, client, gpus)?);
            break;
        }
    }
    if found.is_empty() {
        return Err(AdoptError::NoClient(guesses));
    }
    if !found
        .values()
        .any(|object| object.kind == kind::CHANNEL_GROUP)
    {
        return Err(AdoptError::NoChannels);
    }
    Ok(found)
}

/// Client handles that the process may have, the likeliest first.
fn candidates(tgid: u32, known: &BTreeSet<u32>, own: u32) -> Vec<u32> {
    let mut seen = BTreeMap::new();
    search_memory(tgid, &mut seen);
    let mut ordered: Vec<(u32, u32)> = seen
        .into_iter()
        .filter(|(handle, _)| !known.contains(handle) && *handle != own)
        .collect();
    // Often met first; of equals the newer.
    ordered.sort_by_key(|(handle, count)| std::cmp::Reverse((*count, *handle)));
    let mut candidates: Vec<u32> = ordered
        .into_iter()
        .map(|(handle, _)| handle)
        .take(MOST_GUESSES / 2)
        .collect();
    let nearby = (own.saturating_sub(NEARBY)..own).rev();
    for handle in nearby.filter(|handle| CLIENTS.contains(handle) && !known.contains(handle)) {
        if !candidates.contains(&handle) {
            candidates.push(handle);
        }
    }
    candidates
}

/// Counts words in a process's memory that could be client handles.
fn search_memory(tgid: u32, seen: &mut BTreeMap<u32, u32>) {
    let (Ok(maps), Ok(memory)) = (
        std::fs::read_to_string(format!("/proc/{tgid}/maps")),
        File::open(format!("/proc/{tgid}/mem")),
    ) else {
        return;
    };
    let mut left = MOST_SEARCHED;
    let mut buffer = vec![0u8; CHUNK];
    for (start, end) in writable(&maps) {
        let mut at = start;
        while at < end && left > 0 {
            let length = usize::try_from((end - at).min(left).min(CHUNK as u64)).unwrap_or(CHUNK);
            match memory.read_at(&mut buffer[..length], at) {
                Ok(got) if got > 0 => {
                    count_handles(&buffer[..got], seen);
                    at += got as u64;
                    left -= (got as u64).min(left);
                }
                // Not there any more, or a device's.
                _ => break,
            }
        }
    }
}

/// Private, writable, anonymous ranges of `/proc/PID/maps`, the heap first, then small ones.
fn writable(maps: &str) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(bool, u64, u64)> = maps
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let access = fields.next()?;
            let name = fields.nth(3).unwrap_or("");
            let ours = access == "rw-p"
                && (name.is_empty() || name == "[heap]" || name.starts_with("[anon"));
            let parse = |text| u64::from_str_radix(text, 16).ok();
            ours.then_some((name != "[heap]", parse(start)?, parse(end)?))
        })
        .collect();
    ranges.sort_by_key(|(other, start, end)| (*other, end - start));
    ranges
        .into_iter()
        .map(|(_, start, end)| (start, end))
        .collect()
}

fn count_handles(bytes: &[u8], seen: &mut BTreeMap<u32, u32>) {
    for word in bytes.chunks_exact(4) {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        if CLIENTS.contains(&word) {
            *seen.entry(word).or_default() += 1;
        }
    }
}

/// An object as the driver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Named {
    class: u32,
    parent: u32,
}

/// Asks for the objects of a client.
fn objects(
    reach: &Reach,
    node: DeviceKey,
    client: Client,
    gpus: &BTreeMap<String, u32>,
) -> Result<Found, AdoptError> {
    // One duplicate of the descriptor for each question: a process may end between any two.
    let ask = |question: &dyn Fn(std::os::fd::BorrowedFd<'_>) -> Result<u32, RmError>| {
        reach.with_fd(node, client.fd, question)
    };
    let mut named = BTreeMap::new();
    let mut missing = 0;
    let mut handle = FIRST_HANDLE;
    while missing < GAP && handle <= LAST_HANDLE {
        match ask(&|file| sched::class_of(file, client.handle, handle))? {
            Some(Ok(class)) => {
                missing = 0;
                if object_kind(class) != 0
                    && let Some(Ok(parent)) =
                        ask(&|file| sched::parent_of(file, client.handle, handle))?
                {
                    named.insert(handle, Named { class, parent });
                }
            }
            Some(Err(error)) if error.status() == Some(status::INVALID_CLIENT) => break,
            _ => missing += 1,
        }
        handle += 1;
    }
    let mut of_device = BTreeMap::new();
    for (handle, object) in &named {
        if object.class != class::NV20_SUBDEVICE_0 {
            continue;
        }
        let uuid = reach.with_fd(node, client.fd, |file| {
            sched::gpu_uuid(file, client.handle, *handle)
        })?;
        let gpu = match uuid {
            Some(Ok(uuid)) => gpus.get(&uuid).copied(),
            _ => None,
        };
        if let Some(gpu) = gpu {
            of_device.insert(object.parent, gpu);
        }
    }
    // With one GPU there is nothing to tell apart.
    let only = (gpus.len() == 1)
        .then(|| gpus.values().next().copied())
        .flatten();
    let mut bytes = BTreeMap::new();
    for (handle, object) in &named {
        if kind::is_memory(object_kind(object.class))
            && let Some(Ok(size)) = reach.with_fd(node, client.fd, |file| {
                sched::memory_bytes(file, client.handle, *handle)
            })?
        {
            bytes.insert(*handle, size);
        }
    }
    Ok(assemble(
        reach.tgid(),
        client,
        &named,
        &of_device,
        only,
        &bytes,
    ))
}

/// Makes ledger objects of what the driver named.
fn assemble(
    tgid: u32,
    client: Client,
    named: &BTreeMap<u32, Named>,
    of_device: &BTreeMap<u32, u32>,
    only: Option<u32>,
    bytes: &BTreeMap<u32, u64>,
) -> Found {
    let key = |handle| ObjectKey {
        client: client.handle,
        handle,
    };
    let base = Object {
        tgid,
        gpu: NO_GPU,
        fd: client.fd,
        ..Object::default()
    };
    let mut found = Found::new();
    found.insert(
        key(client.handle),
        Object {
            kind: kind::CLIENT,
            class: class::NV01_ROOT_CLIENT,
            parent: client.handle,
            ..base
        },
    );
    for (handle, object) in named {
        // Device, or what hangs below one, directly or through a group or a subdevice.
        let mut at = *handle;
        let mut gpu = None;
        for _ in 0..4 {
            gpu = of_device.get(&at).copied();
            match named.get(&at) {
                Some(above) if gpu.is_none() => at = above.parent,
                _ => break,
            }
        }
        found.insert(
            key(*handle),
            Object {
                kind: object_kind(object.class),
                class: object.class,
                parent: object.parent,
                gpu: if class::is_host_memory(object.class) {
                    host_place(gpu.or(only).unwrap_or(NO_GPU))
                } else {
                    gpu.or(only).unwrap_or(NO_GPU)
                },
                bytes: bytes.get(handle).copied().unwrap_or(0),
                ..base
            },
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_found_in_memory_by_how_often_they_occur() {
        let words: [u32; 6] = [
            7,
            0xc1d0_006f,
            0x5c00_0001,
            0xc1d0_006f,
            0xc1d0_0070,
            0xc1e0_0000,
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut seen = BTreeMap::new();
        count_handles(&bytes, &mut seen);
        assert_eq!(seen, BTreeMap::from([(0xc1d0_006f, 2), (0xc1d0_0070, 1)]));
    }

    #[test]
    fn own_memory_is_searched() {
        // Unlikely to be there by itself, more often than the handles of tests that run beside this one, and kept from the
        // optimizer.
        let wanted = std::hint::black_box(vec![0xc1d0_abcdu32; 4096]);
        let mut seen = BTreeMap::new();
        search_memory(std::process::id(), &mut seen);
        assert!(
            seen.get(&wanted[0])
                .is_some_and(|count| *count as usize >= wanted.len())
        );
        let known = BTreeSet::from([0xc1d0_0001]);
        let guesses = candidates(std::process::id(), &known, 0xc1d0_0003);
        assert!(guesses.contains(&0xc1d0_abcd) && guesses.contains(&0xc1d0_0002));
        assert!(!guesses.contains(&0xc1d0_0001) && !guesses.contains(&0xc1d0_0003));
        assert!(guesses.len() <= MOST_GUESSES);
    }

    #[test]
    fn the_heap_comes_first_and_files_do_not_come_at_all() {
        let maps = "\
            7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n\
            7f0000200000-7f0000201000 rw-p 00000000 00:00 0 \n\
            7f0000300000-7f0000301000 rw-p 00000000 08:01 77 /lib/libc.so.6\n\
            7f0000400000-7f0000401000 rw-s 00000000 00:05 9 /dev/nvidiactl\n\
            555500000000-555500400000 rw-p 00000000 00:00 0 [heap]\n";
        assert_eq!(
            writable(maps),
            [
                (0x5555_0000_0000, 0x5555_0040_0000),
                (0x7f00_0020_0000, 0x7f00_0020_1000),
                (0x7f00_0000_0000, 0x7f00_0010_0000),
            ]
        );
    }

    #[test]
    fn objects_are_on_the_gpu_of_their_device() {
        let named = BTreeMap::from([
            (
                2,
                Named {
                    class: class::NV01_DEVICE_0,
                    parent: 0xc1d0_0001,
                },
            ),
            (
                3,
                Named {
                    class: class::NV20_SUBDEVICE_0,
                    parent: 2,
                },
            ),
            (
                4,
                Named {
                    class: class::KEPLER_CHANNEL_GROUP_A,
                    parent: 2,
                },
            ),
            (
                5,
                Named {
                    class: class::HOPPER_CHANNEL_GPFIFO_A,
                    parent: 4,
                },
            ),
            (
                6,
                Named {
                    class: class::NV01_MEMORY_LOCAL_USER,
                    parent: 3,
                },
            ),
            (
                7,
                Named {
                    class: class::NV01_MEMORY_LOCAL_USER,
                    parent: 99,
                },
            ),
        ]);
        let of_device = BTreeMap::from([(2, 1)]);
        let bytes = BTreeMap::from([(6, 2 << 20)]);
        let client = Client {
            handle: 0xc1d0_0001,
            fd: 9,
        };
        let found = assemble(77, client, &named, &of_device, None, &bytes);
        let object = |handle| {
            found[&ObjectKey {
                client: client.handle,
                handle,
            }]
        };
        for handle in 2..=6 {
            assert_eq!(object(handle).gpu, 1, "{handle}");
        }
        assert_eq!(object(7).gpu, NO_GPU);
        assert_eq!((object(6).bytes, object(6).kind), (2 << 20, kind::MEMORY));
        assert_eq!((object(5).kind, object(5).tgid), (kind::CHANNEL, 77));
        assert_eq!(object(client.handle).fd, 9);
    }
}
