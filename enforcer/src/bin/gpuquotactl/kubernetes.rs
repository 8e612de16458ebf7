//! `kubernetes-sync`: tenants from the annotations of the pods of a node.

use std::{path::Path, process::Stdio, time::Duration};

use gpuquota_enforcer::{
    client::Client,
    config::{Bus, Config},
    kubernetes::{self, CgroupDriver, PodList, PodTenant, Problem},
    policy_files,
};
use gpuquota_policy::{Layer, Policy, Source};

use crate::{
    args::{Driver, KubernetesArgs},
    error::Error,
    output::clean,
};

/// Longest that one question to the API server may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// `kubernetes-sync`
pub async fn sync(bus: &Bus, arguments: &KubernetesArgs) -> Result<(), Error> {
    let config = Config::load(arguments.config.as_deref())?;
    let path = arguments
        .file
        .clone()
        .unwrap_or_else(|| config.policy.runtime.join("80-kubernetes.toml"));
    let mut told: Vec<Problem> = Vec::new();
    let mut in_force = None;
    loop {
        let round = look(&config, arguments, &path).await;
        match round {
            Ok((text, problems)) => {
                for problem in problems.iter().filter(|problem| !told.contains(problem)) {
                    eprintln!(
                        "pod {}: no tenant: {}",
                        clean(&problem.pod),
                        clean(&problem.what)
                    );
                }
                told = problems;
                if in_force.as_ref() != Some(&text) {
                    match put_in_force(bus, &path, &text).await {
                        Ok(()) => in_force = Some(text),
                        Err(error) if arguments.once => return Err(error),
                        // The next round tries again.
                        Err(error) => eprintln!("gpuquotactl: {error}"),
                    }
                }
            }
            Err(error) if arguments.once => return Err(error),
            // What is in force stays.
            Err(error) => eprintln!("gpuquotactl: {error}"),
        }
        if arguments.once {
            return Ok(());
        }
        tokio::time::sleep(arguments.interval).await;
    }
}

/// The policy file that the pods ask for now, and what is wrong with some of them.
async fn look(
    config: &Config,
    arguments: &KubernetesArgs,
    path: &Path,
) -> Result<(String, Vec<Problem>), Error> {
    let pods = ask(arguments).await?;
    let driver = driver(config, arguments)?;
    let (tenants, mut problems) = kubernetes::tenants(&pods, driver, &arguments.cgroup_root);
    let others: Vec<Source> = policy_files::read(&config.policy)
        .map_err(|error| Error::File {
            path: error.path,
            source: error.source,
        })?
        .into_iter()
        .filter(|source| source.path != path)
        .collect();
    load(&others).map_err(Error::Policy)?;
    let with = |tenants: &[PodTenant]| {
        load(&policy_files::with_file(
            others.clone(),
            Layer::Runtime,
            path,
            Some(&kubernetes::policy_file(tenants)),
        ))
    };
    let mut accepted = tenants;
    if with(&accepted).is_err() {
        // Some pod asks for what the rest of the policy does not allow: each is tried beside those before it.
        let mut good: Vec<PodTenant> = Vec::new();
        for tenant in accepted {
            good.push(tenant);
            if let Err(what) = with(&good)
                && let Some(bad) = good.pop()
            {
                problems.push(Problem { pod: bad.pod, what });
            }
        }
        accepted = good;
    }
    Ok((kubernetes::policy_file(&accepted), problems))
}

fn load(sources: &[Source]) -> Result<(), String> {
    Policy::load(sources, None)
        .map(drop)
        .map_err(|problems| problems.to_string())
}

/// Asks the API server for the pods of the node, through kubectl, which knows how to reach it.
async fn ask(arguments: &KubernetesArgs) -> Result<PodList, Error> {
    let mut command = tokio::process::Command::new(&arguments.kubectl);
    command
        .args(["get", "pods", "--all-namespaces", "--output", "json"])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    if let Some(node) = &arguments.node {
        command.args(["--field-selector", &format!("spec.nodeName={node}")]);
    }
    let failed = |what: String| Error::Kubernetes(what);
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .map_err(|_| failed(format!("kubectl does not answer within {PATIENCE:?}")))?
        .map_err(|error| failed(format!("{}: {error}", arguments.kubectl.display())))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("kubectl: {}", clean(said.trim()))));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| failed(format!("kubectl printed no list of pods: {error}")))
}

/// The driver that is named, or the one whose folder there is.
fn driver(config: &Config, arguments: &KubernetesArgs) -> Result<CgroupDriver, Error> {
    match arguments.cgroup_driver {
        Driver::Systemd => return Ok(CgroupDriver::Systemd),
        Driver::Cgroupfs => return Ok(CgroupDriver::Cgroupfs),
        Driver::Auto => {}
    }
    let hierarchy = gpuquota_enforcer::cgroup::Hierarchy::open(config.cgroup_root.as_deref())
        .map_err(|error| Error::Kubernetes(error.to_string()))?;
    for driver in [CgroupDriver::Systemd, CgroupDriver::Cgroupfs] {
        let pod = kubernetes::pod_cgroup(driver, &arguments.cgroup_root, "Guaranteed", "x");
        let there = pod
            .as_deref()
            .and_then(|pod| pod.rsplit_once('/'))
            .and_then(|(above, _)| hierarchy.folder(above).ok())
            .is_some_and(|folder| folder.is_dir());
        if there {
            return Ok(driver);
        }
    }
    Err(Error::Kubernetes(format!(
        "no cgroup of the kubelet below {}; name its driver with --cgroup-driver and its root with --cgroup-root",
        arguments.cgroup_root
    )))
}

async fn put_in_force(bus: &Bus, path: &Path, text: &str) -> Result<(), Error> {
    policy_files::write(path, text).map_err(|error| Error::File {
        path: error.path,
        source: error.source,
    })?;
    let loaded = Client::connect(bus).await?.reload().await?;
    eprintln!("policy {} is in force", loaded.generation);
    Ok(())
}
