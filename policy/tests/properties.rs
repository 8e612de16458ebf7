//! Properties of the policy language, against models that share no code with it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use gpuquota_policy::{
    CgroupPattern, Diagnostics, Host, HostGpu, Key, Layer, Loaded, Policy, Source, dropin,
    merge_order, property,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn gpu(index: u32) -> HostGpu {
    HostGpu {
        index,
        uuid: uuid(index),
        memory: 1 << 40,
    }
}

fn uuid(index: u32) -> String {
    format!("GPU-8b3f1c2e-0d5a-4e6f-9a1b-00000000000{index}")
}

fn host() -> Host {
    Host {
        gpus: vec![gpu(0), gpu(1)],
    }
}

fn load(text: &str) -> Policy {
    match Policy::load(&[Source::new("p.toml", Layer::Admin, text)], Some(&host())) {
        Ok(loaded) => loaded.policy,
        Err(found) => panic!("{text}\n{found}"),
    }
}

/// Loads and checks what must hold for any input.
fn load_anything(sources: &[Source], host: Option<&Host>) -> Result<Loaded, Diagnostics> {
    let result = Policy::load(sources, host);
    let found: Vec<_> = match &result {
        Ok(loaded) => loaded.warnings.iter().collect(),
        Err(found) => {
            assert!(found.error_count() > 0, "refused without an error");
            found.iter().collect()
        }
    };
    let order = |path: &std::path::Path| {
        sources
            .iter()
            .position(|source| source.path == path)
            .expect("a file that was given")
    };
    assert!(found.is_sorted_by_key(|one| (order(&one.path), one.line, one.col)));
    for one in found {
        let text = String::from_utf8_lossy(&sources[order(&one.path)].text).into_owned();
        let line = text
            .split('\n')
            .nth(one.line as usize - 1)
            .expect("a line of the file");
        assert!(one.col as usize <= line.chars().count() + 1, "{one}");
        assert!(!one.message.is_empty());
        let shown = one.render();
        assert!(
            !shown.chars().any(|c| c.is_control() && c != '\n'),
            "{shown:?}"
        );
        // The caret stands below the line and not behind its end.
        let lines: Vec<&str> = shown.lines().collect();
        assert!(
            lines[2].contains('^')
                && lines[2].chars().count() <= lines[1].trim_end().chars().count().max(8) + 2,
            "{shown}"
        );
    }
    result
}

const SEEDS: [&str; 5] = [
    include_str!("mistakes/10-classes.toml"),
    include_str!("mistakes/50-teams.toml"),
    include_str!("mistakes/60-merged.toml"),
    include_str!("mistakes/70-syntax.toml"),
    "[class.c]\nmemory.max = \"40GiB\"\n[tenant.t]\ncgroup = '/a/**/b[x-z]?*'\nclass = \"c\"\n[tenant.t.gpu.\"*\"]\nlaunch = { max = \"5/s\", burst = 3 }\n",
];

const TOKENS: [&str; 32] = [
    "[",
    "]",
    "\"",
    "'",
    "\"\"\"",
    "=",
    ".",
    ",",
    "{",
    "}",
    "\n",
    "\r\n",
    "\t",
    "#",
    "tenant",
    "class",
    "gpu",
    "memory.max",
    "cgroup",
    "\"*\"",
    "0x",
    "1e9",
    "inf",
    "1979-05-27",
    "true",
    "99999999999999999999",
    "\"/a\"",
    "\u{feff}",
    "\u{202e}",
    "ä€",
    "\0",
    "\\u",
];

/// A seed with pieces cut out, doubled and put in.
fn mutated() -> impl Strategy<Value = String> {
    let edit = (any::<Index>(), any::<Index>(), select(&TOKENS[..]), 0..3u8);
    (select(&SEEDS[..]), prop::collection::vec(edit, 0..8)).prop_map(|(seed, edits)| {
        let mut chars: Vec<char> = seed.chars().collect();
        for (from, length, token, kind) in edits {
            let from = from.index(chars.len() + 1);
            let to = (from + length.index(20)).min(chars.len());
            match kind {
                0 => drop(chars.drain(from..to)),
                1 => {
                    let piece: Vec<char> = chars[from..to].to_vec();
                    chars.splice(from..from, piece);
                }
                _ => drop(chars.splice(from..from, token.chars())),
            }
        }
        chars.into_iter().collect()
    })
}

