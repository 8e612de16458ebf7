//! What was seen of the kernels of a look, by tenant and symbol. Pure.
//!
//! A kernel is known by a handle in its process. Handles whose names were seen to be given out are one symbol in all
//! processes of a tenant; a handle that was given out unseen is a symbol of its own, and is shown as what it is. Programs that
//! ask for a kernel each time they launch it give it its name sooner or later: then all that is in the book of it goes to that.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use gpuquota_common::profile::{Launches, OTHERS};

use super::{anomaly::Watch, histogram::Histogram};

/// Symbols that are told apart.
const MOST_SYMBOLS: usize = 1024;
/// Handles whose names are remembered.
const MOST_HANDLES: usize = 1 << 16;
/// Bytes of names that are remembered, each name once.
const MOST_NAME_BYTES: usize = 8 << 20;

/// A process, counted from the first one that was looked at: process ids come again.
pub type ProcessIndex = u32;

/// What a kernel is called.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Name {
    /// As its module calls it.
    Known(Arc<str>),
    /// It was given out unseen, or it is a graph, whose handle has [`gpuquota_common::profile::GRAPH`].
    Handle(ProcessIndex, u64),
    /// Those for which there was no room.
    Others,
}

/// What was seen of a symbol of a tenant.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Launches.
    pub launches: u64,
    /// Time since the launch before, by the same thread.
    pub gaps: Histogram,
    /// Launches that were waited for, from launch to the end of the wait.
    pub durations: Histogram,
    /// Waits that began so late that the kernel may have ended long before: not among the durations.
    pub late: u64,
    /// What is usual.
    pub watch: Watch,
}

impl Tally {
    /// Adds what was seen of the same symbol by another handle. What is usual is what most was seen of.
    fn add(&mut self, other: &Self) {
        let waits = |tally: &Self| tally.durations.counts().iter().sum::<u64>();
        self.watch.join(&other.watch, waits(other) > waits(self));
        self.launches += other.launches;
        self.gaps.add_all(other.gaps.counts());
        self.durations.add_all(other.durations.counts());
        self.late += other.late;
    }
}

/// A launch that was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// When it was launched, `CLOCK_MONOTONIC` nanoseconds.
    pub launched_ns: u64,
    /// Since when it was waited for.
    pub since_ns: u64,
    /// When the wait was over.
    pub until_ns: u64,
}

/// A wait that begins after this part of the time from launch to end, or later, says nothing about the kernel.
const LATE: u64 = 16;

impl Wait {
    fn duration(self) -> u64 {
        self.until_ns.saturating_sub(self.launched_ns)
    }

    /// Whether the kernel may have ended long before anybody waited.
    fn is_late(self) -> bool {
        let waited = self.until_ns.saturating_sub(self.since_ns);
        waited.saturating_mul(LATE) < self.duration()
    }
}

/// An anomaly.
#[derive(Clone, Debug, PartialEq)]
pub struct Anomaly {
    /// The kernel.
    pub name: Name,
    /// How long it took until it had been waited for, nanoseconds.
    pub duration_ns: u64,
    /// What is usual, nanoseconds.
    pub usual_ns: f64,
}

type SymbolKey = (Arc<str>, Name);

/// All that was seen.
#[derive(Debug, Default)]
pub struct Book {
    symbols: BTreeMap<SymbolKey, Tally>,
    names: HashMap<(ProcessIndex, u64), Arc<str>>,
    /// Handles that are others of a kernel whose own handle has no name yet.
    aliases: HashMap<(ProcessIndex, u64), u64>,
    /// Each name once, and their bytes.
    known: HashSet<Arc<str>>,
    known_bytes: usize,
    /// Names for which there was no room.
    pub unnamed: u64,
    /// Launches of kernels that are not told apart.
    pub crowded: u64,
}

impl Book {
    /// A handle has a name from now on.
    pub fn name(&mut self, process: ProcessIndex, handle: u64, name: &str) {
        let key = (process, handle);
        if self.names.get(&key).is_some_and(|known| **known == *name) {
            return;
        }
        self.aliases.remove(&key);
        let is_full = self.names.len() >= MOST_HANDLES && !self.names.contains_key(&key);
        let Some(name) = (!is_full).then(|| self.intern(name)).flatten() else {
            // What it was called before it is not called now.
            self.names.remove(&key);
            self.unnamed += 1;
            return;
        };
        if self.names.insert(key, Arc::clone(&name)).is_none() {
            self.rename(process, handle, &name);
        }
        let others: Vec<u64> = self
            .aliases
            .iter()
            .filter(|((of, _), own)| (*of, **own) == key)
            .map(|((_, other), _)| *other)
            .collect();
        for other in others {
            self.name(process, other, &name);
        }
    }

