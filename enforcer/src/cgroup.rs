//! The unified cgroup hierarchy: where it is, which cgroup has which id, who is where.
//!
//! Identity is the kernel's cgroup id. Paths are only the way from a policy to an id, and back for people.
//! (cgroups-rs would be the library for this, but it takes `/sys/fs/cgroup` for granted, which on a hybrid host
//! is not the unified hierarchy, and it knows no ids.)

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// What can go wrong with cgroups.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No unified hierarchy.
    #[error(
        "no cgroup v2 hierarchy at /sys/fs/cgroup or /sys/fs/cgroup/unified; a host with cgroup v1 alone \
         cannot be governed: boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 and name the \
         place as `cgroup-root`"
    )]
    NoUnified,
    /// The configured root is none.
    #[error("{0} is not a cgroup v2 mount")]
    NotUnified(PathBuf),
    /// A file operation fails.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A path that names no cgroup below the root.
    #[error("{0:?} is no cgroup path; it has to start with / and may not contain . or ..")]
    BadPath(String),
}

/// The mounted hierarchy.
#[derive(Debug)]
pub struct Hierarchy {
    root: PathBuf,
    mount: OwnedFd,
}

impl Hierarchy {
    /// Opens the hierarchy at `root`, or where hosts usually have it.
    pub fn open(root: Option<&Path>) -> Result<Self, CgroupError> {
        let is_unified = |path: &Path| {
            statfs(path).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC)
        };
        let root = match root {
            Some(root) if is_unified(root) => root.to_owned(),
            Some(root) => return Err(CgroupError::NotUnified(root.to_owned())),
            None => ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                .into_iter()
                .map(PathBuf::from)
                .find(|path| is_unified(path))
                .ok_or(CgroupError::NoUnified)?,
        };
        let mount = fs::File::open(&root).map_err(|source| CgroupError::Io {
            path: root.clone(),
            source,
        })?;
        Ok(Self {
            root,
            mount: mount.into(),
        })
    }

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a cgroup path such as `/gpu.slice/vision.slice`.
    pub fn folder(&self, path: &str) -> Result<PathBuf, CgroupError> {
        let relative = path
            .strip_prefix('/')
            .filter(|rest| !rest.split('/').any(|part| part == "." || part == ".."))
            .ok_or_else(|| CgroupError::BadPath(path.to_owned()))?;
        Ok(self.root.join(relative))
    }

    /// The id of a cgroup, or `None` if there is none at that path.
    pub fn id(&self, path: &str) -> Result<Option<u64>, CgroupError> {
        let folder = self.folder(path)?;
        match fs::metadata(&folder) {
            // The id is the inode number of the folder: kernfs makes both from one counter.
            Ok(metadata) if metadata.is_dir() => Ok(Some(metadata.ino())),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CgroupError::Io {
                path: folder,
                source,
            }),
        }
    }

    /// The path of a cgroup by its id, or `None` once it is gone.
    pub fn path(&self, id: u64) -> Option<String> {
        let file = match self.open_by_id(id) {
            Ok(file) => file,
            // A kernel without CONFIG_FHANDLE, or a sandbox that keeps us from it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                return self.search(id);
            }
            Err(_) => return None,
        };
        let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        // The kernel appends this to the path of what was removed.
        if link.to_string_lossy().ends_with(" (deleted)") {
            return None;
        }
        self.relative(&link)
    }

    /// Whether the kernel says which cgroup an id belongs to; the error if every cgroup has to be looked at.
    ///
    /// That takes `CAP_DAC_READ_SEARCH` and a kernel with `CONFIG_FHANDLE`.
    pub fn finds_by_id(&self) -> io::Result<()> {
        let root = fs::metadata(&self.root)?.ino();
        self.open_by_id(root).map(drop)
    }

    /// The same by looking at every cgroup.
    fn search(&self, id: u64) -> Option<String> {
        self.walk("/")
            .into_iter()
            .find(|path| self.id(path).is_ok_and(|found| found == Some(id)))
    }

    fn open_by_id(&self, id: u64) -> io::Result<OwnedFd> {
        /// `struct file_handle` with room for the eight bytes of a kernfs id.
        #[repr(C)]
        struct Handle {
            bytes: u32,
            kind: i32,
            id: u64,
        }
        /// `FILEID_KERNFS` (`linux/exportfs.h`, since 5.6).
        const FILEID_KERNFS: i32 = 0xfe;
        let mut handle = Handle {
            bytes: 8,
            kind: FILEID_KERNFS,
            id,
        };
        // SAFETY: `handle` has the layout of `struct file_handle` followed by its `bytes` bytes, and lives
        // through the call.
        let fd = unsafe {
            libc::open_by_handle_at(
                self.mount.as_raw_fd(),
                (&raw mut handle).cast(),
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just handed this descriptor to us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn relative(&self, folder: &Path) -> Option<String> {
        let relative = folder.strip_prefix(&self.root).ok()?;
        Some(format!("/{}", relative.to_string_lossy()))
    }

    /// The cgroup path of a process or thread.
    pub fn of_process(&self, pid: u32) -> io::Result<String> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        text.lines()
            .find_map(|line| line.strip_prefix("0::"))
            .map(|path| path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
            .ok_or_else(|| io::Error::other("no line for the unified hierarchy"))
    }

    /// Makes a cgroup and those above it.
    pub fn create(&self, path: &str) -> Result<(), CgroupError> {
        let folder = self.folder(path)?;
        fs::create_dir_all(&folder).map_err(|source| CgroupError::Io {
            path: folder,
            source,
        })
    }

    /// Moves a process into a cgroup.
    pub fn attach(&self, path: &str, pid: u32) -> Result<(), CgroupError> {
        let file = self.folder(path)?.join("cgroup.procs");
        fs::write(&file, pid.to_string()).map_err(|source| CgroupError::Io { path: file, source })
    }

    /// The processes in a cgroup itself; none if it is gone.
    pub fn processes(&self, path: &str) -> Vec<u32> {
        self.folder(path)
            .ok()
            .and_then(|folder| fs::read_to_string(folder.join("cgroup.procs")).ok())
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Every cgroup at or below `prefix`, parents before children.
    pub fn walk(&self, prefix: &str) -> Vec<String> {
        let Ok(start) = self.folder(prefix) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut open = vec![start];
        while let Some(folder) = open.pop() {
            if !folder.is_dir() {
                continue;
            }
            found.extend(self.relative(&folder));
            let Ok(entries) = fs::read_dir(&folder) else {
                continue;
            };
            open.extend(
                entries
                    .filter_map(Result::ok)
                    .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                    .map(|entry| entry.path()),
            );
        }
        found
    }
}

/// Whether `path` is `root` or below it.
pub fn is_within(path: &str, root: &str) -> bool {
    path.strip_prefix(root)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || root.ends_with('/'))
}

/// `path` and every cgroup around it, innermost first, without the root.
pub fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(path);
    std::iter::from_fn(move || {
        let current = rest?;
        if current.len() <= 1 {
            return None;
        }
        rest = current.rfind('/').map(|end| &current[..end]);
        Some(current)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtrees_end_at_a_slash() {
        assert!(is_within("/a/b", "/a"));
        assert!(is_within("/a", "/a"));
        assert!(!is_within("/ab", "/a"));
    }

    #[test]
    fn ancestors_come_innermost_first() {
        let found: Vec<_> = ancestors("/a/b/c").collect();
        assert_eq!(found, ["/a/b/c", "/a/b", "/a"]);
        assert_eq!(ancestors("/").count(), 0);
    }

    #[test]
    fn paths_cannot_leave_the_hierarchy() {
        let Ok(hierarchy) = Hierarchy::open(None) else {
            panic!("this test needs cgroup v2");
        };
        assert!(hierarchy.folder("/../etc").is_err());
        assert!(hierarchy.folder("a").is_err());
    }

    #[test]
    fn the_root_is_found_again_by_its_id() {
        let hierarchy = Hierarchy::open(None).expect("this test needs cgroup v2");
        let id = hierarchy.id("/").expect("readable").expect("exists");
        assert_eq!(hierarchy.path(id).as_deref(), Some("/"));
        assert_eq!(hierarchy.search(id).as_deref(), Some("/"));
        assert_eq!(hierarchy.search(u64::MAX), None);
    }
}
