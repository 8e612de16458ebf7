//! How a listener gets to the daemon.
//!
//! The message is the OCI runtime specification's container process state, as a runtime sends it to the
//! `seccomp.listenerPath` of a profile: JSON, with the descriptors beside it. So runtimes and our own runner
//! speak the same way; the runner waits for the daemon's one-line answer, which a runtime does not read.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Deserialize, Serialize};

use super::NotifyError;

/// Name of the listener among the descriptors, set by the OCI specification.
pub const SECCOMP_FD: &str = "seccompFd";

/// A message longer than this is refused.
const MAX_MESSAGE: usize = 64 << 10;

/// Container process state: what comes with a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessState {
    /// Version of the OCI specification.
    pub oci_version: String,
    /// Names of the descriptors, in their order.
    pub fds: Vec<String>,
    /// The process that carries the filter.
    pub pid: u32,
    /// Free text of the sender. Our runner puts [`Metadata`] here.
    #[serde(default)]
    pub metadata: String,
    /// State of the container, as far as it is read here.
    #[serde(default)]
    pub state: ContainerState,
}

/// State of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// Its id.
    pub id: String,
}

/// What our runner says beyond the specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Metadata {
    /// The tenant that the process shall be in.
    pub tenant: String,
    /// Whether an earlier daemon had this listener.
    #[serde(default)]
    pub again: bool,
}

/// The daemon's answer: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Answer {
    /// Why the listener is not taken; absent if it is.
    pub error: Option<String>,
    /// How long a call may wait for a daemon that is gone, in milliseconds.
    pub listener_timeout_ms: u64,
}

/// Sends a listener.
pub fn send(stream: &UnixStream, state: &ProcessState, listener: BorrowedFd<'_>) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    let fds = [listener.as_raw_fd()];
    let sent = sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&text)],
        &[ControlMessage::ScmRights(&fds)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    if sent == text.len() {
        return Ok(());
    }
    Err(io::Error::other("the message was cut short"))
}

/// Receives a listener. Descriptors that are not asked for are closed.
pub fn receive(stream: &UnixStream) -> Result<(ProcessState, OwnedFd), NotifyError> {
    let mut text = vec![0; MAX_MESSAGE];
    let mut length = 0;
    let mut fds: Vec<OwnedFd> = Vec::new();
    loop {
        let mut control = nix::cmsg_space!([i32; 8]);
        let mut buffers = [IoSliceMut::new(&mut text[length..])];
        let message = recvmsg::<()>(
            stream.as_fd().as_raw_fd(),
            &mut buffers,
            Some(&mut control),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )
        .map_err(|error| protocol(error.desc()))?;
        for part in message.cmsgs().map_err(|error| protocol(error.desc()))? {
            if let ControlMessageOwned::ScmRights(received) = part {
                // SAFETY: the kernel has just put these descriptors into this process, for this message.
                fds.extend(
                    received
                        .into_iter()
                        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
                );
            }
        }
        let bytes = message.bytes;
        length += bytes;
        if length == 0 && fds.is_empty() {
            return Err(NotifyError::Silent);
        }
        match serde_json::from_slice::<ProcessState>(&text[..length]) {
            Ok(state) => return pick(state, fds),
            Err(error) if error.is_eof() && bytes > 0 && length < text.len() => {}
            Err(error) => return Err(protocol(&error.to_string())),
        }
    }
}

fn pick(state: ProcessState, fds: Vec<OwnedFd>) -> Result<(ProcessState, OwnedFd), NotifyError> {
    if state.fds.len() != fds.len() {
        return Err(protocol("another number of descriptors than of names"));
    }
    let listener = state
        .fds
        .iter()
        .zip(fds)
        .find_map(|(name, fd)| (name == SECCOMP_FD).then_some(fd))
        .ok_or_else(|| protocol("no descriptor named seccompFd"))?;
    Ok((state, listener))
}

fn protocol(what: &str) -> NotifyError {
    NotifyError::Protocol(what.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write as _};

    use super::*;

    fn state() -> ProcessState {
        ProcessState {
            oci_version: "1.1.0".into(),
            fds: vec![SECCOMP_FD.into()],
            pid: 7,
            metadata: serde_json::to_string(&Metadata {
                tenant: "a".into(),
                again: true,
            })
            .expect("plain data"),
            state: ContainerState::default(),
        }
    }

    #[test]
    fn a_listener_arrives_with_its_state() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let file = File::open("/dev/null").expect("exists");
        send(&ours, &state(), file.as_fd()).expect("sent");
        let (received, _listener) = receive(&theirs).expect("received");
        assert_eq!(received, state());
    }

    #[test]
    fn an_oci_runtimes_message_is_understood() {
        let text = r#"{"ociVersion":"1.0.2","fds":["seccompFd"],"pid":42,"pid1":1,"metadata":"x",
            "state":{"ociVersion":"1.0.2","id":"c","status":"creating","bundle":"/b"}}"#;
        let state: ProcessState = serde_json::from_str(text).expect("understood");
        assert_eq!((state.pid, state.state.id.as_str()), (42, "c"));
    }

    #[test]
    fn who_only_looks_whether_the_socket_is_there_sends_nothing_wrong() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        drop(ours);
        assert!(matches!(receive(&theirs), Err(NotifyError::Silent)));
    }

    #[test]
    fn garbage_and_missing_descriptors_are_errors() {
        for text in [
            "nonsense",
            "{",
            r#"{"ociVersion":"1","fds":["seccompFd"],"pid":1}"#,
        ] {
            let (mut ours, theirs) = UnixStream::pair().expect("sockets");
            ours.write_all(text.as_bytes()).expect("written");
            drop(ours);
            assert!(receive(&theirs).is_err(), "{text}");
        }
    }
}
