//! The engine on a model of a GPU: a clock that tests move, and processes that use what they are given.

use std::collections::HashSet;

use gpuquota_common::{
    map::{NO_GPU, kind},
    nvidia::status,
};
use proptest::prelude::*;

use super::{
    super::{
        account::Busy,
        latency::LEAST_SQUEEZED_US,
        rules::{Rule, TenantRules},
    },
    *,
};
use crate::{driver::rm::RmError, time::energy::Reading};

const MS: Duration = Duration::from_millis(1);
const SETTINGS: Settings = Settings {
    round: Duration::from_millis(10),
    period: Duration::from_millis(100),
    least_slice: Duration::from_micros(500),
};

/// A GPU whose time goes to those who are not frozen, by their slices. Everybody always wants more.
struct Model {
    now: Duration,
    slices: BTreeMap<u32, u64>,
    frozen: HashSet<u32>,
    busy: BTreeMap<u32, Duration>,
    idle: HashSet<u32>,
    refuse: HashSet<u32>,
    stale: bool,
    gone: HashSet<ObjectKey>,
    controls: u64,
    /// NVML says of no process that it works.
    mute: bool,
    /// NVML lays each span at one process, as it does on an H200: at whom, is chance.
    one_at_a_time: bool,
    chance: u32,
    /// CPU time that processes have used, those that work or only calculate.
    cpu: BTreeMap<u32, Duration>,
    calculating: HashSet<u32>,
    /// Who uses little of a CPU while it works, since it sleeps until its kernels are done.
    sleeping: HashSet<u32>,
}

impl Model {
    fn new() -> Self {
        Self {
            now: Duration::from_secs(1000),
            slices: BTreeMap::new(),
            frozen: HashSet::new(),
            busy: BTreeMap::new(),
            idle: HashSet::new(),
            refuse: HashSet::new(),
            stale: false,
            gone: HashSet::new(),
            controls: 0,
            mute: false,
            one_at_a_time: false,
            chance: 1,
            cpu: BTreeMap::new(),
            calculating: HashSet::new(),
            sleeping: HashSet::new(),
        }
    }

    /// How long the spans are that NVML tells of.
    fn told_every(&self) -> Duration {
        if self.one_at_a_time {
            200 * MS
        } else {
            100 * MS
        }
    }

    /// Lays all that was done at one of those who did it.
    fn lay_at_one(&mut self, busy: &mut [Busy]) {
        let all: u64 = busy.iter().map(|busy| busy.busy_us).sum();
        self.chance = self
            .chance
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        let mut left = (all * u64::from(self.chance >> 8)) >> 24;
        let mut is_laid = false;
        for busy in busy {
            let is_it = !is_laid && left < busy.busy_us;
            left = left.saturating_sub(busy.busy_us);
            is_laid |= is_it;
            busy.busy_us = if is_it { all } else { 0 };
        }
    }

    fn pass(&mut self, span: Duration) {
        let running: Vec<(u32, u64)> = self
            .slices
            .iter()
            .filter(|(tgid, _)| !self.frozen.contains(tgid) && !self.idle.contains(tgid))
            .map(|(tgid, slice)| (*tgid, *slice))
            .collect();
        let all: u64 = running.iter().map(|(_, slice)| slice).sum();
        for (tgid, slice) in running {
            let part = u32::try_from(slice * 1_000_000 / all).expect("a part of a million");
            *self.busy.entry(tgid).or_default() += span * part / 1_000_000;
        }
        for tgid in self.slices.keys() {
            let used = if self.calculating.contains(tgid) {
                span
            } else if self.idle.contains(tgid) {
                Duration::ZERO
            } else if self.sleeping.contains(tgid) {
                span / 1000
            } else {
                span
            };
            *self.cpu.entry(*tgid).or_default() += used;
        }
        self.now += span;
    }

    fn act(&mut self, place: Place) -> Result<(), ActError> {
        self.controls += 1;
        if self.refuse.contains(&place.tgid) {
            let status = if self.stale {
                status::OBJECT_NOT_FOUND
            } else {
                status::INSUFFICIENT_PERMISSIONS
            };
            return Err(ActError::Refused {
                tgid: place.tgid,
                client: client(place.tgid),
                source: RmError::Status {
                    call: "SET_TIMESLICE",
                    status,
                },
            });
        }
        Ok(())
    }
}

