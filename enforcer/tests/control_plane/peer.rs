//! The private socket: who may do what, and what a hostile client can do.

use std::{
    fmt::Write as _,
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use gpuquota_enforcer::{
    client::{Client, ClientError},
    config::Bus,
    control::{Notice, ServeError, serve, wire},
};
use zbus::Message;

use crate::support::{Daemon, FakeControl, GIB, eventually, fails, is_root, public_dir, stdout};

#[test]
fn everybody_may_read() {
    let daemon = Daemon::on_peer();
    for arguments in [
        ["list", "--json"],
        ["status", "vision"],
        ["doctor", "--json"],
    ] {
        assert_eq!(
            stdout(&daemon.ctl_as_nobody(&arguments)),
            stdout(&daemon.ctl(&arguments))
        );
    }
}

#[test]
fn only_root_may_change() {
    let daemon = Daemon::on_peer();
    let before = stdout(&daemon.ctl(&["list", "--json"]));
    for arguments in [
        vec!["set-property", "vision", "memory.max=1GiB"],
        vec!["set-property", "vision", "memory.max=1GiB", "--runtime"],
        vec!["reset-property", "vision"],
        vec!["freeze", "vision"],
        vec!["thaw", "vision"],
        vec!["reload"],
    ] {
        let output = daemon.ctl_as_nobody(&arguments);
        fails(&output, 77, "changing limits needs root here");
        fails(&output, 77, "sudo");
    }
    assert_eq!(stdout(&daemon.ctl(&["list", "--json"])), before);
    assert_eq!(daemon.control.generation.load(Ordering::SeqCst), 1);
    assert!(is_root(), "the other half needs root");
    stdout(&daemon.ctl(&["set-property", "vision", "memory.max=1GiB"]));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(GIB));
}

#[test]
fn two_daemons_do_not_share_a_socket() {
    let daemon = Daemon::on_peer();
    let second = daemon
        .runtime
        .block_on(serve(&daemon.bus, std::sync::Arc::new(FakeControl::new())));
    let error = second.expect_err("the socket is taken");
    assert!(matches!(error, ServeError::Peer(_)), "{error}");
    assert!(error.to_string().contains("running already"), "{error}");
    stdout(&daemon.ctl(&["list"]));
}

#[test]
fn a_socket_that_a_killed_daemon_left_is_replaced() {
    let dir = public_dir();
    let path = dir.path().join("bus");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
    let mut daemon = Daemon::on(Bus::Peer(path.clone()), dir);
    stdout(&daemon.ctl(&["list"]));
    daemon.stop();
    assert!(!path.exists(), "removed at the end");
}

/// A client without manners.
struct Raw(UnixStream);

impl Raw {
    fn connect(daemon: &Daemon) -> Self {
        let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("timeout");
        write!(stream, "\0AUTH EXTERNAL {}\r\n", identity(own_uid())).expect("auth");
        let mut answer = [0; 64];
        let count = stream.read(&mut answer).expect("answer");
        assert!(answer[..count].starts_with(b"OK "), "{answer:?}");
        stream.write_all(b"BEGIN\r\n").expect("begin");
        Self(stream)
    }

    fn call(member: &str) -> Message {
        Message::method_call(wire::PATH, member)
            .and_then(|builder| builder.interface(wire::MANAGER))
            .and_then(|builder| builder.build(&()))
            .expect("message")
    }

    /// Waits until the daemon ends the connection, reading nothing before.
    fn is_dropped(&mut self, within: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < within {
            match self.0.write(b"") {
                Err(_) => return true,
                Ok(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if hung_up(&self.0) {
                return true;
            }
        }
        false
    }
}

/// A uid as the handshake carries it: the hexadecimal form of the ASCII form.
fn identity(uid: u32) -> String {
    uid.to_string()
        .bytes()
        .fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}

fn own_uid() -> u32 {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").expect("/proc"))
}

/// Whether the other end is closed, without taking anything from the socket.
fn hung_up(stream: &UnixStream) -> bool {
    use std::os::fd::AsFd;
    let mut polled = [rustix::event::PollFd::from_borrowed_fd(
        stream.as_fd(),
        rustix::event::PollFlags::empty(),
    )];
    let none = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut polled, Some(&none)).expect("poll");
    polled[0].revents().contains(rustix::event::PollFlags::HUP)
}

fn prompt(daemon: &Daemon) {
    let start = Instant::now();
    stdout(&daemon.ctl(&["list"]));
    assert!(
        start.elapsed() < Duration::from_secs(3),
        "others had to wait"
    );
}

#[test]
fn a_client_that_never_reads_its_answers_is_dropped() {
    let daemon = Daemon::on_peer();
    let mut raw = Raw::connect(&daemon);
    raw.0.set_nonblocking(true).expect("nonblocking");
    let start = Instant::now();
    let mut sent = 0;
    'calls: while start.elapsed() < Duration::from_secs(2) {
        let message = Raw::call("ListTenants");
        let mut bytes = &message.data()[..];
        while !bytes.is_empty() {
            match raw.0.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if start.elapsed() > Duration::from_secs(2) {
                        break 'calls;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("{error}"),
            }
        }
        sent += 1;
    }
    prompt(&daemon);
    let answered = daemon.control.listed.load(Ordering::SeqCst);
    // What fits into the socket's buffer, and the few that are being answered; not what was sent.
    assert!(sent > 300, "{sent} sent");
    assert!(answered < sent, "{answered} of {sent} calls were run");
    assert!(raw.is_dropped(Duration::from_secs(10)));
    let after = daemon.control.listed.load(Ordering::SeqCst);
    assert!(after <= answered + 20, "{after} calls were run");
    prompt(&daemon);
}

