//! Writes an initial ramdisk: a cpio archive in the "newc" format, as in the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.
//!
//! It stays uncompressed: the emulator copies it into the guest's memory at host speed, while the guest would have to
//! unpack it at a hundredth of that.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Component, Path, PathBuf},
};

use crate::Error;

/// Starts every header; thirteen fields of eight hexadecimal digits follow.
const MAGIC: &[u8] = b"070701";

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

enum Kind {
    Directory,
    File { content: Vec<u8>, permissions: u32 },
    Symlink { target: String },
    Device { major: u32, minor: u32 },
}

/// The tree of files that the virtual machine starts with. Parent directories come by themselves.
#[derive(Default)]
pub(crate) struct Ramdisk {
    entries: BTreeMap<PathBuf, Kind>,
}

impl Ramdisk {
    /// Adds an empty directory.
    pub(crate) fn directory(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = inside(path.as_ref())?;
        self.parents(&path)?;
        match self.entries.entry(path.clone()).or_insert(Kind::Directory) {
            Kind::Directory => Ok(()),
            _ => Err(Error::GuestPath {
                path,
                reason: "there is a file of that name",
            }),
        }
    }

    /// Adds a file, or replaces it. `permissions` is the lower part of the mode, as in `chmod`.
    pub(crate) fn file(
        &mut self,
        path: impl AsRef<Path>,
        content: Vec<u8>,
        permissions: u32,
    ) -> Result<(), Error> {
        self.put(
            path.as_ref(),
            Kind::File {
                content,
                permissions,
            },
        )
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, path: impl AsRef<Path>, target: &str) -> Result<(), Error> {
        self.put(
            path.as_ref(),
            Kind::Symlink {
                target: target.to_owned(),
            },
        )
    }

    /// Adds a character device node.
    pub(crate) fn device(
        &mut self,
        path: impl AsRef<Path>,
        major: u32,
        minor: u32,
    ) -> Result<(), Error> {
        self.put(path.as_ref(), Kind::Device { major, minor })
    }

    /// Whether there is anything at that path.
    pub(crate) fn contains(&self, path: impl AsRef<Path>) -> bool {
        inside(path.as_ref()).is_ok_and(|path| self.entries.contains_key(&path))
    }

    fn put(&mut self, path: &Path, kind: Kind) -> Result<(), Error> {
        let path = inside(path)?;
        self.parents(&path)?;
        if matches!(self.entries.get(&path), Some(Kind::Directory)) {
            return Err(Error::GuestPath {
                path,
                reason: "there is a directory of that name",
            });
        }
        self.entries.insert(path, kind);
        Ok(())
    }

    fn parents(&mut self, path: &Path) -> Result<(), Error> {
        match path.parent() {
            Some(parent) if parent != Path::new("") => self.directory(Path::new("/").join(parent)),
            _ => Ok(()),
        }
    }

    /// Writes the archive. Parents come before their children, because the map is ordered by path components.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        for (inode, (path, kind)) in (1_u32..).zip(&self.entries) {
            let name = path.as_os_str().as_encoded_bytes();
            let (mode, device, content): (_, _, &[u8]) = match kind {
                Kind::Directory => (DIRECTORY | 0o755, (0, 0), &[]),
                Kind::File {
                    content,
                    permissions,
                } => (FILE | permissions, (0, 0), content),
                Kind::Symlink { target } => (SYMLINK | 0o777, (0, 0), target.as_bytes()),
                Kind::Device { major, minor } => (CHARACTER_DEVICE | 0o600, (*major, *minor), &[]),
            };
            entry(out, inode, name, mode, device, content)?;
        }
        entry(out, 0, b"TRAILER!!!", 0, (0, 0), &[])
    }
}

/// The archive's form of a guest path: relative to the root, without dots.
fn inside(path: &Path) -> Result<PathBuf, Error> {
    let wrong = |reason| Error::GuestPath {
        path: path.to_owned(),
        reason,
    };
    let mut components = path.components();
    if components.next() != Some(Component::RootDir) {
        return Err(wrong("it must be absolute"));
    }
    let mut clean = PathBuf::new();
    for component in components {
        match component {
            Component::Normal(name) => clean.push(name),
            _ => return Err(wrong("it must not contain '..'")),
        }
    }
    if clean.as_os_str().is_empty() {
        return Err(wrong("it names no file"));
    }
    Ok(clean)
}

fn entry(
    out: &mut impl Write,
    inode: u32,
    name: &[u8],
    mode: u32,
    (major, minor): (u32, u32),
    content: &[u8],
) -> io::Result<()> {
    let too_large = |_| io::Error::other("a ramdisk entry of 4 GiB or more");
    let size = u32::try_from(content.len()).map_err(too_large)?;
    let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
    // inode, mode, uid, gid, links, time, size, device of the file system (2), device number (2), name size, checksum
    let fields = [
        inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0,
    ];
    out.write_all(MAGIC)?;
    for field in fields {
        write!(out, "{field:08x}")?;
    }
    out.write_all(name)?;
    out.write_all(b"\0")?;
    pad(out, MAGIC.len() + 8 * fields.len() + name.len() + 1)?;
    out.write_all(content)?;
    pad(out, content.len())
}

/// Every name and every content is filled up to a multiple of four bytes.
fn pad(out: &mut impl Write, written: usize) -> io::Result<()> {
    out.write_all(&[0; 3][..written.next_multiple_of(4) - written])
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        process::{Command, Stdio},
    };

    use super::*;

    /// The distribution's own cpio unpacks what was written.
    #[test]
    fn cpio_unpacks_the_ramdisk() {
        let mut disk = Ramdisk::default();
        disk.file("/a/b/run", b"#!/bin/sh\n".to_vec(), 0o755)
            .unwrap();
        disk.file("/a-file", vec![7; 4097], 0o644).unwrap();
        disk.directory("/a").unwrap();
        disk.symlink("/a/link", "b/run").unwrap();
        let mut archive = Vec::new();
        disk.write(&mut archive).unwrap();

        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("cpio")
            .args(["-i", "--quiet"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&archive).unwrap();
        assert!(child.wait().unwrap().success());
        let run = dir.path().join("a/b/run");
        assert_eq!(std::fs::read(&run).unwrap(), b"#!/bin/sh\n");
        assert_eq!(run.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(
            std::fs::read(dir.path().join("a/link")).unwrap(),
            b"#!/bin/sh\n"
        );
        assert_eq!(std::fs::read(dir.path().join("a-file")).unwrap(), [7; 4097]);
    }

    #[test]
    fn refuses_paths_outside_the_tree() {
        let mut disk = Ramdisk::default();
        for path in ["relative", "/", "/a/../b", ""] {
            assert!(
                disk.file(path, Vec::new(), 0o644).is_err(),
                "{path:?} was taken"
            );
        }
    }

    #[test]
    fn a_name_is_either_a_file_or_a_directory() {
        let mut disk = Ramdisk::default();
        disk.file("/x", Vec::new(), 0o644).unwrap();
        assert!(disk.file("/x/y", Vec::new(), 0o644).is_err());
        disk.directory("/d").unwrap();
        assert!(disk.file("/d", Vec::new(), 0o644).is_err());
        assert!(disk.contains("/x") && disk.contains("/d") && !disk.contains("/x/y"));
    }
}
