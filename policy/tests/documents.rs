//! What is shipped and documented is what the code does.

use gpuquota_policy::{
    BUILTIN_CLASSES, Diagnostics, HostGpu, Key, Layer, Policy, Source, property,
};

const CLASSES: &str = include_str!("../../config/policy.d/00-classes.toml");
const TENANTS: &str = include_str!("../../config/policy.d/50-tenants.toml");
const GUIDE: &str = include_str!("../../docs/guide.md");
const REFERENCE: &str = include_str!("../../docs/policy.md");

fn load(text: &str) -> Policy {
    let loaded = Policy::load(&[Source::new("p.toml", Layer::Admin, text)], None);
    let loaded = loaded.unwrap_or_else(|found: Diagnostics| panic!("{found}"));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    loaded.policy
}

fn gpu() -> HostGpu {
    HostGpu {
        index: 0,
        uuid: "GPU-8b3f1c2e-0d5a-4e6f-9a1b-2c3d4e5f6071".to_owned(),
        memory: 141 << 30,
    }
}

/// The commented-out settings put to use.
fn uncommented(text: &str) -> String {
    text.lines()
        .map(|line| {
            line.strip_prefix('#')
                .filter(|rest| rest.starts_with(|c: char| c == '[' || c.is_ascii_lowercase()))
                .unwrap_or(line)
        })
        .fold(String::new(), |mut out, line| {
            out.push_str(line);
            out.push('\n');
            out
        })
}

#[test]
fn the_shipped_classes_are_the_built_in_ones() {
    let tenants: String = BUILTIN_CLASSES
        .iter()
        .flat_map(|name| {
            [
                "[tenant.",
                name,
                "]\ncgroup = \"/",
                name,
                "\"\nclass = \"",
                name,
                "\"\n",
            ]
        })
        .collect();
    let built_in = load(&tenants);
    let shipped = load(&format!("{CLASSES}\n{tenants}"));
    assert_eq!(shipped.classes.len(), BUILTIN_CLASSES.len());
    for name in BUILTIN_CLASSES {
        assert_eq!(
            shipped.effective(name, &gpu()),
            built_in.effective(name, &gpu())
        );
    }
}

#[test]
fn the_shipped_tenants_do_nothing_until_uncommented() {
    assert_eq!(load(TENANTS), Policy::default());
    let policy = load(&uncommented(TENANTS));
    assert_eq!(policy.tenants.len(), 3);
    assert_eq!(policy.nesting()["vision-notebooks"], ["vision"]);
    let vision = policy.effective("vision", &gpu()).expect("tenant");
    assert_eq!(vision.memory.max, Some(70 << 30));
    assert!(policy.class_exclusive("realtime"));
}

fn examples(text: &'static str) -> Vec<&'static str> {
    let blocks: Vec<&str> = text
        .split("```toml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(!blocks.is_empty());
    blocks
}

#[test]
fn the_examples_of_the_reference_load() {
    for block in examples(REFERENCE) {
        load(block);
    }
}

#[test]
fn the_recipes_of_the_guide_load_alone_and_together() {
    let recipes = examples(GUIDE);
    assert_eq!(recipes.len(), 4);
    for recipe in &recipes {
        load(recipe);
    }
    load(&recipes.concat());
}

#[test]
fn the_error_of_the_reference_is_the_real_one() {
    let shown = REFERENCE
        .split("```text\n")
        .nth(1)
        .and_then(|rest| rest.split("\n```").next())
        .expect("an example");
    let text = "[tenant.vision]\ncgroup = \"/a\"\n\nmemory.max = \"40Gib\"\n";
    let source = Source::new("/etc/gpuquota/policy.d/50-teams.toml", Layer::Admin, text);
    let found = Policy::load(&[source], None).expect_err("the unit is wrong");
    assert_eq!(found.to_string(), shown);
}

/// The cells of the line of the reference that explains `key`.
fn row(key: &str) -> Vec<&'static str> {
    let start = format!("| `{key}` |");
    let line = REFERENCE.lines().find(|line| line.starts_with(&start));
    line.unwrap_or_else(|| panic!("{key} is not documented"))
        .trim_matches('|')
        .split('|')
        .map(str::trim)
        .collect()
}

#[test]
fn every_key_is_documented_with_its_default() {
    let policy = load("[tenant.a]\ncgroup = \"/a\"\n");
    let explained = policy.explain("a", &gpu());
    for key in Key::ALL {
        let default = row(key.name())[2].trim_matches('`').trim_matches('"');
        let value = &explained
            .iter()
            .find(|line| line.key == key.name())
            .expect("every key is explained")
            .value;
        if *key == Key::LaunchBurst {
            assert_eq!(
                (default, value.as_str()),
                ("what `launch.max` gives in 10 ms, at least 16", "16")
            );
        } else {
            assert_eq!(default, value, "{key}");
        }
    }
    for name in property::names().chain(["priority", "exclusive"]) {
        row(name);
    }
}

#[test]
fn every_word_of_the_reference_is_taken() {
    for key in Key::ALL {
        let cell = row(key.name())[1];
        for word in cell
            .split('`')
            .filter(|word| word.starts_with('"'))
            .map(|word| word.trim_matches('"'))
        {
            let word = word.replace("NAME", "TERM");
            property::check(key.name(), &word).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
