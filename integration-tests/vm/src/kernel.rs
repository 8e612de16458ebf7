//! The kernels that can be booted, and where they come from.

use std::{
    collections::HashMap,
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, Mutex, PoisonError},
};

use crate::{Error, workspace};

/// A kernel to boot. What each one offers is in `docs/development.md`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// The distribution's cloud kernel (6.1 on Debian 12), as it is installed everywhere: no override helper.
    Stock,
    /// The distribution's 6.12 cloud kernel for Debian 12.
    Backport,
    /// The newest cloud kernel that the distribution offers for a stable release (7.x). It moves on by itself, so its tests
    /// are run on request only.
    Newest,
    /// 6.12 with error injection, so with `bpf_override_return` on system calls.
    Override,
    /// A `bzImage` of one's own that needs no modules.
    Image(PathBuf),
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stock => f.write_str("stock"),
            Self::Backport => f.write_str("backport"),
            Self::Newest => f.write_str("newest"),
            Self::Override => f.write_str("override"),
            Self::Image(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A kernel that lies ready on this host.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// The compressed kernel image.
    pub(crate) image: PathBuf,
    /// Modules that the guest has to load, in this order.
    pub(crate) modules: Vec<PathBuf>,
}

/// The kernels found so far. Locked while one is looked for, so that the tests of one process wait for one download.
static READY: LazyLock<Mutex<HashMap<Kernel, Files>>> = LazyLock::new(Mutex::default);

impl Kernel {
    /// Finds the kernel, fetching or building it if this host does not have it yet.
    pub(crate) fn files(&self) -> Result<Files, Error> {
        let missing = |reason: String| Error::NoKernel {
            kernel: self.to_string(),
            reason,
        };
        if let Self::Image(path) = self {
            return if path.is_file() {
                Ok(Files {
                    image: path.clone(),
                    modules: Vec::new(),
                })
            } else {
                Err(missing("there is no such file".to_owned()))
            };
        }
        let mut ready = READY.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = ready.get(self) {
            return Ok(files.clone());
        }
        let mut script = Command::new(workspace::root().join("scripts/vm-kernel.sh"));
        let output = workspace::run_tool(script.arg(self.to_string())).map_err(|error| {
            missing(match error {
                Error::Tool { reason, .. } => reason,
                other => other.to_string(),
            })
        })?;
        let dir = PathBuf::from(String::from_utf8_lossy(&output).trim_end());
        let files = Files {
            image: dir.join("vmlinuz"),
            modules: listed_modules(&dir)?,
        };
        ready.insert(self.clone(), files.clone());
        Ok(files)
    }
}

/// The modules named in the file `modules.load`, which is absent where everything is built in.
fn listed_modules(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let list = dir.join("modules.load");
    if !list.exists() {
        return Ok(Vec::new());
    }
    let names = fs::read_to_string(&list).map_err(Error::file(&list))?;
    Ok(names.lines().map(|name| dir.join(name)).collect())
}
