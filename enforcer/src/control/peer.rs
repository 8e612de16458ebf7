//! The D-Bus interface on a private Unix socket, for hosts without a bus.
//!
//! Everybody may connect and read. Who may change something is decided by the uid that the kernel reports for
//! the other end. The number of clients is bounded, for all users but root also per user.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::fs::{FlockOperation, flock};
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinSet,
};
use zbus::{Guid, connection::Builder};

use super::{
    access::Access,
    insight::Insight,
    looks::{IdleWatch, LeakFinder, Looks, Profiler},
    manager::{Manager, Shared, emit_notices},
    transport::Transport,
    wire,
};

/// Clients at the same time.
const MAX_CLIENTS: usize = 64;
/// Of these, for users other than root together.
const MAX_UNPRIVILEGED: usize = 48;
/// Of these, for one user other than root.
const MAX_PER_USER: usize = 16;
/// How long a client may take to authenticate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long closing may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The private socket could not be offered.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Another daemon serves it.
    #[error("another process serves {path}; is gpuquotad running already?")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something is there that is no socket.
    #[error("{path} exists and is no socket; remove it or choose another path for the bus")]
    NoSocket {
        /// What is in the way.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("{path}: {what}: {source}")]
    Io {
        /// The socket or its lock file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// The socket in the file system; removed on drop.
///
/// A lock file beside it, held as long as the socket lives, keeps two daemons that start at the same time from
/// removing each other's socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    lock_path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        for path in [&self.path, &self.lock_path] {
            if let Err(error) = fs::remove_file(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot be removed");
            }
        }
    }
}

/// Creates the socket; one that a dead daemon left is replaced.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, SocketFile), PeerError> {
    let failed = |what, source| PeerError::Io {
        path: path.into(),
        what,
        source,
    };
    let (lock, lock_path) = take_lock(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(PeerError::NoSocket { path: path.into() });
        }
        Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => return Err(PeerError::InUse { path: path.into() }),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)
                    .map_err(|error| failed("cannot remove the old socket", error))?;
            }
            Err(error) => return Err(failed("cannot try the socket that is there", error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("cannot look at it", error)),
    }
    let listener =
        UnixListener::bind(path).map_err(|error| failed("cannot create the socket", error))?;
    let file = SocketFile {
        path: path.into(),
        lock_path,
        _lock: lock,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(|error| failed("cannot open the socket to all users", error))?;
    Ok((listener, file))
}

fn take_lock(socket: &Path) -> Result<(File, PathBuf), PeerError> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let failed = |what, source| PeerError::Io {
        path: path.clone(),
        what,
        source,
    };
    loop {
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            // A user who can open the file could hold the lock.
            .mode(0o600)
            .open(&path)
            .map_err(|error| failed("cannot create the lock file", error))?;
        match flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(PeerError::InUse {
                    path: socket.into(),
                });
            }
            Err(error) => return Err(failed("cannot lock the file", error.into())),
        }
        // The daemon that held the lock may have removed the file meanwhile.
        let held = lock
            .metadata()
            .map_err(|error| failed("cannot look at the lock file", error))?;
        match fs::metadata(&path) {
            Ok(there) if there.ino() == held.ino() && there.dev() == held.dev() => {
                return Ok((lock, path));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("cannot look at the lock file", error)),
        }
    }
}

/// Serves clients until it is cancelled.
pub(super) async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    let guid = Guid::generate();
    let clients = Clients::default();
    let mut sessions = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = sessions.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "serving a client failed");
                }
                continue;
            }
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a client could not be accepted");
                // Out of file descriptors, most likely: the same client would fail again at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let uid = match stream.peer_cred() {
            Ok(credentials) => credentials.uid(),
            Err(error) => {
                tracing::warn!(%error, "the kernel does not say who a client is");
                continue;
            }
        };
        let Some(place) = clients.admit(uid) else {
            tracing::warn!(uid, "too many clients; one was turned away");
            continue;
        };
        let (shared, guid) = (shared.clone(), guid.clone());
        sessions.spawn(async move {
            let _place = place;
            serve_client(stream, uid, &shared, guid).await;
        });
    }
}

