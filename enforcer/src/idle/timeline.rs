//! What a process does over time, from what its threads do: pure.
//!
//! A process of a hundred threads does one thing at a time here. It runs if any of its threads does, it is queued if none runs and one
//! could; else it does what its leading thread does. That is the one that has used most CPU time lately, which in
//! most programs is the one that launches; its first thread, if no other has used twice as much. Pools that wait for work,
//! and threads that look at something now and then, so hide nothing.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::state::State;

/// Time is kept in slots of this length.
pub const SLOT_NS: u64 = 10_000_000;
/// Slots that are kept: what is learned of the GPU about earlier ones comes too late.
const MOST_SLOTS: usize = 1000;
/// Time on a stack counts for so long after its thread ran last, unless that leads.
pub const LINGER_NS: u64 = 1_000_000_000;
/// CPU time counts half as much after so long.
const HALF_LIFE_NS: u64 = 5_000_000_000;
/// How often it is seen which thread leads.
const ELECTION_NS: u64 = 100_000_000;
/// Threads of one process that are told apart.
const MOST_THREADS: usize = 8192;

/// Nanoseconds in each state.
pub type Spent = [f64; State::COUNT];

/// Nanoseconds as they are divided. Exact up to 100 days.
#[expect(
    clippy::cast_precision_loss,
    reason = "the lengths of looks are far below 2^53 nanoseconds"
)]
pub fn ns(nanoseconds: u64) -> f64 {
    nanoseconds as f64
}

/// A stack by its number, and how many blocks of its kind it stands for.
pub type Sampled = (u32, f64);

/// A span that a thread spent on one stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// The stack.
    pub stack: u32,
    /// From when.
    pub from_ns: u64,
    /// Until when.
    pub to_ns: u64,
    /// How many such spans it stands for.
    pub stands_for: f64,
}

#[derive(Clone, Debug, Default)]
struct Grid {
    /// Number of the first slot.
    first: u64,
    slots: VecDeque<[u32; State::COUNT]>,
}

impl Grid {
    fn add(&mut self, from: u64, to: u64, state: State) {
        let oldest = (to / SLOT_NS).saturating_sub(MOST_SLOTS as u64 - 1) * SLOT_NS;
        let mut at = from.max(oldest);
        while at < to {
            let slot = at / SLOT_NS;
            let until = to.min((slot + 1) * SLOT_NS);
            if let Some(place) = self.slot(slot) {
                // At most a slot's length, which fits.
                place[state.index()] += u32::try_from(until - at).unwrap_or(0);
            }
            at = until;
        }
    }

    fn slot(&mut self, number: u64) -> Option<&mut [u32; State::COUNT]> {
        if self.slots.is_empty() {
            self.first = number;
        }
        let wanted = usize::try_from(number.checked_sub(self.first)?).ok()?;
        if wanted >= self.slots.len() + MOST_SLOTS {
            self.slots.clear();
            self.first = number;
            self.slots.push_back([0; State::COUNT]);
            return self.slots.back_mut();
        }
        while wanted >= self.slots.len() {
            self.slots.push_back([0; State::COUNT]);
        }
        while self.slots.len() > MOST_SLOTS {
            self.slots.pop_front();
            self.first += 1;
        }
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(at)
    }

    /// Time in each state in a span. What is within one slot counts in proportion; slots for which `held` says so of their
    /// middle were spent held, whatever threads did.
    fn spent(&self, from: u64, to: u64, held: impl Fn(u64) -> bool) -> Spent {
        let mut sums = [0.0; State::COUNT];
        let begin = (from / SLOT_NS).max(self.first);
        let end = (to.div_ceil(SLOT_NS)).min(self.first + self.slots.len() as u64);
        for number in begin..end {
            let Some(slot) = usize::try_from(number - self.first)
                .ok()
                .and_then(|at| self.slots.get(at))
            else {
                break;
            };
            let (start, stop) = (number * SLOT_NS, (number + 1) * SLOT_NS);
            let part = ns(stop.min(to).saturating_sub(start.max(from))) / ns(SLOT_NS);
            let is_held = held(start + SLOT_NS / 2);
            for state in State::ALL {
                let time = part * f64::from(slot[state.index()]);
                let state = if is_held { State::Held } else { state };
                sums[state.index()] += time;
            }
        }
        sums
    }
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    state: State,
    since: u64,
    stack: Option<Sampled>,
    /// Up to when the stack's time has been told.
    told: u64,
    /// CPU time, where what is long past counts less; as of `since`.
    used: f64,
}

