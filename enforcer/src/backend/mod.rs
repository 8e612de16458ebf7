//! Which backend refuses allocations over a budget: the choice, from what the host offers and what the admin wants.
//!
//! [`choose`] is pure. What is offered is found out by [`host`] and by loading the programs
//! ([`Kernel::load_deny`](crate::kernel::Kernel::load_deny)).

pub mod host;

use gpuquota_common::map::deny;

use crate::{
    config::MemoryBackend,
    control::{Backend, BackendState},
};

/// The backends, best first.
pub const LADDER: [MemoryBackend; 5] = [
    MemoryBackend::Override,
    MemoryBackend::Rewrite,
    MemoryBackend::Notify,
    MemoryBackend::Lsm,
    MemoryBackend::Signal,
];

/// What the host lacks: for every backend that does not work here, why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lacking(Vec<(MemoryBackend, String)>);

impl Lacking {
    /// Notes that a backend does not work, and why.
    pub fn add(&mut self, backend: MemoryBackend, reason: String) {
        if self.reason(backend).is_none() {
            self.0.push((backend, reason));
        }
    }

    /// Why a backend does not work; `None` if it does.
    pub fn reason(&self, backend: MemoryBackend) -> Option<&str> {
        self.0
            .iter()
            .find_map(|(found, reason)| (*found == backend).then_some(reason.as_str()))
    }
}

/// A backend is wanted by name and the host does not offer it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("enforcement.memory = \"{wanted}\": this host does not offer it: {reason}")]
pub struct NotOffered {
    /// Which.
    pub wanted: MemoryBackend,
    /// Why not.
    pub reason: String,
}

/// Who decides about allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What decides about every process of a tenant: override, rewrite, lsm; signal if nothing can refuse; observe if
    /// nothing is to happen; notify if nothing more is wanted than that.
    pub everywhere: MemoryBackend,
    /// Whether the supervisor of a command that was started through us decides before that.
    pub supervised: bool,
}

impl Choice {
    /// Nothing is refused, and nobody is signalled.
    pub const OBSERVE: Self = Self {
        everywhere: MemoryBackend::Observe,
        supervised: false,
    };

    /// The same for the programs in the kernel, one of [`deny`].
    pub const fn deny(self) -> u16 {
        match self.everywhere {
            MemoryBackend::Override => deny::OVERRIDE,
            MemoryBackend::Rewrite => deny::REWRITE,
            MemoryBackend::Lsm => deny::LSM,
            _ => deny::NONE,
        }
    }

    /// Whether a backend decides about anything.
    pub fn uses(self, backend: MemoryBackend) -> bool {
        self.everywhere == backend || self.supervised && backend == MemoryBackend::Notify
    }

    /// Whether a process that got memory past its budget is answered as `memory.on-breach` says.
    pub fn answers_breaches(self) -> bool {
        self.everywhere != MemoryBackend::Observe
    }
}

/// Chooses.
///
/// `auto` takes the first backend that refuses for every process of a tenant with a clean error. Without one, commands
/// started through us are refused cleanly by their supervisor, and for the others the next rung holds.
pub fn choose(wanted: MemoryBackend, lacking: &Lacking) -> Result<Choice, NotOffered> {
    let offered = |backend| lacking.reason(backend).is_none();
    match wanted {
        MemoryBackend::Auto => {
            let first = |among: &[MemoryBackend]| among.iter().copied().find(|at| offered(*at));
            if let Some(everywhere) = first(&[MemoryBackend::Override, MemoryBackend::Rewrite]) {
                return Ok(Choice {
                    everywhere,
                    supervised: false,
                });
            }
            Ok(Choice {
                everywhere: first(&[MemoryBackend::Lsm]).unwrap_or(MemoryBackend::Signal),
                supervised: offered(MemoryBackend::Notify),
            })
        }
        MemoryBackend::Observe => Ok(Choice::OBSERVE),
        one => match lacking.reason(one) {
            None => Ok(Choice {
                everywhere: one,
                supervised: one == MemoryBackend::Notify,
            }),
            Some(reason) => Err(NotOffered {
                wanted: one,
                reason: reason.to_owned(),
            }),
        },
    }
}