    /// What is in the book of a bare handle is of this name.
    fn rename(&mut self, process: ProcessIndex, handle: u64, name: &Arc<str>) {
        let bare = Name::Handle(process, handle);
        let tenants: Vec<Arc<str>> = self
            .symbols
            .keys()
            .filter(|(_, known)| *known == bare)
            .map(|(tenant, _)| Arc::clone(tenant))
            .collect();
        for tenant in tenants {
            let Some(found) = self.symbols.remove(&(Arc::clone(&tenant), bare.clone())) else {
                continue;
            };
            let key = (tenant, Name::Known(Arc::clone(name)));
            match self.symbols.get_mut(&key) {
                Some(known) => known.add(&found),
                None => {
                    self.symbols.insert(key, found);
                }
            }
        }
    }

    /// The one copy of a name, if there is room.
    fn intern(&mut self, name: &str) -> Option<Arc<str>> {
        if let Some(known) = self.known.get(name) {
            return Some(Arc::clone(known));
        }
        if self.known_bytes + name.len() > MOST_NAME_BYTES {
            return None;
        }
        let name: Arc<str> = name.into();
        self.known_bytes += name.len();
        self.known.insert(Arc::clone(&name));
        Some(name)
    }

    /// A handle is another one of the same kernel.
    pub fn alias(&mut self, process: ProcessIndex, handle: u64, of: u64) {
        let key = (process, handle);
        if let Some(name) = self.names.get(&(process, of)).cloned() {
            self.name(process, handle, &name);
        } else if !self.names.contains_key(&key)
            && (self.aliases.len() < MOST_HANDLES || self.aliases.contains_key(&key))
        {
            self.aliases.insert(key, of);
        }
    }

    fn symbol(&self, process: ProcessIndex, handle: u64) -> Name {
        match self.names.get(&(process, handle)) {
            _ if handle == OTHERS => Name::Others,
            Some(name) => Name::Known(Arc::clone(name)),
            None => Name::Handle(process, handle),
        }
    }

    fn tally(&mut self, tenant: &Arc<str>, name: Name) -> (&mut Tally, Name) {
        let mut key = (Arc::clone(tenant), name);
        if !self.symbols.contains_key(&key) && self.symbols.len() >= MOST_SYMBOLS {
            key.1 = Name::Others;
        }
        let name = key.1.clone();
        (self.symbols.entry(key).or_default(), name)
    }

    /// Launches of a kernel.
    pub fn launched(
        &mut self,
        process: ProcessIndex,
        tenant: &Arc<str>,
        handle: u64,
        launches: &Launches,
    ) {
        let name = self.symbol(process, handle);
        let (tally, name) = self.tally(tenant, name);
        tally.launches += launches.count;
        tally.gaps.add_all(&launches.gaps);
        if name == Name::Others {
            self.crowded += launches.count;
        }
    }

    /// A launch was waited for. More than `factor` times the usual is an anomaly.
    pub fn waited(
        &mut self,
        process: ProcessIndex,
        tenant: &Arc<str>,
        handle: u64,
        wait: Wait,
        factor: f64,
    ) -> Option<Anomaly> {
        let name = self.symbol(process, handle);
        let (tally, name) = self.tally(tenant, name);
        if wait.is_late() {
            tally.late += 1;
            return None;
        }
        let duration_ns = wait.duration();
        tally.durations.add(duration_ns);
        // Of many kernels together nothing is usual.
        if name == Name::Others {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a wait")]
        let usual = tally
            .watch
            .observe(wait.until_ns, duration_ns as f64, factor);
        usual.map(|usual_ns| Anomaly {
            name,
            duration_ns,
            usual_ns,
        })
    }

    /// A process has ended: its handles say nothing any more.
    pub fn end(&mut self, process: ProcessIndex) {
        self.names.retain(|(of, _), _| *of != process);
        self.aliases.retain(|(of, _), _| *of != process);
        let mut bytes = 0;
        self.known.retain(|name| {
            let is_used = Arc::strong_count(name) > 1;
            bytes += if is_used { name.len() } else { 0 };
            is_used
        });
        self.known_bytes = bytes;
    }

    /// Symbols by tenant.
    pub fn symbols(&self) -> impl Iterator<Item = (&str, &Name, &Tally)> {
        self.symbols
            .iter()
            .map(|((tenant, name), tally)| (&**tenant, name, tally))
    }
}

#[cfg(test)]
mod tests {
    use gpuquota_common::launch::GAPS;
    use proptest::prelude::*;

    use super::*;

    fn launches(count: u64) -> Launches {
        let mut gaps = [0; GAPS];
        gaps[10] = count;
        Launches { count, gaps }
    }

    fn wait(launched_ns: u64, duration: u64) -> Wait {
        Wait {
            launched_ns,
            since_ns: launched_ns,
            until_ns: launched_ns + duration,
        }
    }

    fn tenant() -> Arc<str> {
        "a".into()
    }

