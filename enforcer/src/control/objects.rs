//! Objects for single tenants and GPUs: `org.gpuquota.Enforcer1.Tenant` and `.GPU`, below an `ObjectManager`.
//!
//! Offered on a bus only: on the private socket each client has a tree of its own, and a thousand tenants for
//! each of 64 clients would be a lot of memory for what `ListTenants` tells as well. What is read is the state at
//! that moment; [`Objects`] keeps the tree in step with the policy and sends `PropertiesChanged`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::broadcast,
    time::{MissedTickBehavior, interval},
};
use zbus::{
    Connection,
    connection::Builder,
    fdo, interface,
    object_server::InterfaceRef,
    zvariant::{LE, ObjectPath, OwnedObjectPath, OwnedValue, serialized, to_bytes},
};

use super::{
    Gpu, Notice, Tenant,
    manager::Shared,
    wire::{self, TenantGpuDict, UNLIMITED},
};

/// `Denials` and `Breaches` are told at most this often, however many there are.
const COUNTS: Duration = Duration::from_secs(1);

/// The object of a tenant.
///
/// Elements of a path are letters, digits and underscores: every other byte of the name, and the underscore
/// itself, is written `_xx` in hexadecimal.
pub(super) fn tenant_path(name: &str) -> ObjectPath<'static> {
    let mut path = format!("{}/tenant/", wire::PATH);
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() {
            path.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(path, "_{byte:02x}");
        }
    }
    known(&path)
}

fn gpu_path(index: u32) -> ObjectPath<'static> {
    known(&format!("{}/gpu/{index}", wire::PATH))
}

/// A path that consists of nothing but allowed elements. An empty name, which no policy has, gives the parent.
fn known(path: &str) -> ObjectPath<'static> {
    ObjectPath::try_from(path.trim_end_matches('/').to_owned())
        .unwrap_or_else(|_| ObjectPath::from_static_str_unchecked(wire::PATH))
}

/// A tenant.
pub(super) struct TenantObject {
    shared: Arc<Shared>,
    name: String,
}

impl TenantObject {
    async fn look(&self) -> fdo::Result<Tenant> {
        let seen = self.shared.seen().await?;
        seen.get(&self.name)
            .cloned()
            .ok_or_else(|| fdo::Error::UnknownObject(format!("no tenant named \"{}\"", self.name)))
    }

    async fn by_gpu(&self, value: fn(&super::TenantGpu) -> u64) -> fdo::Result<HashMap<u32, u64>> {
        let tenant = self.look().await?;
        Ok(tenant
            .gpus
            .iter()
            .map(|gpu| (gpu.gpu, value(gpu)))
            .collect())
    }
}

#[interface(name = "org.gpuquota.Enforcer1.Tenant", introspection_docs = false)]
impl TenantObject {
    /// Its name in the policy.
    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.name.clone()
    }

    /// Path or glob of the policy.
    #[zbus(property)]
    async fn cgroup(&self) -> fdo::Result<String> {
        Ok(self.look().await?.cgroup)
    }

    /// Class; empty for none.
    #[zbus(property)]
    async fn class(&self) -> fdo::Result<String> {
        Ok(self.look().await?.class.unwrap_or_default())
    }

    /// Object of the tenant around it; `/` for none.
    #[zbus(property)]
    async fn parent(&self) -> fdo::Result<OwnedObjectPath> {
        let parent = self.look().await?.parent;
        Ok(parent.map_or_else(OwnedObjectPath::default, |name| tenant_path(&name).into()))
    }

    /// cgroups that exist.
    #[zbus(property)]
    async fn cgroups(&self) -> fdo::Result<Vec<String>> {
        Ok(self.look().await?.cgroups)
    }

    /// Hard limits by GPU.
    #[zbus(property)]
    async fn memory_max(&self) -> fdo::Result<HashMap<u32, u64>> {
        self.by_gpu(|gpu| gpu.memory_max.unwrap_or(UNLIMITED)).await
    }

    /// Soft limits by GPU.
    #[zbus(property)]
    async fn memory_high(&self) -> fdo::Result<HashMap<u32, u64>> {
        self.by_gpu(|gpu| gpu.memory_high.unwrap_or(UNLIMITED))
            .await
    }

    /// Refused allocations by GPU.
    #[zbus(property)]
    async fn denials(&self) -> fdo::Result<HashMap<u32, u64>> {
        self.by_gpu(|gpu| gpu.denials).await
    }

    /// Allocations that went above the limit, by GPU.
    #[zbus(property)]
    async fn breaches(&self) -> fdo::Result<HashMap<u32, u64>> {
        self.by_gpu(|gpu| gpu.breaches).await
    }

    /// Limits, usage and processes, as in `GetTenant`.
    #[zbus(property(emits_changed_signal = "false"), name = "GPUs")]
    async fn gpus(&self) -> fdo::Result<Vec<HashMap<String, OwnedValue>>> {
        let gpus = self.look().await?.gpus.into_iter();
        gpus.map(|gpu| values(&gpu.into())).collect()
    }
}

