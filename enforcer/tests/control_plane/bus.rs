//! The interface on a real message bus, with a real foreign client.

use std::{
    future::poll_fn,
    pin::Pin,
    process::{Command, Output},
    sync::Arc,
};

use futures_core::Stream;
use gpuquota_enforcer::{
    client::Client,
    config::Bus,
    control::{Control, Notice, ServeError, serve, wire},
};
use zbus::{connection::Builder, fdo::PropertiesProxy};

use crate::{
    cli::monitored,
    support::{Daemon, FakeControl, GIB, TestBus, ctl, eventually, fails, stderr, stdout},
};

pub fn busctl(bus: &TestBus, arguments: &[&str]) -> Output {
    Command::new("busctl")
        .arg(format!("--address={}", bus.address))
        .args(arguments)
        .output()
        .expect("busctl; install the package systemd")
}

fn call(bus: &TestBus, arguments: &[&str]) -> Output {
    let prefix = [
        "call",
        "org.gpuquota.Enforcer1",
        "/org/gpuquota/Enforcer1",
        "org.gpuquota.Enforcer1.Manager",
    ];
    busctl(bus, &[&prefix, arguments].concat())
}

#[test]
fn a_foreign_client_can_read_and_change() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    let listed = stdout(&call(&bus, &["ListTenants"]));
    assert!(listed.starts_with("aa{sv} 2 "), "{listed}");
    assert!(listed.contains("\"MemoryMax\" t 42949672960"), "{listed}");
    // No limit.
    assert!(
        listed.contains("\"MemoryMax\" t 18446744073709551615"),
        "{listed}"
    );

    let set = stdout(&call(
        &bus,
        &[
            "SetQuota",
            "ssa(ss)b",
            "vision",
            "",
            "1",
            "memory.max",
            "20GiB",
            "true",
        ],
    ));
    assert!(set.starts_with("s \"/run/gpuquota/policy.d/"), "{set}");
    assert_eq!(daemon.control.memory_max("vision", 0), Some(20 * GIB));

    let tenant = stdout(&call(&bus, &["GetTenantByPID", "u", "4242"]));
    assert!(tenant.contains("\"Name\" s \"vision\""), "{tenant}");
    stdout(&call(&bus, &["ResetQuota", "sas", "vision", "0"]));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(40 * GIB));
    assert_eq!(
        stdout(&call(&bus, &["DumpState"])).trim(),
        r#"s "{\"generation\":1}""#
    );
    assert!(stdout(&call(&bus, &["ListGPUs"])).starts_with("aa{sv} 2 "));
    assert!(stdout(&call(&bus, &["Doctor"])).starts_with("a(sss) 2 "));
    let loaded = stdout(&call(&bus, &["Reload"]));
    assert!(loaded.starts_with("tuas 2 2 1 "), "{loaded}");

    let property = |name: &str| {
        stdout(&busctl(
            &bus,
            &[
                "get-property",
                "org.gpuquota.Enforcer1",
                "/org/gpuquota/Enforcer1",
                "org.gpuquota.Enforcer1.Manager",
                name,
            ],
        ))
    };
    assert_eq!(property("Version"), "s \"1.2.3\"\n");
    assert_eq!(property("PolicyGeneration"), "t 2\n");
    assert!(property("Backends").starts_with("a(sss) 2 \"override\" \"unavailable\""));
}

