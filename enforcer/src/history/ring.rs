//! The last so many points of something that is looked at in equal steps.

/// Points are added in pieces: a short history takes little.
const PIECE: usize = 64;

/// Points by number of their step. What was not looked at is a gap.
#[derive(Clone, Debug)]
pub(super) struct Ring<T> {
    points: Vec<T>,
    capacity: usize,
    /// What a gap is filled with.
    gap: T,
    /// Where the oldest is once it is full.
    oldest: usize,
    /// Step of the newest.
    newest: u64,
}

impl<T: Copy> Ring<T> {
    pub(super) fn new(capacity: usize, gap: T) -> Self {
        Self {
            points: Vec::new(),
            capacity,
            gap,
            oldest: 0,
            newest: 0,
        }
    }

    /// Adds the point of a step; a step that is not after the last one is passed over.
    pub(super) fn push(&mut self, step: u64, point: T) {
        if !self.points.is_empty() {
            if step <= self.newest {
                return;
            }
            let gaps = usize::try_from(step - self.newest - 1).unwrap_or(usize::MAX);
            for _ in 0..gaps.min(self.capacity) {
                self.add(self.gap);
            }
        }
        self.add(point);
        self.newest = step;
    }

    fn add(&mut self, point: T) {
        if self.points.len() < self.capacity {
            if self.points.len() == self.points.capacity() {
                self.points
                    .reserve_exact(PIECE.min(self.capacity - self.points.len()));
            }
            self.points.push(point);
        } else {
            self.points[self.oldest] = point;
            self.oldest = (self.oldest + 1) % self.capacity;
        }
    }

    /// Step and point, oldest first.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, T)> + '_ {
        let length = self.points.len();
        (0..length).map(move |index| {
            let place = (self.oldest + index) % length.max(1);
            let age = (length - 1 - index) as u64;
            (self.newest.saturating_sub(age), self.points[place])
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.points.capacity() * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn gaps_are_kept_as_gaps() {
        let mut ring = Ring::new(4, -1);
        assert_eq!(ring.iter().count(), 0);
        ring.push(10, 1);
        ring.push(13, 2);
        ring.push(13, 3);
        ring.push(12, 4);
        let points: Vec<_> = ring.iter().collect();
        assert_eq!(points, [(10, 1), (11, -1), (12, -1), (13, 2)]);
        ring.push(1_000_000, 5);
        let points: Vec<_> = ring.iter().collect();
        assert_eq!(
            points,
            [(999_997, -1), (999_998, -1), (999_999, -1), (1_000_000, 5)]
        );
    }

    proptest! {
        /// It holds the last points, each at its step, and never more than it may.
        #[test]
        fn the_last_points_are_there(steps in prop::collection::vec(1u64..4, 0..300), capacity in 1usize..100) {
            let mut ring = Ring::new(capacity, None);
            let mut all = std::collections::BTreeMap::new();
            let mut step = 0;
            for by in steps {
                step += by;
                ring.push(step, Some(step));
                all.insert(step, step);
            }
            let kept: Vec<_> = ring.iter().collect();
            prop_assert!(kept.len() <= capacity);
            prop_assert!(kept.windows(2).all(|two| two[0].0 + 1 == two[1].0));
            for (at, point) in &kept {
                prop_assert_eq!(*point, all.get(at).copied());
            }
            if let Some((last, _)) = all.last_key_value() {
                prop_assert_eq!(kept.last().map(|(at, _)| *at), Some(*last));
                let first = all.first_key_value().map_or(0, |(at, _)| *at);
                prop_assert_eq!(kept.len() as u64, (last - first + 1).min(capacity as u64));
            }
        }
    }
}
