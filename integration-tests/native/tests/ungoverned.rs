//! `ungoverned = "deny"`: who may open a GPU's file.
//!
//! The simulated GPUs are no device files, so this is asked of a node with NVIDIA's number and no driver behind it: who
//! may open it is told that there is no such device, who may not is told so.

use std::{ffi::CString, os::unix::ffi::OsStrExt as _, path::PathBuf};

use gpuquota_native_tests::Bed;

const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\n";

/// A node like `/dev/nvidiactl`.
fn node(bed: &Bed) -> PathBuf {
    let path = bed.sim.scratch().join("nvidiactl");
    let name = CString::new(path.as_os_str().as_bytes()).expect("no zero in it");
    // SAFETY: a name that ends with a zero; the numbers of nvidiactl.
    let made = unsafe {
        libc::mknod(
            name.as_ptr(),
            libc::S_IFCHR | 0o666,
            libc::makedev(195, 255),
        )
    };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    path
}

/// What a process in this cgroup is told when it opens the node.
fn told(bed: &Bed, cgroup: &str, node: &std::path::Path) -> String {
    let folder = bed
        .hierarchy()
        .folder(&bed.cgroup(cgroup))
        .expect("a folder");
    let output = bed
        .command("/bin/sh")
        .args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec 3<>\"$1\""])
        .arg(folder)
        .arg(node)
        .env("LC_ALL", "C")
        .output()
        .expect("a shell");
    let text = String::from_utf8_lossy(&output.stderr).to_lowercase();
    if text.contains("no such device") {
        "allowed".into()
    } else if text.contains("not permitted") {
        "denied".into()
    } else {
        text
    }
}

#[test]
fn gpus_are_closed_to_processes_in_no_tenant() {
    let mut bed = Bed::new(POLICY);
    let node = node(&bed);
    for cgroup in [
        "/a.slice",
        "/a.slice/deep",
        "/other.slice",
        "/free.slice",
        "/free.slice/deep",
    ] {
        bed.hierarchy()
            .create(&bed.cgroup(cgroup))
            .expect("a cgroup");
    }
    // By default everybody may.
    assert_eq!(told(&bed, "/other.slice", &node), "allowed");
    bed.signal_daemon(libc::SIGTERM);
    let exempt = bed.cgroup("/free.slice");
    bed.add_settings(&format!(
        "ungoverned = \"deny\"\nungoverned-exempt = [\"{exempt}\"]\n"
    ));
    bed.start();
    let all = |bed: &Bed| -> Vec<String> {
        [
            "/a.slice",
            "/a.slice/deep",
            "/free.slice",
            "/free.slice/deep",
            "/other.slice",
            "",
        ]
        .iter()
        .map(|cgroup| told(bed, cgroup, &node))
        .collect()
    };
    let closed = [
        "allowed", "allowed", "allowed", "allowed", "denied", "denied",
    ];
    assert_eq!(all(&bed), closed);
    // Other devices are nobody's business.
    assert!(
        bed.command("/bin/sh")
            .args(["-c", ": </dev/null >/dev/zero"])
            .status()
            .expect("a shell")
            .success()
    );
    // A crash of the daemon opens nothing.
    bed.signal_daemon(libc::SIGKILL);
    assert_eq!(all(&bed), closed);
    // A new one that is told to allow does.
    let path = bed.sim.scratch().join("gpuquota.toml");
    let settings = std::fs::read_to_string(&path).expect("settings");
    std::fs::write(&path, settings.replace("\"deny\"", "\"allow\"")).expect("settings");
    bed.start();
    assert_eq!(told(&bed, "/other.slice", &node), "allowed");
}
