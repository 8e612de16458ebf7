//! The workload behind `simtenant`: steps that use a GPU the way applications do, or the way an
//! application would that wants more than its share.

pub mod cuda;
pub mod passing;
pub mod raw;
pub mod run;
pub mod step;

/// How a step can fail.
#[derive(Debug, thiserror::Error)]
pub enum TenantError {
    /// The driver library could not be loaded or lacks a function.
    #[error("cannot use {library}")]
    Library {
        /// Which.
        library: String,
        /// Why.
        #[source]
        source: libloading::Error,
    },
    /// A device file could not be opened.
    #[error("cannot open {path}")]
    Open {
        /// Which.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No memory.
    #[error("out of memory ({code}) asking for {asked} after {got}")]
    OutOfMemory {
        /// The code that said so.
        code: String,
        /// Bytes of the request that failed.
        asked: u64,
        /// Bytes that the same step had got before.
        got: u64,
    },
    /// A call of the driver API failed.
    #[error("{call}: {code}")]
    Call {
        /// Which.
        call: &'static str,
        /// What it returned.
        code: String,
    },
    /// An ioctl failed.
    #[error("ioctl {call}")]
    Ioctl {
        /// Which.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// An ioctl succeeded with an RM status that is not OK.
    #[error("ioctl {call}: status {status:#x}")]
    Status {
        /// Which.
        call: &'static str,
        /// The status.
        status: u32,
    },
    /// A step is not understood.
    #[error("{0}")]
    Usage(String),
    /// The system refused something.
    #[error("{what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl TenantError {
    /// Exit code: 2 for want of memory, 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::OutOfMemory { .. } => 2,
            _ => 1,
        }
    }

    /// The error and its causes in one line.
    pub fn line(&self) -> String {
        let mut line = match self {
            Self::OutOfMemory { .. } => self.to_string(),
            _ => format!("failed: {self}"),
        };
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            line.push_str(": ");
            line.push_str(&cause.to_string());
            source = cause.source();
        }
        line.replace('\n', " ")
    }
}
