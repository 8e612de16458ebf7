//! Who has which channels where: pure.
//!
//! A mirror of the kernel's objects that concern GPU time: clients with the fd they were made through,
//! subdevices, channel groups and channels. It is fed object by object and answers by process and GPU.

use std::collections::{BTreeMap, BTreeSet};

use gpuquota_common::map::{NO_GPU, Object, ObjectKey, kind};

/// A channel group with its channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Handle.
    pub handle: u32,
    /// Handles of the channels, ascending.
    pub channels: Vec<u32>,
}

/// What one client has on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Client handle.
    pub client: u32,
    /// The fd of the process through which the client was made.
    pub fd: u32,
    /// Tenant that the process is in, or [`NO_TENANT`](gpuquota_common::map::NO_TENANT).
    pub tenant: u32,
    /// A subdevice, through which channels can be disabled.
    pub subdevice: Option<u32>,
    /// The channel groups, by handle.
    pub groups: Vec<Group>,
}

impl Held {
    /// Contexts: each has one group with more channels than the others, the one that computes.
    pub fn contexts(&self) -> u32 {
        let most = self
            .groups
            .iter()
            .map(|group| group.channels.len())
            .max()
            .unwrap_or(0);
        let largest = self
            .groups
            .iter()
            .filter(|group| group.channels.len() == most);
        if most == 0 {
            return u32::from(!self.groups.is_empty());
        }
        u32::try_from(largest.count()).unwrap_or(u32::MAX)
    }

    /// All channels.
    pub fn channels(&self) -> impl Iterator<Item = u32> + '_ {
        self.groups
            .iter()
            .flat_map(|group| group.channels.iter().copied())
    }
}

/// A process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// GPU index.
    pub gpu: u32,
    /// Process.
    pub tgid: u32,
}

/// The mirror.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    objects: BTreeMap<ObjectKey, Object>,
}

/// Whether an object concerns GPU time.
pub fn concerns(object: &Object) -> bool {
    matches!(
        object.kind,
        kind::CLIENT | kind::DEVICE | kind::SUBDEVICE | kind::CHANNEL_GROUP | kind::CHANNEL
    )
}

impl Registry {
    /// Replaces everything.
    pub fn replace(&mut self, objects: impl IntoIterator<Item = (ObjectKey, Object)>) {
        self.objects = objects
            .into_iter()
            .filter(|(_, object)| concerns(object))
            .collect();
    }

    /// Adds an object, in place of an older one with the same handle.
    pub fn insert(&mut self, key: ObjectKey, object: Object) {
        if concerns(&object) {
            self.objects.insert(key, object);
        }
    }

    /// Whether the object is known.
    pub fn contains(&self, key: ObjectKey) -> bool {
        self.objects.contains_key(&key)
    }

    /// An object.
    pub fn get(&self, key: ObjectKey) -> Option<&Object> {
        self.objects.get(&key)
    }

    /// Removes an object and all below it.
    pub fn remove(&mut self, top: ObjectKey) {
        for key in crate::lifecycle::subtree(&self.objects, top) {
            self.objects.remove(&key);
        }
        self.objects.remove(&top);
    }

    /// Removes everything of a process.
    pub fn remove_process(&mut self, tgid: u32) {
        self.objects.retain(|_, object| object.tgid != tgid);
    }