impl Levers for Model {
    fn now(&self) -> Duration {
        self.now
    }
    fn wall_us(&self) -> u64 {
        micros(self.now)
    }
    fn set_slice(
        &mut self,
        place: Place,
        _client: Client,
        _group: u32,
        slice_us: u64,
    ) -> Result<(), ActError> {
        self.act(place)?;
        self.slices.insert(place.tgid, slice_us);
        Ok(())
    }
    fn set_frozen(&mut self, place: Place, held: &Held, frozen: bool) -> Result<(), ActError> {
        self.act(place)?;
        assert!(held.channels().count() > 0);
        if frozen {
            self.frozen.insert(place.tgid);
        } else {
            self.frozen.remove(&place.tgid);
        }
        Ok(())
    }
    fn exists(&self, key: ObjectKey) -> bool {
        !self.gone.contains(&key)
    }
    fn forget(&mut self, place: Place) {
        self.frozen.remove(&place.tgid);
        self.slices.remove(&place.tgid);
    }
}

fn client(tgid: u32) -> u32 {
    0xc1d0_0000 + tgid
}

fn rule(weight: u32) -> Rule {
    Rule {
        weight,
        max: None,
        priority: 50,
        exclusive: false,
        starve_max: Duration::from_secs(1),
        latency_target: None,
    }
}

fn rules(list: &[Rule]) -> Rules {
    (0u32..)
        .zip(list)
        .map(|(index, rule)| {
            let tenant = TenantRules {
                name: format!("t{index}"),
                parent: None,
                gpus: BTreeMap::from([(0, *rule)]),
            };
            (index, tenant)
        })
        .collect()
}

/// A context of a process in a tenant.
fn context(engine: &mut Engine, tgid: u32, tenant: u32) {
    let key = |handle| ObjectKey {
        client: client(tgid),
        handle,
    };
    let object = |kind, parent, gpu| Object {
        kind,
        parent,
        gpu,
        tgid,
        tenant,
        fd: 9,
        ..Object::default()
    };
    engine.insert(
        key(client(tgid)),
        object(kind::CLIENT, client(tgid), NO_GPU),
    );
    engine.insert(key(1), object(kind::DEVICE, client(tgid), 0));
    engine.insert(key(2), object(kind::SUBDEVICE, 1, 0));
    engine.insert(key(3), object(kind::CHANNEL_GROUP, 1, 0));
    engine.insert(key(4), object(kind::CHANNEL, 3, 0));
}

/// Lets time pass as the thread does: it steps when it said it would, and is late by up to `late`.
fn live(engine: &mut Engine, model: &mut Model, span: Duration, late: Duration, measure: bool) {
    let end = model.now + span;
    let mut measured = model.busy.clone();
    let mut next_measure = model.now + model.told_every();
    let mut seed = 1u32;
    while model.now < end {
        let wait = engine.step(model);
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let lateness = late * (seed >> 24) / 256;
        model.pass((wait + lateness).clamp(
            Duration::from_micros(50),
            end.saturating_sub(model.now).max(MS),
        ));
        if measure && model.now >= next_measure {
            let (from_us, to_us) = (
                micros(next_measure.saturating_sub(model.told_every())),
                model.wall_us(),
            );
            let works = measured != model.busy;
            let mut busy: Vec<Busy> = model
                .busy
                .iter()
                .filter(|_| !model.mute)
                .map(|(tgid, busy)| Busy {
                    tgid: *tgid,
                    from_us,
                    to_us,
                    busy_us: micros(
                        busy.saturating_sub(measured.get(tgid).copied().unwrap_or_default()),
                    ),
                })
                .collect();
            if model.one_at_a_time {
                model.lay_at_one(&mut busy);
            }
            measured.clone_from(&model.busy);
            next_measure = model.now + model.told_every();
            let told = Told {
                known_us: to_us,
                busy: &busy,
                energy: Some(Reading {
                    at_us: to_us,
                    counter_mj: energy_mj(model),
                }),
                board: Some(if works { 0.5 } else { 0.0 }),
            };
            if told.is_at_work() {
                for tgid in [10, 11, 12, 13, 14, 15] {
                    let used = model.cpu.get(&tgid).copied().unwrap_or_default();
                    engine.ran(0, tgid, used, model.now);
                }
            }
            engine.used(0, &told, model.now, to_us);
        }
    }
}

