//! GPU faults: whom they are laid to, and what follows.

use std::{
    fs::{self, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsRawFd as _,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::fault::{XidPlaces, XidRecord};
use gpuquota_enforcer::kernel::{Kernel, XidTracepoint};
use gpuquota_native_tests::{Actor, Bed, PATIENCE, binary};

const TWO: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\n[tenant.b]\ncgroup = \"@/b.slice\"\n";

/// `gpuquotactl monitor --json`, of faults alone.
struct Monitor {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Monitor {
    fn new(bed: &Bed) -> Self {
        let mut child = bed
            .command("gpuquotactl")
            .args(["--bus", &bed.bus(), "monitor", "--json"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("gpuquotactl");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut monitor = Self { child, lines };
        // A reload is told to everybody who listens: then this one does.
        let end = Instant::now() + PATIENCE;
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let line = monitor.next_line();
                sender.send(()).expect("waited for");
                assert!(line.contains("policy-loaded"), "{line}");
            });
            while receiver.recv_timeout(Duration::from_millis(200)).is_err() {
                assert!(Instant::now() < end, "nothing is heard:\n{}", bed.log());
                assert!(bed.ctl(&["reload"]).status.success());
            }
        });
        monitor
    }

    fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("readable");
        line
    }

    /// The next fault.
    fn fault(&mut self) -> serde_json::Value {
        loop {
            let line = self.next_line();
            let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            if value["event"] == "xid" {
                return value;
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn user(bed: &Bed, tenant: &str) -> Actor {
    let mut actor = bed.actor(tenant);
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    actor
}

fn raise(bed: &Bed, xid: u32, pid: u32) {
    bed.sim
        .control(&format!("xid 0 {xid} {pid}"))
        .expect("raised");
}

fn is_frozen(bed: &Bed, tenant: &str) -> bool {
    let time = bed.usage(tenant, 0).time;
    time.is_some_and(|time| !time.frozen.is_empty())
}

fn becomes_frozen(bed: &Bed, tenant: &str, wanted: bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while is_frozen(bed, tenant) != wanted && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    is_frozen(bed, tenant) == wanted
}

#[test]
fn a_fault_is_laid_to_the_process_that_the_driver_names() {
    let bed = Bed::new(TWO);
    let (a, b) = (user(&bed, "a"), user(&bed, "b"));
    let mut monitor = Monitor::new(&bed);
    raise(&bed, 31, a.workload_pid());
    let fault = monitor.fault();
    assert_eq!((&fault["tenant"], &fault["xid"]), (&"a".into(), &31.into()));
    assert_eq!(fault["pid"], a.workload_pid());
    assert_eq!(
        (&fault["certainty"], &fault["source"]),
        (&"process".into(), &"kernel-log".into())
    );
    assert_eq!(fault["action"], "notify");
    // One fault is one event: the next is the next.
    raise(&bed, 13, b.workload_pid());
    let fault = monitor.fault();
    assert_eq!((&fault["tenant"], &fault["xid"]), (&"b".into(), &13.into()));
    // The driver does not know who: everybody on that GPU, and it says so.
    bed.sim.control("xid 0 79").expect("raised");
    let mut tenants = [monitor.fault(), monitor.fault()].map(|fault| {
        assert_eq!(fault["certainty"], "gpu");
        assert_eq!(fault["pid"], 0);
        fault["tenant"].as_str().expect("a name").to_owned()
    });
    tenants.sort();
    assert_eq!(tenants, ["a", "b"]);
    // Nobody is on the other one.
    bed.sim.control("xid 1 79").expect("raised");
    let fault = monitor.fault();
    assert_eq!((&fault["tenant"], &fault["gpu"]), (&"".into(), &1.into()));
    let log = bed.log();
    assert!(
        log.contains("a GPU fault") && log.contains("xid=31"),
        "{log}"
    );
    let doctor = bed.ctl(&["doctor"]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(
        text.contains("heard of by kernel-log, with their process"),
        "{text}"
    );
}

#[test]
fn the_tenant_is_frozen_for_the_codes_that_the_policy_names() {
    let bed = Bed::new(
        "[class.strict]\nfault.on-xid = \"freeze\"\n\
         [tenant.a]\ncgroup = \"@/a.slice\"\nclass = \"strict\"\nfault.xids = [13, 45]\n\
         [tenant.b]\ncgroup = \"@/b.slice\"\nclass = \"strict\"\n",
    );
    let (a, b) = (user(&bed, "a"), user(&bed, "b"));
    let mut monitor = Monitor::new(&bed);
    // Not in its list, though in the built-in one.
    raise(&bed, 31, a.workload_pid());
    assert_eq!(monitor.fault()["action"], "notify");
    // Nobody is frozen for what is only known to be on the GPU.
    bed.sim.control("xid 0 13").expect("raised");
    assert_eq!(monitor.fault()["action"], "notify");
    assert_eq!(monitor.fault()["action"], "notify");
    assert!(!is_frozen(&bed, "a") && !is_frozen(&bed, "b"));
    raise(&bed, 45, a.workload_pid());
    assert_eq!(monitor.fault()["action"], "freeze");
    assert!(becomes_frozen(&bed, "a", true), "{}", bed.log());
    assert!(!is_frozen(&bed, "b"));
    assert!(bed.ctl(&["thaw", "a"]).status.success());
    assert!(becomes_frozen(&bed, "a", false), "{}", bed.log());
    // The class's word, and the built-in list.
    raise(&bed, 31, b.workload_pid());
    assert_eq!(monitor.fault()["action"], "freeze");
    assert!(becomes_frozen(&bed, "b", true), "{}", bed.log());
}

#[test]
fn the_process_is_ended_and_no_other() {
    let bed = Bed::new("[tenant.a]\ncgroup = \"@/a.slice\"\nfault.on-xid = \"kill\"\n");
    let (mut guilty, mut other) = (user(&bed, "a"), user(&bed, "a"));
    raise(&bed, 31, guilty.workload_pid());
    assert_eq!(guilty.wait(), Some(128 + libc::SIGTERM));
    assert_eq!(other.tell("alloc 1GiB"), "allocated 1073741824");
    assert_eq!(other.finish(), Some(0));
}

/// A workload of tenant `a` that calls itself `name`, which the kernel cuts to fifteen bytes.
fn called(bed: &Bed, name: &str) -> Actor {
    let path = bed.sim.scratch().join(name);
    fs::copy(binary("simtenant"), &path).expect("a copy");
    let mut command = bed.run_command("a");
    command.arg(path).arg("interactive");
    let mut actor = Actor::start(command);
    assert_eq!(actor.tell("alloc 1GiB"), "allocated 1073741824");
    actor
}

#[test]
fn no_tenant_can_lay_a_fault_to_another() {
    let bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\n[tenant.b]\ncgroup = \"@/b.slice\"\nfault.on-xid = \"kill\"\n",
    );
    let mut victim = user(&bed, "b");
    let pid = victim.workload_pid();
    let mut monitor = Monitor::new(&bed);
    // By names of its own.
    for name in [
        format!("x, pid={pid},"),
        format!("x\npid={pid},"),
        "a\nNVRM: Xid (P".to_owned(),
    ] {
        let actor = called(&bed, &name);
        raise(&bed, 31, actor.workload_pid());
        let fault = monitor.fault();
        assert_eq!(fault["tenant"], "a", "{name}");
        assert_eq!(fault["pid"], actor.workload_pid(), "{name}");
        let message = fault["message"].as_str().expect("a text");
        assert!(
            !message.contains('\n') && message.contains("name="),
            "{message}"
        );
    }
    // By lines in the log: what user space writes there has another facility than the kernel's.
    let mut log = OpenOptions::new()
        .append(true)
        .open(bed.sim.kernel_log())
        .expect("the log");
    for head in ["12,7,7,-;", "11,7,7,-;", "3,7,7,-;[4711] ", ""] {
        writeln!(
            log,
            "{head}NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=x"
        )
        .expect("written");
    }
    // What came before this was read before this.
    bed.sim.control("xid 1 79").expect("raised");
    assert_eq!(monitor.fault()["gpu"], 1);
    assert_eq!(victim.tell("alloc 1GiB"), "allocated 1073741824");
}

#[test]
fn nvml_names_no_process_and_nobody_is_accused() {
    let mut bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nfault.on-xid = \"kill\"\n[tenant.b]\ncgroup = \"@/b.slice\"\n",
    );
    bed.signal_daemon(libc::SIGTERM);
    let folder = bed.settings().with_extension("toml.d");
    fs::create_dir(&folder).expect("a folder");
    fs::write(
        folder.join("10-faults.toml"),
        "[faults]\nsource = \"auto\"\n",
    )
    .expect("settings");
    bed.start();
    let doctor = bed.ctl(&["doctor"]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(
        text.contains("heard of by nvml, which names no process"),
        "{text}"
    );
    assert!(
        text.contains("not by tracepoint: ") && text.contains("not by kernel-log: "),
        "{text}"
    );
    let mut a = user(&bed, "a");
    let mut monitor = Monitor::new(&bed);
    // NVML's events begin when the daemon has registered for them.
    let end = Instant::now() + PATIENCE;
    let (sender, receiver) = std::sync::mpsc::channel();
    let fault = thread::scope(|scope| {
        scope.spawn(|| sender.send(monitor.fault()).expect("waited for"));
        loop {
            raise(&bed, 31, a.workload_pid());
            match receiver.recv_timeout(Duration::from_millis(500)) {
                Ok(fault) => break fault,
                Err(_) => assert!(Instant::now() < end, "nothing is heard:\n{}", bed.log()),
            }
        }
    });
    assert_eq!(
        (&fault["tenant"], &fault["certainty"]),
        (&"a".into(), &"gpu".into())
    );
    assert_eq!(
        (&fault["pid"], &fault["action"]),
        (&0.into(), &"notify".into())
    );
    assert_eq!(a.tell("alloc 1GiB"), "allocated 1073741824");
}

/// The field of a tracepoint, from its format.
fn place(format: &str, field: &str) -> u32 {
    format
        .lines()
        .find(|line| line.contains(&format!(" {field};")))
        .and_then(|line| line.split("offset:").nth(1))
        .and_then(|rest| rest.split(';').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {field} in {format}"))
}

/// There is no tracepoint of a GPU here, but others have a word and a text as it has: the program reads them from where the
/// format says that they are.
#[test]
fn the_program_reads_a_tracepoint_by_its_format() {
    let format = fs::read_to_string("/sys/kernel/tracing/events/sched/sched_process_exec/format")
        .expect("tracefs");
    let tracepoint = XidTracepoint {
        group: "sched",
        event: "sched_process_exec",
        places: XidPlaces {
            device: place(&format, "filename"),
            code: place(&format, "pid"),
            message: place(&format, "filename"),
            reserved: 0,
        },
    };
    let (kernel, _events) = Kernel::attach(None).expect("the kernel side");
    let mut ring = kernel.watch_xids(&tracepoint).expect("attached");
    assert!(ring.as_raw_fd() >= 0);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("told-by-the-tracepoint");
    fs::copy("/bin/true", &path).expect("a copy");
    let child = Command::new(&path).spawn().expect("started");
    let pid = child.id();
    child.wait_with_output().expect("waited for");
    let mut found = None;
    while let Some(item) = ring.next() {
        assert_eq!(item.len(), size_of::<XidRecord>());
        // SAFETY: the length was checked, and every bit pattern is a record.
        let record: XidRecord = unsafe { std::ptr::read_unaligned(item.as_ptr().cast()) };
        if record.code == pid {
            found = Some(record);
        }
    }
    let record = found.expect("the process was told");
    let wanted = path.to_str().expect("UTF-8").as_bytes();
    assert_eq!(&record.message[..=wanted.len()], [wanted, b"\0"].concat());
    // Longer than its place: cut, and ended.
    let room = record.device.len() - 1;
    assert_eq!(record.device[..room], wanted[..room]);
    assert_eq!(record.device[room], 0);
    assert!(record.at_ns > 0);
}
