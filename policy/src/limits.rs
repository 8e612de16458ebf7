//! The keys that limit a tenant, in one table.

use std::fmt;
use std::time::Duration;

use crate::profile::{Factor, Share};
use crate::raw::{Mistake, Raw};
use crate::source::{Origin, Spanned};
use crate::validate::{CONTEXT_BYTES, MEMORY_CHUNK};
use crate::values::{
    GraphCost, Limit, Managed, OnBreach, OnHigh, OnLaunchMax, OnMemoryMax, OnXid, Pace, Percent,
    Rate, Setting, Size, Weight,
};
use crate::xids::Xids;

/// A value, if it is written. Few of the keys of a table are: what is not takes a word.
pub type Written<T> = Option<Box<Spanned<T>>>;

macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $field:ident $variant:ident $name:literal : $ty:ty;)+) => {
        /// Limits as written: of a tenant, of a class, or of one of them on some GPUs. What is not written is None.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Limits {
            $($(#[doc = $doc])+ pub $field: Written<$ty>,)+
        }

        /// The name of a limit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Key {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Key {
            /// All keys, in the order in which they are printed.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The key as written in the policy file, such as `memory.max`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What the key means, in a sentence.
            pub const fn summary(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }

            /// What values the key takes.
            pub fn allowed(self) -> String {
                match self { $(Self::$variant => <$ty>::allowed(),)+ }
            }
        }

        impl Limits {
            /// Reads a value for `key`.
            pub(crate) fn set(&mut self, key: Key, raw: &Raw<'_>, origin: Origin) -> Result<(), Mistake> {
                match key {
                    $(Key::$variant => {
                        let value = <$ty>::read(raw)?;
                        self.$field = Some(Box::new(Spanned { value, origin }));
                    })+
                }
                self.check_smallest_memory_max()
            }

            /// The value of `key` as TOML text, and where it was written.
            pub fn get(&self, key: Key) -> Option<(String, &Origin)> {
                match key {
                    $(Key::$variant => self.$field.as_ref().map(|spanned| (spanned.value.write(), &spanned.origin)),)+
                }
            }

            /// Takes over every value that `over` has.
            pub fn merge(&mut self, over: &Self) {
                $(if let Some(value) = &over.$field {
                    self.$field = Some(value.clone());
                })+
            }
        }
    };
}

limits! {
    /// Most GPU memory on each GPU; what is above is answered by memory.on-max.
    memory_max MemoryMax "memory.max": Limit<Size>;
    /// Soft limit of GPU memory on each GPU; crossing it gives an event and memory.on-high.
    memory_high MemoryHigh "memory.high": Limit<Size>;
    /// GPU memory on each GPU that other tenants can't use.
    memory_min MemoryMin "memory.min": Size;
    /// What happens to an allocation above memory.max.
    memory_on_max MemoryOnMax "memory.on-max": OnMemoryMax;
    /// What happens when memory.high is crossed, besides event and metric.
    memory_on_high MemoryOnHigh "memory.on-high": OnHigh;
    /// How long an allocation waits at most when memory.on-max is "wait".
    memory_wait_timeout MemoryWaitTimeout "memory.wait-timeout": Duration;
    /// What happens to managed (unified) memory.
    memory_managed MemoryManaged "memory.managed": Managed;
    /// Whether the driver's own memory for a process (contexts, page tables) is charged to the tenant.
    memory_context MemoryContext "memory.context": bool;
    /// Most pinned host memory.
    memory_host MemoryHost "memory.host": Limit<Size>;
    /// What happens when memory was obtained although it was refused.
    memory_on_breach MemoryOnBreach "memory.on-breach": OnBreach;
    /// Highest rate of kernel and graph launches on each GPU.
    launch_max LaunchMax "launch.max": Limit<Rate>;
    /// Launches that may come at once after a pause.
    launch_burst LaunchBurst "launch.burst": u32;
    /// What happens to launches above launch.max.
    launch_on_max LaunchOnMax "launch.on-max": OnLaunchMax;
    /// How long a process has to end when launch.on-max is "deny".
    launch_patience LaunchPatience "launch.patience": Duration;
    /// How launches are delayed.
    launch_pace LaunchPace "launch.pace": Pace;
    /// What the launch of a graph costs.
    launch_graph_cost LaunchGraphCost "launch.graph-cost": GraphCost;
    /// Share of GPU time when others want it too.
    time_weight TimeWeight "time.weight": Weight;
    /// Most GPU time, even on an idle GPU.
    time_max TimeMax "time.max": Limit<Percent>;
    /// How long an exclusive class may keep this tenant from running.
    time_starve_max TimeStarveMax "time.starve-max": Duration;
    /// Latency under which best-effort tenants are squeezed.
    time_latency_target TimeLatencyTarget "time.latency-target": Limit<Duration>;
    /// What happens to who caused one of fault.xids on a GPU, besides event and metric.
    fault_on_xid FaultOnXid "fault.on-xid": OnXid;
    /// The driver's error codes (Xids) that fault.on-xid answers.
    fault_xids FaultXids "fault.xids": Xids;
    /// How many times as long as usual a kernel takes until it is waited for before that is an anomaly.
    anomaly_factor AnomalyFactor "anomaly.factor": Factor;
    /// Most of a process's time that the probes of the launch profile may cost.
    insight_budget InsightBudget "insight.budget": Share;
    /// Whether launches of the tenant are profiled at all times.
    insight_profile InsightProfile "insight.profile": bool;
}

impl Key {
    /// The tables that the keys stand in.
    pub(crate) const GROUPS: [&str; 6] =
        ["memory", "launch", "time", "fault", "anomaly", "insight"];

    /// The key of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|key| key.name() == name)
    }

    /// The key of this name in this table.
    pub(crate) fn from_parts(group: &str, name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|key| {
            let rest = key
                .name()
                .strip_prefix(group)
                .and_then(|rest| rest.strip_prefix('.'));
            rest == Some(name)
        })
    }

    /// The table that the key stands in, and its name there: `("memory", "max")`.
    pub fn split(self) -> (&'static str, &'static str) {
        self.name().split_once('.').unwrap_or((self.name(), ""))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Limits {
    /// A limit that is not zero and yet admits nothing is a mistake of units.
    fn check_smallest_memory_max(&mut self) -> Result<(), Mistake> {
        match self.memory_max.as_deref() {
            Some(Spanned {
                value: Limit::At(Size(bytes)),
                ..
            }) if (1..MEMORY_CHUNK).contains(bytes) => {
                self.memory_max = None;
                Err(Mistake::new(
                    "no allocation fits: the driver hands out memory in chunks of 2MiB",
                    format!(
                        "write 0 to allow no GPU memory, or at least {} MiB: a CUDA context alone takes about {} MiB on an H200",
                        (MEMORY_CHUNK + CONTEXT_BYTES) >> 20,
                        CONTEXT_BYTES >> 20
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The keys that are written, with their values as TOML text.
    pub fn iter(&self) -> impl Iterator<Item = (Key, String, &Origin)> {
        Key::ALL
            .iter()
            .filter_map(|key| self.get(*key).map(|(value, origin)| (*key, value, origin)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_stands_in_a_group() {
        for key in Key::ALL {
            let (group, rest) = key.split();
            assert!(Key::GROUPS.contains(&group) && !rest.is_empty(), "{key}");
            assert_eq!(Key::from_name(key.name()), Some(*key));
            assert!(key.summary().ends_with('.') && !key.allowed().is_empty());
        }
    }
}
