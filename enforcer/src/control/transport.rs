//! The socket of one client on the private socket, with bounds on what the client can make the daemon hold.
//!
//! A client that sends calls and never reads the answers would otherwise fill the memory with replies that
//! wait to be written. Here no further call is read while too much is unanswered, a write that makes no
//! progress ends the connection, and a message that is too long is not read at all.

use std::{
    collections::HashMap,
    io,
    num::NonZeroU32,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rustix::net::{Shutdown, shutdown};
use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Notify,
};
use zbus::{
    Message,
    connection::socket::{ReadHalf, Socket, Split, WriteHalf},
    fdo::ConnectionCredentials,
    message::{Flags, Type},
};

/// Longest message that is read, in bytes.
pub(super) const MAX_MESSAGE: usize = 2 << 20;
/// Calls of one client that may be unanswered at the same time.
const MAX_UNANSWERED: usize = 16;
/// Their size together, in bytes, unless there is only one.
const MAX_UNANSWERED_BYTES: usize = 4 << 20;
/// Most bytes that a client may send before it is authenticated.
const MAX_HANDSHAKE: usize = 16 << 10;
/// Longest time that one message may take to be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a message that gets no answer: those cannot be counted until they are answered.
const UNANSWERED_PAUSE: Duration = Duration::from_millis(1);
/// Length of the fixed part of a message's header.
const FIXED_HEADER: usize = 16;

/// A connected client.
#[derive(Debug)]
pub(super) struct Transport(pub(super) UnixStream);

impl Socket for Transport {
    type ReadHalf = Reader;
    type WriteHalf = Writer;

    fn split(self) -> Split<Reader, Writer> {
        let (read, write) = self.0.into_split();
        let gate = Arc::new(Gate::default());
        Split::new(
            Reader {
                inner: read,
                gate: gate.clone(),
                handshake: Handshake::default(),
            },
            Writer { inner: write, gate },
        )
    }
}

/// What is read and not answered yet.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct GateState {
    /// Sizes by serial number.
    unanswered: HashMap<NonZeroU32, usize>,
    bytes: usize,
    /// The writer gave up.
    broken: bool,
}

impl Gate {
    /// Waits until `check` gives a value; `check` sees every change of the state.
    async fn wait<T>(&self, check: impl Fn(&GateState) -> Option<T>) -> T {
        loop {
            // Wakes for every change from here on, also before it is polled.
            let changed = self.changed.notified();
            if let Some(value) = check(&self.state.lock().unwrap_or_else(PoisonError::into_inner)) {
                return value;
            }
            changed.await;
        }
    }

    /// Waits until one more call of `size` bytes may be read.
    async fn room_for(&self, size: usize) -> io::Result<()> {
        self.wait(|state| {
            let room = state.unanswered.is_empty()
                || state.unanswered.len() < MAX_UNANSWERED
                    && state.bytes + size <= MAX_UNANSWERED_BYTES;
            match (state.broken, room) {
                (true, _) => Some(Err(io::ErrorKind::TimedOut.into())),
                (false, true) => Some(Ok(())),
                (false, false) => None,
            }
        })
        .await
    }

    fn is_broken(&self) -> bool {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .broken
    }

    /// Waits until the writer gives up.
    async fn broken(&self) -> io::Error {
        self.wait(|state| state.broken.then(|| io::ErrorKind::TimedOut.into()))
            .await
    }

    fn change<T>(&self, change: impl FnOnce(&mut GateState) -> T) -> T {
        let result = change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_waiters();
        result
    }

    /// Counts a call; false if its serial number is that of an unanswered one.
    fn admit(&self, serial: NonZeroU32, size: usize) -> bool {
        self.change(|state| {
            state.bytes += size;
            state.unanswered.insert(serial, size).is_none()
        })
    }

    fn answered(&self, serial: NonZeroU32) {
        self.change(|state| {
            let size = state.unanswered.remove(&serial).unwrap_or(0);
            state.bytes = state.bytes.saturating_sub(size);
        });
    }

    fn give_up(&self) {
        self.change(|state| state.broken = true);
    }
}

/// Checks on the text before the first message.
#[derive(Debug, Default)]
struct Handshake {
    bytes: usize,
    last: u8,
}

