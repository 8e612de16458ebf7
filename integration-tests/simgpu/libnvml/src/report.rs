//! What NVML derives from the state of the cards.

use std::collections::BTreeMap;

use gpuquota_simgpu::scheduler::BUCKET_NS;
use gpuquota_simgpu::state::{GpuState, State};

/// Power of a card that does nothing and what full use adds, milliwatts: about those of the recorded card.
const IDLE_MILLIWATTS: u64 = 75_000;
const BUSY_MILLIWATTS: u64 = 550_000;
/// Spans over which use is averaged: one second.
const AVERAGED_SPANS: u64 = 10;

/// Spans of the history that are laid at one process together: 200 ms.
const LAID_AT_ONE: u64 = 2;

/// Use of a card by one process in one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Process.
    pub pid: u32,
    /// End of the span, microseconds since 1970.
    pub unix_us: u64,
    /// Percent of the span.
    pub percent: u32,
}

/// Percent of the last second in which the card worked.
pub fn utilization(state: &State, gpu: &GpuState) -> u32 {
    let newest = state.now_ns / BUCKET_NS * BUCKET_NS;
    let oldest = newest.saturating_sub(AVERAGED_SPANS * BUCKET_NS);
    let busy: u64 = gpu
        .history
        .iter()
        .filter(|span| span.end_ns > oldest && span.end_ns <= newest)
        .flat_map(|span| span.busy.values())
        .sum();
    percent(busy, AVERAGED_SPANS * BUCKET_NS)
}

/// The samples of all spans that ended after `since`, microseconds since 1970.
pub fn samples(state: &State, gpu: &GpuState, since: u64) -> Vec<Sample> {
    let length_ns = BUCKET_NS * if state.names_one { LAID_AT_ONE } else { 1 };
    let mut spans: BTreeMap<u64, BTreeMap<u32, u64>> = BTreeMap::new();
    for span in &gpu.history {
        let end_ns = span.end_ns.next_multiple_of(length_ns);
        let busy = spans.entry(end_ns).or_default();
        for (pid, used) in &span.busy {
            *busy.entry(*pid).or_default() += used;
        }
    }
    spans
        .into_iter()
        .filter(|(end_ns, _)| *end_ns <= state.now_ns)
        .flat_map(|(end_ns, busy)| {
            let unix_us = state.unix_us - (state.now_ns - end_ns) / 1000;
            let told = if state.names_one {
                lay_at_one(end_ns, &busy)
            } else {
                busy
            };
            told.into_iter().map(move |(pid, busy)| Sample {
                pid,
                unix_us,
                percent: percent(busy, length_ns),
            })
        })
        .filter(|sample| sample.unix_us > since)
        .collect()
}

/// All that was used, laid at one of those who used it: by chance, in proportion to their use, and the same whenever it is asked.
fn lay_at_one(end_ns: u64, busy: &BTreeMap<u32, u64>) -> BTreeMap<u32, u64> {
    let all: u64 = busy.values().sum();
    let mut mixed = (end_ns / BUCKET_NS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mut left = (mixed >> 11) % all.max(1);
    for (pid, used) in busy {
        if left < *used {
            return BTreeMap::from([(*pid, all)]);
        }
        left -= used;
    }
    BTreeMap::new()
}

/// Milliwatts now.
pub fn power(state: &State, gpu: &GpuState) -> u64 {
    IDLE_MILLIWATTS + BUSY_MILLIWATTS * u64::from(utilization(state, gpu)) / 100
}

/// Millijoules since the server began.
pub fn energy(state: &State, gpu: &GpuState) -> u64 {
    let busy: u64 = gpu.processes.values().map(|process| process.busy_ns).sum();
    let millijoules = |milliwatts: u64, ns: u64| {
        u64::try_from(u128::from(milliwatts) * u128::from(ns) / 1_000_000_000).unwrap_or(u64::MAX)
    };
    millijoules(IDLE_MILLIWATTS, state.now_ns) + millijoules(BUSY_MILLIWATTS, busy)
}

fn percent(part: u64, whole: u64) -> u32 {
    u32::try_from((part * 100 + whole / 2) / whole)
        .unwrap_or(100)
        .min(100)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpuquota_simgpu::state::SpanState;

    use super::*;

    fn state() -> (State, GpuState) {
        let span = |index: u64, busy| SpanState {
            end_ns: index * BUCKET_NS,
            busy: BTreeMap::from([(7, busy)]),
        };
        let gpu = GpuState {
            history: vec![
                span(1, BUCKET_NS),
                span(15, BUCKET_NS / 2),
                span(20, BUCKET_NS),
                span(21, BUCKET_NS / 10),
            ],
            ..GpuState::default()
        };
        let state = State {
            now_ns: 20 * BUCKET_NS + 5,
            unix_us: 1_000_000_000,
            ..State::default()
        };
        (state, gpu)
    }

    #[test]
    fn use_is_that_of_the_last_complete_second() {
        let (state, gpu) = state();
        assert_eq!(utilization(&state, &gpu), 15);
        assert!(power(&state, &gpu) > IDLE_MILLIWATTS);
    }

    #[test]
    fn samples_are_complete_spans_after_the_last_seen() {
        let (state, gpu) = state();
        let all = samples(&state, &gpu, 0);
        assert_eq!(all.len(), 3);
        assert_eq!(all[1].percent, 50);
        let newest = all[2].unix_us;
        assert_eq!(samples(&state, &gpu, all[1].unix_us), [all[2]]);
        assert!(samples(&state, &gpu, newest).is_empty());
    }

    #[test]
    fn each_span_is_laid_at_one_in_proportion_to_use() {
        let gpu = GpuState {
            history: (1..=4000)
                .map(|index| SpanState {
                    end_ns: index * BUCKET_NS,
                    busy: BTreeMap::from([(7, BUCKET_NS / 10), (8, BUCKET_NS * 9 / 10)]),
                })
                .collect(),
            ..GpuState::default()
        };
        let mut state = State {
            now_ns: 4000 * BUCKET_NS,
            unix_us: 1_000_000_000,
            names_one: true,
            ..State::default()
        };
        let all = samples(&state, &gpu, 0);
        assert_eq!(all.len(), 2000);
        assert!(all.iter().all(|sample| sample.percent == 100));
        let seldom = all.iter().filter(|sample| sample.pid == 7).count();
        assert!((150..250).contains(&seldom), "{seldom}");
        // Half of a span is not told of, and what was told stays so.
        state.now_ns -= BUCKET_NS;
        state.unix_us -= BUCKET_NS / 1000;
        assert_eq!(samples(&state, &gpu, 0), all[..1999]);
    }
}
