//! What the driver takes for a process by itself: what NVML shows for it, less what the ledger knows.
//!
//! Pure. NVML and the ledger are never read at the same moment, and a process that allocates meanwhile makes them differ.
//! So one look says little. What is charged is what the last looks agree on while the ledger stood still; it is lowered to
//! the most that they say. Of a process that allocates and frees all the time only what is far more than a context, in many
//! looks one after the other, is believed. A value that sways between two looks therefore stays where it is.
//!
//! The driver's own part is small and about the same for every context. What is far above it was obtained behind the
//! ledger's back.

use std::collections::{BTreeMap, VecDeque};

/// Looks that have to agree.
const LOOKS: usize = 3;
/// Looks that have to say at least that much of a process whose ledger does not stand still.
const MANY_LOOKS: usize = 10;
/// Differences below this are not worth a change.
const STEP: u64 = 1 << 20;

/// A process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Process.
    pub tgid: u32,
    /// When it was started, clock ticks since boot: its number may be used again.
    pub started: u64,
    /// GPU.
    pub gpu: u32,
}

/// What one look at a process says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Bytes by NVML.
    pub nvml: u64,
    /// Bytes of its memory objects, in the ledger.
    pub ledger: u64,
    /// What is charged for its contexts now.
    pub charged: u64,
    /// Its contexts; 0 if none was seen.
    pub contexts: u64,
    /// Whether its tenant pays for contexts.
    pub pays: bool,
    /// Whether all that it did was seen, so that what is not in the ledger got past it.
    pub observed: bool,
}

/// What to do about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Bytes to charge for its contexts from now on.
    pub bytes: u64,
    /// Whether this is more than its contexts explain, and news.
    pub hidden: bool,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    /// What NVML had beyond the ledger, and whether the ledger stood still; newest last.
    looks: VecDeque<(u64, bool)>,
    /// Objects in the ledger at the last look.
    ledger: Option<u64>,
    /// What was called hidden already.
    told: u64,
}

/// The processes that NVML shows.
#[derive(Clone, Debug, Default)]
pub struct Contexts {
    seen: BTreeMap<Holder, Seen>,
    /// What the driver takes for one context, by GPU, as last seen.
    usual: BTreeMap<u32, u64>,
}

impl Contexts {
    /// Takes a look at a process. `bound` is the most that the driver takes for one context.
    pub fn look(&mut self, holder: Holder, look: Look, bound: u64) -> Option<Charge> {
        let seen = self.seen.entry(holder).or_default();
        // NVML was read between this look and the one before: it has seen one of these, or something between.
        let ledger = seen.ledger.replace(look.ledger).unwrap_or(look.ledger);
        let known = ledger.max(look.ledger);
        if seen.looks.len() == MANY_LOOKS {
            seen.looks.pop_front();
        }
        let beyond = look.nvml.saturating_sub(known);
        seen.looks.push_back((beyond, ledger == look.ledger));
        if seen.looks.len() < LOOKS {
            return None;
        }
        // Who has no context gives the driver nothing to take by itself. A program that allocates and frees in step with the
        // looks seems to hold what it does not; it does not stay in step for long.
        let needed = if look.contexts == 0 {
            MANY_LOOKS
        } else {
            LOOKS
        };
        let recent = || seen.looks.iter().rev().take(needed);
        let lowest = recent().map(|(beyond, _)| *beyond).min().unwrap_or(0);
        let most = recent().map(|(beyond, _)| *beyond).max().unwrap_or(0);
        let agree =
            seen.looks.len() >= needed && most - lowest < STEP && recent().all(|(_, still)| *still);
        let allowed = bound.saturating_mul(look.contexts.max(1));
        let part = |bytes: u64| {
            if look.pays {
                bytes
            } else {
                bytes.saturating_sub(allowed)
            }
        };
        // What is believed to be there at least.
        let sure = if agree {
            lowest
        } else {
            let many = (seen.looks.len() == MANY_LOOKS)
                .then(|| seen.looks.iter().map(|(beyond, _)| *beyond).min())
                .flatten();
            many.filter(|least| *least > allowed).unwrap_or(0)
        };
        if agree && look.contexts > 0 && sure <= allowed {
            self.usual.insert(holder.gpu, sure / look.contexts);
        }
        let wanted = if part(sure) > look.charged {
            part(sure)
        } else if part(most) < look.charged {
            part(most)
        } else {
            look.charged
        };
        let hidden = look.observed && sure > allowed && sure - allowed >= seen.told + STEP;
        if agree && sure <= allowed {
            seen.told = 0;
        } else if hidden {
            seen.told = sure - allowed;
        }
        let is_change = wanted.abs_diff(look.charged) >= STEP || wanted == 0 && look.charged > 0;
        (is_change || hidden).then_some(Charge {
            bytes: wanted,
            hidden,
        })
    }

    /// What a context on this GPU will probably take.
    pub fn usual(&self, gpu: u32) -> u64 {
        self.usual.get(&gpu).copied().unwrap_or(0)
    }