/// A value for each key that is allowed next to any value that this gives for other keys.
fn value(key: Key) -> BoxedStrategy<String> {
    let text = |values: &'static [&'static str]| select(values).prop_map(str::to_owned).boxed();
    match key {
        Key::MemoryMax => prop_oneof![
            Just("\"max\"".to_owned()),
            (100u32..200).prop_map(|n| format!("\"{n}GiB\""))
        ]
        .boxed(),
        Key::MemoryHigh => prop_oneof![
            Just("\"max\"".to_owned()),
            (50_000u64..100_000).prop_map(|n| format!("\"{n}MiB\""))
        ]
        .prop_map(|value| {
            if value == "\"max\"" {
                "\"50GB\"".to_owned()
            } else {
                value
            }
        })
        .boxed(),
        Key::MemoryMin => (0u64..40 << 30).prop_map(|n| n.to_string()).boxed(),
        Key::MemoryHost => prop_oneof![
            Just("\"max\"".to_owned()),
            (0u64..1 << 60).prop_map(|n| format!("\"{n} B\""))
        ]
        .boxed(),
        Key::MemoryOnMax => text(&["\"deny\"", "\"wait\"", "\"kill\""]),
        Key::MemoryOnHigh => text(&[
            "\"notify\"",
            "\"signal:USR1\"",
            "\"signal:WINCH\"",
            "\"reclaim\"",
            "\"freeze\"",
        ]),
        Key::MemoryManaged => text(&["\"charge\"", "\"deny\"", "\"ignore\""]),
        Key::MemoryContext | Key::InsightProfile => text(&["true", "false"]),
        Key::MemoryOnBreach => text(&["\"kill\"", "\"notify\""]),
        Key::FaultOnXid => text(&["\"notify\"", "\"freeze\"", "\"kill\""]),
        Key::FaultXids => text(&["[]", "[31]", "[13, 31, 79]"]),
        Key::AnomalyFactor => (101u32..=100_000)
            .prop_map(|n| format!("{}.{:02}", n / 100, n % 100))
            .boxed(),
        Key::InsightBudget => (1u32..=10_000)
            .prop_map(|n| format!("\"{}.{:02}%\"", n / 100, n % 100))
            .boxed(),
        Key::LaunchMax => (
            1u32..1_000_000,
            select(&["", "k"][..]),
            select(&["s", "min", "h"][..]),
        )
            .prop_map(|(n, k, per)| format!("\"{n}{k}/{per}\""))
            .boxed(),
        Key::LaunchBurst => (1u32..1_000_000_000).prop_map(|n| n.to_string()).boxed(),
        Key::LaunchOnMax => text(&["\"delay\"", "\"deny\""]),
        Key::LaunchPace => text(&["\"signal\"", "\"spin\"", "\"freeze\""]),
        Key::LaunchGraphCost => text(&["\"one\"", "\"nodes\""]),
        Key::TimeWeight => (1u32..=10_000).prop_map(|n| n.to_string()).boxed(),
        Key::TimeMax => (100u32..=10_000)
            .prop_map(|n| format!("\"{}.{:02}%\"", n / 100, n % 100))
            .boxed(),
        Key::MemoryWaitTimeout
        | Key::LaunchPatience
        | Key::TimeStarveMax
        | Key::TimeLatencyTarget => (0u64..80_000, 0u32..1000, select(&["us", "ms", "s"][..]))
            .prop_map(|(n, f, unit)| format!("\"{n}.{f:03}{unit}\""))
            .boxed(),
    }
}

fn assignment() -> impl Strategy<Value = (Key, String)> {
    select(Key::ALL).prop_flat_map(|key| value(key).prop_map(move |value| (key, value)))
}

/// Which table of limits: none is the tenant's or class's own.
fn gpu_key() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        3 => Just(None),
        1 => Just(Some("*".to_owned())),
        1 => Just(Some("0".to_owned())),
        1 => Just(Some("1".to_owned())),
        1 => Just(Some(uuid(0))),
    ]
}

/// What is written where: tenant or class, its name, GPU, key, value. Later ones win.
#[derive(Clone, Debug)]
struct Written {
    is_tenant: bool,
    name: usize,
    gpu: Option<String>,
    key: Key,
    value: String,
}

const TENANTS: [&str; 3] = ["a", "b.c", "d_e-F"];
const CLASSES: [&str; 3] = ["guaranteed", "own", "best-effort"];

