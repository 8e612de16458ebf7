//! The D-Bus interface `org.gpuquota.Enforcer1.Manager` of a [`Control`].
//!
//! [`serve`] offers it on a bus or on a private socket until the [`Server`] is dropped. Calls into the
//! control run on threads of their own, so that a slow one holds up neither the bus nor the others.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, broadcast},
    task::JoinHandle,
};
use zbus::{
    Connection, DBusError, Message, connection::Builder, fdo, interface, message::Header,
    names::ErrorName, object_server::SignalEmitter,
};

use super::{
    Control, ControlError, Notice, QuotaChange,
    access::{Access, Denied},
    peer,
    wire::{self, GpuDict, TenantDict, Triple},
};
use crate::config::Bus;

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
/// First and longest pause between two tries to get back onto a bus that went away.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// The interface could not be offered.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The bus cannot be reached.
    #[error("the bus \"{bus}\" cannot be used: {source}")]
    Bus {
        /// Which one.
        bus: Bus,
        /// Why.
        source: zbus::Error,
    },
    /// Another process owns the name.
    #[error(
        "another process owns {} on the bus \"{bus}\"; is gpuquotad running already?",
        wire::NAME
    )]
    NameTaken {
        /// On which bus.
        bus: Bus,
    },
    /// The bus does not let this process own the name.
    #[error(
        "the bus \"{bus}\" does not allow this process to own {}: {text}; is {}.conf installed in /usr/share/dbus-1/system.d?",
        wire::NAME,
        wire::NAME
    )]
    NameRefused {
        /// Which bus.
        bus: Bus,
        /// What the bus said.
        text: String,
    },
    /// The private socket cannot be offered.
    #[error(transparent)]
    Peer(#[from] peer::PeerError),
}

/// The interface is offered as long as this lives.
#[derive(Debug)]
pub struct Server {
    task: JoinHandle<()>,
    socket: Option<peer::SocketFile>,
}

impl Server {
    /// Stops offering the interface and waits until connections are closed.
    pub async fn shutdown(mut self) {
        self.task.abort();
        // Cancelled by the line above; a panic of the task was logged when it happened.
        let _ = (&mut self.task).await;
        drop(self.socket.take());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Offers `control` on `bus`.
///
/// A bus that goes away later is tried again for ever: enforcement does not depend on it.
pub async fn serve(bus: &Bus, control: Arc<dyn Control>) -> Result<Server, ServeError> {
    let shared = Arc::new(Shared::new(control));
    match bus {
        Bus::Peer(path) => {
            let (listener, socket) = peer::bind(path)?;
            Ok(Server {
                task: tokio::spawn(peer::accept(listener, shared)),
                socket: Some(socket),
            })
        }
        bus => {
            let notices = shared.control.subscribe();
            let connection = connect(bus, &shared).await?;
            let task = tokio::spawn(stay_on_bus(bus.clone(), connection, notices, shared));
            Ok(Server { task, socket: None })
        }
    }
}

async fn connect(bus: &Bus, shared: &Arc<Shared>) -> Result<Connection, ServeError> {
    let manager = Manager {
        shared: shared.clone(),
        access: Access::Sender {
            // Names of a sender mean something to polkit on the system bus only.
            polkit: *bus == Bus::System,
        },
    };
    let builder = match bus {
        Bus::System => Builder::system(),
        Bus::Session => Builder::session(),
        Bus::Address(address) => Builder::address(address.as_str()),
        Bus::Peer(_) => Err(zbus::Error::Unsupported),
    };
    let connect = async {
        builder?
            .serve_at(wire::PATH, manager)?
            .name(wire::NAME)?
            .allow_name_replacements(false)
            .replace_existing_names(false)
            .build()
            .await
    };
    connect.await.map_err(|source| match source {
        zbus::Error::NameTaken => ServeError::NameTaken { bus: bus.clone() },
        zbus::Error::MethodError(name, text, _)
            if name == "org.freedesktop.DBus.Error.AccessDenied" =>
        {
            ServeError::NameRefused {
                bus: bus.clone(),
                text: text.unwrap_or_default(),
            }
        }
        zbus::Error::FDO(error) if matches!(*error, fdo::Error::AccessDenied(_)) => {
            ServeError::NameRefused {
                bus: bus.clone(),
                text: error.description().unwrap_or_default().to_owned(),
            }
        }
        source => ServeError::Bus {
            bus: bus.clone(),
            source,
        },
    })
}

async fn stay_on_bus(
    bus: Bus,
    mut connection: Connection,
    mut notices: broadcast::Receiver<Notice>,
    shared: Arc<Shared>,
) {
    loop {
        tokio::select! {
            () = connection.closed() => {}
            () = emit_notices(&connection, &mut notices) => {}
        }
        tracing::warn!(%bus, "lost the bus; enforcement goes on, trying to come back");
        let mut pause = RECONNECT.0;
        connection = loop {
            tokio::time::sleep(pause).await;
            match connect(&bus, &shared).await {
                Ok(connection) => break connection,
                Err(error) => tracing::debug!(%error, "still off the bus"),
            }
            pause = (pause * 2).min(RECONNECT.1);
        };
        tracing::info!(%bus, "back on the bus");
    }
}

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
            gpu,
            pid,
            requested,
            used,
            limit,
        } => Manager::breached(emitter, &tenant, gpu, pid, requested, used, limit).await,
        Notice::HighReached {
            tenant,
            gpu,
            used,
            high,
        } => Manager::high_reached(emitter, &tenant, gpu, used, high).await,
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
}

