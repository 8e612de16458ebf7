//! Drop-in files that `set-property` writes: one tenant's changed properties.

use toml_edit::{DocumentMut, Item, Table, TableLike, Value};

use crate::gpu::{GpuSelector, GpuSelectorError, SELECTOR_HELP};
use crate::name::{NAME_HELP, is_name};
use crate::property::{self, Property, PropertyError};

/// Why a drop-in can't be changed.
#[derive(Debug, thiserror::Error)]
pub enum DropinError {
    /// The tenant's name can't be one.
    #[error("{tenant:?} can't be the name of a tenant; {NAME_HELP}")]
    Tenant {
        /// What was given.
        tenant: String,
    },
    /// The GPU is not named as a policy names it.
    #[error("{source}; {SELECTOR_HELP}")]
    Gpu {
        /// What is wrong with it.
        #[from]
        source: GpuSelectorError,
    },
    /// Properties that can't be set; all of them.
    #[error("{}", .errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Properties {
        /// What is wrong with each.
        errors: Vec<PropertyError>,
    },
    /// The property is the tenant's, not one of a GPU.
    #[error("{property} holds for the tenant on every GPU; set it without a GPU")]
    NotPerGpu {
        /// The property.
        property: Property,
    },
    /// The existing file is no TOML.
    #[error("the existing drop-in can't be read: {source}")]
    Existing {
        /// What is wrong with it.
        #[from]
        source: toml_edit::TomlError,
    },
    /// Something that is no table stands in the existing file where a table belongs.
    #[error("the existing drop-in has a value at {path} where a table belongs")]
    Shape {
        /// The place, as a dotted key.
        path: String,
    },
}

/// The first line of a new drop-in.
const HEADER: &str =
    "# Written by `gpuquotactl set-property`. Later calls change it; comments stay.\n";

/// The name of the file in `/etc` that keeps the properties set on `tenant`. It sorts behind the files that
/// an admin writes, so that what is set holds.
pub fn file_name(tenant: &str) -> String {
    format!("zz-set-property.{tenant}.toml")
}

/// The name of the file in `/run` that keeps the properties set on `tenant` until the next boot.
///
/// It is not [`file_name`], since a file replaces one of the same name in a lower layer: one property set until the next boot
/// would take away all that are set for good.
pub fn runtime_file_name(tenant: &str) -> String {
    format!("zz-set-property-runtime.{tenant}.toml")
}

/// Sets properties of a tenant, or of a tenant on one GPU, in the text of a drop-in, and gives the new text. An empty value
/// removes the property; tables that become empty go with it. Comments and other keys stay as they are.
///
/// The result is checked property by property only; load it with the other files before it is put in place.
///
/// # Errors
/// Nothing is changed: a name or value is not allowed, or the existing text is not what a drop-in looks like.
pub fn apply(
    existing: Option<&str>,
    tenant: &str,
    gpu: Option<&str>,
    properties: &[(String, String)],
) -> Result<String, DropinError> {
    if !is_name(tenant) {
        return Err(DropinError::Tenant {
            tenant: tenant.chars().take(80).collect(),
        });
    }
    let gpu = gpu.map(GpuSelector::parse).transpose()?;
    let mut changes: Vec<(Property, Option<Value>)> = Vec::new();
    let mut errors = Vec::new();
    for (key, value) in properties {
        match change(key, value) {
            Ok(change) => changes.push(change),
            Err(error) => errors.push(error),
        }
    }
    if !errors.is_empty() {
        return Err(DropinError::Properties { errors });
    }
    if gpu.is_some()
        && let Some((property, _)) = changes
            .iter()
            .find(|(property, _)| !matches!(property, Property::Limit(_)))
    {
        return Err(DropinError::NotPerGpu {
            property: *property,
        });
    }

    let mut document: DocumentMut = existing.unwrap_or_default().parse()?;
    let mut path = vec!["tenant".to_owned(), tenant.to_owned()];
    path.extend(
        gpu.iter()
            .flat_map(|gpu| ["gpu".to_owned(), spelling(&document, tenant, gpu)]),
    );
    for (property, value) in changes {
        let (group, key) = match property {
            Property::Limit(key) => {
                let (group, key) = key.split();
                (Some(group), key)
            }
            other => (None, other.name()),
        };
        let mut at = path.clone();
        at.extend(group.map(str::to_owned));
        match value {
            Some(value) => set(document.as_table_mut(), &at, path.len(), key, value)?,
            None => remove(document.as_table_mut(), &at, key),
        }
    }
    let text = document.to_string();
    Ok(if existing.is_none() {
        format!("{HEADER}{text}")
    } else {
        text
    })
}

fn change(key: &str, value: &str) -> Result<(Property, Option<Value>), PropertyError> {
    let property = property::check(key, value)?;
    if value.is_empty() {
        return Ok((property, None));
    }
    let text = property::to_toml(property, value)?;
    let value = text
        .parse()
        .map_err(|error: toml_edit::TomlError| PropertyError::Value {
            property,
            message: format!("{key}: {}", error.message()),
            help: property.allowed(),
        })?;
    Ok((property, Some(value)))
}

