//! Loading policy files: messages, merge, resolution.

use std::fmt::Write as _;
use std::time::Duration;

use gpuquota_policy::{
    Diagnostic, Factor, GpuSelector, Host, HostGpu, Key, Layer, Level, Limit, OnXid, Policy,
    Severity, Share, Size, Source, Xids,
};

fn source(path: &str, text: &str) -> Source {
    Source::new(path, Layer::Admin, text)
}

fn load(text: &str) -> Policy {
    match Policy::load(&[source("p.toml", text)], None) {
        Ok(loaded) => loaded.policy,
        Err(found) => panic!("{found}"),
    }
}

/// The messages of a policy, errors and warnings, each in one line.
fn messages(text: &str, host: Option<&Host>) -> String {
    let found: Vec<Diagnostic> = match Policy::load(&[source("p.toml", text)], host) {
        Ok(loaded) => loaded.warnings,
        Err(found) => found.into_vec(),
    };
    let mut out = String::new();
    for one in found {
        let _ = write!(
            out,
            "{}:{}: {}: {}",
            one.line, one.col, one.severity, one.message
        );
        if let Some(related) = one.related {
            let _ = write!(
                out,
                " [{}:{}: {}]",
                related.line, related.col, related.message
            );
        }
        out.push('\n');
    }
    out
}

fn gpu(index: u32) -> HostGpu {
    HostGpu {
        index,
        uuid: format!("GPU-8b3f1c2e-0d5a-4e6f-9a1b-00000000000{index}"),
        memory: 80 << 30,
    }
}

fn host() -> Host {
    Host {
        gpus: vec![gpu(0), gpu(1)],
    }
}

#[test]
fn all_mistakes_of_all_files_are_reported_at_once() {
    let sources = [
        source("10-classes.toml", include_str!("mistakes/10-classes.toml")),
        source("50-teams.toml", include_str!("mistakes/50-teams.toml")),
        source("60-merged.toml", include_str!("mistakes/60-merged.toml")),
        source("70-syntax.toml", include_str!("mistakes/70-syntax.toml")),
    ];
    let found = Policy::load(&sources, None).expect_err("mistakes");
    insta::assert_snapshot!(found);
}

#[test]
fn the_example_of_the_design_loads() {
    let policy = load(
        r#"
[class.guaranteed]
priority = 100
time.weight = 800
[class.best-effort]
priority = 0
time.weight = 10

[tenant.vision]
cgroup = "/gpu.slice/vision.slice"
class = "guaranteed"
memory.max  = "40GiB"
memory.high = "36GiB"
memory.on-max  = "deny"
memory.on-high = "notify"
launch.max = "20000/s"
launch.burst = 500
launch.on-max = "delay"
time.weight = 300
time.max = "50%"

[tenant.vision.gpu."GPU-8b3f1c2e-0d5a-4e6f-9a1b-000000000001"]
memory.max = "70GiB"
"#,
    );
    let first = policy.effective("vision", &gpu(0)).expect("tenant");
    assert_eq!(
        (first.class.as_str(), first.priority, first.exclusive),
        ("guaranteed", 100, false)
    );
    assert_eq!(
        (first.memory.max, first.memory.high, first.memory.min),
        (Some(40 << 30), Some(36 << 30), 0)
    );
    assert_eq!(first.launch.max.map(|rate| rate.nanos_for(1)), Some(50_000));
    assert_eq!((first.launch.burst, first.time.weight), (500, 300));
    assert_eq!(
        first.time.max.map(gpuquota_policy::Percent::basis_points),
        Some(5_000)
    );
    let second = policy.effective("vision", &gpu(1)).expect("tenant");
    assert_eq!(second.memory.max, Some(70 << 30));
    assert_eq!(policy.effective("other", &gpu(0)), None);
}

