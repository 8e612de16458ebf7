//! GPU faults (Xids): where they are heard of, and whom they are laid to.
//!
//! [`message`] reads what the driver says, [`attribute`] decides who it was, [`source`] listens. The driver names a process
//! by its id where it knows it; nothing else in its text is believed, since it also holds names that tenants choose.

pub mod message;
pub mod source;
pub mod tally;

use std::{collections::BTreeSet, fmt};

pub use message::PciAddress;

/// Characters of the driver's text that are handed on.
const TEXT: usize = 200;

/// A fault as a source tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which GPU.
    pub device: Device,
    /// The driver's error code.
    pub xid: u32,
    /// The process that the driver names.
    pub pid: Option<u32>,
    /// What the driver says beside it; empty where the source does not tell.
    pub text: String,
}

/// How a source names a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// By its place on the bus.
    Pci(PciAddress),
    /// By NVML's index.
    Index(u32),
}

/// Where faults are heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The driver's tracepoint `nvidia:nvidia_dev_xid`.
    Tracepoint,
    /// Lines of the driver in the kernel's log.
    KernelLog,
    /// NVML's events.
    Nvml,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tracepoint => "tracepoint",
            Self::KernelLog => "kernel-log",
            Self::Nvml => "nvml",
        })
    }
}

/// How sure it is that a tenant has to do with a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Certainty {
    /// The driver named the process, and it is one that uses the GPU.
    Process,
    /// Only the GPU is known, and the tenant is one of those that use it.
    Gpu,
}

impl Certainty {
    /// The word for it in events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Gpu => "gpu",
        }
    }
}

/// Whom a fault is laid to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attribution {
    /// The tenant, by index; none for processes in no tenant, or if nobody uses the GPU.
    pub tenant: Option<u32>,
    /// The process that the driver names, also where it is not known to us.
    pub pid: Option<u32>,
    /// How sure that is.
    pub certainty: Certainty,
}

/// What has to be known about processes to lay a fault to somebody.
pub trait Parties {
    /// The tenant of a process that uses the driver or did until just now. `None`: no such process; `Some(None)`: one in no
    /// tenant.
    fn tenant_of(&self, pid: u32) -> Option<Option<u32>>;
    /// The tenants with something on a GPU.
    fn on_gpu(&self, gpu: u32) -> BTreeSet<u32>;
}

/// Lays a fault on a GPU to somebody: to the process that the driver names, and else to everybody on that GPU, which is no
/// guess as long as it says so.
pub fn attribute(pid: Option<u32>, gpu: u32, parties: &impl Parties) -> Vec<Attribution> {
    if let Some(tenant) = pid.and_then(|pid| parties.tenant_of(pid)) {
        return vec![Attribution {
            tenant,
            pid,
            certainty: Certainty::Process,
        }];
    }
    let uncertain = |tenant| Attribution {
        tenant,
        pid,
        certainty: Certainty::Gpu,
    };
    let tenants = parties.on_gpu(gpu);
    if tenants.is_empty() {
        return vec![uncertain(None)];
    }
    tenants.into_iter().map(Some).map(uncertain).collect()
}

/// The driver's text, fit for a line: no control characters, and not longer than a line should be.
pub fn printable(text: &str) -> String {
    text.chars()
        .take(TEXT)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Default)]
    struct Host {
        processes: BTreeMap<u32, Option<u32>>,
        on_gpu: BTreeMap<u32, BTreeSet<u32>>,
    }

    impl Parties for Host {
        fn tenant_of(&self, pid: u32) -> Option<Option<u32>> {
            self.processes.get(&pid).copied()
        }

        fn on_gpu(&self, gpu: u32) -> BTreeSet<u32> {
            self.on_gpu.get(&gpu).cloned().unwrap_or_default()
        }
    }

    fn host() -> Host {
        Host {
            processes: BTreeMap::from([(10, Some(1)), (11, Some(2)), (12, None)]),
            on_gpu: BTreeMap::from([(0, BTreeSet::from([1, 2])), (1, BTreeSet::from([2]))]),
        }
    }

    #[test]
    fn who_is_named_it_is_and_nobody_else() {
        let found = attribute(Some(10), 0, &host());
        assert_eq!(
            found,
            [Attribution {
                tenant: Some(1),
                pid: Some(10),
                certainty: Certainty::Process
            }]
        );
        // A stranger's fault is no tenant's.
        let found = attribute(Some(12), 0, &host());
        assert_eq!((found.len(), found[0].tenant), (1, None));
        assert_eq!(found[0].certainty, Certainty::Process);
    }

    #[test]
    fn without_a_process_it_is_everybody_on_the_gpu_and_nobody_for_sure() {
        for pid in [None, Some(99)] {
            let found = attribute(pid, 0, &host());
            let tenants: Vec<_> = found.iter().map(|one| one.tenant).collect();
            assert_eq!(tenants, [Some(1), Some(2)]);
            assert!(
                found
                    .iter()
                    .all(|one| one.certainty == Certainty::Gpu && one.pid == pid)
            );
        }
        // One tenant alone on the GPU is not sure to be the one either.
        assert_eq!(attribute(None, 1, &host())[0].certainty, Certainty::Gpu);
        assert_eq!(attribute(None, 7, &host())[0].tenant, None);
    }

    #[test]
    fn a_text_stays_one_line() {
        assert_eq!(printable("a\nb\u{1b}[31m"), "a\u{fffd}b\u{fffd}[31m");
        assert_eq!(printable(&"x".repeat(1000)).len(), TEXT);
    }

    proptest! {
        /// Every fault is laid to somebody or to nobody, once; a certain one to exactly one.
        #[test]
        fn no_fault_is_lost_or_counted_twice(
            pid in prop::option::of(0u32..20),
            gpu in 0u32..3,
            processes in prop::collection::btree_map(0u32..20, prop::option::of(0u32..4), 0..10),
            on_gpu in prop::collection::btree_map(0u32..3, prop::collection::btree_set(0u32..4, 0..4), 0..3),
        ) {
            let host = Host { processes, on_gpu };
            let found = attribute(pid, gpu, &host);
            prop_assert!(!found.is_empty());
            let tenants: BTreeSet<_> = found.iter().map(|one| one.tenant).collect();
            prop_assert_eq!(tenants.len(), found.len());
            if found.iter().any(|one| one.certainty == Certainty::Process) {
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(Some(found[0].tenant), host.tenant_of(pid.expect("named")));
            }
        }
    }
}
