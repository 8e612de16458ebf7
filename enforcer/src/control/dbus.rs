//! Offering a [`Control`] over D-Bus.
//!
//! [`serve`] offers it on a bus or on a private socket until the [`Server`] is dropped.

use std::{sync::Arc, time::Duration};

use tokio::{sync::broadcast, task::JoinHandle};
use zbus::{Connection, DBusError, connection::Builder, fdo};

use super::{
    Control, Notice,
    access::Access,
    insight::Insight,
    looks::{IdleWatch, LeakFinder, Looks, Profiler},
    manager::{Manager, Shared, emit_notices},
    objects::Objects,
    peer, wire,
};
use crate::config::Bus;

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
            let connected = connect(bus, &shared).await?;
            let task = tokio::spawn(stay_on_bus(bus.clone(), connected, notices, shared));
            Ok(Server { task, socket: None })
        }
    }
}

async fn connect(bus: &Bus, shared: &Arc<Shared>) -> Result<(Connection, Objects), ServeError> {
    let insight = Insight {
        shared: shared.clone(),
    };
    let manager = Manager {
        shared: shared.clone(),
        access: Access::Sender {
            // Names of a sender mean something to polkit on the system bus only.
            polkit: *bus == Bus::System,
        },
    };
    let looks = Looks {
        shared: shared.clone(),
        access: manager.access,
    };
    let builder = match bus {
        Bus::System => Builder::system(),
        Bus::Session => Builder::session(),
        Bus::Address(address) => Builder::address(address.as_str()),
        Bus::Peer(_) => Err(zbus::Error::Unsupported),
    };
    let connect = async {
        let (builder, objects) = Objects::plant(shared, builder?).await?;
        let connection = builder
            .serve_at(wire::PATH, manager)?
            .serve_at(wire::PATH, insight)?
            .serve_at(wire::PATH, LeakFinder(looks.clone()))?
            .serve_at(wire::PATH, Profiler(looks.clone()))?
            .serve_at(wire::PATH, IdleWatch(looks))?
            .name(wire::NAME)?
            .allow_name_replacements(false)
            .replace_existing_names(false)
            .build()
            .await?;
        Ok((connection, objects))
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
    (mut connection, mut objects): (Connection, Objects),
    mut notices: broadcast::Receiver<Notice>,
    shared: Arc<Shared>,
) {
    loop {
        tokio::select! {
            () = connection.closed() => {}
            () = emit_notices(&connection, &mut notices) => {}
            () = objects.follow(&connection) => {}
        }
        tracing::warn!(%bus, "lost the bus; enforcement goes on, trying to come back");
        let mut pause = RECONNECT.0;
        (connection, objects) = loop {
            tokio::time::sleep(pause).await;
            match connect(&bus, &shared).await {
                Ok(connected) => break connected,
                Err(error) => tracing::debug!(%error, "still off the bus"),
            }
            pause = (pause * 2).min(RECONNECT.1);
        };
        tracing::info!(%bus, "back on the bus");
    }
}
