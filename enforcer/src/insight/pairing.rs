//! Allocations and what gives them back, by the place in the program that obtained them.
//!
//! Pure. Calls come in about the order in which they returned, from several threads. An address can be handed out again
//! before the call that gave it back has returned, so each call is known by when it began and when it returned: nobody
//! gives back what was not handed out yet when they began.

use std::collections::{BTreeMap, HashMap};

use super::{survival::Ends, trend::Trend};

/// What an address is an address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// The GPU's addresses, managed memory among them.
    Device,
    /// Handles of memory without an address.
    Handle,
    /// Pinned host memory.
    Host,
    /// Host memory that was pinned later.
    Registered,
}

/// When a call began and returned, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Began.
    pub entered: u64,
    /// Returned.
    pub returned: u64,
}

/// A process, counted from the first one that was looked at: process ids come again.
pub type ProcessIndex = u32;
/// A call site, by its place among those of a look.
pub type Site = u32;

type Key = (ProcessIndex, Space, u64);

#[derive(Clone, Copy, Debug)]
struct Live {
    bytes: u64,
    site: Site,
    returned: u64,
    /// For handles: how many the process holds, and in how many places it is mapped.
    references: u32,
    mappings: u32,
}

/// What a call site did, and what it holds.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Allocations so far.
    pub allocations: u64,
    /// Their bytes.
    pub allocated_bytes: u64,
    /// Allocations that have not been given back.
    pub live: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_bytes: u64,
    /// How long those lived that were given back.
    pub ends: Ends,
    /// What was held when.
    pub trend: Trend,
}

/// All that is known of a look.
#[derive(Debug)]
pub struct Pairing {
    most: usize,
    live: HashMap<Key, Live>,
    /// Mapped handles: where, how long, and which.
    mapped: BTreeMap<(ProcessIndex, u64), (u64, u64)>,
    sites: Vec<Tally>,
    /// When processes ended.
    ended: HashMap<ProcessIndex, u64>,
    /// Given back without having been seen to be obtained.
    pub unknown_frees: u64,
    /// Obtained while there was no room to remember it.
    pub overflowed: u64,
}

