//! What goes to the log for an admin: notices, each kind with a message id of its own, and none of them as a flood.
//!
//! `docs/logs.md` lists the ids and fields; `systemd/gpuquota.catalog` explains them to `journalctl -x`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tokio::sync::broadcast::{self, error::RecvError};
use tracing::{info, warn};

use crate::control::Notice;

/// An allocation was refused.
pub const DENIED: &str = "6c1d9a0f5b3e4e0f8f0c7a4d1e2b9a31";
/// An allocation above the limit went through.
pub const BREACHED: &str = "e2f4a7c81d0b4b7f9a6e53c8d7f1b042";
/// Usage rose above `memory.high`.
pub const HIGH: &str = "0b7d3e95c2a84f6e8d1f6b9a4c5e7d13";
/// Launches are being delayed.
pub const THROTTLED: &str = "93ac5e1f7d204c8ba5f0d6e8b1c39724";
/// A process is ended because it launches too fast.
pub const LAUNCH_DENIED: &str = "d5809b6e3f1a4d27b8c4e7a09f6d2b35";
/// A launch storm.
pub const STORM: &str = "4fe1c2b8a97d4360bd5e8f7c6a1b0d46";
/// A kernel took unusually long.
pub const ANOMALY: &str = "27d8a5c30e9b4f61a4b7c9d2e8f05136";
/// The driver reported an error on a GPU.
pub const XID: &str = "b72f90c3d8154ea6a1c47d0e5f6b2398";
/// Managed memory was moved to the host.
pub const RECLAIMED: &str = "c4a70b91e2f64d83b15e9d7a3f8c6025";
/// A policy came into force.
pub const POLICY_LOADED: &str = "a8c6d4e2f0b1495783d2c1b0a9f8e757";
/// A policy did not load, and the one before stays in force.
pub const POLICY_FAILED: &str = "7d0e2c4b6a894f1e93b5d7f9c1a3e568";
/// A tenant's cgroup appeared or went away.
pub const CGROUP: &str = "1e9b8d7c6f5a4e3d92c1b0af9e8d7c79";

/// Every id, with the word that names it in the documentation.
pub const MESSAGES: [(&str, &str); 12] = [
    ("denied", DENIED),
    ("breached", BREACHED),
    ("high", HIGH),
    ("reclaimed", RECLAIMED),
    ("throttled", THROTTLED),
    ("launch-denied", LAUNCH_DENIED),
    ("storm", STORM),
    ("anomaly", ANOMALY),
    ("xid", XID),
    ("policy-loaded", POLICY_LOADED),
    ("policy-failed", POLICY_FAILED),
    ("cgroup", CGROUP),
];

/// How often one kind of notice about one tenant is written at most.
const INTERVAL: Duration = Duration::from_secs(10);
/// Tenants and kinds that are remembered; beyond it the oldest are forgotten, which at worst writes a line more.
const REMEMBERED: usize = 4096;

