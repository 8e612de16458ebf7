//! What is known and decided about one GPU: pure.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use super::{
    account::{Busy, Meter},
    ceiling::{self, Ceiling},
    energy::{Apart, Board, Pending, Reading, Spent},
    latency::{FROZEN_STEP, Squeeze, wait_for_turn},
    presence::Presence,
    pressure::{self, Pressure, Use},
    priority::{self, Door, Ranked, Unwanted},
    rules::{Reason, Rule, Rules},
    slices::{self, Contender, Division, Node, Round},
};

/// Who used a GPU counts as active for so long after.
pub const LINGER: Duration = Duration::from_secs(1);
/// Part of the time from which on a board is at work.
const BOARD_BUSY: f64 = 0.02;
/// NVML tells of one process about every 200 ms, so that many an answer is empty. Longer than this it is silent.
pub(super) const LONGEST_GAP: Duration = Duration::from_secs(1);
/// What a switch from one process to another takes on an H200.
const SWITCH: Duration = Duration::from_micros(200);
/// Longest moment for which a tenant that starved runs.
const MOST_BREATH: Duration = Duration::from_millis(5);
/// Ceilings are compared with measurements of at least so long, and of ten periods.
const LEAST_MEASURED: Duration = Duration::from_secs(1);
/// Longest memory of when a tenant was frozen.
const FROZEN_KEPT: Duration = Duration::from_secs(10);

/// A process on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Process.
    pub tgid: u32,
    /// The tenant that it is in.
    pub tenant: u32,
    /// Its contexts.
    pub contexts: u32,
}

/// A tenant with a ceiling.
#[derive(Clone, Debug)]
struct Capped {
    ceiling: Ceiling,
    /// Where in the period it begins to run.
    start: Duration,
    /// How long it runs in this period.
    span: Duration,
    /// How long it has run in this period, up to `running`.
    ran: Duration,
    /// Since when it runs.
    running: Option<Duration>,
    /// Up to where measurements were taken, microseconds since 1970.
    measured_us: u64,
}

/// What a tenant did here.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// GPU time.
    pub meter: Meter,
    /// Time pressure.
    pub pressure: Pressure,
    /// Its part of what is done here.
    part: pressure::Part,
    /// Energy.
    pub energy: Spent,
    /// When it was frozen, microseconds since 1970; the last end is missing while it still is.
    frozen: VecDeque<(u64, Option<u64>)>,
}

impl Account {
    /// Whether the tenant is frozen now.
    pub fn is_frozen(&self) -> bool {
        self.frozen.back().is_some_and(|(_, end)| end.is_none())
    }

    fn set_frozen(&mut self, frozen: bool, now_us: u64) {
        if frozen == self.is_frozen() {
            return;
        }
        if frozen {
            self.frozen.push_back((now_us, None));
        } else if let Some((_, end)) = self.frozen.back_mut() {
            *end = Some(now_us);
        }
        let kept = now_us.saturating_sub(micros(FROZEN_KEPT));
        while self
            .frozen
            .front()
            .is_some_and(|(_, end)| end.is_some_and(|end| end < kept))
        {
            self.frozen.pop_front();
        }
    }

    /// The part of a span in which the tenant was frozen.
    fn frozen_part(&self, from_us: u64, to_us: u64) -> f64 {
        let frozen: u64 = self
            .frozen
            .iter()
            .map(|(start, end)| {
                end.unwrap_or(u64::MAX)
                    .min(to_us)
                    .saturating_sub((*start).max(from_us))
            })
            .sum();
        part(frozen, to_us.saturating_sub(from_us))
    }
}

/// What the driver tells of the use of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// Up to when, microseconds since 1970.
    pub known_us: u64,
    /// GPU time since the last answer.
    pub busy: &'a [Busy],
    /// What the board has used, if it was read.
    pub energy: Option<Reading>,
    /// Part of the last moments in which the board ran anything, 0 to 1, if it tells.
    pub board: Option<f64>,
}

