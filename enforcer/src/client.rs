//! The other side of the D-Bus interface: what `gpuquotactl` and other programs use to talk to the daemon.

pub mod looks;

use std::{fmt, future::poll_fn, io::ErrorKind, pin::Pin, task::Poll, time::Duration};

use futures_core::Stream;
use tokio::net::UnixStream;
use zbus::{
    Connection, Message, connection::Builder, message::Type, proxy, proxy::OwnerChangedStream,
};

use crate::{
    config::Bus,
    control::{
        Backend, Finding, Gpu, Held, Notice, PolicyLoaded, QuotaChange, Tenant,
        insight::{self, HeatRow, HeatTuple, HistoryDict, MemoryHistory},
        wire::{self, GpuDict, TenantDict, Triple},
        wire_time::{self, HeldTuple},
    },
};

/// How long the daemon may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the daemon may take to answer when it asks nobody.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a change may take: polkit may be asking for a password.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(150);

#[proxy(
    interface = "org.gpuquota.Enforcer1.Manager",
    default_service = "org.gpuquota.Enforcer1",
    default_path = "/org/gpuquota/Enforcer1",
    gen_blocking = false
)]
trait Manager {
    #[zbus(allow_interactive_auth)]
    fn reload(&self) -> zbus::Result<(u64, u32, Vec<String>)>;
    fn list_tenants(&self) -> zbus::Result<Vec<TenantDict>>;
    fn get_tenant(&self, name: &str) -> zbus::Result<TenantDict>;
    #[zbus(name = "GetTenantByPID")]
    fn get_tenant_by_pid(&self, pid: u32) -> zbus::Result<TenantDict>;
    #[zbus(allow_interactive_auth)]
    fn set_quota(
        &self,
        tenant: &str,
        gpu: &str,
        properties: &[(String, String)],
        runtime: bool,
    ) -> zbus::Result<String>;
    #[zbus(allow_interactive_auth)]
    fn reset_quota(&self, tenant: &str, properties: &[String]) -> zbus::Result<()>;
    fn freeze(&self, tenant: &str, gpu: &str) -> zbus::Result<HeldTuple>;
    fn thaw(&self, tenant: &str, gpu: &str) -> zbus::Result<HeldTuple>;
    fn dump_state(&self) -> zbus::Result<String>;
    #[zbus(name = "ListGPUs")]
    fn list_gpus(&self) -> zbus::Result<Vec<GpuDict>>;
    fn doctor(&self) -> zbus::Result<Vec<Triple>>;
    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> zbus::Result<String>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn backends(&self) -> zbus::Result<Vec<Triple>>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn policy_generation(&self) -> zbus::Result<u64>;
}

#[proxy(
    interface = "org.gpuquota.Enforcer1.Insight",
    default_service = "org.gpuquota.Enforcer1",
    default_path = "/org/gpuquota/Enforcer1",
    gen_blocking = false
)]
trait Insight {
    fn memory_history(&self, tenant: &str, since_usec: u64) -> zbus::Result<Vec<HistoryDict>>;
    fn memory_heat_map(&self, since_usec: u64, columns: u32) -> zbus::Result<Vec<HeatTuple>>;
}

/// A call to the daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no daemon on the bus, or no bus.
    #[error("no gpuquotad at \"{bus}\": {reason}")]
    Unavailable {
        /// Where it was looked for.
        bus: Bus,
        /// What was found instead.
        reason: String,
    },
    /// The caller may not do this.
    #[error("{0}")]
    NotPermitted(String),
    /// The policy does not load; the rendered problems.
    #[error("{0}")]
    BadPolicy(String),
    /// The daemon refused the call for another reason.
    #[error("{text}")]
    Refused {
        /// Name of the D-Bus error.
        name: String,
        /// What the daemon said.
        text: String,
    },
    /// The daemon does not answer.
    #[error("gpuquotad at \"{bus}\" did not answer within {} s", .after.as_secs())]
    Timeout {
        /// Where it is.
        bus: Bus,
        /// How long was waited.
        after: Duration,
    },
    /// The daemon said something that this release does not understand.
    #[error("the answer of gpuquotad could not be understood: {0}")]
    Protocol(String),
}

