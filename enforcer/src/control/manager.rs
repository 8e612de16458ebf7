//! The served object: `org.gpuquota.Enforcer1.Manager` of a [`Control`].
//!
//! Calls into the control run on threads of their own, so that a slow one holds up neither the bus nor the others.

#![expect(
    clippy::too_many_arguments,
    reason = "a signal is flat: each argument is a documented one of the bus interface"
)]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{Semaphore, broadcast};
use zbus::{
    Connection, DBusError, Message, fdo, interface, message::Header, names::ErrorName,
    object_server::SignalEmitter,
};

use super::{
    Control, ControlError, Notice, QuotaChange, Tenant,
    access::{Access, Denied},
    wire::{self, GpuDict, TenantDict, Triple},
    wire_time,
};
use crate::looks::LooksError;

/// Longest string that a caller may pass.
const MAX_STRING: usize = 64 << 10;
/// Most properties in one change.
const MAX_PROPERTIES: usize = 64;
/// Calls that run in the control at the same time.
const RUNNING_CALLS: usize = 8;
/// Calls that run or wait for their turn; more are refused.
const PENDING_CALLS: usize = 256;
/// Callers whom polkit may be asking for a password at the same time; more are refused.
const PENDING_AUTHORIZATIONS: usize = 16;
/// Properties of objects that are read within this time come from the same look at the tenants.
const SEEN: Duration = Duration::from_millis(100);
/// Sends every notice as a signal; returns when the connection or the control is gone.
pub(super) async fn emit_notices(
    connection: &Connection,
    notices: &mut broadcast::Receiver<Notice>,
) {
    loop {
        let notice = match notices.recv().await {
            Ok(notice) => notice,
            Err(broadcast::error::RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "signals were lost: the bus is slower than the events");
                continue;
            }
            Err(broadcast::error::RecvError::Closed) => return connection.closed().await,
        };
        if let Err(error) = emit(connection, notice).await {
            tracing::debug!(%error, "a signal could not be sent");
            if connection.is_closed() {
                return;
            }
        }
    }
}

