//! One tenant on one GPU.

use super::{ring::Ring, small::Small};

/// Seconds that are kept second by second.
pub const FINE: u64 = 600;
/// Seconds that are kept in tens of seconds.
const MEDIUM: u64 = 7200;
/// Seconds that are kept in minutes, and after which a track without use ends.
pub const LONGEST: u64 = 86_400;
const MEDIUM_STEP: u64 = 10;
const COARSE_STEP: u64 = 60;
/// Seconds over which growth is averaged.
const RATE: u64 = 60;

/// Mean and peak of a span.
type Pair = [Small; 2];

/// Points in equal steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// Seconds of one step.
    pub step: u64,
    /// Number of the first step: its first second is `first * step`.
    pub first: u64,
    /// Mean and peak in bytes, `None` where nobody looked.
    pub points: Vec<Option<(u64, u64)>>,
}

impl Series {
    /// Peaks in `columns` equal parts of the time from `from` to `to`, in seconds; `None` where nobody looked.
    pub fn columns(&self, from: u64, to: u64, columns: usize) -> Vec<Option<u64>> {
        let mut out = vec![None; columns];
        let span = to.saturating_sub(from).max(1);
        for (index, point) in self.points.iter().enumerate() {
            let Some((_, peak)) = point else { continue };
            // A step is in every column that it touches.
            let begin = (self.first + index as u64) * self.step;
            let end = begin + self.step;
            if end <= from || begin >= to {
                continue;
            }
            let part = |second: u64| u128::from(second.saturating_sub(from)) * columns as u128;
            let place = |part: u128| usize::try_from(part).unwrap_or(usize::MAX);
            let first = place(part(begin.max(from)) / u128::from(span));
            let last = place(part(end.min(to)).div_ceil(u128::from(span)));
            for cell in out.iter_mut().take(last).skip(first) {
                *cell = (*cell).max(Some(*peak));
            }
        }
        out
    }
}

/// A span that is not over.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    step: u64,
    sum: u128,
    count: u64,
    peak: u64,
}

impl Open {
    /// Takes a sample in; gives the span before it back if that is over.
    fn add(&mut self, step: u64, bytes: u64) -> Option<(u64, Pair)> {
        let over = (self.count > 0 && step != self.step).then(|| (self.step, self.pair()));
        if over.is_some() {
            *self = Self::default();
        }
        self.step = step;
        self.sum += u128::from(bytes);
        self.count += 1;
        self.peak = self.peak.max(bytes);
        over
    }

    fn pair(&self) -> Pair {
        let mean = self.sum / u128::from(self.count.max(1));
        [
            Small::at_least(u64::try_from(mean).unwrap_or(u64::MAX)),
            Small::at_least(self.peak),
        ]
    }
}

/// What is known of one tenant on one GPU.
#[derive(Clone, Debug)]
pub struct Track {
    fine: Ring<Small>,
    medium: Ring<Pair>,
    coarse: Ring<Pair>,
    open: [Open; 2],
    used: u64,
    high_water: u64,
    /// The most that was ever charged when the track began.
    old_peak: u64,
    growth: u64,
    last_active: u64,
}

impl Track {
    /// A track of somebody who had `peak` at most before.
    pub fn new(peak: u64) -> Self {
        let gap = [Small::UNKNOWN; 2];
        let points = |seconds: u64, step: u64| usize::try_from(seconds / step).unwrap_or(0);
        Self {
            fine: Ring::new(points(FINE, 1), Small::UNKNOWN),
            medium: Ring::new(points(MEDIUM, MEDIUM_STEP), gap),
            coarse: Ring::new(points(LONGEST, COARSE_STEP), gap),
            open: [Open::default(); 2],
            used: 0,
            high_water: 0,
            old_peak: peak,
            growth: 0,
            last_active: 0,
        }
    }

    /// Notes what is charged in this second. `peak` is the most that was ever charged: a new one between two looks is seen.
    pub fn sample(&mut self, second: u64, bytes: u64, peak: u64) {
        self.growth += bytes.saturating_sub(self.used);
        self.used = bytes;
        self.high_water = self.high_water.max(bytes);
        if peak > self.old_peak {
            self.high_water = self.high_water.max(peak);
        }
        if bytes > 0 {
            self.last_active = second;
        }
        self.fine.push(second, Small::at_least(bytes));
        if let Some((step, pair)) = self.open[0].add(second / MEDIUM_STEP, bytes) {
            self.medium.push(step, pair);
        }
        if let Some((step, pair)) = self.open[1].add(second / COARSE_STEP, bytes) {
            self.coarse.push(step, pair);
        }
    }

    /// Bytes charged at the last look.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Most bytes charged since the track began.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }

    /// Bytes by which use grew from look to look, summed since the track began. What comes and goes between two looks is not
    /// in it.
    pub fn growth(&self) -> u64 {
        self.growth
    }

    /// Bytes a second by which use grew, over the last minute.
    pub fn growth_rate(&self) -> u64 {
        let mut grown = 0;
        let mut last: Option<(u64, u64)> = None;
        let mut first = None;
        let newest = self.fine.iter().next_back().map_or(0, |(second, _)| second);
        for (second, small) in self.fine.iter() {
            let Some(bytes) = small.bytes() else { continue };
            if second + RATE < newest {
                continue;
            }
            if let Some((_, before)) = last {
                grown += bytes.saturating_sub(before);
            }
            first.get_or_insert(second);
            last = Some((second, bytes));
        }
        grown / newest.saturating_sub(first.unwrap_or(newest)).max(1)
    }

