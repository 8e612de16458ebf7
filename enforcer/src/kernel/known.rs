//! Arrays that only the daemon writes: what stands in them is known here, so that a policy costs the kernel only what it
//! changes.

use std::collections::HashMap;

use aya::{
    Pod,
    maps::{Array, MapData, MapError},
};

/// Such an array.
pub(super) struct Known<V: Pod> {
    map: Array<MapData, V>,
    values: HashMap<u32, V>,
}

impl<V: Pod + PartialEq> Known<V> {
    pub(super) fn new(map: Array<MapData, V>) -> Self {
        Self {
            map,
            values: HashMap::new(),
        }
    }

    /// The value at an index.
    pub(super) fn get(&mut self, index: u32) -> Result<V, MapError> {
        if let Some(value) = self.values.get(&index) {
            return Ok(*value);
        }
        let value = self.map.get(&index, 0)?;
        self.values.insert(index, value);
        Ok(value)
    }

    /// Writes a value, unless it stands there already.
    pub(super) fn set(&mut self, index: u32, value: V) -> Result<(), MapError> {
        if self.values.get(&index) == Some(&value) {
            return Ok(());
        }
        // Not known until it is written: after a failure the next one writes again.
        self.values.remove(&index);
        self.map.set(index, value, 0)?;
        self.values.insert(index, value);
        Ok(())
    }
}
