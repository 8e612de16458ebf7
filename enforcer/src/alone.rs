//! One daemon for each driver: two of them would undo each other's channel controls without end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use gpuquota_common::map::DeviceKey;
use nix::fcntl::{FcntlArg, fcntl};
use tracing::warn;

/// Where daemons with any settings find each other; only root can write there.
const FOLDER: &str = "/run/gpuquota";

/// Another daemon is there already.
#[derive(Debug, thiserror::Error)]
#[error(
    "another gpuquotad governs the driver of {}{}; stop it first (lock: {})",
    control.display(),
    holder.as_ref().map_or_else(String::new, |pid| format!(", process {pid}")),
    lock.display()
)]
pub struct NotAlone {
    control: PathBuf,
    holder: Option<u32>,
    lock: PathBuf,
}

/// Held for as long as the daemon governs a driver.
#[derive(Debug)]
pub struct Alone {
    _lock: Option<File>,
}

impl Alone {
    /// Takes the driver whose control node is `control`. A host where no lock can be made goes without one.
    pub fn with(control: &Path, key: DeviceKey) -> Result<Self, NotAlone> {
        Self::in_folder(Path::new(FOLDER), control, key)
    }

    fn in_folder(folder: &Path, control: &Path, key: DeviceKey) -> Result<Self, NotAlone> {
        let path = folder.join(format!("driver-{:x}-{:x}.lock", key.dev, key.inode));
        match open(folder, &path).and_then(take) {
            Ok(Taken::Ours(file)) => Ok(Self { _lock: Some(file) }),
            Ok(Taken::Held(holder)) => Err(NotAlone {
                control: control.to_owned(),
                holder,
                lock: path,
            }),
            Err(error) => {
                warn!(%error, lock = %path.display(), "cannot tell whether another daemon governs this driver");
                Ok(Self { _lock: None })
            }
        }
    }
}

enum Taken {
    Ours(File),
    Held(Option<u32>),
}

fn open(folder: &Path, path: &Path) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .open(path)
}

/// A record lock: it ends with the process, and the guard, which is forked from it, does not inherit it.
fn take(mut file: File) -> io::Result<Taken> {
    // SAFETY: all-zero is a value of this plain structure: the whole file.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap_or_default();
    match fcntl(&file, FcntlArg::F_SETLK(&whole)) {
        Ok(_) => {
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            Ok(Taken::Ours(file))
        }
        Err(nix::Error::EAGAIN | nix::Error::EACCES) => {
            let mut text = String::new();
            file.rewind()?;
            file.read_to_string(&mut text)?;
            Ok(Taken::Held(text.trim().parse().ok()))
        }
        Err(error) => Err(error.into()),
    }
}
