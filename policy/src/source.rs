//! Policy files, their order, and where in them a value came from.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The directory that a policy file lies in. Later variants win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// `/usr/lib/gpuquota/policy.d`: shipped by packages.
    Vendor,
    /// `/etc/gpuquota/policy.d`: the administrator's.
    Admin,
    /// `/run/gpuquota/policy.d`: until the next boot.
    Runtime,
}

impl Layer {
    /// All layers, weakest first.
    pub const ALL: [Self; 3] = [Self::Vendor, Self::Admin, Self::Runtime];

    /// The directory of this layer.
    pub const fn directory(self) -> &'static str {
        match self {
            Self::Vendor => "/usr/lib/gpuquota/policy.d",
            Self::Admin => "/etc/gpuquota/policy.d",
            Self::Runtime => "/run/gpuquota/policy.d",
        }
    }
}

/// The text of one policy file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where the text came from; only shown in messages.
    pub path: PathBuf,
    /// The bytes of the file, UTF-8 if it is a good one.
    pub text: Vec<u8>,
    /// The directory that the file lies in.
    pub layer: Layer,
}

impl Source {
    /// A source from its parts.
    pub fn new(path: impl Into<PathBuf>, layer: Layer, text: impl Into<Vec<u8>>) -> Self {
        Self {
            path: path.into(),
            text: text.into(),
            layer,
        }
    }
}

/// Picks the files that count and puts them into merge order: later ones win.
///
/// - Only names that end in `.toml` and do not start with a dot count.
/// - Files are sorted by layer, then by file name, byte by byte.
/// - A file in a higher layer replaces a file of the same name in a lower one entirely. An empty file, or a link to `/dev/null`,
///   therefore masks the lower one, since its own text adds nothing.
///
/// If one layer has the same file name twice (two folders given as one layer), the one whose path sorts last is kept.
pub fn merge_order(files: &[(Layer, PathBuf)]) -> Vec<(Layer, PathBuf)> {
    let mut by_name: BTreeMap<&OsStr, &(Layer, PathBuf)> = BTreeMap::new();
    for file in files {
        let Some(name) = file.1.file_name() else {
            continue;
        };
        if !counts(name) {
            continue;
        }
        by_name
            .entry(name)
            .and_modify(|kept| *kept = (*kept).max(file))
            .or_insert(file);
    }
    let mut kept: Vec<(&OsStr, &(Layer, PathBuf))> = by_name.into_iter().collect();
    // Stable: inside a layer the order by name stays.
    kept.sort_by_key(|(_, (layer, _))| *layer);
    kept.into_iter().map(|(_, file)| file.clone()).collect()
}

fn counts(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    bytes.ends_with(b".toml") && !bytes.starts_with(b".")
}

/// Where a value was written. Lines and columns count from 1, columns in characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// Place of the file in merge order; sorts messages.
    pub(crate) source: u32,
    /// The file.
    pub path: Arc<Path>,
    /// Line, from 1. 0 for built-in values.
    pub line: u32,
    /// Column in characters, from 1. 0 for built-in values.
    pub col: u32,
    /// Length in characters of what is meant, at least 1.
    pub(crate) width: u32,
}

impl Origin {
    /// The origin of values that no file gives.
    pub(crate) fn builtin() -> Self {
        Self {
            source: u32::MAX,
            path: Arc::from(Path::new("built-in")),
            line: 0,
            col: 0,
            width: 1,
        }
    }

    /// Whether the value is the program's own and stands in no file.
    pub fn is_builtin(&self) -> bool {
        self.source == u32::MAX
    }
}

impl fmt::Display for Origin {
    /// `file:line:col`, or `built-in`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_builtin() {
            return f.write_str("built-in");
        }
        write!(f, "{}:{}:{}", self.path.display(), self.line, self.col)
    }
}

/// A value together with its place in the policy files.
///
/// Two are equal when their values are: the same policy may be written in different files.
#[derive(Clone, Debug)]
pub struct Spanned<T> {
    /// The value.
    pub value: T,
    /// Where it was written.
    pub origin: Origin,
}

impl<T: PartialEq> PartialEq for Spanned<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: Eq> Eq for Spanned<T> {}

/// A source's text with its line starts, to turn byte offsets into lines and columns.
pub(crate) struct SourceMap<'a> {
    index: u32,
    path: Arc<Path>,
    text: &'a str,
    line_starts: Vec<usize>,
}

impl<'a> SourceMap<'a> {
    pub(crate) fn new(index: usize, path: &Path, text: &'a str) -> Self {
        let mut line_starts = vec![0];
        line_starts.extend(
            text.bytes()
                .enumerate()
                .filter(|(_, byte)| *byte == b'\n')
                .map(|(at, _)| at + 1),
        );
        Self {
            index: u32::try_from(index).unwrap_or(u32::MAX - 1),
            path: Arc::from(path),
            text,
            line_starts,
        }
    }

