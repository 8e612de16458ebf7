//! The policy on disk: which files there are, and the drop-ins that `set-property` writes.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use gpuquota_policy::{Layer, Source, dropin, merge_order};

use crate::config::PolicyDirectories;

/// Why a file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct FileError {
    /// Which file or folder.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { path, source }
}

/// Reads every file that counts, in merge order. A missing folder holds no files.
pub fn read(directories: &PolicyDirectories) -> Result<Vec<Source>, FileError> {
    let mut files = Vec::new();
    for (layer, folder) in Layer::ALL.into_iter().zip(directories.in_order()) {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(at(folder)(error)),
        };
        for entry in entries {
            files.push((layer, entry.map_err(at(folder))?.path()));
        }
    }
    merge_order(&files)
        .into_iter()
        .map(|(layer, path)| {
            let text = fs::read(&path).map_err(at(&path))?;
            Ok(Source::new(path, layer, text))
        })
        .collect()
}

/// The drop-in of a tenant, in the folder that survives a reboot or in the one that does not.
pub fn dropin_path(directories: &PolicyDirectories, tenant: &str, runtime: bool) -> PathBuf {
    // Under different names: a file hides those of the same name in lower folders.
    if runtime {
        directories.runtime.join(dropin::runtime_file_name(tenant))
    } else {
        directories.admin.join(dropin::file_name(tenant))
    }
}

/// The sources as they would be with `text` at `path`: replaced, added in its place, or without it.
pub fn with_file(
    sources: Vec<Source>,
    layer: Layer,
    path: &Path,
    text: Option<&str>,
) -> Vec<Source> {
    let mut all: Vec<Source> = sources
        .into_iter()
        .filter(|source| source.path != path)
        .collect();
    if let Some(text) = text {
        all.push(Source::new(path, layer, text));
    }
    let order = merge_order(
        &all.iter()
            .map(|source| (source.layer, source.path.clone()))
            .collect::<Vec<_>>(),
    );
    order
        .into_iter()
        .filter_map(|(_, path)| {
            let index = all.iter().position(|source| source.path == path)?;
            Some(all.swap_remove(index))
        })
        .collect()
}

/// Writes a file so that a reader, or a power cut, sees the old text or the new and nothing between.
pub fn write(path: &Path, text: &str) -> Result<(), FileError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(at(folder))?;
    // Does not end in .toml, so it never counts as policy.
    let temporary = path.with_extension("toml.new");
    let write = || {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o644)
            .open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        // Whatever is left of it is of no use.
        let _ = fs::remove_file(&temporary);
        at(path)(error)
    })
}

/// Removes a file; one that is not there is fine.
pub fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error)),
        _ => Ok(()),
    }
}

/// Reads a file that may not exist.
pub fn read_optional(path: &Path) -> Result<Option<String>, FileError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directories(base: &Path) -> PolicyDirectories {
        PolicyDirectories {
            vendor: base.join("lib"),
            admin: base.join("etc"),
            runtime: base.join("run"),
        }
    }

    #[test]
    fn later_folders_mask_files_of_the_same_name() {
        let base = tempfile::tempdir().expect("a folder");
        let directories = directories(base.path());
        write(&directories.vendor.join("10-a.toml"), "vendor").expect("written");
        write(&directories.admin.join("10-a.toml"), "admin").expect("written");
        write(&directories.admin.join("note.txt"), "no policy").expect("written");
        let sources = read(&directories).expect("readable");
        assert_eq!(sources.len(), 1);
        assert_eq!(sources[0].text, b"admin");
    }

    #[test]
    fn no_folders_are_an_empty_policy() {
        let base = tempfile::tempdir().expect("a folder");
        assert!(
            read(&directories(base.path()))
                .expect("readable")
                .is_empty()
        );
    }

    #[test]
    fn a_file_can_be_tried_before_it_is_written() {
        let base = tempfile::tempdir().expect("a folder");
        let directories = directories(base.path());
        write(&directories.admin.join("10-a.toml"), "a").expect("written");
        let path = dropin_path(&directories, "t", false);
        let sources = read(&directories).expect("readable");
        let tried = with_file(sources, Layer::Admin, &path, Some("new"));
        assert_eq!(
            tried.last().map(|source| source.text.as_slice()),
            Some(&b"new"[..])
        );
        assert!(!path.exists());
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_text() {
        let base = tempfile::tempdir().expect("a folder");
        let path = base.path().join("a.toml");
        write(&path, "old").expect("written");
        fs::create_dir(base.path().join("a.toml.new")).expect("in the way");
        assert!(write(&path, "new").is_err());
        assert_eq!(
            read_optional(&path).expect("readable").as_deref(),
            Some("old")
        );
    }
}
