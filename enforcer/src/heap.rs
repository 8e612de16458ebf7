//! The daemon's own heap. A policy of 1,000 tenants takes megabytes while it is read, and a scrape of its metrics as well. Pages
//! that are given back to the host have to be fetched again, which makes the next reload longer; so some are kept, and the
//! rest is given back a while later, when nobody waits for it.

use std::{
    fs,
    sync::Mutex,
    sync::PoisonError,
    time::{Duration, Instant},
};

/// Free memory that the daemon keeps: about what a reload of 1,000 tenants takes on its way.
const KEPT: usize = 12 << 20;
/// Memory is given back so long after it was last used.
const SETTLE: Duration = Duration::from_secs(3);

/// When much memory was last used; `None` once it was given back.
static USED: Mutex<Option<Instant>> = Mutex::new(None);

/// Lets all threads share two arenas. glibc would give every thread one, each with its own leftovers. To be called before there
/// are threads.
pub fn share_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number in the allocator; no other thread allocates yet, and it would mind nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Gives back all that is free, for the start: what it took to read the kernel's types is not needed again.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    trim(0);
}

/// Gives back what is free beyond so many bytes.
#[cfg(target_env = "gnu")]
fn trim(kept: usize) {
    // SAFETY: the allocator locks its arenas, and only unused memory is given back.
    unsafe { libc::malloc_trim(kept) };
}

/// Says that much memory is being used for a while: by a policy that is loaded, by a scrape.
pub fn used() {
    *USED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// Gives back what is free beyond a few megabytes, if much was used a while ago and not since. To be called every few seconds, where
/// nobody waits: it takes milliseconds.
pub fn tidy() {
    {
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        if used.is_none_or(|at| at.elapsed() < SETTLE) {
            return;
        }
        *used = None;
    }
    #[cfg(target_env = "gnu")]
    if wasted().is_some_and(|bytes| bytes > KEPT) {
        trim(KEPT);
    }
}

/// Resident memory that is neither in use nor the program's own: what `malloc` holds and nobody has.
#[cfg(target_env = "gnu")]
fn wasted() -> Option<usize> {
    // SAFETY: reads counters of the allocator, under its locks.
    let heap = unsafe { libc::mallinfo2() };
    let resident = anonymous(&fs::read_to_string("/proc/self/status").ok()?)?;
    Some(resident.saturating_sub(heap.uordblks + heap.hblkhd))
}

/// `RssAnon` of `/proc/PID/status`, in bytes.
fn anonymous(status: &str) -> Option<usize> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read() {
        let status = "VmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\nRssFile:\t    1024 kB\n";
        assert_eq!(anonymous(status), Some(1 << 20));
        assert_eq!(anonymous("VmRSS:\t 1 kB\n"), None);
        assert!(anonymous(&fs::read_to_string("/proc/self/status").expect("status")).is_some());
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_is_free_is_given_back_and_a_part_kept() {
        // Small pieces, so that they come from an arena and stay there when they are freed: the last one holds its end.
        let pieces: Vec<Box<[u8]>> = (0..16_384)
            .map(|_| vec![1; 4000].into_boxed_slice())
            .collect();
        let last = vec![1_u8; 4000].into_boxed_slice();
        drop(pieces);
        let before = wasted().expect("status");
        assert!(before > 2 * KEPT, "{before}");
        used();
        tidy();
        assert!(USED.lock().expect("no panic").is_some(), "too soon");
        *USED.lock().expect("no panic") = Instant::now().checked_sub(SETTLE);
        tidy();
        let after = wasted().expect("status");
        // Other tests use memory meanwhile.
        assert!(after + 2 * KEPT < before, "{before} {after}");
        drop(last);
    }
}