    pub(crate) fn text(&self) -> &'a str {
        self.text
    }

    /// The place of a byte span. Offsets past the end or inside a character move back to a valid one.
    pub(crate) fn origin(&self, span: std::ops::Range<usize>) -> Origin {
        let start = floor_boundary(self.text, span.start);
        let line = self
            .line_starts
            .partition_point(|line_start| *line_start <= start)
            - 1;
        let line_start = self.line_starts[line];
        let line_end = line_start + self.line_text(line).len();
        let end = floor_boundary(self.text, span.end).clamp(start, line_end.max(start));
        let before = &self.text[line_start..start];
        // A byte order mark takes no column in an editor.
        let before = before.strip_prefix('\u{feff}').unwrap_or(before);
        Origin {
            source: self.index,
            path: Arc::clone(&self.path),
            line: count(line + 1),
            col: count(before.chars().count() + 1),
            width: count(self.text[start..end].chars().count().max(1)),
        }
    }

    /// The text of the line that an origin of this source is on, without its end.
    pub(crate) fn line_of(&self, origin: &Origin) -> &'a str {
        let line = self.line_text((origin.line as usize).saturating_sub(1));
        line.strip_prefix('\u{feff}').unwrap_or(line)
    }

    fn line_text(&self, line: usize) -> &'a str {
        let start = self
            .line_starts
            .get(line)
            .copied()
            .unwrap_or(self.text.len());
        let end = self
            .line_starts
            .get(line + 1)
            .map_or(self.text.len(), |next| next - 1);
        let text = &self.text[start..end];
        text.strip_suffix('\r').unwrap_or(text)
    }
}

fn floor_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(files: &[(Layer, &str)]) -> Vec<String> {
        let files: Vec<_> = files
            .iter()
            .map(|(layer, path)| (*layer, PathBuf::from(path)))
            .collect();
        merge_order(&files)
            .into_iter()
            .map(|(_, path)| path.display().to_string())
            .collect()
    }

    #[test]
    fn layers_come_before_names() {
        let got = order(&[
            (Layer::Runtime, "/run/gpuquota/policy.d/10-a.toml"),
            (Layer::Admin, "/etc/gpuquota/policy.d/50-b.toml"),
            (Layer::Admin, "/etc/gpuquota/policy.d/05-c.toml"),
            (Layer::Vendor, "/usr/lib/gpuquota/policy.d/90-d.toml"),
        ]);
        assert_eq!(
            got,
            [
                "/usr/lib/gpuquota/policy.d/90-d.toml",
                "/etc/gpuquota/policy.d/05-c.toml",
                "/etc/gpuquota/policy.d/50-b.toml",
                "/run/gpuquota/policy.d/10-a.toml",
            ]
        );
    }

    #[test]
    fn a_higher_layer_masks_the_same_name() {
        let got = order(&[
            (Layer::Admin, "/etc/gpuquota/policy.d/50-a.toml"),
            (Layer::Vendor, "/usr/lib/gpuquota/policy.d/50-a.toml"),
            (Layer::Vendor, "/usr/lib/gpuquota/policy.d/60-b.toml"),
        ]);
        assert_eq!(
            got,
            [
                "/usr/lib/gpuquota/policy.d/60-b.toml",
                "/etc/gpuquota/policy.d/50-a.toml"
            ]
        );
    }

    #[test]
    fn other_files_do_not_count() {
        let got = order(&[
            (Layer::Admin, "/e/README"),
            (Layer::Admin, "/e/.a.toml"),
            (Layer::Admin, "/e/a.toml~"),
            (Layer::Admin, "/e/a.toml"),
        ]);
        assert_eq!(got, ["/e/a.toml"]);
    }

    #[test]
    fn columns_count_characters() {
        let map = SourceMap::new(0, Path::new("f"), "a\r\nä = \"ö€\"\nx");
        let at = map.text().find('"').expect("quote");
        let origin = map.origin(at..at + 7);
        assert_eq!((origin.line, origin.col, origin.width), (2, 5, 4));
        assert_eq!(map.line_of(&origin), "ä = \"ö€\"");
        let end = map.origin(9999..10_000);
        assert_eq!((end.line, end.col, end.width), (3, 2, 1));
    }

    #[test]
    fn a_byte_order_mark_takes_no_column() {
        let map = SourceMap::new(0, Path::new("f"), "\u{feff}abc = 1");
        let origin = map.origin(3..6);
        assert_eq!((origin.line, origin.col, origin.width), (1, 1, 3));
        assert_eq!(map.line_of(&origin), "abc = 1");
    }

    #[test]
    fn a_span_over_lines_ends_with_the_first() {
        let map = SourceMap::new(0, Path::new("f"), "ab\ncd\n");
        let origin = map.origin(1..5);
        assert_eq!((origin.line, origin.col, origin.width), (1, 2, 1));
    }
}