    /// The last second with use.
    pub fn last_active(&self) -> u64 {
        self.last_active
    }

    /// The points of the last `since` seconds before `now`, in the finest steps that reach so far back.
    pub fn series(&self, since: u64, now: u64) -> Series {
        let from = now.saturating_sub(since);
        if since <= FINE {
            return cut(
                1,
                from,
                self.fine
                    .iter()
                    .map(|(step, small)| (step, small.bytes().map(|bytes| (bytes, bytes)))),
            );
        }
        let (step, ring, open) = if since <= MEDIUM {
            (MEDIUM_STEP, &self.medium, &self.open[0])
        } else {
            (COARSE_STEP, &self.coarse, &self.open[1])
        };
        let now_open = (open.count > 0).then(|| (open.step, open.pair()));
        cut(
            step,
            from,
            ring.iter()
                .chain(now_open)
                .map(|(step, [mean, peak])| (step, mean.bytes().zip(peak.bytes()))),
        )
    }

    /// Bytes of heap that it takes.
    pub fn bytes(&self) -> usize {
        self.fine.bytes() + self.medium.bytes() + self.coarse.bytes()
    }
}

/// The points whose span is not over before `from`.
fn cut(step: u64, from: u64, points: impl Iterator<Item = (u64, Option<(u64, u64)>)>) -> Series {
    let mut series = Series {
        step,
        first: 0,
        points: Vec::new(),
    };
    for (at, point) in points.filter(|(at, _)| (at + 1) * step > from) {
        if series.points.is_empty() {
            series.first = at;
        }
        // The open span comes after a gap if nobody looked meanwhile.
        let missing = at.saturating_sub(series.first + series.points.len() as u64);
        for _ in 0..missing {
            series.points.push(None);
        }
        series.points.push(point);
    }
    series
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn track(samples: impl IntoIterator<Item = (u64, u64)>) -> Track {
        let mut track = Track::new(0);
        for (second, bytes) in samples {
            track.sample(second, bytes, bytes);
        }
        track
    }

    #[test]
    fn each_reach_has_its_step() {
        let track = track((0..LONGEST).map(|second| (second, (second % 60) * GIB)));
        let fine = track.series(60, LONGEST - 1);
        assert_eq!((fine.step, fine.points.len()), (1, 61));
        assert_eq!(fine.points.last(), Some(&Some((59 * GIB, 59 * GIB))));
        let medium = track.series(7200, LONGEST - 1);
        assert_eq!((medium.step, medium.points.len()), (10, 721));
        let coarse = track.series(LONGEST, LONGEST - 1);
        assert_eq!((coarse.step, coarse.points.len()), (60, 1440));
        let (mean, peak) = coarse.points[700].expect("looked at");
        assert!(mean.abs_diff(59 * GIB / 2) < GIB / 10 && peak.abs_diff(59 * GIB) < GIB / 10);
    }

    #[test]
    fn high_water_knows_what_was_between_two_looks() {
        let mut track = Track::new(5 * GIB);
        track.sample(1, GIB, 5 * GIB);
        assert_eq!(track.high_water(), GIB, "an older peak is not this one's");
        track.sample(2, GIB, 7 * GIB);
        assert_eq!(track.high_water(), 7 * GIB);
    }

    #[test]
    fn growth_is_what_came_and_not_what_went() {
        let track = track([(0, 0), (1, GIB), (2, 3 * GIB), (3, 0), (4, GIB)]);
        assert_eq!(track.growth(), 4 * GIB);
        assert_eq!(track.growth_rate(), GIB);
        // A minute later it stands still.
        let mut later = track.clone();
        for second in 5..100 {
            later.sample(second, GIB, 3 * GIB);
        }
        assert_eq!(later.growth_rate(), 0);
    }

    #[test]
    fn columns_show_peaks_where_they_were() {
        let track =
            track((0..100).map(|second| (second, if second == 42 { 2 * GIB } else { GIB })));
        let columns = track.series(100, 100).columns(0, 100, 10);
        let wanted: Vec<_> = (0..10)
            .map(|column| Some(if column == 4 { 2 * GIB } else { GIB }))
            .collect();
        assert_eq!(columns, wanted);
        // More columns than points: no holes.
        assert!(
            track
                .series(100, 100)
                .columns(0, 100, 250)
                .iter()
                .all(Option::is_some)
        );
        // Before it began nobody looked.
        let columns = track.series(200, 100).columns(0, 200, 4);
        assert_eq!(columns.iter().filter(|cell| cell.is_none()).count(), 2);
        assert_eq!(track.series(100, 100).columns(0, 0, 3).len(), 3);
    }

    proptest! {
        /// No peak is lost or shown lower, however long ago and however coarse.
        #[test]
        fn peaks_are_never_hidden(
            samples in prop::collection::vec((1u64..50, 0u64..200 * GIB), 1..200),
            since in 1u64..LONGEST,
        ) {
            let mut second = 0;
            let samples: Vec<_> = samples.into_iter().map(|(by, bytes)| { second += by; (second, bytes) }).collect();
            let now = second;
            let series = track(samples.clone()).series(since, now);
            let seen = series.points.iter().flatten().map(|(_, peak)| *peak).max().unwrap_or(0);
            let true_peak = samples.iter()
                .filter(|(second, _)| *second > now.saturating_sub(since))
                .map(|(_, bytes)| *bytes).max().unwrap_or(0);
            prop_assert!(seen >= true_peak);
            for (mean, peak) in series.points.iter().flatten() {
                prop_assert!(mean <= peak);
            }
        }
    }
}
