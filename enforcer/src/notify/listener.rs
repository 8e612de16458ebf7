//! The socket over which listeners reach the daemon.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use tracing::{debug, warn};

use super::{
    NotifyError,
    protocol::{self, Answer, Metadata, ProcessState},
    supervisor::{self, Judge},
};

/// Most listeners served at a time; each has a thread.
const MAX_LISTENERS: usize = 4096;
/// Stack of a supervisor thread: it makes system calls and little else.
const STACK: usize = 128 << 10;
/// How long a peer may take to send its message.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// User of the peer when it connected.
    pub uid: u32,
    /// Its process.
    pub pid: u32,
}

/// Takes processes into tenants.
pub trait Enroll: Send + Sync + 'static {
    /// Puts the process of `state` into its tenant if `peer` may do that, and says who judges its calls.
    ///
    /// The error is shown to the peer.
    fn enroll(
        &self,
        peer: Peer,
        state: &ProcessState,
        metadata: Option<&Metadata>,
    ) -> Result<Arc<dyn Judge + Send + Sync>, String>;

    /// How long a runner may hold calls for a daemon that is gone.
    fn listener_timeout(&self) -> Duration;
}

/// The listening socket; removed when dropped.
#[derive(Debug)]
pub struct ListenerSocket {
    path: PathBuf,
    stop: Arc<AtomicBool>,
}

impl ListenerSocket {
    /// Listens at `path` and serves every listener that comes, on threads of its own.
    ///
    /// Everybody may connect; [`Enroll`] decides.
    pub fn bind(path: &Path, enroll: Arc<dyn Enroll>) -> Result<Self, NotifyError> {
        let socket_error = |source| NotifyError::Socket {
            path: path.to_owned(),
            source,
        };
        if UnixStream::connect(path).is_ok() {
            return Err(socket_error(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another daemon serves this socket",
            )));
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(socket_error(error));
            }
            _ => {}
        }
        let socket = UnixListener::bind(path).map_err(socket_error)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(socket_error)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::Builder::new()
            .name("listeners".into())
            .stack_size(STACK)
            .spawn(move || accept(&socket, &enroll, &stopped))
            .map_err(socket_error)?;
        Ok(Self {
            path: path.to_owned(),
            stop,
        })
    }
}

impl Drop for ListenerSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, which then sees the flag.
        drop(UnixStream::connect(&self.path));
        // Gone already is fine.
        let _ = fs::remove_file(&self.path);
    }
}

fn accept(socket: &UnixListener, enroll: &Arc<dyn Enroll>, stop: &Arc<AtomicBool>) {
    let served = Arc::new(AtomicUsize::new(0));
    for stream in socket.incoming() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let Ok(stream) = stream else {
            // Out of descriptors: others will be closed.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if served.load(Ordering::Relaxed) >= MAX_LISTENERS {
            refuse(&stream, "too many commands are governed already");
            continue;
        }
        let (enroll, stop) = (Arc::clone(enroll), Arc::clone(stop));
        let slot = Slot::take(&served);
        let spawned = thread::Builder::new()
            .name("supervisor".into())
            .stack_size(STACK)
            .spawn(move || {
                let _slot = slot;
                match serve(&stream, enroll.as_ref(), &stop) {
                    Ok(()) => {}
                    Err(error @ NotifyError::Silent) => debug!("{error}"),
                    Err(error) => {
                        refuse(&stream, &error.to_string());
                        warn!(%error, "a listener is not served");
                    }
                }
            });
        if let Err(error) = spawned {
            warn!(%error, "no thread for a listener");
        }
    }
}

/// Counts the served listeners.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(served: &Arc<AtomicUsize>) -> Self {
        served.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(served))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes one listener and serves it to its end. The connection stays open meanwhile: by its end the runner
/// sees that the daemon is gone.
fn serve(stream: &UnixStream, enroll: &dyn Enroll, stop: &AtomicBool) -> Result<(), NotifyError> {
    stream
        .set_read_timeout(Some(RECEIVE_TIMEOUT))
        .map_err(super::system("SO_RCVTIMEO"))?;
    let credentials = getsockopt(stream, PeerCredentials)
        .map_err(|error| super::system("SO_PEERCRED")(error.into()))?;
    let peer = Peer {
        uid: credentials.uid(),
        // Never negative for a connected peer.
        pid: credentials.pid().unsigned_abs(),
    };
    let (state, listener) = protocol::receive(stream)?;
    let metadata: Option<Metadata> = serde_json::from_str(&state.metadata).ok();
    let judge = enroll
        .enroll(peer, &state, metadata.as_ref())
        .map_err(NotifyError::Rejected)?;
    answer(
        stream,
        &Answer {
            error: None,
            listener_timeout_ms: u64::try_from(enroll.listener_timeout().as_millis())
                .unwrap_or(u64::MAX),
        },
    );
    debug!(pid = state.pid, "governing by seccomp notification");
    watch(&listener, judge.as_ref(), stop)
}

fn watch(listener: &OwnedFd, judge: &dyn Judge, stop: &AtomicBool) -> Result<(), NotifyError> {
    supervisor::serve(listener, judge, &|| stop.load(Ordering::Relaxed))
        .map_err(super::system("seccomp notification"))
}

fn refuse(stream: &UnixStream, why: &str) {
    answer(
        stream,
        &Answer {
            error: Some(why.to_owned()),
            listener_timeout_ms: 0,
        },
    );
}

/// A peer that is gone, or a runtime that does not read, misses nothing.
fn answer(mut stream: &UnixStream, answer: &Answer) {
    use io::Write as _;
    if let Ok(mut line) = serde_json::to_vec(answer) {
        line.push(b'\n');
        let _ = stream.write_all(&line);
    }
}
