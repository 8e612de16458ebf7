//! A container of a real OCI runtime (crun) under the shipped seccomp profile.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use gpuquota_native_tests::{Bed, binary};
use serde_json::{Value, json};

const ONE: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";

/// The shipped profile, with the listener of this bed.
fn profile(bed: &Bed) -> Value {
    let text = include_str!("../../../packaging/oci/seccomp.json");
    let mut profile: Value = serde_json::from_str(text).expect("JSON");
    profile["listenerPath"] = json!(bed.sim.scratch().join("run/listener.sock"));
    profile
}

/// A container that runs the simulated tenant program in this host's file system, in a mount namespace of its own.
fn bundle(bed: &Bed, folder: &Path, seccomp: &Value, arguments: &[&str]) {
    let workload = bed.sim.tenant();
    let environment: Vec<String> = workload
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_str()?, value?.to_str()?)))
        .collect();
    let program = binary("simtenant");
    let mut args = vec![program.to_str().expect("UTF-8")];
    args.extend(arguments);
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": args,
            "env": environment,
            "cwd": "/",
        },
        "root": {"path": "rootfs", "readonly": false},
        "mounts": [],
        "linux": {
            "namespaces": [{"type": "mount"}],
            "seccomp": seccomp,
        },
    });
    fs::create_dir_all(folder.join("rootfs")).expect("a folder");
    fs::write(folder.join("config.json"), config.to_string()).expect("written");
}

/// Runs the bundle with a cgroup of the tenant as its own.
fn run(bed: &Bed, bundle: &Path, cgroup: &str) -> Output {
    bed.hierarchy().create(cgroup).expect("a cgroup");
    let procs = Path::new("/sys/fs/cgroup").join(format!("{}/cgroup.procs", &cgroup[1..]));
    let state = bundle.join("state");
    let id = bundle
        .file_name()
        .and_then(|name| name.to_str())
        .expect("a name");
    // crun wants cgroup v2 alone at /sys/fs/cgroup, which hosts with both versions do not have.
    let script = "mount -t cgroup2 none /sys/fs/cgroup && mount --rbind / \"$2/rootfs\" && echo $$ > \"$0\" && \
                  exec crun --root \"$1\" --cgroup-manager disabled run --bundle \"$2\" \"$3\"";
    Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(procs)
        .arg(&state)
        .arg(bundle)
        .arg(format!("{}-{id}", std::process::id()))
        .stdin(Stdio::null())
        .output()
        .expect("unshare")
}

#[test]
fn a_container_under_the_profile_is_held_to_its_budget() {
    let bed = Bed::new(ONE);
    let cgroup = bed.cgroup("/a.slice/container");
    let folder = bed.sim.scratch().join("inside");
    bundle(&bed, &folder, &profile(&bed), &["alloc", "2GiB"]);
    let fits = run(&bed, &folder, &cgroup);
    assert!(fits.status.success(), "{fits:?}");
    assert!(
        String::from_utf8_lossy(&fits.stdout).contains("allocated 2147483648"),
        "{fits:?}"
    );

    let folder = bed.sim.scratch().join("over");
    bundle(&bed, &folder, &profile(&bed), &["alloc", "4GiB"]);
    let over = run(&bed, &folder, &cgroup);
    assert!(
        String::from_utf8_lossy(&over.stdout).contains("OUT_OF_MEMORY"),
        "{over:?}"
    );
    let usage = bed.usage("a", 0);
    assert_eq!((usage.denials, usage.breaches), (1, 0));

    // It is the profile that refuses: without it, what is not refused by anything else is a breach.
    let folder = bed.sim.scratch().join("without");
    bundle(&bed, &folder, &Value::Null, &["alloc", "4GiB"]);
    let without = run(&bed, &folder, &cgroup);
    let usage = bed.usage("a", 0);
    assert_eq!(usage.breaches + usage.denials, 2, "{without:?}");
}
