//! Times by powers of two. Pure.

use gpuquota_common::launch::{GAPS, Gaps, gap_index};

/// How many times were less than 2^n ns and not less than half of that, for each n.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(Gaps);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; GAPS])
    }
}

impl Histogram {
    /// Adds a time.
    pub fn add(&mut self, nanos: u64) {
        self.0[gap_index(nanos)] += 1;
    }

    /// Adds times that are counted already.
    pub fn add_all(&mut self, counts: &[u64]) {
        for (sum, count) in self.0.iter_mut().zip(counts) {
            *sum += count;
        }
    }

    /// The counts, by n, without those at the end that are 0.
    pub fn counts(&self) -> &[u64] {
        let end = self.0.iter().rposition(|count| *count > 0);
        &self.0[..end.map_or(0, |last| last + 1)]
    }
}

/// The time that so large a part of the times (0 to 1) is not above, as far as counts by powers of two tell: between the
/// ends of its element by how many of the element are below. Nanoseconds; `None` without a time.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an estimate for people"
)]
pub fn quantile(counts: &[u64], part: f64) -> Option<u64> {
    let all: u64 = counts.iter().sum();
    let wanted = part.clamp(0.0, 1.0) * all as f64;
    let mut below = 0.0;
    for (n, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = *count as f64;
        if below + count >= wanted {
            let end = 2f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
            let start = if n == 0 { 0.0 } else { end / 2.0 };
            return Some((start + (end - start) * ((wanted - below) / count)) as u64);
        }
        below += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_end_with_the_longest_time() {
        let mut histogram = Histogram::default();
        assert!(histogram.counts().is_empty() && quantile(&[], 0.5).is_none());
        for nanos in [0, 1, 3, 1000] {
            histogram.add(nanos);
        }
        assert_eq!(histogram.counts(), [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        let mut twice = histogram.clone();
        twice.add_all(&histogram.0);
        assert_eq!(twice.counts()[10], 2);
    }

    proptest! {
        /// The estimate is in the element of the true one: no farther off than twice or half.
        #[test]
        fn quantiles_are_near(mut times in prop::collection::vec(1u64..1 << 38, 1..200), part in 0.01f64..1.0) {
            let mut histogram = Histogram::default();
            for time in &times {
                histogram.add(*time);
            }
            times.sort_unstable();
            #[expect(
                clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss,
                reason = "a test's numbers"
            )]
            let at = ((part * times.len() as f64).ceil() as usize).clamp(1, times.len()) - 1;
            let found = quantile(histogram.counts(), part).expect("there are some");
            prop_assert!(found >= times[at] / 2 && found <= times[at].saturating_mul(2), "{found} {}", times[at]);
        }
    }
}
