//! GPUs: how a policy names them, and which ones a host has.

use std::fmt;

/// Which GPU a table of limits is about.
///
/// The order is from the least to the most specific: a UUID beats an index, an index beats `"*"`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuSelector {
    /// `"*"`: every GPU.
    Any,
    /// NVML's index. It may change with the next boot; a UUID does not.
    Index(u32),
    /// A UUID as `nvidia-smi -L` prints it, with its prefix `GPU-` or `MIG-`, hex digits in lower case.
    Uuid(String),
}

/// Why a text selects no GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuSelectorError {
    /// It has the prefix of a UUID, but not the form.
    #[error("{text:?} is not a whole GPU UUID")]
    Uuid {
        /// What was given.
        text: String,
    },
    /// It is neither a UUID, nor an index, nor `*`.
    #[error("{text:?} names no GPU")]
    Unknown {
        /// What was given.
        text: String,
    },
}

/// What a selector may be, for messages.
pub(crate) const SELECTOR_HELP: &str = "a GPU is \"*\" (every GPU), an index such as \"0\", or a UUID such as \"GPU-8b3f1c2e-0d5a-4e6f-9a1b-2c3d4e5f6071\"; `nvidia-smi -L` lists them";

impl GpuSelector {
    /// Reads `*`, an index, or a UUID.
    pub fn parse(text: &str) -> Result<Self, GpuSelectorError> {
        if text == "*" {
            return Ok(Self::Any);
        }
        if text.bytes().all(|byte| byte.is_ascii_digit())
            && (text == "0" || !text.starts_with('0'))
            && let Ok(index) = text.parse()
        {
            return Ok(Self::Index(index));
        }
        let prefix = text.get(..4).unwrap_or_default();
        if !prefix.eq_ignore_ascii_case("GPU-") && !prefix.eq_ignore_ascii_case("MIG-") {
            return Err(GpuSelectorError::Unknown {
                text: shorten(text),
            });
        }
        let rest = text[4..].to_ascii_lowercase();
        if is_uuid(&rest) {
            Ok(Self::Uuid(format!("{}{rest}", prefix.to_ascii_uppercase())))
        } else {
            Err(GpuSelectorError::Uuid {
                text: shorten(text),
            })
        }
    }

    /// Whether the selector is about this GPU.
    pub fn matches(&self, gpu: &HostGpu) -> bool {
        match self {
            Self::Any => true,
            Self::Index(index) => *index == gpu.index,
            Self::Uuid(uuid) => uuid.eq_ignore_ascii_case(&gpu.uuid),
        }
    }

    /// The selectors that are about this GPU, most specific first.
    pub(crate) fn of(gpu: &HostGpu) -> [Self; 3] {
        let uuid = Self::parse(&gpu.uuid).unwrap_or_else(|_| Self::Uuid(gpu.uuid.clone()));
        [uuid, Self::Index(gpu.index), Self::Any]
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

/// 8-4-4-4-12 hex digits.
fn is_uuid(text: &str) -> bool {
    let mut groups = text.split('-');
    [8, 4, 4, 4, 12].into_iter().all(|length| {
        groups.next().is_some_and(|group| {
            group.len() == length && group.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }) && groups.next().is_none()
}

impl fmt::Display for GpuSelector {
    /// As in the policy file, without quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

/// The GPUs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// In any order.
    pub gpus: Vec<HostGpu>,
}

/// One GPU of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostGpu {
    /// NVML's index.
    pub index: u32,
    /// NVML's UUID, with its prefix.
    pub uuid: String,
    /// Memory of the card in bytes.
    pub memory: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-8b3f1c2e-0d5a-4e6f-9a1b-2c3d4e5f6071";

    #[test]
    fn selectors() {
        assert_eq!(GpuSelector::parse("*"), Ok(GpuSelector::Any));
        assert_eq!(GpuSelector::parse("0"), Ok(GpuSelector::Index(0)));
        assert_eq!(GpuSelector::parse("17"), Ok(GpuSelector::Index(17)));
        assert_eq!(GpuSelector::parse(UUID), Ok(GpuSelector::Uuid(UUID.into())));
        assert_eq!(
            GpuSelector::parse(&UUID.to_uppercase()),
            Ok(GpuSelector::Uuid(UUID.into()))
        );
        for bad in [
            "",
            "00",
            "-1",
            "4294967296",
            "gpu0",
            "GPU-",
            "GPU-8b3f1c2e",
            "GPU-8b3f1c2e-0d5a-4e6f-9a1b-2c3d4e5f607g",
            "**",
            "GPÜ-",
        ] {
            assert!(GpuSelector::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_more_specific_sorts_later() {
        let gpu = HostGpu {
            index: 3,
            uuid: UUID.into(),
            memory: 1,
        };
        let all = GpuSelector::of(&gpu);
        assert!(all.is_sorted_by(|a, b| a > b));
        assert!(all.iter().all(|selector| selector.matches(&gpu)));
        assert!(!GpuSelector::Index(2).matches(&gpu));
    }
}
