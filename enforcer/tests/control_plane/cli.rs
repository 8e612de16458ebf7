//! The verbs of `gpuquotactl` and what they print.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
};

use gpuquota_enforcer::control::{Control, Notice};
use insta::assert_snapshot;

use crate::support::{Daemon, GIB, TestBus, ctl, eventually, fails, public_dir, stderr, stdout};

#[test]
fn readers_print_for_people() {
    let daemon = Daemon::on_peer();
    assert_snapshot!("list", stdout(&daemon.ctl(&["list"])));
    assert_snapshot!("status", stdout(&daemon.ctl(&["status"])));
    assert_snapshot!("status-vision", stdout(&daemon.ctl(&["status", "vision"])));
    assert_snapshot!("doctor", stdout(&daemon.ctl(&["doctor"])));
    assert_snapshot!(
        "leaks",
        stdout(&daemon.ctl(&["leaks", "vision", "--so-far"]))
    );
    assert_snapshot!("idle", stdout(&daemon.ctl(&["idle", "vision", "--so-far"])));
    assert_snapshot!(
        "profile",
        stdout(&daemon.ctl(&["profile", "vision", "--so-far"]))
    );
    assert_snapshot!("version", stdout(&daemon.ctl(&["version"])));
}

#[test]
fn readers_print_json_with_exact_numbers() {
    let daemon = Daemon::on_peer();
    assert_snapshot!("list-json", stdout(&daemon.ctl(&["list", "--json"])));
    assert_eq!(
        stdout(&daemon.ctl(&["status", "--json"])),
        stdout(&daemon.ctl(&["list", "--json"]))
    );
    assert_snapshot!(
        "status-vision-json",
        stdout(&daemon.ctl(&["status", "vision", "--json"]))
    );
    assert_snapshot!("doctor-json", stdout(&daemon.ctl(&["doctor", "--json"])));
    assert_snapshot!(
        "leaks-json",
        stdout(&daemon.ctl(&["leaks", "vision", "--so-far", "--json"]))
    );
    assert_snapshot!(
        "idle-json",
        stdout(&daemon.ctl(&["idle", "vision", "--so-far", "--json"]))
    );
    assert_snapshot!(
        "profile-json",
        stdout(&daemon.ctl(&["profile", "vision", "--so-far", "--json"]))
    );
    assert_snapshot!("version-json", stdout(&daemon.ctl(&["version", "--json"])));
    assert_snapshot!("reload-json", stdout(&daemon.ctl(&["reload", "--json"])));
}

/// The keys of a value and of all in it.
fn keys(value: &serde_json::Value, into: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                into.insert(key.clone());
                keys(value, into);
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| keys(value, into)),
        _ => {}
    }
}

#[test]
fn every_key_of_json_and_every_event_is_in_the_reference() {
    let reference = include_str!("../../../docs/cli.md");
    let daemon = Daemon::on_peer();
    let mut found = BTreeSet::new();
    for arguments in [
        &["list"][..],
        &["status", "vision"],
        &["doctor"],
        &["history"],
        &["leaks", "vision", "--so-far"],
        &["idle", "vision", "--so-far"],
        &["profile", "vision", "--so-far"],
        &["version"],
        &["reload"],
    ] {
        let output = daemon.ctl(&[arguments, &["--json"]].concat());
        let value = serde_json::from_str(&stdout(&output)).expect("JSON");
        keys(&value, &mut found);
    }
    assert!(found.len() > 100, "{found:?}");
    // Events are the signals by another spelling, and the interface is compared with the code.
    let interface = include_str!("../../../config/org.gpuquota.Enforcer1.xml");
    for signal in interface.split("<signal name=\"").skip(1) {
        let name = signal.split('"').next().unwrap_or_default();
        let mut event = String::new();
        for letter in name.chars() {
            if letter.is_ascii_uppercase() && !event.is_empty() {
                event.push('-');
            }
            event.push(letter.to_ascii_lowercase());
        }
        found.insert(event);
    }
    let words: BTreeSet<_> = reference
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
        .collect();
    let missing: Vec<_> = found
        .iter()
        .filter(|word| !words.contains(word.as_str()))
        .collect();
    assert!(missing.is_empty(), "not in docs/cli.md: {missing:?}");
}

