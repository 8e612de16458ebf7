//! Objects of tenants and GPUs on a bus, seen by foreign clients.

use std::{collections::HashMap, future::poll_fn, pin::Pin, time::Duration};

use futures_core::Stream;
use gpuquota_enforcer::control::{Control, Notice, wire};
use zbus::{
    Connection,
    connection::Builder,
    fdo::{ObjectManagerProxy, PropertiesProxy},
    zvariant::OwnedValue,
};

use crate::{
    bus::{busctl, same_interface},
    support::{Daemon, GIB, TestBus, stderr, stdout},
};

const VISION: &str = "/org/gpuquota/Enforcer1/tenant/vision";
const TENANT: &str = "org.gpuquota.Enforcer1.Tenant";

fn property(bus: &TestBus, path: &str, interface: &str, name: &str) -> String {
    stdout(&busctl(
        bus,
        &["get-property", wire::NAME, path, interface, name],
    ))
}

async fn connect(bus: &TestBus) -> Connection {
    let builder = Builder::address(bus.address.as_str()).expect("address");
    builder.build().await.expect("connect")
}

async fn next<S: Stream + Unpin>(stream: &mut S) -> S::Item {
    let next = poll_fn(|context| Pin::new(&mut *stream).poll_next(context));
    tokio::time::timeout(Duration::from_secs(20), next)
        .await
        .expect("in time")
        .expect("goes on")
}

#[test]
fn every_tenant_and_gpu_has_an_object() {
    let bus = TestBus::start();
    let _daemon = Daemon::on_bus(&bus);
    let tree = stdout(&busctl(&bus, &["tree", "--list", wire::NAME]));
    for path in [
        VISION,
        "/org/gpuquota/Enforcer1/tenant/lab",
        "/org/gpuquota/Enforcer1/gpu/0",
        "/org/gpuquota/Enforcer1/gpu/1",
    ] {
        assert!(tree.lines().any(|line| line == path), "{path}: {tree}");
    }
    let tenant = |name: &str| property(&bus, VISION, TENANT, name);
    assert_eq!(tenant("Name"), "s \"vision\"\n");
    assert_eq!(tenant("Class"), "s \"guaranteed\"\n");
    assert_eq!(
        tenant("Parent"),
        "o \"/org/gpuquota/Enforcer1/tenant/lab\"\n"
    );
    assert_eq!(tenant("Cgroups"), "as 1 \"/gpu.slice/vision.slice\"\n");
    let max = tenant("MemoryMax");
    assert!(
        max.starts_with("a{ut} 2 ") && max.contains("0 42949672960"),
        "{max}"
    );
    assert!(tenant("GPUs").contains("\"MemoryUsed\" t 13421772800"));
    let gpu = |index: u32, name: &str| {
        let path = format!("/org/gpuquota/Enforcer1/gpu/{index}");
        property(&bus, &path, "org.gpuquota.Enforcer1.GPU", name)
    };
    assert_eq!(gpu(0, "MemoryTotal"), format!("t {}\n", 80 * GIB));
    assert_eq!(gpu(0, "MemoryUsed"), format!("t {}\n", 13 * GIB));
    assert_eq!(gpu(1, "MemoryUsed"), format!("t {}\n", u64::MAX));
    let missing = busctl(
        &bus,
        &[
            "get-property",
            wire::NAME,
            "/org/gpuquota/Enforcer1/tenant/nobody",
            TENANT,
            "Name",
        ],
    );
    assert!(!missing.status.success(), "{}", stderr(&missing));
}

#[test]
fn the_shipped_interface_files_are_what_is_served() {
    let bus = TestBus::start();
    let _daemon = Daemon::on_bus(&bus);
    let served = |path: &str| {
        stdout(&busctl(
            &bus,
            &["--xml-interface", "introspect", wire::NAME, path],
        ))
    };
    same_interface(
        TENANT,
        &served(VISION),
        include_str!("../../../config/org.gpuquota.Enforcer1.Tenant.xml"),
    );
    same_interface(
        "org.gpuquota.Enforcer1.GPU",
        &served("/org/gpuquota/Enforcer1/gpu/0"),
        include_str!("../../../config/org.gpuquota.Enforcer1.GPU.xml"),
    );
}

