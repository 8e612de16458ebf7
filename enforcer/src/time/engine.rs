//! The state machine of GPU time: what is known, what should hold, and what has been done about it.
//!
//! Everything that acts goes through [`Levers`], so the whole of it runs in tests without a driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpuquota_common::{
    map::{NO_TENANT, Object, ObjectKey},
    nvidia::ctrl,
};
use tracing::{debug, info, warn};

use super::{
    act::{ActError, Client},
    energy::Apart,
    gpu::{Context, Gpu, Member, Told, chain},
    handles::{Held, Place, Registry},
    rules::{Reason, Rules},
    slices::Round,
};

/// Longest time between two looks at what is due.
const IDLE: Duration = Duration::from_millis(250);
/// The same while nobody is on any GPU: then nothing is due before there is news.
const NOBODY: Duration = Duration::from_secs(10);
/// The driver carries out a tenant's own control after it was announced; so it is undone only then, and once more
/// to be sure.
const REASSERT: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(60)];
/// A process that could not be controlled is tried again after this time.
const TRY_AGAIN: Duration = Duration::from_secs(10);
/// Changes of the same thing within this time are undone together.
const MERGE: Duration = Duration::from_millis(10);

/// Ways to act on a process, and the time.
pub trait Levers {
    /// A clock that does not go back.
    fn now(&self) -> Duration;
    /// Microseconds since 1970.
    fn wall_us(&self) -> u64;
    /// Sets a channel group's time slice, microseconds.
    fn set_slice(
        &mut self,
        place: Place,
        client: Client,
        group: u32,
        slice_us: u64,
    ) -> Result<(), ActError>;
    /// Freezes or thaws all channels of a client on a GPU.
    fn set_frozen(&mut self, place: Place, held: &Held, frozen: bool) -> Result<(), ActError>;
    /// Whether the kernel still knows the object.
    fn exists(&self, key: ObjectKey) -> bool;
    /// A process has nothing on a GPU any more: forget what is written down about it.
    fn forget(&mut self, place: Place);
}

/// Settings of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The round that is divided by weight.
    pub round: Duration,
    /// The period of ceilings.
    pub period: Duration,
    /// No slice by weight is shorter.
    pub least_slice: Duration,
}

/// A process whose time is not controlled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncontrolled {
    /// Why.
    pub why: String,
    again: Duration,
}

/// What a tenant has changed itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Changed {
    /// The slice or the scheduling of a channel group.
    Group(ObjectKey),
    /// Channels were disabled or enabled: anybody's, since the driver does not ask whose they are.
    Channels,
}

/// The state machine.
pub struct Engine {
    settings: Settings,
    rules: Arc<Rules>,
    registry: Registry,
    places: BTreeMap<Place, Vec<Held>>,
    gpus: BTreeMap<u32, Gpu>,
    /// Tenants that are frozen for reasons from outside, by name and GPU.
    commanded: BTreeMap<(String, u32), BTreeSet<Reason>>,
    /// Slices as they were set: by process, client and group.
    slices: BTreeMap<(Place, u32, u32), u64>,
    /// Channels that are frozen.
    frozen: BTreeMap<Place, BTreeSet<(u32, u32)>>,
    uncontrolled: BTreeMap<Place, Uncontrolled>,
    /// Processes that were there before the daemon and are out of reach: their tenant, and why.
    strangers: BTreeMap<Place, (u32, String)>,
    /// Places that were reported as not controllable.
    reported: BTreeSet<Place>,
    /// What tenants have changed themselves: to be set again, and when.
    changed: Vec<(Duration, Changed)>,
    /// Places whose channels somebody may have disabled or enabled.
    unsure: BTreeSet<Place>,
    own_controls: BTreeMap<u32, u64>,
    /// Processes that have disabled or enabled channels.
    meddlers: BTreeSet<u32>,
    objects_changed: bool,
    slices_changed: bool,
}

