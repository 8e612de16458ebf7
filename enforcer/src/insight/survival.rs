//! How long allocations live: the share that is still there at an age, as Kaplan and Meier estimate it.
//!
//! Pure. What has not ended yet counts for as long as it has lived and no longer, so that a short look is not taken for
//! short lives.

/// Ages at which the curve is told, nanoseconds: from 1 ms on, each four times the one before, up to 3 days.
pub const AGES: [u64; 15] = {
    let mut ages = [1_000_000; 15];
    let mut at = 1;
    while at < ages.len() {
        ages[at] = ages[at - 1] * 4;
        at += 1;
    }
    ages
};

/// Lives that have ended, by the first of [`AGES`] that they did not reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends([u64; AGES.len() + 1]);

fn place(age_ns: u64) -> usize {
    AGES.partition_point(|limit| *limit <= age_ns)
}

impl Ends {
    /// A life has ended at this age.
    pub fn add(&mut self, age_ns: u64) {
        self.0[place(age_ns)] += 1;
    }

    /// The share of allocations that reaches each age, as far as the look has lasted; `living` are the ages of those that
    /// have not ended.
    pub fn curve(&self, living: &[u64]) -> Vec<(u64, f64)> {
        let mut going_on = [0_u64; AGES.len() + 1];
        for age in living {
            going_on[place(*age)] += 1;
        }
        let mut at_risk: u64 = self.0.iter().chain(&going_on).sum();
        let mut share = 1.0;
        let mut curve = Vec::new();
        for ((age, ended), left) in AGES.into_iter().zip(self.0).zip(going_on) {
            if at_risk == 0 {
                break;
            }
            // Who left in the span was there for half of it, on average.
            let watched = precise(at_risk) - precise(left) / 2.0;
            if ended > 0 {
                share *= (1.0 - precise(ended) / watched.max(precise(ended))).max(0.0);
            }
            at_risk -= ended + left;
            // Nobody was watched for so long: what was the share is not known to be it any more.
            if at_risk == 0 && left > 0 {
                break;
            }
            curve.push((age, share));
        }
        curve
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of allocations, for a share"
)]
fn precise(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn without_anybody_left_it_is_the_plain_share() {
        let mut ends = Ends::default();
        for age in [MS / 2, 2 * MS, 2 * MS, 10 * MS] {
            ends.add(age);
        }
        let curve = ends.curve(&[]);
        assert_eq!(curve[0], (MS, 0.75));
        assert_eq!(curve[1], (4 * MS, 0.25));
        assert_eq!(curve[2], (16 * MS, 0.0));
        assert_eq!(curve.len(), 3, "nobody is left to tell more");
    }

    #[test]
    fn who_never_ends_survives_as_long_as_was_looked() {
        let ends = Ends::default();
        let curve = ends.curve(&[70 * MS; 5]);
        assert_eq!(
            curve,
            [(MS, 1.0), (4 * MS, 1.0), (16 * MS, 1.0), (64 * MS, 1.0)]
        );
        assert!(ends.curve(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn it_falls_from_one_and_never_below_zero(
            ended in proptest::collection::vec(0..u64::MAX / 2, 0..200),
            living in proptest::collection::vec(0..u64::MAX / 2, 0..200),
        ) {
            let mut ends = Ends::default();
            for age in ended {
                ends.add(age);
            }
            let mut last = 1.0;
            for (_, share) in ends.curve(&living) {
                prop_assert!((0.0..=last).contains(&share));
                last = share;
            }
        }
    }
}