    #[test]
    fn a_name_is_one_symbol_in_all_processes_and_a_bare_handle_is_its_own() {
        let mut book = Book::default();
        book.name(0, 0x10, "gemm");
        book.name(1, 0x20, "gemm");
        book.alias(1, 0x21, 0x20);
        for (process, handle) in [(0, 0x10), (1, 0x20), (1, 0x21), (0, 0x20), (1, 0x10)] {
            book.launched(process, &tenant(), handle, &launches(2));
        }
        book.launched(0, &"b".into(), 0x10, &launches(1));
        let found: Vec<_> = book
            .symbols()
            .map(|(tenant, name, tally)| (tenant, name.clone(), tally.launches))
            .collect();
        assert_eq!(
            found,
            [
                ("a", Name::Known("gemm".into()), 6),
                ("a", Name::Handle(0, 0x20), 2),
                ("a", Name::Handle(1, 0x10), 2),
                ("b", Name::Known("gemm".into()), 1),
            ]
        );
        assert_eq!(book.crowded, 0);
    }

    #[test]
    fn a_name_that_comes_late_has_all_that_was_seen() {
        let mut book = Book::default();
        for handle in [0x10, 0x11, 0x20] {
            book.launched(0, &tenant(), handle, &launches(3));
            book.waited(0, &tenant(), handle, wait(0, 1000), 3.0);
        }
        // The function of a kernel whose name was not seen, and then is.
        book.alias(0, 0x11, 0x10);
        assert_eq!(book.symbols().count(), 3);
        book.name(0, 0x10, "gemm");
        book.name(1, 0x20, "conv");
        let found: Vec<_> = book
            .symbols()
            .map(|(_, name, tally)| (name.clone(), tally.launches, tally.durations.clone()))
            .collect();
        let mut durations = Histogram::default();
        durations.add(1000);
        let one = durations.clone();
        durations.add(1000);
        assert_eq!(
            found,
            [
                (Name::Known("gemm".into()), 6, durations),
                (Name::Handle(0, 0x20), 3, one),
            ]
        );
        book.end(0);
        assert_eq!((book.names.len(), book.aliases.len()), (1, 0));
    }

    #[test]
    fn an_address_that_is_given_out_again_is_the_new_kernel() {
        let mut book = Book::default();
        book.name(0, 0x10, "gemm");
        book.launched(0, &tenant(), 0x10, &launches(1));
        book.name(0, 0x10, "conv");
        book.launched(0, &tenant(), 0x10, &launches(1));
        assert_eq!(book.symbols().count(), 2);
        book.end(0);
        book.launched(0, &tenant(), 0x10, &launches(1));
        assert_eq!(book.symbols().count(), 3);
    }

    #[test]
    fn who_waits_late_does_not_know_how_long_it_took() {
        let mut book = Book::default();
        let late = Wait {
            launched_ns: 0,
            since_ns: 990_000,
            until_ns: 1_000_000,
        };
        book.waited(0, &tenant(), 1, late, 3.0);
        let half = Wait {
            since_ns: 500_000,
            ..late
        };
        book.waited(0, &tenant(), 1, half, 3.0);
        let (_, _, tally) = book.symbols().next().expect("one");
        assert_eq!((tally.late, tally.durations.counts().iter().sum()), (1, 1));
    }

    #[test]
    fn a_slow_kernel_is_found_and_named() {
        let mut book = Book::default();
        book.name(0, 7, "spin");
        let mut at = 0;
        for _ in 0..30 {
            at += 60_000_000;
            assert_eq!(
                book.waited(0, &tenant(), 7, wait(at, 50_000_000), 3.0),
                None
            );
        }
        let found = book.waited(0, &tenant(), 7, wait(at, 250_000_000), 3.0);
        assert_eq!(
            found,
            Some(Anomaly {
                name: Name::Known("spin".into()),
                duration_ns: 250_000_000,
                usual_ns: 50e6,
            })
        );
    }

    #[test]
    fn names_have_a_bound_and_go_with_who_uses_them() {
        let mut book = Book::default();
        let long = "x".repeat(1 << 20);
        for at in 0..20 {
            book.name(at, 7, &format!("{at}{long}"));
        }
        assert!(book.known_bytes <= MOST_NAME_BYTES && book.unnamed >= 12);
        // The same name is there once, however often it is given out.
        let before = book.known_bytes;
        book.name(0, 8, &format!("0{long}"));
        assert_eq!(book.known_bytes, before);
        for at in 0..20 {
            book.end(at);
        }
        assert_eq!((book.known_bytes, book.known.len()), (0, 0));
        // What is in the book keeps its name.
        book.name(0, 7, "gemm");
        book.launched(0, &tenant(), 7, &launches(1));
        book.end(0);
        assert_eq!(book.known.len(), 1);
    }

    proptest! {
        /// Whatever is thrown at it, memory has a bound and no launch is lost.
        #[test]
        fn there_is_a_bound(handles in prop::collection::vec((0u32..4, 0u64..3000), 1..5000)) {
            let mut book = Book::default();
            for (process, handle) in &handles {
                book.launched(*process, &tenant(), *handle, &launches(1));
            }
            prop_assert!(book.symbols.len() <= MOST_SYMBOLS + 1);
            let sum: u64 = book.symbols().map(|(_, _, tally)| tally.launches).sum();
            prop_assert_eq!(sum, handles.len() as u64);
        }
    }
}