fn written() -> impl Strategy<Value = Vec<Written>> {
    let one = (any::<bool>(), 0..3usize, gpu_key(), assignment()).prop_map(
        |(is_tenant, name, gpu, (key, value))| Written {
            is_tenant,
            name,
            gpu,
            key,
            value,
        },
    );
    prop::collection::vec(one, 0..40)
}

/// A policy file of what is written, and of the tenants with their classes.
fn file(written: &[Written], classes: &[Option<usize>; 3]) -> String {
    let mut last: BTreeMap<(String, &str), &str> = BTreeMap::new();
    let mut out = String::new();
    for (index, tenant) in TENANTS.iter().enumerate() {
        let _ = writeln!(out, "tenant.{tenant:?}.cgroup = \"/t{index}\"");
        if let Some(class) = classes[index] {
            let _ = writeln!(out, "tenant.{tenant:?}.class = {:?}", CLASSES[class]);
        }
    }
    out.push_str("class.own.priority = 3\n");
    for one in written {
        let (kind, name) = if one.is_tenant {
            ("tenant", TENANTS[one.name])
        } else {
            ("class", CLASSES[one.name])
        };
        let gpu = one
            .gpu
            .as_ref()
            .map_or(String::new(), |gpu| format!(".gpu.{gpu:?}"));
        last.insert(
            (format!("{kind}.{name:?}{gpu}"), one.key.name()),
            &one.value,
        );
    }
    for ((table, key), value) in last {
        let _ = writeln!(out, "{table}.{key} = {value}");
    }
    out
}

/// The documented precedence, by search in the list of what was written.
fn model(
    written: &[Written],
    class: Option<usize>,
    tenant: usize,
    gpu: u32,
    key: Key,
) -> Option<String> {
    let selectors = [
        Some(uuid(gpu)),
        Some(gpu.to_string()),
        Some("*".to_owned()),
        None,
    ];
    let places = [(true, Some(tenant)), (false, class)];
    for (is_tenant, name) in places {
        for selector in &selectors {
            let found = written.iter().rfind(|one| {
                one.is_tenant == is_tenant
                    && Some(one.name) == name
                    && one.gpu == *selector
                    && one.key == key
            });
            if let Some(found) = found {
                return Some(found.value.clone());
            }
        }
    }
    None
}

/// The value of one key that holds, as a policy file writes it.
fn normal(key: Key, value: &str) -> String {
    let policy = load(&format!("[tenant.x]\ncgroup = \"/x\"\n{key} = {value}\n"));
    let line = policy
        .explain("x", &gpu(0))
        .into_iter()
        .find(|line| line.key == key.name());
    line.expect("every key is explained").value
}

#[derive(Clone, Debug)]
struct File {
    layer: Layer,
    name: String,
    sets: Vec<(usize, u32)>,
}

fn files() -> impl Strategy<Value = Vec<File>> {
    let name = select(
        &[
            "10-a.toml",
            "20-b.toml",
            "20-B.toml",
            "9.toml",
            "b.toml",
            ".hidden.toml",
            "note.txt",
            "x.toml.bak",
        ][..],
    );
    let one = (
        select(&Layer::ALL[..]),
        name,
        prop::collection::vec((0..3usize, 1u32..10_000), 0..4),
    )
        .prop_map(|(layer, name, sets)| File {
            layer,
            name: name.to_owned(),
            sets,
        });
    prop::collection::vec(one, 0..12)
}

/// A pattern and paths over few letters, so that they meet often.
fn pattern_text() -> impl Strategy<Value = String> {
    let token = select(&["a", "b", "c", "*", "?", "[ab]", "[!a]", "[b-c]"][..]);
    let name = prop::collection::vec(token, 1..4).prop_map(|tokens| tokens.concat());
    let component = prop_oneof![4 => name, 1 => Just("**".to_owned())];
    prop::collection::vec(component, 1..4)
        .prop_map(|components| format!("/{}", components.join("/")))
        .prop_filter("** stands alone", |text| CgroupPattern::parse(text).is_ok())
}

/// One component of up to 3 parts.
fn short_pattern_text() -> impl Strategy<Value = String> {
    let token = select(&["a", "b", "c", "*", "?", "[ab]", "[!a]", "[b-c]"][..]);
    prop::collection::vec(token, 1..4)
        .prop_map(|tokens| format!("/{}", tokens.concat()))
        .prop_filter("** stands alone", |text| !text.contains("**"))
}