#[test]
fn errors_have_names() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    let error = |arguments: &[&str]| {
        let output = Command::new("gdbus")
            .args(["call", "--address", &bus.address])
            .args(["--dest", "org.gpuquota.Enforcer1"])
            .args(["--object-path", "/org/gpuquota/Enforcer1", "--method"])
            .args(arguments)
            .output()
            .expect("gdbus; install the package libglib2.0-bin");
        assert!(!output.status.success());
        stderr(&output)
    };
    let manager = |member: &str| format!("org.gpuquota.Enforcer1.Manager.{member}");
    let set = |tenant: &str, gpu: &str, properties: &str| {
        error(&[&manager("SetQuota"), tenant, gpu, properties, "false"])
    };
    let get = error(&[&manager("GetTenant"), "nobody"]);
    assert!(
        get.contains("org.gpuquota.Enforcer1.Error.NoSuchTenant: no tenant named"),
        "{get}"
    );
    let gpu = set("vision", "'9'", "[('memory.max', '1GiB')]");
    assert!(
        gpu.contains("org.gpuquota.Enforcer1.Error.NoSuchGPU"),
        "{gpu}"
    );
    let size = set("vision", "''", "[('memory.max', 'lots')]");
    assert!(
        size.contains("org.gpuquota.Enforcer1.Error.BadProperty"),
        "{size}"
    );
    let process = error(&[&manager("GetTenantByPID"), "1"]);
    assert!(
        process.contains("org.gpuquota.Enforcer1.Error.Ungoverned"),
        "{process}"
    );
    *daemon.control.broken_policy.lock().expect("lock") = Some("a.toml:1:1: no".into());
    let policy = error(&[&manager("Reload")]);
    assert!(
        policy.contains("org.gpuquota.Enforcer1.Error.BadPolicy: a.toml:1:1: no"),
        "{policy}"
    );
    let unknown = error(&[&manager("Explode")]);
    assert!(
        unknown.contains("org.freedesktop.DBus.Error.UnknownMethod"),
        "{unknown}"
    );
}

#[test]
fn the_shipped_interface_file_is_what_is_served() {
    let bus = TestBus::start();
    let _daemon = Daemon::on_bus(&bus);
    let served = stdout(&busctl(
        &bus,
        &[
            "--xml-interface",
            "introspect",
            "org.gpuquota.Enforcer1",
            "/org/gpuquota/Enforcer1",
        ],
    ));
    let shipped = include_str!("../../../config/org.gpuquota.Enforcer1.xml");
    same_interface("org.gpuquota.Enforcer1.Manager", &served, shipped);
    let shipped = include_str!("../../../config/org.gpuquota.Enforcer1.Idle.xml");
    same_interface("org.gpuquota.Enforcer1.Idle", &served, shipped);
    let shipped = include_str!("../../../config/org.gpuquota.Enforcer1.Leaks.xml");
    same_interface("org.gpuquota.Enforcer1.Leaks", &served, shipped);
    let shipped = include_str!("../../../config/org.gpuquota.Enforcer1.Profile.xml");
    same_interface("org.gpuquota.Enforcer1.Profile", &served, shipped);
    let shipped = include_str!("../../../config/org.gpuquota.Enforcer1.Insight.xml");
    same_interface("org.gpuquota.Enforcer1.Insight", &served, shipped);
}

/// What is served is what the file says, tag by tag.
#[track_caller]
pub fn same_interface(name: &str, served: &str, shipped: &str) {
    let (served, shipped) = (interface(name, served), interface(name, shipped));
    for line in &shipped {
        assert!(served.contains(line), "not served: {line}\n{served:#?}");
    }
    for line in &served {
        assert!(
            shipped.contains(line),
            "not in the file: {line}\n{}",
            served.join("\n")
        );
    }
    assert!(!served.is_empty());
    assert_eq!(served, shipped);
}

/// The tags of an interface, without comments and indentation.
fn interface(name: &str, xml: &str) -> Vec<String> {
    let mut text = xml.to_owned();
    while let Some(start) = text.find("<!--") {
        let end = text[start..].find("-->").expect("closed comment") + start + 3;
        text.replace_range(start..end, "");
    }
    text.split_inclusive('>')
        .map(|tag| tag.split_whitespace().collect::<Vec<_>>().join(" "))
        .skip_while(|tag| !tag.contains(&format!("interface name=\"{name}\"")))
        .take_while(|tag| tag != "</interface>")
        .collect()
}