/// Seconds of GPU time that are told of the first tenant.
fn told(engine: &Engine) -> f64 {
    let account = engine.gpu(0).and_then(|gpu| gpu.account(0));
    account.map_or(0.0, |account| account.meter.total().as_secs_f64())
}

/// A board that draws 70 W, and 400 W more while it works.
fn energy_mj(model: &Model) -> u64 {
    let busy: Duration = model.busy.values().sum();
    70 * micros(model.now) / 1000 + 400 * micros(busy) / 1000
}

/// Shares of a span.
fn shares(engine: &mut Engine, model: &mut Model, tgids: &[u32], span: Duration) -> Vec<f64> {
    let before = model.busy.clone();
    live(engine, model, span, Duration::from_micros(200), true);
    tgids
        .iter()
        .map(|tgid| {
            let of = |busy: &BTreeMap<u32, Duration>| {
                busy.get(tgid).copied().unwrap_or_default().as_secs_f64()
            };
            (of(&model.busy) - of(&before)) / span.as_secs_f64()
        })
        .collect()
}

fn engine(list: &[Rule], processes: &[(u32, u32)]) -> (Engine, Model) {
    let mut engine = Engine::new(SETTINGS);
    engine.set_rules(rules(list));
    for (tgid, tenant) in processes {
        context(&mut engine, *tgid, *tenant);
    }
    (engine, Model::new())
}

#[test]
fn slices_follow_who_is_there() {
    let (mut engine, mut model) = engine(&[rule(100), rule(300)], &[(10, 0)]);
    engine.step(&mut model);
    assert_eq!(model.slices, BTreeMap::from([(10, 10_000)]));
    context(&mut engine, 11, 1);
    engine.step(&mut model);
    assert_eq!(model.slices, BTreeMap::from([(10, 2500), (11, 7500)]));
    let controls = model.controls;
    // Nothing changed, nothing is done.
    engine.step(&mut model);
    assert_eq!(model.controls, controls);
    engine.remove(ObjectKey {
        client: client(11),
        handle: client(11),
    });
    engine.step(&mut model);
    assert_eq!(model.slices[&10], 10_000);
}

#[test]
fn who_is_in_no_tenant_is_left_alone() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0), (99, NO_TENANT)]);
    engine.step(&mut model);
    assert_eq!(model.slices, BTreeMap::from([(10, 10_000)]));
}

#[test]
fn a_tenants_own_slice_is_set_back_after_it_was_carried_out() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0)]);
    engine.step(&mut model);
    let group = ObjectKey {
        client: client(10),
        handle: 3,
    };
    engine.own_control(10, group, ctrl::TSG_SET_TIMESLICE, model.now);
    let wait = engine.step(&mut model);
    assert!(wait <= REASSERT[0]);
    model.slices.insert(10, 99_999);
    model.pass(REASSERT[0]);
    engine.step(&mut model);
    assert_eq!((model.slices[&10], engine.own_controls(10)), (10_000, 1));
    // It was slower than we were: the second look finds that.
    model.slices.insert(10, 99_999);
    model.pass(REASSERT[1]);
    engine.step(&mut model);
    assert_eq!(model.slices[&10], 10_000);
}

#[test]
fn channels_that_a_tenant_enables_or_disables_are_set_back_whoever_they_belong_to() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 1)]);
    engine.hold("t0", 0, Reason::Command, true);
    engine.step(&mut model);
    // Through a client of somebody else.
    let other = ObjectKey {
        client: client(77),
        handle: 2,
    };
    engine.own_control(11, other, ctrl::FIFO_DISABLE_CHANNELS, model.now);
    model.frozen = HashSet::from([11]);
    model.pass(REASSERT[0]);
    engine.step(&mut model);
    assert_eq!(model.frozen, HashSet::from([10]));
    // However often it asks, it is answered a few times.
    let controls = model.controls;
    for _ in 0..1000 {
        engine.own_control(11, other, ctrl::FIFO_DISABLE_CHANNELS, model.now);
    }
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(1),
        Duration::ZERO,
        false,
    );
    assert!(
        model.controls - controls <= 3 * 2,
        "{}",
        model.controls - controls
    );
}