/// A dictionary as a property has to be: of values that are known at run time only.
fn values(gpu: &TenantGpuDict) -> fdo::Result<HashMap<String, OwnedValue>> {
    let encoded = to_bytes(serialized::Context::new_dbus(LE, 0), gpu);
    encoded
        .and_then(|bytes| bytes.deserialize().map(|(values, _)| values))
        .map_err(|error| fdo::Error::Failed(error.to_string()))
}

/// A GPU. Cards do not change while the daemon runs.
pub(super) struct GpuObject {
    shared: Arc<Shared>,
    gpu: Gpu,
}

#[interface(name = "org.gpuquota.Enforcer1.GPU", introspection_docs = false)]
impl GpuObject {
    /// NVML's index.
    #[zbus(property(emits_changed_signal = "const"))]
    fn index(&self) -> u32 {
        self.gpu.index
    }

    /// `GPU-…`
    #[zbus(property(emits_changed_signal = "const"), name = "UUID")]
    fn uuid(&self) -> String {
        self.gpu.uuid.clone()
    }

    /// Product name.
    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.gpu.name.clone()
    }

    /// Bytes on the card.
    #[zbus(property(emits_changed_signal = "const"))]
    fn memory_total(&self) -> u64 {
        self.gpu.memory_total
    }

    /// Bytes in use by NVML; the largest number while NVML does not answer.
    #[zbus(property(emits_changed_signal = "false"))]
    async fn memory_used(&self) -> fdo::Result<u64> {
        let index = self.gpu.index;
        let gpus = self.shared.call(super::Control::gpus).await?;
        let used = gpus
            .iter()
            .find(|gpu| gpu.index == index)
            .and_then(|gpu| gpu.memory_used);
        Ok(used.unwrap_or(UNLIMITED))
    }
}

/// The tree on one connection.
pub(super) struct Objects {
    shared: Arc<Shared>,
    notices: broadcast::Receiver<Notice>,
    /// What the tree stands for, as it was told last.
    tenants: BTreeMap<String, Tenant>,
}

