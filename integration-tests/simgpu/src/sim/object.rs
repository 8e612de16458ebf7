//! RM clients and their trees of objects.

use std::collections::{BTreeMap, BTreeSet};

use super::vidmem::BlockId;

/// Handles that the driver chooses for objects begin here.
const GENERATED_BASE: u32 = 0xcaf0_0000;

/// What an object is, as far as the model tells kinds apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A GPU as the client sees it.
    Device {
        /// Which card.
        gpu: usize,
    },
    /// The one physical GPU of a device.
    Subdevice {
        /// Which card.
        gpu: usize,
    },
    /// Memory on a card.
    Memory {
        /// The block behind it.
        block: BlockId,
    },
    /// Memory of the host.
    HostMemory {
        /// Size.
        bytes: u64,
    },
    /// A window on all memory of a card, which takes none.
    Window {
        /// Size.
        bytes: u64,
    },
    /// A channel group.
    Group {
        /// Which card.
        gpu: usize,
        /// Interleave level.
        interleave: u32,
    },
    /// A channel.
    Channel {
        /// Which card.
        gpu: usize,
        /// The group that it is scheduled in.
        group: u32,
    },
    /// Anything else.
    Plain,
}

/// An object of a client.
#[derive(Clone, Debug)]
pub struct Object {
    /// Class as the caller gave it.
    pub class: u32,
    /// Handle of the parent; the client's own handle at the top.
    pub parent: u32,
    /// What it is.
    pub kind: Kind,
    /// Whether other processes may duplicate it.
    pub shared: bool,
}

/// A client: the root of a tree of objects.
#[derive(Debug)]
pub struct Client {
    /// The open file it belongs to.
    pub file: u64,
    /// The process that made it.
    pub pid: u32,
    objects: BTreeMap<u32, Object>,
    children: BTreeSet<(u32, u32)>,
    next_generated: u32,
    /// Memory that the driver took for the client's contexts, by card, with the number of its groups there.
    pub contexts: BTreeMap<usize, (BlockId, u32)>,
}

impl Client {
    /// A client without objects.
    pub fn new(file: u64, pid: u32) -> Self {
        Self {
            file,
            pid,
            objects: BTreeMap::new(),
            children: BTreeSet::new(),
            next_generated: GENERATED_BASE,
            contexts: BTreeMap::new(),
        }
    }

    /// An object by handle.
    pub fn get(&self, handle: u32) -> Option<&Object> {
        self.objects.get(&handle)
    }

    /// An object by handle, to change it.
    pub fn get_mut(&mut self, handle: u32) -> Option<&mut Object> {
        self.objects.get_mut(&handle)
    }

    /// All objects in order of their handles.
    pub fn objects(&self) -> impl Iterator<Item = (u32, &Object)> {
        self.objects
            .iter()
            .map(|(handle, object)| (*handle, object))
    }

    /// Number of objects.
    pub fn object_count(&self) -> usize {
        self.objects.len()
    }

    /// A handle that is free, chosen by the driver.
    pub fn generate(&mut self) -> u32 {
        while self.objects.contains_key(&self.next_generated) {
            self.next_generated += 1;
        }
        let handle = self.next_generated;
        self.next_generated += 1;
        handle
    }

    /// Adds an object; the handle must be free.
    pub fn insert(&mut self, handle: u32, object: Object) {
        self.children.insert((object.parent, handle));
        self.objects.insert(handle, object);
    }

    /// The object and all below it, children before their parents.
    pub fn subtree(&self, handle: u32) -> Vec<u32> {
        let mut order = vec![handle];
        let mut at = 0;
        while at < order.len() {
            let parent = order[at];
            order.extend(
                self.children
                    .range((parent, 0)..=(parent, u32::MAX))
                    .map(|(_, child)| *child),
            );
            at += 1;
        }
        order.reverse();
        order
    }

    /// Takes one object out.
    pub fn remove(&mut self, handle: u32) -> Option<Object> {
        let object = self.objects.remove(&handle)?;
        self.children.remove(&(object.parent, handle));
        Some(object)
    }

    /// The card that an object belongs to, found by going up the tree.
    pub fn gpu_of(&self, handle: u32) -> Option<usize> {
        let mut object = self.objects.get(&handle)?;
        loop {
            match object.kind {
                Kind::Device { gpu }
                | Kind::Subdevice { gpu }
                | Kind::Group { gpu, .. }
                | Kind::Channel { gpu, .. } => return Some(gpu),
                _ => object = self.objects.get(&object.parent)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(parent: u32, kind: Kind) -> Object {
        Object {
            class: 0,
            parent,
            kind,
            shared: false,
        }
    }

    #[test]
    fn a_subtree_lists_children_first() {
        let mut client = Client::new(1, 1);
        client.insert(2, object(1, Kind::Device { gpu: 1 }));
        client.insert(3, object(2, Kind::Plain));
        client.insert(9, object(3, Kind::Plain));
        client.insert(4, object(2, Kind::Plain));
        let order = client.subtree(2);
        assert_eq!(order.len(), 4);
        assert_eq!(order.last(), Some(&2));
        let at = |handle| order.iter().position(|h| *h == handle).unwrap();
        assert!(at(9) < at(3));
        assert_eq!(client.gpu_of(9), Some(1));
        assert_eq!(client.gpu_of(1), None);
        client.remove(9);
        assert_eq!(client.subtree(3), [3]);
    }

    #[test]
    fn generated_handles_are_free() {
        let mut client = Client::new(1, 1);
        let first = client.generate();
        client.insert(first, object(1, Kind::Plain));
        client.insert(first + 1, object(1, Kind::Plain));
        assert_eq!(client.generate(), first + 2);
    }
}
