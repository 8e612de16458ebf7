//! The GPU's time: channel groups that take turns on one engine, in virtual time.
//!
//! What is modelled, with its source in `docs/` (measurements, section 4): a round-robin list of the groups
//! that have work, a time slice per group, about 0.2 ms for a switch from one group to another, slices
//! under about 450 µs rounded up, and channels that can be disabled. A group whose work ends gives the
//! rest of its slice away, and an engine is never idle while an enabled channel has work.
//!
//! What is not: kernels of one group that overlap, and the memory system. A kernel is a length of time.
//!
//! Nothing here reads a clock. [`Scheduler::advance`] runs the model to a point in time, and gives the same
//! result in one step or in many.

use std::collections::{BTreeMap, VecDeque};

use crate::side::MARK_NS;

/// A channel group: client handle and object handle.
pub type GroupId = (u32, u32);

/// Costs that the recorded hardware showed.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Nanoseconds that a switch from one group to another takes.
    pub switch_ns: u64,
    /// Shortest slice in nanoseconds; shorter ones are rounded up to it.
    pub min_slice_ns: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            switch_ns: 200_000,
            min_slice_ns: 450_000,
        }
    }
}

/// Length of one entry of the utilisation history, nanoseconds.
pub const BUCKET_NS: u64 = 100_000_000;
/// Marks of a channel that are remembered.
const MARKS_KEPT: usize = 4096;
/// Entries of the history that are kept.
const BUCKETS_KEPT: usize = 100;

/// One span of [`BUCKET_NS`]: how long each process ran in it.
#[derive(Clone, Debug, Default)]
pub struct Bucket {
    /// Which span: start divided by [`BUCKET_NS`].
    pub index: u64,
    /// Nanoseconds of engine time by process.
    pub busy: BTreeMap<u32, u64>,
}

#[derive(Debug)]
struct Job {
    order: u64,
    each_ns: u64,
    /// Kernels not finished, including the one in progress.
    left: u64,
    /// Nanoseconds of the kernel in progress that are still to run.
    current_ns: u64,
}

impl Job {
    fn total_ns(&self) -> u64 {
        self.current_ns
            .saturating_add(self.each_ns.saturating_mul(self.left - 1))
    }
}

#[derive(Debug, Default)]
struct Channel {
    disabled: bool,
    submitted: u64,
    completed: u64,
    fault: Option<u32>,
    jobs: VecDeque<Job>,
    /// Marks that were reached: kernel number and time, oldest first.
    marks: VecDeque<(u64, u64)>,
}

#[derive(Debug)]
struct Group {
    owner: u32,
    slice_us: u64,
    channels: BTreeMap<u32, Channel>,
    listed: bool,
}

impl Group {
    /// The channel whose work comes first.
    fn head(&self) -> Option<u32> {
        self.channels
            .iter()
            .filter(|(_, channel)| !channel.disabled)
            .filter_map(|(handle, channel)| channel.jobs.front().map(|job| (job.order, *handle)))
            .min()
            .map(|(_, handle)| handle)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Idle,
    Switching { to: GroupId, until: u64 },
    Running { group: GroupId, slice_end: u64 },
}

/// How far a channel's work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Kernels handed in since the channel was made.
    pub submitted: u64,
    /// Kernels finished.
    pub completed: u64,
    /// The Xid that stopped the channel; its work is lost.
    pub fault: Option<u32>,
}

/// One GPU's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    timing: Timing,
    now: u64,
    order: u64,
    groups: BTreeMap<GroupId, Group>,
    /// Groups that have work and do not run, in turn.
    runlist: VecDeque<GroupId>,
    engine: Engine,
    /// Whose state the engine holds: going on with it costs no switch.
    loaded: Option<GroupId>,
    switches: u64,
    switching_ns: u64,
    busy: BTreeMap<u32, u64>,
    history: VecDeque<Bucket>,
}