#[test]
fn every_key_is_read() {
    let policy = load(
        r#"
[class.night]
priority = 7
exclusive = true
[class.night.gpu."0"]
time.max = "9%"
[tenant.a]
cgroup = "/a"
class = "night"
[tenant.a.memory]
max = "10GiB"
high = "9GiB"
min = "1GiB"
on-max = "wait"
on-high = "freeze"
wait-timeout = "2m"
managed = "ignore"
context = false
host = "3GB"
on-breach = "notify"
[tenant.a.launch]
max = "1.2M/min"
burst = 7
on-max = "deny"
patience = "3s"
pace = "spin"
graph-cost = "nodes"
[tenant.a.time]
weight = 5
max = "12.5%"
starve-max = "250ms"
latency-target = "10ms"
[tenant.a.fault]
on-xid = "freeze"
xids = [13, 0x1f]
[tenant.a.anomaly]
factor = 2.5
[tenant.a.insight]
budget = "0.25%"
profile = true
"#,
    );
    let tenant = &policy.tenants["a"];
    assert_eq!(tenant.limits.iter().count(), Key::ALL.len());
    let budget = policy.effective("a", &gpu(0)).expect("tenant");
    assert_eq!((budget.priority, budget.exclusive), (7, true));
    assert_eq!(budget.memory.wait_timeout, Duration::from_mins(2));
    assert_eq!(budget.memory.host, Some(3_000_000_000));
    assert!(!budget.memory.context);
    assert_eq!(budget.time.latency_target, Some(Duration::from_millis(10)));
    assert_eq!(budget.fault.on_xid, OnXid::Freeze);
    assert_eq!(budget.fault.xids, Xids::of([13, 31]));
    assert_eq!(Some(budget.profile.factor), Factor::from_hundredths(250));
    assert_eq!(Some(budget.profile.budget), Share::from_basis_points(25));
    assert!(budget.profile.always);
    // The tenant's own value beats its class's for one GPU.
    assert_eq!(
        budget.time.max.map(gpuquota_policy::Percent::basis_points),
        Some(1_250)
    );
    assert_eq!(load(&policy.to_toml()), policy);
}

#[test]
fn what_nobody_says_is_the_default() {
    let policy = load(
        "[tenant.a]\ncgroup = \"/a\"\n[tenant.b]\ncgroup = \"/b\"\nclass = \"best-effort\"\nlaunch.max = \"100k/s\"\n",
    );
    insta::assert_debug_snapshot!((
        policy.effective("a", &gpu(0)),
        policy.effective("b", &gpu(0))
    ));
}

#[test]
fn the_more_specific_value_wins() {
    let policy = load(
        r#"
[class.guaranteed]
memory.max = "1GiB"
[class.guaranteed.gpu."*"]
memory.max = "2GiB"
[class.guaranteed.gpu."0"]
memory.max = "3GiB"
[tenant.by-class]
cgroup = "/by-class"
class = "guaranteed"
[tenant.by-tenant]
cgroup = "/by-tenant"
class = "guaranteed"
memory.max = "4GiB"
[tenant.by-gpu]
cgroup = "/by-gpu"
class = "guaranteed"
memory.max = "4GiB"
gpu."*" = { memory.max = "5GiB" }
gpu."0" = { memory.max = "6GiB" }
gpu."GPU-8b3f1c2e-0d5a-4e6f-9a1b-000000000000" = { memory.max = "7GiB" }
gpu."1" = { memory.high = "1GiB" }
[tenant.lifted]
cgroup = "/lifted"
class = "guaranteed"
memory.max = "max"
"#,
    );
    let max = |tenant: &str, index| {
        policy
            .effective(tenant, &gpu(index))
            .expect("tenant")
            .memory
            .max
            .map(|bytes| bytes >> 30)
    };
    assert_eq!((max("by-class", 0), max("by-class", 1)), (Some(3), Some(2)));
    assert_eq!(
        (max("by-tenant", 0), max("by-tenant", 1)),
        (Some(4), Some(4))
    );
    assert_eq!((max("by-gpu", 0), max("by-gpu", 1)), (Some(7), Some(5)));
    assert_eq!(max("lifted", 0), None);
}

