//! What the tests of looks into processes share: clients as programs are shipped, breakpoints in them, and what the daemon has
//! loaded.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::launch::symbols;

use crate::{Bed, PATIENCE, binary};

/// How long a look may go on in a test, which ends it long before.
pub const LONG: Duration = Duration::from_mins(10);

/// Compiles a client of `tests/data`: optimized, and without frame pointers, as programs are shipped.
pub fn compiled(name: &str) -> PathBuf {
    let out = binary(&format!("{name}-{}", std::process::id()));
    let compiled = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args([
            "--edition",
            "2024",
            "-O",
            "-C",
            "force-frame-pointers=no",
            "-o",
        ])
        .arg(&out)
        .arg(format!(
            "{}/tests/data/{name}.rs",
            env!("CARGO_MANIFEST_DIR")
        ))
        .status()
        .expect("rustc");
    assert!(compiled.success());
    out
}

/// Whether a breakpoint is at the entry of a function, one of those listed, in a library of a process.
pub fn has_breakpoint(pid: u32, function: &str, listed: &[(&str, u32)]) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("hexadecimal");
    for line in maps.lines().filter(|line| line.contains(" r-xp ")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let file = fields.get(5).and_then(|path| fs::File::open(path).ok());
        let found = file.and_then(|file| symbols::find_listed(&file, listed).ok());
        let found = found.unwrap_or_default();
        let Some((symbol, _)) = found.iter().find(|(symbol, _)| symbol.name == function) else {
            continue;
        };
        let (from, to) = fields[0].split_once('-').expect("a range");
        let mapped = hex(fields[2])..hex(fields[2]) + (hex(to) - hex(from));
        if mapped.contains(&symbol.entry) {
            let mut byte = [0];
            fs::File::open(format!("/proc/{pid}/mem"))
                .and_then(|memory| {
                    memory.read_exact_at(&mut byte, hex(from) + symbol.entry - mapped.start)
                })
                .expect("readable");
            return byte[0] == 0xcc;
        }
    }
    panic!("process {pid} has no {function}")
}

/// Maps and programs that the daemon has, by the kernel's numbers.
pub fn loaded(bed: &Bed) -> BTreeSet<String> {
    fs::read_dir(format!("/proc/{}/fdinfo", bed.daemon_pid()))
        .expect("the daemon runs")
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .flat_map(|text| {
            text.lines()
                .filter(|line| line.starts_with("map_id") || line.starts_with("prog_id"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Waits until something is so.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "no {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
