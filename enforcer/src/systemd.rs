//! What systemd is told: how it stands with the daemon, and signs of life for its watchdog, which ends a daemon that gives none and
//! starts another. Limits hold meanwhile.
//!
//! The daemon is well if its event thread goes round and a question about a tenant is answered: between them they need most
//! of what threads could keep from each other.

use std::{sync::Arc, time::Duration};

use sd_notify::NotifyState;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval, timeout},
};
use tracing::{error, warn};

use crate::enforcer::Enforcer;

/// So many signs of life are due in the time after which systemd ends the daemon.
const SIGNS: u32 = 4;

/// Tells systemd something. Without systemd there is nobody to tell.
pub fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!(%error, "systemd could not be told");
    }
}

/// Gives signs of life as long as the daemon is well. `limit` is systemd's patience.
pub async fn give_signs_of_life(enforcer: Arc<Enforcer>, limit: Duration) {
    let mut ticks = interval(limit / SIGNS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Asked once until it is answered: threads that wait for ever would pile up.
    let mut asked: Option<JoinHandle<bool>> = None;
    let mut silent = false;
    loop {
        ticks.tick().await;
        let mut question = asked.take().unwrap_or_else(|| {
            let enforcer = Arc::clone(&enforcer);
            spawn_blocking(move || enforcer.is_well(limit / 2))
        });
        let well = if let Ok(answer) = timeout(limit / SIGNS, &mut question).await {
            answer.unwrap_or(false)
        } else {
            asked = Some(question);
            false
        };
        if well {
            tell(&[NotifyState::Watchdog]);
        } else if !silent {
            error!(
                "the event thread stands still, or questions are not answered: no sign of life for systemd's watchdog"
            );
        }
        silent = !well;
    }
}