#[test]
fn explain_says_where_a_value_comes_from() {
    let sources = [
        source(
            "10.toml",
            "[class.guaranteed]\npriority = 90\n[class.guaranteed.gpu.\"1\"]\ntime.max = \"50%\"\n",
        ),
        source(
            "50.toml",
            "[tenant.a]\ncgroup = \"/a\"\nclass = \"guaranteed\"\nmemory.max = \"40GiB\"\nlaunch.max = \"5/s\"\n",
        ),
        source(
            "90.toml",
            "[tenant.a]\nmemory.max = \"50GiB\"\n[tenant.a.gpu.1]\nmemory.high = \"30GiB\"\n",
        ),
    ];
    let policy = Policy::load(&sources, None).expect("good").policy;
    let lines: Vec<String> = policy
        .explain("a", &gpu(1))
        .iter()
        .map(ToString::to_string)
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
    let max = policy
        .explain("a", &gpu(1))
        .into_iter()
        .find(|line| line.key == "memory.max")
        .expect("line");
    assert_eq!(max.level, Level::Tenant);
    assert_eq!(
        max.origin
            .map(|origin| (origin.path.display().to_string(), origin.line, origin.col)),
        Some(("90.toml".into(), 2, 14))
    );
    assert!(policy.explain("b", &gpu(0)).is_empty());
}

#[test]
fn later_files_win_key_by_key() {
    let sources = [
        source(
            "10.toml",
            "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"1GiB\"\nmemory.high = \"1GiB\"\n[tenant.a.gpu.\"0\"]\ntime.weight = 1\n",
        ),
        source(
            "20.toml",
            "tenant.a.memory.max = \"2GiB\"\ntenant.a.gpu.\"0\".time.max = \"10%\"\n",
        ),
        source("30.toml", "[tenant.a]\ncgroup = \"/b\"\n"),
    ];
    let policy = Policy::load(&sources, None).expect("good").policy;
    let tenant = &policy.tenants["a"];
    assert_eq!(tenant.cgroup.value.as_str(), "/b");
    assert_eq!(
        tenant.limits.memory_max.as_ref().map(|max| max.value),
        Some(Limit::At(Size(2 << 30)))
    );
    assert_eq!(
        tenant.limits.memory_high.as_ref().map(|high| high.value),
        Some(Limit::At(Size(1 << 30)))
    );
    let of_gpu = &tenant.gpu[&GpuSelector::Index(0)];
    assert!(of_gpu.time_weight.is_some() && of_gpu.time_max.is_some());
    assert_eq!(tenant.origin.to_string(), "10.toml:1:9");
}

#[test]
fn reservations_fit_on_the_card() {
    let text = r#"
[tenant.a]
cgroup = "/a"
memory.min = "50GiB"
[tenant.b]
cgroup = "/b"
[tenant.b.gpu."1"]
memory.min = "40GiB"
"#;
    assert_eq!(messages(text, None), "");
    assert_eq!(
        messages(text, Some(&host())),
        "4:14: error: the tenants reserve 90GiB of GPU 1, which has 80GiB\n"
    );
    // Exactly full is fine.
    assert_eq!(messages(&text.replace("40GiB", "30GiB"), Some(&host())), "");
}

#[test]
fn nested_reservations_count_once() {
    let text = r#"
[tenant.team]
cgroup = "/team"
memory.min = "60GiB"
[tenant.one]
cgroup = "/team/one"
memory.min = "30GiB"
[tenant.jobs]
cgroup = "/team/jobs/job-*"
memory.min = "25GiB"
"#;
    assert_eq!(messages(text, Some(&host())), "");
    let more = text.replace("25GiB", "51GiB");
    assert_eq!(
        messages(&more, Some(&host())),
        "4:14: error: the tenants reserve 81GiB of GPU 0, 1, which has 80GiB\n"
    );
    let capped = text.replace("memory.min = \"60GiB\"", "memory.max = \"50GiB\"");
    assert_eq!(
        messages(&capped, Some(&host())),
        "4:14: error: the tenants below \"team\" reserve 55GiB, more than its memory.max = 50GiB \
         [7:14: the largest of them, memory.min = 30GiB]\n"
    );
}

