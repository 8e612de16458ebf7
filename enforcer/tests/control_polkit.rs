//! On the system bus polkit decides who may change limits.
//!
//! A file of its own, because the address of the system bus is an environment variable of the whole process.

#[path = "control_plane/support.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod support;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use gpuquota_enforcer::config::Bus;
use zbus::{connection::Builder, interface, zvariant::OwnedValue};

use support::{Daemon, GIB, TestBus, fails, is_root, public_dir, stdout};

/// What polkit was asked.
#[derive(Clone, Debug)]
struct Question {
    kind: String,
    subject: HashMap<String, String>,
    action: String,
    details: HashMap<String, String>,
    flags: u32,
}

#[derive(Default)]
struct State {
    authorized: bool,
    challenge: bool,
    details: HashMap<String, String>,
    asked: Vec<Question>,
}

/// A polkit that answers as it is told.
#[derive(Clone, Default)]
struct Authority(Arc<Mutex<State>>);

type Answer = (bool, bool, HashMap<String, String>);

#[interface(name = "org.freedesktop.PolicyKit1.Authority")]
impl Authority {
    #[allow(clippy::needless_pass_by_value, reason = "arguments of a D-Bus method")]
    fn check_authorization(
        &self,
        subject: (String, HashMap<String, OwnedValue>),
        action_id: String,
        details: HashMap<String, String>,
        flags: u32,
        cancellation_id: String,
    ) -> (Answer,) {
        assert_eq!(cancellation_id, "", "nothing here cancels");
        let mut state = self.0.lock().expect("lock");
        state.asked.push(Question {
            kind: subject.0,
            subject: subject
                .1
                .into_iter()
                .map(|(key, value)| (key, value.to_string()))
                .collect(),
            action: action_id,
            details,
            flags,
        });
        ((state.authorized, state.challenge, state.details.clone()),)
    }
}

impl Authority {
    fn says(&self, authorized: bool, challenge: bool) {
        let mut state = self.0.lock().expect("lock");
        (state.authorized, state.challenge) = (authorized, challenge);
    }

    fn asked(&self) -> Vec<Question> {
        std::mem::take(&mut self.0.lock().expect("lock").asked)
    }
}

#[test]
fn polkit_decides_about_everybody_but_root() {
    assert!(is_root(), "a caller who is not root is made by one who is");
    let bus = TestBus::start();
    // SAFETY: the only test of this process, and no other thread reads the environment yet.
    unsafe { std::env::set_var("DBUS_SYSTEM_BUS_ADDRESS", &bus.address) };
    let daemon = Daemon::on(Bus::System, public_dir());
    let set = |value: &str| {
        let property = format!("memory.max={value}");
        daemon.ctl_as_nobody(&["set-property", "vision", &property])
    };

    // Nobody is there to ask.
    fails(&set("1GiB"), 77, "polkit is not running");
    stdout(&daemon.ctl(&["set-property", "vision", "memory.max=2GiB"]));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(2 * GIB));

    let authority = Authority::default();
    let served = authority.clone();
    let _polkit = daemon
        .runtime
        .block_on(async {
            Builder::address(bus.address.as_str())?
                .serve_at("/org/freedesktop/PolicyKit1/Authority", served)?
                .name("org.freedesktop.PolicyKit1")?
                .build()
                .await
        })
        .expect("polkit's name");

    fails(&set("1GiB"), 77, "polkit does not allow uid 65534");
    let asked = authority.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    let question = &asked[0];
    assert_eq!(question.action, "org.gpuquota.enforcer1.manage");
    assert_eq!(question.kind, "system-bus-name");
    // The name that the bus gave to the caller.
    assert!(question.subject["name"].contains(":1."), "{question:?}");
    assert_eq!(question.flags, 1, "gpuquotactl lets polkit ask");
    assert_eq!(question.details["operation"], "change GPU quotas");

    authority.says(false, true);
    fails(&set("1GiB"), 77, "wants an administrator's password");
    authority
        .0
        .lock()
        .expect("lock")
        .details
        .insert("polkit.dismissed".into(), "true".into());
    authority.says(false, false);
    fails(&set("1GiB"), 77, "cancelled");
    assert_eq!(daemon.control.memory_max("vision", 0), Some(2 * GIB));

    authority.says(true, false);
    stdout(&set("3GiB"));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(3 * GIB));
    stdout(&daemon.ctl_as_nobody(&["reload"]));
    stdout(&daemon.ctl_as_nobody(&["reset-property", "vision"]));
    assert_eq!(authority.asked().len(), 5);

    // Neither readers nor root are asked about.
    stdout(&daemon.ctl_as_nobody(&["list"]));
    stdout(&daemon.ctl(&["set-property", "vision", "memory.max=4GiB"]));
    assert!(authority.asked().is_empty());

    // Nor does a change that is refused for its form bother anybody.
    let many: Vec<_> = (0..65).map(|i| format!("k{i}=1")).collect();
    let mut arguments = vec!["set-property", "vision"];
    arguments.extend(many.iter().map(String::as_str));
    fails(&daemon.ctl_as_nobody(&arguments), 1, "65 properties");
    assert!(authority.asked().is_empty());
}
