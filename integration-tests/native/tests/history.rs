//! What the daemon remembers of memory, and the pictures of it.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::control::insight::MemoryHistory;
use gpuquota_native_tests::{Bed, PATIENCE};

const GIB: u64 = 1 << 30;

const NESTED: &str = "[tenant.lab]\ncgroup = \"@/lab.slice\"\nmemory.max = \"8GiB\"\n\
                      [tenant.a]\ncgroup = \"@/lab.slice/a.slice\"\n\
                      [tenant.idle]\ncgroup = \"@/idle.slice\"\n";

fn history(bed: &Bed, tenant: Option<&str>) -> Vec<MemoryHistory> {
    bed.call(async |client| client.memory_history(tenant, Duration::from_mins(1)).await)
        .expect("a history")
}

/// Waits until the history of tenant `a` is what `wanted` says.
fn wait(bed: &Bed, wanted: impl Fn(&MemoryHistory) -> bool) -> MemoryHistory {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = history(bed, Some("a"));
        match found.as_slice() {
            [one] if wanted(one) => return one.clone(),
            other => assert!(Instant::now() < end, "{other:?}\n{}", bed.log()),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn use_is_remembered_when_it_is_over() {
    let bed = Bed::new(NESTED);
    assert_eq!(history(&bed, None), [], "nobody has used anything");
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("alloc 4GiB"), "allocated 4294967296");
    let held = wait(&bed, |one| one.used >= 4 * GIB);
    assert!(held.objects >= 1 && held.gpu == 0, "{held:?}");
    assert_eq!(actor.finish(), Some(0));
    let after = wait(&bed, |one| one.used == 0);
    assert!(after.high_water >= 4 * GIB, "{after:?}");
    assert!(after.growth >= 4 * GIB);
    assert!(after.peak.contains(&Some(0)) || after.peak.last() == Some(&Some(0)));
    let peak = after.peak.iter().flatten().max().copied();
    assert!(peak >= Some(4 * GIB), "{after:?}");
    // The tenant around it had as much; the idle one is not there, and nobody else is.
    let all = history(&bed, None);
    let names: Vec<_> = all.iter().map(|one| one.tenant.as_str()).collect();
    assert_eq!(names, ["a", "lab"]);
    assert!(all[1].high_water >= 4 * GIB);
    let text = bed.ctl(&["history", "--since", "1m"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains("HIGH WATER") && text.contains("lab on GPU 0"),
        "{text}"
    );
    let json = bed.ctl(&["history", "a", "--json"]);
    let json: Vec<MemoryHistory> = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json.len(), 1);
    assert!(!bed.ctl(&["history", "nobody"]).status.success());
}

#[test]
fn a_report_is_a_picture_of_it() {
    let bed = Bed::new(NESTED);
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("alloc 4GiB"), "allocated 4294967296");
    wait(&bed, |one| one.used >= 4 * GIB);
    for (name, start) in [("report.svg", "<svg "), ("report.html", "<!doctype html>")] {
        let path = bed.sim.scratch().join(name);
        let output = path.to_str().expect("UTF-8");
        let written = bed.ctl(&["report", "--since", "1m", "--output", output]);
        assert!(written.status.success(), "{written:?}");
        let text = fs::read_to_string(path).expect("a file");
        assert!(text.starts_with(start), "{text}");
        // Half of the limit of the tenant around, which is the limit of both rows' text.
        assert!(text.contains("of 8 GiB") && text.contains("lab"), "{text}");
        assert!(text.matches("<rect ").count() > 200);
    }
    let wrong = bed.ctl(&["report", "--output", "/nowhere/x.pdf"]);
    assert_eq!(wrong.status.code(), Some(2));
}

/// Fast and slow changes of many processes: no peak is above what was there.
#[test]
fn what_is_remembered_was_there() {
    let bed = Bed::new(NESTED);
    let mut actors: Vec<_> = (0..3).map(|_| bed.actor("a")).collect();
    for round in 0..6 {
        for actor in &mut actors {
            let step = if round % 2 == 0 {
                "alloc 512MiB"
            } else {
                "free"
            };
            assert!(!actor.tell(step).is_empty());
        }
        thread::sleep(Duration::from_millis(400));
    }
    let truth = bed.usage("a", 0).memory_peak;
    let one = wait(&bed, |one| one.growth > 0);
    assert!(one.high_water <= truth);
    // Points are rounded up, by a tenth of a percent.
    let peak = one.peak.iter().flatten().max().copied().unwrap_or(0);
    assert!(
        peak <= truth + truth / 1000 + (64 << 10),
        "{peak} of {truth}"
    );
}

#[test]
fn a_recording_has_cards_and_tenants_at_the_pace_that_it_tells() {
    let bed = Bed::new(NESTED);
    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("alloc 4GiB"), "allocated 4294967296");
    wait(&bed, |one| one.used >= 4 * GIB);
    let (csv, plot) = (
        bed.sim.scratch().join("r.csv"),
        bed.sim.scratch().join("r.svg"),
    );
    let record = |arguments: &[&str]| {
        let mut all = vec![
            "record",
            "--gpu",
            "0",
            "--output",
            csv.to_str().expect("UTF-8"),
        ];
        all.extend(arguments);
        bed.ctl(&all)
    };
    let done = record(&[
        "--for",
        "2s",
        "--interval",
        "200ms",
        "--plot",
        plot.to_str().expect("UTF-8"),
    ]);
    assert!(done.status.success(), "{done:?}");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        said.contains("apart in the median, the longest pause"),
        "{said}"
    );
    let text = fs::read_to_string(&csv).expect("a file");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(
        rows[0][..4],
        ["time_seconds", "gpu", "tenant", "gpu_percent"]
    );
    let of = |tenant: &str| rows[1..].iter().filter(|row| row[2] == tenant).count();
    assert!(
        (3..=11).contains(&of("")) && of("a") >= of("") - 1,
        "{text}"
    );
    for row in &rows[1..] {
        let memory: u64 = row[4].parse().expect("bytes");
        assert!(memory >= 4 * GIB, "{row:?}");
        assert_eq!(
            row[6].is_empty(),
            row[2] == "a",
            "power is the card's: {row:?}"
        );
    }
    let picture = fs::read_to_string(&plot).expect("a file");
    assert!(picture.contains("GPU 0: memory") && picture.contains(">a</text>"));
    // A library that is not there, a GPU that is not there, more than a file may hold.
    for (arguments, word) in [
        (["--nvml-library", "/nowhere.so"], "NVML"),
        (["--interval", "1us"], "allowed is 1ms"),
        (["--gpu", "7"], "cannot be used multiple times"),
    ] {
        let refused = record(&arguments);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(word), "{said}");
    }
}