#[test]
fn gpus_that_are_not_there_are_a_warning() {
    let text = r#"
[tenant.a]
cgroup = "/a"
gpu."7".memory.max = "3GiB"
gpu."GPU-ffffffff-0d5a-4e6f-9a1b-000000000000".memory.max = "3GiB"
gpu."1".memory.max = "4GiB"
gpu."*".time.weight = 3
"#;
    assert_eq!(messages(text, None), "");
    assert_eq!(
        messages(text, Some(&host())),
        "4:5: warning: GPU \"7\" is not on this host; the rest of the policy holds\n\
         5:5: warning: GPU \"GPU-ffffffff-0d5a-4e6f-9a1b-000000000000\" is not on this host; the rest of the policy holds\n"
    );
}

#[test]
fn what_holds_for_all_gpus_together_is_a_warning_for_a_single_one() {
    let text = r#"
[class.c]
gpu."0".launch.max = "9/s"
[tenant.a]
cgroup = "/a"
gpu."*".launch.max = "7/s"
gpu."*".anomaly.factor = 2
gpu."0".insight.profile = true
gpu."0".anomaly.factor = 3
gpu."0".memory.max = "3GiB"
"#;
    assert_eq!(
        messages(text, None),
        "3:22: warning: launch.max has no effect for a single GPU\n\
         8:27: warning: insight.profile has no effect for a single GPU\n\
         9:26: warning: anomaly.factor has no effect for a single GPU\n"
    );
}

#[test]
fn one_gpu_named_twice_is_a_warning() {
    let text = r#"
[tenant.a]
cgroup = "/a"
gpu."1".memory.max = "3GiB"
gpu."GPU-8b3f1c2e-0d5a-4e6f-9a1b-000000000001".memory.max = "4GiB"
"#;
    assert_eq!(
        messages(text, Some(&host())),
        "4:22: warning: memory.max = \"3GiB\" for GPU 1 has no effect: the table of its UUID says \"4GiB\" [5:61: memory.max = \"4GiB\"]\n"
    );
}

#[test]
fn limits_are_compared_where_they_meet() {
    // The index has one half, the UUID the other: only the host tells that they are one GPU.
    let text = r#"
[tenant.a]
cgroup = "/a"
gpu."1".memory.high = "5GiB"
gpu."GPU-8b3f1c2e-0d5a-4e6f-9a1b-000000000001".memory.max = "4GiB"
"#;
    assert_eq!(messages(text, None), "");
    assert_eq!(
        messages(text, Some(&host())),
        "5:61: error: memory.high = 5GiB is above memory.max = 4GiB [4:23: memory.high = 5GiB]\n"
    );
    // From the class.
    let text = "[class.c]\nmemory.high = \"5GiB\"\n[tenant.a]\ncgroup = \"/a\"\nclass = \"c\"\nmemory.max = \"4GiB\"\n";
    assert_eq!(
        messages(text, None),
        "6:14: error: memory.high = 5GiB is above memory.max = 4GiB [2:15: memory.high = 5GiB]\n"
    );
    assert_eq!(
        messages(
            &text.replace("max = \"4GiB\"", "max = \"4GiB\"\nmemory.high = \"max\""),
            None
        ),
        ""
    );
    // A class by itself, without a tenant.
    let text = "[class.c]\nmemory.max = \"4GiB\"\nmemory.min = \"5GiB\"\n";
    assert_eq!(
        messages(text, None),
        "3:14: error: memory.min = 5GiB is above memory.max = 4GiB [2:14: memory.max = 4GiB]\n"
    );
}

#[test]
fn little_memory_is_a_warning_where_contexts_are_charged() {
    let text = "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"500MiB\"\n";
    assert!(
        messages(text, None)
            .starts_with("3:14: warning: memory.max = 500MiB leaves little or nothing")
    );
    assert_eq!(
        messages(&format!("{text}memory.context = false\n"), None),
        ""
    );
    assert_eq!(messages(&text.replace("500MiB", "600MiB"), None), "");
    assert_eq!(messages(&text.replace("\"500MiB\"", "0"), None), "");
    assert_eq!(
        messages(&text.replace("500MiB", "2MiB"), None)
            .lines()
            .count(),
        1
    );
    assert!(
        messages(&text.replace("\"500MiB\"", "2097151"), None)
            .starts_with("3:14: error: memory.max = 2097151: no allocation fits")
    );
}