/// A connection to the daemon.
#[derive(Clone)]
pub struct Client {
    bus: Bus,
    connection: Connection,
    manager: ManagerProxy<'static>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("bus", &self.bus)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the daemon at `bus`.
    ///
    /// On a bus this succeeds as soon as the bus is there; a missing daemon shows at the first call.
    pub async fn connect(bus: &Bus) -> Result<Self, ClientError> {
        let connect = async {
            let builder = match bus {
                Bus::System => Builder::system()?,
                Bus::Session => Builder::session()?,
                Bus::Address(address) => Builder::address(address.as_str())?,
                Bus::Peer(path) => Builder::unix_stream(UnixStream::connect(path).await?).p2p(),
            };
            let connection = builder.method_timeout(CHANGE_TIMEOUT).build().await?;
            let manager = ManagerProxy::builder(&connection)
                .cache_properties(proxy::CacheProperties::No)
                .build()
                .await?;
            Ok((connection, manager))
        };
        let (connection, manager) = tokio::time::timeout(CONNECT_TIMEOUT, connect)
            .await
            .map_err(|_| ClientError::Timeout {
                bus: bus.clone(),
                after: CONNECT_TIMEOUT,
            })?
            .map_err(|error: zbus::Error| ClientError::Unavailable {
                bus: bus.clone(),
                reason: connect_reason(bus, &error),
            })?;
        Ok(Self {
            bus: bus.clone(),
            connection,
            manager,
        })
    }

    async fn call<T>(
        &self,
        timeout: Duration,
        call: impl Future<Output = zbus::Result<T>>,
    ) -> Result<T, ClientError> {
        match tokio::time::timeout(timeout, call).await {
            Ok(result) => result.map_err(|error| self.explain(error)),
            Err(_) => Err(ClientError::Timeout {
                bus: self.bus.clone(),
                after: timeout,
            }),
        }
    }

    fn explain(&self, error: zbus::Error) -> ClientError {
        let unavailable = |reason: String| ClientError::Unavailable {
            bus: self.bus.clone(),
            reason,
        };
        let (name, text) = match error {
            zbus::Error::MethodError(name, text, _) => (name.to_string(), text.unwrap_or_default()),
            zbus::Error::FDO(error) => {
                use zbus::DBusError;
                let text = error.description().unwrap_or_default().to_owned();
                (error.name().to_string(), text)
            }
            zbus::Error::InputOutput(error) => {
                return unavailable(format!("the connection was lost ({error})"));
            }
            other => return ClientError::Protocol(other.to_string()),
        };
        let own = name.strip_prefix(wire::ERROR_PREFIX);
        let standard = name.strip_prefix("org.freedesktop.DBus.Error.");
        match (own, standard) {
            (Some("BadPolicy"), _) => ClientError::BadPolicy(text),
            (_, Some("AccessDenied")) => ClientError::NotPermitted(text),
            (_, Some("ServiceUnknown" | "NameHasNoOwner" | "Spawn.ServiceNotFound")) => {
                unavailable("nobody owns its name on the bus".into())
            }
            (_, Some("NoReply" | "Disconnected")) => unavailable("it went away".into()),
            (_, Some(standard)) if standard.starts_with("Spawn.") => {
                unavailable(format!("it could not be started: {text}"))
            }
            _ => ClientError::Refused { name, text },
        }
    }

    /// Version of the daemon.
    pub async fn version(&self) -> Result<String, ClientError> {
        self.call(READ_TIMEOUT, self.manager.version()).await
    }

    /// The enforcement backends, in order of preference.
    pub async fn backends(&self) -> Result<Vec<Backend>, ClientError> {
        let backends = self.call(READ_TIMEOUT, self.manager.backends()).await?;
        backends
            .into_iter()
            .map(|triple| wire::backend_from_wire(triple).map_err(protocol))
            .collect()
    }

    /// Counts the policies that were put into force.
    pub async fn policy_generation(&self) -> Result<u64, ClientError> {
        self.call(READ_TIMEOUT, self.manager.policy_generation())
            .await
    }

    /// The GPUs of the host.
    pub async fn gpus(&self) -> Result<Vec<Gpu>, ClientError> {
        let gpus = self.call(READ_TIMEOUT, self.manager.list_gpus()).await?;
        Ok(gpus.into_iter().map(Into::into).collect())
    }

    /// All tenants.
    pub async fn tenants(&self) -> Result<Vec<Tenant>, ClientError> {
        let tenants = self.call(READ_TIMEOUT, self.manager.list_tenants()).await?;
        Ok(tenants.into_iter().map(Into::into).collect())
    }