impl Scheduler {
    /// An idle engine at time 0.
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            now: 0,
            order: 0,
            groups: BTreeMap::new(),
            runlist: VecDeque::new(),
            engine: Engine::Idle,
            loaded: None,
            switches: 0,
            switching_ns: 0,
            busy: BTreeMap::new(),
            history: VecDeque::new(),
        }
    }

    /// The time to which the model has run, nanoseconds.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Adds a group of process `owner`.
    pub fn add_group(&mut self, id: GroupId, owner: u32, slice_us: u64) {
        self.groups.insert(
            id,
            Group {
                owner,
                slice_us,
                channels: BTreeMap::new(),
                listed: false,
            },
        );
    }

    /// Adds a channel to a group that exists.
    pub fn add_channel(&mut self, id: GroupId, channel: u32) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.channels.insert(channel, Channel::default());
        }
    }

    /// Takes a channel away; its work is lost.
    pub fn remove_channel(&mut self, id: GroupId, channel: u32) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.channels.remove(&channel);
        }
        self.settle(id);
    }

    /// Takes a group away with all its work.
    pub fn remove_group(&mut self, id: GroupId) {
        self.groups.remove(&id);
        self.runlist.retain(|listed| *listed != id);
        if self.loaded == Some(id) {
            self.loaded = None;
        }
        self.settle(id);
    }

    /// Time slice of a group in microseconds, as it was set.
    pub fn slice_us(&self, id: GroupId) -> Option<u64> {
        self.groups.get(&id).map(|group| group.slice_us)
    }

    /// Number of channels of a group.
    pub fn channel_count(&self, id: GroupId) -> usize {
        self.groups.get(&id).map_or(0, |group| group.channels.len())
    }

    /// Sets a group's time slice. It holds at once, also for the slice in progress.
    pub fn set_slice_us(&mut self, id: GroupId, slice_us: u64) {
        let now = self.now;
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let before = group.slice_us;
        group.slice_us = slice_us;
        if let Engine::Running {
            group: running,
            slice_end,
        } = self.engine
            && running == id
        {
            let used = self
                .slice_ns(before)
                .saturating_sub(slice_end.saturating_sub(now));
            let slice_end = now + self.slice_ns(slice_us).saturating_sub(used);
            self.engine = Engine::Running {
                group: id,
                slice_end,
            };
        }
    }

    /// Disables or enables a channel; false if there is none.
    pub fn set_disabled(&mut self, id: GroupId, channel: u32, disabled: bool) -> bool {
        let Some(channel) = self
            .groups
            .get_mut(&id)
            .and_then(|group| group.channels.get_mut(&channel))
        else {
            return false;
        };
        channel.disabled = disabled;
        self.settle(id);
        true
    }

    /// Whether a channel is disabled.
    pub fn is_disabled(&self, id: GroupId, channel: u32) -> bool {
        self.groups
            .get(&id)
            .and_then(|group| group.channels.get(&channel))
            .is_some_and(|channel| channel.disabled)
    }

    /// Ends the slice of a group that runs.
    pub fn preempt(&mut self, id: GroupId) {
        if let Engine::Running { group, .. } = self.engine
            && group == id
        {
            self.engine = Engine::Running {
                group,
                slice_end: self.now,
            };
        }
    }

    /// Hands in `count` kernels of `each_ns` nanoseconds; returns the channel's number of the last one,
    /// or `None` without such a channel. Kernels for a channel with a fault are dropped.
    pub fn submit(&mut self, id: GroupId, channel: u32, each_ns: u64, count: u64) -> Option<u64> {
        let newest = self.order;
        let channel = self.groups.get_mut(&id)?.channels.get_mut(&channel)?;
        channel.submitted += count;
        let last = channel.submitted;
        if count == 0 {
            return Some(last);
        }
        if channel.fault.is_some() {
            channel.completed = last;
            return Some(last);
        }
        let each_ns = each_ns.max(1);
        match channel.jobs.back_mut() {
            // Nothing came in between, so it runs as if it were one longer job.
            Some(job) if job.each_ns == each_ns && job.order == newest => job.left += count,
            _ => {
                self.order += 1;
                channel.jobs.push_back(Job {
                    order: self.order,
                    each_ns,
                    left: count,
                    current_ns: each_ns,
                });
            }
        }
        self.settle(id);
        Some(last)
    }

    /// How far a channel is.
    pub fn progress(&self, id: GroupId, channel: u32) -> Option<Progress> {
        let channel = self.groups.get(&id)?.channels.get(&channel)?;
        Some(Progress {
            submitted: channel.submitted,
            completed: channel.completed,
            fault: channel.fault,
        })
    }

    /// When a mark on a channel was reached.
    pub fn mark(&self, id: GroupId, channel: u32, number: u64) -> Option<u64> {
        let channel = self.groups.get(&id)?.channels.get(&channel)?;
        channel
            .marks
            .iter()
            .find(|(mark, _)| *mark == number)
            .map(|(_, at)| *at)
    }

    /// Stops all channels of a process for good, as the driver does after an Xid; their work is lost.
    pub fn fault(&mut self, owner: u32, xid: u32) {
        let hit: Vec<GroupId> = self
            .groups
            .iter()
            .filter(|(_, group)| group.owner == owner)
            .map(|(id, _)| *id)
            .collect();
        for id in hit {
            if let Some(group) = self.groups.get_mut(&id) {
                for channel in group.channels.values_mut() {
                    channel.fault = Some(xid);
                    channel.jobs.clear();
                    channel.completed = channel.submitted;
                }
            }
            self.settle(id);
        }
    }

    /// Engine time used so far by process, nanoseconds. Processes that are gone are kept.
    pub fn busy(&self) -> &BTreeMap<u32, u64> {
        &self.busy
    }

    /// Number of switches and the time they took, nanoseconds.
    pub fn switches(&self) -> (u64, u64) {
        (self.switches, self.switching_ns)
    }

    /// The last spans of utilisation, oldest first; spans without work are left out.
    pub fn history(&self) -> impl Iterator<Item = &Bucket> {
        self.history.iter()
    }

    /// When the state changes next by itself: a slice, a switch or a kernel ends. `None` while idle.
    ///
    /// With `(group, channel, number)` also the moment at which that kernel ends, if it is in progress.
    pub fn next_event(&self, watch: Option<(GroupId, u32, u64)>) -> Option<u64> {
        match self.engine {
            Engine::Idle => None,
            Engine::Switching { until, .. } => Some(until),
            Engine::Running { group, slice_end } => {
                let entry = self.groups.get(&group)?;
                let head = entry.head()?;
                let channel = &entry.channels[&head];
                let job = channel.jobs.front()?;
                let mut at = self.now.saturating_add(job.total_ns());
                if let Some((watched, watched_channel, number)) = watch
                    && (watched, watched_channel) == (group, head)
                    && number > channel.completed
                    && number <= channel.completed + job.left
                {
                    let before = number - channel.completed - 1;
                    let run = job.current_ns + job.each_ns.saturating_mul(before);
                    at = at.min(self.now.saturating_add(run));
                }
                if !self.runlist.is_empty() {
                    at = at.min(slice_end.max(self.now));
                }
                Some(at)
            }
        }
    }

    /// Runs the model to `to` nanoseconds.
    pub fn advance(&mut self, to: u64) {
        loop {
            match self.engine {
                Engine::Idle => {
                    let Some(next) = self.pop_runnable() else {
                        self.now = self.now.max(to);
                        return;
                    };
                    if self.loaded == Some(next) {
                        self.start(next);
                    } else {
                        self.switches += 1;
                        self.engine = Engine::Switching {
                            to: next,
                            until: self.now + self.timing.switch_ns,
                        };
                    }
                }
                Engine::Switching { to: next, until } => {
                    let end = until.min(to.max(self.now));
                    self.switching_ns += end - self.now;
                    self.now = end;
                    if until > end {
                        return;
                    }
                    self.loaded = Some(next);
                    self.start(next);
                }
                Engine::Running { group, slice_end } => {
                    if self.groups.get(&group).and_then(Group::head).is_none() {
                        self.engine = Engine::Idle;
                        continue;
                    }
                    let mut slice_end = slice_end;
                    if self.runlist.is_empty() {
                        // Nobody waits: an elapsed slice starts again.
                        let slice = self.group_slice_ns(group);
                        if slice_end <= self.now {
                            slice_end += ((self.now - slice_end) / slice + 1) * slice;
                            self.engine = Engine::Running { group, slice_end };
                        }
                        if self.now >= to {
                            return;
                        }
                        self.run(group, slice_end.min(to));
                    } else if slice_end <= self.now {
                        self.enlist(group);
                        self.engine = Engine::Idle;
                    } else if self.now >= to {
                        return;
                    } else {
                        self.run(group, slice_end.min(to));
                    }
                }
            }
        }
    }

    fn slice_ns(&self, slice_us: u64) -> u64 {
        slice_us
            .saturating_mul(1000)
            .max(self.timing.min_slice_ns)
            .max(1)
    }

    fn group_slice_ns(&self, id: GroupId) -> u64 {
        self.slice_ns(self.groups.get(&id).map_or(0, |group| group.slice_us))
    }

    fn start(&mut self, id: GroupId) {
        self.engine = Engine::Running {
            group: id,
            slice_end: self.now.saturating_add(self.group_slice_ns(id)),
        };
    }

    fn pop_runnable(&mut self) -> Option<GroupId> {
        while let Some(id) = self.runlist.pop_front() {
            if let Some(group) = self.groups.get_mut(&id) {
                group.listed = false;
                if group.head().is_some() {
                    return Some(id);
                }
            }
        }
        None
    }

    fn enlist(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id)
            && !group.listed
        {
            group.listed = true;
            self.runlist.push_back(id);
        }
    }

    /// Brings runlist and engine in line after `id` got or lost work.
    fn settle(&mut self, id: GroupId) {
        let runnable = self.groups.get(&id).and_then(Group::head).is_some();
        let on_engine = match self.engine {
            Engine::Idle => false,
            Engine::Switching { to, .. } => to == id,
            Engine::Running { group, .. } => group == id,
        };
        if on_engine {
            if !runnable {
                self.engine = Engine::Idle;
            }
        } else if runnable {
            self.enlist(id);
        } else if let Some(group) = self.groups.get_mut(&id)
            && group.listed
        {
            group.listed = false;
            self.runlist.retain(|listed| *listed != id);
        }
    }

    /// Runs the first job of the group on the engine, to `limit` at most.
    fn run(&mut self, id: GroupId, limit: u64) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let owner = group.owner;
        let Some(channel) = group.head().and_then(|head| group.channels.get_mut(&head)) else {
            return;
        };
        let Some(job) = channel.jobs.front_mut() else {
            return;
        };
        let span = job.total_ns().min(limit - self.now);
        if span < job.current_ns {
            job.current_ns -= span;
        } else {
            let rest = span - job.current_ns;
            let done = (1 + rest / job.each_ns).min(job.left);
            channel.completed += done;
            job.left -= done;
            job.current_ns = job.each_ns - rest % job.each_ns;
            let end = self.now + span;
            if job.each_ns == MARK_NS {
                for earlier in (0..done).rev() {
                    let number = channel.completed - earlier;
                    channel.marks.push_back((number, end - earlier * MARK_NS));
                    if channel.marks.len() > MARKS_KEPT {
                        channel.marks.pop_front();
                    }
                }
            }
            if job.left == 0 {
                channel.jobs.pop_front();
            }
        }
        let start = self.now;
        self.now += span;
        self.account(owner, start, self.now);
    }

    fn account(&mut self, owner: u32, mut start: u64, end: u64) {
        *self.busy.entry(owner).or_default() += end - start;
        while start < end {
            let index = start / BUCKET_NS;
            let stop = end.min((index + 1) * BUCKET_NS);
            if self.history.back().is_none_or(|last| last.index != index) {
                self.history.push_back(Bucket {
                    index,
                    busy: BTreeMap::new(),
                });
                if self.history.len() > BUCKETS_KEPT {
                    self.history.pop_front();
                }
            }
            if let Some(bucket) = self.history.back_mut() {
                *bucket.busy.entry(owner).or_default() += stop - start;
            }
            start = stop;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;
    const A: GroupId = (1, 1);
    const B: GroupId = (2, 1);
    const CHANNEL: u32 = 9;
    /// Kernels like those of the recording: 1,967 a second alone.
    const KERNEL: u64 = SECOND / 1967;

    fn scheduler(slices: &[(GroupId, u64)]) -> Scheduler {
        let mut scheduler = Scheduler::new(Timing::default());
        for (id, slice) in slices {
            scheduler.add_group(*id, id.0, *slice);
            scheduler.add_channel(*id, CHANNEL);
        }
        scheduler
    }

    fn completed(scheduler: &Scheduler, id: GroupId) -> u64 {
        scheduler.progress(id, CHANNEL).unwrap().completed
    }

    /// Kernels a second of two groups that never run out of work.
    fn rates(slice_a: u64, slice_b: u64) -> (f64, f64) {
        let mut scheduler = scheduler(&[(A, slice_a), (B, slice_b)]);
        for id in [A, B] {
            scheduler.submit(id, CHANNEL, KERNEL, 1_000_000);
        }
        scheduler.advance(20 * SECOND);
        let rate = |id| f64::from(u32::try_from(completed(&scheduler, id)).unwrap()) / 20.0;
        (rate(A), rate(B))
    }

    /// The table of `docs/`, measurements, section 4: share of the first in percent, sum against alone.
    #[test]
    fn shares_are_those_of_the_recorded_card() {
        for (slice_a, slice_b, share, together) in [
            (1000, 1000, 50.0, Some(84.0)),
            (1000, 3000, 25.0, Some(91.0)),
            (500, 4500, 10.0, Some(93.0)),
            (2000, 18000, 9.9, Some(99.0)),
            // Rounded up to about 450 µs. The sums of these two lie above one kernel at a time.
            (300, 2700, 14.3, None),
            (100, 900, 33.0, None),
            // Nothing set, and the matrix multiplications.
            (2048, 2048, 50.0, Some(89.0)),
            (1500, 3500, 29.5, Some(91.0)),
        ] {
            let (a, b) = rates(slice_a, slice_b);
            let got = 100.0 * a / (a + b);
            assert!(
                (got - share).abs() < 1.0,
                "{slice_a}:{slice_b} share {got:.1}"
            );
            if let Some(together) = together {
                let got = 100.0 * (a + b) / 1967.0;
                assert!(
                    (got - together).abs() < 2.5,
                    "{slice_a}:{slice_b} sum {got:.1}"
                );
            }
        }
    }

    /// 20 kernels of 25 µs and a wait, again and again, beside a neighbour that never ends.
    fn burst_ms(neighbour_slice: Option<u64>) -> f64 {
        let mut scheduler = scheduler(&[(A, 2048), (B, neighbour_slice.unwrap_or(2048))]);
        if neighbour_slice.is_some() {
            scheduler.submit(B, CHANNEL, KERNEL, 1_000_000);
        }
        let mut times = Vec::new();
        for _ in 0..100 {
            let start = scheduler.now();
            let last = scheduler.submit(A, CHANNEL, 25_000, 20).unwrap();
            while completed(&scheduler, A) < last {
                let at = scheduler
                    .next_event(Some((A, CHANNEL, last)))
                    .unwrap_or(start);
                scheduler.advance(at);
            }
            times.push(scheduler.now() - start);
        }
        times.sort_unstable();
        f64::from(u32::try_from(times[50]).unwrap()) / 1e6
    }

    #[test]
    fn a_victim_waits_as_on_the_recorded_card() {
        // The recording holds 0.04 ms of the application's own time.
        for (slice, recorded) in [(None, 0.54), (Some(2048), 2.96), (Some(1000), 1.88)] {
            let got = burst_ms(slice) + 0.04;
            assert!((got - recorded).abs() < 0.1, "{slice:?}: {got:.2} ms");
        }
    }

    #[test]
    fn a_lone_group_has_the_whole_engine() {
        let mut scheduler = scheduler(&[(A, 1000), (B, 1000)]);
        scheduler.submit(A, CHANNEL, KERNEL, 100_000);
        scheduler.advance(10 * SECOND);
        assert!(completed(&scheduler, A) >= 19_660);
        assert_eq!(scheduler.switches().0, 1);
    }

    #[test]
    fn a_disabled_channel_stands_still_and_goes_on() {
        let mut scheduler = scheduler(&[(A, 1000), (B, 1000)]);
        for id in [A, B] {
            scheduler.submit(id, CHANNEL, KERNEL, 1_000_000);
        }
        scheduler.advance(SECOND);
        assert!(scheduler.set_disabled(A, CHANNEL, true));
        let (a, b) = (completed(&scheduler, A), completed(&scheduler, B));
        scheduler.advance(2 * SECOND);
        assert_eq!(completed(&scheduler, A), a);
        assert!(completed(&scheduler, B) - b > 1950);
        scheduler.set_disabled(A, CHANNEL, false);
        scheduler.advance(3 * SECOND);
        assert!(completed(&scheduler, A) - a > 800);
    }

    #[test]
    fn a_new_slice_holds_at_once() {
        let mut scheduler = scheduler(&[(A, 1_000_000), (B, 1000)]);
        for id in [A, B] {
            scheduler.submit(id, CHANNEL, KERNEL, 1_000_000);
        }
        scheduler.advance(10 * MS);
        assert_eq!(completed(&scheduler, B), 0);
        scheduler.set_slice_us(A, 1000);
        scheduler.advance(12 * MS);
        assert!(completed(&scheduler, B) > 0);
    }

    #[test]
    fn preemption_ends_a_slice() {
        let mut scheduler = scheduler(&[(A, 1_000_000), (B, 1000)]);
        for id in [A, B] {
            scheduler.submit(id, CHANNEL, KERNEL, 1_000_000);
        }
        scheduler.advance(10 * MS);
        scheduler.preempt(A);
        scheduler.advance(11 * MS);
        assert!(completed(&scheduler, B) > 0);
    }

    #[test]
    fn a_fault_ends_a_process_and_no_other() {
        let mut scheduler = scheduler(&[(A, 1000), (B, 1000)]);
        for id in [A, B] {
            scheduler.submit(id, CHANNEL, KERNEL, 1000);
        }
        scheduler.advance(MS);
        scheduler.fault(A.0, 31);
        let progress = scheduler.progress(A, CHANNEL).unwrap();
        assert_eq!((progress.completed, progress.fault), (1000, Some(31)));
        scheduler.submit(A, CHANNEL, KERNEL, 5);
        scheduler.advance(2 * SECOND);
        assert_eq!(completed(&scheduler, B), 1000);
        assert!(scheduler.busy()[&A.0] < 2 * MS);
    }

    #[test]
    fn marks_tell_when_they_were_reached() {
        let mut scheduler = scheduler(&[(A, 1000)]);
        let start = scheduler.submit(A, CHANNEL, MARK_NS, 1).unwrap();
        scheduler.submit(A, CHANNEL, 25_000, 40);
        let end = scheduler.submit(A, CHANNEL, MARK_NS, 1).unwrap();
        scheduler.advance(SECOND);
        let at = |number| scheduler.mark(A, CHANNEL, number).unwrap();
        assert_eq!(at(end) - at(start), 40 * 25_000 + MARK_NS);
    }

    #[test]
    fn history_adds_up() {
        let mut scheduler = scheduler(&[(A, 1000)]);
        scheduler.submit(A, CHANNEL, MS, 250);
        scheduler.advance(SECOND);
        let spans: Vec<u64> = scheduler
            .history()
            .map(|bucket| bucket.busy[&A.0])
            .collect();
        assert_eq!(spans.iter().sum::<u64>(), 250 * MS);
        assert_eq!(spans[1], BUCKET_NS);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Advance(u64),
        Submit(u32, u64, u64),
        Slice(u32, u64),
        Disable(u32, bool),
        Preempt(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (1..20_000_000u64).prop_map(Op::Advance),
            (1..4u32, 1..3_000_000u64, 1..20u64).prop_map(|(g, ns, n)| Op::Submit(g, ns, n)),
            (1..4u32, 1..30_000u64).prop_map(|(g, us)| Op::Slice(g, us)),
            (1..4u32, any::<bool>()).prop_map(|(g, off)| Op::Disable(g, off)),
            (1..4u32).prop_map(Op::Preempt),
        ]
    }

    fn three() -> Scheduler {
        scheduler(&[((1, 1), 1000), ((2, 1), 2048), ((3, 1), 500)])
    }

    fn apply(scheduler: &mut Scheduler, op: &Op, steps: u64) {
        match *op {
            Op::Advance(ns) => {
                let end = scheduler.now() + ns;
                for step in 1..steps {
                    let at = end - ns + ns * step / steps;
                    scheduler.advance(at);
                }
                scheduler.advance(end);
            }
            Op::Submit(group, ns, count) => {
                scheduler.submit((group, 1), CHANNEL, ns, count).unwrap();
            }
            Op::Slice(group, us) => scheduler.set_slice_us((group, 1), us),
            Op::Disable(group, off) => {
                scheduler.set_disabled((group, 1), CHANNEL, off);
            }
            Op::Preempt(group) => scheduler.preempt((group, 1)),
        }
    }

    proptest! {
        #[test]
        fn the_engine_never_idles_beside_work(ops in prop::collection::vec(op(), 1..60)) {
            let mut scheduler = three();
            let mut handed_in = BTreeMap::new();
            let mut enabled = [true; 4];
            for op in &ops {
                let used = |scheduler: &Scheduler, group| {
                    scheduler.busy().get(&group).copied().unwrap_or(0)
                };
                let work: u64 = (1..4u32)
                    .filter(|group| enabled[*group as usize])
                    .map(|group| handed_in.get(&group).copied().unwrap_or(0) - used(&scheduler, group))
                    .sum();
                let total = |scheduler: &Scheduler| {
                    scheduler.busy().values().sum::<u64>() + scheduler.switches().1
                };
                let before = total(&scheduler);
                apply(&mut scheduler, op, 1);
                match op {
                    Op::Submit(group, ns, count) => {
                        *handed_in.entry(*group).or_insert(0) += ns * count;
                    }
                    Op::Disable(group, off) => enabled[*group as usize] = !off,
                    Op::Advance(ns) => {
                        let done = total(&scheduler) - before;
                        prop_assert!(done <= *ns);
                        if work >= *ns {
                            prop_assert_eq!(done, *ns);
                        }
                    }
                    _ => {}
                }
                for group in 1..4 {
                    let progress = scheduler.progress((group, 1), CHANNEL).unwrap();
                    prop_assert!(progress.completed <= progress.submitted);
                    prop_assert!(used(&scheduler, group) <= handed_in.get(&group).copied().unwrap_or(0));
                }
            }
            for group in 1..4 {
                scheduler.set_disabled((group, 1), CHANNEL, false);
            }
            scheduler.advance(scheduler.now() + 3600 * SECOND);
            for group in 1..4 {
                let progress = scheduler.progress((group, 1), CHANNEL).unwrap();
                prop_assert_eq!(progress.completed, progress.submitted);
                let used = scheduler.busy().get(&group).copied().unwrap_or(0);
                prop_assert_eq!(used, handed_in.get(&group).copied().unwrap_or(0));
            }
        }

        #[test]
        fn many_steps_end_where_one_does(ops in prop::collection::vec(op(), 1..60), steps in 2..50u64) {
            let (mut once, mut often) = (three(), three());
            for op in &ops {
                apply(&mut once, op, 1);
                apply(&mut often, op, steps);
                prop_assert_eq!(once.busy(), often.busy());
                prop_assert_eq!(once.switches(), often.switches());
                for group in 1..4 {
                    prop_assert_eq!(
                        once.progress((group, 1), CHANNEL),
                        often.progress((group, 1), CHANNEL)
                    );
                }
            }
        }

        #[test]
        fn shares_follow_slices(a in 450..5000u64, b in 450..5000u64) {
            let mut scheduler = scheduler(&[(A, a), (B, b)]);
            for id in [A, B] {
                scheduler.submit(id, CHANNEL, 50_000, 10_000_000);
            }
            scheduler.advance(60 * SECOND);
            let busy = |id: GroupId| scheduler.busy()[&id.0];
            let round = a + b;
            let got = busy(A) * 1000 / (busy(A) + busy(B));
            prop_assert!(got.abs_diff(a * 1000 / round) <= 2);
        }
    }
}