impl Shared {
    fn new(control: Arc<dyn Control>) -> Self {
        Self {
            control,
            running: Arc::new(Semaphore::new(RUNNING_CALLS)),
            pending: Arc::new(Semaphore::new(PENDING_CALLS)),
            authorizations: Semaphore::new(PENDING_AUTHORIZATIONS),
        }
    }

    /// Runs a call on a thread where it may block.
    async fn call<T: Send + 'static>(
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

    fn failed(text: impl Into<String>) -> Self {
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
    /// Checks that the caller may change `tenant` (or everything).
    async fn authorize(
        &self,
        connection: &Connection,
        header: &Header<'_>,
        what: &str,
    ) -> Result<(), MethodError> {
        let _slot = self
            .shared
            .authorizations
            .try_acquire()
            .map_err(|_| MethodError::busy())?;
        let checked = self.access.check(connection, header, what).await;
        if let Err(denied) = &checked {
            let sender = header.sender().map(tracing::field::display);
            tracing::info!(sender, %denied, "refused to {what}");
        }
        Ok(checked?)
    }
}

fn check_strings<'a>(strings: impl IntoIterator<Item = &'a str>) -> Result<(), MethodError> {
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
    #[zbus(out_args("generation", "tenants", "warnings"))]
    async fn reload(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(u64, u32, Vec<String>), MethodError> {
        self.authorize(connection, &header, "reload the GPU quota policy")
            .await?;
        let loaded = self.shared.call(|control| control.reload()).await??;
        Ok((loaded.generation, loaded.tenants, loaded.warnings))
    }

    #[zbus(out_args("tenants"))]
    async fn list_tenants(&self) -> Result<Vec<TenantDict>, MethodError> {
        let tenants = self.shared.call(|control| control.tenants()).await?;
        Ok(tenants.into_iter().map(Into::into).collect())
    }

    #[zbus(out_args("tenant"))]
    async fn get_tenant(&self, name: String) -> Result<TenantDict, MethodError> {
        check_strings([name.as_str()])?;
        let tenant = self
            .shared
            .call(move |control| control.tenant(&name))
            .await??;
        Ok(tenant.into())
    }

    #[zbus(name = "GetTenantByPID", out_args("tenant"))]
    async fn get_tenant_by_pid(&self, pid: u32) -> Result<TenantDict, MethodError> {
        let tenant = self
            .shared
            .call(move |control| control.tenant_by_pid(pid))
            .await??;
        Ok(tenant.into())
    }

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
        Ok(file.to_string_lossy().into_owned())
    }

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
        Ok(self
            .shared
            .call(move |control| control.reset_quota(&tenant, &properties))
            .await??)
    }

    #[zbus(out_args("json"))]
    async fn dump_state(&self) -> Result<String, MethodError> {
        let state = self.shared.call(|control| control.dump_state()).await?;
        Ok(state.to_string())
    }

    #[zbus(name = "ListGPUs", out_args("gpus"))]
    async fn list_gpus(&self) -> Result<Vec<GpuDict>, MethodError> {
        let gpus = self.shared.call(|control| control.gpus()).await?;
        Ok(gpus.into_iter().map(Into::into).collect())
    }

    #[zbus(out_args("findings"))]
    async fn doctor(&self) -> Result<Vec<Triple>, MethodError> {
        let findings = self.shared.call(|control| control.doctor()).await?;
        Ok(findings.into_iter().map(wire::finding_to_wire).collect())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    async fn version(&self) -> fdo::Result<String> {
        Ok(self.shared.call(|control| control.version()).await?)
    }

    #[zbus(property(emits_changed_signal = "false"))]
    async fn backends(&self) -> fdo::Result<Vec<Triple>> {
        let backends = self.shared.call(|control| control.backends()).await?;
        Ok(backends.into_iter().map(wire::backend_to_wire).collect())
    }

    #[zbus(property)]
    async fn policy_generation(&self) -> fdo::Result<u64> {
        Ok(self
            .shared
            .call(|control| control.policy_generation())
            .await?)
    }

    #[zbus(signal)]
    #[expect(
        clippy::too_many_arguments,
        reason = "a signal is flat: each argument is a documented one of the bus interface"
    )]
    async fn denied(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        limited_by: &str,
        gpu: u32,
        pid: u32,
        requested: u64,
        used: u64,
        limit: u64,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn breached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        gpu: u32,
        pid: u32,
        requested: u64,
        used: u64,
        limit: u64,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn high_reached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        gpu: u32,
        used: u64,
        high: u64,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn policy_loaded(
        emitter: &SignalEmitter<'_>,
        generation: u64,
        tenants: u32,
        warnings: &[String],
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn cgroup_attached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        cgroup: &str,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn cgroup_detached(
        emitter: &SignalEmitter<'_>,
        tenant: &str,
        cgroup: &str,
    ) -> zbus::Result<()>;
}
