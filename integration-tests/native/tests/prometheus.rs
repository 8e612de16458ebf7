//! The shipped dashboard and alert rules, loaded into a real Prometheus that scrapes the daemon.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::{Bed, PATIENCE, tool};
use serde_json::Value;

/// A file of the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
        .canonicalize()
        .expect("a file of the repository")
}

struct Prometheus {
    child: Child,
    address: String,
}

impl Prometheus {
    fn start(folder: &Path, target: &str) -> Self {
        let address = {
            let free = TcpListener::bind("127.0.0.1:0").expect("a port");
            free.local_addr().expect("an address").to_string()
        };
        let config = folder.join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [\"{}\"]\n\
             scrape_configs:\n- {{job_name: gpuquota, static_configs: [{{targets: [\"{target}\"]}}]}}\n",
            repository("config/prometheus-rules.yaml").display()
        );
        fs::write(&config, text).expect("written");
        let log = fs::File::create(folder.join("prometheus.log")).expect("a log");
        let child = Command::new(tool("prometheus"))
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus");
        Self { child, address }
    }

    /// Asks the HTTP API; `None` while it does not answer.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        serde_json::from_str(body).ok()
    }

    /// Asks until the answer is as wanted.
    fn wait(&self, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.get(path);
            if let Some(answer) = &answer
                && wanted(answer)
            {
                return answer.clone();
            }
            assert!(Instant::now() < end, "{path}: {answer:?}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn query(&self, expression: &str) -> Value {
        let encoded = expression
            .bytes()
            .fold(String::new(), |text, byte| format!("{text}%{byte:02x}"));
        self.wait(&format!("/api/v1/query?query={encoded}"), |answer| {
            answer["status"].is_string()
        })
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A dashboard's expression with every choice set to "all".
fn chosen(expression: &str) -> String {
    expression
        .replace("$__rate_interval", "10s")
        .replace("$instance", ".*")
        .replace("$tenant", ".*")
        .replace("$gpu", ".*")
}

#[test]
fn dashboard_and_alerts_work_in_a_real_prometheus() {
    let mut bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"3GiB\"\nmemory.high = \"1GiB\"\nlaunch.max = \"1M/s\"\n",
    );
    let address = bed.offer_metrics();
    let prometheus = Prometheus::start(bed.sim.scratch(), &address);
    prometheus.wait("/api/v1/targets", |answer| {
        answer["data"]["activeTargets"][0]["health"] == "up"
    });
    let mut actor = bed.actor("a");
    assert!(actor.tell("alloc 2GiB").starts_with("allocated"));
    assert!(actor.tell("alloc 2GiB").starts_with("out of memory"));

    // What the tenant does comes through.
    let used = bed.usage("a", 0).memory_used;
    let wanted = format!("gpuquota_tenant_memory_used_bytes{{tenant=\"a\"}} == {used}");
    let end = Instant::now() + PATIENCE;
    while prometheus.query(&wanted)["data"]["result"][0].is_null() {
        assert!(Instant::now() < end, "Prometheus never saw {used} bytes");
        thread::sleep(Duration::from_millis(100));
    }

    // Every panel asks something that Prometheus understands, and that is there.
    let dashboard: Value = serde_json::from_str(
        &fs::read_to_string(repository("config/grafana-dashboard.json")).expect("readable"),
    )
    .expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    assert!(panels.len() >= 20, "{}", panels.len());
    let end = Instant::now() + PATIENCE;
    for panel in panels {
        for target in panel["targets"].as_array().expect("targets") {
            let expression = chosen(target["expr"].as_str().expect("an expression"));
            // Rates need two scrapes.
            loop {
                let answer = prometheus.query(&expression);
                assert_eq!(answer["status"], "success", "{}: {answer}", panel["title"]);
                if answer["data"]["result"][0].is_object() {
                    break;
                }
                assert!(
                    Instant::now() < end,
                    "{} shows nothing: {expression}",
                    panel["title"]
                );
                thread::sleep(Duration::from_millis(200));
            }
        }
    }

    // Every rule is evaluated without an error, and the one that should be on its way is.
    let rules = prometheus.wait("/api/v1/rules", |answer| {
        let rules = answer["data"]["groups"][0]["rules"].as_array();
        rules.is_some_and(|rules| {
            !rules.is_empty()
                && rules.iter().all(|rule| rule["health"] != "unknown")
                && rules.iter().any(|rule| {
                    rule["name"] == "GpuquotaMemoryAboveHigh" && rule["state"] == "pending"
                })
        })
    });
    for rule in rules["data"]["groups"][0]["rules"]
        .as_array()
        .expect("rules")
    {
        assert_eq!(rule["health"], "ok", "{rule}");
        let expected = if rule["name"] == "GpuquotaMemoryAboveHigh" {
            "pending"
        } else {
            "inactive"
        };
        assert_eq!(rule["state"], expected, "{rule}");
    }
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    for arguments in [
        ["check", "rules", "config/prometheus-rules.yaml"],
        ["test", "rules", "packaging/prometheus-rules.test.yaml"],
    ] {
        let output = Command::new(tool("promtool"))
            .args(&arguments[..2])
            .arg(repository(arguments[2]))
            .output()
            .expect("promtool");
        assert!(
            output.status.success(),
            "{arguments:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