impl Told<'_> {
    /// Whether the board was at work and NVML says of nobody that it was. Measured on an H200: for as long as the only process at
    /// work is frozen in between, NVML tells nothing of it, while what it tells of the board is right.
    pub fn is_silent(&self) -> bool {
        self.board_is_busy() && !self.names_somebody()
    }

    /// Whether anybody was at work.
    pub fn is_at_work(&self) -> bool {
        self.board_is_busy() || self.names_somebody()
    }

    fn board_is_busy(&self) -> bool {
        self.board.is_some_and(|part| part >= BOARD_BUSY)
    }

    fn names_somebody(&self) -> bool {
        self.busy.iter().any(|busy| busy.busy_us > 0)
    }
}

/// One GPU.
#[derive(Clone, Debug, Default)]
pub struct Gpu {
    members: Vec<Member>,
    board: Board,
    idle_energy: Spent,
    other_energy: Spent,
    pending: Pending,
    /// Readings up to which GPU time is not known yet, oldest first.
    readings: VecDeque<Reading>,
    /// Use of the board since GPU time was known last: when it was told last, the time since then, and the part of it in which the
    /// board ran anything.
    board_told: Option<Duration>,
    board_span: Duration,
    board_ran: Duration,
    /// Tenants with members, and the tenants around them.
    present: BTreeSet<u32>,
    capped: BTreeMap<u32, Capped>,
    squeezes: BTreeMap<u32, Squeeze>,
    door: Door,
    accounts: BTreeMap<u32, Account>,
    everybody: Meter,
    active_until: BTreeMap<u32, Duration>,
    /// What is known of who is at work.
    presence: BTreeMap<u32, Presence>,
    /// Processes that lend their share.
    idle: BTreeSet<u32>,
    period: u64,
    /// Slices as they should be, by process.
    division: Division,
    /// Why tenants are frozen.
    held: BTreeMap<u32, BTreeSet<Reason>>,
    /// Up to where the use is known, microseconds since 1970.
    known_us: u64,
    /// When NVML last told of somebody, or of an idle board, microseconds since 1970.
    heard_us: u64,
    /// The latest moment up to which use was missed, microseconds since 1970.
    missed_us: u64,
}

impl Gpu {
    /// Processes with contexts here.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// What a tenant did here.
    pub fn account(&self, tenant: u32) -> Option<&Account> {
        self.accounts.get(&tenant)
    }

    /// Tenants that did something here.
    pub fn accounted(&self) -> impl Iterator<Item = u32> {
        self.accounts.keys().copied()
    }

    /// Tenants that are frozen by reasons of their own.
    pub fn held(&self) -> impl Iterator<Item = u32> {
        self.held.keys().copied()
    }

    /// Slices as they should be, by process.
    pub fn division(&self) -> &Division {
        &self.division
    }

    /// Up to where the use of the GPU is known, microseconds since 1970.
    pub fn known_us(&self) -> u64 {
        self.known_us
    }

    /// Why a tenant is frozen: its own reasons and those of the tenants around it.
    pub fn reasons(&self, rules: &Rules, tenant: u32) -> BTreeSet<Reason> {
        chain(rules, tenant)
            .filter_map(|tenant| self.held.get(&tenant))
            .flatten()
            .copied()
            .collect()
    }

    /// Says who is here now.
    pub fn set_members(&mut self, rules: &Rules, members: Vec<Member>, now: Duration) {
        for member in &members {
            if !self.members.iter().any(|old| old.tgid == member.tgid) {
                // It has just made a context, so it is about to use it.
                self.active_until.insert(member.tgid, now + LINGER);
                self.presence.insert(member.tgid, Presence::new(now));
            }
        }
        let is_here = |tgid: &u32| members.iter().any(|member| member.tgid == *tgid);
        self.active_until.retain(|tgid, _| is_here(tgid));
        self.presence.retain(|tgid, _| is_here(tgid));
        self.idle.retain(is_here);
        self.present = members
            .iter()
            .flat_map(|member| chain(rules, member.tenant))
            .collect();
        self.members = members;
        self.accounts.retain(|tenant, _| rules.contains_key(tenant));
    }

