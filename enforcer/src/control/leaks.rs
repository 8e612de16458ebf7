//! What the leak finder is asked and what it tells.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whom to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// All processes of a tenant and of those in it, also those that come meanwhile.
    Tenant(String),
    /// One process, whoever it belongs to.
    Process(u32),
}

impl Target {
    /// A process if it is a number, else a tenant.
    pub fn parse(text: &str) -> Self {
        text.parse()
            .map_or_else(|_| Self::Tenant(text.to_owned()), Self::Process)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(name) => f.write_str(name),
            Self::Process(pid) => write!(f, "{pid}"),
        }
    }
}

/// What a look has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeakReport {
    /// Who is looked at.
    pub target: Target,
    /// Whether the look goes on: probes are in the processes.
    pub running: bool,
    /// Microseconds that the look has lasted.
    pub elapsed_usec: u64,
    /// Microseconds after which it ends by itself.
    pub limit_usec: u64,
    /// The processes, in the order in which they were met.
    pub processes: Vec<LeakProcess>,
    /// Call sites, those that hold most first.
    pub sites: Vec<LeakSite>,
    /// What is not known for certain.
    pub gaps: LeakGaps,
}

/// A process that is or was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeakProcess {
    /// Its id.
    pub pid: u32,
    /// Its program.
    pub comm: String,
    /// Files with calls that are followed.
    pub files: Vec<String>,
    /// Whether it has ended.
    pub ended: bool,
    /// Why not everything of it is followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A place in a program that obtains memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeakSite {
    /// The driver's call.
    pub call: String,
    /// Who called it, the innermost first.
    pub frames: Vec<LeakFrame>,
    /// Whether the stack goes on beyond what could be followed.
    pub cut: bool,
    /// Allocations that have not been given back.
    pub live: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_bytes: u64,
    /// All allocations since the look began.
    pub allocations: u64,
    /// Their bytes.
    pub allocated_bytes: u64,
    /// Age of the oldest that is live, microseconds.
    pub oldest_usec: Option<u64>,
    /// Median age of those that are live, microseconds.
    pub median_usec: Option<u64>,
    /// Bytes a second by which what it holds grows, over the whole look; absent until that can be told.
    pub growth: Option<f64>,
    /// Share of its allocations that live at least so many microseconds, as far as the look has lasted.
    pub survival: Vec<(u64, f64)>,
}

/// A function on a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeakFrame {
    /// Its name; absent if no file says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// The file with its code; empty for generated code.
    pub file: String,
    /// Where in the file, in the file's own terms.
    pub address: u64,
}

impl fmt::Display for LeakFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.rsplit('/').next().unwrap_or_default();
        match (&self.function, file) {
            (Some(function), _) => f.write_str(function),
            (None, "") => write!(f, "{:#x}", self.address),
            (None, file) => write!(f, "{file}+{:#x}", self.address),
        }
    }
}

/// What a look does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeakGaps {
    /// Calls that were lost on the way: what is told to be live may have been given back.
    pub lost: u64,
    /// Allocations for which there was no room.
    pub overflowed: u64,
    /// Allocations whose call site is not told apart from others.
    pub crowded: u64,
    /// Memory given back that was obtained before the look began.
    pub older_frees: u64,
    /// Contexts that ended: what was obtained in them is gone, and may be told to be live.
    pub contexts_ended: u64,
    /// Files on the stacks that do not name their functions.
    pub unnamed: Vec<String>,
    /// Files that are too large to follow stacks through.
    pub too_large: Vec<String>,
}
