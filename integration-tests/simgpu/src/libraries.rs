//! Where the simulated libraries are, and the names under which programs load them.

use std::io;
use std::path::{Path, PathBuf};

/// Names of the libraries as they are built and as they are loaded.
const NAMES: [(&str, &str); 2] = [
    ("libcuda.so", "libcuda.so.1"),
    ("libnvidia_ml.so", "libnvidia-ml.so.1"),
];

/// Links to the libraries in a directory; they go when this goes.
#[derive(Debug)]
pub struct Links(Vec<PathBuf>);

impl Links {
    /// Puts links to the libraries in `built` into `directory`, which is made if it is missing.
    ///
    /// # Errors
    /// A library is not there (`NotFound`, naming it), or a link cannot be made.
    pub fn create(built: &Path, directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut links = Self(Vec::new());
        for (file, name) in NAMES {
            let target = built.join(file);
            if !target.exists() {
                return Err(io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("{} is not built", target.display()),
                ));
            }
            let link = directory.join(name);
            // One that an earlier run left.
            if link.is_symlink() {
                std::fs::remove_file(&link)?;
            }
            std::os::unix::fs::symlink(&target, &link)?;
            links.0.push(link);
        }
        Ok(links)
    }

    /// Takes the links away.
    pub fn remove(&mut self) {
        for link in self.0.drain(..) {
            // Already gone is as good.
            let _ = std::fs::remove_file(link);
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The directory in which cargo put what belongs to the running executable: `target/debug` or `target/release`.
///
/// # Errors
/// The executable's path cannot be read.
pub fn built_directory() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let mut directory = path.parent().unwrap_or(&path);
    if directory.ends_with("deps") || directory.ends_with("examples") {
        directory = directory.parent().unwrap_or(directory);
    }
    Ok(directory.to_owned())
}