#[test]
fn a_refused_control_is_tried_again_rarely_and_the_process_is_listed() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 1)]);
    model.refuse.insert(10);
    engine.step(&mut model);
    assert_eq!(model.slices, BTreeMap::from([(11, 5000)]));
    let listed: Vec<u32> = engine.uncontrolled_in(0, 0).map(|(tgid, _)| tgid).collect();
    assert_eq!(listed, [10]);
    assert_eq!(engine.uncontrolled_in(1, 0).count(), 0);
    engine.hold("t0", 0, Reason::Command, true);
    let controls = model.controls;
    live(
        &mut engine,
        &mut model,
        TRY_AGAIN / 2,
        Duration::ZERO,
        false,
    );
    assert_eq!(model.controls, controls);
    model.refuse.clear();
    live(&mut engine, &mut model, TRY_AGAIN, Duration::ZERO, false);
    context(&mut engine, 12, 1);
    engine.step(&mut model);
    assert_eq!(engine.uncontrolled_in(0, 0).count(), 0);
    assert!(model.frozen.contains(&10) && model.slices.contains_key(&10));
}

#[test]
fn a_channel_that_is_gone_does_not_keep_the_others_from_freezing() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0)]);
    let extra = ObjectKey {
        client: client(10),
        handle: 5,
    };
    engine.insert(
        extra,
        Object {
            kind: kind::CHANNEL,
            parent: 3,
            gpu: 0,
            tgid: 10,
            tenant: 0,
            ..Object::default()
        },
    );
    engine.step(&mut model);
    model.refuse.insert(10);
    model.stale = true;
    model.gone.insert(extra);
    engine.hold("t0", 0, Reason::Command, true);
    engine.step(&mut model);
    assert!(!engine.knows(extra));
    model.refuse.clear();
    engine.step(&mut model);
    assert!(model.frozen.contains(&10));
    assert_eq!(engine.uncontrolled_in(0, 0).count(), 0);
}

#[test]
fn a_frozen_process_is_thawed_when_its_tenant_leaves_the_policy() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0)]);
    engine.hold("t0", 0, Reason::Command, true);
    engine.step(&mut model);
    assert!(model.frozen.contains(&10));
    assert_eq!(engine.frozen_in("t0", 0), [10]);
    engine.set_rules(Rules::new());
    engine.step(&mut model);
    assert!(model.frozen.is_empty());
}

#[test]
fn several_reasons_are_undone_one_by_one() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0)]);
    engine.hold("t0", 0, Reason::Command, true);
    engine.hold("t0", 0, Reason::MemoryHigh, true);
    engine.step(&mut model);
    engine.hold("t0", 0, Reason::Command, false);
    engine.step(&mut model);
    assert!(model.frozen.contains(&10));
    engine.hold("t0", 0, Reason::MemoryHigh, false);
    engine.step(&mut model);
    assert!(model.frozen.is_empty());
}

#[test]
fn an_inner_tenant_is_frozen_with_its_outer_one() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[]);
    let mut nested = rules(&[rule(100), rule(100)]);
    nested.get_mut(&1).expect("t1").parent = Some(0);
    engine.set_rules(nested);
    context(&mut engine, 11, 1);
    engine.hold("t0", 0, Reason::Command, true);
    engine.step(&mut model);
    assert!(model.frozen.contains(&11));
    assert_eq!(engine.frozen_in("t0", 0), [11]);
}

#[test]
fn an_exclusive_tenant_has_the_gpu_while_it_is_active() {
    let urgent = Rule {
        priority: 100,
        exclusive: true,
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[urgent, rule(100)], &[(10, 0), (11, 1)]);
    let got = shares(&mut engine, &mut model, &[10, 11], Duration::from_secs(5));
    assert!(got[0] > 0.97 && got[1] > 0.001, "{got:?}");
    model.idle.insert(10);
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(3),
        Duration::ZERO,
        true,
    );
    let got = shares(&mut engine, &mut model, &[10, 11], Duration::from_secs(2));
    assert!(got[1] > 0.99, "{got:?}");
}

#[test]
fn a_latency_target_is_met_by_squeezing_and_at_the_worst_by_freezing() {
    let urgent = |target| Rule {
        priority: 100,
        latency_target: Some(target),
        ..rule(100)
    };
    let batch = Rule {
        priority: 0,
        starve_max: Duration::from_secs(2),
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[urgent(2 * MS), batch], &[(10, 0), (11, 1)]);
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(3),
        Duration::ZERO,
        true,
    );
    assert_eq!(model.slices, BTreeMap::from([(10, 5000), (11, 1250)]));
    // No slice is short enough for this.
    engine.set_rules(rules(&[urgent(MS / 10), batch]));
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(3),
        Duration::ZERO,
        true,
    );
    assert_eq!(model.slices[&11], LEAST_SQUEEZED_US);
    let got = shares(&mut engine, &mut model, &[10, 11], Duration::from_secs(4));
    assert!(got[0] > 0.95 && got[1] > 0.0, "{got:?}");
}

