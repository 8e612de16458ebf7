//! The memory of the cards: who holds how much of it.
//!
//! A block is what one allocation took. It lives as long as anything refers to it: the object that was
//! allocated, duplicates of it in other clients, and mappings through `nvidia-uvm`.

use std::collections::{BTreeMap, VecDeque};

use gpuquota_common::nvidia::heap;

const TINY_PAGE: u64 = 4 << 10;
const SMALL_PAGE: u64 = 64 << 10;
const HUGE_PAGE: u64 = 2 << 20;
/// Changes that are remembered for [`VideoMemory::events`].
const EVENTS_KEPT: usize = 1 << 18;

/// Bytes that the driver hands out for a request (measured): whole pages, of 2 MiB unless the request is
/// smaller than one or asks for pages of 4 KiB or 64 KiB. `None` if no 64-bit number holds it.
pub fn granted_size(size: u64, attr: u32) -> Option<u64> {
    let wanted = (attr >> heap::ATTR_PAGE_SIZE_SHIFT) & 3;
    let page = match wanted {
        heap::ATTR_PAGE_SIZE_4KB => TINY_PAGE,
        heap::ATTR_PAGE_SIZE_BIG => SMALL_PAGE,
        heap::ATTR_PAGE_SIZE_HUGE => HUGE_PAGE,
        _ if size < HUGE_PAGE => SMALL_PAGE,
        _ => HUGE_PAGE,
    };
    size.checked_next_multiple_of(page)
}

/// Why memory is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A memory object.
    Object,
    /// What the driver takes for a context by itself.
    Context,
}

/// Handle of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u64);

#[derive(Debug)]
struct Block {
    gpu: usize,
    bytes: u64,
    pid: u32,
    purpose: Purpose,
    references: u32,
}

/// One card.
#[derive(Debug, Default)]
pub struct Card {
    /// Bytes on it.
    pub capacity: u64,
    /// Bytes taken.
    pub used: u64,
    /// Most bytes taken at once.
    pub peak: u64,
    /// Bytes granted since the start.
    pub granted: u64,
    /// Allocations granted.
    pub allocations: u64,
    /// Allocations refused.
    pub refused: u64,
}

/// Managed memory of a process: an address range whose pages are on a card or in the host.
#[derive(Debug)]
struct Managed {
    pid: u32,
    length: u64,
    gpu: usize,
    resident: u64,
    /// When it was last touched, as a count.
    touched: u64,
}

/// A change of the memory in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Number, counted from 1 without gaps.
    pub number: u64,
    /// Whose memory.
    pub pid: u32,
    /// On which card.
    pub gpu: usize,
    /// Bytes more or fewer.
    pub change: i128,
}

/// All cards.
#[derive(Debug, Default)]
pub struct VideoMemory {
    cards: Vec<Card>,
    blocks: BTreeMap<BlockId, Block>,
    managed: BTreeMap<(u32, u64), Managed>,
    next: u64,
    touches: u64,
    events: VecDeque<Event>,
    event_count: u64,
}

/// Bytes of a process on a card by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// In memory objects.
    pub objects: u64,
    /// For contexts.
    pub context: u64,
    /// In managed memory.
    pub managed: u64,
}

impl VideoMemory {
    /// Cards of the given sizes.
    pub fn new(capacities: impl IntoIterator<Item = u64>) -> Self {
        Self {
            cards: capacities
                .into_iter()
                .map(|capacity| Card {
                    capacity,
                    ..Card::default()
                })
                .collect(),
            ..Self::default()
        }
    }

    /// A card's figures.
    pub fn card(&self, gpu: usize) -> &Card {
        &self.cards[gpu]
    }

    /// Sets the size of a card; what is taken beyond it stays taken.
    pub fn set_capacity(&mut self, gpu: usize, capacity: u64) {
        self.cards[gpu].capacity = capacity;
    }

    /// Starts the peak figures again.
    pub fn reset_peaks(&mut self) {
        for card in &mut self.cards {
            card.peak = card.used;
        }
    }

    /// Takes `bytes` on a card; managed memory makes room if it must. `None` if the card is full.
    pub fn take(&mut self, gpu: usize, bytes: u64, pid: u32, purpose: Purpose) -> Option<BlockId> {
        let card = &self.cards[gpu];
        if bytes > card.capacity || !self.make_room(gpu, bytes, None) {
            self.cards[gpu].refused += 1;
            return None;
        }
        self.change(gpu, pid, i128::from(bytes));
        let card = &mut self.cards[gpu];
        card.granted += bytes;
        card.allocations += 1;
        self.next += 1;
        let id = BlockId(self.next);
        self.blocks.insert(
            id,
            Block {
                gpu,
                bytes,
                pid,
                purpose,
                references: 1,
            },
        );
        Some(id)
    }