impl Objects {
    /// Adds the tree to a connection that is being built, so that nobody sees a part of it.
    pub(super) async fn plant<'a>(
        shared: &Arc<Shared>,
        mut builder: Builder<'a>,
    ) -> zbus::Result<(Builder<'a>, Self)> {
        // Before the first look: what changes after it is not missed.
        let notices = shared.control.subscribe();
        let failed =
            |error: super::manager::MethodError| zbus::Error::from(fdo::Error::from(error));
        let gpus = shared.call(super::Control::gpus).await.map_err(failed)?;
        let tenants = look(shared).await.map_err(failed)?;
        for gpu in gpus {
            let path = gpu_path(gpu.index);
            let shared = Arc::clone(shared);
            builder = builder.serve_at(path, GpuObject { shared, gpu })?;
        }
        for name in tenants.keys() {
            let object = TenantObject {
                shared: Arc::clone(shared),
                name: name.clone(),
            };
            builder = builder.serve_at(tenant_path(name), object)?;
        }
        builder = builder.serve_at(wire::PATH, fdo::ObjectManager)?;
        let objects = Self {
            shared: Arc::clone(shared),
            notices,
            tenants,
        };
        Ok((builder, objects))
    }

    /// Keeps the tree in step until the control is gone.
    pub(super) async fn follow(&mut self, connection: &Connection) {
        let mut clock = interval(COUNTS);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Tenants whose counters have moved.
        let mut counted: BTreeSet<String> = BTreeSet::new();
        loop {
            let outcome = tokio::select! {
                _ = clock.tick(), if !counted.is_empty() => {
                    self.tell_counts(connection, &std::mem::take(&mut counted)).await
                }
                notice = self.notices.recv() => match notice {
                    Ok(Notice::Denied { limited_by, .. }) => {
                        counted.insert(limited_by);
                        Ok(())
                    }
                    Ok(Notice::Breached { tenant, .. }) => {
                        counted.insert(tenant);
                        Ok(())
                    }
                    Ok(
                        Notice::PolicyLoaded(_)
                        | Notice::CgroupAttached { .. }
                        | Notice::CgroupDetached { .. },
                    )
                    | Err(broadcast::error::RecvError::Lagged(_)) => self.sync(connection).await,
                    Err(broadcast::error::RecvError::Closed) => return connection.closed().await,
                    Ok(_) => Ok(()),
                },
            };
            if let Err(error) = outcome {
                tracing::debug!(%error, "an object could not be brought up to date");
                if connection.is_closed() {
                    return;
                }
            }
        }
    }

    /// Adds and removes objects, and tells what has changed about the others.
    async fn sync(&mut self, connection: &Connection) -> zbus::Result<()> {
        self.shared.forget_seen();
        let now = look(&self.shared).await.map_err(fdo::Error::from)?;
        let before = std::mem::replace(&mut self.tenants, now);
        let server = connection.object_server();
        for name in before
            .keys()
            .filter(|name| !self.tenants.contains_key(*name))
        {
            server.remove::<TenantObject, _>(tenant_path(name)).await?;
        }
        for (name, tenant) in &self.tenants {
            match before.get(name) {
                None => {
                    let object = TenantObject {
                        shared: Arc::clone(&self.shared),
                        name: name.clone(),
                    };
                    server.at(tenant_path(name), object).await?;
                }
                Some(old) => tell_changes(&object_of(connection, name).await?, old, tenant).await?,
            }
        }
        Ok(())
    }

    async fn tell_counts(
        &self,
        connection: &Connection,
        names: &BTreeSet<String>,
    ) -> zbus::Result<()> {
        self.shared.forget_seen();
        for name in names.iter().filter(|name| self.tenants.contains_key(*name)) {
            let object = object_of(connection, name).await?;
            let tenant = object.get().await;
            tenant.denials_changed(object.signal_emitter()).await?;
            tenant.breaches_changed(object.signal_emitter()).await?;
        }
        Ok(())
    }
}

async fn look(shared: &Shared) -> Result<BTreeMap<String, Tenant>, super::manager::MethodError> {
    Ok(BTreeMap::clone(&*shared.seen().await?))
}

async fn object_of(
    connection: &Connection,
    name: &str,
) -> zbus::Result<InterfaceRef<TenantObject>> {
    connection
        .object_server()
        .interface(tenant_path(name))
        .await
}

async fn tell_changes(
    object: &InterfaceRef<TenantObject>,
    old: &Tenant,
    new: &Tenant,
) -> zbus::Result<()> {
    let limits = |of: fn(&super::TenantGpu) -> Option<u64>| {
        let values = |tenant: &Tenant| -> BTreeMap<u32, Option<u64>> {
            tenant.gpus.iter().map(|gpu| (gpu.gpu, of(gpu))).collect()
        };
        values(old) != values(new)
    };
    let emitter = object.signal_emitter();
    let tenant = object.get().await;
    if old.cgroup != new.cgroup {
        tenant.cgroup_changed(emitter).await?;
    }
    if old.class != new.class {
        tenant.class_changed(emitter).await?;
    }
    if old.parent != new.parent {
        tenant.parent_changed(emitter).await?;
    }
    if old.cgroups != new.cgroups {
        tenant.cgroups_changed(emitter).await?;
    }
    if limits(|gpu| gpu.memory_max) {
        tenant.memory_max_changed(emitter).await?;
    }
    if limits(|gpu| gpu.memory_high) {
        tenant.memory_high_changed(emitter).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_path_of_its_own() {
        for (name, path) in [
            ("vision", "/org/gpuquota/Enforcer1/tenant/vision"),
            ("a-b", "/org/gpuquota/Enforcer1/tenant/a_2db"),
            ("a_b", "/org/gpuquota/Enforcer1/tenant/a_5fb"),
            ("a.b", "/org/gpuquota/Enforcer1/tenant/a_2eb"),
            ("a_2db", "/org/gpuquota/Enforcer1/tenant/a_5f2db"),
            ("é", "/org/gpuquota/Enforcer1/tenant/_c3_a9"),
        ] {
            assert_eq!(tenant_path(name).as_str(), path);
        }
        assert_eq!(gpu_path(7).as_str(), "/org/gpuquota/Enforcer1/gpu/7");
    }
}