/// Every backend with its state and the reason for it.
pub fn describe(wanted: MemoryBackend, lacking: &Lacking, choice: Choice) -> Vec<Backend> {
    LADDER
        .iter()
        .map(|backend| {
            let (state, reason) = if choice.uses(*backend) {
                (BackendState::Active, in_use(*backend, choice).to_owned())
            } else if let Some(reason) = lacking.reason(*backend) {
                (BackendState::Unavailable, reason.to_owned())
            } else if wanted == MemoryBackend::Auto {
                (
                    BackendState::Available,
                    format!("not needed: {} comes first", better(choice)),
                )
            } else {
                (
                    BackendState::Available,
                    format!("enforcement.memory is \"{wanted}\""),
                )
            };
            Backend {
                name: backend.to_string(),
                state,
                reason,
            }
        })
        .collect()
}

fn better(choice: Choice) -> String {
    if choice.supervised {
        format!("notify and {}", choice.everywhere)
    } else {
        choice.everywhere.to_string()
    }
}

fn in_use(backend: MemoryBackend, choice: Choice) -> &'static str {
    match backend {
        MemoryBackend::Override => {
            "decides for every process of a tenant: the call returns \"out of memory\" before the driver sees it"
        }
        MemoryBackend::Rewrite => {
            "decides for every process of a tenant: the call asks for more than a card has, so that the driver refuses it"
        }
        MemoryBackend::Notify if choice.everywhere == MemoryBackend::Notify => {
            "decides for every command started by `gpuquotactl run`, and for containers whose runtime hands their listener \
             over; what others get past their budget is answered by memory.on-breach"
        }
        MemoryBackend::Notify => {
            "decides for every command started by `gpuquotactl run`, and for containers whose runtime hands their listener \
             over"
        }
        MemoryBackend::Lsm if choice.supervised => {
            "decides for the processes of a tenant that were not started through us; they see CUDA error 304, not \"out of \
             memory\""
        }
        MemoryBackend::Lsm => {
            "decides for every process of a tenant; they see CUDA error 304, not \"out of memory\""
        }
        _ if choice.supervised => {
            "nothing on this host can refuse an allocation of a process that was not started through us: over budget it is \
             answered by memory.on-breach"
        }
        _ => "nothing is refused: a process over its budget is answered by memory.on-breach",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lacking(missing: &[MemoryBackend]) -> Lacking {
        let mut lacking = Lacking::default();
        for backend in missing {
            lacking.add(*backend, format!("no {backend} here"));
        }
        lacking
    }

    #[test]
    fn the_best_rung_is_taken() {
        use MemoryBackend::{Auto, Lsm, Notify, Override, Rewrite, Signal};
        for (missing, everywhere, supervised) in [
            (vec![], Override, false),
            (vec![Override], Rewrite, false),
            // Lockdown takes both away.
            (vec![Override, Rewrite], Lsm, true),
            (vec![Override, Rewrite, Lsm], Signal, true),
            (vec![Override, Rewrite, Notify], Lsm, false),
            (vec![Override, Rewrite, Notify, Lsm], Signal, false),
        ] {
            let choice = choose(Auto, &lacking(&missing)).expect("auto always finds something");
            assert_eq!(
                choice,
                Choice {
                    everywhere,
                    supervised
                },
                "without {missing:?}"
            );
        }
    }

    #[test]
    fn a_backend_that_is_wanted_by_name_is_had_or_its_absence_is_an_error_that_says_why() {
        for backend in LADDER {
            let choice = choose(backend, &Lacking::default()).expect("offered");
            assert!(choice.uses(backend));
            let error = choose(backend, &lacking(&[backend])).expect_err("not offered");
            assert!(
                error.to_string().contains(&format!("no {backend} here")),
                "{error}"
            );
        }
    }

    #[test]
    fn observing_does_nothing() {
        let choice = choose(MemoryBackend::Observe, &Lacking::default()).expect("always offered");
        assert!(!choice.answers_breaches() && !choice.supervised && choice.deny() == deny::NONE);
    }

    proptest! {
        /// Whatever the host lacks: nothing is used that it lacks, one backend decides for every process, and every
        /// backend is described.
        #[test]
        fn nothing_is_used_that_is_not_there(
            missing in prop::collection::vec(prop::sample::select(&LADDER[..4]), 0..5),
        ) {
            let lacking = lacking(&missing);
            let choice = choose(MemoryBackend::Auto, &lacking).expect("auto always finds something");
            for backend in LADDER {
                prop_assert!(!(choice.uses(backend) && lacking.reason(backend).is_some()));
            }
            prop_assert!(choice.answers_breaches());
            let described = describe(MemoryBackend::Auto, &lacking, choice);
            prop_assert_eq!(described.len(), LADDER.len());
            prop_assert!(described.iter().all(|backend| !backend.reason.is_empty()));
        }
    }
}