#[test]
fn a_forgotten_process_does_not_cost_its_tenant_its_share() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 0), (12, 1)]);
    model.idle.insert(11);
    let mut live_for = |seconds, model: &mut Model| {
        let span = Duration::from_secs(seconds);
        live(&mut engine, model, span, Duration::ZERO, true);
    };
    live_for(5, &mut model);
    assert_eq!(
        model.slices,
        BTreeMap::from([(10, 5000), (11, 2500), (12, 5000)])
    );
    // It is back.
    model.idle.clear();
    live_for(1, &mut model);
    assert_eq!(
        model.slices,
        BTreeMap::from([(10, 2500), (11, 2500), (12, 5000)])
    );
    // While the board works and nobody is told of, nobody is taken to be idle.
    model.mute = true;
    live_for(10, &mut model);
    assert_eq!(model.slices[&11], 2500);
}

/// Five tenants of equal weight; the first one has two processes, so that each has a tenth.
fn five_tenants() -> (Engine, Model) {
    let processes = [(10, 0), (11, 0), (12, 1), (13, 2), (14, 3), (15, 4)];
    let (engine, mut model) = engine(&[rule(100); 5], &processes);
    model.one_at_a_time = true;
    (engine, model)
}

#[test]
fn who_is_named_seldom_is_not_taken_for_one_who_is_forgotten() {
    let (mut engine, mut model) = five_tenants();
    // A second at a time, so that none hides behind the next.
    for second in 0..300 {
        live(&mut engine, &mut model, 1000 * MS, Duration::ZERO, true);
        assert_eq!(
            [model.slices[&10], model.slices[&11]],
            [1000, 1000],
            "after {second} s"
        );
    }
    // Nor is one that sleeps until its kernels are done.
    model.sleeping.insert(10);
    for second in 0..300 {
        live(&mut engine, &mut model, 1000 * MS, Duration::ZERO, true);
        // What it uses while it works has to be learned.
        if second > 60 {
            assert_eq!(model.slices[&11], 1000, "after {second} s");
        }
    }
    // A forgotten one beside it lends all that it has, for as long as it is away.
    model.idle.insert(11);
    live(&mut engine, &mut model, 4000 * MS, Duration::ZERO, true);
    for second in 0..300 {
        live(&mut engine, &mut model, 1000 * MS, Duration::ZERO, true);
        assert_eq!(model.slices[&10], 2000, "after {second} s");
    }
}

#[test]
fn who_is_named_seldom_since_it_is_frozen_in_between_is_not_taken_for_forgotten() {
    let capped = Rule {
        max: Some(0.1),
        ..rule(100)
    };
    let processes = [(10, 0), (11, 0), (12, 1)];
    let (mut engine, mut model) = engine(&[capped, rule(100)], &processes);
    model.one_at_a_time = true;
    for second in 0..300 {
        live(&mut engine, &mut model, 1000 * MS, Duration::ZERO, true);
        let slices = [model.slices[&10], model.slices[&11]];
        assert_eq!(slices, [2500, 2500], "after {second} s");
    }
}

#[test]
fn who_comes_back_has_its_share_at_once() {
    let (mut engine, mut model) = five_tenants();
    model.idle.insert(11);
    live(&mut engine, &mut model, 60_000 * MS, Duration::ZERO, true);
    assert_eq!(model.slices[&10], 2000);
    model.idle.clear();
    live(&mut engine, &mut model, 500 * MS, Duration::ZERO, true);
    assert_eq!([model.slices[&10], model.slices[&11]], [1000, 1000]);
}

#[test]
fn who_only_calculates_lends_its_share_in_the_end() {
    let (mut engine, mut model) = five_tenants();
    model.idle.insert(11);
    model.calculating.insert(11);
    live(&mut engine, &mut model, 5000 * MS, Duration::ZERO, true);
    assert_eq!(model.slices[&10], 1000);
    live(&mut engine, &mut model, 30_000 * MS, Duration::ZERO, true);
    assert_eq!(model.slices[&10], 2000);
}