#[test]
fn objects_come_and_go_with_the_policy() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    daemon.runtime.block_on(async {
        let connection = connect(&bus).await;
        let manager = ObjectManagerProxy::new(&connection, wire::NAME, wire::PATH)
            .await
            .expect("proxy");
        let objects = manager.get_managed_objects().await.expect("objects");
        let of_interface = |name: &str| {
            let has = |interfaces: &HashMap<_, _>| {
                interfaces
                    .keys()
                    .any(|found: &zbus::names::OwnedInterfaceName| found.as_str() == name)
            };
            objects
                .values()
                .filter(|interfaces| has(interfaces))
                .count()
        };
        assert_eq!(
            (
                of_interface(TENANT),
                of_interface("org.gpuquota.Enforcer1.GPU")
            ),
            (2, 2)
        );

        let mut added = manager.receive_interfaces_added().await.expect("subscribe");
        let mut removed = manager
            .receive_interfaces_removed()
            .await
            .expect("subscribe");
        {
            let mut tenants = daemon.control.tenants.lock().expect("lock");
            tenants.retain(|tenant| tenant.name == "vision");
            let mut other = tenants[0].clone();
            other.name = "a-b".into();
            tenants.push(other);
        }
        daemon.control.reload().expect("reload");
        let added = next(&mut added).await;
        let path = added.args().expect("arguments").object_path().to_string();
        assert_eq!(path, "/org/gpuquota/Enforcer1/tenant/a_2db");
        let removed = next(&mut removed).await;
        let path = removed.args().expect("arguments").object_path().to_string();
        assert_eq!(path, "/org/gpuquota/Enforcer1/tenant/lab");
        let objects = manager.get_managed_objects().await.expect("objects");
        let paths: Vec<_> = objects.keys().map(|path| path.as_str()).collect();
        assert!(paths.contains(&VISION) && paths.contains(&"/org/gpuquota/Enforcer1/tenant/a_2db"));
        assert!(
            !paths.contains(&"/org/gpuquota/Enforcer1/tenant/lab"),
            "{paths:?}"
        );
    });
}

#[test]
fn changes_of_a_tenant_are_told() {
    let bus = TestBus::start();
    let daemon = Daemon::on_bus(&bus);
    daemon.runtime.block_on(async {
        let connection = connect(&bus).await;
        let proxy = PropertiesProxy::new(&connection, wire::NAME, VISION)
            .await
            .expect("proxy");
        let mut changes = proxy.receive_properties_changed().await.expect("subscribe");
        daemon.control.tenants.lock().expect("lock")[1].gpus[0].memory_max = Some(7 * GIB);
        daemon.control.reload().expect("reload");
        let change = next(&mut changes).await;
        let change = change.args().expect("arguments");
        assert_eq!(change.interface_name, TENANT);
        assert_eq!(
            change.changed_properties.len(),
            1,
            "{:?}",
            change.changed_properties
        );
        let value = OwnedValue::try_from(&change.changed_properties["MemoryMax"]).expect("a value");
        let limits: HashMap<u32, u64> = value.try_into().expect("a{ut}");
        assert_eq!(limits[&0], 7 * GIB);

        // A burst of refusals is told once.
        daemon.control.tenants.lock().expect("lock")[1].gpus[0].denials = 503;
        for _ in 0..200 {
            daemon.control.happens(Notice::Denied {
                tenant: "vision".into(),
                limited_by: "vision".into(),
                key: "memory.max".into(),
                gpu: 0,
                pid: 4242,
                requested: 1,
                used: 7 * GIB,
                limit: 7 * GIB,
            });
        }
        let change = next(&mut changes).await;
        let change = change.args().expect("arguments");
        let value = OwnedValue::try_from(&change.changed_properties["Denials"]).expect("a value");
        let denials: HashMap<u32, u64> = value.try_into().expect("a{ut}");
        assert_eq!(denials[&0], 503);
        assert!(
            next(&mut changes)
                .await
                .args()
                .expect("arguments")
                .changed_properties
                .contains_key("Breaches")
        );
        let more = poll_fn(|context| Pin::new(&mut changes).poll_next(context));
        let more = tokio::time::timeout(Duration::from_millis(300), more).await;
        assert!(more.is_err(), "{more:?}");
    });
}