    /// Processes that have a channel group, by GPU.
    pub fn places(&self) -> BTreeMap<Place, Vec<Held>> {
        let mut found: BTreeMap<(u32, u32, u32), Held> = BTreeMap::new();
        for (key, object) in &self.objects {
            if object.gpu == NO_GPU {
                continue;
            }
            let fd = self
                .objects
                .get(&ObjectKey {
                    client: key.client,
                    handle: key.client,
                })
                .map_or(u32::MAX, |client| client.fd);
            let held = found
                .entry((object.gpu, object.tgid, key.client))
                .or_insert_with(|| Held {
                    client: key.client,
                    fd,
                    tenant: object.tenant,
                    ..Held::default()
                });
            match object.kind {
                kind::SUBDEVICE => held.subdevice = held.subdevice.or(Some(key.handle)),
                kind::CHANNEL_GROUP => held.groups.push(Group {
                    handle: key.handle,
                    channels: Vec::new(),
                }),
                _ => {}
            }
        }
        for (key, object) in &self.objects {
            if object.kind != kind::CHANNEL {
                continue;
            }
            if let Some(held) = found.get_mut(&(object.gpu, object.tgid, key.client))
                && let Some(group) = held
                    .groups
                    .iter_mut()
                    .find(|group| group.handle == object.parent)
            {
                group.channels.push(key.handle);
            }
        }
        let mut places: BTreeMap<Place, Vec<Held>> = BTreeMap::new();
        for ((gpu, tgid, _), held) in found {
            if !held.groups.is_empty() {
                places.entry(Place { gpu, tgid }).or_default().push(held);
            }
        }
        places
    }

    /// All processes that have any of the objects.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.objects.values().map(|object| object.tgid).collect()
    }

    /// Handles of all clients, and who has them.
    pub fn clients(&self) -> impl Iterator<Item = (u32, &Object)> {
        self.objects
            .iter()
            .filter(|(key, object)| object.kind == kind::CLIENT && key.client == key.handle)
            .map(|(key, object)| (key.client, object))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) const CLIENT: u32 = 0xc1d0_006f;

    fn key(handle: u32) -> ObjectKey {
        ObjectKey {
            client: CLIENT,
            handle,
        }
    }

    fn object(kind: u32, parent: u32, gpu: u32) -> Object {
        Object {
            kind,
            parent,
            gpu,
            tgid: 945,
            fd: 9,
            ..Object::default()
        }
    }

    /// A context as the recorded one: a compute group with 8 channels and three others with 4.
    pub(crate) fn context(gpu: u32, first: u32) -> Vec<(ObjectKey, Object)> {
        let mut objects = vec![
            (key(CLIENT), object(kind::CLIENT, CLIENT, NO_GPU)),
            (key(first), object(kind::DEVICE, CLIENT, gpu)),
            (key(first + 1), object(kind::SUBDEVICE, first, gpu)),
        ];
        let mut next = first + 2;
        for channels in [8, 4, 4, 4] {
            let group = next;
            objects.push((key(group), object(kind::CHANNEL_GROUP, first, gpu)));
            for channel in 1..=channels {
                objects.push((key(group + channel), object(kind::CHANNEL, group, gpu)));
            }
            next += channels + 1;
        }
        objects
    }

    #[test]
    fn a_context_has_its_groups_and_channels() {
        let mut registry = Registry::default();
        registry.replace(context(0, 0x5c00_0002));
        let places = registry.places();
        let held = &places[&Place { gpu: 0, tgid: 945 }][0];
        assert_eq!(
            (held.client, held.fd, held.subdevice),
            (CLIENT, 9, Some(0x5c00_0003))
        );
        assert_eq!(
            (held.groups.len(), held.channels().count(), held.contexts()),
            (4, 20, 1)
        );
    }

    #[test]
    fn contexts_on_two_gpus_are_apart_and_two_on_one_are_counted() {
        let mut registry = Registry::default();
        for (gpu, first) in [(0, 0x100), (1, 0x200), (1, 0x300)] {
            for (key, object) in context(gpu, first) {
                registry.insert(key, object);
            }
        }
        let places = registry.places();
        let contexts = |gpu| places[&Place { gpu, tgid: 945 }][0].contexts();
        assert_eq!((contexts(0), contexts(1)), (1, 2));
    }

    #[test]
    fn a_freed_device_takes_its_channels_along() {
        let mut registry = Registry::default();
        registry.replace(context(0, 0x100));
        registry.remove(key(0x100));
        assert!(registry.places().is_empty());
        assert!(registry.contains(key(CLIENT)));
        registry.remove_process(945);
        assert!(!registry.contains(key(CLIENT)));
    }

    #[test]
    fn a_client_without_channels_is_nowhere() {
        let mut registry = Registry::default();
        registry.replace(context(0, 0x100).into_iter().take(3));
        assert!(registry.places().is_empty());
    }
}
