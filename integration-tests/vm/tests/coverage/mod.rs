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
programs were given the 2 GiB. The kernel that is called the host's is the one that the suite itself ran on, not emulated.

`out of memory` is what the driver itself says (CUDA error 2). `signal 15` is the end of a process that nothing could
refuse, `signal 9` of one that changed its call after it had been looked at. `cold` has its parameters paged out, `finn`
claims a form of parameters that is not decoded, `compat` is a 32-bit system call, `race` a second thread that raises the
size behind the check. `managed` is managed memory of 4 GiB, which only a supervisor refuses, and `managed-deny` some of it
where `memory.managed` says that there is to be none. `not applicable`: the kernel serves no 32-bit calls, or nothing sees them (a kernel with
neither kprobes nor security hooks, and a process without a listener).

\"Usable\" is how much one process, or four at once, got of a limit in pieces that end at 2 MiB, as the driver counts it.
The suite fails under 99 % and above 100 %. Under `signal` the processes know where to stop.

\"Cost\" is the lower decile of 200 allocations and frees of 2 MiB of the simulated driver, by a program without libcuda, as a ratio
to the same where no program of ours is attached. On all kernels but the host's the processor is emulated: there the
ratios compare backends with each other and say nothing of a real one.
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
            ["AUTO ", "MISSING ", "CELL ", "USABLE ", "COST "]
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
    let mut usable: Vec<[&str; 4]> = Vec::new();
    let mut costs: Vec<[&str; 3]> = Vec::new();
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
        } else if let Some(rest) = line.strip_prefix("USABLE ") {
            let parts: Vec<&str> = rest.split(' ').collect();
            usable.extend(<[&str; 4]>::try_from(parts).ok());
        } else if let Some(rest) = line.strip_prefix("COST ") {
            let parts: Vec<&str> = rest.split(' ').collect();
            costs.extend(<[&str; 3]>::try_from(parts).ok());
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
    text + &usable_table(&usable) + &cost_table(&costs)
}

/// What an allocation and a free cost under each backend, as a ratio to the same without the daemon's programs.
fn cost_table(costs: &[[&str; 3]]) -> String {
    let number = |text: &str| text.parse::<f64>().unwrap();
    let Some([_, alloc, free]) = costs.iter().find(|[backend, ..]| *backend == "none") else {
        return String::new();
    };
    let mut text = String::from("\n| cost, ratio to none | allocation | free |\n|---|---|---|\n");
    for [backend, own_alloc, own_free] in costs.iter().filter(|[backend, ..]| *backend != "none") {
        writeln!(
            text,
            "| {backend} | {:.2} | {:.2} |",
            number(own_alloc) / number(alloc),
            number(own_free) / number(free)
        )
        .unwrap();
    }
    text
}

/// How much of a limit was usable: a row for each backend, a column for each limit and number of processes.
fn usable_table(cells: &[[&str; 4]]) -> String {
    let mut columns: Vec<(&str, &str)> = Vec::new();
    let mut rows: Vec<(&str, Vec<&str>)> = Vec::new();
    for [backend, limit, processes, share] in cells {
        if !columns.contains(&(limit, processes)) {
            columns.push((limit, processes));
        }
        match rows.iter_mut().find(|(name, _)| name == backend) {
            Some((_, shares)) => shares.push(share),
            None => rows.push((backend, vec![share])),
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n| usable, % |");
    for (limit, processes) in &columns {
        write!(text, " {limit} GiB, {processes} |").unwrap();
    }
    writeln!(text, "\n|---|{}", "---|".repeat(columns.len())).unwrap();
    for (backend, shares) in rows {
        writeln!(text, "| {backend} | {} |", shares.join(" | ")).unwrap();
    }
    text
}

#[test]
fn results_become_a_table() {
    let text = table(
        "KERNEL 6.1, lockdown=none\nAUTO lsm\nMISSING override no\nCELL lsm malloc error: 304\nUSABLE lsm 1 4 99.80\nCOST lsm 300 90\nCOST none 200 100\n",
    );
    assert!(text.contains("## 6.1, lockdown=none"), "{text}");
    assert!(text.contains("Not offered: override (no)."), "{text}");
    assert!(text.contains("| malloc | error: 304 |"), "{text}");
    assert!(text.contains("| usable, % | 1 GiB, 4 |"), "{text}");
    assert!(text.contains("| lsm | 99.80 |"), "{text}");
    assert!(text.contains("| lsm | 1.50 | 0.90 |"), "{text}");
}