impl Pairing {
    /// Remembers so many allocations at once.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            live: HashMap::new(),
            mapped: BTreeMap::new(),
            sites: Vec::new(),
            ended: HashMap::new(),
            unknown_frees: 0,
            overflowed: 0,
        }
    }

    fn tally(&mut self, site: Site) -> &mut Tally {
        let at = site as usize;
        if self.sites.len() <= at {
            self.sites.resize_with(at + 1, Tally::default);
        }
        &mut self.sites[at]
    }

    /// Something was obtained.
    pub fn obtain(
        &mut self,
        process: ProcessIndex,
        (space, address): (Space, u64),
        bytes: u64,
        site: Site,
        span: Span,
    ) {
        let key = (process, space, address);
        // The call that gave it back is on its way to us, or was lost.
        self.remove(key, span.entered);
        let tally = self.tally(site);
        tally.allocations += 1;
        tally.allocated_bytes = tally.allocated_bytes.saturating_add(bytes);
        if self.live.len() >= self.most {
            self.overflowed += 1;
            return;
        }
        let tally = self.tally(site);
        tally.live += 1;
        tally.live_bytes = tally.live_bytes.saturating_add(bytes);
        tally.peak_bytes = tally.peak_bytes.max(tally.live_bytes);
        self.live.insert(
            key,
            Live {
                bytes,
                site,
                returned: span.returned,
                references: 1,
                mappings: 0,
            },
        );
    }

    fn remove(&mut self, key: Key, at: u64) {
        if let Some(live) = self.live.remove(&key) {
            let tally = self.tally(live.site);
            tally.live -= 1;
            tally.live_bytes = tally.live_bytes.saturating_sub(live.bytes);
            tally.ends.add(at.saturating_sub(live.returned));
        }
    }

    /// What `span` is about, if it was handed out before the call began.
    fn known(&mut self, key: Key, span: Span) -> Option<&mut Live> {
        self.live
            .get_mut(&key)
            .filter(|live| live.returned <= span.entered)
    }

    /// An address was given back. The null address is nobody's.
    pub fn give_back(&mut self, process: ProcessIndex, (space, address): (Space, u64), span: Span) {
        let key = (process, space, address);
        if address == 0 {
            return;
        }
        if self.known(key, span).is_some() {
            self.remove(key, span.returned);
        } else if !self.live.contains_key(&key) {
            self.unknown_frees += 1;
        }
    }

    /// The process has one reference more to a handle.
    pub fn retain(&mut self, process: ProcessIndex, handle: u64, span: Span) {
        if let Some(live) = self.known((process, Space::Handle, handle), span) {
            live.references += 1;
        }
    }

    /// The process has one reference less to a handle.
    pub fn release(&mut self, process: ProcessIndex, handle: u64, span: Span) {
        let key = (process, Space::Handle, handle);
        if let Some(live) = self.known(key, span) {
            live.references = live.references.saturating_sub(1);
            self.drop_unused(key, span.returned);
        } else if !self.live.contains_key(&key) {
            self.unknown_frees += 1;
        }
    }

    /// A handle's memory is at an address.
    pub fn map(&mut self, process: ProcessIndex, address: u64, bytes: u64, handle: u64) {
        if let Some(live) = self.live.get_mut(&(process, Space::Handle, handle)) {
            live.mappings += 1;
            self.mapped.insert((process, address), (bytes, handle));
        }
    }

    /// What was at these addresses is not any more.
    pub fn unmap(&mut self, process: ProcessIndex, address: u64, bytes: u64, at: u64) {
        let places: Vec<_> = self
            .mapped
            .range((process, address)..(process, address.saturating_add(bytes)))
            .map(|(place, _)| *place)
            .collect();
        for place in places {
            let Some((_, handle)) = self.mapped.remove(&place) else {
                continue;
            };
            let key = (process, Space::Handle, handle);
            if let Some(live) = self.live.get_mut(&key) {
                live.mappings = live.mappings.saturating_sub(1);
                self.drop_unused(key, at);
            }
        }
    }

    fn drop_unused(&mut self, key: Key, at: u64) {
        let unused = |live: &Live| live.references == 0 && live.mappings == 0;
        if self.live.get(&key).is_some_and(unused) {
            self.remove(key, at);
        }
    }

    /// A process has ended. What it held is shown as it was then, for as long as there is room.
    pub fn end(&mut self, process: ProcessIndex, at: u64) {
        self.ended.insert(process, at);
        if self.live.len() > self.most / 2 {
            let ended = std::mem::take(&mut self.ended);
            let gone: Vec<Key> = self
                .live
                .keys()
                .filter(|(process, ..)| ended.contains_key(process))
                .copied()
                .collect();
            for key in gone {
                if let Some(live) = self.live.remove(&key) {
                    let tally = self.tally(live.site);
                    tally.live -= 1;
                    tally.live_bytes = tally.live_bytes.saturating_sub(live.bytes);
                }
            }
            self.mapped
                .retain(|(process, _), _| !ended.contains_key(process));
        }
    }

    /// Looks at what each site holds.
    pub fn look(&mut self, now: u64) {
        for tally in &mut self.sites {
            tally.trend.look(now, tally.live_bytes);
        }
    }

    /// What each site did and holds, with the ages of what it holds, ascending.
    pub fn sites(&self, now: u64) -> Vec<(Site, &Tally, Vec<u64>)> {
        let mut ages: Vec<Vec<u64>> = vec![Vec::new(); self.sites.len()];
        for ((process, ..), live) in &self.live {
            let until = self.ended.get(process).copied().unwrap_or(now);
            ages[live.site as usize].push(until.saturating_sub(live.returned));
        }
        (0..)
            .zip(&self.sites)
            .zip(ages)
            .map(|((site, tally), mut ages)| {
                ages.sort_unstable();
                (site, tally, ages)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn span(entered: u64, returned: u64) -> Span {
        Span { entered, returned }
    }

    fn live(pairing: &Pairing) -> Vec<(u64, u64)> {
        pairing
            .sites(1_000_000)
            .iter()
            .map(|(_, tally, ages)| {
                assert_eq!(ages.len() as u64, tally.live);
                (tally.live, tally.live_bytes)
            })
            .collect()
    }

    #[test]
    fn who_gives_back_holds_nothing() {
        let mut pairing = Pairing::new(100);
        pairing.obtain(0, (Space::Device, 0x1000), 64, 0, span(1, 2));
        pairing.obtain(0, (Space::Device, 0x2000), 32, 1, span(3, 4));
        pairing.give_back(0, (Space::Device, 0x1000), span(5, 6));
        assert_eq!(live(&pairing), [(0, 0), (1, 32)]);
        // The same number elsewhere is something else.
        pairing.give_back(0, (Space::Host, 0x2000), span(7, 8));
        pairing.give_back(1, (Space::Device, 0x2000), span(7, 8));
        pairing.give_back(0, (Space::Device, 0), span(7, 8));
        assert_eq!(live(&pairing), [(0, 0), (1, 32)]);
        assert_eq!(pairing.unknown_frees, 2);
    }

    #[test]
    fn an_address_that_is_handed_out_again_before_its_free_returns_stays() {
        let mut pairing = Pairing::new(100);
        pairing.obtain(0, (Space::Device, 0x1000), 64, 0, span(1, 2));
        // One thread begins to give it back at 3, another gets it at 5, the first returns at 6.
        pairing.obtain(0, (Space::Device, 0x1000), 16, 1, span(4, 5));
        pairing.give_back(0, (Space::Device, 0x1000), span(3, 6));
        assert_eq!(live(&pairing), [(0, 0), (1, 16)]);
        assert_eq!(pairing.unknown_frees, 0);
        pairing.give_back(0, (Space::Device, 0x1000), span(7, 8));
        assert_eq!(live(&pairing), [(0, 0), (0, 0)]);
    }

    #[test]
    fn a_handle_lives_as_long_as_it_is_held_or_mapped() {
        let mut pairing = Pairing::new(100);
        pairing.obtain(0, (Space::Handle, 7), 2 << 20, 0, span(1, 2));
        pairing.map(0, 0x10_0000, 1 << 20, 7);
        pairing.map(0, 0x20_0000, 1 << 20, 7);
        pairing.release(0, 7, span(3, 4));
        assert_eq!(live(&pairing), [(1, 2 << 20)]);
        pairing.unmap(0, 0x10_0000, 1 << 20, 5);
        pairing.retain(0, 7, span(5, 6));
        pairing.unmap(0, 0x20_0000, 1 << 20, 7);
        assert_eq!(live(&pairing), [(1, 2 << 20)], "somebody has it again");
        pairing.release(0, 7, span(8, 9));
        assert_eq!(live(&pairing), [(0, 0)]);
    }

    #[test]
    fn one_unmapping_may_be_of_many() {
        let mut pairing = Pairing::new(100);
        for handle in 0..4 {
            pairing.obtain(0, (Space::Handle, handle), 10, 0, span(1, 2));
            pairing.map(0, 0x1000 + handle * 10, 10, handle);
            pairing.release(0, handle, span(3, 4));
        }
        pairing.unmap(0, 0x1000, 30, 5);
        assert_eq!(live(&pairing), [(1, 10)]);
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let mut pairing = Pairing::new(2);
        for at in 1..=5 {
            pairing.obtain(0, (Space::Device, at), 1, 0, span(at, at));
        }
        assert_eq!(pairing.overflowed, 3);
        assert_eq!(live(&pairing), [(2, 2)]);
        assert_eq!(pairing.sites(0)[0].1.allocations, 5);
    }

    #[test]
    fn what_ended_processes_held_makes_room() {
        let mut pairing = Pairing::new(3);
        pairing.obtain(0, (Space::Device, 1), 1, 0, span(1, 2));
        pairing.end(0, 12);
        assert_eq!(pairing.sites(100)[0].2, [10], "as it was at the end");
        pairing.obtain(1, (Space::Device, 1), 1, 0, span(13, 14));
        pairing.end(2, 20);
        assert_eq!(live(&pairing), [(1, 1)]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(u64),
        Give(u64),
    }

    proptest! {
        /// One thread: exactly what was not given back is live.
        #[test]
        fn it_agrees_with_a_plain_set(
            steps in proptest::collection::vec(
                prop_oneof![(1..20_u64).prop_map(Step::Take), (1..20_u64).prop_map(Step::Give)],
                0..200,
            )
        ) {
            let mut pairing = Pairing::new(1000);
            let mut held = HashSet::new();
            let mut unknown = 0;
            for (at, step) in (1..).zip(steps) {
                match step {
                    Step::Take(address) if held.insert(address) => {
                        pairing.obtain(0, (Space::Device, address), address, 0, span(2 * at, 2 * at + 1));
                    }
                    Step::Take(_) => {}
                    Step::Give(address) => {
                        unknown += u64::from(!held.remove(&address));
                        pairing.give_back(0, (Space::Device, address), span(2 * at, 2 * at + 1));
                    }
                }
            }
            let sites = pairing.sites(u64::MAX);
            let (count, bytes) = sites.first().map_or((0, 0), |(_, tally, _)| (tally.live, tally.live_bytes));
            prop_assert_eq!(count, held.len() as u64);
            prop_assert_eq!(bytes, held.iter().sum::<u64>());
            prop_assert_eq!(pairing.unknown_frees, unknown);
        }
    }
}
