//! Pressure in the sense of the kernel's PSI: pure.
//!
//! The share of time in which a tenant had work and could not do it: `some` is the time in which at least one of
//! its processes waited, `full` the time in which all of those that had work waited, so that nothing was done at
//! all. Averages over 10, 60 and 300 seconds fall off as those of `/proc/pressure`.

use std::time::Duration;

/// Below this part of its time a GPU is not contended: a process that wants it has it.
const CONTENDED: f64 = 0.95;
/// Who gets at least this part of what its slices entitle it to is taken to want more.
const WANTS_MORE: f64 = 0.9;

/// Busy time of the GPU over which a tenant's part of it is averaged.
const PART_OVER: Duration = Duration::from_secs(5);
/// How far a part that is averaged so may be off by chance, as the square of that at a part of one half, times four: NVML lays each
/// span of some 200 ms at one process (measured on an H200).
const CHANCE: f64 = 0.02;

/// A tenant's part of what was done on a GPU, averaged over the time in which anything was: of one span it says little, since
/// all of that is laid at one process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    sum: f64,
    weight: f64,
}

impl Part {
    /// Adds a span in which the GPU was busy for so long, and for so much of it with the tenant's work.
    pub fn add(&mut self, busy: Duration, own: Duration) {
        if busy.is_zero() {
            return;
        }
        let old = (-busy.as_secs_f64() / PART_OVER.as_secs_f64()).exp();
        let part = own.as_secs_f64() / busy.as_secs_f64();
        self.sum = self.sum * old + part.min(1.0) * (1.0 - old);
        self.weight = self.weight * old + (1.0 - old);
    }

    /// The part, 0 to 1.
    pub fn get(&self) -> f64 {
        if self.weight > 0.0 {
            self.sum / self.weight
        } else {
            0.0
        }
    }
}

/// The averages, each 0 to 1, and the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Averages {
    /// Over the last 10 seconds.
    pub avg10: f64,
    /// Over the last minute.
    pub avg60: f64,
    /// Over the last five minutes.
    pub avg300: f64,
    /// All time so far.
    pub total: Duration,
}

impl Averages {
    /// Adds a span in which the share `stalled` was lost.
    pub fn add(&mut self, span: Duration, stalled: f64) {
        let stalled = stalled.clamp(0.0, 1.0);
        self.total += span.mul_f64(stalled);
        for (average, seconds) in [
            (&mut self.avg10, 10.0),
            (&mut self.avg60, 60.0),
            (&mut self.avg300, 300.0),
        ] {
            let old = (-span.as_secs_f64() / seconds).exp();
            *average = *average * old + stalled * (1.0 - old);
        }
    }
}

/// Pressure of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one process waited.
    pub some: Averages,
    /// Nothing was done.
    pub full: Averages,
}

impl Pressure {
    /// Adds a span with the shares of it that were lost.
    pub fn add(&mut self, span: Duration, lost: Lost) {
        self.some.add(span, lost.some);
        self.full.add(span, lost.full);
    }
}

/// Shares of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lost {
    /// At least one process waited.
    pub some: f64,
    /// Nothing was done.
    pub full: f64,
}

/// What a tenant did on a GPU in a span, all as shares of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    /// GPU time of the tenant, by its [`Part`].
    pub own: f64,
    /// GPU time of everybody.
    pub all: f64,
    /// GPU time that its slices entitle it to among those who were active.
    pub entitled: f64,
    /// Time in which it was frozen.
    pub frozen: f64,
    /// Its processes that have not left the GPU alone.
    pub processes: usize,
}