/// The key that already stands for this GPU, or its normal spelling.
fn spelling(document: &DocumentMut, tenant: &str, gpu: &GpuSelector) -> String {
    let tables = document
        .get("tenant")
        .and_then(|item| item.get(tenant))
        .and_then(|item| item.get("gpu"))
        .and_then(Item::as_table_like);
    tables
        .and_then(|table| {
            table
                .iter()
                .map(|(key, _)| key.to_owned())
                .find(|key| GpuSelector::parse(key).as_ref() == Ok(gpu))
        })
        .unwrap_or_else(|| gpu.to_string())
}

/// Puts `key = value` into the table at `path`. Tables that are missing are made: up to `headers` deep with a header of
/// their own, below that as dotted keys.
fn set(
    root: &mut Table,
    path: &[String],
    headers: usize,
    key: &str,
    value: Value,
) -> Result<(), DropinError> {
    let mut at: &mut dyn TableLike = root;
    for (depth, name) in path.iter().enumerate() {
        let item = at.entry(name).or_insert_with(|| {
            // An inline table turns it into an inline one.
            let mut table = Table::new();
            // Only the innermost header is printed.
            table.set_implicit(depth + 1 < headers);
            table.set_dotted(depth >= headers);
            Item::Table(table)
        });
        at = item.as_table_like_mut().ok_or_else(|| DropinError::Shape {
            path: path[..=depth].join("."),
        })?;
    }
    match at.get_mut(key) {
        Some(Item::Value(old)) => {
            // The comment behind the value stays.
            let decor = old.decor().clone();
            *old = value;
            *old.decor_mut() = decor;
        }
        Some(Item::None) | None => {
            at.insert(key, Item::Value(value));
        }
        Some(_) => {
            return Err(DropinError::Shape {
                path: format!("{}.{key}", path.join(".")),
            });
        }
    }
    Ok(())
}