#[test]
#[cfg(not(feature = "parquet"))]
fn a_format_that_is_not_built_in_is_refused_with_what_to_build() {
    let daemon = Daemon::on_peer();
    let file = std::env::temp_dir().join(format!("gpuquota-{}.parquet", std::process::id()));
    let name = file.to_str().expect("UTF-8");
    fails(
        &daemon.ctl(&["record", "--format", "parquet", "--output", name]),
        2,
        "--features parquet",
    );
    assert!(!file.exists());
}

#[test]
fn a_tenant_is_found_by_process() {
    let daemon = Daemon::on_peer();
    assert_eq!(
        stdout(&daemon.ctl(&["status", "--pid", "4242"])),
        stdout(&daemon.ctl(&["status", "vision"]))
    );
    fails(
        &daemon.ctl(&["status", "--pid", "1"]),
        1,
        "process 1 is in no tenant's cgroup",
    );
    fails(&daemon.ctl(&["status", "--pid", "77"]), 1, "no process 77");
}

#[test]
fn what_a_process_calls_itself_does_not_reach_the_terminal() {
    let daemon = Daemon::on_peer();
    let text = stdout(&daemon.ctl(&["status", "vision"]));
    assert!(text.contains("evil"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn a_change_takes_effect_on_all_gpus_or_on_one() {
    let daemon = Daemon::on_peer();
    let output = daemon.ctl(&["set-property", "vision", "memory.max=20GiB"]);
    assert_eq!(
        stdout(&output),
        "Kept in /etc/gpuquota/policy.d/90-set-property-vision.toml.\n"
    );
    assert_eq!(daemon.control.memory_max("vision", 0), Some(20 * GIB));
    assert_eq!(daemon.control.memory_max("vision", 1), Some(20 * GIB));

    let output = daemon.ctl(&[
        "set-property",
        "vision",
        "memory.max=30GiB",
        "memory.high=25GiB",
        "--gpu",
        "1",
        "--runtime",
    ]);
    assert_eq!(
        stdout(&output),
        "Kept in /run/gpuquota/policy.d/90-set-property-vision.toml, until the next boot.\n"
    );
    assert_eq!(daemon.control.memory_max("vision", 0), Some(20 * GIB));
    assert_eq!(daemon.control.memory_max("vision", 1), Some(30 * GIB));

    stdout(&daemon.ctl(&["reset-property", "vision", "memory.max"]));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(40 * GIB));
}

#[test]
fn a_tenant_is_frozen_and_thawed() {
    let daemon = Daemon::on_peer();
    let output = daemon.ctl(&["freeze", "vision", "--gpu", "1"]);
    // Who is out of reach is told, and that it is not all of the tenant is no reason to fail.
    assert!(String::from_utf8_lossy(&output.stderr).contains("process 4244: no subdevice"));
    assert_eq!(stdout(&output), "vision is frozen: 2 processes.\n");
    let output = daemon.ctl(&["thaw", "vision"]);
    assert_eq!(stdout(&output), "vision goes on.\n");
    fails(&daemon.ctl(&["freeze", "nobody"]), 1, "no tenant named");
    fails(
        &daemon.ctl(&["freeze", "vision", "--gpu", "7"]),
        1,
        "no GPU",
    );
}

#[test]
fn bad_changes_change_nothing_and_say_what_is_allowed() {
    let daemon = Daemon::on_peer();
    let before = stdout(&daemon.ctl(&["list", "--json"]));
    let set = |arguments: &[&str]| daemon.ctl(&[&["set-property"], arguments].concat());

    fails(
        &set(&["nobody", "memory.max=1GiB"]),
        1,
        "no tenant named \"nobody\"; `gpuquotactl list` shows those there are",
    );
    fails(&set(&["vision", "memory.max=lots"]), 2, "lots");
    fails(&set(&["vision", "memory.max=1.5"]), 2, "memory.max");
    fails(&set(&["vision", "memory.mux=1GiB"]), 2, "memory.max");
    fails(
        &set(&["vision", "memory.max=1GiB", "memory.high=-1"]),
        2,
        "memory.high",
    );
    fails(
        &set(&["vision", "memory.max=1GiB", "--gpu", "9"]),
        1,
        "no GPU \"9\" on this host",
    );
    fails(&set(&["vision", "memory.max"]), 2, "write KEY=VALUE");
    fails(&set(&["vision"]), 2, "KEY=VALUE");
    fails(
        &daemon.ctl(&["reset-property", "vision", "memory.mux"]),
        2,
        "memory.max",
    );
    assert_eq!(stdout(&daemon.ctl(&["list", "--json"])), before);
}

#[test]
fn endless_strings_are_refused() {
    let daemon = Daemon::on_peer();
    // The longest argument that the kernel passes on is 128 KiB.
    let long = "x".repeat(100_000);
    fails(
        &daemon.ctl(&["status", &long]),
        1,
        "a string of 100000 bytes is too long; at most 65536 are allowed",
    );
    fails(
        &daemon.ctl(&["set-property", &long, "memory.max=1GiB"]),
        1,
        "too long",
    );
    let many: Vec<_> = (0..65).map(|i| format!("k{i}=1")).collect();
    let mut arguments = vec!["set-property", "vision"];
    arguments.extend(many.iter().map(String::as_str));
    fails(&daemon.ctl(&arguments), 1, "65 properties in one call");
    stdout(&daemon.ctl(&["list"]));
}

#[test]
fn a_reload_says_what_is_in_force_or_what_is_wrong() {
    let daemon = Daemon::on_peer();
    let output = daemon.ctl(&["reload"]);
    assert_eq!(stdout(&output), "Policy 2 is in force: 2 tenants.\n");
    assert!(stderr(&output).contains("a.toml:3:1: warning: no GPU 7"));

    let problems =
        "/etc/gpuquota/policy.d/a.toml:1:1: error: unknown key\n  1 | tennant\n    | ^^^^^^^";
    *daemon.control.broken_policy.lock().expect("lock") = Some(problems.into());
    let output = daemon.ctl(&["reload"]);
    fails(&output, 78, problems);
    fails(&output, 78, "nothing was changed");
}

#[test]
fn a_missing_daemon_is_69_and_the_message_says_how_to_start_it() {
    let dir = public_dir();
    let bus = format!("peer:{}/bus", dir.path().display());
    for arguments in [
        vec!["list"],
        vec!["status", "vision"],
        vec!["reload"],
        vec!["monitor"],
        vec!["doctor"],
        vec!["set-property", "vision", "memory.max=1GiB"],
    ] {
        let output = ctl(&bus, &arguments).output().expect("gpuquotactl");
        fails(&output, 69, "the socket does not exist");
        fails(&output, 69, "gpuquotad --bus peer:");
    }
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("bus")).expect("bind"));
    let output = ctl(&bus, &["list"]).output().expect("gpuquotactl");
    fails(&output, 69, "nobody listens on the socket");

    // For `version` it is an answer.
    let output = ctl(&bus, &["version"]).output().expect("gpuquotactl");
    assert!(stdout(&output).contains("no gpuquotad at"));
    let output = ctl(&bus, &["version", "--json"])
        .output()
        .expect("gpuquotactl");
    assert!(stdout(&output).contains("\"gpuquotad\": null"));

    let output = ctl("sytem", &["list"]).output().expect("gpuquotactl");
    fails(&output, 2, "names no bus");
}

