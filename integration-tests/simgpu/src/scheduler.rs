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
