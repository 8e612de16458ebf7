//! Who is at work on a GPU, and who has left it alone: pure.
//!
//! Measured on an H200: NVML lays each span of some 200 ms at one process. So who has a small share is not mentioned for seconds
//! while it works all the time, and silence proves little until it has lasted long enough for that share. A process that
//! uses much less of a CPU than while it worked does not launch anything, and is known sooner.

use std::time::Duration;

/// Who is neither heard of nor uses its CPUs for so long has left the GPU alone. Longer than it takes to see that somebody is
/// back, so that coming and going wins nobody much.
const QUIET: Duration = Duration::from_secs(3);
/// Silence that says enough of anybody.
const LONGEST: Duration = Duration::from_mins(1);
/// How long a span is of which NVML names one process.
const SPAN: Duration = Duration::from_millis(200);
/// How likely it may be that somebody is silent by chance: there is a chance every second or two, all day.
const BY_CHANCE: f64 = 1e-5;
/// From this part of one CPU on a process does something. A notebook that nobody uses stays far below.
const CPU_BUSY: f64 = 0.02;
/// One that sleeps until its kernels are done may use less all the time: then it does something from this part on of what it uses
/// while it works,
const OF_USUAL: f64 = 0.25;
/// but not below this part of a CPU.
const CPU_IDLE: f64 = 0.0002;
/// Weight of the last look in what a process uses while it works, where that was less and where it was more: who can work with little
/// is known soon.
const LATEST: [f64; 2] = [0.5, 0.2];
/// What is known of the use of CPUs is old after this.
const CPU_KNOWN: Duration = Duration::from_secs(1);

/// What is known of one process.
#[derive(Clone, Copy, Debug)]
pub struct Presence {
    /// When it was at work last, as far as is known.
    seen: Duration,
    /// How far its silence since then is from saying that it has left the GPU alone: from 1 on it says so.
    doubt: f64,
    /// Up to when that was reckoned, and how much of the time since then nothing is known of.
    judged: Duration,
    unknown: Duration,
    /// When its CPUs were busy last.
    stirred: Duration,
    /// When its use of CPUs was looked at last, and what it was.
    cpu: Option<(Duration, Duration)>,
    /// The part of a CPU that it used between the last two looks, and that it uses while it works.
    rate: Option<f64>,
    usual: Option<f64>,
    /// It has left the GPU alone, and nothing has been seen of it since.
    idle: bool,
    /// How long it has to be quiet for that.
    patience: Duration,
}

impl Presence {
    /// A process that has just made a context, so it is about to use it.
    pub fn new(now: Duration) -> Self {
        Self {
            seen: now,
            doubt: 0.0,
            judged: now,
            unknown: Duration::ZERO,
            stirred: now,
            cpu: None,
            rate: None,
            usual: None,
            idle: false,
            patience: QUIET,
        }
    }

    /// It was at work, as far as anything tells that.
    fn seen(&mut self, at: Duration) {
        self.seen = at;
        self.doubt = 0.0;
        self.judged = self.judged.max(at);
        self.unknown = Duration::ZERO;
        self.idle = false;
    }

    /// It was named as one at work at a moment, which is no news if it was seen later.
    pub fn named(&mut self, at: Duration) {
        if at <= self.seen {
            return;
        }
        // It works without a CPU, so that being quiet says the less of it the more often that was wrong.
        if self.idle {
            self.patience = (self.patience * 2).min(LONGEST);
        }
        if let Some(rate) = self.rate {
            let usual = self.usual.unwrap_or(rate);
            let latest = LATEST[usize::from(rate > usual)];
            self.usual = Some(usual + latest * (rate - usual));
        }
        self.seen(at);
    }