fn path_text() -> impl Strategy<Value = String> {
    prop::collection::vec("[abc]{1,3}", 1..5)
        .prop_map(|components| format!("/{}", components.join("/")))
}

/// Matching by the words of the documentation, tried out in every way.
fn matches_naively(pattern: &[&str], path: &[&str]) -> bool {
    match pattern.split_first() {
        None => path.is_empty(),
        Some((&"**", rest)) => {
            let least = usize::from(rest.iter().all(|part| *part == "**"));
            (least..=path.len()).any(|skip| {
                if least == 1 {
                    skip == path.len()
                } else {
                    matches_naively(rest, &path[skip..])
                }
            })
        }
        Some((first, rest)) => {
            path.first().is_some_and(|name| name_matches(first, name))
                && matches_naively(rest, &path[1..])
        }
    }
}

fn name_matches(pattern: &str, name: &str) -> bool {
    let Some(first) = pattern.chars().next() else {
        return name.is_empty();
    };
    match first {
        '*' => (0..=name.len()).any(|skip| name_matches(&pattern[1..], &name[skip..])),
        '?' => !name.is_empty() && name_matches(&pattern[1..], &name[1..]),
        '[' => {
            let end = pattern.find(']').expect("closed");
            let set = match &pattern[..=end] {
                "[ab]" => "ab",
                "[!a]" | "[b-c]" => "bc",
                other => panic!("{other}"),
            };
            name.chars().next().is_some_and(|c| set.contains(c))
                && name_matches(&pattern[end + 1..], &name[1..])
        }
        c => name.starts_with(c) && name_matches(&pattern[1..], &name[1..]),
    }
}

