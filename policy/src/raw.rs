//! A value as it was written, before its key says what it should be.

use toml::de::{DeInteger, DeValue};

use crate::diagnostic::quote;

/// A scalar of a policy file or of the command line.
#[derive(Clone, Debug)]
pub(crate) enum Raw<'a> {
    Text(&'a str),
    /// None if it does not fit into 64 bits.
    Integer(Option<i64>),
    Float(&'a str),
    Boolean(bool),
    /// A list of nothing but integers; each as in `Integer`.
    Integers(Vec<Option<i64>>),
    /// What it is instead, with its article.
    Other(&'static str),
}

/// Why a value can't be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// What is wrong, to follow `key = value: `.
    pub what: String,
    /// What is allowed.
    pub help: String,
}

impl Mistake {
    pub(crate) fn new(what: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            help: help.into(),
        }
    }

    /// The value has another type than the key wants.
    pub(crate) fn wrong_type(raw: &Raw<'_>, help: impl Into<String>) -> Self {
        Self::new(format!("{} is not allowed here", raw.describe()), help)
    }
}

impl<'a> Raw<'a> {
    pub(crate) fn of(value: &'a DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text),
            DeValue::Integer(integer) => Self::Integer(number(integer)),
            DeValue::Float(float) => Self::Float(float.as_str()),
            DeValue::Boolean(boolean) => Self::Boolean(*boolean),
            DeValue::Datetime(_) => Self::Other("a date"),
            DeValue::Array(array) => array
                .iter()
                .map(|item| match item.get_ref() {
                    DeValue::Integer(integer) => Some(number(integer)),
                    _ => None,
                })
                .collect::<Option<Vec<_>>>()
                .map_or(Self::Other("an array"), Self::Integers),
            DeValue::Table(_) => Self::Other("a table"),
        }
    }

    /// A value from the command line, where strings come without quotes.
    pub(crate) fn bare(text: &'a str) -> Self {
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        let is_integer = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let is_float = !is_integer
            && digits.starts_with(|c: char| c.is_ascii_digit())
            && digits
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'.')
            && text.parse::<f64>().is_ok();
        match text {
            "true" => Self::Boolean(true),
            "false" => Self::Boolean(false),
            _ if is_integer => Self::Integer(text.parse().ok()),
            _ if is_float => Self::Float(text),
            _ => Self::Text(text),
        }
    }

    /// The kind of value, with its article.
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Boolean(_) => "a boolean",
            Self::Integers(_) => "an array",
            Self::Other(what) => what,
        }
    }

    /// The value for a message.
    pub(crate) fn shown(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(quote(text)),
            Self::Integer(Some(integer)) => Some(integer.to_string()),
            Self::Integer(None) => Some("…".to_owned()),
            Self::Float(text) => Some(text.chars().take(40).collect()),
            Self::Boolean(boolean) => Some(boolean.to_string()),
            Self::Integers(_) | Self::Other(_) => None,
        }
    }
}

fn number(integer: &DeInteger<'_>) -> Option<i64> {
    let digits: String = integer.as_str().chars().filter(|c| *c != '_').collect();
    i64::from_str_radix(&digits, integer.radix()).ok()
}

/// `key = value: what`.
pub(crate) fn in_context(key: &str, raw: &Raw<'_>, mistake: &Mistake) -> String {
    match raw.shown() {
        Some(value) => format!("{key} = {value}: {}", mistake.what),
        None => format!("{key}: {}", mistake.what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_values_are_typed_by_their_form() {
        assert!(matches!(Raw::bare("-12"), Raw::Integer(Some(-12))));
        assert!(matches!(
            Raw::bare("99999999999999999999"),
            Raw::Integer(None)
        ));
        assert!(matches!(Raw::bare("1.5"), Raw::Float("1.5")));
        assert!(matches!(Raw::bare("true"), Raw::Boolean(true)));
        for text in ["", "-", "20GiB", "inf", "nan", "1e5", "1.2.3", ".5"] {
            assert!(matches!(Raw::bare(text), Raw::Text(_)), "{text}");
        }
    }
}
