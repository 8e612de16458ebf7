//! The table of what was tried on which kernel: `docs/coverage.md`.
//!
//! Every run leaves its results in `target/vm/coverage`. With `WRITE_COVERAGE=1` in the environment the table is written
//! again from all that are there.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

const HEAD: &str = "# Ways to allocate, backends, kernels

Written by the suite `integration-tests/vm/tests/backends.rs` from what it has run; not to be edited by hand. Each cell is
what a program was told that asked for 4 GiB with 2 GiB charged before and given back, under a limit of 3 GiB. The same
programs were given the 2 GiB.

`out of memory` is what the driver itself says (CUDA error 2). `signal 15` is the end of a process that nothing could
refuse, `signal 9` of one that changed its call after it had been looked at. `cold` has its parameters paged out, `finn`
claims a form of parameters that is not decoded, `compat` is a 32-bit system call, `race` a second thread that raises the
size behind the check. `not applicable`: the kernel serves no 32-bit calls, or nothing sees them (issue of kernels with
neither kprobes nor security hooks).
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Keeps the results of a run, and writes the table if that is wanted.
pub fn record(name: &str, kernel: &str, output: &str) {
    let folder = root().join("target/vm/coverage");
    fs::create_dir_all(&folder).unwrap();
    let results: String = output
        .lines()
        .filter(|line| {
            ["AUTO ", "MISSING ", "CELL "]
                .iter()
                .any(|start| line.starts_with(start))
        })
        .flat_map(|line| [line, "\n"])
        .collect();
    fs::write(folder.join(name), format!("KERNEL {kernel}\n{results}")).unwrap();
    if std::env::var_os("WRITE_COVERAGE").is_some() {
        let mut names: Vec<PathBuf> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.sort();
        let tables: String = names
            .iter()
            .map(|path| table(&fs::read_to_string(path).unwrap()))
            .collect();
        fs::write(root().join("docs/coverage.md"), format!("{HEAD}{tables}")).unwrap();
    }
}

/// One kernel's table.
fn table(results: &str) -> String {
    let mut text = String::new();
    let mut backends: Vec<&str> = Vec::new();
    let mut ways: Vec<&str> = Vec::new();
    let mut cells: BTreeMap<(&str, &str), &str> = BTreeMap::new();
    for line in results.lines() {
        if let Some(kernel) = line.strip_prefix("KERNEL ") {
            writeln!(text, "\n## {kernel}\n").unwrap();
        } else if let Some(by_itself) = line.strip_prefix("AUTO ") {
            writeln!(text, "By itself the daemon takes: {by_itself}.\n").unwrap();
        } else if let Some((backend, reason)) = line
            .strip_prefix("MISSING ")
            .and_then(|rest| rest.split_once(' '))
        {
            writeln!(text, "Not offered: {backend} ({reason}).\n").unwrap();
        } else if let Some(rest) = line.strip_prefix("CELL ") {
            let mut parts = rest.splitn(3, ' ');
            let (Some(backend), Some(way), Some(told)) = (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            if !backends.contains(&backend) {
                backends.push(backend);
            }
            if !ways.contains(&way) {
                ways.push(way);
            }
            cells.insert((backend, way), told);
        }
    }
    writeln!(text, "| way | {} |", backends.join(" | ")).unwrap();
    writeln!(text, "|---|{}", "---|".repeat(backends.len())).unwrap();
    for way in ways {
        let told: Vec<String> = backends
            .iter()
            .map(|backend| cells.get(&(*backend, way)).unwrap_or(&"").replace('|', "/"))
            .collect();
        writeln!(text, "| {way} | {} |", told.join(" | ")).unwrap();
    }
    text
}

#[test]
fn results_become_a_table() {
    let text = table(
        "KERNEL 6.1, lockdown=none\nAUTO lsm\nMISSING override no\nCELL lsm malloc error: 304\n",
    );
    assert!(text.contains("## 6.1, lockdown=none"), "{text}");
    assert!(text.contains("Not offered: override (no)."), "{text}");
    assert!(text.contains("| malloc | error: 304 |"), "{text}");
}
