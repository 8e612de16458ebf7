//! Any bytes as policy files: nothing panics, and what loads survives being printed and read again.

#![no_main]

use gpuquota_policy::{CgroupPattern, Host, HostGpu, Layer, Policy, Source, dropin, property};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // A zero byte, which TOML does not have, separates files.
    let sources: Vec<Source> = data
        .split(|byte| *byte == 0)
        .take(4)
        .zip(["0.toml", "1.toml", "2.toml", "3.toml"])
        .map(|(text, path)| Source::new(path, Layer::Admin, text))
        .collect();
    let host = host();
    for host in [None, Some(&host)] {
        match Policy::load(&sources, host) {
            Ok(loaded) => reads_back(&loaded.policy, host),
            Err(found) => {
                assert!(found.error_count() > 0, "refused without an error");
                assert!(
                    !found
                        .to_string()
                        .chars()
                        .any(|c| c.is_control() && c != '\n')
                );
            }
        }
    }
    if let Ok(text) = std::str::from_utf8(data) {
        single_values(text);
    }
});

fn host() -> Host {
    let gpu = |index| HostGpu {
        index,
        uuid: format!("GPU-8b3f1c2e-0d5a-4e6f-9a1b-00000000000{index}"),
        memory: 80 << 30,
    };
    Host {
        gpus: vec![gpu(0), gpu(1)],
    }
}

fn reads_back(policy: &Policy, host: Option<&Host>) {
    let printed = Source::new("printed.toml", Layer::Admin, policy.to_toml());
    let again = Policy::load(&[printed], host)
        .expect("a printed policy loads")
        .policy;
    assert_eq!(again, *policy);
    let nesting = policy.nesting();
    for gpu in &crate::host().gpus {
        for tenant in policy.tenants.keys() {
            assert_eq!(again.effective(tenant, gpu), policy.effective(tenant, gpu));
            assert!(!policy.explain(tenant, gpu).is_empty());
            assert!(!nesting[tenant.as_str()].contains(&tenant.as_str()));
        }
    }
}

fn single_values(text: &str) {
    let (first, rest) = text.split_once('=').unwrap_or((text, ""));
    let _ = property::check(first, rest);
    for name in property::names() {
        let Ok(_) = property::check(name, first) else {
            continue;
        };
        // What the command line takes, a policy takes too.
        let set = [(name.to_owned(), first.to_owned())];
        let text = dropin::apply(None, "t", None, &set).expect("a good property");
        let base = Source::new(
            "base.toml",
            Layer::Admin,
            "[tenant.t]\ncgroup = \"/t\"\n[class.c]\n",
        );
        let loaded = Policy::load(
            &[base, Source::new("drop-in.toml", Layer::Admin, text)],
            None,
        );
        assert!(loaded.is_ok() || name == "class", "{name} = {first:?}");
    }
    let _ = dropin::apply(
        Some(rest),
        "t",
        Some("*"),
        &[("memory.max".to_owned(), "5GiB".to_owned())],
    );
    let patterns = [CgroupPattern::parse(first), CgroupPattern::parse(rest)];
    if let [Ok(a), Ok(b)] = &patterns {
        assert_eq!(a.overlaps(b), b.overlaps(a));
        if a.matches(b.literal_prefix()) && b.is_exact() {
            assert!(a.overlaps(b));
        }
    }
}