#[test]
fn work_that_is_told_of_late_does_not_make_a_forgotten_process_look_busy() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 0), (12, 1)]);
    let mut live_for = |ms, model: &mut Model| {
        let span = Duration::from_millis(ms);
        live(&mut engine, model, span, Duration::ZERO, true);
    };
    // Nobody does anything, and then all but one begin at once; NVML is a moment later than the board.
    model.idle.extend([10, 11, 12]);
    live_for(5000, &mut model);
    model.idle = [11].into();
    model.mute = true;
    live_for(300, &mut model);
    model.mute = false;
    live_for(600, &mut model);
    assert_eq!(model.slices[&10], 5000);
}

#[test]
fn a_latency_target_is_held_while_nothing_is_told_of_processes() {
    let urgent = Rule {
        priority: 200,
        latency_target: Some(Duration::from_millis(2)),
        ..rule(50)
    };
    let (mut engine, mut model) = engine(&[urgent, rule(50)], &[(10, 0), (11, 1)]);
    let mut live_for = |seconds, model: &mut Model| {
        let span = Duration::from_secs(seconds);
        live(&mut engine, model, span, Duration::ZERO, true);
        model.slices[&11]
    };
    let squeezed = live_for(4, &mut model);
    assert!(squeezed <= 2000, "{squeezed}");
    model.mute = true;
    assert_eq!(live_for(5, &mut model), squeezed);
    // Silence that is told, not missed, is an end of work.
    model.mute = false;
    model.idle.extend([10, 11]);
    assert!(live_for(5, &mut model) > squeezed);
}

#[test]
fn a_latency_target_does_not_swing_when_a_process_is_named_seldom() {
    for (urgent, batch) in [(50, 50), (10, 90)] {
        let urgent = Rule {
            priority: 200,
            latency_target: Some(Duration::from_micros(1500)),
            ..rule(urgent)
        };
        let (mut engine, mut model) = engine(&[urgent, rule(batch)], &[(10, 0), (11, 1)]);
        model.one_at_a_time = true;
        let mut slices = Vec::new();
        for _ in 0..1000 {
            live(&mut engine, &mut model, 1000 * MS, Duration::ZERO, true);
            slices.push(model.slices[&11]);
        }
        // Releases are tried, each after twice the time, and taken back.
        slices.dedup();
        assert!(slices.len() <= 12, "{slices:?}");
        assert!(slices.iter().all(|slice| *slice <= 2500), "{slices:?}");
    }
}

#[test]
fn what_the_board_does_is_the_use_of_the_only_process_that_nvml_tells_nothing_of() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 1)]);
    // The other one is idle, and known to be.
    model.idle.insert(11);
    let span = Duration::from_secs(5);
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    let before = told(&engine);
    assert!((before - 5.0).abs() < 0.3, "{before}");
    // The model's board is at work half of the time.
    model.mute = true;
    live(&mut engine, &mut model, 2 * span, Duration::ZERO, true);
    let used = told(&engine) - before;
    assert!((used - 5.0).abs() < 0.3, "{used}");
    // Of two nobody knows whose it was.
    model.mute = false;
    model.idle.clear();
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    let before = told(&engine);
    model.mute = true;
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    assert!(told(&engine) - before < 0.3);
}

#[test]
fn who_does_nothing_is_not_in_the_way_of_the_only_one_at_work() {
    let capped = Rule {
        max: Some(0.5),
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[capped, rule(100)], &[(10, 0), (11, 1)]);
    // From the start NVML tells nothing of the process that is frozen in between, and the other one waits for a user.
    model.mute = true;
    model.idle.insert(11);
    let span = Duration::from_secs(20);
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    let told = told(&engine);
    // The board of the model tells 50 %; the first seconds go by until the other one is known to be idle.
    assert!((6.0..=10.5).contains(&told), "{told}");
}