#[test]
fn bytes_that_are_no_text_are_reported() {
    let sources = [
        Source::new(
            "a.toml",
            Layer::Admin,
            b"[tenant.a]\ncgroup = \"/\xc3\x28\"\ny = 1\n".as_slice(),
        ),
        source("b.toml", "[tenant.b]\ncgroup = \"/b\"\nx = 1\n"),
    ];
    let found = Policy::load(&sources, None).expect_err("not text");
    let found: Vec<_> = found
        .iter()
        .map(|one| {
            (
                one.path.display().to_string(),
                one.line,
                one.col,
                one.message.as_str(),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("a.toml".into(), 2, 12, "the file is not UTF-8: byte 0xc3"),
            ("a.toml".into(), 3, 1, "unknown key \"y\" in a tenant"),
            ("b.toml".into(), 3, 1, "unknown key \"x\" in a tenant")
        ]
    );
}

#[test]
fn empty_files_are_fine() {
    for text in [
        "",
        "\n",
        "# nothing\n",
        "\u{feff}",
        "[tenant]\n",
        "[class.a]\n",
    ] {
        let loaded = Policy::load(&[source("p.toml", text)], Some(&host())).expect(text);
        assert!(loaded.policy.tenants.is_empty() && loaded.warnings.is_empty());
    }
    assert_eq!(
        Policy::load(&[], None).expect("nothing").policy,
        Policy::default()
    );
}

#[test]
fn huge_files_are_refused() {
    let text = vec![b'#'; gpuquota_policy::MAX_FILE_BYTES + 1];
    let found =
        Policy::load(&[Source::new("p.toml", Layer::Admin, text)], None).expect_err("too long");
    assert_eq!((found.len(), found.error_count()), (1, 1));
}

#[test]
fn what_a_broken_file_may_define_is_not_missed_elsewhere() {
    let sources = [
        source("a.toml", "[class.night\npriority = 1\n"),
        source(
            "b.toml",
            "[tenant.b]\ncgroup = \"/b\"\nclass = \"night\"\n[tenant.speech]\nclass = \"burst\"\n",
        ),
    ];
    let found = Policy::load(&sources, None).expect_err("syntax");
    let found: Vec<_> = found
        .iter()
        .map(|one| (one.path.display().to_string(), one.line, one.severity))
        .collect();
    assert!(
        found
            .iter()
            .all(|(_, _, severity)| *severity == Severity::Error)
    );
    assert_eq!(
        found
            .iter()
            .map(|(path, line, _)| (path.as_str(), *line))
            .collect::<Vec<_>>(),
        [("a.toml", 1), ("b.toml", 4), ("b.toml", 5)]
    );
}

#[test]
fn nesting_follows_the_cgroups() {
    let policy = load(
        r#"
[tenant.top]
cgroup = "/gpu.slice"
[tenant.mid]
cgroup = "/gpu.slice/a/b"
[tenant.jobs]
cgroup = "/gpu.slice/a/b/job-*"
[tenant.step]
cgroup = "/gpu.slice/a/b/job-1/step"
[tenant.other]
cgroup = "/gpu.slice2/a"
"#,
    );
    let nesting = policy.nesting();
    assert_eq!(nesting["top"], [""; 0]);
    assert_eq!(nesting["mid"], ["top"]);
    assert_eq!(nesting["jobs"], ["mid", "top"]);
    assert_eq!(nesting["step"], ["jobs", "mid", "top"]);
    assert_eq!(nesting["other"], [""; 0]);
    let of = |path: &str| policy.tenant_of(path).map(|tenant| tenant.name.as_str());
    assert_eq!(of("/gpu.slice/a/b/job-1/step/x"), Some("step"));
    assert_eq!(of("/gpu.slice/a/b/job-2/step"), Some("jobs"));
    assert_eq!(of("/gpu.slice/a"), Some("top"));
    assert_eq!(of("/gpu.slice2"), None);
    assert_eq!(of("/"), None);
}