#[expect(
    clippy::too_many_lines,
    reason = "one arm for each kind of notice, with its fields"
)]
async fn emit(connection: &Connection, notice: Notice) -> zbus::Result<()> {
    let interface = connection
        .object_server()
        .interface::<_, Manager>(wire::PATH)
        .await?;
    let emitter = interface.signal_emitter();
    match notice {
        Notice::Denied {
            tenant,
            limited_by,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => {
            Manager::denied(
                emitter,
                &tenant,
                &limited_by,
                &key,
                gpu,
                pid,
                requested,
                used,
                limit,
            )
            .await
        }
        Notice::Breached {
            tenant,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => Manager::breached(emitter, &tenant, &key, gpu, pid, requested, used, limit).await,
        Notice::Reclaimed {
            tenant,
            gpu,
            moved,
            wanted_by,
        } => Manager::reclaimed(emitter, &tenant, gpu, moved, &wanted_by).await,
        Notice::HighReached {
            tenant,
            gpu,
            used,
            high,
        } => Manager::high_reached(emitter, &tenant, gpu, used, high).await,
        Notice::Throttled {
            tenant,
            pid,
            symbol,
            delayed,
            delay_usec,
        } => Manager::throttled(emitter, &tenant, pid, &symbol, delayed, delay_usec).await,
        Notice::LaunchDenied {
            tenant,
            limited_by,
            pid,
            symbol,
            patience_usec,
        } => {
            Manager::launch_denied(emitter, &tenant, &limited_by, pid, &symbol, patience_usec).await
        }
        Notice::Storm {
            tenant,
            pid,
            symbol,
            wanted,
            budget,
        } => Manager::storm(emitter, &tenant, pid, &symbol, wanted, budget).await,
        Notice::Anomaly {
            tenant,
            pid,
            kernel,
            duration_usec,
            usual_usec,
        } => Manager::anomaly(emitter, &tenant, pid, &kernel, duration_usec, usual_usec).await,
        Notice::Xid {
            tenant,
            gpu,
            xid,
            pid,
            certainty,
            source,
            action,
            message,
        } => {
            Manager::xid(
                emitter, &tenant, gpu, xid, pid, &certainty, &source, &action, &message,
            )
            .await
        }
        Notice::PolicyLoaded(loaded) => {
            let manager = interface.get().await;
            manager.policy_generation_changed(emitter).await?;
            drop(manager);
            Manager::policy_loaded(emitter, loaded.generation, loaded.tenants, &loaded.warnings)
                .await
        }
        Notice::CgroupAttached { tenant, cgroup } => {
            Manager::cgroup_attached(emitter, &tenant, &cgroup).await
        }
        Notice::CgroupDetached { tenant, cgroup } => {
            Manager::cgroup_detached(emitter, &tenant, &cgroup).await
        }
    }
}

/// What all connections share.
pub(super) struct Shared {
    pub(super) control: Arc<dyn Control>,
    running: Arc<Semaphore>,
    pending: Arc<Semaphore>,
    authorizations: Semaphore,
    /// Tenants as they were seen last, for callers that read property by property.
    seen: Mutex<Option<Seen>>,
}

/// When tenants were seen, and they by name.
type Seen = (Instant, Arc<BTreeMap<String, Tenant>>);

impl Shared {
    pub(super) fn new(control: Arc<dyn Control>) -> Self {
        Self {
            control,
            running: Arc::new(Semaphore::new(RUNNING_CALLS)),
            pending: Arc::new(Semaphore::new(PENDING_CALLS)),
            authorizations: Semaphore::new(PENDING_AUTHORIZATIONS),
            seen: Mutex::new(None),
        }
    }

    /// Tenants by name, not older than [`SEEN`] and not from before the last change through this interface.
    pub(super) async fn seen(&self) -> Result<Arc<BTreeMap<String, Tenant>>, MethodError> {
        if let Some((at, tenants)) = &*self.lock_seen()
            && at.elapsed() < SEEN
        {
            return Ok(Arc::clone(tenants));
        }
        let at = Instant::now();
        let tenants = self.call(Control::tenants).await?;
        let tenants = tenants
            .into_iter()
            .map(|tenant| (tenant.name.clone(), tenant));
        let tenants = Arc::new(tenants.collect::<BTreeMap<_, _>>());
        *self.lock_seen() = Some((at, Arc::clone(&tenants)));
        Ok(tenants)
    }

    /// The next look is a new one.
    pub(super) fn forget_seen(&self) {
        *self.lock_seen() = None;
    }

    fn lock_seen(&self) -> MutexGuard<'_, Option<Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the caller may change something; `what` says what to whom polkit asks.
    pub(super) async fn authorize(
        &self,
        access: Access,
        connection: &Connection,
        header: &Header<'_>,
        what: &str,
    ) -> Result<(), MethodError> {
        let _slot = self
            .authorizations
            .try_acquire()
            .map_err(|_| MethodError::busy())?;
        let checked = access.check(connection, header, what).await;
        if let Err(denied) = &checked {
            let sender = header.sender().map(tracing::field::display);
            tracing::info!(sender, %denied, "refused to {what}");
        }
        Ok(checked?)
    }

    /// Runs a call on a thread where it may block.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Control) -> T + Send + 'static,
    ) -> Result<T, MethodError> {
        let busy = |_| MethodError::busy();
        let pending = self.pending.clone().try_acquire_owned().map_err(busy)?;
        let running = self.running.clone().acquire_owned().await;
        let control = self.control.clone();
        // The permits go along: the call runs to its end even if the caller is gone by then.
        tokio::task::spawn_blocking(move || {
            let _permits = (pending, running);
            call(&*control)
        })
        .await
        .map_err(|error| {
            tracing::error!(%error, "a call failed inside the daemon");
            MethodError::failed("the call failed inside the daemon; its log says why")
        })
    }
}

/// The error reply of a method.
#[derive(Debug)]
pub(super) struct MethodError {
    name: String,
    text: String,
}

impl MethodError {
    fn standard(name: &str, text: impl Into<String>) -> Self {
        Self {
            name: format!("org.freedesktop.DBus.Error.{name}"),
            text: text.into(),
        }
    }

    fn busy() -> Self {
        Self::standard(
            "LimitsExceeded",
            "too many calls at the same time; try again in a moment",
        )
    }

    pub(super) fn failed(text: impl Into<String>) -> Self {
        Self::standard("Failed", text)
    }
}

impl From<ControlError> for MethodError {
    fn from(error: ControlError) -> Self {
        let name = match &error {
            ControlError::NoSuchTenant(_) => "NoSuchTenant",
            ControlError::NoSuchGpu(_) => "NoSuchGPU",
            ControlError::NoSuchProcess(_) => "NoSuchProcess",
            ControlError::Ungoverned(_) => "Ungoverned",
            ControlError::BadPolicy(_) => "BadPolicy",
            ControlError::BadProperty(_) => "BadProperty",
            ControlError::Time(_) => "NotControlled",
            ControlError::Looks(error) => match error {
                LooksError::Duration(_) => "BadProperty",
                LooksError::NoLook { .. } => "NoSuchLook",
                _ => "NotFollowed",
            },
            ControlError::Io { .. } => "IO",
            ControlError::Kernel(_) => "Kernel",
        };
        Self {
            name: format!("{}{name}", wire::ERROR_PREFIX),
            text: error.to_string(),
        }
    }
}

impl From<Denied> for MethodError {
    fn from(denied: Denied) -> Self {
        Self::standard("AccessDenied", denied.to_string())
    }
}

impl From<MethodError> for fdo::Error {
    fn from(error: MethodError) -> Self {
        Self::Failed(error.text)
    }
}

impl DBusError for MethodError {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        Message::error(call, self.name())?.build(&(&self.text,))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_str_unchecked(&self.name)
    }

    fn description(&self) -> Option<&str> {
        Some(&self.text)
    }
}