/// A tenant of little weight goes on alone, under a ceiling, after a neighbour that had nearly all of the time has ended.
#[test]
fn what_is_left_after_a_neighbour_is_told_of_however_soon_it_begins() {
    for gap in [0, 300, 1000, 2000, 4000, 15_000] {
        let (mut engine, mut model) = engine(&[rule(10), rule(90)], &[(10, 0), (11, 1)]);
        let live_for = |engine: &mut Engine, model: &mut Model, ms| {
            live(engine, model, ms * MS, Duration::ZERO, true);
        };
        model.one_at_a_time = true;
        live_for(&mut engine, &mut model, 10_000);
        model.one_at_a_time = false;
        model.idle.extend([10, 11]);
        live_for(&mut engine, &mut model, gap);
        let capped = Rule {
            max: Some(0.5),
            ..rule(10)
        };
        engine.set_rules(rules(&[capped, rule(90)]));
        model.idle.remove(&10);
        model.mute = true;
        live_for(&mut engine, &mut model, 4000);
        let before = told(&engine);
        live_for(&mut engine, &mut model, 10_000);
        let told = told(&engine) - before;
        assert!((told - 5.0).abs() < 0.6, "{told} s of 5 after {gap} ms");
    }
}

#[test]
fn who_sleeps_until_its_kernels_are_done_is_the_one_at_work_if_nobody_else_is_there() {
    let (mut engine, mut model) = engine(&[rule(100)], &[(10, 0)]);
    model.idle.insert(10);
    let span = Duration::from_secs(20);
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    model.idle.clear();
    model.sleeping.insert(10);
    model.mute = true;
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    let told = told(&engine);
    assert!((9.0..=10.5).contains(&told), "{told}");
}

#[test]
fn empty_answers_between_others_do_not_keep_a_forgotten_process_from_being_seen() {
    let (mut engine, mut model) = engine(&[rule(100), rule(100)], &[(10, 0), (11, 0), (12, 1)]);
    model.idle.insert(11);
    let turn = Duration::from_millis(300);
    for _ in 0..7 {
        for mute in [false, true] {
            model.mute = mute;
            live(&mut engine, &mut model, turn, Duration::ZERO, true);
        }
    }
    assert_eq!(model.slices[&10], 5000);
}

#[test]
fn a_ceiling_holds_while_nothing_is_told_of_processes() {
    let capped = Rule {
        max: Some(0.25),
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[capped], &[(10, 0)]);
    model.mute = true;
    let span = Duration::from_secs(20);
    live(&mut engine, &mut model, span, Duration::ZERO, true);
    let used = model.busy[&10].as_secs_f64();
    assert!((used - 5.0).abs() < 0.1, "{used}");
}

#[test]
fn pressure_is_what_a_ceiling_takes() {
    let capped = Rule {
        max: Some(0.25),
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[capped], &[(10, 0)]);
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(30),
        Duration::ZERO,
        true,
    );
    let account = engine
        .gpu(0)
        .and_then(|gpu| gpu.account(0))
        .expect("an account");
    let full = account.pressure.full.avg10;
    assert!((full - 0.75).abs() < 0.08, "{full}");
    let used = account.meter.total().as_secs_f64();
    assert!((used - 7.5).abs() < 0.5, "{used}");
}

#[test]
fn pressure_is_what_others_take_though_each_span_is_laid_at_one() {
    for one_at_a_time in [false, true] {
        let list = [rule(10), rule(30), rule(60)];
        let processes = [(10, 0), (11, 1), (12, 2), (13, 2)];
        let (mut engine, mut model) = engine(&list, &processes);
        model.one_at_a_time = one_at_a_time;
        live(&mut engine, &mut model, 300_000 * MS, Duration::ZERO, true);
        for (tenant, full, some) in [(0, 0.9, 0.9), (1, 0.7, 0.7), (2, 0.4, 1.0)] {
            let account = engine.gpu(0).and_then(|gpu| gpu.account(tenant));
            let pressure = account.expect("an account").pressure;
            let told = [pressure.full.avg60, pressure.some.avg60];
            // By chance a tenant may look as if it did not want all that it has.
            let low = if one_at_a_time { 0.25 } else { 0.05 };
            let near = |told: f64, wanted: f64| (wanted - low..=wanted + 0.05).contains(&told);
            assert!(near(told[0], full), "{tenant}: {told:?}");
            assert!(near(told[1], some), "{tenant}: {told:?}");
        }
    }
}

