//! Whether a process that was stopped for a launch may be continued: only what we stopped is continued.
//!
//! Pure. The kernel side keeps on record when it stopped a process and when others stopped or continued it
//! ([`Calls`]); a [`Continuation`] says which signal to send next, and goes on until nobody else has sent one
//! meanwhile, since signals of others do not wait for us. The test below walks through every interleaving of probe,
//! signals, controller, its loss and its return.

use gpuquota_common::launch::Calls;

/// A stop signal of job control that came so short a time before our own may not have been acted on yet.
const RACE_NS: u64 = 1_000_000;

/// A signal for a process whose time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Send {
    /// None: somebody else has stopped it, and whoever did continues it.
    Nothing,
    /// `SIGCONT`.
    Continue,
    /// `SIGCONT`, which drops stop signals that wait, and then this one again: whether it stops the process is up to
    /// the process.
    ContinueAnd(i32),
    /// `SIGSTOP`: somebody else has sent one that our `SIGCONT` may have undone.
    Stop,
}

/// The way to have a process run again that we stopped: signals until the record stands still.
///
/// Read the record, send what [`next`](Self::next) says, read the record again; repeat unless it is
/// [`undisturbed`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Continuation {
    continued: bool,
    job_control_ns: u64,
}

impl Continuation {
    /// For somebody who comes after a controller that may have died half-way.
    pub fn recovery() -> Self {
        Self {
            continued: true,
            job_control_ns: 0,
        }
    }

    /// The next signal, by the record as it is now.
    pub fn next(&mut self, calls: &Calls) -> Send {
        if calls.stopped_by_others() {
            return if self.continued {
                Send::Stop
            } else {
                Send::Nothing
            };
        }
        self.continued = true;
        let at = calls.job_control_ns & !0xff;
        let since = calls
            .stopped_ns
            .saturating_sub(RACE_NS)
            .max(calls.foreign_continue_ns);
        if at > since && calls.job_control_ns != self.job_control_ns {
            self.job_control_ns = calls.job_control_ns;
            return Send::ContinueAnd(i32::from(calls.job_control_ns.to_le_bytes()[0]));
        }
        Send::Continue
    }
}