#[test]
fn a_client_that_never_reads_signals_is_dropped_and_the_others_get_them() {
    let daemon = Daemon::on_peer();
    let mut raw = Raw::connect(&daemon);
    daemon.runtime.block_on(async {
        let client = Client::connect(&daemon.bus).await.expect("connect");
        let mut notices = client.notices().await.expect("notices");
        for number in 0..20_000 {
            daemon.control.happens(Notice::CgroupAttached {
                tenant: "vision".into(),
                cgroup: format!("/{number}"),
            });
            let notice = notices.next().await.expect("notice");
            let Notice::CgroupAttached { cgroup, .. } = notice else {
                panic!("{notice:?}")
            };
            assert_eq!(cgroup, format!("/{number}"));
        }
    });
    assert!(raw.is_dropped(Duration::from_secs(10)));
    prompt(&daemon);
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    let daemon = Daemon::on_peer();
    // A message of 16 MiB, and one whose length is a lie.
    for length in [16_u32 << 20, u32::MAX] {
        let mut raw = Raw::connect(&daemon);
        let mut header = *b"l\x01\x00\x01\0\0\0\0\x01\0\0\0\0\0\0\0";
        header[4..8].copy_from_slice(&length.to_le_bytes());
        raw.0.write_all(&header).expect("header");
        assert!(raw.is_dropped(Duration::from_secs(3)), "{length}");
    }
    // Two calls at once under one number.
    let mut raw = Raw::connect(&daemon);
    *daemon.control.doctor_takes.lock().expect("lock") = Duration::from_millis(300);
    let call = Raw::call("Doctor");
    raw.0.write_all(call.data()).expect("one");
    raw.0.write_all(call.data()).expect("two");
    assert!(raw.is_dropped(Duration::from_secs(3)));
    // Before authentication.
    for greeting in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\0\n\n\n",
        b"\0AUTH\r\n\n",
        &vec![b'A'; 40_000],
    ] {
        let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
        // The daemon may hang up before it has everything.
        let _ = stream.write_all(greeting);
        let mut raw = Raw(stream);
        assert!(raw.is_dropped(Duration::from_secs(3)), "{greeting:?}");
    }
    prompt(&daemon);
}

#[test]
fn a_client_that_claims_to_be_another_user_is_turned_away() {
    let daemon = Daemon::on_peer();
    let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
    let other = own_uid() + 1;
    write!(stream, "\0AUTH EXTERNAL {}\r\n", identity(other)).expect("auth");
    let mut answer = [0; 64];
    let count = stream.read(&mut answer).expect("answer");
    assert!(answer[..count].starts_with(b"REJECTED"), "{answer:?}");
}

#[test]
fn idle_connections_run_out_for_one_user_and_come_back() {
    let daemon = Daemon::on_peer();
    let raws: Vec<_> = (0..64).map(|_| Raw::connect(&daemon)).collect();
    // Full: the next one finds the door closed.
    fails(&daemon.ctl(&["list"]), 69, "too many clients");
    drop(raws);
    eventually("places are free again", || {
        daemon.ctl(&["list"]).status.success()
    });
}

#[test]
fn connections_leave_nothing_behind() {
    let daemon = Daemon::on_peer();
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("/proc").count();
    let visit = || {
        daemon.runtime.block_on(async {
            let client = Client::connect(&daemon.bus).await.expect("connect");
            client.version().await.expect("version");
        });
    };
    visit();
    for _ in 0..200 {
        visit();
    }
    let leaked = descriptors;
    eventually("descriptors are closed", || {
        // Other tests of this process open some meanwhile.
        leaked() < 150
    });
}

#[test]
fn slow_calls_are_bounded_and_hold_up_nobody() {
    let daemon = Daemon::on_peer();
    *daemon.control.doctor_takes.lock().expect("lock") = Duration::from_millis(100);
    daemon.runtime.block_on(async {
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let client = Client::connect(&daemon.bus).await.expect("connect");
            for _ in 0..10 {
                let client = client.clone();
                calls.spawn(async move { client.doctor().await.map(drop) });
            }
        }
        while let Some(result) = calls.join_next().await {
            result.expect("join").expect("every call is answered");
        }
    });
    let most = daemon.control.most_running.load(Ordering::SeqCst);
    assert!((2..=8).contains(&most), "{most} calls ran at the same time");
}

#[test]
fn megabytes_in_one_string_are_refused() {
    let daemon = Daemon::on_peer();
    daemon.runtime.block_on(async {
        let client = Client::connect(&daemon.bus).await.expect("connect");
        let error = client
            .tenant(&"x".repeat(1 << 20))
            .await
            .expect_err("too long");
        assert!(error.to_string().contains("too long"), "{error}");
        // Beyond what is read at all.
        let error = client
            .tenant(&"x".repeat(3 << 20))
            .await
            .expect_err("too long");
        assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
    });
    prompt(&daemon);
}
