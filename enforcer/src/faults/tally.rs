//! How many faults there were, by tenant and by GPU, in bounded memory.

use std::collections::BTreeMap;

use super::{Attribution, Certainty};

/// Codes that are told apart for one tenant or GPU; further ones count as code 0.
const CODES: usize = 32;

/// Faults of one tenant on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Those of which the driver named the process.
    pub certain: u64,
    /// Those of which only the GPU is known.
    pub uncertain: u64,
    /// Certain and uncertain ones by code; 0 for codes beyond those that are told apart.
    pub by_code: BTreeMap<u32, u64>,
}

/// Counts since the daemon runs.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    tenants: BTreeMap<(u32, u32), Counts>,
    gpus: BTreeMap<u32, BTreeMap<u32, u64>>,
}

impl Tally {
    /// Counts a fault on a GPU and whom it was laid to.
    pub fn note(&mut self, gpu: u32, xid: u32, attributions: &[Attribution]) {
        count(self.gpus.entry(gpu).or_default(), xid);
        for attribution in attributions {
            let Some(tenant) = attribution.tenant else {
                continue;
            };
            let counts = self.tenants.entry((tenant, gpu)).or_default();
            match attribution.certainty {
                Certainty::Process => counts.certain += 1,
                Certainty::Gpu => counts.uncertain += 1,
            }
            count(&mut counts.by_code, xid);
        }
    }

    /// Of one tenant on one GPU.
    pub fn of(&self, tenant: u32, gpu: u32) -> Counts {
        self.tenants
            .get(&(tenant, gpu))
            .cloned()
            .unwrap_or_default()
    }

    /// Of one GPU, by code.
    pub fn of_gpu(&self, gpu: u32) -> BTreeMap<u32, u64> {
        self.gpus.get(&gpu).cloned().unwrap_or_default()
    }
}

fn count(codes: &mut BTreeMap<u32, u64>, xid: u32) {
    let known = codes.contains_key(&xid) || codes.len() < CODES;
    *codes.entry(if known { xid } else { 0 }).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn to(tenant: Option<u32>, certainty: Certainty) -> Attribution {
        Attribution {
            tenant,
            pid: None,
            certainty,
        }
    }

    #[test]
    fn counts_by_tenant_and_gpu() {
        let mut tally = Tally::default();
        tally.note(0, 31, &[to(Some(1), Certainty::Process)]);
        tally.note(
            0,
            79,
            &[to(Some(1), Certainty::Gpu), to(Some(2), Certainty::Gpu)],
        );
        tally.note(1, 79, &[to(None, Certainty::Gpu)]);
        let one = tally.of(1, 0);
        assert_eq!((one.certain, one.uncertain), (1, 1));
        assert_eq!(one.by_code, BTreeMap::from([(31, 1), (79, 1)]));
        assert_eq!(tally.of(2, 0).uncertain, 1);
        assert_eq!(tally.of(1, 1), Counts::default());
        assert_eq!(tally.of_gpu(0), BTreeMap::from([(31, 1), (79, 1)]));
        assert_eq!(tally.of_gpu(1), BTreeMap::from([(79, 1)]));
    }

    proptest! {
        /// However many codes there are: all are counted, and few are kept.
        #[test]
        fn memory_has_a_bound(codes in prop::collection::vec(1u32.., 0..200)) {
            let mut tally = Tally::default();
            for code in &codes {
                tally.note(0, *code, &[to(Some(1), Certainty::Process)]);
            }
            let counts = tally.of(1, 0);
            prop_assert!(counts.by_code.len() <= CODES + 1);
            prop_assert_eq!(counts.by_code.values().sum::<u64>(), codes.len() as u64);
            prop_assert_eq!(counts.certain, codes.len() as u64);
        }
    }
}