/// Estimates the GPU time that a tenant wanted and did not get.
///
/// The driver does not tell who waits. But a GPU that is not busy all the time keeps nobody waiting, and who uses
/// all that its slices give it wants more: the rest of the time it waited.
pub fn lost(used: Use) -> Lost {
    if used.processes == 0 {
        return Lost::default();
    }
    let thawed = (1.0 - used.frozen).clamp(0.0, 1.0);
    // While it was frozen it wanted as much as while it was not.
    let wanted_when_thawed = if thawed > 0.0 {
        (used.own / thawed).min(1.0)
    } else {
        1.0
    };
    let while_frozen = used.frozen * wanted_when_thawed;
    let entitled = used.entitled.min(1.0) * thawed;
    let contended = used.all + used.frozen * CONTENDED >= CONTENDED && used.own < used.all - 0.01;
    let chance = (CHANCE * used.entitled * (1.0 - used.entitled).max(0.0)).sqrt();
    let saturating = used.own > 0.0 && used.own >= WANTS_MORE * entitled - chance;
    let waited = if contended && saturating {
        (thawed - used.own).max(0.0)
    } else {
        0.0
    };
    let full = (while_frozen + waited).min(1.0);
    // Of several that saturate the GPU, one at a time runs: another always waits.
    let crowded = used.processes > 1
        && used.own >= CONTENDED * entitled - chance
        && used.all >= CONTENDED * thawed;
    Lost {
        some: if crowded { 1.0 } else { full },
        full,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn alone(own: f64) -> Use {
        Use {
            own,
            all: own,
            entitled: 1.0,
            frozen: 0.0,
            processes: 1,
        }
    }

    fn close(got: f64, wanted: f64) -> bool {
        (got - wanted).abs() < 0.02
    }

    #[test]
    fn who_is_alone_does_not_wait() {
        for own in [0.0, 0.3, 1.0] {
            assert_eq!(lost(alone(own)), Lost::default());
        }
    }

    #[test]
    fn who_saturates_half_a_gpu_waits_for_the_other_half() {
        let half = Use {
            own: 0.5,
            all: 1.0,
            entitled: 0.5,
            frozen: 0.0,
            processes: 1,
        };
        let lost = lost(half);
        assert!(close(lost.full, 0.5) && close(lost.some, 0.5), "{lost:?}");
    }

    #[test]
    fn who_wants_little_does_not_wait_although_the_gpu_is_busy() {
        let little = Use {
            own: 0.1,
            all: 1.0,
            entitled: 0.5,
            frozen: 0.0,
            processes: 1,
        };
        assert_eq!(lost(little), Lost::default());
    }

    #[test]
    fn a_part_is_of_the_time_in_which_anything_was_done() {
        let span = Duration::from_millis(200);
        let mut part = Part::default();
        assert!(close(part.get(), 0.0));
        part.add(span, span);
        assert!(close(part.get(), 1.0));
        for _ in 0..500 {
            part.add(span, Duration::ZERO);
            part.add(Duration::ZERO, Duration::ZERO);
            part.add(span, span);
        }
        assert!(close(part.get(), 0.51), "{part:?}");
    }

    #[test]
    fn a_ceiling_costs_what_it_takes() {
        let capped = Use {
            own: 0.25,
            all: 0.25,
            entitled: 1.0,
            frozen: 0.75,
            processes: 1,
        };
        assert!(close(lost(capped).full, 0.75));
        let light = Use {
            own: 0.05,
            all: 0.05,
            entitled: 1.0,
            frozen: 0.5,
            processes: 1,
        };
        assert!(close(lost(light).full, 0.05));
    }

    #[test]
    fn of_two_saturating_processes_one_always_waits() {
        let two = Use {
            own: 1.0,
            all: 1.0,
            entitled: 1.0,
            frozen: 0.0,
            processes: 2,
        };
        assert_eq!(
            lost(two),
            Lost {
                some: 1.0,
                full: 0.0
            }
        );
    }

    #[test]
    fn averages_fall_off_as_those_of_the_kernel() {
        let mut averages = Averages::default();
        for _ in 0..100 {
            averages.add(Duration::from_millis(100), 1.0);
        }
        // Ten seconds of full stall: 1 - 1/e of the ten-second average.
        assert!(close(averages.avg10, 1.0 - (-1.0f64).exp()));
        assert!(averages.avg60 < averages.avg10 && averages.avg300 < averages.avg60);
        assert!(averages.total.abs_diff(Duration::from_secs(10)) < Duration::from_millis(1));
    }

    proptest! {
        #[test]
        fn losses_are_shares_and_full_is_never_more_than_some(
            own in 0.0..1.0f64, others in 0.0..1.0f64, entitled in 0.0..1.0f64, frozen in 0.0..1.0f64,
            processes in 0..4usize,
        ) {
            let lost = lost(Use { own, all: (own + others).min(1.0), entitled, frozen, processes });
            prop_assert!((0.0..=1.0).contains(&lost.some) && (0.0..=1.0).contains(&lost.full));
            prop_assert!(lost.full <= lost.some + 1e-9);
        }
    }
}
