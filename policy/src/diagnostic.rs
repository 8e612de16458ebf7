//! What is wrong with a policy, and where.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::source::{Origin, SourceMap};

/// How bad a [`Diagnostic`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The policy does not load.
    Error,
    /// The policy loads, but probably does not do what was meant.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// A second place that a [`Diagnostic`] is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Related {
    /// The file.
    pub path: Arc<Path>,
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub col: u32,
    /// What is there.
    pub message: String,
}

/// One problem of the policy files.
///
/// Its [`Display`](fmt::Display) is what an administrator sees:
/// ```text
/// /etc/gpuquota/policy.d/50-teams.toml:3:14: error: memory.max = "40Gib": unknown unit "Gib"
///     3 | memory.max = "40Gib"
///       |              ^^^^^^^
/// help: did you mean "40GiB"?
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Error or warning.
    pub severity: Severity,
    /// The file.
    pub path: Arc<Path>,
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub col: u32,
    /// What is wrong.
    pub message: String,
    /// What is allowed, or what to do.
    pub help: Option<String>,
    /// The other place that plays a part, if any.
    pub related: Option<Related>,
    source: u32,
    width: u32,
    line_text: Option<String>,
}

impl Diagnostic {
    pub(crate) fn new(severity: Severity, origin: &Origin, message: impl Into<String>) -> Self {
        Self {
            severity,
            path: Arc::clone(&origin.path),
            line: origin.line,
            col: origin.col,
            message: one_line(message.into()),
            help: None,
            related: None,
            source: origin.source,
            width: origin.width,
            line_text: None,
        }
    }

    pub(crate) fn error(origin: &Origin, message: impl Into<String>) -> Self {
        Self::new(Severity::Error, origin, message)
    }

    pub(crate) fn warning(origin: &Origin, message: impl Into<String>) -> Self {
        Self::new(Severity::Warning, origin, message)
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(one_line(help.into()));
        self
    }

    pub(crate) fn related(mut self, origin: &Origin, message: impl Into<String>) -> Self {
        if !origin.is_builtin() {
            self.related = Some(Related {
                path: Arc::clone(&origin.path),
                line: origin.line,
                col: origin.col,
                message: one_line(message.into()),
            });
        }
        self
    }

    /// Copies the source line that the caret is drawn under.
    fn attach_line(&mut self, map: &SourceMap<'_>) {
        let origin = Origin {
            source: self.source,
            path: Arc::clone(&self.path),
            line: self.line,
            col: self.col,
            width: self.width,
        };
        self.line_text = Some(map.line_of(&origin).to_owned());
    }

    /// One line: `file:line:col: error: what; what is allowed`.
    pub fn summary(&self) -> String {
        let mut out = format!(
            "{}:{}:{}: {}: {}",
            self.path.display(),
            self.line,
            self.col,
            self.severity,
            self.message
        );
        if let Some(help) = &self.help {
            out.push_str("; ");
            out.push_str(help);
        }
        out
    }

    /// The whole message over several lines, without a newline at the end.
    pub fn render(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}: {}: {}",
            self.path.display(),
            self.line,
            self.col,
            self.severity,
            self.message
        )?;
        if let Some(line) = &self.line_text {
            let excerpt = Excerpt::new(line, self.col as usize - 1, self.width as usize);
            write!(f, "\n{:>5} | {}", self.line, excerpt.text)?;
            write!(
                f,
                "\n      | {:indent$}{:^<width$}",
                "",
                "",
                indent = excerpt.start,
                width = excerpt.width
            )?;
        }
        if let Some(related) = &self.related {
            write!(
                f,
                "\nnote: {}:{}:{}: {}",
                related.path.display(),
                related.line,
                related.col,
                related.message
            )?;
        }
        if let Some(help) = &self.help {
            write!(f, "\nhelp: {help}")?;
        }
        Ok(())
    }
}

/// The part of a source line that is shown: a window around the span, safe to print on a terminal.
struct Excerpt {
    text: String,
    start: usize,
    width: usize,
}

impl Excerpt {
    /// Longest excerpt in characters.
    const WINDOW: usize = 140;
    /// Characters kept before the span when the line is too long.
    const LEAD: usize = 40;