    /// One reference more on a block.
    pub fn refer(&mut self, id: BlockId) {
        if let Some(block) = self.blocks.get_mut(&id) {
            block.references += 1;
        }
    }

    /// One reference less; the last one gives the memory back.
    pub fn release(&mut self, id: BlockId) {
        let Some(block) = self.blocks.get_mut(&id) else {
            return;
        };
        block.references -= 1;
        if block.references == 0 {
            let (gpu, pid, bytes) = (block.gpu, block.pid, block.bytes);
            self.blocks.remove(&id);
            self.change(gpu, pid, -i128::from(bytes));
        }
    }

    /// Card and size of a block.
    pub fn block(&self, id: BlockId) -> Option<(usize, u64)> {
        self.blocks.get(&id).map(|block| (block.gpu, block.bytes))
    }

    /// Makes a managed range without memory.
    pub fn create_managed(&mut self, pid: u32, base: u64, length: u64) {
        self.managed.insert(
            (pid, base),
            Managed {
                pid,
                length,
                gpu: 0,
                resident: 0,
                touched: 0,
            },
        );
    }

    /// Brings a managed range to a card as far as there is room; returns what is there, or `None` without
    /// such a range. Ranges that were touched longest ago make room.
    pub fn touch_managed(&mut self, pid: u32, base: u64, gpu: usize) -> Option<u64> {
        let key = (pid, base);
        if self.managed.get(&key)?.gpu != gpu {
            self.evict(key, u64::MAX);
        }
        self.touches += 1;
        let range = self.managed.get_mut(&key)?;
        range.gpu = gpu;
        range.touched = self.touches;
        let missing = range.length - range.resident;
        self.make_room(gpu, missing, Some(key));
        let card = &self.cards[gpu];
        let moved = missing.min(card.capacity.saturating_sub(card.used));
        self.change(gpu, pid, i128::from(moved));
        let range = self.managed.get_mut(&key)?;
        range.resident += moved;
        Some(range.resident)
    }

    /// Bytes of a managed range on a card.
    pub fn managed_resident(&self, pid: u32, base: u64) -> Option<u64> {
        self.managed.get(&(pid, base)).map(|range| range.resident)
    }

    /// Moves the managed ranges of `pid` that lie in an address range to the host; returns the bytes moved.
    pub fn migrate_to_host(&mut self, pid: u32, base: u64, length: u64) -> u64 {
        let keys = self.managed_within(pid, base, length);
        keys.into_iter()
            .map(|(key, part)| self.evict(key, part))
            .sum()
    }

    /// Moves the managed ranges of `pid` that lie in an address range to a card; returns the bytes moved.
    pub fn migrate_to_gpu(&mut self, pid: u32, base: u64, length: u64, gpu: usize) -> u64 {
        let mut moved = 0;
        for ((pid, base), _) in self.managed_within(pid, base, length) {
            let before = self.managed_resident(pid, base).unwrap_or(0);
            let after = self.touch_managed(pid, base, gpu).unwrap_or(0);
            moved += after.saturating_sub(before);
        }
        moved
    }

    /// Bytes of managed memory of `pid` that lie in an address range.
    pub fn managed_length(&self, pid: u32, base: u64, length: u64) -> u64 {
        self.managed_within(pid, base, length)
            .iter()
            .map(|(_, part)| part)
            .sum()
    }

    /// Ends a managed range.
    pub fn destroy_managed(&mut self, pid: u32, base: u64) -> bool {
        self.evict((pid, base), u64::MAX);
        self.managed.remove(&(pid, base)).is_some()
    }

    /// Ends all managed ranges of a process.
    pub fn destroy_all_managed(&mut self, pid: u32) {
        let keys: Vec<_> = self
            .managed
            .range((pid, 0)..=(pid, u64::MAX))
            .map(|(key, _)| *key)
            .collect();
        for (pid, base) in keys {
            self.destroy_managed(pid, base);
        }
    }

    /// What each process holds on a card.
    pub fn held(&self, gpu: usize) -> BTreeMap<u32, Held> {
        let mut all: BTreeMap<u32, Held> = BTreeMap::new();
        for block in self.blocks.values().filter(|block| block.gpu == gpu) {
            let held = all.entry(block.pid).or_default();
            match block.purpose {
                Purpose::Object => held.objects += block.bytes,
                Purpose::Context => held.context += block.bytes,
            }
        }
        for range in self.managed.values() {
            if range.gpu == gpu && range.resident > 0 {
                all.entry(range.pid).or_default().managed += range.resident;
            }
        }
        all
    }