#[test]
fn a_daemon_that_goes_away_ends_monitor_with_69() {
    let bus = TestBus::start();
    for mut daemon in [Daemon::on_peer(), Daemon::on_bus(&bus)] {
        let mut child = daemon
            .ctl_command(&["monitor"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("spawn");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        knock(&daemon, &mut lines);
        daemon.stop();
        let output = child.wait_with_output().expect("wait");
        fails(&output, 69, "it went away");
    }
}

/// Nobody knows when `monitor` listens: makes things happen until it prints one.
fn knock(daemon: &Daemon, lines: &mut (impl Iterator<Item = std::io::Result<String>> + Send)) {
    let heard = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            lines.next().expect("a line").expect("text");
            heard.store(true, Ordering::SeqCst);
        });
        eventually("monitor listens", || {
            daemon.control.happens(Notice::CgroupAttached {
                tenant: "vision".into(),
                cgroup: "/knock".into(),
            });
            heard.load(Ordering::SeqCst)
        });
    });
}

fn notices() -> Vec<Notice> {
    let tenant = "vision".to_owned();
    vec![
        Notice::Denied {
            tenant: tenant.clone(),
            limited_by: "lab".into(),
            key: "memory.max".into(),
            gpu: 0,
            pid: 4242,
            requested: 2 << 20,
            used: 40 * GIB,
            limit: 40 * GIB,
        },
        Notice::Breached {
            tenant: tenant.clone(),
            key: "memory.max".into(),
            gpu: 1,
            pid: 4242,
            requested: GIB,
            used: 71 * GIB,
            limit: 70 * GIB,
        },
        Notice::HighReached {
            tenant: tenant.clone(),
            gpu: 0,
            used: 37 * GIB,
            high: 36 * GIB,
        },
        Notice::CgroupAttached {
            tenant: tenant.clone(),
            cgroup: "/gpu.slice/vision.slice".into(),
        },
        Notice::CgroupDetached {
            tenant,
            cgroup: "/gpu.slice/vision.slice".into(),
        },
    ]
}

