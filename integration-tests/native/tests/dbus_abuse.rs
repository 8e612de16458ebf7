//! Clients that ask for nonsense, for much, and for ever: the daemon neither blocks nor grows, and enforces meanwhile.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::{
    client::{
        Client,
        looks::{Idle, Kind, Leaks, Profile},
    },
    config::Bus,
    control::{QuotaChange, leaks::Target},
};
use gpuquota_native_tests::{Actor, Bed};

const MIB: u64 = 1 << 20;
const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\n";

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the daemon lives");
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .expect("VmRSS");
    kib << 10
}

fn change(tenant: &str, gpu: Option<&str>, key: &str, value: &str) -> QuotaChange {
    QuotaChange {
        tenant: tenant.into(),
        gpu: gpu.map(str::to_owned),
        properties: vec![(key.into(), value.into())],
        runtime: true,
    }
}

/// Calls that must all fail, one after the other; returns how many there were.
async fn ask_nonsense(client: &Client, long: &str) -> u64 {
    let nonsense = [
        change("nobody", None, "memory.max", "1GiB"),
        change("a", Some("99"), "memory.max", "1GiB"),
        change("a", None, "memory.max", "-1"),
        change("a", None, "memory.max", "1.5"),
        change("a", None, "memory.max", "99999999999999999999GiB"),
        change("a", None, "memory.maximum", "1GiB"),
        change("../../etc/passwd", None, "memory.max", "1GiB"),
        change("a", None, "memory.max", "1GiB\"\n[tenant.b]\ncgroup = \"/"),
        change(long, None, "memory.max", "1GiB"),
        change("a", None, "memory.max", long),
    ];
    for change in &nonsense {
        client.set_quota(change).await.expect_err("nonsense");
    }
    client.tenant("nobody").await.expect_err("unknown");
    client.tenant(long).await.expect_err("too long");
    client.tenant_by_pid(0).await.expect_err("no process");
    client
        .reset_quota("nobody", &[])
        .await
        .expect_err("unknown");
    nonsense.len() as u64 + 4
}

/// A client of its own in a thread of its own.
fn asker<F>(bus: &Bus, ask: F) -> thread::JoinHandle<()>
where
    F: AsyncFnOnce(Client) + Send + 'static,
{
    let bus = bus.clone();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            ask(Client::connect(&bus).await.expect("connected")).await;
        });
    })
}

#[test]
fn ten_thousand_calls_and_nonsense_neither_block_nor_grow_the_daemon() {
    let bed = Bed::new(POLICY);
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
    let generation = bed.call(async |client| client.policy_generation().await);
    let generation = generation.expect("a generation");
    let bus: Bus = bed.bus().parse().expect("an address");
    let stop = Arc::new(AtomicBool::new(false));
    let calls = Arc::new(AtomicU64::new(0));
    let askers: Vec<_> = (0..6)
        .map(|number| {
            let (stop, calls) = (Arc::clone(&stop), Arc::clone(&calls));
            asker(&bus, async move |client| {
                // One of them with a megabyte in each string, the others as fast as they get answers.
                let long = "x".repeat(if number == 0 { 1 << 20 } else { 1 });
                while !stop.load(Ordering::Relaxed) {
                    let asked = if number < 2 {
                        ask_nonsense(&client, &long).await
                    } else {
                        client.version().await.expect("a version");
                        client.tenant("a").await.expect("a tenant");
                        2
                    };
                    calls.fetch_add(asked, Ordering::Relaxed);
                }
            })
        })
        .collect();
    // What a call may cost for a while (buffers, an allocator's caches) is there after the first thousands.
    while calls.load(Ordering::Relaxed) < 1000 {
        thread::yield_now();
    }
    let before = resident(bed.daemon_pid());
    while calls.load(Ordering::Relaxed) < 11_000 {
        // Neither blocked …
        assert!(actor.tell("alloc 4GiB").starts_with("out of memory"));
        assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
        assert!(actor.tell("free --newest 1").starts_with("freed"));
        // … nor for others.
        assert_eq!(bed.tenant("a").name, "a");
    }
    let after = resident(bed.daemon_pid());
    stop.store(true, Ordering::Relaxed);
    for asker in askers {
        asker.join().expect("asked to its end");
    }
    assert!(
        after < before + 16 * MIB,
        "it grew from {before} to {after} bytes"
    );
    // Nothing of the nonsense came into force.
    assert_eq!(
        bed.call(async |client| client.policy_generation().await)
            .expect("a generation"),
        generation
    );
    assert_eq!(bed.usage("a", 0).memory_max, Some(3 << 30));
    println!(
        "{} calls, resident {} to {} KiB",
        calls.load(Ordering::Relaxed),
        before >> 10,
        after >> 10
    );
}