    /// The last changes, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    /// Managed ranges of a process that an address range touches, with the bytes of each that lie in it.
    fn managed_within(&self, pid: u32, base: u64, length: u64) -> Vec<((u32, u64), u64)> {
        let end = base.saturating_add(length);
        self.managed
            .range((pid, 0)..(pid, end.max(base)))
            .map(|(key, range)| {
                let last = end.min(key.1.saturating_add(range.length));
                (*key, last.saturating_sub(base.max(key.1)))
            })
            .filter(|(_, part)| *part > 0)
            .collect()
    }

    /// Frees room for `bytes` by moving managed memory to the host, sparing `keep`.
    fn make_room(&mut self, gpu: usize, bytes: u64, keep: Option<(u32, u64)>) -> bool {
        loop {
            let card = &self.cards[gpu];
            let free = card.capacity.saturating_sub(card.used);
            if free >= bytes {
                return true;
            }
            let oldest = self
                .managed
                .iter()
                .filter(|(key, range)| {
                    range.gpu == gpu && range.resident > 0 && Some(**key) != keep
                })
                .min_by_key(|(_, range)| range.touched)
                .map(|(key, _)| *key);
            let Some(oldest) = oldest else {
                return false;
            };
            self.evict(oldest, bytes - free);
        }
    }

    fn evict(&mut self, key: (u32, u64), at_most: u64) -> u64 {
        let Some(range) = self.managed.get_mut(&key) else {
            return 0;
        };
        let moved = range.resident.min(
            at_most
                .checked_next_multiple_of(HUGE_PAGE)
                .unwrap_or(at_most),
        );
        range.resident -= moved;
        let (gpu, pid) = (range.gpu, range.pid);
        self.change(gpu, pid, -i128::from(moved));
        moved
    }

    fn change(&mut self, gpu: usize, pid: u32, change: i128) {
        if change == 0 {
            return;
        }
        let card = &mut self.cards[gpu];
        let used = i128::from(card.used) + change;
        card.used = u64::try_from(used).unwrap_or_default();
        card.peak = card.peak.max(card.used);
        self.event_count += 1;
        if self.events.len() == EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(Event {
            number: self.event_count,
            pid,
            gpu,
            change,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn sizes_are_whole_pages() {
        let tiny = heap::ATTR_PAGE_SIZE_4KB << heap::ATTR_PAGE_SIZE_SHIFT;
        assert_eq!(
            granted_size(HUGE_PAGE + 1, tiny),
            Some(HUGE_PAGE + TINY_PAGE)
        );
        let big = heap::ATTR_PAGE_SIZE_BIG << heap::ATTR_PAGE_SIZE_SHIFT;
        assert_eq!(granted_size(1, 0), Some(SMALL_PAGE));
        assert_eq!(granted_size(HUGE_PAGE, 0), Some(HUGE_PAGE));
        assert_eq!(granted_size(HUGE_PAGE + 1, 0), Some(2 * HUGE_PAGE));
        assert_eq!(
            granted_size(HUGE_PAGE + 1, big),
            Some(HUGE_PAGE + SMALL_PAGE)
        );
        assert_eq!(granted_size(u64::MAX, 0), None);
    }

    #[test]
    fn a_block_lives_until_its_last_reference() {
        let mut memory = VideoMemory::new([4 * GIB]);
        let block = memory.take(0, 3 * GIB, 7, Purpose::Object).unwrap();
        assert!(memory.take(0, 2 * GIB, 7, Purpose::Object).is_none());
        memory.refer(block);
        memory.release(block);
        assert_eq!(memory.card(0).used, 3 * GIB);
        memory.release(block);
        assert_eq!(memory.card(0).used, 0);
        assert_eq!(memory.card(0).peak, 3 * GIB);
        assert_eq!(memory.card(0).refused, 1);
        let sum: i128 = memory.events().map(|event| event.change).sum();
        assert_eq!(sum, 0);
    }

    #[test]
    fn managed_memory_makes_room() {
        let mut memory = VideoMemory::new([4 * GIB]);
        memory.create_managed(7, 0x1000, 3 * GIB);
        assert_eq!(memory.card(0).used, 0);
        assert_eq!(memory.touch_managed(7, 0x1000, 0), Some(3 * GIB));
        let block = memory.take(0, 2 * GIB, 8, Purpose::Object).unwrap();
        assert_eq!(memory.managed_resident(7, 0x1000), Some(2 * GIB));
        assert_eq!(memory.held(0)[&7].managed, 2 * GIB);
        // It cannot push out what an object holds.
        assert_eq!(memory.touch_managed(7, 0x1000, 0), Some(2 * GIB));
        memory.release(block);
        assert_eq!(memory.migrate_to_host(7, 0, u64::MAX), 2 * GIB);
        assert_eq!(memory.migrate_to_gpu(7, 0, u64::MAX, 0), 3 * GIB);
        memory.destroy_all_managed(7);
        assert_eq!(memory.card(0).used, 0);
    }
}