impl Handshake {
    /// Refuses what goes on for too long, and a line that ends in a bare LF: the parser of the handshake takes the
    /// byte before an LF for granted.
    fn check(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len();
        if self.bytes > MAX_HANDSHAKE {
            return Err(invalid("the handshake is too long"));
        }
        for &byte in bytes {
            if byte == b'\n' && self.last != b'\r' {
                return Err(invalid("a line of the handshake does not end with CR LF"));
            }
            self.last = byte;
        }
        Ok(())
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Length of the whole message that starts with `header`, as the D-Bus specification lays it out.
fn message_length(header: &[u8; FIXED_HEADER]) -> io::Result<usize> {
    let word = |at: usize| {
        let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
        match header[0] {
            b'l' => Ok(u32::from_le_bytes(bytes)),
            b'B' => Ok(u32::from_be_bytes(bytes)),
            _ => Err(invalid("no D-Bus message: unknown byte order")),
        }
    };
    let (body, fields) = (word(4)?, word(12)?);
    let length = (FIXED_HEADER as u64 + u64::from(fields)).next_multiple_of(8) + u64::from(body);
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= MAX_MESSAGE)
        .ok_or_else(|| invalid("the message is too long"))
}

/// The reading half.
#[derive(Debug)]
pub(super) struct Reader {
    inner: OwnedReadHalf,
    gate: Arc<Gate>,
    handshake: Handshake,
}

impl Reader {
    async fn receive(
        &mut self,
        seq: u64,
        received: &mut Vec<u8>,
        fds: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        while received.len() < FIXED_HEADER {
            let mut buffer = [0; FIXED_HEADER];
            let missing = FIXED_HEADER - received.len();
            let (count, _) = self.inner.recvmsg(&mut buffer[..missing]).await?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            received.extend_from_slice(&buffer[..count]);
        }
        let header = received
            .first_chunk()
            .ok_or_else(|| invalid("the message has no header"))?;
        let length = message_length(header)?;
        self.gate.room_for(length).await?;
        let message = self.inner.receive_message(seq, received, fds).await?;
        let primary = message.primary_header();
        if message.message_type() != Type::MethodCall
            || primary.flags().contains(Flags::NoReplyExpected)
        {
            tokio::time::sleep(UNANSWERED_PAUSE).await;
        } else if !self.gate.admit(primary.serial_num(), length) {
            return Err(invalid("two unanswered calls have the same serial number").into());
        }
        Ok(message)
    }
}

#[async_trait]
impl ReadHalf for Reader {
    async fn receive_message(
        &mut self,
        seq: u64,
        already_received_bytes: &mut Vec<u8>,
        already_received_fds: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        let gate = self.gate.clone();
        tokio::select! {
            message = self.receive(seq, already_received_bytes, already_received_fds) => message,
            error = gate.broken() => Err(error.into()),
        }
    }

    /// Called directly only during the handshake.
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let (count, _fds) = self.inner.recvmsg(buffer).await?;
        self.handshake.check(&buffer[..count])?;
        Ok((count, Vec::new()))
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        self.inner.peer_credentials().await
    }
}

/// The writing half.
#[derive(Debug)]
pub(super) struct Writer {
    inner: OwnedWriteHalf,
    gate: Arc<Gate>,
}

#[async_trait]
impl WriteHalf for Writer {
    async fn send_message(&mut self, message: &Message) -> zbus::Result<()> {
        if self.gate.is_broken() {
            // Answers that were waiting behind the one that failed do not each wait that long.
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        }
        let sent = tokio::time::timeout(WRITE_TIMEOUT, self.inner.send_message(message))
            .await
            .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
        if sent.is_err() {
            // Part of the message may be out: nothing sensible can follow it.
            self.gate.give_up();
            // The other end learns it now, not when the last task lets go of the connection. If it has hung up
            // already there is nothing to do.
            let _ = shutdown(self.inner.as_ref(), Shutdown::Both);
        } else if let Some(serial) = message.header().reply_serial() {
            self.gate.answered(serial);
        }
        sent
    }

    async fn sendmsg(&mut self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        tokio::time::timeout(WRITE_TIMEOUT, self.inner.sendmsg(buffer, fds))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn close(&mut self) -> io::Result<()> {
        self.gate.give_up();
        self.inner.close().await
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        self.inner.peer_credentials().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_message_is_that_of_the_real_encoding() {
        for body in ["", "x", "a longer body than the one before"] {
            let message = Message::method_call("/a/path", "Member")
                .and_then(|builder| builder.interface("org.example.Iface"))
                .and_then(|builder| builder.build(&(body,)))
                .expect("message");
            let bytes = message.data();
            let header = bytes[..].first_chunk().expect("header");
            assert_eq!(message_length(header).expect("valid"), bytes.len());
        }
    }

    #[test]
    fn nonsense_and_giants_are_refused() {
        assert!(message_length(b"GET / HTTP/1.1\r\n").is_err());
        let mut header = *b"l\x01\x00\x01\0\0\0\0\x01\0\0\0\0\0\0\0";
        assert_eq!(message_length(&header).expect("valid"), 16);
        header[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(message_length(&header).is_err());
        header[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(message_length(&header).is_err());
    }

    #[test]
    fn the_handshake_is_bounded_and_its_lines_end_properly() {
        let mut handshake = Handshake::default();
        handshake.check(b"\0AUTH EXTERNAL 30\r").expect("fine");
        handshake.check(b"\nBEGIN\r\n").expect("fine");
        assert!(handshake.check(b"\n").is_err());
        let mut handshake = Handshake::default();
        assert!(handshake.check(&[b'A'; MAX_HANDSHAKE]).is_ok());
        assert!(handshake.check(b"A").is_err());
    }

    #[tokio::test]
    async fn the_gate_closes_when_too_much_is_unanswered() {
        let gate = Gate::default();
        let serial = |n| NonZeroU32::new(n).expect("not zero");
        let is_open = |size| {
            let gate = &gate;
            async move {
                tokio::time::timeout(Duration::from_millis(20), gate.room_for(size))
                    .await
                    .is_ok()
            }
        };
        for n in 1..=16 {
            assert!(is_open(100).await);
            assert!(gate.admit(serial(n), 100));
        }
        assert!(!is_open(100).await);
        gate.answered(serial(3));
        assert!(is_open(100).await);
        assert!(!is_open(MAX_UNANSWERED_BYTES).await);
        assert!(!gate.admit(serial(4), 1), "serial 4 is taken");
        gate.give_up();
        assert!(gate.room_for(1).await.is_err());
    }
}