impl Thread {
    /// CPU time that counts at a moment.
    fn used_at(&self, at: u64) -> f64 {
        let span = ns(at.saturating_sub(self.since));
        let more = if self.state == State::Running {
            span
        } else {
            0.0
        };
        self.used * (-span / ns(HALF_LIFE_NS)).exp2() + more
    }
}

/// What a process does.
#[derive(Clone, Debug)]
pub struct Timeline {
    threads: HashMap<u32, Thread>,
    running: u32,
    queued: u32,
    /// Threads that are off their CPU and wait for something, by since when; those that lingered are not among them.
    lingering: BTreeSet<(u64, u32)>,
    first: u32,
    /// The thread that leads; `None` if it has ended.
    leads: Option<u32>,
    elected: u64,
    clock: u64,
    ended: bool,
    /// Whether nobody sees what its threads do, and the CPU time of those that were known before: as of when.
    unseen: bool,
    before: HashMap<u32, (f64, u64)>,
    grid: Grid,
    spent: Spent,
    /// Changes of threads for which there was no room.
    pub crowded: u64,
}

impl Timeline {
    /// A process that is followed from a moment on; its first thread has its number.
    pub fn new(pid: u32, at_ns: u64) -> Self {
        Self {
            threads: HashMap::new(),
            running: 0,
            queued: 0,
            lingering: BTreeSet::new(),
            first: pid,
            leads: Some(pid),
            elected: at_ns,
            clock: at_ns,
            ended: false,
            unseen: false,
            before: HashMap::new(),
            grid: Grid::default(),
            spent: [0.0; State::COUNT],
            crowded: 0,
        }
    }

    /// What the process does now. A process of whose leading thread nothing is known is asleep.
    pub fn now(&self) -> State {
        if self.running > 0 {
            return State::Running;
        }
        if self.queued > 0 {
            return State::Queued;
        }
        self.leads
            .and_then(|tid| self.threads.get(&tid))
            .map_or(State::Asleep, |thread| thread.state)
    }

    /// Up to when everything is known.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Time in each state since the beginning.
    pub fn spent(&self) -> &Spent {
        &self.spent
    }

    /// Time in each state in a span that is not long past.
    pub fn spent_in(&self, from: u64, to: u64, held: impl Fn(u64) -> bool) -> Spent {
        self.grid.spent(from, to, held)
    }

    /// Nothing changes until then.
    pub fn advance(&mut self, to: u64) {
        if self.ended || to <= self.clock {
            return;
        }
        if self.unseen {
            self.clock = to;
            return;
        }
        let state = self.now();
        self.grid.add(self.clock, to, state);
        self.spent[state.index()] += ns(to - self.clock);
        self.clock = to;
        if to - self.elected >= ELECTION_NS {
            self.elect();
        }
    }

    /// Sees which thread leads.
    fn elect(&mut self) {
        self.elected = self.clock;
        let used = |tid: u32| {
            let thread = self.threads.get(&tid);
            thread.map_or(0.0, |thread| thread.used_at(self.clock))
        };
        let most = self
            .threads
            .keys()
            .map(|tid| (*tid, used(*tid)))
            .max_by(|(a, one), (b, other)| one.total_cmp(other).then(b.cmp(a)));
        self.leads = match most {
            Some((tid, most)) if most > 2.0 * used(self.first) => Some(tid),
            Some((tid, _)) if !self.threads.contains_key(&self.first) => Some(tid),
            Some(_) => Some(self.first),
            None => None,
        };
    }

    /// From now on nobody sees what its threads do. What they did until now on known stacks goes to `pieces`.
    pub fn lose_sight(&mut self, at: u64, pieces: &mut Vec<Piece>) {
        if self.ended || self.unseen {
            return;
        }
        self.advance(at);
        self.tell_all(pieces);
        self.unseen = true;
        self.before = self
            .threads
            .drain()
            .map(|(tid, thread)| (tid, (thread.used_at(self.clock), self.clock)))
            .collect();
        self.lingering.clear();
        (self.running, self.queued) = (0, 0);
    }

    /// What its threads do is seen again from now on, when they were found so. What was told of them since is newer.
    pub fn see_again(&mut self, at: u64, found: &[(u32, State)]) {
        if self.ended || !self.unseen {
            return;
        }
        self.advance(at);
        self.unseen = false;
        self.elected = self.clock;
        for (tid, state) in found {
            self.found(*tid, *state, false);
        }
    }