    /// A process of a tenant has launched work.
    pub fn launched(&mut self, tgid: u32, now: Duration, linger: Duration) {
        if self.members.iter().any(|member| member.tgid == tgid) {
            let until = self.active_until.entry(tgid).or_default();
            *until = (*until).max(now + linger);
            if let Some(presence) = self.presence.get_mut(&tgid) {
                presence.named(now);
            }
        }
    }

    /// A process has used so much CPU time so far. Whether slices have to be divided anew, since it is back.
    pub fn ran(&mut self, tgid: u32, used: Duration, now: Duration) -> bool {
        let presence = self.presence.get_mut(&tgid);
        presence.is_some_and(|presence| presence.ran(used, now)) && self.idle.remove(&tgid)
    }

    /// Whether a process has left the GPU alone.
    pub fn is_idle(&self, tgid: u32) -> bool {
        self.idle.contains(&tgid)
    }

    /// Looks who lends its share from now on; whether that changed.
    fn find_idle(&mut self, rules: &Rules, now: Duration) -> bool {
        let time = |member: &Member| {
            let slice = self.division.slices.get(&member.tgid).copied();
            slice.unwrap_or_default() * u64::from(member.contexts)
        };
        let was_idle = |member: &Member| self.idle.contains(&member.tgid);
        let working: u64 = self
            .members
            .iter()
            .filter(|member| !was_idle(member))
            .map(time)
            .sum();
        let mut idle = BTreeSet::new();
        for member in &self.members {
            let own = time(member);
            let all = if was_idle(member) {
                working + own
            } else {
                working
            };
            let limit = chain(rules, member.tenant)
                .filter_map(|tenant| self.capped.get(&tenant))
                .map(|capped| capped.ceiling.limit())
                .fold(1.0, f64::min);
            let share = limit * part(own, all);
            let presence = self.presence.get_mut(&member.tgid);
            if presence.is_some_and(|presence| presence.is_idle(share, now)) {
                idle.insert(member.tgid);
            }
        }
        let changed = idle != self.idle;
        self.idle = idle;
        changed
    }

    /// Processes of exclusive tenants, if there is anybody of a lower class.
    pub fn privileged(&self, rules: &Rules, gpu: u32) -> Vec<u32> {
        self.above_others(rules, gpu, |rule| rule.exclusive)
    }

    /// Processes of tenants with a latency target, if there is anybody of a lower class.
    pub fn targeted(&self, rules: &Rules, gpu: u32) -> Vec<u32> {
        self.above_others(rules, gpu, |rule| rule.latency_target.is_some())
    }

    /// Processes of tenants with such a rule, if there is anybody of a lower class than theirs.
    fn above_others(&self, rules: &Rules, gpu: u32, has: impl Fn(&Rule) -> bool) -> Vec<u32> {
        let residents = self.residents(rules, gpu);
        let lowest = residents.values().map(|rule| rule.priority).min();
        self.members
            .iter()
            .filter(|member| {
                residents
                    .get(&member.tenant)
                    .is_some_and(|rule| has(rule) && Some(rule.priority) > lowest)
            })
            .map(|member| member.tgid)
            .collect()
    }

    fn is_active(&self, tgid: u32, now: Duration) -> bool {
        self.active_until
            .get(&tgid)
            .is_some_and(|until| *until > now)
    }