/// The served object; one per connection.
pub(super) struct Manager {
    pub(super) shared: Arc<Shared>,
    pub(super) access: Access,
}

impl Manager {
    async fn authorize(
        &self,
        connection: &Connection,
        header: &Header<'_>,
        what: &str,
    ) -> Result<(), MethodError> {
        self.shared
            .authorize(self.access, connection, header, what)
            .await
    }
}

pub(super) fn check_strings<'a>(
    strings: impl IntoIterator<Item = &'a str>,
) -> Result<(), MethodError> {
    match strings.into_iter().find(|s| s.len() > MAX_STRING) {
        None => Ok(()),
        Some(long) => Err(MethodError::standard(
            "InvalidArgs",
            format!(
                "a string of {} bytes is too long; at most {MAX_STRING} are allowed",
                long.len()
            ),
        )),
    }
}

fn named(gpu: &str) -> Option<&str> {
    (!gpu.is_empty()).then_some(gpu)
}

fn check_count(count: usize) -> Result<(), MethodError> {
    if count <= MAX_PROPERTIES {
        return Ok(());
    }
    Err(MethodError::standard(
        "InvalidArgs",
        format!("{count} properties in one call; at most {MAX_PROPERTIES} are allowed"),
    ))
}

#[interface(name = "org.gpuquota.Enforcer1.Manager", introspection_docs = false)]
impl Manager {
    /// Reads the policy files again.
    #[zbus(out_args("generation", "tenants", "warnings"))]
    async fn reload(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(u64, u32, Vec<String>), MethodError> {
        self.authorize(connection, &header, "reload the GPU quota policy")
            .await?;
        let loaded = self.shared.call(Control::reload).await??;
        self.shared.forget_seen();
        Ok((loaded.generation, loaded.tenants, loaded.warnings))
    }

    /// All tenants.
    #[zbus(out_args("tenants"))]
    async fn list_tenants(&self) -> Result<Vec<TenantDict>, MethodError> {
        let tenants = self.shared.call(Control::tenants).await?;
        Ok(tenants.into_iter().map(Into::into).collect())
    }

    /// One tenant by name.
    #[zbus(out_args("tenant"))]
    async fn get_tenant(&self, name: String) -> Result<TenantDict, MethodError> {
        check_strings([name.as_str()])?;
        let tenant = self
            .shared
            .call(move |control| control.tenant(&name))
            .await??;
        Ok(tenant.into())
    }

    /// The innermost tenant that governs a process.
    #[zbus(name = "GetTenantByPID", out_args("tenant"))]
    async fn get_tenant_by_pid(&self, pid: u32) -> Result<TenantDict, MethodError> {
        let tenant = self
            .shared
            .call(move |control| control.tenant_by_pid(pid))
            .await??;
        Ok(tenant.into())
    }

    /// Changes properties of a tenant; `gpu` is empty for every GPU. Gives the file that keeps the change.
    #[zbus(out_args("file"))]
    async fn set_quota(
        &self,
        tenant: String,
        gpu: String,
        properties: Vec<(String, String)>,
        runtime: bool,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        check_count(properties.len())?;
        check_strings(
            properties
                .iter()
                .flat_map(|(name, value)| [name, value])
                .chain([&tenant, &gpu])
                .map(String::as_str),
        )?;
        self.authorize(connection, &header, "change GPU quotas")
            .await?;
        let change = QuotaChange {
            tenant,
            gpu: (!gpu.is_empty()).then_some(gpu),
            properties,
            runtime,
        };
        let file = self
            .shared
            .call(move |control| control.set_quota(&change))
            .await??;
        self.shared.forget_seen();
        Ok(file.to_string_lossy().into_owned())
    }

    /// Drops what `SetQuota` changed.
    async fn reset_quota(
        &self,
        tenant: String,
        properties: Vec<String>,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), MethodError> {
        check_count(properties.len())?;
        check_strings(properties.iter().chain([&tenant]).map(String::as_str))?;
        self.authorize(connection, &header, "reset GPU quotas")
            .await?;
        self.shared
            .call(move |control| control.reset_quota(&tenant, &properties))
            .await??;
        self.shared.forget_seen();
        Ok(())
    }

    /// Freezes a tenant; `gpu` is empty for every GPU.
    #[zbus(out_args("frozen", "uncontrolled"))]
    async fn freeze(
        &self,
        tenant: String,
        gpu: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(Vec<u32>, Vec<(u32, String)>), MethodError> {
        check_strings([tenant.as_str(), gpu.as_str()])?;
        self.authorize(connection, &header, "freeze GPU tenants")
            .await?;
        let held = self
            .shared
            .call(move |control| control.freeze(&tenant, named(&gpu)))
            .await??;
        Ok(wire_time::held_to_wire(held))
    }

    /// Thaws a tenant; `gpu` is empty for every GPU.
    #[zbus(out_args("frozen", "uncontrolled"))]
    async fn thaw(
        &self,
        tenant: String,
        gpu: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(Vec<u32>, Vec<(u32, String)>), MethodError> {
        check_strings([tenant.as_str(), gpu.as_str()])?;
        self.authorize(connection, &header, "thaw GPU tenants")
            .await?;
        let held = self
            .shared
            .call(move |control| control.thaw(&tenant, named(&gpu)))
            .await??;
        Ok(wire_time::held_to_wire(held))
    }

    /// The whole state as JSON, for bug reports.
    #[zbus(out_args("json"))]
    async fn dump_state(&self) -> Result<String, MethodError> {
        let state = self.shared.call(Control::dump_state).await?;
        Ok(state.to_string())
    }

    /// The GPUs of the host.
    #[zbus(name = "ListGPUs", out_args("gpus"))]
    async fn list_gpus(&self) -> Result<Vec<GpuDict>, MethodError> {
        let gpus = self.shared.call(Control::gpus).await?;
        Ok(gpus.into_iter().map(Into::into).collect())
    }

    /// What the host offers and what is in use.
    #[zbus(out_args("findings"))]
    async fn doctor(&self) -> Result<Vec<Triple>, MethodError> {
        let findings = self.shared.call(Control::doctor).await?;
        Ok(findings.into_iter().map(wire::finding_to_wire).collect())
    }

    /// Version of the daemon.
    #[zbus(property(emits_changed_signal = "const"))]
    async fn version(&self) -> fdo::Result<String> {
        Ok(self.shared.call(Control::version).await?)
    }

    /// The backends in order of preference.
    #[zbus(property(emits_changed_signal = "false"))]
    async fn backends(&self) -> fdo::Result<Vec<Triple>> {
        let backends = self.shared.call(Control::backends).await?;
        Ok(backends.into_iter().map(wire::backend_to_wire).collect())
    }

    /// Counts the policies that were put into force.
    #[zbus(property)]
    async fn policy_generation(&self) -> fdo::Result<u64> {
        Ok(self.shared.call(Control::policy_generation).await?)
    }

    /// [`Notice::Denied`].
    #[zbus(signal)]
    async fn denied(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        limited_by: &str,
        key: &str,
        gpu: u32,
        pid: u32,
        requested: u64,
        used: u64,
        limit: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::Breached`].
    #[zbus(signal)]
    async fn breached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        key: &str,
        gpu: u32,
        pid: u32,
        requested: u64,
        used: u64,
        limit: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::HighReached`].
    #[zbus(signal)]
    async fn high_reached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        gpu: u32,
        used: u64,
        high: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::Reclaimed`].
    #[zbus(signal)]
    async fn reclaimed(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        gpu: u32,
        moved: u64,
        wanted_by: &str,
    ) -> zbus::Result<()>;

    /// [`Notice::Throttled`].
    #[zbus(signal)]
    async fn throttled(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        pid: u32,
        symbol: &str,
        delayed: u64,
        delay_usec: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::LaunchDenied`].
    #[zbus(signal)]
    async fn launch_denied(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        limited_by: &str,
        pid: u32,
        symbol: &str,
        patience_usec: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::Storm`].
    #[zbus(signal)]
    async fn storm(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        pid: u32,
        symbol: &str,
        wanted: u64,
        budget: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::Anomaly`].
    #[zbus(signal)]
    async fn anomaly(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        pid: u32,
        kernel: &str,
        duration_usec: u64,
        usual_usec: u64,
    ) -> zbus::Result<()>;

    /// [`Notice::Xid`].
    #[zbus(signal)]
    async fn xid(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        gpu: u32,
        xid: u32,
        pid: u32,
        certainty: &str,
        source: &str,
        action: &str,
        message: &str,
    ) -> zbus::Result<()>;

    /// [`Notice::PolicyLoaded`].
    #[zbus(signal)]
    async fn policy_loaded(
        emitter: &SignalEmitter<'_>,
        generation: u64,
        tenants: u32,
        warnings: &[String],
    ) -> zbus::Result<()>;

    /// [`Notice::CgroupAttached`].
    #[zbus(signal)]
    async fn cgroup_attached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        cgroup: &str,
    ) -> zbus::Result<()>;

    /// [`Notice::CgroupDetached`].
    #[zbus(signal)]
    async fn cgroup_detached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        cgroup: &str,
    ) -> zbus::Result<()>;
}