#[test]
fn energy_follows_gpu_time_and_adds_up_to_the_boards() {
    // 3 to 1, and a third process in no tenant.
    let (mut engine, mut model) = engine(&[rule(300), rule(100)], &[(10, 0), (11, 1)]);
    model.busy.insert(99, Duration::ZERO);
    let length = Duration::from_mins(1);
    let before = energy_mj(&model);
    live(&mut engine, &mut model, length, Duration::ZERO, true);
    let gpu = engine.gpu(0).expect("the GPU");
    let spent = |tenant| gpu.account(tenant).expect("an account").energy;
    let apart = gpu.energy_apart();
    let (idle, others) = (apart.none, apart.others);
    let ratio = spent(0).joules / spent(1).joules;
    assert!((2.7..3.3).contains(&ratio), "{ratio}");
    assert!(others.joules.abs() < 1e-9 && spent(0).watts > spent(1).watts);
    let sum = spent(0).joules + spent(1).joules + idle.joules + others.joules;
    // The first look only starts to count, and what came after the last one is not known yet.
    #[expect(clippy::cast_precision_loss, reason = "a few kilojoules")]
    let board = (energy_mj(&model) - before) as f64 / 1000.0;
    assert!((sum / board - 1.0).abs() < 0.01, "{sum} of {board}");
}

#[test]
fn everybody_is_thawed_at_the_end() {
    let capped = Rule {
        max: Some(0.1),
        ..rule(100)
    };
    let (mut engine, mut model) = engine(&[capped, rule(100)], &[(10, 0), (11, 1)]);
    engine.hold("t1", 0, Reason::Command, true);
    live(
        &mut engine,
        &mut model,
        Duration::from_secs(1),
        Duration::ZERO,
        false,
    );
    assert!(model.frozen.contains(&11));
    engine.thaw_all(&mut model);
    assert!(model.frozen.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any weights, any number of processes: shares are the weights, over seconds.
    #[test]
    fn shares_are_the_weights(tenants in prop::collection::vec((50..1000u32, 1..3u32), 1..5)) {
        let list: Vec<Rule> = tenants.iter().map(|(weight, _)| rule(*weight)).collect();
        let mut processes = Vec::new();
        for (tenant, (_, count)) in (0u32..).zip(&tenants) {
            processes.extend((0..*count).map(|process| (100 * (tenant + 1) + process, tenant)));
        }
        let (mut engine, mut model) = engine(&list, &processes);
        engine.step(&mut model);
        let tgids: Vec<u32> = processes.iter().map(|(tgid, _)| *tgid).collect();
        let got = shares(&mut engine, &mut model, &tgids, Duration::from_secs(2));
        let weights: f64 = tenants.iter().map(|(weight, _)| f64::from(*weight)).sum();
        for (tenant, (weight, _)) in (0u32..).zip(&tenants) {
            let share: f64 = processes
                .iter()
                .zip(&got)
                .filter(|((_, of), _)| *of == tenant)
                .map(|(_, share)| share)
                .sum();
            prop_assert!((share - f64::from(*weight) / weights).abs() < 0.01, "{share}");
        }
    }

    /// Any ceiling, also with a thread that is late by milliseconds: within two points, from the first second on.
    #[test]
    fn ceilings_hold(limit in 0.05..0.95f64, late in 0..3000u64, measured in any::<bool>()) {
        let capped = Rule { max: Some(limit), ..rule(100) };
        let (mut engine, mut model) = engine(&[capped], &[(10, 0)]);
        let late = Duration::from_micros(late);
        live(&mut engine, &mut model, Duration::from_secs(1), late, measured);
        let before = model.busy[&10];
        live(&mut engine, &mut model, Duration::from_secs(10), late, measured);
        let got = model.busy[&10].saturating_sub(before).as_secs_f64() / 10.0;
        prop_assert!((got - limit).abs() < 0.02, "{got} for {limit}");
    }

    /// Beside others a tenant has its weight's share of its part, and the others have all the rest.
    #[test]
    fn a_ceiling_beside_others_leaves_them_the_rest(limit in 0.2..0.8f64) {
        let capped = Rule { max: Some(limit), ..rule(100) };
        let (mut engine, mut model) = engine(&[capped, rule(100)], &[(10, 0), (11, 1)]);
        live(&mut engine, &mut model, Duration::from_secs(2), Duration::ZERO, true);
        let got = shares(&mut engine, &mut model, &[10, 11], Duration::from_secs(10));
        prop_assert!((got[0] - limit / 2.0).abs() < 0.01, "{got:?} for {limit}");
        prop_assert!((got[0] + got[1] - 1.0).abs() < 0.01, "{got:?}");
    }
}