/// Whether nobody else has sent a signal between two readings of the record.
pub fn undisturbed(before: &Calls, after: &Calls) -> bool {
    let signals = |calls: &Calls| {
        (
            calls.foreign_stop_ns,
            calls.foreign_continue_ns,
            calls.job_control_ns,
        )
    };
    signals(before) == signals(after)
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::decimal_bitwise_operands,
        clippy::match_same_arms,
        clippy::precedence,
        clippy::struct_excessive_bools,
        reason = "the model names each state and each step, as the kernel side packs them"
    )]

    use std::collections::HashSet;

    use super::*;

    fn calls(change: impl FnOnce(&mut Calls)) -> Calls {
        let mut calls = Calls {
            stops: 1,
            stopped_ns: 10_000_000,
            until_ns: 11_000_000,
            ..Calls::default()
        };
        change(&mut calls);
        calls
    }

    fn first(calls: &Calls) -> Send {
        Continuation::default().next(calls)
    }

    #[test]
    fn what_we_stopped_is_continued() {
        assert_eq!(first(&calls(|_| ())), Send::Continue);
    }

    #[test]
    fn what_others_stopped_stays_stopped_until_others_continue_it() {
        let stopped = calls(|calls| calls.foreign_stop_ns = 10_500_000);
        assert_eq!(first(&stopped), Send::Nothing);
        assert_eq!(Continuation::recovery().next(&stopped), Send::Stop);
        let continued = calls(|calls| {
            calls.foreign_stop_ns = 10_500_000;
            calls.foreign_continue_ns = 10_600_000;
        });
        assert_eq!(first(&continued), Send::Continue);
    }

    #[test]
    fn a_stop_of_job_control_is_not_swallowed_and_not_sent_twice() {
        let signal = u64::from(libc::SIGTSTP.unsigned_abs());
        let during = calls(|calls| calls.job_control_ns = 10_500_000 & !0xff | signal);
        let mut continuation = Continuation::default();
        assert_eq!(continuation.next(&during), Send::ContinueAnd(libc::SIGTSTP));
        assert_eq!(continuation.next(&during), Send::Continue);
        let long_before = calls(|calls| calls.job_control_ns = 5_000_000 & !0xff | signal);
        assert_eq!(first(&long_before), Send::Continue);
    }

    // The model: one process whose launches are over the budget; a user who stops it by SIGSTOP or from the keyboard,
    // continues it or ends it; a controller, and a guard that sees to what a dead controller leaves. Every system call
    // and every access to a map is a step of its own.

    /// One unit of the model's clock: all of it happens within [`RACE_NS`].
    const TICK: u64 = 1 << 10;

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Probe {
        Outside,
        /// The heartbeat was fresh and nobody else had stopped the process.
        Checked,
        Recorded,
        Sent,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    enum Step {
        Absent,
        Idle,
        /// The record was read.
        Read,
        /// The first signal was sent, the second was not.
        HalfSent,
        Sent,
        /// The record stood still.
        Done,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    struct Agent {
        step: Step,
        before: Record,
        continuation: Continuation,
        send: Option<u8>,
    }

    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    struct Record {
        stops: u64,
        stopped: u64,
        foreign_stop: u64,
        foreign_continue: u64,
        job_control: u64,
    }

    impl Record {
        fn calls(self) -> Calls {
            let control = match self.job_control {
                0 => 0,
                at => at * TICK | u64::from(libc::SIGTSTP.unsigned_abs()),
            };
            Calls {
                stops: self.stops,
                stopped_ns: self.stopped * TICK,
                foreign_stop_ns: self.foreign_stop * TICK,
                foreign_continue_ns: self.foreign_continue * TICK,
                job_control_ns: control,
                ..Calls::default()
            }
        }
    }

    #[derive(Clone, PartialEq, Eq, Hash, Debug)]
    struct World {
        clock: u64,
        record: Record,
        continued: u64,
        stopped: bool,
        /// A stop signal waits.
        pending: bool,
        exited: bool,
        wanted_stopped: bool,
        probe: Probe,
        /// Notices that were sent and not yet served.
        notices: u8,
        /// Notices that are being served.
        taken: u8,
        heartbeat: bool,
        controller: Agent,
        guard: Agent,
        launches_left: u8,
        user_left: u8,
        crashes_left: u8,
        /// The controller has seen to what its predecessor left.
        swept: bool,
    }

    impl World {
        fn start(launches: u8, user: u8) -> Self {
            let agent = |step| Agent {
                step,
                before: Record::default(),
                continuation: Continuation::default(),
                send: None,
            };
            Self {
                clock: 1,
                record: Record::default(),
                continued: 0,
                stopped: false,
                pending: false,
                exited: false,
                wanted_stopped: false,
                probe: Probe::Outside,
                notices: 0,
                taken: 0,
                heartbeat: true,
                controller: agent(Step::Idle),
                guard: agent(Step::Absent),
                launches_left: launches,
                user_left: user,
                crashes_left: 1,
                swept: true,
            }
        }

        fn now(&mut self) -> u64 {
            self.clock += 1;
            self.clock
        }

        fn send_stop(&mut self) {
            self.pending = !self.exited;
        }

        fn send_continue(&mut self) {
            self.pending = false;
            self.stopped = false;
        }

        /// Everything that can happen next.
        fn successors(&self) -> Vec<Self> {
            let mut next = Vec::new();
            let mut add = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                next.push(world);
            };
            // The kernel acts on a stop signal when the thread is about to leave the kernel.
            if self.pending && !self.stopped && !self.exited && self.probe == Probe::Outside {
                add(&|w| {
                    w.pending = false;
                    w.stopped = true;
                });
            }
            if !self.exited && self.user_left > 0 {
                add(&|w| {
                    w.user_left -= 1;
                    w.wanted_stopped = true;
                    w.record.foreign_stop = w.now();
                    w.send_stop();
                });
                add(&|w| {
                    w.user_left -= 1;
                    w.wanted_stopped = true;
                    w.record.job_control = w.now();
                    w.send_stop();
                });
                add(&|w| {
                    w.user_left -= 1;
                    w.wanted_stopped = false;
                    w.record.foreign_continue = w.now();
                    w.send_continue();
                });
                add(&|w| {
                    w.user_left = 0;
                    w.exited = true;
                    w.stopped = false;
                    w.pending = false;
                    w.probe = Probe::Outside;
                });
            }
            self.probe_step(&mut next);
            self.controller_steps(&mut next);
            self.guard_steps(&mut next);
            next
        }

        fn probe_step(&self, next: &mut Vec<Self>) {
            let mut world = self.clone();
            match self.probe {
                // A pending stop is acted on before user code runs again.
                Probe::Outside
                    if self.launches_left == 0 || self.pending || self.exited || self.stopped =>
                {
                    return;
                }
                Probe::Outside => {
                    world.launches_left -= 1;
                    if self.heartbeat && !self.record.calls().stopped_by_others() {
                        world.probe = Probe::Checked;
                    }
                }
                Probe::Checked => {
                    world.record.stops += 1;
                    world.record.stopped = world.now();
                    world.probe = Probe::Recorded;
                }
                Probe::Recorded => {
                    world.send_stop();
                    world.probe = Probe::Sent;
                }
                Probe::Sent => {
                    world.notices += 1;
                    world.probe = Probe::Outside;
                }
            }
            next.push(world);
        }

        fn controller_steps(&self, next: &mut Vec<Self>) {
            let mut world = self.clone();
            if self.controller.step == Step::Absent {
                // It comes back, with the guard possibly still at work. The ring of its predecessor is lost.
                world.controller.step = Step::Idle;
                world.heartbeat = true;
                world.notices = 0;
                world.swept = false;
                next.push(world);
                return;
            }
            if self.crashes_left > 0 {
                let mut dead = self.clone();
                dead.crashes_left -= 1;
                dead.controller.step = Step::Absent;
                dead.notices = 0;
                dead.taken = 0;
                dead.guard.step = Step::Idle;
                next.push(dead);
            }
            let outstanding = self.record.stops != self.continued;
            match self.controller.step {
                Step::Idle if self.notices > 0 => {
                    world.taken = self.notices;
                    world.notices = 0;
                    world.controller.continuation = Continuation::default();
                }
                Step::Idle if !self.swept && self.probe != Probe::Outside => return,
                Step::Idle if !self.swept && outstanding => {
                    world.controller.continuation = Continuation::recovery();
                }
                Step::Idle if !self.swept => {
                    world.swept = true;
                    next.push(world);
                    return;
                }
                Step::Idle => return,
                Step::Done if self.taken > 0 => {
                    world.continued += u64::from(self.taken);
                    world.taken = 0;
                }
                Step::Done => {
                    world.continued = world.continued.max(self.controller.before.stops);
                    world.swept = true;
                }
                _ => {}
            }
            world.controller = world.agent_step(world.controller);
            next.push(world);
        }

        fn guard_steps(&self, next: &mut Vec<Self>) {
            let mut world = self.clone();
            match self.guard.step {
                Step::Absent => return,
                Step::Idle if self.heartbeat && self.controller.step == Step::Absent => {
                    world.heartbeat = false;
                }
                // It goes on for longer than a launch takes in the probe.
                Step::Idle if self.probe != Probe::Outside => return,
                Step::Idle if self.record.stops == self.continued || self.exited => {
                    world.guard.step = Step::Absent;
                }
                step => {
                    if step == Step::Idle {
                        world.guard.continuation = Continuation::recovery();
                    }
                    if step == Step::Done {
                        world.continued = world.continued.max(self.guard.before.stops);
                    }
                    world.guard = world.agent_step(world.guard);
                }
            }
            next.push(world);
        }

        /// One system call or access to a map of whoever continues processes.
        fn agent_step(&mut self, mut agent: Agent) -> Agent {
            agent.step = match agent.step {
                Step::Absent | Step::Done => Step::Idle,
                Step::Idle => {
                    agent.before = self.record;
                    agent.send = Some(match agent.continuation.next(&self.record.calls()) {
                        Send::Nothing => 0,
                        Send::Continue => 1,
                        Send::ContinueAnd(_) => 2,
                        Send::Stop => 3,
                    });
                    Step::Read
                }
                Step::Read => {
                    match agent.send {
                        Some(1 | 2) => self.send_continue(),
                        Some(3) => self.send_stop(),
                        _ => {}
                    }
                    if agent.send == Some(2) {
                        Step::HalfSent
                    } else {
                        Step::Sent
                    }
                }
                Step::HalfSent => {
                    self.send_stop();
                    Step::Sent
                }
                Step::Sent if undisturbed(&agent.before.calls(), &self.record.calls()) => {
                    Step::Done
                }
                Step::Sent => {
                    agent.before = self.record;
                    agent.send = Some(match agent.continuation.next(&self.record.calls()) {
                        Send::Nothing => 0,
                        Send::Continue => 1,
                        Send::ContinueAnd(_) => 2,
                        Send::Stop => 3,
                    });
                    Step::Read
                }
            };
            agent
        }

        /// Nobody but the user and the program has anything left to do.
        fn is_settled(&self) -> bool {
            let mut quiet = self.clone();
            quiet.user_left = 0;
            quiet.launches_left = 0;
            quiet.crashes_left = 0;
            quiet.controller.step != Step::Absent && quiet.successors().is_empty()
        }
    }

    #[test]
    fn nobody_is_left_stopped_and_nobody_is_continued_who_was_stopped_by_others() {
        walk(&World::start(1, 2));
        walk(&World::start(2, 1));
    }

    #[test]
    #[ignore = "takes minutes and gigabytes: six million states"]
    fn the_same_with_more_of_everything() {
        walk(&World::start(2, 3));
    }

    /// Walks through everything that can happen, and fails with the way to the first world that is wrong.
    fn walk(start: &World) {
        // Worlds in the order in which they were found, each with the one before it.
        let mut worlds = vec![(start.clone(), 0)];
        let mut known: HashSet<World> = worlds.iter().map(|(world, _)| world.clone()).collect();
        let (mut settled, mut survived_a_crash) = (0u64, 0u64);
        let mut at = 0;
        while let Some((world, _)) = worlds.get(at).cloned() {
            if !world.exited && world.is_settled() {
                settled += 1;
                survived_a_crash += u64::from(world.crashes_left == 0);
                if world.stopped != world.wanted_stopped {
                    let mut step = at;
                    while step > 0 {
                        println!("{:?}", worlds[step].0);
                        step = worlds[step].1;
                    }
                    panic!(
                        "stopped: {}, wanted: {}",
                        world.stopped, world.wanted_stopped
                    );
                }
            }
            for next in world.successors() {
                if known.insert(next.clone()) {
                    worlds.push((next, at));
                }
            }
            at += 1;
        }
        assert!(
            settled > 100 && survived_a_crash > 50,
            "{settled} {survived_a_crash}"
        );
        println!(
            "{} states, {settled} at rest, {survived_a_crash} after a crash",
            worlds.len()
        );
    }
}