/// Lines that `monitor` prints while things happen; the last event is a change of the policy.
pub fn monitored(daemon: &Daemon, arguments: &[&str]) -> Vec<String> {
    let mut child = daemon
        .ctl_command(&[&["monitor"], arguments].concat())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    knock(daemon, &mut lines);
    for notice in notices() {
        daemon.control.happens(notice);
    }
    daemon.control.happens(Notice::Denied {
        tenant: "lab".into(),
        limited_by: "lab".into(),
        key: "memory.max".into(),
        gpu: 0,
        pid: 1,
        requested: 1,
        used: 2,
        limit: 2,
    });
    daemon.control.reload().expect("reload");
    let mut printed = Vec::new();
    for line in lines {
        let line = line.expect("text");
        let last = line.contains("policy");
        printed.extend(Some(line).filter(|line| !line.contains("/knock")));
        if last {
            break;
        }
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    printed
}

#[test]
fn monitor_prints_events_in_order() {
    let daemon = Daemon::on_peer();
    let lines = monitored(&daemon, &[]);
    let without_time: Vec<_> = lines
        .iter()
        .map(|line| line.split_once("Z  ").expect("time").1)
        .collect();
    assert_snapshot!("monitor", without_time.join("\n"));
}

#[test]
fn monitor_prints_one_json_object_per_event() {
    let daemon = Daemon::on_peer();
    let lines = monitored(&daemon, &["--json", "vision"]);
    let events: Vec<_> = lines
        .iter()
        .map(|line| {
            let mut event: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let time = event.as_object_mut().expect("object").remove("time_usec");
            assert!(time.expect("time").as_u64() > Some(1_600_000_000_000_000));
            event.to_string()
        })
        .collect();
    assert_snapshot!("monitor-json", events.join("\n"));
}

#[test]
fn monitor_of_a_misspelt_tenant_does_not_wait_for_ever() {
    let daemon = Daemon::on_peer();
    fails(&daemon.ctl(&["monitor", "visoin"]), 1, "no tenant named");
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let daemon = Daemon::on_peer();
    let mut child = daemon
        .ctl_command(&["list"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("spawn");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("wait");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn completions_and_manual_pages_cover_every_verb() {
    for shell in ["bash", "zsh", "fish"] {
        let output = ctl("system", &["completions", shell])
            .output()
            .expect("run");
        assert!(stdout(&output).contains("set-property"));
    }
    let dir = public_dir();
    let path = dir.path().to_str().expect("UTF-8");
    stdout(&ctl("system", &["man", path]).output().expect("run"));
    let page = std::fs::read_to_string(dir.path().join("gpuquotactl.1")).expect("page");
    assert!(page.contains("Exit codes"));
    for verb in [
        "list",
        "status",
        "set-property",
        "freeze",
        "thaw",
        "run",
        "policy",
        "doctor",
    ] {
        let page = dir.path().join(format!("gpuquotactl-{verb}.1"));
        assert!(page.exists(), "{}", page.display());
    }
    let output = ctl("system", &["man", "/nonexistent"])
        .output()
        .expect("run");
    fails(&output, 1, "/nonexistent");
}

#[test]
fn doctor_tells_of_the_host_without_a_daemon() {
    let output = ctl("peer:/nonexistent/bus", &["doctor"])
        .output()
        .expect("gpuquotactl");
    fails(&output, 69, "the socket does not exist");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("cgroup v2") && text.contains("kernel"),
        "{text}"
    );
    assert!(!text.contains("BACKEND"), "{text}");
    let json = ctl("peer:/nonexistent/bus", &["doctor", "--json"])
        .output()
        .expect("gpuquotactl");
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(report["findings"][0]["subject"], "gpuquotad");
    assert_eq!(report["findings"][0]["verdict"], "error");
    assert_eq!(report["backends"], serde_json::json!([]));
}
