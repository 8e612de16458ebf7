//! What a dynamically linked program needs to run elsewhere, and how to make it small.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, workspace};

/// The shared libraries of a program or library, with the program interpreter, as absolute host paths. Empty for a
/// statically linked program.
///
/// # Errors
/// [`Error::Tool`] if a library is not on this host.
pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>, Error> {
    let output = Command::new("ldd").arg(program).env("LC_ALL", "C").output();
    let failed = |reason: String| Error::Tool {
        command: format!("ldd {}", program.display()),
        reason,
    };
    let output = output.map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("not a dynamic executable") || text.contains("statically linked") {
        return Ok(Vec::new());
    }
    if !output.status.success() {
        return Err(failed(complaint.into_owned()));
    }
    parse_ldd(&text).map_err(|missing| failed(format!("{missing} is not on this host")))
}

/// Reads `name => path (address)` and `path (address)` lines. Fails with the name of a library that was not found.
fn parse_ldd(text: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        let (name, path) = match line.split_once(" => ") {
            Some((name, path)) => (name, path),
            None => (line, line),
        };
        if path.starts_with("not found") {
            return Err(name.to_owned());
        }
        // The kernel's own page, linux-vdso.so.1, has no path.
        if let Some(path) = path
            .split_whitespace()
            .next()
            .filter(|path| path.starts_with('/'))
        {
            found.push(PathBuf::from(path));
        }
    }
    Ok(found)
}

/// The content of a program without its debug information, which would only fill the guest's memory.
///
/// # Errors
/// [`Error::Tool`] if objcopy fails.
pub(crate) fn stripped(program: &Path) -> Result<Vec<u8>, Error> {
    let stripped = workspace::scratch_file("stripped");
    let mut command = Command::new("objcopy");
    command
        .args(["--strip-debug", "--"])
        .arg(program)
        .arg(&stripped);
    workspace::run_tool(&mut command)?;
    let content = fs::read(&stripped).map_err(Error::file(&stripped));
    // A leftover scratch file does no harm: its name is not used again.
    let _ = fs::remove_file(&stripped);
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_three_forms_of_a_line() {
        let text = "\tlinux-vdso.so.1 (0x00007ffe)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            parse_ldd(text),
            Ok(vec![
                "/lib/x86_64-linux-gnu/libc.so.6".into(),
                "/lib64/ld-linux-x86-64.so.2".into()
            ])
        );
    }

    #[test]
    fn names_a_missing_library() {
        assert_eq!(
            parse_ldd("\tlibcuda.so.1 => not found\n"),
            Err("libcuda.so.1".to_owned())
        );
    }

    #[test]
    fn this_program_needs_libc_and_an_interpreter() {
        let me = std::env::current_exe().unwrap();
        let names: Vec<_> = libraries(&me)
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert!(names.iter().any(|name| name == "libc.so.6"), "{names:?}");
        assert!(
            names.iter().any(|name| name.starts_with("ld-linux")),
            "{names:?}"
        );
        assert!(stripped(&me).unwrap().starts_with(b"\x7fELF"));
    }
}