    /// It has used so much CPU time so far. Who begins to do something is taken to be back (true), once: who goes on without the GPU
    /// is not.
    pub fn ran(&mut self, used: Duration, now: Duration) -> bool {
        let quiet = self.is_quiet(now);
        let Some((at, before)) = self.cpu.replace((now, used)) else {
            self.stirred = now;
            return false;
        };
        let span = now.saturating_sub(at);
        // Over a long time the mean says nothing of its end.
        self.rate = (span > Duration::ZERO && span <= CPU_KNOWN)
            .then(|| used.saturating_sub(before).as_secs_f64() / span.as_secs_f64());
        let busy_from = self.usual.map_or(CPU_BUSY, |usual| {
            (OF_USUAL * usual).clamp(CPU_IDLE, CPU_BUSY)
        });
        if self.rate.is_none_or(|rate| rate <= busy_from) {
            return false;
        }
        self.stirred = now;
        if quiet {
            self.seen(now);
        }
        quiet
    }

    /// Nothing is known of who was at work for so long.
    pub fn missed(&mut self, span: Duration) {
        self.unknown += span;
    }

    fn is_quiet(&self, now: Duration) -> bool {
        self.cpu
            .is_some_and(|(at, _)| now.saturating_sub(at) <= CPU_KNOWN)
            && now >= self.stirred + QUIET
    }

    /// Whether it has left the GPU alone; it has until something is seen of it. `share` is the part of the GPU's time, 0 to 1, that
    /// was its own while it worked, since this was asked last.
    pub fn is_idle(&mut self, share: f64, now: Duration) -> bool {
        let passed = now.saturating_sub(self.judged).as_secs_f64();
        let known = passed - std::mem::take(&mut self.unknown).as_secs_f64();
        self.judged = now;
        self.doubt = (self.doubt + known / telling(share).as_secs_f64()).max(0.0);
        let is_quiet = now >= self.seen + self.patience && self.is_quiet(now);
        self.idle |= self.doubt >= 1.0 || is_quiet;
        self.idle
    }
}

