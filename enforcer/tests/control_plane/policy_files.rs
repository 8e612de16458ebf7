//! `gpuquotactl policy`: no daemon involved.

use std::{fs, path::Path, process::Output};

use insta::assert_snapshot;
use tempfile::TempDir;

use crate::support::{Daemon, ctl, fails, public_dir, stderr, stdout, uuid};

const TEAMS: &str = r#"[class.guaranteed]
priority = 100

[tenant.vision]
cgroup = "/gpu.slice/vision.slice"
class = "guaranteed"
memory.max = "40GiB"

[tenant.vision.gpu.1]
memory.max = "70GiB"
"#;

fn run(arguments: &[&str]) -> Output {
    // Nobody is there.
    ctl("peer:/nonexistent/bus", &[&["policy"], arguments].concat())
        .output()
        .expect("gpuquotactl")
}

fn directory(files: &[(&str, &str)]) -> TempDir {
    let dir = public_dir();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, text).expect("write");
    }
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn a_good_policy_is_counted() {
    let dir = directory(&[("50-teams.toml", TEAMS), ("notes.txt", "no policy")]);
    let output = run(&["check", text(dir.path())]);
    assert_eq!(stdout(&output), "1 file, 1 tenant: 0 errors, 0 warnings\n");
    let file = dir.path().join("50-teams.toml");
    assert_eq!(stdout(&run(&["check", text(&file)])), stdout(&output));
}

#[test]
fn all_problems_of_all_files_are_shown_with_carets() {
    let dir = directory(&[
        (
            "10-a.toml",
            "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"40Gib\"\n",
        ),
        (
            "20-b.toml",
            "[tenant.b]\ncgroup = \"/b\"\nclass = \"gold\"\ncolour = 1\n",
        ),
    ]);
    let output = run(&["check", text(dir.path())]);
    assert_eq!(output.status.code(), Some(78));
    let problems = stderr(&output);
    for place in [
        "10-a.toml:3:14: error",
        "20-b.toml:3:9: error",
        "20-b.toml:4:1: error",
        "^^^",
    ] {
        assert!(problems.contains(place), "{place} in\n{problems}");
    }

    let output = run(&["check", "--json", text(dir.path())]);
    assert_eq!(output.status.code(), Some(78));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["valid"], false);
    assert_eq!(json["problems"].as_array().expect("array").len(), 3);
    assert_eq!(json["problems"][0]["line"], 3);
    assert_eq!(json["problems"][0]["column"], 14);
}

#[test]
fn the_directories_of_the_daemon_are_read_in_their_order() {
    let dir = directory(&[
        (
            "vendor/10-a.toml",
            "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"1GiB\"\n",
        ),
        (
            "admin/10-a.toml",
            "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"2GiB\"\n",
        ),
        ("runtime/05-a.toml", "[tenant.a]\nmemory.max = \"3GiB\"\n"),
    ]);
    let root = text(dir.path());
    let settings = dir.path().join("gpuquota.toml");
    fs::write(
        &settings,
        format!("[policy]\nvendor = \"{root}/vendor\"\nadmin = \"{root}/admin\"\nruntime = \"{root}/runtime\"\n"),
    )
    .expect("write");
    let output = run(&["show", "--config", text(&settings)]);
    assert!(stdout(&output).contains("\"3GiB\""), "{}", stdout(&output));
    let output = run(&["check", "--config", text(&settings)]);
    // The vendor's file is replaced by the admin's of the same name.
    assert!(
        stdout(&output).starts_with("2 files, 1 tenant"),
        "{}",
        stdout(&output)
    );

    fs::write(&settings, "[policy]\nvendro = \"/x\"\n").expect("write");
    let output = run(&["show", "--config", text(&settings)]);
    fails(&output, 78, "gpuquota.toml:2:1: unknown field `vendro`");
    let missing = dir.path().join("missing.toml");
    fails(&run(&["check", text(&missing)]), 1, "missing.toml");
}

#[test]
fn the_merged_policy_is_a_policy() {
    let dir = directory(&[("50-teams.toml", TEAMS)]);
    let shown = stdout(&run(&["show", text(dir.path())]));
    let again = directory(&[("merged.toml", &shown)]);
    assert_eq!(stdout(&run(&["show", text(again.path())])), shown);
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&run(&["show", "--json", text(dir.path())]))).expect("JSON");
    assert_eq!(json["tenant"]["vision"]["memory"]["max"], "40GiB");
}

#[test]
fn every_value_is_explained_by_its_file() {
    let dir = directory(&[("50-teams.toml", TEAMS)]);
    let explain = |more: &[&str]| {
        let path = text(dir.path());
        stdout(&run(&[&["explain", "vision", path], more].concat()))
    };
    let all = explain(&[]);
    let places = all.replace(text(dir.path()), "DIR");
    assert_snapshot!("explain", places);
    let of_gpu: serde_json::Value =
        serde_json::from_str(&explain(&["--gpu", "1", "--json"])).expect("JSON");
    assert_eq!(of_gpu["values"]["memory.max"]["value"], "70GiB");
    assert_eq!(of_gpu["values"]["memory.max"]["line"], 10);

    let path = text(dir.path());
    fails(
        &run(&["explain", "nobody", path]),
        1,
        "no tenant named \"nobody\"",
    );
    fails(
        &run(&["explain", "vision", path, "--gpu", "first"]),
        2,
        "GPU",
    );
}

#[test]
fn a_gpu_has_two_names_if_the_daemon_is_there() {
    let daemon = Daemon::on_peer();
    let dir = directory(&[("50-teams.toml", TEAMS)]);
    let output = daemon.ctl(&[
        "policy",
        "explain",
        "vision",
        text(dir.path()),
        "--gpu",
        &uuid(1),
        "--json",
    ]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(json["values"]["memory.max"]["value"], "70GiB");
}
