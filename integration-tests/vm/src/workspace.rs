//! Where this workspace keeps its sources and what it builds.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::Error;

/// The folder with the top-level `Cargo.toml`.
pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// The folder of the profile that the running test was built with, such as `target/debug`.
fn profile_dir() -> PathBuf {
    let from_exe = || {
        let dir = env::current_exe().ok()?.parent()?.to_owned();
        // Tests lie in `deps`, documentation tests in a folder of their own outside the target directory.
        (dir.file_name()? == "deps").then(|| dir.parent().map(Path::to_owned))?
    };
    from_exe().unwrap_or_else(|| root().join("target/debug"))
}

/// The folder for consoles and ramdisks.
pub(crate) fn vm_dir() -> Result<PathBuf, Error> {
    let profile = profile_dir();
    let dir = profile.parent().unwrap_or(&profile).join("vm");
    fs::create_dir_all(&dir).map_err(Error::file(&dir))?;
    Ok(dir)
}

/// A path for a temporary file that nobody else uses.
pub(crate) fn scratch_file(what: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    env::temp_dir().join(format!(
        "gpuquota-vm-{}-{number}-{what}",
        std::process::id()
    ))
}

/// The path of a program or library that cargo built for this workspace, by its file name (`gpuquotad`, `libcuda.so`).
///
/// # Errors
/// [`Error::NotBuilt`] if it is not there.
pub fn built(name: &str) -> Result<PathBuf, Error> {
    let path = profile_dir().join(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(Error::NotBuilt { path })
    }
}

/// The path of a test program of this workspace, by the name of the test target. To run a suite inside a virtual machine,
/// pack it with [`Vm::binary_at`](crate::Vm::binary_at) and run it there as it runs on the host.
///
/// Cargo puts a hash into the file's name and leaves old ones behind: the newest is meant.
///
/// # Errors
/// [`Error::NotBuilt`] if there is none.
pub fn built_test(name: &str) -> Result<PathBuf, Error> {
    let deps = profile_dir().join("deps");
    let prefix = format!("{}-", name.replace('-', "_"));
    let is_hash =
        |rest: &str| rest.len() == 16 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let newest = fs::read_dir(&deps)
        .map_err(Error::file(&deps))?
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .strip_prefix(&prefix)
                .is_some_and(is_hash)
        })
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .max();
    newest.map(|(_, path)| path).ok_or_else(|| Error::NotBuilt {
        path: deps.join(name),
    })
}

/// Runs a host program to its end.
pub(crate) fn run_tool(command: &mut Command) -> Result<Vec<u8>, Error> {
    let failed = |command: &Command, reason: String| Error::Tool {
        command: format!("{command:?}"),
        reason,
    };
    match command.output() {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(failed(
            command,
            String::from_utf8_lossy(&output.stderr)
                .trim_end()
                .to_owned(),
        )),
        Err(error) => Err(failed(command, error.to_string())),
    }
}