/// A look at the tenant from its start to its end. What it finds is for other tests.
async fn look<K: Kind>(client: &Client) {
    let target = Target::Tenant("a".into());
    // One of these may be too late for a process; none may hang.
    let _ = client
        .start_look::<K>(&target, Duration::from_mins(1))
        .await;
    let _ = client.look::<K>(&target).await;
    let _ = client.stop_look::<K>(&target).await;
}

/// The limits change, and with them what is known of every cgroup, while the ledger is compared with the driver, tenants are
/// frozen and looked at, and others ask how it stands.
#[test]
fn questions_changes_and_looks_do_not_keep_each_other_waiting() {
    const CHANGES: u64 = 200;
    let mut bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\nmemory.high = \"1GiB\"\nlaunch.max = \"1000/s\"\n\
         time.weight = 200\n[tenant.b]\ncgroup = \"@/b.slice\"\nmemory.max = \"3GiB\"\ntime.max = \"50%\"\n",
    );
    let metrics = bed.offer_metrics();
    let bus: Bus = bed.bus().parse().expect("an address");
    let mut actors: Vec<Actor> = ["a", "a", "b"].map(|tenant| bed.actor(tenant)).into();
    for actor in &mut actors {
        assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
    }
    let changed = Arc::new(AtomicU64::new(0));
    let begun = Arc::clone(&changed);
    let goes_on = move || begun.load(Ordering::Relaxed) < CHANGES;
    let counted = Arc::clone(&changed);
    let mut askers = vec![asker(&bus, async move |client| {
        for at in 0..CHANGES {
            let max = format!("{}MiB", 3072 + at);
            let change = change("a", None, "memory.max", &max);
            client.set_quota(&change).await.expect("another limit");
            counted.store(at + 1, Ordering::Relaxed);
        }
    })];
    for _ in 0..2 {
        let goes_on = goes_on.clone();
        askers.push(asker(&bus, async move |client| {
            while goes_on() {
                client.tenant("a").await.expect("a tenant");
                client.dump_state().await.expect("everything");
            }
        }));
    }
    let (ask, hold, watch, scrape) = (goes_on.clone(), goes_on.clone(), goes_on.clone(), goes_on);
    askers.push(asker(&bus, async move |client| {
        while ask() {
            client.tenants().await.expect("tenants");
            client.doctor().await.expect("findings");
            let since = Duration::from_mins(1);
            client.memory_history(None, since).await.expect("history");
            client.memory_heat_map(since, 10).await.expect("peaks");
        }
    }));
    askers.push(asker(&bus, async move |client| {
        while hold() {
            client.freeze("b", None).await.expect("frozen");
            client.thaw("b", None).await.expect("thawed");
            client.reload().await.expect("the policy as it is");
        }
    }));
    askers.push(asker(&bus, async move |client| {
        while watch() {
            look::<Leaks>(&client).await;
            look::<Profile>(&client).await;
            look::<Idle>(&client).await;
        }
    }));
    askers.push(thread::spawn(move || {
        while scrape() {
            gpuquota_native_tests::scrape(&metrics);
        }
    }));
    let mut last = (0, Instant::now());
    while changed.load(Ordering::Relaxed) < CHANGES {
        for actor in &mut actors {
            assert!(actor.tell("alloc 64MiB").starts_with("allocated"));
            assert!(actor.tell("free --newest 1").starts_with("freed"));
        }
        let now = changed.load(Ordering::Relaxed);
        if now > last.0 {
            last = (now, Instant::now());
        }
        assert!(
            last.1.elapsed() < Duration::from_secs(20),
            "the daemon hangs after {now} changes"
        );
    }
    for asker in askers {
        asker.join().expect("asked to its end");
    }
    assert_eq!(
        bed.usage("a", 0).memory_max,
        Some((3072 + CHANGES - 1) * MIB)
    );
}
