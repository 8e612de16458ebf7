//! How a GPU was used over time, from what NVML tells of it: pure.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::timeline::ns;

/// Spans that are kept.
const MOST_SPANS: usize = 4096;
/// What lies between two spans and is shorter than this belongs to the later one: NVML's spans do not end to the
/// microsecond at the same time for all processes.
const SEAM_NS: u64 = 20_000_000;

/// Use of a GPU by a process, as it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Process.
    pub pid: u32,
    /// Begin of the span, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// End of the span.
    pub to_ns: u64,
    /// GPU time in it.
    pub busy_ns: u64,
}

/// A span in which it is known how much a GPU was used, and not when.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// Begin, `CLOCK_MONOTONIC` nanoseconds.
    pub from_ns: u64,
    /// End.
    pub to_ns: u64,
    /// Part of it, 0 to 1, by process.
    busy: HashMap<u32, f64>,
}

impl Span {
    /// Part of it in which all processes together used the GPU.
    pub fn busy(&self) -> f64 {
        self.busy.values().sum::<f64>().min(1.0)
    }

    /// Part of it in which a process did.
    pub fn busy_by(&self, pid: u32) -> f64 {
        self.busy.get(&pid).copied().unwrap_or(0.0).min(1.0)
    }

    /// Its length in nanoseconds.
    pub fn length(&self) -> f64 {
        ns(self.to_ns - self.from_ns)
    }
}

/// What is known of a GPU.
#[derive(Clone, Debug, Default)]
pub struct Gpu {
    known_ns: Option<u64>,
    spans: VecDeque<Span>,
    /// Spans that were settled; see [`Gpu::settle`].
    settled: usize,
    /// Length of the spans that were told, and their number.
    told: (f64, u32),
    /// Nanoseconds of which nothing was told although the board was at work.
    untold: f64,
}

impl Gpu {
    /// Up to when it is known; `None` before the first answer.
    pub fn known_ns(&self) -> Option<u64> {
        self.known_ns
    }

    /// Mean length of the spans in which use was told, in nanoseconds; `None` if none was.
    pub fn step_ns(&self) -> Option<f64> {
        (self.told.1 > 0).then(|| self.told.0 / f64::from(self.told.1))
    }

    /// Nanoseconds of which nothing was told although the board was at work.
    pub fn untold_ns(&self) -> f64 {
        self.untold
    }

    /// The answer tells of nobody up to `known_ns`, and the board was at work: nothing is known of that time.
    pub fn missed(&mut self, known_ns: u64) {
        if let Some(at) = self.known_ns {
            self.untold += ns(known_ns.saturating_sub(at));
        }
        self.known_ns = self.known_ns.max(Some(known_ns));
    }

    /// Takes an answer: use is known up to `known_ns`, and what was not told to be used was not.
    pub fn told(&mut self, known_ns: u64, uses: &[Use]) {
        let Some(mut at) = self.known_ns else {
            // Whatever it tells of was before anybody looked.
            self.known_ns = Some(known_ns);
            return;
        };
        let mut spans: BTreeMap<(u64, u64), HashMap<u32, f64>> = BTreeMap::new();
        for one in uses.iter().filter(|one| one.to_ns > one.from_ns) {
            let part = ns(one.busy_ns) / ns(one.to_ns - one.from_ns);
            *spans
                .entry((one.from_ns, one.to_ns))
                .or_default()
                .entry(one.pid)
                .or_default() += part;
        }
        for ((from, to), busy) in spans {
            if to <= at {
                continue;
            }
            let from = from.max(at);
            if from - at >= SEAM_NS {
                self.push(at, from, HashMap::new());
                at = from;
            }
            self.told.0 += ns(to - at);
            self.told.1 += 1;
            self.push(at, to, busy);
            at = to;
        }
        if known_ns.saturating_sub(at) >= SEAM_NS {
            self.push(at, known_ns, HashMap::new());
            at = known_ns;
        }
        self.known_ns = Some(at);
    }

    fn push(&mut self, from_ns: u64, to_ns: u64, busy: HashMap<u32, f64>) {
        if self.spans.len() >= MOST_SPANS {
            self.spans.pop_front();
            self.settled = self.settled.saturating_sub(1);
        }
        self.spans.push_back(Span {
            from_ns,
            to_ns,
            busy,
        });
    }

    /// The spans that end no later than this and were not asked for before.
    pub fn settle(&mut self, until_ns: u64) -> Vec<Span> {
        let due: Vec<Span> = self
            .spans
            .iter()
            .skip(self.settled)
            .take_while(|span| span.to_ns <= until_ns)
            .cloned()
            .collect();
        self.settled += due.len();
        due
    }