    /// A thread as it was found. What is known of it already is not replaced unless that is `doubtful`.
    pub fn found(&mut self, tid: u32, state: State, doubtful: bool) {
        let known = self.threads.get(&tid).copied();
        if known.is_some() && !doubtful || self.ended || !self.has_room(tid) {
            return;
        }
        self.take_out(tid);
        self.put_in(tid, self.clock, state, None);
        // Nobody knows how long it has waited already.
        self.lingering.remove(&(self.clock, tid));
    }

    /// A thread does something else from now on. What it did until now on a known stack goes to `pieces`.
    pub fn change(
        &mut self,
        tid: u32,
        at: u64,
        state: State,
        stack: Option<Sampled>,
        pieces: &mut Vec<Piece>,
    ) {
        if self.ended {
            // All threads that were known had ended, and there was one more.
            self.ended = false;
            self.clock = self.clock.max(at);
        }
        self.advance(at);
        // Moments of several CPUs need not come in their order.
        let at = at.max(self.clock);
        self.tell(tid, at, pieces);
        if !self.has_room(tid) {
            return;
        }
        self.take_out(tid);
        self.put_in(tid, at, state, stack);
        if self.leads.is_none() {
            self.elect();
        }
    }

    fn put_in(&mut self, tid: u32, at: u64, state: State, stack: Option<Sampled>) {
        match state {
            State::Running => self.running += 1,
            State::Queued => self.queued += 1,
            _ => {
                self.lingering.insert((at, tid));
            }
        }
        let used = match self.threads.get(&tid) {
            Some(thread) => thread.used_at(at),
            None => self.before.remove(&tid).map_or(0.0, |(used, since)| {
                used * (-ns(at.saturating_sub(since)) / ns(HALF_LIFE_NS)).exp2()
            }),
        };
        let thread = Thread {
            state,
            since: at,
            stack,
            told: at,
            used,
        };
        self.threads.insert(tid, thread);
    }

    /// Takes a thread out of what is counted.
    fn take_out(&mut self, tid: u32) {
        let Some(thread) = self.threads.get(&tid) else {
            return;
        };
        match thread.state {
            State::Running => self.running -= 1,
            State::Queued => self.queued -= 1,
            _ => {
                self.lingering.remove(&(thread.since, tid));
            }
        }
    }

    /// A thread has ended.
    pub fn gone(&mut self, tid: u32, at: u64, pieces: &mut Vec<Piece>) {
        self.advance(at);
        self.tell(tid, at.max(self.clock), pieces);
        self.take_out(tid);
        self.threads.remove(&tid);
        self.before.remove(&tid);
        // Of those that nobody sees there may be more.
        self.ended |= self.threads.is_empty() && !self.unseen;
        if self.leads == Some(tid) {
            self.elect();
        }
    }

