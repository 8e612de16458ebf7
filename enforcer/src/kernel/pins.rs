//! Where maps and links are pinned.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use gpuquota_common::map::LAYOUT_VERSION;
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// A folder in the BPF file system, of one layout version.
#[derive(Clone, Debug)]
pub struct PinDir {
    base: PathBuf,
    versioned: PathBuf,
}

impl PinDir {
    /// Opens `base`, which is made if it is missing, and its part for the layouts of this version.
    ///
    /// Fails with [`io::ErrorKind::Unsupported`] where `base` is not on a BPF file system, and refuses a
    /// folder that somebody else owns: whoever can write there can replace the ledger.
    pub fn open(base: &Path) -> io::Result<Self> {
        let parent = base.parent().unwrap_or(base);
        let kind = statfs(parent)?.filesystem_type();
        if kind != BPF_FS_MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "{} is not on a BPF file system; mount one: mount -t bpf bpf /sys/fs/bpf",
                    parent.display()
                ),
            ));
        }
        let versioned = base.join(format!("v{LAYOUT_VERSION}"));
        for dir in [base, &versioned] {
            match fs::DirBuilder::new().mode(0o700).create(dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
            let owner = fs::metadata(dir)?.uid();
            if owner != nix::unistd::geteuid().as_raw() {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("{} belongs to uid {owner}", dir.display()),
                ));
            }
        }
        Ok(Self {
            base: base.to_owned(),
            versioned,
        })
    }

    /// Pin of a map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.versioned.join(name)
    }

    /// Pin of a program's link.
    pub fn link(&self, program: &str) -> PathBuf {
        self.versioned.join(format!("link_{program}"))
    }

    /// Removes every pin below `base`, of every version: what they held goes with the last user.
    ///
    /// Nothing to remove is no error.
    pub fn remove_all(base: &Path) -> io::Result<()> {
        match fs::remove_dir_all(base) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// The folder that holds every version.
    pub fn base(&self) -> &Path {
        &self.base
    }
}