    /// The part of a span in which the GPU was idle, as far as that is known; `None` if nothing of it is.
    pub fn idle_in(&self, from_ns: u64, to_ns: u64) -> Option<f64> {
        let (mut idle, mut known) = (0.0, 0.0);
        for span in self.spans.iter().rev() {
            if span.to_ns <= from_ns {
                break;
            }
            let common = ns(span
                .to_ns
                .min(to_ns)
                .saturating_sub(span.from_ns.max(from_ns)));
            known += common;
            idle += common * (1.0 - span.busy());
        }
        (known > 0.0).then(|| idle / known)
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "of whole percents")]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn one(pid: u32, from: u64, to: u64, percent: u64) -> Use {
        Use {
            pid,
            from_ns: from * MS,
            to_ns: to * MS,
            busy_ns: (to - from) * MS * percent / 100,
        }
    }

    #[test]
    fn what_is_not_told_to_be_used_is_idle() {
        let mut gpu = Gpu::default();
        gpu.told(1000 * MS, &[one(1, 900, 1000, 100)]);
        assert!(gpu.settle(u64::MAX).is_empty(), "before the look");
        gpu.told(
            1500 * MS,
            &[
                one(1, 1200, 1300, 40),
                one(2, 1200, 1300, 25),
                one(1, 1300, 1400, 100),
            ],
        );
        let spans = gpu.settle(u64::MAX);
        let shape: Vec<(u64, u64, f64)> = spans
            .iter()
            .map(|span| {
                let percent = (span.busy() * 100.0).round();
                (span.from_ns / MS, span.to_ns / MS, percent)
            })
            .collect();
        assert_eq!(
            shape,
            [
                (1000, 1200, 0.0),
                (1200, 1300, 65.0),
                (1300, 1400, 100.0),
                (1400, 1500, 0.0)
            ]
        );
        assert_eq!(spans[1].busy_by(2), 0.25);
        assert_eq!(gpu.known_ns(), Some(1500 * MS));
        assert_eq!(gpu.step_ns(), Some(ns(100 * MS)));
        assert!(gpu.settle(u64::MAX).is_empty(), "once only");
        let idle = gpu.idle_in(1250 * MS, 1350 * MS).expect("known");
        assert!((idle - 0.175).abs() < 1e-9, "{idle}");
        assert_eq!(gpu.idle_in(1600 * MS, 1700 * MS), None);
    }

    #[test]
    fn silence_of_a_board_at_work_is_not_idleness() {
        let mut gpu = Gpu::default();
        gpu.told(0, &[]);
        gpu.missed(3000 * MS);
        gpu.told(3500 * MS, &[]);
        let spans = gpu.settle(u64::MAX);
        assert_eq!((spans.len(), spans[0].from_ns), (1, 3000 * MS));
        assert_eq!(gpu.untold_ns(), ns(3000 * MS));
        assert_eq!(gpu.idle_in(0, 3000 * MS), None);
    }

    #[test]
    fn spans_that_almost_meet_do() {
        let mut gpu = Gpu::default();
        gpu.told(1000 * MS, &[]);
        gpu.told(1208 * MS, &[one(1, 1005, 1100, 50), one(1, 1103, 1200, 50)]);
        let spans = gpu.settle(u64::MAX);
        let edges: Vec<u64> = spans.iter().map(|span| span.to_ns / MS).collect();
        assert_eq!(edges, [1100, 1200]);
        assert_eq!(spans[1].from_ns, 1100 * MS);
        // What is left goes to the next one.
        assert_eq!(gpu.known_ns(), Some(1200 * MS));
        gpu.told(1300 * MS, &[one(1, 1210, 1300, 10)]);
        assert_eq!(gpu.settle(u64::MAX)[0].from_ns, 1200 * MS);
    }

    #[test]
    fn a_span_waits_until_threads_are_known_as_far() {
        let mut gpu = Gpu::default();
        gpu.told(0, &[]);
        gpu.told(200 * MS, &[one(1, 0, 100, 10), one(1, 100, 200, 10)]);
        assert_eq!(gpu.settle(150 * MS).len(), 1);
        assert_eq!(gpu.settle(200 * MS).len(), 1);
        for at in 0..2 * MOST_SPANS as u64 {
            gpu.told((300 + at * 100) * MS, &[]);
        }
        assert_eq!(gpu.spans.len(), MOST_SPANS);
    }
}
