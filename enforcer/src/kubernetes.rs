//! Tenants from pods: annotations of a pod become the properties of a tenant whose cgroup is the pod's.
//!
//! Pure: takes what the API server says about the pods of a node, and gives the policy file that follows.
//! `gpuquotactl kubernetes-sync` fetches the one and writes the other.

use std::collections::BTreeMap;

use gpuquota_policy::{dropin, is_name};
use serde::Deserialize;

/// What annotations start with that concern us; the rest is a property: `gpuquota.org/memory.max: 20GiB`.
pub const ANNOTATION: &str = "gpuquota.org/";
/// On the mirror of a static pod: the UID that the kubelet itself gave the pod, and named its cgroup by.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// How the kubelet names cgroups: its setting `cgroupDriver`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupDriver {
    /// Slices of systemd: `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice`.
    Systemd,
    /// Plain folders: `/kubepods/burstable/podUID`.
    Cgroupfs,
}

/// Pods, as far as they matter here.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodList {
    /// The pods.
    #[serde(default)]
    pub items: Vec<Pod>,
}

/// A pod.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Pod {
    /// Who it is.
    #[serde(default)]
    pub metadata: Metadata,
    /// How it is.
    #[serde(default)]
    pub status: Status,
}

/// Who a pod is.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Metadata {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// Its namespace.
    #[serde(default)]
    pub namespace: String,
    /// Its UID.
    #[serde(default)]
    pub uid: String,
    /// What is written on it.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// How a pod is.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Status {
    /// `Pending`, `Running`, `Succeeded` or `Failed`.
    #[serde(default)]
    pub phase: String,
    /// `Guaranteed`, `Burstable` or `BestEffort`; absent before the pod is admitted.
    #[serde(default, rename = "qosClass")]
    pub qos_class: String,
}

/// A tenant that a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTenant {
    /// Its name in the policy.
    pub name: String,
    /// The pod, as `NAMESPACE/NAME`.
    pub pod: String,
    /// Its part of the policy file.
    pub text: String,
}

/// A pod whose annotations make no tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The pod, as `NAMESPACE/NAME`.
    pub pod: String,
    /// What is wrong.
    pub what: String,
}

/// The cgroup of a pod below the kubelet's root (its setting `cgroupRoot`, `/` unless changed).
///
/// `None` for a quality of service that the kubelet does not have.
pub fn pod_cgroup(driver: CgroupDriver, root: &str, qos_class: &str, uid: &str) -> Option<String> {
    let class = match qos_class {
        // Guaranteed pods lie beside the folders of the other classes.
        "Guaranteed" => "",
        "Burstable" => "burstable",
        "BestEffort" => "besteffort",
        _ => return None,
    };
    // A UID with anything else in it would be another path.
    if uid.is_empty()
        || !uid
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    {
        return None;
    }
    let root = root.trim_end_matches('/');
    Some(match (driver, class) {
        (CgroupDriver::Cgroupfs, "") => format!("{root}/kubepods/pod{uid}"),
        (CgroupDriver::Cgroupfs, class) => format!("{root}/kubepods/{class}/pod{uid}"),
        (CgroupDriver::Systemd, class) => {
            // A dash in a slice's name is a level of the hierarchy, so the kubelet writes those of the UID as underscores.
            let uid = uid.replace('-', "_");
            let mut names = slices(root);
            for part in ["kubepods", class, &format!("pod{uid}")] {
                if !part.is_empty() {
                    names.push(match names.last() {
                        Some(above) => format!("{above}-{part}"),
                        None => part.to_owned(),
                    });
                }
            }
            let folders: Vec<String> = names.iter().map(|name| format!("{name}.slice")).collect();
            format!("/{}", folders.join("/"))
        }
    })
}

/// The slices of a root such as `/kubelet` or `/a/b`, as the kubelet nests them: `kubelet`; `a`, `a-b`.
fn slices(root: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for part in root.split('/').filter(|part| !part.is_empty()) {
        let part = part.trim_end_matches(".slice");
        found.push(match found.last() {
            Some(above) => format!("{above}-{part}"),
            None => part.to_owned(),
        });
    }
    found
}

