//! What processes did while a GPU was idle: pure.
//!
//! NVML says how much of a span a GPU was used, not when within it; threads are known to the microsecond. So within a span
//! the idle time is taken to be spread evenly over what the process did, and beside that estimate go the least and the most
//! that is possible: if a GPU was idle for 60 ms of 100 and the process waited for 80 of them, it waited for at least 40 and
//! at most 60 ms of the idle time, and 48 is the estimate. Where a GPU was idle for a whole span, all three are the same.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::{
    gpu::{Gpu, Span, Use},
    state::State,
    timeline::{Piece, SLOT_NS, Sampled, Spent, Timeline, ns},
};

/// Time on stacks is kept in slots of this length until it is known how idle the GPU was in them.
const STACK_SLOT_NS: u64 = 100_000_000;
/// Such slots.
const MOST_STACK_SLOTS: usize = 100;
/// Stacks of processes that are told apart.
pub const MOST_STACKS: usize = 4096;
/// Spans in which a process was frozen on a GPU, as they are kept.
const MOST_FROZEN: usize = 1024;

/// Time of a process on a GPU, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// For which both are known: without what nobody saw of the threads.
    pub wall: f64,
    /// In which the process used the GPU.
    pub used: f64,
    /// In which others did.
    pub others: f64,
    /// In which nobody did.
    pub idle: f64,
    /// What the process did in all that time.
    pub time: Spent,
    /// What it did while the GPU was idle: the estimate.
    pub idle_in: Spent,
    /// The least that it can have been.
    pub least: Spent,
    /// The most.
    pub most: Spent,
}

impl Tally {
    /// Adds a span in which the process spent its time so.
    pub fn add(&mut self, span: &Span, pid: u32, time: &Spent) {
        let wall: f64 = time.iter().sum();
        if wall <= 0.0 {
            return;
        }
        let (busy, own) = (span.busy(), span.busy_by(pid).min(span.busy()));
        let idle = wall * (1.0 - busy);
        // Threads need not have been seen in all of the span, and the idle time may be where they were not.
        let length = span.length().max(wall);
        let all = length * (1.0 - busy);
        let (fewest, greatest) = ((all - (length - wall)).max(0.0), all.min(wall));
        self.wall += wall;
        self.used += wall * own;
        self.others += wall * (busy - own);
        self.idle += idle;
        for (at, spent) in time.iter().enumerate() {
            self.time[at] += spent;
            self.idle_in[at] += idle * spent / wall;
            self.least[at] += (fewest - (wall - spent)).max(0.0);
            self.most[at] += greatest.min(*spent);
        }
    }
}

/// Nanoseconds on stacks, by process and stack.
type OnStacks = HashMap<(u32, u32), f64>;

/// A process that is followed.
#[derive(Clone, Debug)]
struct Process {
    line: Timeline,
    /// GPUs on which it has, or had, a context.
    gpus: Vec<u32>,
    /// When it was frozen, by GPU.
    frozen: HashMap<u32, VecDeque<(u64, u64)>>,
}

/// All that is known, and what follows from it.
#[derive(Clone, Debug, Default)]
pub struct Correlator {
    processes: BTreeMap<u32, Process>,
    gpus: BTreeMap<u32, Gpu>,
    tallies: BTreeMap<(u32, u32), Tally>,
    /// Time on stacks, by process and stack, of which it is not known yet how idle the GPU was; with the number of the slot.
    pending: VecDeque<(u64, OnStacks)>,
    /// Nanoseconds on stacks while the GPU was idle.
    stacks: OnStacks,
    /// Time on stacks for which there was no room, or of which the GPU's use was never told.
    pub uncounted_ns: f64,
    clock: u64,
}

impl Correlator {
    /// Follows a process from a moment on.
    pub fn meet(&mut self, pid: u32, at_ns: u64) {
        self.processes.entry(pid).or_insert_with(|| Process {
            line: Timeline::new(pid, at_ns),
            gpus: Vec::new(),
            frozen: HashMap::new(),
        });
    }

