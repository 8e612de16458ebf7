//! Errors, exit codes and what to do next.

use std::{io, path::PathBuf};

use gpuquota_enforcer::{
    client::ClientError,
    config::{Bus, ConfigError},
    control::wire,
    notify::NotifyError,
};

/// `EX_UNAVAILABLE`: the daemon is not there.
pub const UNAVAILABLE: u8 = 69;
/// `EX_NOPERM`: the caller may not do this.
pub const NOT_PERMITTED: u8 = 77;
/// `EX_CONFIG`: settings or policy do not load.
pub const BAD_CONFIGURATION: u8 = 78;

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the daemon.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The daemon's settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Policy files; the rendered problems.
    #[error("{0}")]
    Policy(String),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No such tenant in the policy files that were read.
    #[error("no tenant named \"{0}\" in these policy files; `gpuquotactl policy show` prints them")]
    NoSuchTenant(String),
    /// The output.
    #[error("cannot write the output: {0}")]
    Output(io::Error),
    /// A command could not be run inside a tenant.
    #[error(transparent)]
    Run(#[from] NotifyError),
    /// The pods of the node.
    #[error("the pods of the node are not known: {0}")]
    Kubernetes(String),
    /// The runtime for calls to the daemon.
    #[error("cannot start: {0}")]
    Start(io::Error),
    /// A live view was asked for where there is no terminal.
    #[error("standard input and output are no terminal; `gpuquotactl top --once` prints one frame")]
    NoTerminal,
    /// NVML.
    #[error("NVML: {0}")]
    Nvml(String),
    /// Arguments that go together in no way.
    #[error("{0}")]
    Usage(String),
    /// The verb did its work and the answer is bad; it was printed.
    #[error("")]
    Reported(u8),
}

impl Error {
    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(ClientError::Unavailable { .. } | ClientError::Timeout { .. }) => {
                UNAVAILABLE
            }
            Self::Client(ClientError::NotPermitted(_)) => NOT_PERMITTED,
            Self::Client(ClientError::BadPolicy(_)) | Self::Config(_) | Self::Policy(_) => {
                BAD_CONFIGURATION
            }
            Self::Client(ClientError::Refused { name, .. }) if is(name, "BadProperty") => 2,
            Self::NoTerminal | Self::Usage(_) => 2,
            Self::File { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                NOT_PERMITTED
            }
            Self::Run(error) => run_code(error),
            Self::Reported(code) => *code,
            Self::Client(_)
            | Self::Nvml(_)
            | Self::File { .. }
            | Self::NoSuchTenant(_)
            | Self::Kubernetes(_)
            | Self::Output(_)
            | Self::Start(_) => 1,
        }
    }

    /// The next step, unless the message names it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Client(ClientError::Unavailable { bus, .. }) => Some(match bus {
                Bus::System => {
                    "start it with `systemctl start gpuquotad`, or name another place with --bus".into()
                }
                Bus::Peer(path) => format!(
                    "start it with `gpuquotad --bus peer:{}`, or name another place with --bus",
                    path.display()
                ),
                bus => format!("start it with `gpuquotad --bus {bus}`, or name another place with --bus"),
            }),
            Self::Client(ClientError::Timeout { .. }) => {
                Some("look at its log: `journalctl -u gpuquotad -n 50`".into())
            }
            Self::Client(ClientError::BadPolicy(_)) => {
                Some("nothing was changed; correct the files and try `gpuquotactl policy check`".into())
            }
            Self::Client(ClientError::Protocol(_)) => {
                Some("compare the versions: `gpuquotactl version`".into())
            }
            Self::Client(ClientError::Refused { name, .. }) if is(name, "Ungoverned") => {
                Some("`gpuquotactl list` shows which cgroups are governed".into())
            }
            Self::Run(NotifyError::Socket { .. }) if self.exit_code() == UNAVAILABLE => Some(
                "no gpuquotad takes commands there; start it with `systemctl start gpuquotad`, or name its socket with --socket".into(),
            ),
            _ => None,
        }
    }
}

/// The codes of `env` and of shells where the command itself is the reason.
fn run_code(error: &NotifyError) -> u8 {
    use io::ErrorKind as Kind;
    match error {
        NotifyError::Command { source, .. } if source.kind() == Kind::NotFound => 127,
        NotifyError::Command { .. } => 126,
        NotifyError::Socket { source, .. } => match source.kind() {
            Kind::NotFound | Kind::ConnectionRefused => UNAVAILABLE,
            Kind::PermissionDenied => NOT_PERMITTED,
            _ => 1,
        },
        NotifyError::Rejected(_) => NOT_PERMITTED,
        NotifyError::Filter(_)
        | NotifyError::Silent
        | NotifyError::Protocol(_)
        | NotifyError::System { .. } => 1,
    }
}

fn is(name: &str, own: &str) -> bool {
    name.strip_prefix(wire::ERROR_PREFIX) == Some(own)
}

/// Prints an error the way all verbs do.
pub fn report(error: &Error) {
    if let Error::Reported(_) = error {
        return;
    }
    eprintln!("gpuquotactl: {error}");
    if let Some(hint) = error.hint() {
        eprintln!("  {hint}");
    }
}

impl Error {
    /// For failures around a file.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
