//! Arrays of the kernel side that the daemon sees in its own memory (`BPF_F_MMAPABLE`, kernel 5.5).
//!
//! A policy of 1,000 tenants on 8 GPUs is 16,000 limits, and it looks at as many figures of use: as system calls they
//! alone took longer than a reload may.

use std::{
    marker::PhantomData,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::{
    Ebpf, Pod,
    maps::{Map, MapData},
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{KernelError, map_error};

/// Such an array, by index.
pub(super) struct Table<V> {
    name: &'static str,
    words: NonNull<AtomicU64>,
    entries: u32,
    /// Length of the mapping.
    bytes: usize,
    values: PhantomData<V>,
    /// Programs that are loaded later find the map by its descriptor.
    _map: MapData,
}

// SAFETY: the memory belongs to the map, is there until the value is dropped, and is only touched by atomic operations.
unsafe impl<V: Send> Send for Table<V> {}
// SAFETY: as above.
unsafe impl<V: Send> Sync for Table<V> {}

impl<V: Pod> Table<V> {
    /// Words of an entry. The kernel rounds entries up to words, so the types are whole words.
    const WORDS: usize = {
        assert!(
            size_of::<V>().is_multiple_of(size_of::<u64>()),
            "values are whole words"
        );
        size_of::<V>() / size_of::<u64>()
    };

    pub(super) fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Self, KernelError> {
        match ebpf.take_map(name) {
            Some(Map::Array(data)) => Self::map(data, name),
            _ => Err(KernelError::Missing(name)),
        }
    }

    fn map(data: MapData, name: &'static str) -> Result<Self, KernelError> {
        let entries = data.info().map_err(map_error(name))?.max_entries();
        let bytes = entries as usize * Self::WORDS * size_of::<u64>();
        // SAFETY: a mapping at an address of the kernel's choice touches nothing that is there. The map lives as long as
        // it is mapped.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                data.fd(),
                0,
            )
        };
        let words = address
            .map_err(|error| KernelError::Mapping {
                map: name,
                source: error.into(),
            })
            .map(|address| NonNull::new(address.cast::<AtomicU64>()))?
            .ok_or(KernelError::Missing(name))?;
        Ok(Self {
            name,
            words,
            entries,
            bytes,
            values: PhantomData,
            _map: data,
        })
    }

    fn entry(&self, index: u32) -> Result<&[AtomicU64], KernelError> {
        if index >= self.entries {
            return Err(KernelError::OutOfTable {
                map: self.name,
                index,
                entries: self.entries,
            });
        }
        // SAFETY: the entry lies in the mapping, which lives as long as `self`.
        Ok(unsafe {
            std::slice::from_raw_parts(
                self.words.add(index as usize * Self::WORDS).as_ptr(),
                Self::WORDS,
            )
        })
    }

    /// The value at an index. Programs may change it meanwhile: each word of it is one that was there, as if the kernel
    /// had copied it.
    pub(super) fn get(&self, index: u32) -> Result<V, KernelError> {
        let mut value = std::mem::MaybeUninit::<V>::uninit();
        for (at, word) in self.entry(index)?.iter().enumerate() {
            let word = word.load(Ordering::Relaxed);
            // SAFETY: the value has this many words; it may be aligned to less.
            unsafe {
                value
                    .as_mut_ptr()
                    .cast::<u64>()
                    .add(at)
                    .write_unaligned(word);
            };
        }
        // SAFETY: every word was written, and any bytes are a value of plain data.
        Ok(unsafe { value.assume_init() })
    }

    /// Writes a value, word by word: where a program could read it meanwhile, it must not mind to see half of it.
    pub(super) fn set(&self, index: u32, value: V) -> Result<(), KernelError> {
        for (at, word) in self.entry(index)?.iter().enumerate() {
            // SAFETY: the value has this many words; it may be aligned to less.
            let new = unsafe { (&raw const value).cast::<u64>().add(at).read_unaligned() };
            word.store(new, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl<V> Drop for Table<V> {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nobody else has the address.
        let unmapped = unsafe { munmap(self.words.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{}: {unmapped:?}", self.name);
    }
}