    fn new(line: &str, start: usize, width: usize) -> Self {
        let length = line.chars().count();
        let skip = if length > Self::WINDOW {
            start.saturating_sub(Self::LEAD)
        } else {
            0
        };
        let mut text: String = line
            .chars()
            .skip(skip)
            .take(Self::WINDOW)
            .map(printable)
            .collect();
        let mut start = start - skip.min(start);
        if skip > 0 {
            text.insert_str(0, "...");
            start += 3;
        }
        let is_cut = skip + Self::WINDOW < length;
        if !is_cut {
            // White space at the end is not seen: a caret below it would stand far behind the line.
            text.truncate(text.trim_end().len());
        }
        let shown = text.chars().count();
        if is_cut {
            text.push_str("...");
        }
        let start = start.min(shown);
        Self {
            text,
            start,
            width: width.min(shown - start).max(1),
        }
    }
}

/// One column per character, and no control sequences of a file reach the terminal.
pub(crate) fn printable(c: char) -> char {
    match c {
        '\t' => ' ',
        c if c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}') =>
        {
            '\u{fffd}'
        }
        c => c,
    }
}

/// Messages may quote the file, also those of the TOML parser: no control characters get through.
fn one_line(text: String) -> String {
    if text.chars().all(|c| printable(c) == c) {
        return text;
    }
    text.chars().map(printable).collect()
}

/// Text of a file inside a message: in quotes, shortened, without control characters.
pub(crate) fn quote(text: &str) -> String {
    const LONGEST: usize = 80;
    let mut out = String::from("\"");
    out.extend(text.chars().take(LONGEST).map(printable));
    if text.chars().nth(LONGEST).is_some() {
        out.push_str("...");
    }
    out.push('"');
    out
}

/// All problems of all files, sorted by file in merge order, then by line and column. As an error, at least one is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostics {
    /// The problems, sorted.
    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many of them are errors.
    pub fn error_count(&self) -> usize {
        self.0
            .iter()
            .filter(|one| one.severity == Severity::Error)
            .count()
    }

    /// The problems as a list.
    pub fn into_vec(self) -> Vec<Diagnostic> {
        self.0
    }
}

impl<'a> IntoIterator for &'a Diagnostics {
    type Item = &'a Diagnostic;
    type IntoIter = std::slice::Iter<'a, Diagnostic>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl IntoIterator for Diagnostics {
    type Item = Diagnostic;
    type IntoIter = std::vec::IntoIter<Diagnostic>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl fmt::Display for Diagnostics {
    /// Every problem in full, one after the other, without a newline at the end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, one) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            one.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}

/// Gathers diagnostics while files are read and checked.
#[derive(Default)]
pub(crate) struct Report {
    found: Vec<Diagnostic>,
}

impl Report {
    pub(crate) fn push(&mut self, diagnostic: Diagnostic) {
        self.found.push(diagnostic);
    }

    /// Sorted, without repeats, each with its source line.
    pub(crate) fn finish(mut self, maps: &[SourceMap<'_>]) -> Diagnostics {
        self.found.sort_by(|a, b| {
            (a.source, a.line, a.col, a.severity, &a.message)
                .cmp(&(b.source, b.line, b.col, b.severity, &b.message))
        });
        self.found.dedup();
        for one in &mut self.found {
            if let Some(map) = maps.get(one.source as usize) {
                one.attach_line(map);
            }
        }
        Diagnostics(self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut_around_the_span() {
        let line = format!("{}HERE{}", "a".repeat(300), "b".repeat(300));
        let excerpt = Excerpt::new(&line, 300, 4);
        let shown: String = excerpt
            .text
            .chars()
            .skip(excerpt.start)
            .take(excerpt.width)
            .collect();
        assert_eq!(shown, "HERE");
        assert!(excerpt.text.starts_with("...a") && excerpt.text.ends_with("b..."));
    }

    #[test]
    fn control_characters_are_not_printed() {
        assert_eq!(
            quote("a\u{1b}[31mb\tc\u{202e}"),
            "\"a\u{fffd}[31mb c\u{fffd}\""
        );
        assert_eq!(quote(&"x".repeat(200)).len(), 80 + 2 + 3);
    }
}
