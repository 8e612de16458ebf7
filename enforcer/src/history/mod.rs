//! Memory of tenants over time, in bounded memory: each second of the last ten minutes, ten seconds for two hours, minutes
//! for a day.
//!
//! A tenant on a GPU has a [`Track`] from its first byte on and loses it a day after its last. A full track takes about
//! 10 KB. All of this is pure; `enforcer::recording` looks at the ledger once a second.

mod ring;
mod small;
mod track;

use std::collections::BTreeMap;

pub use track::{FINE, LONGEST, Series, Track};

/// Tracks of all tenants.
#[derive(Clone, Debug, Default)]
pub struct History(BTreeMap<(String, u32), Track>);

impl History {
    /// Notes what tenants have charged in this second, by name and GPU, with the most that they ever had. Who is not among
    /// them and has a track has nothing.
    pub fn sample(&mut self, second: u64, used: &BTreeMap<(String, u32), (u64, u64)>) {
        for (key, track) in &mut self.0 {
            if !used.contains_key(key) {
                track.sample(second, 0, 0);
            }
        }
        for (key, (bytes, peak)) in used {
            match self.0.get_mut(key) {
                Some(track) => track.sample(second, *bytes, *peak),
                None if *bytes > 0 => {
                    let mut track = Track::new(*peak);
                    track.sample(second, *bytes, *peak);
                    self.0.insert(key.clone(), track);
                }
                None => {}
            }
        }
        self.0
            .retain(|_, track| second.saturating_sub(track.last_active()) <= LONGEST);
    }

    /// Forgets tenants that are in no policy any more: all but those that `stays` picks.
    pub fn keep(&mut self, stays: impl Fn(&str) -> bool) {
        self.0.retain(|(tenant, _), _| stays(tenant));
    }

    /// The tenants and GPUs with a track.
    pub fn keys(&self) -> impl Iterator<Item = &(String, u32)> {
        self.0.keys()
    }

    /// The track of a tenant on a GPU.
    pub fn track(&self, tenant: &str, gpu: u32) -> Option<&Track> {
        self.0.get(&(tenant.to_owned(), gpu))
    }

    /// All tracks.
    pub fn tracks(&self) -> impl Iterator<Item = (&str, u32, &Track)> {
        self.0
            .iter()
            .map(|((tenant, gpu), track)| (tenant.as_str(), *gpu, track))
    }

    /// Bytes of heap that the tracks take.
    pub fn bytes(&self) -> usize {
        self.0
            .iter()
            .map(|((tenant, _), track)| tenant.capacity() + size_of::<Track>() + track.bytes())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn used(entries: &[(&str, u32, u64)]) -> BTreeMap<(String, u32), (u64, u64)> {
        entries
            .iter()
            .map(|(tenant, gpu, bytes)| (((*tenant).to_owned(), *gpu), (*bytes, *bytes)))
            .collect()
    }

    #[test]
    fn a_track_begins_with_use_and_ends_a_day_after_it() {
        let mut history = History::default();
        history.sample(100, &used(&[("a", 0, 0)]));
        assert_eq!(history.keys().count(), 0, "idle tenants take nothing");
        history.sample(101, &used(&[("a", 0, GIB)]));
        history.sample(102, &used(&[]));
        assert_eq!(history.track("a", 0).map(Track::used), Some(0));
        history.sample(101 + LONGEST, &used(&[]));
        assert_eq!(history.keys().count(), 1);
        history.sample(102 + LONGEST, &used(&[]));
        assert_eq!(history.keys().count(), 0);
    }

    #[test]
    fn tenants_that_left_the_policy_are_forgotten() {
        let mut history = History::default();
        history.sample(1, &used(&[("a", 0, GIB), ("b", 0, GIB), ("b", 1, GIB)]));
        history.keep(|tenant| tenant == "b");
        let keys: Vec<_> = history.keys().cloned().collect();
        assert_eq!(keys, [("b".to_owned(), 0), ("b".to_owned(), 1)]);
    }

    #[test]
    fn a_day_of_a_thousand_tenants_takes_ten_megabytes() {
        let mut history = History::default();
        let one = used(&[("tenant-0001", 0, GIB)]);
        for second in 0..LONGEST + 1000 {
            history.sample(second, &one);
        }
        assert!(history.bytes() < 10_500, "{}", history.bytes());
    }
}
