//! Metrics as a scraper sees them.
#![allow(
    clippy::float_cmp,
    clippy::needless_pass_by_value,
    reason = "the values compared are whole numbers, exact in a float; helpers take what callers have no more use for"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use gpuquota_native_tests::{Bed, tool};

const GIB: f64 = 1_073_741_824.0;

const TWO: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nclass = \"guaranteed\"\nmemory.max = \"3GiB\"\nmemory.high = \"2GiB\"\n\
                   [tenant.b]\ncgroup = \"@/b.slice\"\n";

/// A bed whose daemon offers metrics, and where.
fn bed() -> (Bed, String) {
    let mut bed = Bed::new(TWO);
    let address = bed.offer_metrics();
    (bed, address)
}

fn scrape(address: &str) -> String {
    // Scrapes in quick succession get the same answer.
    thread::sleep(Duration::from_millis(250));
    let answer = gpuquota_native_tests::scrape(address);
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(
        head.contains("Content-Type: text/plain; version=0.0.4"),
        "{head}"
    );
    body.to_owned()
}

/// Reads the text format and refuses what Prometheus or its linter would: samples without HELP and TYPE before
/// them, two samples or families of one name, wrong suffixes, values that are no numbers.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut families = BTreeSet::new();
    let (mut help, mut family, mut counter) = ("", "", false);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, words) = rest.split_once(' ').expect("a help text");
            assert!(!words.is_empty() && families.insert(name), "{line}");
            help = name;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(
                name == help && ["counter", "gauge"].contains(&kind),
                "{line}"
            );
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert!(name.starts_with("gpuquota_"), "{line}");
            (family, counter) = (name, kind == "counter");
        } else {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            assert_eq!(series.split('{').next(), Some(family), "{line}");
            let value: f64 = value.parse().expect(line);
            assert!(!value.is_nan() && (!counter || value >= 0.0), "{line}");
            assert!(
                samples.insert(series.to_owned(), value).is_none(),
                "twice: {line}"
            );
        }
    }
    assert!(text.ends_with('\n'));
    samples
}

/// The linter of Prometheus.
fn lint(text: &str) {
    let mut promtool = Command::new(tool("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, which scripts/setup.sh unpacks");
    promtool
        .stdin
        .take()
        .expect("a pipe")
        .write_all(text.as_bytes())
        .expect("written");
    let output = promtool.wait_with_output().expect("promtool");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "",
        "promtool has something to say"
    );
}

#[test]
fn a_scrape_tells_limits_usage_and_refusals() {
    let (bed, address) = bed();
    let text = scrape(&address);
    lint(&text);
    let before = samples(&text);
    let a = |name: &str| format!("gpuquota_tenant_memory_{name}{{tenant=\"a\",gpu=\"0\"}}");
    let b = |name: &str| format!("gpuquota_tenant_memory_{name}{{tenant=\"b\",gpu=\"0\"}}");
    // Every series is there before anything has happened.
    assert_eq!(before[&a("used_bytes")], 0.0);
    assert_eq!(before[&a("denials_total")], 0.0);
    assert_eq!(before[&a("max_bytes")], 3.0 * GIB);
    assert_eq!(before[&a("high_bytes")], 2.0 * GIB);
    assert_eq!(before[&b("max_bytes")], f64::INFINITY);
    assert_eq!(
        before["gpuquota_tenant_info{tenant=\"a\",class=\"guaranteed\"}"],
        1.0
    );
    assert_eq!(before["gpuquota_enforcing"], 1.0);
    assert_eq!(before["gpuquota_nvml_up"], 1.0);
    assert_eq!(before["gpuquota_tenants"], 2.0);

    let mut actor = bed.actor("a");
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    assert!(actor.tell("alloc 4GiB").contains("OUT_OF_MEMORY"));
    let text = scrape(&address);
    lint(&text);
    let held = samples(&text);
    assert!(held[&a("used_bytes")] >= GIB);
    assert!(held[&a("peak_bytes")] >= held[&a("used_bytes")]);
    assert_eq!(held[&a("denials_total")], 1.0);
    assert_eq!(
        held["gpuquota_tenant_processes{tenant=\"a\",gpu=\"0\"}"],
        1.0
    );
    assert_eq!(
        held["gpuquota_gpu_ledger_bytes{gpu=\"0\"}"],
        held[&a("used_bytes")]
    );
    assert!(held["gpuquota_map_entries{map=\"objects\"}"] >= 1.0);
    assert!(held["gpuquota_driver_calls_total"] > before["gpuquota_driver_calls_total"]);
    assert!(held["gpuquota_daemon_resident_memory_bytes"] > 1e6);
    // What NVML sees beyond the ledger is the context, a part of a GiB.
    let drift = held["gpuquota_gpu_ledger_drift_bytes{gpu=\"0\"}"];
    assert!((0.0..GIB).contains(&drift), "{drift}");

    actor.finish();
    assert_eq!(bed.wait_for_nothing(Duration::from_secs(5)), []);
    let after = samples(&scrape(&address));
    assert_eq!(after[&a("used_bytes")], 0.0);
    assert_eq!(after[&a("denials_total")], 1.0);
    assert_eq!(
        after.keys().collect::<Vec<_>>(),
        before.keys().collect::<Vec<_>>()
    );
}

#[test]
fn series_end_with_their_tenant_and_failed_loads_are_counted() {
    let (bed, address) = bed();
    let generation = samples(&scrape(&address))["gpuquota_policy_generation"];
    bed.write_policy("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.maxx = \"1GiB\"\n");
    assert!(!bed.ctl(&["reload"]).status.success());
    let broken = samples(&scrape(&address));
    assert_eq!(
        broken["gpuquota_policy_load_failures_total{reason=\"policy\"}"],
        1.0
    );
    assert_eq!(broken["gpuquota_policy_generation"], generation);
    assert!(broken.keys().any(|series| series.contains("tenant=\"b\"")));

    bed.write_policy("[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"1GiB\"\n");
    assert!(bed.ctl(&["reload"]).status.success());
    let loaded = samples(&scrape(&address));
    assert_eq!(loaded["gpuquota_policy_generation"], generation + 1.0);
    assert_eq!(
        loaded["gpuquota_tenant_memory_max_bytes{tenant=\"a\",gpu=\"0\"}"],
        GIB
    );
    assert!(!loaded.keys().any(|series| series.contains("tenant=\"b\"")));
}
