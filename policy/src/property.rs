//! Single properties, as `set-property` takes them: `memory.max=20GiB`.

use std::fmt;

use crate::cgroup::CgroupPattern;
use crate::limits::{Key, Limits};
use crate::name::{NAME_HELP, is_name, toml_string};
use crate::raw::{Mistake, Raw, in_context};
use crate::source::Origin;
use crate::suggest::nearest_keys;

/// A key that can be set on a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Property {
    /// The tenant's cgroups. Not per GPU.
    Cgroup,
    /// The tenant's class. Not per GPU.
    Class,
    /// A limit.
    Limit(Key),
}

impl Property {
    /// The property of this name.
    ///
    /// # Errors
    /// There is none; the error names the nearest one.
    pub fn parse(name: &str) -> Result<Self, PropertyError> {
        match name {
            "cgroup" => Ok(Self::Cgroup),
            "class" => Ok(Self::Class),
            _ => Key::from_name(name).map(Self::Limit).ok_or_else(|| {
                let all: Vec<&str> = names().collect();
                let near = nearest_keys(name, &all);
                let help = if near.is_empty() {
                    format!("the properties are {}", all.join(", "))
                } else {
                    format!("did you mean {}?", near.join(" or "))
                };
                PropertyError::Unknown {
                    key: name.chars().take(80).collect(),
                    help,
                }
            }),
        }
    }

    /// The name of the property.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Class => "class",
            Self::Limit(key) => key.name(),
        }
    }

    /// What values it takes.
    pub fn allowed(self) -> String {
        match self {
            Self::Cgroup => CGROUP_HELP.to_owned(),
            Self::Class => NAME_HELP.to_owned(),
            Self::Limit(key) => key.allowed(),
        }
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The names of all properties.
pub fn names() -> impl Iterator<Item = &'static str> {
    ["cgroup", "class"]
        .into_iter()
        .chain(Key::ALL.iter().map(|key| key.name()))
}

/// Why a property can't be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PropertyError {
    /// There is no property of this name.
    #[error("unknown property {key:?}; {help}")]
    Unknown {
        /// What was given.
        key: String,
        /// What there is.
        help: String,
    },
    /// The value is not one that the property takes.
    #[error("{message}; {help}")]
    Value {
        /// The property.
        property: Property,
        /// What is wrong, with key and value.
        message: String,
        /// What is allowed.
        help: String,
    },
}

/// Checks one property, with the same messages as for a policy file. An empty value means that the property is removed, and
/// is always good.
///
/// What depends on other properties, such as `memory.high` above `memory.max`, only [`Policy::load`](crate::Policy::load) can
/// tell.
///
/// # Errors
/// The key is unknown, or the value is not allowed.
pub fn check(key: &str, value: &str) -> Result<Property, PropertyError> {
    let property = Property::parse(key)?;
    if !value.is_empty() {
        to_toml(property, value)?;
    }
    Ok(property)
}

/// The value as TOML text, in its normal form.
pub(crate) fn to_toml(property: Property, value: &str) -> Result<String, PropertyError> {
    let raw = match property {
        Property::Cgroup | Property::Class => Raw::Text(value),
        Property::Limit(_) => Raw::bare(value),
    };
    let written = match property {
        Property::Cgroup => check_cgroup(&raw).map(|pattern| toml_string(pattern.as_str())),
        Property::Class => check_class_name(&raw).map(|name| toml_string(&name)),
        Property::Limit(key) => {
            let mut limits = Limits::default();
            limits
                .set(key, &raw, Origin::builtin())
                .map(|()| limits.get(key).map_or(String::new(), |(text, _)| text))
        }
    };
    written.map_err(|mistake| PropertyError::Value {
        property,
        message: in_context(property.name(), &raw, &mistake),
        help: mistake.help,
    })
}

const CGROUP_HELP: &str = "a cgroup is a path from the cgroup root such as \"/gpu.slice/vision.slice\", or a glob such as \"/gpu.slice/job-*\"";

/// Reads `cgroup`.
pub(crate) fn check_cgroup(raw: &Raw<'_>) -> Result<CgroupPattern, Mistake> {
    let Raw::Text(text) = raw else {
        return Err(Mistake::wrong_type(raw, CGROUP_HELP));
    };
    CgroupPattern::parse(text).map_err(|error| Mistake::new(error.to_string(), error.help()))
}

/// Reads `class`.
pub(crate) fn check_class_name(raw: &Raw<'_>) -> Result<String, Mistake> {
    match raw {
        Raw::Text(name) if is_name(name) => Ok((*name).to_owned()),
        Raw::Text(_) => Err(Mistake::new("no class has such a name", NAME_HELP)),
        _ => Err(Mistake::wrong_type(
            raw,
            "write the name of a class in quotes",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_ones() {
        for (key, value, toml) in [
            ("memory.max", "20GiB", "\"20GiB\""),
            ("memory.max", "1048576000", "\"1000MiB\""),
            ("memory.max", "max", "\"max\""),
            ("memory.context", "true", "true"),
            ("time.weight", "300", "300"),
            ("time.max", "50%", "\"50%\""),
            ("launch.max", "1.2M/min", "\"1200000/min\""),
            ("class", "007", "\"007\""),
            ("cgroup", "/a/b*", "\"/a/b*\""),
        ] {
            let property = check(key, value).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(property.name(), key);
            assert_eq!(to_toml(property, value).as_deref(), Ok(toml));
        }
        assert_eq!(check("memory.max", ""), Ok(Property::Limit(Key::MemoryMax)));
    }

    #[test]
    fn bad_ones_say_what_is_allowed() {
        let error = check("memory.mx", "1").expect_err("unknown").to_string();
        assert_eq!(
            error,
            "unknown property \"memory.mx\"; did you mean memory.max?"
        );
        let error = check("memory.max", "20Gib").expect_err("unit").to_string();
        assert!(
            error.starts_with(
                "memory.max = \"20Gib\": unknown unit \"Gib\"; did you mean \"20GiB\"?"
            ),
            "{error}"
        );
        let error = check("time.weight", "0").expect_err("range").to_string();
        assert!(
            error.starts_with(
                "time.weight = 0: it is out of range; a weight is an integer from 1 to 10000"
            ),
            "{error}"
        );
        for (key, value) in [
            ("memory.max", "1MiB"),
            ("memory.max", "1.5"),
            ("memory.context", "yes"),
            ("class", "a b"),
            ("cgroup", "a"),
        ] {
            assert!(check(key, value).is_err(), "{key}={value}");
        }
    }

    #[test]
    fn every_name_is_a_property() {
        for name in names() {
            assert_eq!(Property::parse(name).map(Property::name), Ok(name));
        }
    }
}