async fn serve_client(stream: UnixStream, uid: u32, shared: &Arc<Shared>, guid: Guid<'static>) {
    // Before the connection answers anything, so that no event after an answer is missed.
    let mut notices = shared.control.subscribe();
    let insight = Insight {
        shared: shared.clone(),
    };
    let manager = Manager {
        shared: shared.clone(),
        access: Access::Uid(uid),
    };
    let looks = Looks {
        shared: shared.clone(),
        access: manager.access,
    };
    let build = async {
        Builder::socket(Transport(stream))
            .server(guid)?
            .p2p()
            .serve_at(wire::PATH, manager)?
            .serve_at(wire::PATH, insight)?
            .serve_at(wire::PATH, LeakFinder(looks.clone()))?
            .serve_at(wire::PATH, Profiler(looks.clone()))?
            .serve_at(wire::PATH, IdleWatch(looks))?
            .build()
            .await
    };
    let connection = match tokio::time::timeout(HANDSHAKE_TIMEOUT, build).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(uid, %error, "a client did not connect properly"),
        Err(_) => return tracing::debug!(uid, "a client did not authenticate in time"),
    };
    tokio::select! {
        () = connection.closed() => {}
        () = emit_notices(&connection, &mut notices) => {}
    }
    let closed = tokio::time::timeout(CLOSE_TIMEOUT, connection.close()).await;
    tracing::debug!(uid, ?closed, "a client left");
}

/// The clients of now, by uid.
#[derive(Debug, Default, Clone)]
struct Clients(Arc<Mutex<HashMap<u32, usize>>>);

impl Clients {
    fn admit(&self, uid: u32) -> Option<Place> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = counts.values().sum();
        let root = counts.get(&0).copied().unwrap_or(0);
        let own = counts.get(&uid).copied().unwrap_or(0);
        let full = all >= MAX_CLIENTS
            || uid != 0 && (own >= MAX_PER_USER || all - root >= MAX_UNPRIVILEGED);
        if full {
            return None;
        }
        *counts.entry(uid).or_default() += 1;
        Some(Place {
            clients: self.clone(),
            uid,
        })
    }
}

/// The place of one client, given back on drop.
#[derive(Debug)]
struct Place {
    clients: Clients,
    uid: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self
            .clients
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_places() {
        let clients = Clients::default();
        let mut places: Vec<_> = (0..MAX_PER_USER).map(|_| clients.admit(1000)).collect();
        assert!(places.iter().all(Option::is_some));
        assert!(clients.admit(1000).is_none());
        for uid in 1001..1003 {
            places.extend((0..MAX_PER_USER).map(|_| clients.admit(uid)));
        }
        assert!(places.iter().all(Option::is_some));
        assert!(clients.admit(2000).is_none(), "users have no more places");
        places.extend((MAX_UNPRIVILEGED..MAX_CLIENTS).map(|_| clients.admit(0)));
        assert!(places.iter().all(Option::is_some), "root has its own");
        assert!(clients.admit(0).is_none());
        places.clear();
        assert!(clients.admit(2000).is_some());
        assert!(clients.0.lock().expect("lock").is_empty());
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("bus");
        // A socket file whose process is gone.
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
        assert!(path.exists());
        let (_listener, file) = bind(&path).expect("replace");
        let mode = fs::metadata(&path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
        assert!(matches!(bind(&path), Err(PeerError::InUse { .. })));
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 0);

        // A live socket of a program that takes no lock.
        let _foreign = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        assert!(matches!(bind(&path), Err(PeerError::InUse { .. })));
    }

    #[tokio::test]
    async fn something_else_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("bus");
        fs::write(&path, "precious").expect("write");
        assert!(matches!(bind(&path), Err(PeerError::NoSocket { .. })));
        assert_eq!(fs::read_to_string(&path).expect("read"), "precious");
        let missing = dir.path().join("no/such/dir");
        assert!(matches!(bind(&missing), Err(PeerError::Io { .. })));
    }
}