    /// Forgets processes that NVML does not show any more, and names them.
    pub fn retain(&mut self, shown: impl Fn(&Holder) -> bool) -> Vec<Holder> {
        let gone: Vec<Holder> = self
            .seen
            .keys()
            .filter(|holder| !shown(holder))
            .copied()
            .collect();
        for holder in &gone {
            self.seen.remove(holder);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const BOUND: u64 = 256 * MIB;

    fn holder() -> Holder {
        Holder {
            tgid: 7,
            started: 1,
            gpu: 0,
        }
    }

    fn look(nvml: u64, ledger: u64, charged: u64) -> Look {
        Look {
            nvml: nvml * MIB,
            ledger: ledger * MIB,
            charged: charged * MIB,
            contexts: 1,
            pays: true,
            observed: true,
        }
    }

    /// Lets it look until nothing changes, and tells what is charged then.
    fn settle(contexts: &mut Contexts, mut look: Look) -> (u64, bool) {
        let mut hidden = false;
        for _ in 0..3 * LOOKS {
            if let Some(charge) = contexts.look(holder(), look, BOUND) {
                look.charged = charge.bytes;
                hidden |= charge.hidden;
            }
        }
        (look.charged / MIB, hidden)
    }

    #[test]
    fn what_the_driver_takes_is_charged_and_given_back() {
        let mut contexts = Contexts::default();
        assert_eq!(settle(&mut contexts, look(520, 500, 0)), (20, false));
        assert_eq!(contexts.usual(0), 20 * MIB);
        // A larger heap in the driver, and a smaller one again.
        assert_eq!(settle(&mut contexts, look(550, 500, 20)), (50, false));
        assert_eq!(settle(&mut contexts, look(1510, 1500, 50)), (10, false));
        assert_eq!(settle(&mut contexts, look(1500, 1500, 10)), (0, false));
    }

    #[test]
    fn an_allocation_between_the_two_readings_is_no_context() {
        let mut contexts = Contexts::default();
        for _ in 0..LOOKS {
            assert_eq!(contexts.look(holder(), look(520, 520, 0), BOUND), None);
        }
        // The ledger is ahead of NVML, then NVML of the ledger.
        assert_eq!(contexts.look(holder(), look(520, 1520, 0), BOUND), None);
        assert_eq!(contexts.look(holder(), look(1520, 1520, 0), BOUND), None);
        assert_eq!(contexts.look(holder(), look(1520, 520, 0), BOUND), None);
        assert_eq!(contexts.look(holder(), look(520, 520, 0), BOUND), None);
    }

    #[test]
    fn far_more_than_a_context_takes_got_past_the_ledger() {
        let mut contexts = Contexts::default();
        let more = look(520 + 2048, 500, 0);
        assert_eq!(settle(&mut contexts, more), (2068, true));
        // Told once; again when there is more.
        let same = look(520 + 2048, 500, 2068);
        assert_eq!(settle(&mut contexts, same), (2068, false));
        let again = look(520 + 3072, 500, 2068);
        assert_eq!(settle(&mut contexts, again), (3092, true));
        // Of a process that was there before, nobody saw what it did.
        let before = Look {
            observed: false,
            ..look(4000, 0, 0)
        };
        assert_eq!(settle(&mut Contexts::default(), before), (4000, false));
    }

    #[test]
    fn who_does_not_pay_for_contexts_pays_for_what_is_beyond_them() {
        let free = |nvml| Look {
            pays: false,
            ..look(nvml, 500, 0)
        };
        assert_eq!(settle(&mut Contexts::default(), free(700)), (0, false));
        assert_eq!(
            settle(&mut Contexts::default(), free(500 + 256 + 100)),
            (100, true)
        );
    }

    #[test]
    fn who_is_gone_is_forgotten() {
        let mut contexts = Contexts::default();
        contexts.look(holder(), look(520, 500, 0), BOUND);
        assert_eq!(contexts.retain(|_| true), []);
        assert_eq!(contexts.retain(|_| false), [holder()]);
        assert_eq!(contexts.retain(|_| false), []);
    }

    proptest! {
        /// However a process allocates between looks, as long as NVML and the ledger tell the same story at different
        /// moments it is never charged more than the driver's own part, and ends at exactly that.
        #[test]
        fn racing_allocations_are_never_charged_twice(
            own in 0u64..100,
            sizes in prop::collection::vec(0u64..4000, 1..40),
        ) {
            let mut contexts = Contexts::default();
            let mut charged = 0;
            let mut before = sizes[0];
            let mut take = |contexts: &mut Contexts, nvml: u64, ledger: u64| {
                let seen = look(nvml + own, ledger, charged);
                if let Some(charge) = contexts.look(holder(), seen, BOUND) {
                    charged = charge.bytes / MIB;
                    prop_assert!(!charge.hidden);
                }
                prop_assert!(charged <= own);
                Ok(())
            };
            for size in sizes {
                // NVML was read at some moment since the last look.
                for nvml in [before, size] {
                    take(&mut contexts, nvml, size)?;
                }
                before = size;
            }
            for _ in 0..2 * LOOKS {
                take(&mut contexts, before, before)?;
            }
            prop_assert_eq!(charged, own);
        }

        /// NVML may be read at any moment of a process that allocates and frees without a pause.
        #[test]
        fn a_busy_process_is_not_charged_for_its_own_memory(
            own in 0u64..100,
            moments in prop::collection::vec((0u64..320, 0u64..320), 4..80),
        ) {
            let mut contexts = Contexts::default();
            let mut charged = 0;
            for (at, (nvml, ledger)) in moments.iter().enumerate() {
                // Never the same twice in a row: it is busy.
                let ledger = 4 * ledger + 2 * (at as u64 % 2);
                let seen = look(4 * nvml + own, ledger, charged);
                if let Some(charge) = contexts.look(holder(), seen, BOUND) {
                    charged = charge.bytes / MIB;
                }
                prop_assert_eq!(charged, 0);
            }
        }

        /// A value that sways does not make the charge sway.
        #[test]
        fn no_flapping(values in prop::collection::vec(0u64..200, 2), rounds in 4usize..40) {
            let mut contexts = Contexts::default();
            let mut charged = 0;
            let mut changes = 0;
            for round in 0..rounds {
                let seen = look(500 + values[round % 2], 500, charged);
                if let Some(charge) = contexts.look(holder(), seen, BOUND) {
                    charged = charge.bytes / MIB;
                    changes += 1;
                }
            }
            prop_assert!(changes <= 1);
        }
    }
}