    /// Whether a process is followed.
    pub fn knows(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }

    /// A thread as it was found; see [`Timeline::found`].
    pub fn found(&mut self, (pid, tid): (u32, u32), state: State, doubtful: bool) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.line.found(tid, state, doubtful);
        }
    }

    /// From now on nobody sees what the threads of a process do.
    pub fn lose_sight(&mut self, pid: u32, at_ns: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            let mut pieces = Vec::new();
            process.line.lose_sight(at_ns, &mut pieces);
            self.keep(pid, &pieces);
        }
    }

    /// What the threads of a process do is seen again from now on, when they were found so.
    pub fn see_again(&mut self, pid: u32, at_ns: u64, found: &[(u32, State)]) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.line.see_again(at_ns, found);
        }
    }

    /// A thread does something else, or has ended (`None`).
    pub fn change(
        &mut self,
        (pid, tid): (u32, u32),
        at_ns: u64,
        state: Option<State>,
        stack: Option<Sampled>,
    ) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let mut pieces = Vec::new();
        match state {
            Some(state) => process.line.change(tid, at_ns, state, stack, &mut pieces),
            None => process.line.gone(tid, at_ns, &mut pieces),
        }
        self.keep(pid, &pieces);
    }

    /// A thread was found running on a stack, which stands for a span that ends then.
    pub fn sampled(&mut self, pid: u32, at_ns: u64, stack: u32, period_ns: u64) {
        self.keep(
            pid,
            &[Piece {
                stack,
                from_ns: at_ns.saturating_sub(period_ns),
                to_ns: at_ns,
                stands_for: 1.0,
            }],
        );
    }

    /// A process has ended.
    pub fn end(&mut self, pid: u32, at_ns: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            let mut pieces = Vec::new();
            process.line.end(at_ns, &mut pieces);
            self.keep(pid, &pieces);
        }
    }

    /// A process has a context on a GPU.
    pub fn uses(&mut self, gpu: u32, pid: u32) {
        if let Some(process) = self.processes.get_mut(&pid)
            && !process.gpus.contains(&gpu)
        {
            process.gpus.push(gpu);
            self.gpus.entry(gpu).or_default();
        }
    }

    /// GPUs of which use is to be told.
    pub fn gpus(&self) -> impl Iterator<Item = (u32, &Gpu)> {
        self.gpus.iter().map(|(index, gpu)| (*index, gpu))
    }

    /// A process was frozen on a GPU in a span.
    pub fn frozen(&mut self, gpu: u32, pid: u32, from_ns: u64, to_ns: u64) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let spans = process.frozen.entry(gpu).or_default();
        match spans.back_mut() {
            Some((_, to)) if *to >= from_ns => *to = to_ns.max(*to),
            _ => spans.push_back((from_ns, to_ns)),
        }
        if spans.len() > MOST_FROZEN {
            spans.pop_front();
        }
    }

    /// Nothing was told of the use of a GPU, which was at work.
    pub fn missed(&mut self, gpu: u32, known_ns: u64) {
        if let Some(gpu) = self.gpus.get_mut(&gpu) {
            gpu.missed(known_ns);
        }
        self.settle();
    }

    /// What was told of the use of a GPU.
    pub fn told(&mut self, gpu: u32, known_ns: u64, uses: &[Use]) {
        if let Some(gpu) = self.gpus.get_mut(&gpu) {
            gpu.told(known_ns, uses);
        }
        self.settle();
    }

    /// Threads are known up to a moment.
    pub fn advance(&mut self, to_ns: u64) {
        self.clock = self.clock.max(to_ns);
        let mut told = Vec::new();
        for (pid, process) in &mut self.processes {
            process.line.advance(to_ns);
            let mut pieces = Vec::new();
            process.line.tell_all(&mut pieces);
            if !pieces.is_empty() {
                told.push((*pid, pieces));
            }
        }
        for (pid, pieces) in told {
            self.keep(pid, &pieces);
        }
        self.settle();
    }

    /// Up to when the use of all GPUs is known of which anything is; `None` if there is none.
    pub fn known_ns(&self) -> Option<u64> {
        self.gpus.values().filter_map(Gpu::known_ns).min()
    }

    /// Keeps time on stacks until it is known how idle the GPU was.
    fn keep(&mut self, pid: u32, pieces: &[Piece]) {
        for piece in pieces {
            let mut at = piece.from_ns;
            while at < piece.to_ns {
                let slot = at / STACK_SLOT_NS;
                let until = piece.to_ns.min((slot + 1) * STACK_SLOT_NS);
                let time = ns(until - at) * piece.stands_for;
                at = until;
                let place = self.pending.partition_point(|(number, _)| *number < slot);
                if self
                    .pending
                    .get(place)
                    .is_none_or(|(number, _)| *number != slot)
                {
                    self.pending.insert(place, (slot, HashMap::new()));
                }
                let Some((_, times)) = self.pending.get_mut(place) else {
                    continue;
                };
                let key = (pid, piece.stack);
                if times.len() < MOST_STACKS || times.contains_key(&key) {
                    *times.entry(key).or_default() += time;
                } else {
                    self.uncounted_ns += time;
                }
            }
        }
        while self.pending.len() > MOST_STACK_SLOTS {
            if let Some((_, times)) = self.pending.pop_front() {
                self.uncounted_ns += times.values().sum::<f64>();
            }
        }
    }

    fn settle(&mut self) {
        // A slot that goes on would count as if it were over.
        let over = self.clock / SLOT_NS * SLOT_NS;
        for (index, gpu) in &mut self.gpus {
            for span in gpu.settle(over) {
                for (pid, process) in &self.processes {
                    let frozen = process.frozen.get(index);
                    let held = |at: u64| {
                        frozen.is_some_and(|spans| {
                            let after = spans.partition_point(|(from, _)| *from <= at);
                            after
                                .checked_sub(1)
                                .and_then(|before| spans.get(before))
                                .is_some_and(|(_, to)| at < *to)
                        })
                    };
                    let time = process.line.spent_in(span.from_ns, span.to_ns, held);
                    self.tallies
                        .entry((*index, *pid))
                        .or_default()
                        .add(&span, *pid, &time);
                }
            }
        }
        let Some(known) = self.known_ns() else {
            return;
        };
        while self
            .pending
            .front()
            .is_some_and(|(slot, _)| (slot + 1) * STACK_SLOT_NS <= known)
        {
            let Some((slot, times)) = self.pending.pop_front() else {
                break;
            };
            let idle = |gpu: &Gpu| gpu.idle_in(slot * STACK_SLOT_NS, (slot + 1) * STACK_SLOT_NS);
            for ((pid, stack), time) in times {
                let own = self
                    .processes
                    .get(&pid)
                    .map_or(&[][..], |found| &found.gpus);
                // Who has no context works for those who have.
                let parts: Vec<f64> = self
                    .gpus
                    .iter()
                    .filter(|(index, _)| own.is_empty() || own.contains(index))
                    .filter_map(|(_, gpu)| idle(gpu))
                    .collect();
                let has_room = self.stacks.len() < MOST_STACKS;
                if parts.is_empty() || !(has_room || self.stacks.contains_key(&(pid, stack))) {
                    self.uncounted_ns += time;
                    continue;
                }
                let mean = parts.iter().sum::<f64>() / ns(parts.len() as u64);
                *self.stacks.entry((pid, stack)).or_default() += time * mean;
            }
        }
    }

    /// The tallies by GPU and process, and whether the process has a context there.
    pub fn tallies(&self) -> impl Iterator<Item = (u32, u32, bool, &Tally)> {
        self.tallies.iter().map(|((gpu, pid), tally)| {
            let has_context = self
                .processes
                .get(pid)
                .is_some_and(|process| process.gpus.contains(gpu));
            (*gpu, *pid, has_context, tally)
        })
    }

    /// Nanoseconds on each stack while the GPU was idle, by process and stack.
    pub fn stacks(&self) -> impl Iterator<Item = (u32, u32, f64)> {
        self.stacks
            .iter()
            .map(|((pid, stack), time)| (*pid, *stack, *time))
    }

    /// Changes of threads for which there was no room.
    pub fn crowded(&self) -> u64 {
        self.processes
            .values()
            .map(|process| process.line.crowded)
            .sum()
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "of whole milliseconds")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 10_000_000 * MS;

    fn at(ms: u64) -> u64 {
        START + ms * MS
    }

    fn used(pid: u32, from: u64, to: u64, percent: u64) -> Use {
        Use {
            pid,
            from_ns: at(from),
            to_ns: at(to),
            busy_ns: (to - from) * MS * percent / 100,
        }
    }

    fn looking() -> Correlator {
        let mut all = Correlator::default();
        all.meet(1, START);
        all.uses(0, 1);
        all.told(0, START, &[]);
        all
    }

    fn tally(all: &Correlator, pid: u32) -> Tally {
        all.tallies()
            .find(|(_, found, ..)| *found == pid)
            .map(|(.., tally)| tally.clone())
            .unwrap_or_default()
    }

    fn ms(times: &Spent, state: State) -> f64 {
        (times[state.index()] / ns(MS)).round()
    }

    #[test]
    fn idle_time_is_what_the_process_did_then() {
        let mut all = looking();
        all.change((1, 1), at(0), Some(State::Running), None);
        all.change((1, 1), at(100), Some(State::Lock), Some((5, 1.0)));
        all.advance(at(200));
        all.told(0, at(200), &[used(1, 0, 100, 100)]);
        let found = tally(&all, 1);
        assert_eq!(ms(&found.idle_in, State::Lock), 100.0);
        assert_eq!(ms(&found.least, State::Lock), 100.0);
        assert_eq!(ms(&found.idle_in, State::Running), 0.0);
        assert_eq!((found.used / ns(MS)).round(), 100.0);
        let stacks: Vec<(u32, u32, f64)> = all.stacks().collect();
        assert_eq!(stacks, [(1, 5, ns(100 * MS))]);
    }

    #[test]
    fn what_is_not_known_within_a_span_is_said() {
        // The example of the module's own words.
        let mut all = looking();
        all.change((1, 1), at(0), Some(State::Io), None);
        all.change((1, 1), at(80), Some(State::Running), None);
        all.advance(at(100));
        all.told(0, at(100), &[used(1, 0, 100, 30), used(2, 0, 100, 10)]);
        let found = tally(&all, 1);
        assert_eq!(ms(&found.idle_in, State::Io), 48.0);
        assert_eq!(ms(&found.least, State::Io), 40.0);
        assert_eq!(ms(&found.most, State::Io), 60.0);
        assert_eq!((found.others / ns(MS)).round(), 10.0);
    }

    #[test]
    fn bounds_know_of_what_nobody_saw() {
        // Seen for 50 ms of 100, of which the GPU was idle for 60: for 10 to 50 ms while somebody saw.
        let mut all = looking();
        all.change((1, 1), at(0), Some(State::Io), None);
        all.lose_sight(1, at(50));
        all.advance(at(100));
        all.told(0, at(100), &[used(1, 0, 100, 40)]);
        let found = tally(&all, 1);
        assert_eq!((found.wall / ns(MS)).round(), 50.0);
        assert_eq!(ms(&found.idle_in, State::Io), 30.0);
        assert_eq!(ms(&found.least, State::Io), 10.0);
        assert_eq!(ms(&found.most, State::Io), 50.0);
        all.see_again(1, at(110), &[(1, State::Lock)]);
        all.advance(at(200));
        all.told(0, at(200), &[]);
        assert_eq!(ms(&tally(&all, 1).idle_in, State::Lock), 90.0);
    }

    #[test]
    fn frozen_on_the_gpu_is_held_whatever_threads_do() {
        let mut all = looking();
        all.change((1, 1), at(0), Some(State::Running), None);
        all.frozen(0, 1, at(20), at(40));
        all.frozen(0, 1, at(40), at(60));
        all.advance(at(100));
        all.told(0, at(100), &[]);
        let found = tally(&all, 1);
        assert_eq!(ms(&found.idle_in, State::Held), 40.0);
        assert_eq!(ms(&found.idle_in, State::Running), 60.0);
    }

    #[test]
    fn a_helper_without_a_context_is_told_beside() {
        let mut all = looking();
        all.meet(2, at(50));
        all.change((2, 2), at(50), Some(State::Io), Some((9, 3.0)));
        all.advance(at(100));
        all.told(0, at(100), &[]);
        let found = tally(&all, 2);
        assert_eq!(ms(&found.idle_in, State::Io), 50.0);
        assert!(
            all.tallies()
                .any(|(_, pid, has_context, _)| pid == 2 && !has_context)
        );
        let stacks: Vec<(u32, u32, f64)> = all.stacks().collect();
        assert_eq!(stacks, [(2, 9, ns(150 * MS))]);
    }

    #[test]
    fn a_gpu_of_which_nothing_is_told_holds_up_nothing() {
        let mut all = looking();
        all.uses(3, 1);
        all.change((1, 1), at(0), Some(State::Io), Some((9, 1.0)));
        all.advance(at(100));
        all.told(0, at(100), &[]);
        assert_eq!(all.known_ns(), Some(at(100)));
        let stacks: Vec<(u32, u32, f64)> = all.stacks().collect();
        assert_eq!(stacks, [(1, 9, ns(100 * MS))]);
    }

    #[test]
    fn room_is_bounded() {
        let mut all = looking();
        for stack in 0..2 * u32::try_from(MOST_STACKS).expect("small") {
            all.sampled(1, at(50), stack, MS);
        }
        assert_eq!(all.uncounted_ns, ns(MS * MOST_STACKS as u64));
        for slot in 0..3 * MOST_STACK_SLOTS as u64 {
            all.sampled(1, at(50 + 100 * slot), 1, MS);
        }
        assert!(all.pending.len() <= MOST_STACK_SLOTS);
    }

    proptest! {
        #[test]
        fn parts_sum_to_the_whole(
            moments in proptest::collection::vec((0..4u32, 0..60u64, 0..State::COUNT), 1..80),
            uses in proptest::collection::vec((1..4u32, 0..101u64), 0..40),
        ) {
            let mut all = looking();
            let mut now = 0;
            for (tid, later, state) in moments {
                now += later;
                all.change((1, tid), at(now), Some(State::ALL[state]), Some((tid, 1.0)));
            }
            let until = now + 500;
            all.advance(at(until + 10));
            let uses: Vec<Use> = uses
                .into_iter()
                .enumerate()
                .map(|(span, (pid, percent))| used(pid, span as u64 * 100, span as u64 * 100 + 100, percent))
                .filter(|one| one.to_ns <= at(until))
                .collect();
            all.told(0, at(until), &uses);
            let found = tally(&all, 1);
            let near = |a: f64, b: f64| (a - b).abs() < 1000.0;
            let known = all.known_ns().expect("told") - START;
            prop_assert!(until * MS - known < 20 * MS);
            prop_assert!(near(found.wall, ns(known)), "{found:?}");
            prop_assert!(near(found.used + found.others + found.idle, found.wall), "{found:?}");
            prop_assert!(near(found.time.iter().sum(), found.wall), "{found:?}");
            prop_assert!(near(found.idle_in.iter().sum(), found.idle), "{found:?}");
            for state in 0..State::COUNT {
                prop_assert!(found.least[state] <= found.idle_in[state] + 1.0);
                prop_assert!(found.idle_in[state] <= found.most[state] + 1.0);
                prop_assert!(found.most[state] <= found.time[state] + 1.0);
            }
            let on_stacks: f64 = all.stacks().map(|(.., time)| time).sum::<f64>() + all.uncounted_ns;
            prop_assert!(on_stacks <= 5.0 * ns(until * MS));
        }
    }
}