    /// Tenants that have processes of their own here, with their rules.
    fn residents<'a>(&'a self, rules: &'a Rules, gpu: u32) -> BTreeMap<u32, Rule> {
        self.members
            .iter()
            .filter_map(|member| Some((member.tenant, *rules.get(&member.tenant)?.gpus.get(&gpu)?)))
            .collect()
    }

    fn tenant_active(&self, tenant: u32, now: Duration) -> bool {
        self.members
            .iter()
            .any(|member| member.tenant == tenant && self.is_active(member.tgid, now))
    }

    /// Divides the round anew.
    pub fn divide(&mut self, rules: &Rules, gpu: u32, round: Round) {
        let mut division = slices::divide(round, &self.nodes(rules, gpu, None, 0));
        if let Some((lowest, squeeze)) = self.squeezed(rules, gpu) {
            for member in &self.members {
                if lowest.contains(&member.tenant)
                    && let Some(slice) = division.slices.get_mut(&member.tgid)
                {
                    *slice = squeeze.slice(*slice);
                }
            }
        }
        self.division = division;
    }

    fn nodes(&self, rules: &Rules, gpu: u32, around: Option<u32>, depth: u32) -> Vec<Node> {
        if depth > gpuquota_common::map::MAX_NESTING {
            return Vec::new();
        }
        self.present
            .iter()
            .filter_map(|tenant| Some((*tenant, rules.get(tenant)?)))
            .filter(|(_, rule)| rule.parent == around)
            .filter_map(|(tenant, rule)| {
                Some(Node {
                    weight: rule.gpus.get(&gpu)?.weight,
                    own: self
                        .members
                        .iter()
                        .filter(|member| member.tenant == tenant)
                        .map(|member| Contender {
                            tgid: member.tgid,
                            contexts: member.contexts,
                            idle: self.idle.contains(&member.tgid),
                        })
                        .collect(),
                    inside: self.nodes(rules, gpu, Some(tenant), depth + 1),
                })
            })
            .collect()
    }

    /// Who is squeezed for the sake of a latency target, and how much: the class with the lowest priority here, if
    /// a higher one has a target that is not met.
    fn squeezed(&self, rules: &Rules, gpu: u32) -> Option<(BTreeSet<u32>, &Squeeze)> {
        let residents = self.residents(rules, gpu);
        let lowest = residents.values().map(|rule| rule.priority).min()?;
        let squeeze = self
            .squeezes
            .iter()
            .filter(|(tenant, _)| {
                residents
                    .get(tenant)
                    .is_some_and(|rule| rule.priority > lowest)
            })
            .map(|(_, squeeze)| squeeze)
            .max_by_key(|squeeze| squeeze.step())?;
        let tenants = residents
            .iter()
            .filter(|(_, rule)| rule.priority == lowest)
            .map(|(tenant, _)| *tenant)
            .collect();
        (squeeze.step() > 0).then_some((tenants, squeeze))
    }

    /// Takes what the driver says of the use of this GPU, which is known up to `known_us` now. `tenant_of` names
    /// the tenant of a process that is not here any more, or not yet.
    ///
    /// Returns whether slices have to be divided anew.
    pub fn used(&mut self, context: &Context<'_>, told: &Told<'_>, now: Duration) -> bool {
        let known_us = told.known_us;
        let from_us = self.known_us;
        self.readings.extend(told.energy);
        let since = now.saturating_sub(self.board_told.replace(now).unwrap_or(now));
        self.board_span += since;
        self.board_ran += since.mul_f64(told.board.unwrap_or(0.0).clamp(0.0, 1.0));
        if !told.is_silent() || from_us == 0 {
            self.heard_us = known_us;
        }
        let missed = self.missed(from_us, known_us);
        let guess = self.only_user(told, known_us.saturating_sub(missed));
        let busy = guess.as_ref().map_or(told.busy, std::slice::from_ref);
        let tenants: BTreeMap<u32, u32> = self
            .members
            .iter()
            .map(|member| (member.tgid, member.tenant))
            .collect();
        for busy in busy {
            self.everybody.add(*busy);
            if busy.busy_us > 0 {
                self.launched(busy.tgid, now, LINGER);
            }
            let Some(tenant) = tenants.get(&busy.tgid) else {
                continue;
            };
            for tenant in chain(context.rules, *tenant) {
                self.accounts.entry(tenant).or_default().meter.add(*busy);
            }
        }
        if known_us <= from_us {
            return false;
        }
        self.known_us = known_us;
        if from_us == 0 {
            return false;
        }
        if missed > 0 {
            self.missed_us = known_us;
            // Time of which nothing is known is not idle time.
            for presence in self.presence.values_mut() {
                presence.missed(Duration::from_micros(missed));
            }
        }
        self.measure(context, now);
        self.feel(context, (from_us, known_us), busy);
        (self.board_span, self.board_ran) = (Duration::ZERO, Duration::ZERO);
        let mut since = 0;
        while let Some(reading) = self
            .readings
            .pop_front_if(|reading| reading.at_us <= known_us)
        {
            self.note_busy(context, busy, &tenants, since, reading.at_us);
            self.spend(reading);
            since = reading.at_us;
        }
        self.note_busy(context, busy, &tenants, since, u64::MAX);
        let lending = self.find_idle(context.rules, now);
        // Silence does not say whether somebody waits.
        (!told.is_silent() && self.target(context)) || lending
    }

    /// How much of the time since the last answer, and before it if that was not counted yet, nothing is known of; microseconds.
    fn missed(&self, from_us: u64, known_us: u64) -> u64 {
        let silent = known_us.saturating_sub(self.heard_us);
        let before = from_us.saturating_sub(self.heard_us);
        let gap = micros(LONGEST_GAP);
        match (silent > gap, before > gap) {
            (false, _) => 0,
            (true, false) => silent,
            (true, true) => silent - before,
        }
    }

    /// Of time of which NVML tells nothing by process: where one process alone can have worked, what the board did is its use.
    fn only_user(&self, told: &Told<'_>, from_us: u64) -> Option<Busy> {
        if from_us >= told.known_us {
            return None;
        }
        let awake = || {
            self.members
                .iter()
                .filter(|member| !self.idle.contains(&member.tgid))
        };
        let only = match (awake().count(), self.members.as_slice()) {
            (1, _) => awake().next()?,
            // It waits for its kernels without using a CPU.
            (0, [alone]) => alone,
            _ => return None,
        };
        let span = Duration::from_micros(told.known_us - from_us);
        // The board tells of its last moments only, and those before were told of when they were.
        let ran = if self.board_span.is_zero() {
            told.board?.clamp(0.0, 1.0)
        } else {
            part(micros(self.board_ran), micros(self.board_span))
        };
        Some(Busy {
            tgid: only.tgid,
            from_us,
            to_us: told.known_us,
            busy_us: micros(span.mul_f64(ran)),
        })
    }

    /// Notes what of some GPU time was used in a span, until its energy is known.
    fn note_busy(
        &mut self,
        context: &Context<'_>,
        busy: &[Busy],
        tenants: &BTreeMap<u32, u32>,
        from_us: u64,
        to_us: u64,
    ) {
        for busy in busy {
            let within = busy
                .to_us
                .min(to_us)
                .saturating_sub(busy.from_us.max(from_us));
            let share = part(within, busy.to_us.saturating_sub(busy.from_us));
            let used_us = micros(Duration::from_micros(busy.busy_us).mul_f64(share.min(1.0)));
            self.pending.all_us += used_us;
            match tenants.get(&busy.tgid) {
                Some(tenant) => {
                    for tenant in chain(context.rules, *tenant) {
                        *self.pending.tenants_us.entry(tenant).or_default() += used_us;
                    }
                }
                None => self.pending.others_us += used_us,
            }
        }
    }

    /// Divides the energy that was used since the reading before by the GPU time since then.
    fn spend(&mut self, reading: Reading) {
        let Pending {
            all_us,
            tenants_us,
            others_us,
        } = std::mem::take(&mut self.pending);
        let Some((split, span)) = self.board.observe(reading, Duration::from_micros(all_us)) else {
            return;
        };
        self.idle_energy.add(split.idle, span);
        self.other_energy
            .add(split.users * part(others_us, all_us), span);
        for tenant in tenants_us.keys() {
            self.accounts.entry(*tenant).or_default();
        }
        for (tenant, account) in &mut self.accounts {
            let used_us = tenants_us.get(tenant).copied().unwrap_or_default();
            account
                .energy
                .add(split.users * part(used_us, all_us), span);
        }
    }

    /// Energy that is no tenant's.
    pub fn energy_apart(&self) -> Apart {
        Apart {
            none: self.idle_energy,
            others: self.other_energy,
            board_mj: self.board.counter_mj(),
        }
    }

    /// The driver does not tell the use of this GPU. Whether slices have to be divided anew.
    pub fn unmeasured(&mut self) -> bool {
        for capped in self.capped.values_mut() {
            capped.ceiling.unmeasured();
        }
        // Nobody is idle as far as is known.
        !std::mem::take(&mut self.idle).is_empty()
    }

    /// Compares ceilings with what was used.
    fn measure(&mut self, context: &Context<'_>, _now: Duration) {
        let least = micros(LEAST_MEASURED.max(context.period * 10));
        for (tenant, capped) in &mut self.capped {
            let (from, to) = (capped.measured_us, self.known_us);
            if to < from.saturating_add(least) {
                continue;
            }
            capped.measured_us = to;
            let Some(account) = self.accounts.get(tenant) else {
                continue;
            };
            let length = Duration::from_micros(to - from);
            // A span longer than what is remembered of freezing says nothing.
            if length > FROZEN_KEPT {
                continue;
            }
            let busy = account.meter.between(from, to).as_secs_f64() / length.as_secs_f64();
            if self.missed_us > from {
                capped.ceiling.unmeasured();
            } else {
                capped.ceiling.measured(busy);
            }
        }
    }

    /// Adds to the pressure of tenants.
    fn feel(&mut self, context: &Context<'_>, (from, to): (u64, u64), busy: &[Busy]) {
        let length = to - from;
        let share = |of: &dyn Fn(u32) -> bool| -> f64 {
            let sum: u64 = busy
                .iter()
                .filter(|busy| of(busy.tgid))
                .map(|busy| busy.busy_us)
                .sum();
            part(sum, length).min(1.0)
        };
        let running: BTreeSet<u32> = self
            .members
            .iter()
            .map(|member| member.tgid)
            .filter(|tgid| !self.idle.contains(tgid))
            .collect();
        let slices_of = |of: &dyn Fn(u32) -> bool| -> u64 {
            self.members
                .iter()
                .filter(|member| running.contains(&member.tgid) && of(member.tenant))
                .filter_map(|member| {
                    let slice = self.division.slices.get(&member.tgid)?;
                    Some(slice * u64::from(member.contexts))
                })
                .sum()
        };
        let all = share(&|_| true);
        let all_slices = slices_of(&|_| true);
        let mut lost = Vec::new();
        for tenant in &self.present {
            let inside = |member: u32| chain(context.rules, member).any(|around| around == *tenant);
            let members: BTreeSet<u32> = self
                .members
                .iter()
                .filter(|member| inside(member.tenant))
                .map(|member| member.tgid)
                .collect();
            let account = self.accounts.entry(*tenant).or_default();
            let span = Duration::from_micros(length);
            let own = share(&|tgid| members.contains(&tgid));
            account.part.add(span.mul_f64(all), span.mul_f64(own));
            let frozen = account.frozen_part(from, to);
            let used = Use {
                own: all * account.part.get(),
                all,
                entitled: part(slices_of(&inside), all_slices),
                frozen,
                processes: members.intersection(&running).count(),
            };
            lost.push((*tenant, pressure::lost(used)));
        }
        for (tenant, lost) in lost {
            self.accounts
                .entry(tenant)
                .or_default()
                .pressure
                .add(Duration::from_micros(length), lost);
        }
    }

    /// Compares waits with latency targets; whether slices have to change.
    fn target(&mut self, context: &Context<'_>) -> bool {
        let residents = self.residents(context.rules, context.gpu);
        self.squeezes.retain(|tenant, _| {
            residents
                .get(tenant)
                .is_some_and(|rule| rule.latency_target.is_some())
        });
        let mut changed = false;
        for (tenant, rule) in &residents {
            let Some(target) = rule.latency_target else {
                continue;
            };
            let is_at_work = |member: &&Member| !self.idle.contains(&member.tgid);
            let mut at_work = self.members.iter().filter(is_at_work);
            let waits = at_work.any(|member| member.tenant == *tenant);
            let others = self
                .members
                .iter()
                .filter(|member| member.tenant != *tenant)
                .filter(is_at_work)
                .filter(|member| self.reasons(context.rules, member.tenant).is_empty())
                .filter_map(|member| {
                    let slice = self.division.slices.get(&member.tgid)?;
                    Some(slice * u64::from(member.contexts))
                });
            let wait = wait_for_turn(others, SWITCH);
            let squeeze = self.squeezes.entry(*tenant).or_default();
            let before = squeeze.step();
            if waits {
                squeeze.observe(wait, target);
            } else {
                squeeze.release();
            }
            changed |= squeeze.step() != before;
        }
        changed
    }

    /// Decides who is frozen from now on. `commanded` are tenants that are frozen for reasons from outside.
    ///
    /// Returns when to ask again at the latest.
    pub fn decide(
        &mut self,
        context: &Context<'_>,
        commanded: &BTreeMap<u32, BTreeSet<Reason>>,
        now: Duration,
    ) -> Option<Duration> {
        self.held.clear();
        for (tenant, reasons) in commanded {
            self.held.entry(*tenant).or_default().extend(reasons);
        }
        let out = self.keep_out(context, now);
        let cap = self.cap(context, now);
        [out, cap].into_iter().flatten().min()
    }

    /// Exclusive classes and latency targets.
    fn keep_out(&mut self, context: &Context<'_>, now: Duration) -> Option<Duration> {
        let residents = self.residents(context.rules, context.gpu);
        let ranked: Vec<Ranked> = residents
            .iter()
            .map(|(tenant, rule)| Ranked {
                tenant: *tenant,
                priority: rule.priority,
                exclusive: rule.exclusive,
                active: self.tenant_active(*tenant, now),
            })
            .collect();
        let mut unwanted: BTreeMap<u32, Reason> = match self.squeezed(context.rules, context.gpu) {
            Some((tenants, squeeze)) if squeeze.step() >= FROZEN_STEP => tenants
                .into_iter()
                .map(|tenant| (tenant, Reason::Latency))
                .collect(),
            _ => BTreeMap::new(),
        };
        unwanted.extend(
            priority::outranked(&ranked)
                .into_iter()
                .map(|tenant| (tenant, Reason::Exclusive)),
        );
        let all: Vec<Unwanted> = unwanted
            .keys()
            .filter_map(|tenant| {
                Some(Unwanted {
                    tenant: *tenant,
                    starve_max: residents.get(tenant)?.starve_max,
                })
            })
            .collect();
        // Shorter than a hundredth of the usual `starve-max`: who is exclusive does not feel it in its p99.
        let breath = Duration::from_micros(context.round_us).min(MOST_BREATH);
        let orders = self.door.decide(now, breath, &all);
        for tenant in orders.out {
            self.held
                .entry(tenant)
                .or_default()
                .insert(unwanted[&tenant]);
        }
        // An exclusive tenant that falls silent lets the others in.
        let silent = ranked
            .iter()
            .filter(|tenant| tenant.exclusive && tenant.active)
            .flat_map(|tenant| {
                self.members
                    .iter()
                    .filter(|member| member.tenant == tenant.tenant)
                    .filter_map(|member| self.active_until.get(&member.tgid).copied())
                    .filter(|until| *until > now)
            })
            .min();
        let silent = if all.is_empty() { None } else { silent };
        [orders.next, silent].into_iter().flatten().min()
    }

    /// Ceilings.
    fn cap(&mut self, context: &Context<'_>, now: Duration) -> Option<Duration> {
        let period = context.period;
        let limits: BTreeMap<u32, f64> = self
            .present
            .iter()
            .filter_map(|tenant| {
                let max = context.rules.get(tenant)?.gpus.get(&context.gpu)?.max?;
                Some((*tenant, max))
            })
            .collect();
        let before = self.capped.len();
        self.capped.retain(|tenant, _| limits.contains_key(tenant));
        let mut changed = before != self.capped.len();
        for (tenant, limit) in &limits {
            let known_us = context.wall_us;
            let capped = self.capped.entry(*tenant).or_insert_with(|| {
                changed = true;
                Capped {
                    ceiling: Ceiling::new(*limit),
                    start: Duration::ZERO,
                    span: Duration::ZERO,
                    ran: Duration::ZERO,
                    running: Some(now),
                    measured_us: known_us,
                }
            });
            if (capped.ceiling.limit() - limit).abs() > f64::EPSILON {
                capped.ceiling.set_limit(*limit);
                changed = true;
            }
        }
        let index = u64::try_from(now.as_nanos() / period.as_nanos().max(1)).unwrap_or(u64::MAX);
        let boundary = now.saturating_sub(since_period(now, period));
        if index != self.period {
            let one_later = index == self.period + 1;
            self.period = index;
            changed = true;
            for capped in self.capped.values_mut() {
                if let Some(running) = capped.running {
                    capped.ran += boundary.saturating_sub(running);
                    capped.running = Some(running.max(boundary));
                }
                if one_later {
                    capped.ceiling.ran(period, capped.ran.min(period));
                }
                capped.ran = Duration::ZERO;
            }
        }
        if changed {
            let spans: Vec<Duration> = self
                .capped
                .values()
                .map(|capped| capped.ceiling.span(period))
                .collect();
            // Places follow from the parts without what is owed, so that they move little.
            let parts: Vec<Duration> = self
                .capped
                .values()
                .map(|capped| period.mul_f64(capped.ceiling.part()))
                .collect();
            let starts = ceiling::starts(&parts, period);
            for ((capped, span), start) in self.capped.values_mut().zip(spans).zip(starts) {
                capped.span = span;
                capped.start = start;
            }
        }
        let at = since_period(now, period);
        let mut next = None;
        for (tenant, capped) in &self.capped {
            if !ceiling::runs(at, capped.start, capped.span, period) {
                self.held
                    .entry(*tenant)
                    .or_default()
                    .insert(Reason::Ceiling);
            }
            if capped.span < period {
                let edge = ceiling::until_edge(at, capped.start, capped.span, period)
                    .map(|edge| now + edge);
                next = [next, edge, Some(boundary + period)]
                    .into_iter()
                    .flatten()
                    .min();
            }
        }
        next.or_else(|| (!self.capped.is_empty()).then(|| boundary + period))
    }

    /// Notes what is really frozen, after it was done.
    pub fn applied(&mut self, context: &Context<'_>, now: Duration, wall_us: u64) {
        for tenant in self.present.clone() {
            let frozen = !self.reasons(context.rules, tenant).is_empty();
            self.accounts
                .entry(tenant)
                .or_default()
                .set_frozen(frozen, wall_us);
            if let Some(capped) = self.capped.get_mut(&tenant) {
                match (capped.running, frozen) {
                    (Some(since), true) => {
                        capped.ran += now.saturating_sub(since);
                        capped.running = None;
                    }
                    (None, false) => capped.running = Some(now),
                    _ => {}
                }
            }
        }
    }
}

/// What decisions are made with.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Which GPU.
    pub gpu: u32,
    /// What should hold.
    pub rules: &'a Rules,
    /// The round, microseconds.
    pub round_us: u64,
    /// The period of ceilings.
    pub period: Duration,
    /// Microseconds since 1970.
    pub wall_us: u64,
}

/// A tenant and those around it, innermost first.
pub fn chain(rules: &Rules, tenant: u32) -> impl Iterator<Item = u32> + '_ {
    std::iter::successors(rules.contains_key(&tenant).then_some(tenant), |tenant| {
        rules.get(tenant)?.parent
    })
    .take(gpuquota_common::map::MAX_NESTING as usize + 1)
}

fn since_period(now: Duration, period: Duration) -> Duration {
    let rest = now.as_nanos() % period.as_nanos().max(1);
    Duration::from_nanos(u64::try_from(rest).unwrap_or(0))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// `some` of `all`, 0 of nothing.
fn part(some: u64, all: u64) -> f64 {
    if all == 0 {
        return 0.0;
    }
    Duration::from_micros(some).as_secs_f64() / Duration::from_micros(all).as_secs_f64()
}
