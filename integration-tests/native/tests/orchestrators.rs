//! Kubernetes and Slurm: what they start becomes tenants, and is held to its limits.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use gpuquota_native_tests::Bed;

const UID: &str = "8f1c0e5a-2b3d-4c5e-9f60-718293a4b5c6";

fn executable(path: &Path, text: &str) {
    fs::write(path, text).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("executable");
}

/// What an API server says about one pod.
fn pod(name: &str, annotations: &str) -> String {
    format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}","namespace":"ml","uid":"{UID}",
            "annotations":{{{annotations}}}}},"spec":{{"nodeName":"here"}},
            "status":{{"phase":"Running","qosClass":"Burstable"}}}}"#
    )
}

/// Stands in for kubectl: checks how it is asked, and prints the pods that there are.
fn fake_kubectl(folder: &Path) -> PathBuf {
    let program = folder.join("kubectl");
    let pods = folder.join("pods.json");
    executable(
        &program,
        &format!(
            "#!/bin/sh\ncase \"$*\" in\n*'get pods --all-namespaces --output json --field-selector spec.nodeName=here'*) ;;\n\
             *) echo \"asked for $*\" >&2; exit 1 ;;\nesac\nexec cat '{}'\n",
            pods.display()
        ),
    );
    program
}

fn set_pods(folder: &Path, pods: &[String]) {
    let list = format!(
        r#"{{"apiVersion":"v1","kind":"List","items":[{}]}}"#,
        pods.join(",")
    );
    fs::write(folder.join("pods.json"), list).expect("written");
}

fn sync(bed: &Bed, kubectl: &Path, driver: &str) -> Output {
    bed.ctl(&[
        "kubernetes-sync",
        "--once",
        "--node",
        "here",
        "--cgroup-driver",
        driver,
        "--cgroup-root",
        &bed.cgroup(""),
        "--kubectl",
        kubectl.to_str().expect("UTF-8"),
        "--config",
        bed.settings().to_str().expect("UTF-8"),
    ])
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn annotated_pods_are_tenants_with_both_cgroup_drivers() {
    let bed = Bed::new("[tenant.node]\ncgroup = \"@\"\nmemory.max = \"12GiB\"\n");
    let folder = bed.sim.scratch().to_owned();
    let kubectl = fake_kubectl(&folder);
    let slice = bed.cgroup("");
    let prefix = slice.trim_start_matches('/').trim_end_matches(".slice");
    let paths = [
        (
            "systemd",
            format!(
                "/{prefix}-kubepods.slice/{prefix}-kubepods-burstable.slice/{prefix}-kubepods-burstable-pod{}.slice",
                UID.replace('-', "_")
            ),
        ),
        ("cgroupfs", format!("/kubepods/burstable/pod{UID}")),
    ];
    for (driver, path) in paths {
        // The kubelet has made the pod's cgroup, and a container in it.
        let cgroup = bed.cgroup(&path);
        bed.hierarchy().create(&cgroup).expect("a cgroup");
        set_pods(
            &folder,
            &[
                pod("train-0", r#""gpuquota.org/memory.max":"2GiB""#),
                pod("typo", r#""gpuquota.org/memory.max":"2 apples""#),
                pod("unconcerned", r#""other":"1""#),
            ],
        );
        let output = sync(&bed, &kubectl, driver);
        assert!(output.status.success(), "{}", said(&output));
        assert!(
            said(&output).contains("pod ml/typo: no tenant"),
            "{}",
            said(&output)
        );
        assert_eq!(bed.tenant("ml.train-0").cgroups, [cgroup]);
        let over = bed.run("ml.train-0", &["alloc", "3GiB"]);
        assert_eq!(over.status.code(), Some(2), "{driver}: {over:?}");
        assert!(bed.run("ml.train-0", &["alloc", "1GiB"]).status.success());
        // An API server that does not answer changes nothing.
        fs::write(folder.join("pods.json"), "no JSON").expect("written");
        let failed = sync(&bed, &kubectl, driver);
        assert_eq!(failed.status.code(), Some(1), "{}", said(&failed));
        assert_eq!(bed.usage("ml.train-0", 0).memory_max, Some(2 << 30));
        // The pod is gone, and its tenant with it.
        set_pods(&folder, &[]);
        let output = sync(&bed, &kubectl, driver);
        assert!(output.status.success(), "{}", said(&output));
        let gone = bed.ctl(&["status", "ml.train-0"]);
        assert!(!gone.status.success());
        assert!(bed.run("node", &["alloc", "3GiB"]).status.success());
    }
}

fn slurm(bed: &Bed, script: &str, job: &str, partition: &str, folder: &Path) -> Output {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging/slurm")
        .join(script);
    let search = format!(
        "{}:{}",
        bed.binaries().display(),
        std::env::var("PATH").unwrap_or_default()
    );
    Command::new(path)
        .env("PATH", search)
        .env("GPUQUOTA_BUS", bed.bus())
        .env("GPUQUOTA_SLURM_CONF", folder.join("slurm.conf"))
        .env("GPUQUOTA_SLURM_POLICY", folder.join("run/policy.d"))
        .env("GPUQUOTA_SLURM_SCOPE", bed.cgroup("/slurmstepd.scope"))
        .env("SLURM_JOB_ID", job)
        .env("SLURM_JOB_PARTITION", partition)
        .output()
        .expect("a shell script")
}

#[test]
fn a_slurm_job_is_a_tenant_from_its_prolog_to_its_epilog() {
    let bed = Bed::new("[tenant.other]\ncgroup = \"@/other.slice\"\n");
    let folder = bed.sim.scratch().to_owned();
    let conf = folder.join("slurm.conf");
    fs::write(
        &conf,
        "# what jobs get\nshort memory.max=2GiB time.weight=50 # half\n* memory.max=4GiB\n",
    )
    .expect("written");
    for (job, partition, limit) in [("41", "short", 2u64 << 30), ("42", "long", 4 << 30)] {
        let output = slurm(&bed, "prolog.sh", job, partition, &folder);
        assert!(output.status.success(), "{}", said(&output));
        let tenant = format!("slurm-{job}");
        assert_eq!(bed.usage(&tenant, 0).memory_max, Some(limit), "{partition}");
    }
    // slurmstepd makes the cgroup and starts the step in it.
    let over = bed.run("slurm-41", &["alloc", "3GiB"]);
    assert_eq!(over.status.code(), Some(2), "{over:?}");
    assert!(bed.run("slurm-42", &["alloc", "3GiB"]).status.success());
    let output = slurm(&bed, "epilog.sh", "41", "short", &folder);
    assert!(output.status.success(), "{}", said(&output));
    assert!(!bed.ctl(&["status", "slurm-41"]).status.success());
    assert!(bed.ctl(&["status", "slurm-42"]).status.success());

    // What cannot come into force fails the prolog, and leaves nothing behind.
    fs::write(&conf, "short memory.max=lots\n").expect("written");
    let output = slurm(&bed, "prolog.sh", "43", "short", &folder);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("memory.max"), "{}", said(&output));
    assert!(!folder.join("run/policy.d/85-slurm-job-43.toml").exists());
    assert!(bed.ctl(&["reload"]).status.success());
    let output = slurm(&bed, "prolog.sh", "43", "long", &folder);
    assert!(output.status.success(), "a partition without properties");
    assert!(!bed.ctl(&["status", "slurm-43"]).status.success());
}