    /// One tenant.
    pub async fn tenant(&self, name: &str) -> Result<Tenant, ClientError> {
        let tenant = self
            .call(READ_TIMEOUT, self.manager.get_tenant(name))
            .await?;
        Ok(tenant.into())
    }

    /// The innermost tenant that governs a process.
    pub async fn tenant_by_pid(&self, pid: u32) -> Result<Tenant, ClientError> {
        let tenant = self
            .call(READ_TIMEOUT, self.manager.get_tenant_by_pid(pid))
            .await?;
        Ok(tenant.into())
    }

    /// Changes properties of one tenant; gives the file that keeps the change.
    pub async fn set_quota(&self, change: &QuotaChange) -> Result<String, ClientError> {
        let gpu = change.gpu.as_deref().unwrap_or_default();
        let call = self
            .manager
            .set_quota(&change.tenant, gpu, &change.properties, change.runtime);
        self.call(CHANGE_TIMEOUT, call).await
    }

    /// Drops what [`set_quota`](Self::set_quota) changed; all properties if none is named.
    pub async fn reset_quota(
        &self,
        tenant: &str,
        properties: &[String],
    ) -> Result<(), ClientError> {
        let call = self.manager.reset_quota(tenant, properties);
        self.call(CHANGE_TIMEOUT, call).await
    }

    /// Freezes a tenant on one GPU, or on all.
    pub async fn freeze(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ClientError> {
        let call = self.manager.freeze(tenant, gpu.unwrap_or_default());
        self.call(CHANGE_TIMEOUT, call)
            .await
            .map(wire_time::held_from_wire)
    }

    /// Thaws a tenant on one GPU, or on all.
    pub async fn thaw(&self, tenant: &str, gpu: Option<&str>) -> Result<Held, ClientError> {
        let call = self.manager.thaw(tenant, gpu.unwrap_or_default());
        self.call(CHANGE_TIMEOUT, call)
            .await
            .map(wire_time::held_from_wire)
    }

    /// Makes the daemon read the policy files again.
    pub async fn reload(&self) -> Result<PolicyLoaded, ClientError> {
        let (generation, tenants, warnings) =
            self.call(CHANGE_TIMEOUT, self.manager.reload()).await?;
        Ok(PolicyLoaded {
            generation,
            tenants,
            warnings,
        })
    }

    /// What the host offers and what is in use.
    pub async fn doctor(&self) -> Result<Vec<Finding>, ClientError> {
        let findings = self.call(READ_TIMEOUT, self.manager.doctor()).await?;
        findings
            .into_iter()
            .map(|triple| wire::finding_from_wire(triple).map_err(protocol))
            .collect()
    }

    /// Memory over time of one tenant, or of all.
    pub async fn memory_history(
        &self,
        tenant: Option<&str>,
        since: Duration,
    ) -> Result<Vec<MemoryHistory>, ClientError> {
        let insight = self.insight().await?;
        let call = insight.memory_history(tenant.unwrap_or_default(), micros(since));
        let histories = self.call(READ_TIMEOUT, call).await?;
        Ok(histories.into_iter().map(Into::into).collect())
    }

    /// Peaks of all tenants in equal parts of the time since then.
    pub async fn memory_heat_map(
        &self,
        since: Duration,
        columns: u32,
    ) -> Result<Vec<HeatRow>, ClientError> {
        let insight = self.insight().await?;
        let call = insight.memory_heat_map(micros(since), columns);
        let rows = self.call(READ_TIMEOUT, call).await?;
        Ok(rows.into_iter().map(insight::heat_from_wire).collect())
    }

    async fn insight(&self) -> Result<InsightProxy<'static>, ClientError> {
        let proxy = InsightProxy::builder(&self.connection)
            .cache_properties(zbus::proxy::CacheProperties::No)
            .build();
        self.call(READ_TIMEOUT, proxy).await
    }

    /// The whole state of the daemon, for debugging.
    pub async fn dump_state(&self) -> Result<serde_json::Value, ClientError> {
        let json = self.call(READ_TIMEOUT, self.manager.dump_state()).await?;
        serde_json::from_str(&json).map_err(protocol)
    }