#[test]
fn no_caret_stands_behind_a_line_that_ends_in_white_space() {
    for text in [
        "\x0e\t \t",
        "a  ",
        "[tenant.a]\ncgroup =    \n",
        "\u{3000}\u{3000}",
    ] {
        let source = Source::new("0.toml", Layer::Admin, text);
        assert!(load_anything(&[source], None).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(files in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..4)) {
        let sources: Vec<Source> = files.into_iter().enumerate().map(|(n, text)| Source::new(format!("{n}.toml"), Layer::Admin, text)).collect();
        let _ = load_anything(&sources, Some(&host()));
    }

    #[test]
    fn no_text_panics(first in mutated(), second in mutated()) {
        let sources = [Source::new("1.toml", Layer::Vendor, first), Source::new("2.toml", Layer::Admin, second)];
        for host in [None, Some(&host())] {
            if let Ok(loaded) = load_anything(&sources, host) {
                let text = loaded.policy.to_toml();
                let again = load_anything(&[Source::new("p.toml", Layer::Admin, text.as_str())], host).expect("a printed policy loads");
                prop_assert_eq!(again.policy, loaded.policy);
            }
        }
    }

    /// What holds is found once for all GPUs that no table names, and is the same as if each were asked about.
    #[test]
    fn many_gpus_at_once_are_each_of_them(
        tables in prop::collection::vec((0..2_u8, select(&["*", "0", "1", "2", "uuid"][..]), 3..9_u32), 0..6),
        weight in 1..9_u32,
    ) {
        let mut text = format!("[class.c]\n[tenant.t]\ncgroup = \"/t\"\nclass = \"c\"\ntime.weight = {weight}\n");
        let mut seen = std::collections::BTreeSet::new();
        for (whose, gpu, size) in tables.iter().filter(|(whose, gpu, _)| seen.insert((*whose, *gpu))) {
            let of = if *whose == 0 { "tenant.t" } else { "class.c" };
            let gpu = if *gpu == "uuid" { uuid(1) } else { (*gpu).to_owned() };
            let _ = writeln!(text, "[{of}.gpu.\"{gpu}\"]\nmemory.max = \"{size}GiB\"\ntime.max = \"{size}%\"");
        }
        let policy = load(&text);
        let gpus = [gpu(0), gpu(1), gpu(2), gpu(3)];
        let each: Vec<_> = gpus.iter().map(|gpu| (gpu.index, policy.effective("t", gpu).expect("a tenant"))).collect();
        let on_gpus = policy.on_each(&gpus);
        prop_assert_eq!(on_gpus.memory("t"), each.iter().map(|(gpu, all)| (*gpu, all.memory.clone())).collect::<Vec<_>>());
        prop_assert_eq!(on_gpus.time("t"), each.iter().map(|(gpu, all)| (*gpu, all.time.clone())).collect::<Vec<_>>());
        prop_assert!(on_gpus.memory("nobody").is_empty());
    }

    #[test]
    fn no_property_panics(key in "\\PC{0,20}", value in "\\PC{0,20}", old in mutated()) {
        let _ = property::check(&key, &value);
        for key in property::names() {
            let _ = property::check(key, &value);
        }
        let _ = dropin::apply(Some(&old), "t", Some("*"), &[("memory.max".to_owned(), "5GiB".to_owned()), (key, value)]);
        if let Ok(new) = dropin::apply(Some(&old), "t", None, &[("time.weight".to_owned(), "5".to_owned())]) {
            prop_assert!(new.contains("weight"));
        }
    }

    #[test]
    fn a_printed_policy_reads_back(written in written(), classes in prop::array::uniform3(prop::option::of(0..3usize))) {
        let policy = load(&file(&written, &classes));
        let again = load(&policy.to_toml());
        prop_assert_eq!(&again, &policy);
        prop_assert_eq!(again.to_toml(), policy.to_toml());
        for tenant in TENANTS {
            for index in 0..2 {
                prop_assert_eq!(again.effective(tenant, &gpu(index)), policy.effective(tenant, &gpu(index)));
            }
        }
    }

    #[test]
    fn precedence_is_as_documented(written in written(), classes in prop::array::uniform3(prop::option::of(0..3usize))) {
        let policy = load(&file(&written, &classes));
        for (tenant, name) in TENANTS.iter().enumerate() {
            for index in 0..2 {
                let explained = policy.explain(name, &gpu(index));
                let budget = policy.effective(name, &gpu(index)).expect("tenant");
                for key in Key::ALL {
                    let line = explained.iter().find(|line| line.key == key.name()).expect("every key is explained");
                    match model(&written, classes[tenant], tenant, index, *key) {
                        Some(value) => {
                            prop_assert!(line.origin.is_some());
                            prop_assert_eq!(&line.value, &normal(*key, &value));
                        }
                        None => prop_assert!(line.origin.is_none(), "{}", line),
                    }
                }
                let shown = |key: Key| explained.iter().find(|line| line.key == key.name()).map(|line| line.value.clone());
                prop_assert_eq!(Some(budget.time.weight.to_string()), shown(Key::TimeWeight));
                prop_assert_eq!(Some(budget.launch.burst.to_string()), shown(Key::LaunchBurst));
                prop_assert_eq!(Some(budget.memory.on_high.to_string()), shown(Key::MemoryOnHigh));
                prop_assert_eq!(Some(budget.memory.context.to_string()), shown(Key::MemoryContext));
                prop_assert_eq!(Some(budget.launch.max.map_or("max".to_owned(), |rate| rate.to_string())), shown(Key::LaunchMax));
                prop_assert_eq!(Some(budget.time.max.map_or("max".to_owned(), |max| max.to_string())), shown(Key::TimeMax));
                prop_assert_eq!(
                    Some(budget.memory.max.map_or("max".to_owned(), |max| gpuquota_policy::Size(max).to_string())),
                    shown(Key::MemoryMax)
                );
            }
        }
    }

    #[test]
    fn files_merge_as_documented(files in files()) {
        // What is on disk: one file of a name per directory, the last one written.
        let mut disk: BTreeMap<(Layer, String), Vec<(usize, u32)>> = BTreeMap::new();
        for file in files {
            disk.insert((file.layer, file.name), file.sets);
        }
        // The documentation: directories in order; in each, *.toml by name; a file whose name a later directory has is not read.
        let mut want: [Option<u32>; 3] = [None; 3];
        for layer in [Layer::Vendor, Layer::Admin, Layer::Runtime] {
            for ((of, name), sets) in &disk {
                let masked = disk.keys().any(|(other, same)| other > &layer && same == name);
                if *of == layer && !masked && name.strip_suffix(".toml").is_some() && !name.starts_with('.') {
                    for (tenant, weight) in sets {
                        want[*tenant] = Some(*weight);
                    }
                }
            }
        }
        let path = |layer: Layer, name: &str| PathBuf::from(layer.directory()).join(name);
        let listed: Vec<(Layer, PathBuf)> = disk.keys().rev().map(|(layer, name)| (*layer, path(*layer, name))).collect();
        let mut sources: Vec<Source> = merge_order(&listed)
            .into_iter()
            .map(|(layer, at)| {
                let sets = &disk[&(layer, at.file_name().and_then(|name| name.to_str()).expect("name").to_owned())];
                let mut last: BTreeMap<usize, u32> = BTreeMap::new();
                last.extend(sets.iter().copied());
                let mut text = String::new();
                for (tenant, weight) in last {
                    let _ = writeln!(text, "tenant.t{tenant}.time.weight = {weight}");
                }
                Source::new(at, layer, text)
            })
            .collect();
        sources.insert(0, Source::new("base", Layer::Vendor, "tenant.t0.cgroup = \"/0\"\ntenant.t1.cgroup = \"/1\"\ntenant.t2.cgroup = \"/2\"\n"));
        let policy = Policy::load(&sources, None).expect("good").policy;
        for (tenant, want) in want.iter().enumerate() {
            let got = policy.tenants[&format!("t{tenant}")].limits.time_weight.as_ref().map(|weight| weight.value.get());
            prop_assert_eq!(got, *want);
        }
    }

    #[test]
    fn patterns_match_as_documented(text in pattern_text(), path in path_text()) {
        let pattern = CgroupPattern::parse(&text).expect("filtered");
        let parts: Vec<&str> = text[1..].split('/').collect();
        let names: Vec<&str> = path[1..].split('/').collect();
        let want = matches_naively(&parts, &names);
        prop_assert_eq!(pattern.matches(&path), want, "{} {}", text, path);
        if want {
            let prefix = pattern.literal_prefix();
            let below = [path.as_str(), "/below/it"].concat();
            let inside = [prefix, "/"].concat();
            prop_assert!(prefix == "/" || path == prefix || path.starts_with(&inside));
            prop_assert!(pattern.governs(&below));
        }
    }

    #[test]
    fn overlap_is_never_missed(a in pattern_text(), b in pattern_text(), paths in prop::collection::vec(path_text(), 50)) {
        let (first, second) = (CgroupPattern::parse(&a).expect("filtered"), CgroupPattern::parse(&b).expect("filtered"));
        prop_assert_eq!(first.overlaps(&second), second.overlaps(&first));
        prop_assert!(first.overlaps(&first));
        for path in paths {
            if first.matches(&path) && second.matches(&path) {
                prop_assert!(first.overlaps(&second), "{} and {} both match {}", a, b, path);
            }
        }
    }

    #[test]
    fn overlap_is_never_made_up(a in short_pattern_text(), b in short_pattern_text()) {
        let (first, second) = (CgroupPattern::parse(&a).expect("filtered"), CgroupPattern::parse(&b).expect("filtered"));
        // Two patterns of up to 3 parts that meet do so on a name of at most 6 letters.
        let mut names = vec![String::new()];
        let mut found = false;
        for _ in 0..6 {
            names = names.iter().flat_map(|name| ["a", "b", "c"].map(|c| format!("{name}{c}"))).collect();
            found |= names.iter().any(|name| first.matches(&format!("/{name}")) && second.matches(&format!("/{name}")));
        }
        prop_assert_eq!(first.overlaps(&second), found, "{} {}", a, b);
    }

    #[test]
    fn a_drop_in_says_what_was_set(
        base in written(),
        sets in prop::collection::vec((assignment(), gpu_key()), 1..10),
    ) {
        let base_text = file(&base, &[None; 3]);
        let mut text: Option<String> = None;
        let mut all = base.clone();
        for ((key, value), gpu) in &sets {
            let bare = value.trim_matches('"').to_owned();
            text = Some(dropin::apply(text.as_deref(), TENANTS[1], gpu.as_deref(), &[(key.name().to_owned(), bare)]).expect("a good value"));
            all.push(Written { is_tenant: true, name: 1, gpu: gpu.clone(), key: *key, value: value.clone() });
        }
        let text = text.expect("at least one");
        let both = [Source::new("base", Layer::Admin, base_text.as_str()), Source::new("drop-in", Layer::Admin, text.as_str())];
        let merged = Policy::load(&both, Some(&host())).expect("good").policy;
        prop_assert_eq!(&merged, &load(&file(&all, &[None; 3])));
        // Removing all of it leaves nothing but the header.
        let mut rest = text;
        for ((key, _), gpu) in &sets {
            rest = dropin::apply(Some(&rest), TENANTS[1], gpu.as_deref(), &[(key.name().to_owned(), String::new())]).expect("good");
        }
        prop_assert!(rest.lines().all(|line| line.is_empty() || line.starts_with('#')), "{}", rest);
    }
}
