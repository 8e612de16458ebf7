//! Finding objects without a look at all of them: through the lists of their clients.

use gpuquota_common::map::{Client, Object, ObjectKey, counter, list};

use super::Kernel;

/// How often a list is followed anew that changed meanwhile, before everything is looked at instead.
const TRIES: usize = 3;

impl Kernel {
    /// The clients that have objects in the ledger.
    pub fn clients(&self) -> impl Iterator<Item = (u32, Client)> + '_ {
        self.clients.iter().filter_map(Result::ok)
    }

    /// Objects in the ledger, by the lists; exact while nothing changes.
    pub fn object_count(&self) -> u64 {
        if !self.lists_are_whole() {
            return u64::try_from(self.objects().count()).unwrap_or(u64::MAX);
        }
        self.clients()
            .flat_map(|(_, client)| client.count)
            .map(u64::from)
            .sum()
    }

    /// The objects of one client.
    pub fn objects_of(&self, client: u32) -> Vec<(ObjectKey, Object)> {
        const ALL: [usize; 2] = [list::MEMORY, list::STRUCTURE];
        if self.lists_are_whole() {
            self.listed(client, &ALL)
        } else {
            self.searched(client, &ALL)
        }
    }

    /// All objects but video memory: clients, devices, channels. There are few of them for each process.
    pub fn structure(&self) -> Vec<(ObjectKey, Object)> {
        self.structure_below(&self.clients().collect::<Vec<_>>())
    }

    /// The same where the clients are known: to go over all of them takes long, however few there are.
    pub fn structure_below(&self, clients: &[(u32, Client)]) -> Vec<(ObjectKey, Object)> {
        if !self.lists_are_whole() {
            return self
                .objects()
                .filter(|(_, object)| list::of(object.kind) == list::STRUCTURE)
                .collect();
        }
        clients
            .iter()
            .flat_map(|(client, _)| self.listed(*client, &[list::STRUCTURE]))
            .collect()
    }

    /// The objects of the clients that `wanted` picks, a client's process and flags being known.
    pub fn objects_where(&self, wanted: impl Fn(&Client) -> bool) -> Vec<(ObjectKey, Object)> {
        self.objects_below(&self.clients().collect::<Vec<_>>(), wanted)
    }

    /// The same where the clients are known.
    pub fn objects_below(
        &self,
        clients: &[(u32, Client)],
        wanted: impl Fn(&Client) -> bool,
    ) -> Vec<(ObjectKey, Object)> {
        if !self.lists_are_whole() {
            return self.objects().collect();
        }
        clients
            .iter()
            .filter(|(_, client)| wanted(client))
            .flat_map(|(client, _)| self.listed(*client, &[list::MEMORY, list::STRUCTURE]))
            .collect()
    }

    /// Whether every object is in a list, but for those of clients that say that theirs are broken.
    fn lists_are_whole(&self) -> bool {
        self.counters
            .get(&counter::UNLISTED, 0)
            .is_ok_and(|counts| counts.iter().all(|count| *count == 0))
    }

    fn listed(&self, client: u32, lists: &[usize]) -> Vec<(ObjectKey, Object)> {
        for _ in 0..TRIES {
            let Ok(entry) = self.clients.get(&client, 0) else {
                return Vec::new();
            };
            if entry.broken != 0 {
                break;
            }
            let found = lists
                .iter()
                .map(|list| self.follow(client, entry.first[*list], entry.count[*list]))
                .collect::<Option<Vec<_>>>();
            if let Some(found) = found {
                return found.concat();
            }
        }
        self.searched(client, lists)
    }

    /// A client's objects by a look at everything.
    fn searched(&self, client: u32, lists: &[usize]) -> Vec<(ObjectKey, Object)> {
        self.objects()
            .filter(|(key, object)| key.client == client && lists.contains(&list::of(object.kind)))
            .collect()
    }

    /// `None` if the list does not hold what it should: somebody is changing it.
    fn follow(&self, client: u32, first: u32, count: u32) -> Option<Vec<(ObjectKey, Object)>> {
        let mut found = Vec::new();
        let mut handle = first;
        while handle != 0 {
            if found.len() >= count as usize {
                return None;
            }
            let key = ObjectKey { client, handle };
            let object = self.object(key)?;
            handle = object.next;
            found.push((key, object));
        }
        (found.len() == count as usize).then_some(found)
    }
}