/// Lets one message in each interval through, and counts the others.
#[derive(Debug, Default)]
struct Throttle {
    last: BTreeMap<(&'static str, String), (Instant, u64)>,
}

impl Throttle {
    /// Whether to write a message now; if so, how many like it were kept back since the last one.
    fn pass(&mut self, id: &'static str, tenant: &str, now: Instant) -> Option<u64> {
        let key = (id, tenant.to_owned());
        if let Some((at, kept_back)) = self.last.get_mut(&key)
            && now.saturating_duration_since(*at) < INTERVAL
        {
            *kept_back += 1;
            return None;
        }
        if self.last.len() >= REMEMBERED {
            self.last
                .retain(|_, (at, _)| now.saturating_duration_since(*at) < INTERVAL);
        }
        self.last
            .insert(key, (now, 0))
            .map_or(Some(0), |(_, kept_back)| Some(kept_back))
    }
}

/// Writes notices to the log until the daemon ends.
pub async fn follow(mut notices: broadcast::Receiver<Notice>) {
    let mut throttle = Throttle::default();
    loop {
        match notices.recv().await {
            Ok(notice) => write(&notice, &mut throttle, Instant::now()),
            // A flood: what matters of it is in the counters.
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

#[expect(
    clippy::too_many_lines,
    reason = "one arm for each kind of notice, with its fields"
)]
fn write(notice: &Notice, throttle: &mut Throttle, now: Instant) {
    match notice {
        Notice::Denied {
            tenant,
            limited_by,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => {
            if let Some(kept_back) = throttle.pass(DENIED, tenant, now) {
                warn!(
                    message_id = DENIED,
                    tenant,
                    limited_by,
                    key,
                    gpu,
                    object_pid = pid,
                    requested,
                    used,
                    limit,
                    kept_back,
                    "an allocation was refused"
                );
            }
        }
        Notice::Breached {
            tenant,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => {
            if let Some(kept_back) = throttle.pass(BREACHED, tenant, now) {
                warn!(
                    message_id = BREACHED,
                    tenant,
                    key,
                    gpu,
                    object_pid = pid,
                    requested,
                    used,
                    limit,
                    kept_back,
                    "an allocation went above the limit, and nothing could refuse it"
                );
            }
        }
        Notice::HighReached {
            tenant,
            gpu,
            used,
            high,
        } => {
            if let Some(kept_back) = throttle.pass(HIGH, tenant, now) {
                info!(
                    message_id = HIGH,
                    tenant, gpu, used, high, kept_back, "usage rose above memory.high"
                );
            }
        }
        Notice::Reclaimed {
            tenant,
            gpu,
            moved,
            wanted_by,
        } => {
            if let Some(kept_back) = throttle.pass(RECLAIMED, tenant, now) {
                info!(
                    message_id = RECLAIMED,
                    tenant,
                    gpu,
                    moved,
                    wanted_by,
                    kept_back,
                    "managed memory was moved to the host"
                );
            }
        }
        Notice::Throttled {
            tenant,
            pid,
            symbol,
            delayed,
            delay_usec,
        } => {
            if let Some(kept_back) = throttle.pass(THROTTLED, tenant, now) {
                info!(
                    message_id = THROTTLED,
                    tenant,
                    object_pid = pid,
                    symbol,
                    delayed,
                    delay_usec,
                    kept_back,
                    "launches are being delayed"
                );
            }
        }
        Notice::LaunchDenied {
            tenant,
            limited_by,
            pid,
            symbol,
            patience_usec,
        } => {
            if let Some(kept_back) = throttle.pass(LAUNCH_DENIED, tenant, now) {
                warn!(
                    message_id = LAUNCH_DENIED,
                    tenant,
                    limited_by,
                    object_pid = pid,
                    symbol,
                    patience_usec,
                    kept_back,
                    "a process launches too fast and is ended"
                );
            }
        }
        Notice::Storm {
            tenant,
            pid,
            symbol,
            wanted,
            budget,
        } => {
            if let Some(kept_back) = throttle.pass(STORM, tenant, now) {
                warn!(
                    message_id = STORM,
                    tenant,
                    object_pid = pid,
                    symbol,
                    wanted,
                    budget,
                    kept_back,
                    "a launch storm"
                );
            }
        }
        Notice::Anomaly {
            tenant,
            pid,
            kernel,
            duration_usec,
            usual_usec,
        } => {
            if let Some(kept_back) = throttle.pass(ANOMALY, tenant, now) {
                warn!(
                    message_id = ANOMALY,
                    tenant,
                    object_pid = pid,
                    kernel,
                    duration_usec,
                    usual_usec,
                    kept_back,
                    "a kernel took unusually long"
                );
            }
        }
        Notice::Xid {
            tenant,
            gpu,
            xid,
            pid,
            certainty,
            source,
            action,
            message,
        } => {
            if let Some(kept_back) = throttle.pass(XID, tenant, now) {
                warn!(
                    message_id = XID,
                    tenant,
                    gpu,
                    xid,
                    object_pid = pid,
                    certainty,
                    source,
                    action,
                    detail = message,
                    kept_back,
                    "a GPU fault"
                );
            }
        }
        // Written where they happen, with what else is known there.
        Notice::PolicyLoaded(_) | Notice::CgroupAttached { .. } | Notice::CgroupDetached { .. } => {
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_and_a_count() {
        let mut throttle = Throttle::default();
        let start = Instant::now();
        assert_eq!(throttle.pass(DENIED, "a", start), Some(0));
        for _ in 0..500 {
            assert_eq!(throttle.pass(DENIED, "a", start + INTERVAL / 2), None);
        }
        // Others are not kept back by it.
        assert_eq!(throttle.pass(DENIED, "b", start), Some(0));
        assert_eq!(throttle.pass(HIGH, "a", start), Some(0));
        assert_eq!(throttle.pass(DENIED, "a", start + INTERVAL), Some(500));
        assert_eq!(throttle.pass(DENIED, "a", start + INTERVAL * 3), Some(0));
    }

    #[test]
    fn what_is_remembered_has_an_end() {
        let mut throttle = Throttle::default();
        let start = Instant::now();
        for number in 0..REMEMBERED {
            throttle.pass(DENIED, &number.to_string(), start);
        }
        throttle.pass(DENIED, "one more", start + INTERVAL * 2);
        assert_eq!(throttle.last.len(), 1);
    }

    #[test]
    fn ids_are_as_the_journal_wants_them_and_are_all_documented() {
        let docs = include_str!("../../docs/logs.md");
        let catalog = include_str!("../../systemd/gpuquota.catalog");
        for (word, id) in MESSAGES {
            assert_eq!(id.len(), 32, "{word}");
            assert!(
                id.chars()
                    .all(|digit| matches!(digit, '0'..='9' | 'a'..='f')),
                "{word}"
            );
            assert!(docs.contains(&format!("| `{word}` | `{id}` |")), "{word}");
            assert!(catalog.contains(&format!("-- {id}\n")), "{word}");
        }
    }
}
