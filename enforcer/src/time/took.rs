//! How long controls take.

use std::{collections::VecDeque, time::Duration};

use serde_json::{Value, json};

/// Latest durations that are remembered.
const KEPT: usize = 1024;

/// Durations of one kind of control.
#[derive(Clone, Debug, Default)]
pub struct Took {
    count: u64,
    recent: VecDeque<Duration>,
}

impl Took {
    /// Adds one.
    pub fn add(&mut self, duration: Duration) {
        self.count += 1;
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back(duration);
    }

    /// Number, and p50, p99 and the longest of the latest, microseconds.
    pub fn to_json(&self) -> Value {
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        sorted.sort_unstable();
        let at = |percent: usize| {
            let index = (sorted.len().saturating_sub(1)) * percent / 100;
            sorted
                .get(index)
                .map(|duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
        };
        json!({"count": self.count, "p50_us": at(50), "p99_us": at(99), "max_us": at(100)})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_latest() {
        let mut took = Took::default();
        assert_eq!(took.to_json()["p50_us"], Value::Null);
        for micros in 0..2000 {
            took.add(Duration::from_micros(micros));
        }
        let json = took.to_json();
        assert_eq!(
            (json["count"].as_u64(), json["max_us"].as_u64()),
            (Some(2000), Some(1999))
        );
        assert!(json["p50_us"].as_u64() > Some(976));
    }
}
