//! How what a call site holds grows: a bounded series of looks, and the line through it.
//!
//! Pure.

/// Looks that are kept; when they are full, every other one goes and they are taken half as often.
const KEPT: usize = 64;

/// What was held when, from the first look on.
#[derive(Clone, Debug)]
pub struct Trend {
    looks: Vec<(u64, u64)>,
    every: u32,
    skipped: u32,
}

impl Default for Trend {
    fn default() -> Self {
        Self {
            looks: Vec::new(),
            every: 1,
            skipped: 0,
        }
    }
}

impl Trend {
    /// So many bytes are held at this moment, nanoseconds.
    pub fn look(&mut self, at_ns: u64, held: u64) {
        self.skipped += 1;
        if self.skipped < self.every {
            return;
        }
        self.skipped = 0;
        self.looks.push((at_ns, held));
        if self.looks.len() >= KEPT {
            let mut index = 0;
            self.looks.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.every = self.every.saturating_mul(2);
        }
    }

    /// Bytes a second by which it grows (the slope of the least squares); none before the third look.
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate of change, in bytes and seconds"
    )]
    pub fn growth(&self) -> Option<f64> {
        if self.looks.len() < 3 {
            return None;
        }
        let first = self.looks[0].0;
        let points: Vec<(f64, f64)> = self
            .looks
            .iter()
            .map(|(at, held)| (at.saturating_sub(first) as f64 / 1e9, *held as f64))
            .collect();
        let count = points.len() as f64;
        let (x, y) = points
            .iter()
            .fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        let (x, y) = (x / count, y / count);
        let (over, under) = points.iter().fold((0.0, 0.0), |(over, under), point| {
            let away = point.0 - x;
            (over + away * (point.1 - y), under + away * away)
        });
        (under > 0.0).then(|| over / under)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_steady_leak_is_its_rate_and_a_full_cache_is_none() {
        let (mut leak, mut cache) = (Trend::default(), Trend::default());
        assert_eq!(leak.growth(), None);
        for second in 0..1000 {
            leak.look(7 * S + second * S, 500 + 100 * second);
            cache.look(7 * S + second * S, 4096);
            assert!(leak.looks.len() < KEPT);
        }
        assert!((leak.growth().expect("enough") - 100.0).abs() < 1e-6);
        assert_eq!(cache.growth(), Some(0.0));
    }

    #[test]
    fn moments_that_stand_still_are_no_trend() {
        let mut trend = Trend::default();
        for held in 0..5 {
            trend.look(S, held);
        }
        assert_eq!(trend.growth(), None);
    }
}