/// Removes `key` from the table at `path`, and the tables above that become empty.
fn remove(table: &mut dyn TableLike, path: &[String], key: &str) {
    let Some((name, rest)) = path.split_first() else {
        table.remove(key);
        return;
    };
    let Some(below) = table.get_mut(name).and_then(Item::as_table_like_mut) else {
        return;
    };
    remove(below, rest, key);
    if below.is_empty() {
        table.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layer, Policy, Source};

    fn run(
        existing: Option<&str>,
        gpu: Option<&str>,
        properties: &[(&str, &str)],
    ) -> Result<String, DropinError> {
        let properties: Vec<_> = properties
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        apply(existing, "vision", gpu, &properties)
    }

    fn body(text: &str) -> &str {
        text.strip_prefix(HEADER).expect("header").trim_start()
    }

    #[test]
    fn a_new_file() {
        let text = run(
            None,
            None,
            &[
                ("memory.max", "20GiB"),
                ("time.weight", "300"),
                ("class", "guaranteed"),
                ("memory.high", "18GiB"),
            ],
        )
        .expect("good");
        assert_eq!(
            body(&text),
            "[tenant.vision]\nmemory.max = \"20GiB\"\nmemory.high = \"18GiB\"\ntime.weight = 300\nclass = \"guaranteed\"\n"
        );
        let text = run(None, Some("*"), &[("memory.max", "20GiB")]).expect("good");
        assert_eq!(
            body(&text),
            "[tenant.vision.gpu.\"*\"]\nmemory.max = \"20GiB\"\n"
        );
    }

    #[test]
    fn comments_and_other_keys_stay() {
        let old = "# mine\n[tenant.vision] # hers\nmemory.max = \"1GiB\" # note\n# later\nlaunch.max = \"5/s\"\n\n[tenant.other]\ntime.weight = 5\n";
        let text = run(
            Some(old),
            None,
            &[
                ("memory.max", "2GiB"),
                ("memory.min", "1GiB"),
                ("launch.max", ""),
            ],
        )
        .expect("good");
        assert_eq!(
            text,
            "# mine\n[tenant.vision] # hers\nmemory.max = \"2GiB\" # note\nmemory.min = \"1GiB\"\n\n[tenant.other]\ntime.weight = 5\n"
        );
    }

    #[test]
    fn every_way_of_writing_tables_is_kept() {
        for old in [
            "tenant.vision.memory.max = \"1GiB\"\n",
            "tenant = { vision = { memory = { max = \"1GiB\" } } }\n",
            "[tenant]\nvision = { time.weight = 7 }\n",
            "[tenant.vision.memory]\nmax = \"1GiB\"\n",
            "[tenant]\n[tenant.vision]\n[tenant.vision.memory]\nmax = \"1GiB\"\n[tenant.vision.gpu.\"0\"]\ntime.weight = 1\n",
        ] {
            for gpu in [None, Some("0")] {
                let set = [
                    ("memory.max", "3GiB"),
                    ("memory.on-high", "signal:USR1"),
                    ("launch.burst", "5"),
                ];
                let text =
                    run(Some(old), gpu, &set).unwrap_or_else(|error| panic!("{old}: {error}"));
                let whole = format!("{text}\n");
                let base = Source::new("base", Layer::Admin, "[tenant.vision]\ncgroup = \"/a\"\n");
                let policy = Policy::load(
                    &[base, Source::new("drop-in", Layer::Admin, whole.clone())],
                    None,
                )
                .unwrap_or_else(|found| panic!("{whole}\n{found}"))
                .policy;
                let tenant = &policy.tenants["vision"];
                let limits = if gpu.is_some() {
                    &tenant.gpu[&GpuSelector::Index(0)]
                } else {
                    &tenant.limits
                };
                for (key, value) in set {
                    let key = crate::Key::from_name(key).expect("key");
                    assert_eq!(
                        limits.get(key).expect("set").0.trim_matches('"'),
                        value,
                        "{whole}"
                    );
                }
                // And all of it goes again.
                let gone = run(Some(&text), gpu, &set.map(|(key, _)| (key, ""))).expect("good");
                for (key, _) in set {
                    assert!(
                        gpu.is_some()
                            || !gone.contains(key.split('.').next_back().expect("key"))
                            || key == "memory.max" && gone.contains("gpu"),
                        "{gone}"
                    );
                }
            }
        }
    }

    #[test]
    fn empty_tables_go() {
        let text = run(None, Some("1"), &[("memory.max", "20GiB")]).expect("good");
        let text = run(Some(&text), Some("1"), &[("memory.max", "")]).expect("good");
        assert!(!text.contains('['), "{text}");
        assert_eq!(
            run(Some(""), None, &[("memory.max", "")]).expect("good"),
            ""
        );
    }

    #[test]
    fn a_uuid_finds_its_other_spelling() {
        let old =
            "[tenant.vision.gpu.\"gpu-8B3F1C2E-0d5a-4e6f-9a1b-2c3d4e5f6071\"]\nmemory.max = 0\n";
        let text = run(
            Some(old),
            Some("GPU-8b3f1c2e-0d5a-4e6f-9a1b-2c3d4e5f6071"),
            &[("memory.max", "5GiB")],
        )
        .expect("good");
        assert_eq!(text, old.replace("= 0", "= \"5GiB\""));
    }

    #[test]
    fn names_with_dots_are_one_key() {
        let text = apply(
            None,
            "a.b",
            None,
            &[("time.weight".to_owned(), "5".to_owned())],
        )
        .expect("good");
        assert_eq!(body(&text), "[tenant.\"a.b\"]\ntime.weight = 5\n");
        assert_eq!(file_name("a.b"), "zz-set-property.a.b.toml");
    }

    #[test]
    fn what_is_set_until_reboot_does_not_mask_what_is_set_for_good() {
        let set = |key: &str, value: &str| {
            apply(None, "a", None, &[(key.to_owned(), value.to_owned())]).expect("good")
        };
        let files = [
            (Layer::Admin, file_name("a"), set("memory.max", "20GiB")),
            (
                Layer::Admin,
                "base.toml".to_owned(),
                "tenant.a.cgroup = \"/a\"\n".to_owned(),
            ),
            (
                Layer::Runtime,
                runtime_file_name("a"),
                set("time.weight", "7"),
            ),
        ];
        let listed: Vec<_> = files
            .iter()
            .map(|(layer, name, _)| (*layer, name.into()))
            .collect();
        let sources: Vec<Source> = crate::merge_order(&listed)
            .into_iter()
            .filter_map(|(layer, path)| {
                let (_, _, text) = files
                    .iter()
                    .find(|(_, name, _)| path.as_os_str() == name.as_str())?;
                Some(Source::new(path, layer, text.as_str()))
            })
            .collect();
        let policy = Policy::load(&sources, None).expect("good").policy;
        assert_eq!(policy.tenants["a"].limits.iter().count(), 2);
        // Whatever tenants are called.
        assert_ne!(file_name("runtime.a"), runtime_file_name("a"));
    }

    #[test]
    fn mistakes_change_nothing() {
        let error = run(
            None,
            None,
            &[("memory.max", "20G"), ("wieght", "3"), ("time.weight", "5")],
        )
        .expect_err("two");
        assert!(
            matches!(&error, DropinError::Properties { errors } if errors.len() == 2),
            "{error}"
        );
        assert_eq!(error.to_string().lines().count(), 2);
        assert!(matches!(
            run(None, Some("0"), &[("class", "a")]),
            Err(DropinError::NotPerGpu { .. })
        ));
        assert!(matches!(
            run(None, Some("x"), &[]),
            Err(DropinError::Gpu { .. })
        ));
        assert!(matches!(
            run(Some("[a"), None, &[]),
            Err(DropinError::Existing { .. })
        ));
        assert!(matches!(
            run(Some("tenant = 3"), None, &[("time.weight", "5")]),
            Err(DropinError::Shape { .. })
        ));
        assert!(matches!(
            run(
                Some("[tenant.vision.memory.max]\na = 1"),
                None,
                &[("memory.max", "5GiB")]
            ),
            Err(DropinError::Shape { .. })
        ));
        assert!(matches!(
            apply(None, "a b", None, &[]),
            Err(DropinError::Tenant { .. })
        ));
    }
}