impl Engine {
    /// An engine that knows nobody.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            rules: Arc::default(),
            registry: Registry::default(),
            places: BTreeMap::new(),
            gpus: BTreeMap::new(),
            commanded: BTreeMap::new(),
            slices: BTreeMap::new(),
            frozen: BTreeMap::new(),
            uncontrolled: BTreeMap::new(),
            strangers: BTreeMap::new(),
            reported: BTreeSet::new(),
            changed: Vec::new(),
            unsure: BTreeSet::new(),
            own_controls: BTreeMap::new(),
            meddlers: BTreeSet::new(),
            objects_changed: false,
            slices_changed: false,
        }
    }

    /// A policy came into force.
    pub fn set_rules(&mut self, rules: impl Into<Arc<Rules>>) {
        self.rules = rules.into();
        self.objects_changed = true;
    }

    /// The objects of the driver, all of them.
    pub fn replace(&mut self, objects: impl IntoIterator<Item = (ObjectKey, Object)>) {
        self.registry.replace(objects);
        self.objects_changed = true;
    }

    /// An object was made.
    pub fn insert(&mut self, key: ObjectKey, object: Object) {
        self.registry.insert(key, object);
        self.objects_changed = true;
    }

    /// Whether an object is known.
    pub fn knows(&self, key: ObjectKey) -> bool {
        self.registry.contains(key)
    }

    /// An object and all below it are gone.
    pub fn remove(&mut self, key: ObjectKey) {
        self.registry.remove(key);
        self.objects_changed = true;
    }

    /// A tenant is about to issue a scheduling control of its own.
    pub fn own_control(&mut self, tgid: u32, object: ObjectKey, command: u32, now: Duration) {
        // Every context starts its groups that way; that changes nothing that was set.
        if command != ctrl::TSG_GPFIFO_SCHEDULE {
            *self.own_controls.entry(tgid).or_default() += 1;
        }
        let changed = if command == ctrl::FIFO_DISABLE_CHANNELS {
            if self.meddlers.insert(tgid) {
                warn!(
                    tgid,
                    "disables or enables channels itself: what should hold is set again"
                );
            }
            Changed::Channels
        } else {
            Changed::Group(object)
        };
        for delay in REASSERT {
            // A tenant that does nothing else is answered once each time, not as often as it asks.
            let waits = self.changed.iter().any(|(due, waiting)| {
                *waiting == changed && *due <= now + delay && *due + MERGE > now + delay
            });
            if !waits {
                self.changed.push((now + delay, changed));
            }
        }
    }

    /// Scheduling controls that a process issued itself.
    pub fn own_controls(&self, tgid: u32) -> u64 {
        self.own_controls.get(&tgid).copied().unwrap_or(0)
    }

    /// Freezes or thaws a tenant on a GPU for a reason from outside.
    pub fn hold(&mut self, tenant: &str, gpu: u32, reason: Reason, on: bool) {
        let key = (tenant.to_owned(), gpu);
        let reasons = self.commanded.entry(key.clone()).or_default();
        if on {
            reasons.insert(reason);
        } else {
            reasons.remove(&reason);
        }
        if reasons.is_empty() {
            self.commanded.remove(&key);
        }
    }

    /// What the driver says of the use of a GPU.
    pub fn used(&mut self, gpu: u32, told: &Told<'_>, now: Duration, wall_us: u64) {
        let context = context(self.settings, gpu, &self.rules, wall_us);
        if self.gpus.entry(gpu).or_default().used(&context, told, now) {
            self.slices_changed = true;
        }
    }

    /// The driver does not tell the use of a GPU.
    pub fn unmeasured(&mut self, gpu: u32) {
        if self.gpus.entry(gpu).or_default().unmeasured() {
            self.slices_changed = true;
        }
    }

    /// Processes of exclusive tenants for whom others would have to make room.
    pub fn privileged(&self) -> Vec<u32> {
        self.gpus
            .iter()
            .flat_map(|(gpu, state)| state.privileged(&self.rules, *gpu))
            .collect()
    }

    /// Processes of tenants with a latency target, where there is somebody to squeeze.
    pub fn targeted(&self) -> Vec<u32> {
        self.gpus
            .iter()
            .flat_map(|(gpu, state)| state.targeted(&self.rules, *gpu))
            .collect()
    }

    /// A process launched work at `now`; it counts as active for `linger`.
    pub fn launched(&mut self, tgid: u32, now: Duration, linger: Duration) {
        for gpu in self.gpus.values_mut() {
            gpu.launched(tgid, now, linger);
        }
    }

    /// A process on a GPU has used so much CPU time so far.
    pub fn ran(&mut self, gpu: u32, tgid: u32, used: Duration, now: Duration) {
        if let Some(state) = self.gpus.get_mut(&gpu) {
            self.slices_changed |= state.ran(tgid, used, now);
        }
    }

    /// GPUs on which anybody has a context.
    pub fn gpus_in_use(&self) -> BTreeSet<u32> {
        self.places.keys().map(|place| place.gpu).collect()
    }

    /// Rules in force.
    pub fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    /// The GPUs that somebody was on, and what is known of them.
    pub fn gpus(&self) -> impl Iterator<Item = (u32, &Gpu)> {
        self.gpus.iter().map(|(gpu, state)| (*gpu, state))
    }

    /// Processes that are not controlled, their tenants and why.
    pub fn uncontrolled(&self) -> impl Iterator<Item = (Place, u32, &str)> {
        let failed = self
            .uncontrolled
            .iter()
            .filter_map(|(place, uncontrolled)| {
                let tenant = self.places.get(place)?[0].tenant;
                Some((*place, tenant, uncontrolled.why.as_str()))
            });
        self.strangers
            .iter()
            .map(|(place, (tenant, why))| (*place, *tenant, why.as_str()))
            .chain(failed)
    }

    /// What is known of a GPU.
    pub fn gpu(&self, gpu: u32) -> Option<&Gpu> {
        self.gpus.get(&gpu)
    }

    /// Energy that is no tenant's, by GPU.
    pub fn energy_apart(&self) -> BTreeMap<u32, Apart> {
        self.gpus
            .iter()
            .map(|(gpu, state)| (*gpu, state.energy_apart()))
            .collect()
    }

    /// Processes that are in a tenant itself and not controlled on a GPU, and why.
    pub fn uncontrolled_in(&self, tenant: u32, gpu: u32) -> impl Iterator<Item = (u32, &str)> {
        self.uncontrolled()
            .filter(move |(place, of, _)| *of == tenant && place.gpu == gpu)
            .map(|(place, _, why)| (place.tgid, why))
    }

    /// A process that was there before the daemon is out of reach.
    pub fn stranger(&mut self, place: Place, tenant: u32, why: String) {
        warn!(
            tgid = place.tgid,
            gpu = place.gpu,
            why,
            "its GPU time is not controlled"
        );
        self.strangers.insert(place, (tenant, why));
    }

    /// A process is gone.
    pub fn ended(&mut self, tgid: u32) {
        self.strangers.retain(|place, _| place.tgid != tgid);
    }

    fn give_up(&mut self, place: Place, why: String, now: Duration) {
        if self.reported.insert(place) {
            warn!(
                tgid = place.tgid,
                gpu = place.gpu,
                why,
                "its GPU time is not controlled"
            );
        }
        self.uncontrolled.insert(
            place,
            Uncontrolled {
                why,
                again: now + TRY_AGAIN,
            },
        );
    }

    /// Does what is due, and returns how long it may take until the next call.
    pub fn step(&mut self, levers: &mut dyn Levers) -> Duration {
        let now = levers.now();
        self.take_back_own_controls(now);
        self.uncontrolled.retain(|place, uncontrolled| {
            uncontrolled.again > now || !self.places.contains_key(place)
        });
        if self.objects_changed {
            self.objects_changed = false;
            self.look(levers, now);
            self.slices_changed = true;
        }
        let round = Round {
            length_us: micros(self.settings.round),
            least_us: micros(self.settings.least_slice),
        };
        if self.slices_changed {
            self.slices_changed = false;
            for (gpu, state) in &mut self.gpus {
                state.divide(&self.rules, *gpu, round);
            }
            self.set_slices(levers);
        }
        let next = self.freeze_and_thaw(levers);
        let own = self.changed.iter().map(|(due, _)| *due).min();
        let now = levers.now();
        let wait = [next, own]
            .into_iter()
            .flatten()
            .min()
            .map_or(NOBODY, |next| next.saturating_sub(now));
        if self.objects_changed || self.slices_changed {
            return Duration::ZERO;
        }
        wait.min(self.longest_wait())
    }

    fn longest_wait(&self) -> Duration {
        if self.is_at_rest() { NOBODY } else { IDLE }
    }

    /// Whether nobody is on any GPU, and nothing is left to be done for those who were.
    pub fn is_at_rest(&self) -> bool {
        self.places.is_empty() && self.frozen.is_empty() && self.changed.is_empty()
    }

    /// Whether anything is frozen.
    pub fn has_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// Finds out who is where.
    fn look(&mut self, levers: &mut dyn Levers, now: Duration) {
        self.places = self.registry.places();
        let gone: Vec<Place> = self
            .frozen
            .keys()
            .copied()
            .filter(|place| !self.places.contains_key(place))
            .collect();
        for place in gone {
            self.frozen.remove(&place);
            levers.forget(place);
        }
        self.slices
            .retain(|(place, _, _), _| self.places.contains_key(place));
        self.reported
            .retain(|place| self.places.contains_key(place));
        self.uncontrolled
            .retain(|place, _| self.places.contains_key(place));
        let processes = self.registry.processes();
        self.own_controls.retain(|tgid, _| processes.contains(tgid));
        self.meddlers.retain(|tgid| processes.contains(tgid));
        let mut members: BTreeMap<u32, Vec<Member>> =
            self.gpus.keys().map(|gpu| (*gpu, Vec::new())).collect();
        for (place, helds) in &self.places {
            let tenant = helds[0].tenant;
            // Who is in no tenant is left alone.
            if tenant == NO_TENANT || !self.rules.contains_key(&tenant) {
                continue;
            }
            members.entry(place.gpu).or_default().push(Member {
                tgid: place.tgid,
                tenant,
                contexts: helds.iter().map(Held::contexts).sum(),
            });
        }
        for (gpu, members) in members {
            self.gpus
                .entry(gpu)
                .or_default()
                .set_members(&self.rules, members, now);
        }
    }

    /// What tenants have changed themselves counts as not set.
    fn take_back_own_controls(&mut self, now: Duration) {
        let due: BTreeSet<Changed> = self
            .changed
            .iter()
            .filter(|(due, _)| *due <= now)
            .map(|(_, changed)| *changed)
            .collect();
        if due.is_empty() {
            return;
        }
        self.changed.retain(|(due, _)| *due > now);
        for changed in due {
            match changed {
                Changed::Group(key) => {
                    self.slices.retain(|(_, client, group), _| {
                        (*client, *group) != (key.client, key.handle)
                    });
                    let of_client = self
                        .places
                        .iter()
                        .filter(|(_, helds)| helds.iter().any(|held| held.client == key.client))
                        .map(|(place, _)| *place);
                    self.unsure
                        .extend(of_client.filter(|place| self.frozen.contains_key(place)));
                }
                Changed::Channels => self.unsure.extend(self.places.keys()),
            }
        }
        self.slices_changed = true;
    }

    fn set_slices(&mut self, levers: &mut dyn Levers) {
        let mut wanted = Vec::new();
        for (gpu, state) in &self.gpus {
            for member in state.members() {
                let place = Place {
                    gpu: *gpu,
                    tgid: member.tgid,
                };
                let Some(slice_us) = state.division().slices.get(&member.tgid) else {
                    continue;
                };
                if self.uncontrolled.contains_key(&place) {
                    continue;
                }
                for held in self.places.get(&place).into_iter().flatten() {
                    let client = Client {
                        handle: held.client,
                        fd: held.fd,
                    };
                    wanted.extend(
                        held.groups
                            .iter()
                            .map(|group| (place, client, group.handle, *slice_us)),
                    );
                }
            }
        }
        for (place, client, group, slice_us) in wanted {
            let key = (place, client.handle, group);
            if self.slices.get(&key) == Some(&slice_us) || self.uncontrolled.contains_key(&place) {
                continue;
            }
            match levers.set_slice(place, client, group, slice_us) {
                Ok(()) => {
                    self.slices.insert(key, slice_us);
                    self.reported.remove(&place);
                }
                Err(error) => self.failed(place, &error, levers),
            }
        }
    }

    /// Freezes and thaws; returns when to look again.
    fn freeze_and_thaw(&mut self, levers: &mut dyn Levers) -> Option<Duration> {
        let mut next = None;
        let mut freeze = Vec::new();
        let mut thaw = Vec::new();
        let (now, wall_us) = (levers.now(), levers.wall_us());
        for (gpu, state) in &mut self.gpus {
            let context = context(self.settings, *gpu, &self.rules, wall_us);
            let commanded: BTreeMap<u32, BTreeSet<Reason>> = self
                .commanded
                .iter()
                .filter(|((_, on), _)| on == gpu)
                .filter_map(|((name, _), reasons)| {
                    let (index, _) = self.rules.iter().find(|(_, rules)| rules.name == *name)?;
                    Some((*index, reasons.clone()))
                })
                .collect();
            let due = state.decide(&context, &commanded, now);
            next = [next, due].into_iter().flatten().min();
            for member in state.members() {
                let place = Place {
                    gpu: *gpu,
                    tgid: member.tgid,
                };
                let wanted = !state.reasons(&self.rules, member.tenant).is_empty();
                let frozen = self.frozen.get(&place);
                let unsure = self.unsure.contains(&place);
                if wanted && (unsure || frozen != Some(&channels(&self.places, place))) {
                    freeze.push(place);
                } else if !wanted && (unsure || frozen.is_some()) {
                    thaw.push(place);
                }
            }
        }
        self.unsure.clear();
        // Whoever is frozen and is nobody's any more: its tenant left the policy.
        for place in self.frozen.keys() {
            let governed = self.gpus.get(&place.gpu).is_some_and(|state| {
                state
                    .members()
                    .iter()
                    .any(|member| member.tgid == place.tgid)
            });
            if !governed {
                thaw.push(*place);
            }
        }
        // Who may run again goes first, so that the GPU is not idle in between.
        for place in thaw {
            self.set_frozen(place, false, levers);
        }
        for place in freeze {
            if !self.uncontrolled.contains_key(&place) {
                self.set_frozen(place, true, levers);
            }
        }
        let (now, wall_us) = (levers.now(), levers.wall_us());
        for (gpu, state) in &mut self.gpus {
            let context = context(self.settings, *gpu, &self.rules, wall_us);
            state.applied(&context, now, wall_us);
        }
        next
    }

    fn set_frozen(&mut self, place: Place, frozen: bool, levers: &mut dyn Levers) {
        let helds = self.places.get(&place).cloned().unwrap_or_default();
        for held in &helds {
            if let Err(error) = levers.set_frozen(place, held, frozen) {
                if frozen {
                    // Some of it may be: it is thawed when its time comes.
                    self.frozen.entry(place).or_default();
                }
                self.failed(place, &error, levers);
                return;
            }
        }
        debug!(tgid = place.tgid, gpu = place.gpu, frozen, "channels");
        if frozen {
            self.frozen.insert(place, channels(&self.places, place));
        } else {
            self.frozen.remove(&place);
        }
    }

    /// A control failed: what was believed is out of date, or the process is out of reach.
    fn failed(&mut self, place: Place, error: &ActError, levers: &mut dyn Levers) {
        if error.is_gone() {
            self.registry.remove_process(place.tgid);
            self.objects_changed = true;
            return;
        }
        if error.is_stale() && self.prune(place, levers) {
            self.objects_changed = true;
            return;
        }
        self.give_up(place, error.to_string(), levers.now());
    }

    /// Forgets objects of a process that the kernel does not know any more; whether there were any.
    fn prune(&mut self, place: Place, levers: &dyn Levers) -> bool {
        let mut stale = Vec::new();
        for held in self.places.get(&place).into_iter().flatten() {
            let groups = held.groups.iter().map(|group| group.handle);
            stale.extend(
                groups
                    .chain(held.channels())
                    .chain(held.subdevice)
                    .map(|handle| ObjectKey {
                        client: held.client,
                        handle,
                    })
                    .filter(|key| !levers.exists(*key)),
            );
        }
        for key in &stale {
            self.registry.remove(*key);
        }
        !stale.is_empty()
    }

    /// Compares with what is written down as frozen: what somebody else thawed, because this process stood still, is
    /// frozen again.
    pub fn compare_frozen(&mut self, recorded: &BTreeSet<Place>) {
        let thawed = self
            .frozen
            .iter()
            .filter(|(place, channels)| !channels.is_empty() && !recorded.contains(place))
            .map(|(place, _)| *place);
        self.unsure.extend(thawed);
    }

    /// Thaws everybody, for the end.
    pub fn thaw_all(&mut self, levers: &mut dyn Levers) {
        let places: Vec<Place> = self.frozen.keys().copied().collect();
        if !places.is_empty() {
            info!(processes = places.len(), "thawing");
        }
        for place in places {
            self.set_frozen(place, false, levers);
        }
    }

    /// Processes by GPU, for bug reports.
    pub fn dump(&self) -> serde_json::Value {
        self.places
            .iter()
            .map(|(place, helds)| {
                serde_json::json!({
                    "gpu": place.gpu,
                    "tgid": place.tgid,
                    "tenant": (helds[0].tenant != NO_TENANT).then_some(helds[0].tenant),
                    "clients": helds.iter().map(|held| held.client).collect::<Vec<_>>(),
                    "groups": helds.iter().map(|held| held.groups.len()).sum::<usize>(),
                    "channels": helds.iter().map(|held| held.channels().count()).sum::<usize>(),
                    "frozen": self.frozen.contains_key(place),
                    "idle": self.gpus.get(&place.gpu).is_some_and(|gpu| gpu.is_idle(place.tgid)),
                    "uncontrolled": self.uncontrolled.get(place).map(|uncontrolled| &uncontrolled.why),
                })
            })
            .collect()
    }

    /// A tenant and those inside it.
    pub fn tenants_in(&self, tenant: &str) -> BTreeSet<u32> {
        let named = |index: u32| {
            self.rules
                .get(&index)
                .is_some_and(|rules| rules.name == tenant)
        };
        self.rules
            .keys()
            .copied()
            .filter(|index| chain(&self.rules, *index).any(named))
            .collect()
    }

    /// Processes in a tenant, and in those inside it, that are frozen on a GPU.
    pub fn frozen_in(&self, tenant: &str, gpu: u32) -> Vec<u32> {
        let tenants = self.tenants_in(tenant);
        self.gpus
            .get(&gpu)
            .into_iter()
            .flat_map(Gpu::members)
            .filter(|member| tenants.contains(&member.tenant))
            .map(|member| member.tgid)
            .filter(|tgid| self.frozen.contains_key(&Place { gpu, tgid: *tgid }))
            .collect()
    }
}

fn context(settings: Settings, gpu: u32, rules: &Rules, wall_us: u64) -> Context<'_> {
    Context {
        gpu,
        rules,
        round_us: micros(settings.round),
        period: settings.period,
        wall_us,
    }
}

fn channels(places: &BTreeMap<Place, Vec<Held>>, place: Place) -> BTreeSet<(u32, u32)> {
    places
        .get(&place)
        .into_iter()
        .flatten()
        .flat_map(|held| held.channels().map(|channel| (held.client, channel)))
        .collect()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
