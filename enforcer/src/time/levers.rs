//! [`Levers`] of a real driver.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpuquota_common::{
    map::{DeviceKey, ObjectKey},
    time::{Frozen, FrozenKey},
};
use tracing::warn;

use super::{
    act::{ActError, Client, Reach},
    engine::Levers,
    handles::{Held, Place},
    took::Took,
};
use crate::{kernel::Kernel, lifecycle::Proc};

/// Acts through duplicates of the tenants' control fds, and writes down in the kernel what it freezes.
pub struct DriverLevers {
    kernel: Arc<Kernel>,
    processes: Arc<Proc>,
    node: DeviceKey,
    reaches: BTreeMap<u32, Reach>,
    slices: Took,
    freezes: Took,
    thaws: Took,
}

impl DriverLevers {
    /// `node` is the driver's control node.
    pub fn new(kernel: Arc<Kernel>, processes: Arc<Proc>, node: DeviceKey) -> Self {
        Self {
            kernel,
            processes,
            node,
            reaches: BTreeMap::new(),
            slices: Took::default(),
            freezes: Took::default(),
            thaws: Took::default(),
        }
    }

    /// How long controls took, everything that belongs to them included.
    pub fn took(&self) -> serde_json::Value {
        serde_json::json!({
            "slice": self.slices.to_json(),
            "freeze": self.freezes.to_json(),
            "thaw": self.thaws.to_json(),
        })
    }

    /// CPU time that a process has used so far; `None` if it is gone.
    pub fn cpu_time(&self, tgid: u32) -> Option<Duration> {
        self.processes.cpu_time(tgid)
    }

    fn reach(&mut self, tgid: u32) -> Result<&Reach, ActError> {
        if !self.reaches.contains_key(&tgid) {
            let started = self
                .kernel
                .process(tgid)
                .and_then(|process| self.processes.ticks(process.start_ns));
            let reach = Reach::open(tgid, started, &*self.processes)?;
            self.reaches.insert(tgid, reach);
        }
        Ok(&self.reaches[&tgid])
    }

    fn settle<T>(&mut self, tgid: u32, outcome: Result<T, ActError>) -> Result<T, ActError> {
        if outcome.as_ref().is_err_and(ActError::is_gone) {
            self.reaches.remove(&tgid);
        }
        outcome
    }

    fn clear(&self, key: FrozenKey) {
        if let Err(error) = self.kernel.clear_frozen(key) {
            warn!(%error, tgid = key.tgid, "thawed, but still written down as frozen");
        }
    }
}

impl Levers for DriverLevers {
    fn now(&self) -> Duration {
        monotonic()
    }

    fn wall_us(&self) -> u64 {
        wall_us()
    }

    fn set_slice(
        &mut self,
        place: Place,
        client: Client,
        group: u32,
        slice_us: u64,
    ) -> Result<(), ActError> {
        let node = self.node;
        let start = monotonic();
        let outcome = self
            .reach(place.tgid)
            .and_then(|reach| reach.set_timeslice(node, client, group, slice_us));
        self.slices.add(monotonic().saturating_sub(start));
        self.settle(place.tgid, outcome)
    }

    fn set_frozen(&mut self, place: Place, held: &Held, frozen: bool) -> Result<(), ActError> {
        let node = self.node;
        let client = Client {
            handle: held.client,
            fd: held.fd,
        };
        let subdevice = held.subdevice.ok_or(ActError::NoSubdevice {
            tgid: place.tgid,
            client: held.client,
        })?;
        let key = FrozenKey {
            tgid: place.tgid,
            client: held.client,
            gpu: place.gpu,
            subdevice,
        };
        let channels: Vec<u32> = held.channels().collect();
        let outcome = self.reach(place.tgid).map(|_| ());
        self.settle(place.tgid, outcome)?;
        let reach = &self.reaches[&place.tgid];
        if frozen {
            // Written down first: whatever happens to this daemon, the next one knows.
            let entry = Frozen {
                started: reach.started(),
                fd: held.fd,
                reserved: 0,
            };
            self.kernel.set_frozen(key, entry)?;
        }
        let start = monotonic();
        let outcome = reach.set_disabled(node, client, subdevice, &channels, frozen);
        let took = monotonic().saturating_sub(start);
        if frozen {
            self.freezes.add(took);
        } else {
            self.thaws.add(took);
        }
        let outcome = self.settle(place.tgid, outcome);
        match &outcome {
            Ok(()) if !frozen => self.clear(key),
            Err(error) if error.is_gone() => self.clear(key),
            _ => {}
        }
        outcome
    }

    fn exists(&self, key: ObjectKey) -> bool {
        self.kernel.object(key).is_some()
    }

    fn forget(&mut self, place: Place) {
        self.reaches.remove(&place.tgid);
        for (key, _) in self.kernel.frozen() {
            if (key.tgid, key.gpu) == (place.tgid, place.gpu) {
                self.clear(key);
            }
        }
    }
}

/// `CLOCK_MONOTONIC`.
pub fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Neither part is negative on this clock.
    Duration::new(
        now.tv_sec.unsigned_abs(),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

/// Microseconds since 1970.
pub fn wall_us() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
        })
}