#[test]
fn every_member_of_the_bus_is_in_the_reference() {
    let reference = include_str!("../../../docs/dbus.md");
    let mut members = 0;
    for name in [
        "", ".Tenant", ".GPU", ".Insight", ".Leaks", ".Profile", ".Idle",
    ] {
        let file = format!(
            "{}/../config/org.gpuquota.Enforcer1{name}.xml",
            env!("CARGO_MANIFEST_DIR")
        );
        let xml = std::fs::read_to_string(file).expect("an interface file");
        for start in ["<method name=\"", "<signal name=\"", "<property name=\""] {
            for rest in xml.split(start).skip(1) {
                let member = rest.split('"').next().unwrap_or_default();
                assert!(
                    reference.contains(member),
                    "{member} is not in docs/dbus.md"
                );
                members += 1;
            }
        }
    }
    assert!(members > 30, "{members}");
}

#[test]
fn the_cli_works_over_a_bus() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    let peer = Daemon::on_peer();
    for arguments in [
        &["list"][..],
        &["status", "vision", "--json"],
        &["doctor", "--json"],
    ] {
        assert_eq!(stdout(&daemon.ctl(arguments)), stdout(&peer.ctl(arguments)));
    }
    assert_eq!(monitored(&daemon, &["vision"]).len(), 6);
}

#[test]
fn the_rules_of_the_bus_let_everybody_read_and_root_change() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    assert_eq!(
        stdout(&daemon.ctl_as_nobody(&["list"])),
        stdout(&daemon.ctl(&["list"]))
    );
    let output = daemon.ctl_as_nobody(&["set-property", "vision", "memory.max=1GiB"]);
    fails(&output, 77, "changing limits needs root here");
    assert_eq!(daemon.control.memory_max("vision", 0), Some(40 * GIB));
    stdout(&daemon.ctl(&["set-property", "vision", "memory.max=1GiB"]));
    assert_eq!(daemon.control.memory_max("vision", 0), Some(GIB));
}

#[test]
fn an_absent_daemon_is_69_and_a_second_one_is_refused() {
    let bus = TestBus::start();
    let output = ctl(&bus.address, &["list"]).output().expect("gpuquotactl");
    fails(&output, 69, "nobody owns its name on the bus");
    let output = ctl("unix:path=/nonexistent", &["list"])
        .output()
        .expect("gpuquotactl");
    fails(&output, 69, "the bus cannot be reached");

    let daemon = Daemon::on_bus(&bus);
    let second = daemon
        .runtime
        .block_on(serve(&daemon.bus, Arc::new(FakeControl::new())));
    assert!(
        matches!(second, Err(ServeError::NameTaken { .. })),
        "{second:?}"
    );
}

#[test]
fn a_bus_that_comes_back_is_served_again() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    stdout(&daemon.ctl(&["list"]));
    let bus = bus.restart();
    assert_eq!(Bus::Address(bus.address.clone()), daemon.bus);
    eventually("the daemon is back", || {
        daemon.ctl(&["list"]).status.success()
    });
    daemon.runtime.block_on(async {
        let client = Client::connect(&daemon.bus).await.expect("connect");
        let mut notices = client.notices().await.expect("notices");
        daemon.control.happens(Notice::CgroupDetached {
            tenant: "vision".into(),
            cgroup: "/x".into(),
        });
        notices.next().await.expect("signals flow again");
    });
}

#[test]
fn a_new_policy_is_a_changed_property() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    daemon.runtime.block_on(async {
        let connection = Builder::address(bus.address.as_str())
            .expect("address")
            .build()
            .await
            .expect("connect");
        let proxy = PropertiesProxy::new(&connection, wire::NAME, wire::PATH)
            .await
            .expect("proxy");
        let mut changes = proxy.receive_properties_changed().await.expect("subscribe");
        daemon.control.reload().expect("reload");
        let change = poll_fn(|context| Pin::new(&mut changes).poll_next(context))
            .await
            .expect("a change");
        let change = change.args().expect("arguments");
        assert_eq!(change.interface_name, wire::MANAGER);
        assert_eq!(change.changed_properties["PolicyGeneration"], 2_u64.into());
    });
}
