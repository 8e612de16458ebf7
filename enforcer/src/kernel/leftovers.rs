//! What a daemon that is gone left behind, read from its pins without loading anything.

use std::io;

use aya::maps::{HashMap, Map, MapData};
use gpuquota_common::{
    map::{Object, ObjectKey},
    time::{Frozen, FrozenKey},
};

use super::{KernelError, PinDir, is_missing, map_error};

/// The pinned maps that say what is frozen and where its channels are.
pub struct Leftovers {
    frozen: HashMap<MapData, FrozenKey, Frozen>,
    objects: HashMap<MapData, ObjectKey, Object>,
}

impl Leftovers {
    /// Opens the maps; `None` if none are pinned.
    pub fn open(pins: &PinDir) -> Result<Option<Self>, KernelError> {
        let (Some(frozen), Some(objects)) = (pinned(pins, "FROZEN")?, pinned(pins, "OBJECTS")?)
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            frozen: Map::HashMap(frozen)
                .try_into()
                .map_err(map_error("FROZEN"))?,
            objects: Map::HashMap(objects)
                .try_into()
                .map_err(map_error("OBJECTS"))?,
        }))
    }

    /// What is frozen.
    pub fn frozen(&self) -> Vec<(FrozenKey, Frozen)> {
        self.frozen.iter().filter_map(Result::ok).collect()
    }

    /// All objects.
    pub fn objects(&self) -> impl Iterator<Item = (ObjectKey, Object)> + '_ {
        self.objects.iter().filter_map(Result::ok)
    }

    /// Writes down that something is thawed.
    pub fn clear_frozen(&mut self, key: FrozenKey) -> Result<(), KernelError> {
        match self.frozen.remove(&key) {
            Err(source) if !is_missing(&source) => Err(map_error("FROZEN")(source)),
            _ => Ok(()),
        }
    }
}

fn pinned(pins: &PinDir, name: &'static str) -> Result<Option<MapData>, KernelError> {
    let path = pins.map(name);
    if !path.exists() {
        return Ok(None);
    }
    MapData::from_pin(&path)
        .map(Some)
        .map_err(|source| KernelError::Pin {
            path,
            source: io::Error::other(source),
        })
}
