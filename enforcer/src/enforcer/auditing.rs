//! What is charged although the driver may not have it any more: it is asked.
//!
//! A preemptible kernel does not show every call to the programs, and a free whose argument was changed while it was made is
//! not believed. Nothing is released then that may be there still; so what is charged is compared with what the driver knows
//! by name, for every client, once after each such time.

use std::time::{Duration, Instant};

use gpuquota_common::map::{Object, ObjectKey, PARKED, counter, is_context, kind};
use tracing::{debug, info, warn};

use super::Enforcer;
use crate::{
    driver::sched,
    kernel::{Kernel, KernelError},
    lifecycle,
    open_files::{FileView as _, Holder},
    time::act::{ActError, Client, Reach},
};

/// After so many questions to the driver, some 20 ms, the clients that are left have their turn in the next look: each question
/// takes the driver's lock.
const MOST_QUESTIONS: usize = 4096;

/// Longest time from a comparison that found nothing to the next one: a process that changes its frees on purpose would keep
/// the driver busy with questions.
const LONGEST_REST: Duration = Duration::from_secs(10);

/// When the next comparison may begin.
#[derive(Debug, Default)]
struct Pace {
    rest: Duration,
    not_before: Option<Instant>,
}

impl Pace {
    fn may_begin(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|moment| now >= moment)
    }

    /// A comparison is over. In vain: the rest after it is twice as long.
    fn ended(&mut self, now: Instant, in_vain: bool) {
        self.rest = if in_vain {
            (self.rest * 2).clamp(Duration::from_secs(1), LONGEST_REST)
        } else {
            Duration::ZERO
        };
        self.not_before = Some(now + self.rest);
    }
}

/// How far the comparison is.
#[derive(Debug, Default)]
pub(super) struct Audit {
    pace: Pace,
    /// Whether the comparison that is going on has released something.
    has_released: bool,
    /// How often something had not been seen when the last comparison began. `None`: what the kernel passed over before this
    /// daemon is not known.
    unseen: Option<u64>,
    /// Clients whose turn has not come.
    left: Vec<u32>,
}

impl Enforcer {
    /// Goes on with the comparison, or begins a new one if there is a reason.
    pub(super) fn audit(&self, audit: &mut Audit) {
        if audit.left.is_empty() {
            if !audit.pace.may_begin(Instant::now()) {
                return;
            }
            let unseen = match self.unseen() {
                Ok(unseen) => unseen,
                Err(error) => {
                    warn!(%error, "not known whether calls were passed over");
                    return;
                }
            };
            let before = audit.unseen.replace(unseen);
            if before.unwrap_or(0) == unseen && (before.is_some() || !Kernel::may_pass_over()) {
                return;
            }
            audit.left = self
                .kernel
                .clients()
                .map(|(client, _)| client)
                .filter(|client| !is_context(*client))
                .collect();
            audit.has_released = false;
        }
        let mut questions = 0;
        while questions < MOST_QUESTIONS
            && let Some(client) = audit.left.pop()
        {
            match self.compare(client) {
                Ok(compared) => {
                    questions += compared.asked + 1;
                    audit.has_released |= compared.has_released;
                }
                Err(AuditError::Act(error)) if error.is_gone() => {}
                Err(error) => debug!(%error, client, "not compared with the driver"),
            }
        }
        if audit.left.is_empty() {
            audit.pace.ended(Instant::now(), !audit.has_released);
        }
    }

    /// Grows with every call that was not shown to the programs or not believed.
    fn unseen(&self) -> Result<u64, KernelError> {
        [counter::LATE_EXITS, counter::CHANGED_FREES]
            .into_iter()
            .try_fold(self.kernel.passed_over()?, |sum, index| {
                Ok(sum + self.kernel.counter(index)?)
            })
    }

    /// Releases what is charged for a client and is not there any more.
    fn compare(&self, handle: u32) -> Result<Compared, AuditError> {
        let key = ObjectKey {
            client: handle,
            handle,
        };
        let Some(client) = self.kernel.object(key) else {
            return Ok(Compared::default());
        };
        if client.kind != kind::CLIENT || client.tgid == PARKED {
            return Ok(Compared::default());
        }
        let charged: Vec<(ObjectKey, Object)> = self
            .kernel
            .objects_of(handle)
            .into_iter()
            .filter(|(_, object)| kind::is_memory(object.kind) || object.kind == kind::DUP)
            .collect();
        let reach = Reach::open(client.tgid, None, &*self.processes)?;
        let path = Client {
            handle,
            fd: client.fd,
        };
        let answer = reach.with_client(self.processes.control(), path, |file| {
            // Whether this is the client's file at all.
            sched::class_of(file, handle, handle)?;
            let mut gone = charged.clone();
            gone.retain(|(key, _)| {
                sched::class_of(file, handle, key.handle)
                    .is_err_and(|error| error.is_unknown_object())
            });
            Ok(gone)
        });
        let gone = match answer {
            Ok(gone) => gone,
            Err(ActError::NoFile { .. }) if self.is_freed(handle, client.file) => {
                info!(
                    client = handle,
                    tgid = client.tgid,
                    "the driver does not have this client any more: released"
                );
                lifecycle::release_subtree(&self.kernel, key)?;
                return Ok(Compared {
                    asked: 0,
                    has_released: true,
                });
            }
            // No descriptor of its process is its file: the sweep sees to that.
            Err(error) => return Err(error.into()),
        };
        if !gone.is_empty() {
            info!(
                client = handle,
                tgid = client.tgid,
                objects = gone.len(),
                bytes = gone.iter().map(|(_, object)| object.bytes).sum::<u64>(),
                "the driver does not have this memory any more: released"
            );
        }
        for (key, object) in &gone {
            self.kernel.release_this(*key, object)?;
        }
        Ok(Compared {
            asked: charged.len(),
            has_released: !gone.is_empty(),
        })
    }

    /// Whether the file of a client is open and the driver does not know the client there.
    fn is_freed(&self, client: u32, file: u64) -> bool {
        file != 0
            && self.open_files.is_open(file)
            && self.open_files.holder(client, file) == Holder::Nobody
    }
}

/// A client, compared with the driver.
#[derive(Debug, Default)]
struct Compared {
    /// Objects that the driver was asked for.
    asked: usize,
    has_released: bool,
}

/// Why the ledger could not be compared with the driver.
#[derive(Debug, thiserror::Error)]
enum AuditError {
    #[error(transparent)]
    Act(#[from] ActError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_in_vain_become_rare_and_one_that_finds_something_is_followed_at_once() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        assert!(pace.may_begin(now));
        for rest in [1, 2, 4, 8, 10, 10] {
            pace.ended(now, true);
            now += Duration::from_millis(1000 * rest - 1);
            assert!(!pace.may_begin(now));
            now += Duration::from_millis(1);
            assert!(pace.may_begin(now));
        }
        pace.ended(now, false);
        assert!(pace.may_begin(now));
    }
}