/// How long somebody with such a share has to be silent until that is no chance.
fn telling(share: f64) -> Duration {
    let spans = BY_CHANCE.ln() / (1.0 - share.clamp(0.001, 0.999)).ln();
    SPAN.mul_f64(spans).clamp(QUIET, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTH: Duration = Duration::from_millis(100);

    /// A process, the time, and the CPU time that it has used so far.
    struct Watched {
        presence: Presence,
        now: Duration,
        used: Duration,
    }

    impl Watched {
        fn new() -> Self {
            Self {
                presence: Presence::new(secs(100)),
                now: secs(100),
                used: secs(7),
            }
        }

        /// So much CPU time in every tenth of a second of such a span.
        fn run(&mut self, span: Duration, each: Duration) {
            let end = self.now + span;
            while self.now < end {
                self.now += TENTH;
                self.used += each;
                self.presence.ran(self.used, self.now);
            }
        }

        fn is_idle(&mut self, share: f64) -> bool {
            self.presence.is_idle(share, self.now)
        }
    }

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn silence_has_to_last_the_longer_the_smaller_the_share() {
        for (share, least, most) in [
            (1.0, 3.0, 3.0),
            (0.5, 3.0, 3.5),
            (0.25, 7.5, 8.5),
            (0.1, 21.0, 22.5),
            (0.05, 44.0, 46.0),
            (0.0, 60.0, 60.0),
        ] {
            let took = telling(share).as_secs_f64();
            assert!((least..=most).contains(&took), "{share}: {took}");
        }
        let mut presence = Presence::new(secs(100));
        assert!(!presence.is_idle(0.1, secs(120)));
        assert!(presence.is_idle(0.1, secs(123)));
    }

    #[test]
    fn who_uses_no_cpu_is_known_to_be_idle_sooner() {
        let mut one = Watched::new();
        one.run(secs(4), Duration::ZERO);
        assert!(one.is_idle(0.05));
        // A tick of a notebook's own is nothing.
        one.run(TENTH, Duration::from_micros(500));
        assert!(one.is_idle(0.05));
    }

    #[test]
    fn who_begins_to_do_something_is_back_at_once() {
        let mut one = Watched::new();
        one.run(secs(60), Duration::ZERO);
        assert!(one.is_idle(0.05));
        one.run(TENTH, TENTH);
        assert!(!one.is_idle(0.05));
    }

    #[test]
    fn who_uses_little_cpu_while_it_works_is_idle_when_it_uses_less_than_that() {
        let mut one = Watched::new();
        // One kernel in a tenth of a second, and 100 us of a CPU for it; NVML names it every ten seconds.
        let little = Duration::from_micros(100);
        one.run(secs(1), little);
        one.presence.named(one.now);
        for _ in 0..20 {
            one.run(secs(10), little);
            assert!(!one.is_idle(0.05));
            one.presence.named(one.now);
        }
        one.run(secs(4), Duration::from_micros(10));
        assert!(one.is_idle(0.05));
        // Its last launch, told of again and again, teaches nothing.
        for _ in 0..100 {
            one.presence.named(secs(110));
        }
        one.run(TENTH, little);
        assert!(!one.is_idle(0.05));
        one.run(secs(4), Duration::from_micros(10));
        assert!(one.is_idle(0.05));
    }

    #[test]
    fn who_works_without_a_cpu_is_taken_for_idle_ever_later() {
        let mut one = Watched::new();
        for patience in [3, 6, 12, 24] {
            one.run(secs(patience - 1), Duration::ZERO);
            assert!(!one.is_idle(0.01), "within {patience} s");
            one.run(secs(2), Duration::ZERO);
            assert!(one.is_idle(0.01), "after {patience} s");
            one.presence.named(one.now);
        }
    }

    #[test]
    fn who_only_calculates_has_left_the_gpu_alone_for_all_that() {
        let mut one = Watched::new();
        one.run(secs(43), TENTH);
        assert!(!one.is_idle(0.05));
        one.run(secs(4), TENTH);
        assert!(one.is_idle(0.05));
        one.run(secs(60), TENTH);
        assert!(one.is_idle(0.05));
        // NVML names it.
        one.presence.named(one.now + TENTH);
        assert!(!one.is_idle(0.05));
    }

    #[test]
    fn who_is_known_to_be_idle_is_so_until_something_is_seen() {
        let mut presence = Presence::new(secs(100));
        assert!(presence.is_idle(1.0, secs(104)));
        // Others have begun to work, so its share would be smaller.
        assert!(presence.is_idle(0.05, secs(105)));
        presence.named(secs(106));
        assert!(!presence.is_idle(1.0, secs(107)));
        assert!(presence.is_idle(1.0, secs(110)));
        // The same launch, told again.
        presence.named(secs(106));
        assert!(presence.is_idle(1.0, secs(110)));
    }

    #[test]
    fn silence_counts_by_the_share_that_there_was() {
        let mut presence = Presence::new(secs(100));
        assert!(!presence.is_idle(0.1, secs(106)));
        // The others have ended: from now on it would be named often.
        assert!(!presence.is_idle(1.0, secs(107)));
        assert!(presence.is_idle(1.0, secs(109)));
    }

    #[test]
    fn what_nobody_has_looked_at_says_nothing() {
        let mut one = Watched::new();
        one.run(secs(2), Duration::ZERO);
        one.now += secs(5);
        assert!(!one.is_idle(0.1), "its CPUs were looked at too long ago");
        // What it used in the meantime may have been at any moment; the next look tells.
        one.used += secs(1);
        one.presence.ran(one.used, one.now);
        assert!(one.is_idle(0.1));
        one.run(TENTH, TENTH);
        assert!(!one.is_idle(0.1));
    }

    #[test]
    fn time_of_which_nothing_is_known_is_not_idle_but_for_who_does_nothing() {
        let mut presence = Presence::new(secs(100));
        presence.missed(secs(20));
        assert!(!presence.is_idle(1.0, secs(121)));
        assert!(presence.is_idle(1.0, secs(123)));
        // What was taken for silence before it was known that nothing was told.
        let mut presence = Presence::new(secs(100));
        assert!(!presence.is_idle(1.0, secs(102)));
        presence.missed(secs(3));
        assert!(!presence.is_idle(1.0, secs(103)));
        assert!(!presence.is_idle(1.0, secs(105)));
        assert!(presence.is_idle(1.0, secs(107)));
        let mut one = Watched::new();
        one.run(secs(4), Duration::ZERO);
        one.presence.missed(secs(4));
        assert!(one.is_idle(1.0));
    }
}