/// The tenants that pods ask for, by name, and what is wrong with the others.
pub fn tenants(pods: &PodList, driver: CgroupDriver, root: &str) -> (Vec<PodTenant>, Vec<Problem>) {
    let mut found = BTreeMap::new();
    let mut problems = Vec::new();
    for pod in &pods.items {
        let ended = matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
        let properties = properties(&pod.metadata);
        // Without a class of service the kubelet has not made its cgroup yet; the next look finds it.
        if ended || properties.is_empty() || pod.status.qos_class.is_empty() {
            continue;
        }
        match tenant(pod, properties, driver, root) {
            Ok(tenant) => {
                found.insert(tenant.name.clone(), tenant);
            }
            Err(what) => problems.push(Problem {
                pod: title(&pod.metadata),
                what,
            }),
        }
    }
    (found.into_values().collect(), problems)
}

fn properties(metadata: &Metadata) -> Vec<(String, String)> {
    metadata
        .annotations
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(ANNOTATION)?.to_owned(), value.clone())))
        .collect()
}

fn tenant(
    pod: &Pod,
    mut properties: Vec<(String, String)>,
    driver: CgroupDriver,
    root: &str,
) -> Result<PodTenant, String> {
    if properties.iter().any(|(key, _)| key == "cgroup") {
        return Err(format!(
            "{ANNOTATION}cgroup: the cgroup of a pod is the kubelet's choice"
        ));
    }
    let metadata = &pod.metadata;
    let uid = metadata.annotations.get(MIRROR).unwrap_or(&metadata.uid);
    let cgroup = pod_cgroup(driver, root, &pod.status.qos_class, uid).ok_or_else(|| {
        format!(
            "no cgroup for UID {uid:?} and class of service {:?}",
            pod.status.qos_class
        )
    })?;
    properties.insert(0, ("cgroup".to_owned(), cgroup));
    let name = name(metadata, uid);
    let text = dropin::apply(Some(""), &name, None, &properties)
        .map_err(|error| format!("annotations {ANNOTATION}…: {error}"))?;
    Ok(PodTenant {
        name,
        pod: title(metadata),
        text,
    })
}

/// `NAMESPACE.NAME` where that can be a name, else by the UID. A namespace holds no dot, so two pods never share one.
fn name(metadata: &Metadata, uid: &str) -> String {
    let readable = format!("{}.{}", metadata.namespace, metadata.name);
    if is_name(&readable) {
        readable
    } else {
        format!("pod-{uid}")
    }
}

fn title(metadata: &Metadata) -> String {
    format!("{}/{}", metadata.namespace, metadata.name)
}

/// The policy file for these tenants.
pub fn policy_file(tenants: &[PodTenant]) -> String {
    let mut text = String::from(
        "# Written by `gpuquotactl kubernetes-sync` from annotations of pods; what is changed here does not last.\n",
    );
    for tenant in tenants {
        text.push_str("\n# ");
        text.extend(tenant.pod.chars().filter(|c| !c.is_control()));
        text.push('\n');
        text.push_str(tenant.text.trim_start());
    }
    text
}

#[cfg(test)]
mod tests {
    use gpuquota_policy::{Layer, Policy, Source};

    use super::*;

    const UID: &str = "8f1c0e5a-2b3d-4c5e-9f60-718293a4b5c6";

    fn pods(text: &str) -> PodList {
        serde_json::from_str(text).expect("a list of pods")
    }

