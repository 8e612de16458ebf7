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

/// Length from which a piece of text is handed on.
const PIECE: usize = 64 << 10;

/// A text that grows by families, and is handed on in pieces: of a large policy it is megabytes.
pub(super) struct Exposition<'a> {
    text: String,
    name: &'static str,
    /// Takes pieces until it returns false.
    sink: &'a mut dyn FnMut(String) -> bool,
    /// Nobody wants more.
    closed: bool,
}

impl<'a> Exposition<'a> {
    /// Hands the text to `sink`, until that returns false.
    pub(super) fn to(sink: &'a mut dyn FnMut(String) -> bool) -> Self {
        Self {
            text: String::new(),
            name: "",
            sink,
            closed: false,
        }
    }

    fn hand_on(&mut self) {
        let piece = std::mem::take(&mut self.text);
        self.closed = self.closed || !(self.sink)(piece);
    }

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
        if self.closed {
            return self;
        }
        if self.text.len() >= PIECE {
            self.hand_on();
        }
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

    /// Hands on what is left.
    pub(super) fn finish(mut self) {
        if !self.text.is_empty() {
            self.hand_on();
        }
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

    fn written(write: impl FnOnce(&mut Exposition<'_>)) -> String {
        let mut text = String::new();
        let mut sink = |piece: String| {
            text.push_str(&piece);
            true
        };
        let mut out = Exposition::to(&mut sink);
        write(&mut out);
        out.finish();
        text
    }

    #[test]
    fn a_long_text_comes_in_pieces_until_nobody_wants_more() {
        let mut pieces = Vec::new();
        let mut sink = |piece: String| {
            pieces.push(piece);
            pieces.len() < 2
        };
        let mut out = Exposition::to(&mut sink);
        out.family("x", Kind::Gauge, "x");
        for number in 0..100_000_u64 {
            out.plain(number);
        }
        out.finish();
        assert_eq!(pieces.len(), 2);
        for piece in &pieces {
            assert!((PIECE..2 * PIECE).contains(&piece.len()), "{}", piece.len());
            assert!(piece.ends_with('\n'), "no line is divided");
        }
    }

    #[test]
    fn nothing_in_a_label_ends_it() {
        let text = written(|out| {
            out.family("x_total", Kind::Counter, "a \\ and\na \"quote\"")
                .labelled(&[("name", "a\"b\\c\nd"), ("none", "")], 1_u64);
        });
        assert_eq!(
            text,
            "# HELP x_total a \\\\ and\\na \"quote\"\n# TYPE x_total counter\nx_total{name=\"a\\\"b\\\\c\\nd\"} 1\n"
        );
    }

    #[test]
    fn numbers_are_those_of_the_format() {
        let text = written(|out| {
            out.family("x", Kind::Gauge, "x")
                .plain(u64::MAX)
                .plain(f64::INFINITY)
                .plain(f64::NEG_INFINITY)
                .plain(f64::NAN)
                .plain(0.25)
                .plain(1e22);
        });
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