    /// The process has ended.
    pub fn end(&mut self, at: u64, pieces: &mut Vec<Piece>) {
        self.advance(at);
        self.tell_all(pieces);
        self.ended = true;
        self.threads.clear();
        self.before.clear();
        self.lingering.clear();
        (self.running, self.queued, self.leads) = (0, 0, None);
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Tells what threads have spent on their stacks until now.
    pub fn tell_all(&mut self, pieces: &mut Vec<Piece>) {
        let tids: Vec<u32> = self
            .lingering
            .iter()
            .map(|(_, tid)| *tid)
            .chain(self.leads)
            .collect();
        for tid in tids {
            self.tell(tid, self.clock, pieces);
        }
        while let Some((since, tid)) = self.lingering.first().copied()
            && self.clock.saturating_sub(since) >= LINGER_NS
        {
            self.lingering.remove(&(since, tid));
        }
    }

    fn tell(&mut self, tid: u32, at: u64, pieces: &mut Vec<Piece>) {
        let leads = self.leads == Some(tid);
        let Some(thread) = self.threads.get_mut(&tid) else {
            return;
        };
        let until = if leads {
            at
        } else {
            at.min(thread.since.saturating_add(LINGER_NS))
        };
        if let Some((stack, stands_for)) = thread.stack
            && until > thread.told
        {
            pieces.push(Piece {
                stack,
                from_ns: thread.told,
                to_ns: until,
                stands_for,
            });
        }
        thread.told = thread.told.max(at);
    }

    fn has_room(&mut self, tid: u32) -> bool {
        let has_room = self.threads.len() < MOST_THREADS || self.threads.contains_key(&tid);
        self.crowded += u64::from(!has_room);
        has_room
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "of whole nanoseconds")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 1_000_000 * MS;

    fn changed(line: &mut Timeline, tid: u32, at_ms: u64, state: State) -> Vec<Piece> {
        let mut pieces = Vec::new();
        line.change(tid, START + at_ms * MS, state, Some((7, 2.0)), &mut pieces);
        pieces
    }

    fn spent(line: &Timeline, state: State) -> f64 {
        line.spent()[state.index()] / ns(MS)
    }

    #[test]
    fn a_process_runs_if_a_thread_does_and_else_does_what_leads() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Running);
        changed(&mut line, 2, 100, State::Running);
        changed(&mut line, 1, 200, State::Lock);
        changed(&mut line, 2, 300, State::Queued);
        changed(&mut line, 2, 310, State::Io);
        line.advance(START + 400 * MS);
        assert_eq!(spent(&line, State::Running), 300.0);
        assert_eq!(spent(&line, State::Queued), 10.0);
        assert_eq!(
            spent(&line, State::Lock),
            90.0,
            "the first of two that did about as much"
        );
        assert_eq!(spent(&line, State::Io), 0.0);
    }

    #[test]
    fn who_uses_most_leads() {
        let mut line = Timeline::new(1, START);
        // The first thread waits for signals; a pool waits for work; the second works and waits for data.
        line.found(1, State::Asleep, false);
        for tid in 10..20 {
            line.found(tid, State::Lock, false);
        }
        line.advance(START + 100 * MS);
        assert_eq!(spent(&line, State::Asleep), 100.0);
        for round in 0..20 {
            changed(&mut line, 2, 100 + round * 100, State::Running);
            changed(&mut line, 2, 120 + round * 100, State::Io);
            // One of the pool does a little.
            changed(&mut line, 10, 120 + round * 100, State::Running);
            changed(&mut line, 10, 122 + round * 100, State::Lock);
        }
        line.advance(START + 2100 * MS);
        assert_eq!(spent(&line, State::Running), 440.0);
        assert!(spent(&line, State::Io) > 1400.0, "{:?}", line.spent());
        assert!(spent(&line, State::Lock) < 1.0, "{:?}", line.spent());
        // Long after, what it used counts for little, and it leads until others use more.
        changed(&mut line, 3, 60_000, State::Running);
        changed(&mut line, 3, 60_200, State::Driver);
        line.advance(START + 60_300 * MS);
        assert_eq!(line.now(), State::Driver);
        line.gone(3, START + 60_400 * MS, &mut Vec::new());
        assert_eq!(line.now(), State::Io);
    }

    #[test]
    fn time_ends_with_the_last_thread() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Running);
        line.gone(1, START + 100 * MS, &mut Vec::new());
        line.advance(START + 500 * MS);
        assert!(line.has_ended());
        assert_eq!(spent(&line, State::Running), 100.0);
        assert_eq!(line.spent().iter().sum::<f64>(), ns(100 * MS));
        changed(&mut line, 2, 600, State::Running);
        line.advance(START + 700 * MS);
        assert_eq!(spent(&line, State::Running), 200.0);
    }

    #[test]
    fn what_is_found_does_not_replace_what_was_told() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Io);
        line.found(1, State::Running, false);
        assert_eq!(line.now(), State::Io);
        line.found(1, State::Running, true);
        assert_eq!(line.now(), State::Running);
    }

    #[test]
    fn a_span_is_added_up_from_its_slots() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Running);
        changed(&mut line, 1, 25, State::Io);
        line.advance(START + 100 * MS);
        let found = line.spent_in(START + 20 * MS, START + 50 * MS, |_| false);
        assert_eq!(found[State::Running.index()], ns(5 * MS));
        assert_eq!(found[State::Io.index()], ns(25 * MS));
        let found = line.spent_in(START + 20 * MS, START + 50 * MS, |at| at < START + 30 * MS);
        assert_eq!(found[State::Held.index()], ns(10 * MS));
        assert_eq!(found[State::Running.index()], 0.0);
        assert_eq!(line.spent_in(0, START, |_| false), [0.0; State::COUNT]);
    }

    #[test]
    fn a_stack_has_the_time_that_was_spent_on_it() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Lock);
        let mut pieces = Vec::new();
        line.advance(START + 300 * MS);
        line.tell_all(&mut pieces);
        pieces.extend(changed(&mut line, 1, 500, State::Running));
        let lengths: Vec<u64> = pieces
            .iter()
            .map(|piece| (piece.to_ns - piece.from_ns) / MS)
            .collect();
        assert_eq!(lengths, [300, 200]);
        assert!(
            pieces
                .iter()
                .all(|piece| (piece.stack, piece.stands_for) == (7, 2.0))
        );
        // One of a pool that waits on: no more than it lingers.
        changed(&mut line, 2, 500, State::Lock);
        let mut pieces = Vec::new();
        line.advance(START + 5000 * MS);
        line.gone(2, START + 5000 * MS, &mut pieces);
        assert_eq!(pieces[0].to_ns - pieces[0].from_ns, LINGER_NS);
    }

    #[test]
    fn what_nobody_sees_is_no_time_of_any_state() {
        let mut line = Timeline::new(1, START);
        changed(&mut line, 1, 0, State::Lock);
        changed(&mut line, 2, 0, State::Running);
        let mut pieces = Vec::new();
        line.lose_sight(START + 100 * MS, &mut pieces);
        // What was on a stack until then, and no longer.
        assert!(!pieces.is_empty() && pieces.iter().all(|piece| piece.to_ns == START + 100 * MS));
        line.advance(START + 900 * MS);
        // A change on the way to being seen again is newer than what was found.
        changed(&mut line, 2, 950, State::Io);
        line.see_again(START + 1000 * MS, &[(1, State::Lock), (2, State::Running)]);
        line.advance(START + 1200 * MS);
        assert_eq!(spent(&line, State::Running), 100.0);
        // The second thread has led before, and does so still.
        assert_eq!(spent(&line, State::Io), 200.0);
        assert_eq!(line.spent().iter().sum::<f64>(), ns(300 * MS));
        let seen = line.spent_in(START, START + 1200 * MS, |_| false);
        assert_eq!(seen.iter().sum::<f64>(), ns(300 * MS));
        // What ends unseen is gone when it is looked for again.
        line.lose_sight(START + 1200 * MS, &mut pieces);
        line.gone(1, START + 1300 * MS, &mut pieces);
        assert!(!line.has_ended());
        line.see_again(START + 1400 * MS, &[(2, State::Asleep)]);
        line.advance(START + 1500 * MS);
        assert_eq!(spent(&line, State::Asleep), 100.0);
    }

    proptest! {
        #[test]
        fn times_sum_to_the_wall(
            moments in proptest::collection::vec((0..5u32, 0..700_000_000u64, 0..10usize), 0..60),
            tail in 0..4_000_000_000u64,
        ) {
            let mut line = Timeline::new(1, START);
            let (mut now, mut pieces) = (START, Vec::new());
            line.found(77, State::Lock, false);
            for (tid, later, what) in moments {
                // Some come a little too late.
                now += later;
                let at = now.saturating_sub(u64::from(tid) * 1000);
                match State::ALL.get(what) {
                    Some(state) => line.change(tid, at, *state, Some((tid, 1.0)), &mut pieces),
                    None => line.gone(tid, at, &mut pieces),
                }
                let runnable = line.threads.values().filter(|thread| thread.state.is_runnable()).count();
                prop_assert_eq!((line.running + line.queued) as usize, runnable);
                prop_assert!(line.lingering.len() + runnable <= line.threads.len());
                prop_assert!(line.leads.is_none_or(|tid| tid == 1 || line.threads.contains_key(&tid)));
            }
            line.advance(now + tail);
            let wall = ns(line.clock() - START);
            prop_assert!(line.clock() >= now + tail);
            prop_assert!((line.spent().iter().sum::<f64>() - wall).abs() < 1.0);
            // The slots tell the same of what they still have.
            let from = line.clock().saturating_sub(2_000_000_000).max(START);
            let recent: f64 = line.spent_in(from, line.clock(), |_| false).iter().sum();
            prop_assert!((recent - ns(line.clock() - from)).abs() <= 2.0 * ns(SLOT_NS));
            // No thread has more than the wall.
            for tid in 0..5 {
                let total: f64 = pieces
                    .iter()
                    .filter(|piece| piece.stack == tid)
                    .map(|piece| ns(piece.to_ns - piece.from_ns))
                    .sum();
                prop_assert!(total <= wall);
            }
            prop_assert!(line.grid.slots.len() <= MOST_SLOTS);
        }
    }
}
