//! Names of tenants and classes.

/// What a name may be, for messages.
pub(crate) const NAME_HELP: &str =
    "a name is 1 to 64 of A-Z a-z 0-9 _ . - and starts with a letter or digit";

/// Whether `text` can name a tenant or a class: 1 to 64 of `A-Z a-z 0-9 _ . -`, the first a letter or digit.
pub fn is_name(text: &str) -> bool {
    text.len() <= 64
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

/// A name as a TOML key: bare where it can be.
pub(crate) fn toml_key(name: &str) -> String {
    if !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
    {
        name.to_owned()
    } else {
        toml_string(name)
    }
}

/// A text as a TOML string.
pub(crate) fn toml_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.extend(format!("\\u{:04X}", u32::from(c)).chars()),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "0", "team-1", "a.b_c-d", &"x".repeat(64)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", ".a", "_a", "a b", "ä", "a/b", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn keys_are_quoted_where_needed() {
        assert_eq!(toml_key("a-b_1"), "a-b_1");
        assert_eq!(toml_key("a.b"), "\"a.b\"");
        assert_eq!(toml_key("*"), "\"*\"");
        assert_eq!(toml_string("a\\x2d\"\n"), "\"a\\\\x2d\\\"\\u000A\"");
    }
}