    fn pod(name: &str, qos: &str, phase: &str, annotations: &str) -> String {
        format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"ml","uid":"{UID}","annotations":{{{annotations}}},"labels":{{}}}},
                "spec":{{"nodeName":"n"}},"status":{{"phase":"{phase}","qosClass":"{qos}"}}}}"#
        )
    }

    #[test]
    fn cgroups_are_where_the_kubelet_puts_them() {
        let at = |driver, root, qos| pod_cgroup(driver, root, qos, UID).expect("a class");
        let systemd = |root, qos| at(CgroupDriver::Systemd, root, qos);
        assert_eq!(
            systemd("/", "Guaranteed"),
            "/kubepods.slice/kubepods-pod8f1c0e5a_2b3d_4c5e_9f60_718293a4b5c6.slice"
        );
        assert_eq!(
            systemd("/", "Burstable"),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8f1c0e5a_2b3d_4c5e_9f60_718293a4b5c6.slice"
        );
        // As kind has it: cgroupRoot is /kubelet.
        assert_eq!(
            systemd("/kubelet", "BestEffort"),
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
             kubelet-kubepods-besteffort-pod8f1c0e5a_2b3d_4c5e_9f60_718293a4b5c6.slice"
        );
        let plain = |root, qos| at(CgroupDriver::Cgroupfs, root, qos);
        assert_eq!(plain("/", "Guaranteed"), format!("/kubepods/pod{UID}"));
        assert_eq!(
            plain("/", "Burstable"),
            format!("/kubepods/burstable/pod{UID}")
        );
        assert_eq!(
            plain("/kubelet/", "BestEffort"),
            format!("/kubelet/kubepods/besteffort/pod{UID}")
        );
        assert_eq!(pod_cgroup(CgroupDriver::Cgroupfs, "/", "Other", UID), None);
        assert_eq!(
            pod_cgroup(CgroupDriver::Cgroupfs, "/", "Burstable", "../../x"),
            None
        );
    }

    #[test]
    fn annotations_become_a_policy_that_loads() {
        let list = pods(&format!(
            r#"{{"kind":"List","items":[{},{},{},{}]}}"#,
            pod(
                "train-0",
                "Burstable",
                "Running",
                r#""gpuquota.org/memory.max":"20GiB","gpuquota.org/time.weight":"300","x":"y""#
            ),
            pod("other", "Burstable", "Running", r#""unrelated":"1""#),
            pod(
                "done",
                "Burstable",
                "Succeeded",
                r#""gpuquota.org/memory.max":"20GiB""#
            ),
            pod(
                "early",
                "",
                "Pending",
                r#""gpuquota.org/memory.max":"20GiB""#
            ),
        ));
        let (tenants, problems) = tenants(&list, CgroupDriver::Systemd, "/");
        assert_eq!(problems, []);
        let names: Vec<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        assert_eq!(names, ["ml.train-0"]);
        let source = Source::new("/k.toml", Layer::Runtime, policy_file(&tenants));
        let policy = Policy::load(&[source], None).expect("loads").policy;
        let tenant = &policy.tenants["ml.train-0"];
        assert!(tenant.cgroup.value.matches(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8f1c0e5a_2b3d_4c5e_9f60_718293a4b5c6.slice"
        ));
    }

    #[test]
    fn a_wrong_annotation_is_told_and_harms_nobody_else() {
        let list = pods(&format!(
            r#"{{"items":[{},{},{}]}}"#,
            pod(
                "typo",
                "Burstable",
                "Running",
                r#""gpuquota.org/memory.maxx":"20GiB""#
            ),
            pod(
                "sly",
                "Burstable",
                "Running",
                r#""gpuquota.org/cgroup":"/""#
            ),
            pod(
                "good",
                "Guaranteed",
                "Running",
                r#""gpuquota.org/memory.max":"1GiB""#
            ),
        ));
        let (tenants, problems) = tenants(&list, CgroupDriver::Cgroupfs, "/");
        assert_eq!(tenants.len(), 1);
        assert_eq!(problems.len(), 2);
        assert!(problems[0].what.contains("memory.max"), "{problems:?}");
        assert!(
            problems[1].what.contains("kubelet's choice"),
            "{problems:?}"
        );
    }

    #[test]
    fn static_pods_go_by_the_kubelets_own_uid_and_long_names_by_theirs() {
        let mirror = "0123456789abcdef0123456789abcdef";
        let long = "x".repeat(80);
        let list = pods(&format!(
            r#"{{"items":[{},{}]}}"#,
            pod(
                "static",
                "Burstable",
                "Running",
                &format!(
                    r#""kubernetes.io/config.mirror":"{mirror}","gpuquota.org/memory.max":"1GiB""#
                )
            ),
            pod(
                &long,
                "Burstable",
                "Running",
                r#""gpuquota.org/memory.max":"1GiB""#
            ),
        ));
        let (tenants, problems) = tenants(&list, CgroupDriver::Cgroupfs, "/");
        assert_eq!(problems, []);
        assert!(
            tenants[0]
                .text
                .contains(&format!("/kubepods/burstable/pod{mirror}"))
        );
        assert_eq!(tenants[1].name, format!("pod-{UID}"));
    }
}
