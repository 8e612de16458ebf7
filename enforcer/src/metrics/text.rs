//! The text format of Prometheus, version 0.0.4.
//!
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>

use std::fmt::Write as _;

/// Kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
}

/// A sample's value.
pub(super) enum Value {
    Integer(u64),
    Float(f64),
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

/// A text that grows by families.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    text: String,
    name: &'static str,
}

impl Exposition {
    /// Starts a family; its samples follow before the next one starts.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> &mut Self {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        self.text.push_str("# HELP ");
        self.text.push_str(name);
        self.text.push(' ');
        escape(&mut self.text, help, false);
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "\n# TYPE {name} {kind}");
        self.name = name;
        self
    }

    /// The only sample of the family.
    pub(super) fn plain(&mut self, value: impl Into<Value>) -> &mut Self {
        self.labelled(&[], value)
    }

    /// A sample of the family. An empty label is the same as none, and left out.
    pub(super) fn labelled(
        &mut self,
        labels: &[(&str, &str)],
        value: impl Into<Value>,
    ) -> &mut Self {
        self.text.push_str(self.name);
        let mut separator = '{';
        for (name, value) in labels.iter().filter(|(_, value)| !value.is_empty()) {
            self.text.push(separator);
            self.text.push_str(name);
            self.text.push_str("=\"");
            escape(&mut self.text, value, true);
            self.text.push('"');
            separator = ',';
        }
        if separator == ',' {
            self.text.push('}');
        }
        let _ = match value.into() {
            Value::Integer(value) => writeln!(self.text, " {value}"),
            Value::Float(value) if value.is_nan() => writeln!(self.text, " NaN"),
            Value::Float(value) if value.is_infinite() => {
                writeln!(self.text, " {}", if value > 0.0 { "+Inf" } else { "-Inf" })
            }
            Value::Float(value) => writeln!(self.text, " {value}"),
        };
        self
    }

    /// The whole text.
    pub(super) fn finish(self) -> String {
        self.text
    }
}

/// Quotes are escaped in label values only.
fn escape(out: &mut String, text: &str, quotes: bool) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes => out.push_str("\\\""),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_label_ends_it() {
        let mut out = Exposition::default();
        out.family("x_total", Kind::Counter, "a \\ and\na \"quote\"")
            .labelled(&[("name", "a\"b\\c\nd"), ("none", "")], 1_u64);
        assert_eq!(
            out.finish(),
            "# HELP x_total a \\\\ and\\na \"quote\"\n# TYPE x_total counter\nx_total{name=\"a\\\"b\\\\c\\nd\"} 1\n"
        );
    }

    #[test]
    fn numbers_are_those_of_the_format() {
        let mut out = Exposition::default();
        out.family("x", Kind::Gauge, "x")
            .plain(u64::MAX)
            .plain(f64::INFINITY)
            .plain(f64::NEG_INFINITY)
            .plain(f64::NAN)
            .plain(0.25)
            .plain(1e22);
        let text = out.finish();
        let values: Vec<_> = text.lines().skip(2).map(|line| &line[2..]).collect();
        assert_eq!(
            values,
            [
                "18446744073709551615",
                "+Inf",
                "-Inf",
                "NaN",
                "0.25",
                "10000000000000000000000"
            ]
        );
    }
}