    /// What happens from now on.
    pub async fn notices(&self) -> Result<Notices, ClientError> {
        let proxy = self.manager.inner();
        let subscribe = async {
            let signals = proxy.receive_all_signals().await?;
            let owners = if self.connection.is_bus() {
                Some(proxy.receive_owner_changed().await?)
            } else {
                None
            };
            Ok((signals, owners))
        };
        let (signals, owners) = self.call(READ_TIMEOUT, subscribe).await?;
        // A daemon that is not there would never send anything.
        self.policy_generation().await?;
        Ok(Notices {
            client: self.clone(),
            signals: Box::pin(signals),
            owners,
        })
    }
}

fn protocol(error: impl fmt::Display) -> ClientError {
    ClientError::Protocol(error.to_string())
}

fn connect_reason(bus: &Bus, error: &zbus::Error) -> String {
    match (bus, error) {
        (Bus::Peer(_), zbus::Error::InputOutput(error)) => match error.kind() {
            ErrorKind::NotFound => "the socket does not exist".into(),
            ErrorKind::ConnectionRefused => "nobody listens on the socket".into(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
                "it hung up at once; it ends, or it has too many clients".into()
            }
            _ => error.to_string(),
        },
        (Bus::Peer(_), _) => format!("it does not let this process in ({error})"),
        (_, error) => format!("the bus cannot be reached ({error})"),
    }
}

/// The events of the daemon, in order.
pub struct Notices {
    client: Client,
    signals: Pin<Box<dyn Stream<Item = Message> + Send>>,
    /// On a bus: who owns the daemon's name, whenever that changes.
    owners: Option<OwnerChangedStream<'static>>,
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notices")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl Notices {
    /// Waits for the next event. Events of a later release are passed over.
    ///
    /// Ends with [`ClientError::Unavailable`] when the connection is lost.
    pub async fn next(&mut self) -> Result<Notice, ClientError> {
        loop {
            let signals = &mut self.signals;
            let owners = &mut self.owners;
            let next = poll_fn(|context| signals.as_mut().poll_next(context));
            // Ready when nobody owns the name any more, or the bus is gone.
            let left = poll_fn(|context| match owners {
                None => Poll::Pending,
                Some(owners) => loop {
                    match Pin::new(&mut *owners).poll_next(context) {
                        Poll::Ready(Some(Some(_))) => {}
                        Poll::Ready(_) => return Poll::Ready(()),
                        Poll::Pending => return Poll::Pending,
                    }
                },
            });
            let message = tokio::select! {
                biased;
                message = next => message,
                () = left => None,
                () = self.client.connection.closed() => None,
            };
            let Some(message) = message else {
                return Err(ClientError::Unavailable {
                    bus: self.client.bus.clone(),
                    reason: "it went away".into(),
                });
            };
            if let Some(notice) = notice(&message)? {
                return Ok(notice);
            }
        }
    }
}

/// The notice that a signal is: each kind is named as its signal, and has the signal's arguments in their order.
macro_rules! notice_of {
    ($member:expr, $body:expr; $($kind:ident [$($field:ident),+];)+) => {
        match $member {
            $(stringify!($kind) => {
                let ($($field),+) = $body.deserialize().map_err(protocol)?;
                Some(Notice::$kind { $($field),+ })
            })+
            _ => None,
        }
    };
}

fn notice(message: &Message) -> Result<Option<Notice>, ClientError> {
    let header = message.header();
    if message.message_type() != Type::Signal
        || header.interface().is_none_or(|name| name != wire::MANAGER)
    {
        return Ok(None);
    }
    let Some(member) = header.member() else {
        return Ok(None);
    };
    let body = message.body();
    if member == "PolicyLoaded" {
        let (generation, tenants, warnings) = body.deserialize().map_err(protocol)?;
        return Ok(Some(Notice::PolicyLoaded(PolicyLoaded {
            generation,
            tenants,
            warnings,
        })));
    }
    Ok(notice_of! { member.as_str(), body;
        Denied [tenant, limited_by, key, gpu, pid, requested, used, limit];
        Breached [tenant, key, gpu, pid, requested, used, limit];
        HighReached [tenant, gpu, used, high];
        Reclaimed [tenant, gpu, moved, wanted_by];
        Throttled [tenant, pid, symbol, delayed, delay_usec];
        LaunchDenied [tenant, limited_by, pid, symbol, patience_usec];
        Storm [tenant, pid, symbol, wanted, budget];
        Anomaly [tenant, pid, kernel, duration_usec, usual_usec];
        Xid [tenant, gpu, xid, pid, certainty, source, action, message];
        CgroupAttached [tenant, cgroup];
        CgroupDetached [tenant, cgroup];
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
