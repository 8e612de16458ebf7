//! Which cgroups are a tenant: an exact path or a glob.

use std::fmt;

/// A cgroup path below the cgroup root, such as `/gpu.slice/vision.slice`, or a glob that names several.
///
/// - `*` stands for any characters of one component, `?` for one character, `[a-z]` for one of these, `[!a-z]` for one that
///   is not.
/// - `**` as a whole component stands for any number of components, also none; at the end of the pattern for at least one.
/// - There is no escape character, since systemd's unit names contain `\`. `[*]` is a literal star.
///
/// A pattern never matches across components otherwise, and never the root cgroup. All cgroups that a glob matches are one
/// tenant and share its budgets.
#[derive(Clone)]
pub struct CgroupPattern {
    text: String,
    /// Without the leading slash. A `**` at the end is stored as `**`, `*`.
    components: Vec<Component>,
    exact: bool,
    /// Length of the part of `text` that every match starts with, in bytes.
    literal: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Component {
    AnyDepth,
    Name(Vec<Token>),
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Char(char),
    AnyChar,
    AnyRun,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
}

/// Why a text is no [`CgroupPattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CgroupPatternError {
    /// It does not start with `/`.
    #[error("the path does not start with /")]
    Relative,
    /// It is `/`: everything on the host would be one tenant, the daemon with it.
    #[error("the root cgroup can't be a tenant")]
    Root,
    /// It ends with `/`.
    #[error("the path ends with /")]
    TrailingSlash,
    /// It has `//`.
    #[error("the path has an empty component")]
    EmptyComponent,
    /// It has a component `.` or `..`.
    #[error("the path has a component {component:?}")]
    DotComponent {
        /// The component.
        component: String,
    },
    /// `**` together with other characters in one component.
    #[error("** does not stand alone between slashes")]
    DoubleStar,
    /// A `[` without `]`, or a `[]` with nothing in it.
    #[error("a [ without its ]")]
    OpenBracket,
    /// A range whose end is before its start.
    #[error("the range {from}-{to} is empty")]
    EmptyRange {
        /// First character.
        from: char,
        /// Last character.
        to: char,
    },
    /// Characters that no cgroup's name has.
    #[error("the path has a control character")]
    ControlCharacter,
    /// Longer than any path, or a component longer than any file name.
    #[error("the path is too long")]
    TooLong,
    /// It starts with the mount point.
    #[error("the path starts with the mount point /sys/fs/cgroup")]
    MountPoint,
}

impl CgroupPatternError {
    /// What is allowed, for messages.
    pub fn help(&self) -> &'static str {
        match self {
            Self::MountPoint | Self::Relative => {
                "a cgroup is named from the cgroup root, as /proc/PID/cgroup shows it after the last colon: \"/gpu.slice/vision.slice\""
            }
            Self::Root => "name a slice below it, or \"/*\" for all slices together",
            Self::TrailingSlash => "leave the last / out: the cgroups below are governed anyway",
            Self::EmptyComponent => "leave one / out",
            Self::DotComponent { .. } => "write the path without \".\" and \"..\"",
            Self::DoubleStar => "write \"/a/**/b\" for any depth, or \"*\" within a component",
            Self::OpenBracket | Self::EmptyRange { .. } => {
                "[a-z] is one of these characters, [!a-z] one that is not, [[] a literal ["
            }
            Self::ControlCharacter => "cgroup names are printable text",
            Self::TooLong => "a component has at most 255 bytes, a path 4095",
        }
    }
}

impl CgroupPattern {
    /// Reads an exact path or a glob.
    pub fn parse(text: &str) -> Result<Self, CgroupPatternError> {
        if text.len() > 4095 {
            return Err(CgroupPatternError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(CgroupPatternError::ControlCharacter);
        }
        let rest = text.strip_prefix('/').ok_or(CgroupPatternError::Relative)?;
        if rest.is_empty() {
            return Err(CgroupPatternError::Root);
        }
        if text == "/sys/fs/cgroup" || text.starts_with("/sys/fs/cgroup/") {
            return Err(CgroupPatternError::MountPoint);
        }
        if rest.ends_with('/') {
            return Err(CgroupPatternError::TrailingSlash);
        }
        let mut components: Vec<Component> = Vec::new();
        for part in rest.split('/') {
            match part {
                "" => return Err(CgroupPatternError::EmptyComponent),
                "." | ".." => {
                    return Err(CgroupPatternError::DotComponent {
                        component: part.to_owned(),
                    });
                }
                "**" => {
                    if components.last() != Some(&Component::AnyDepth) {
                        components.push(Component::AnyDepth);
                    }
                }
                part => components.push(Component::Name(parse_component(part)?)),
            }
        }
        if components.last() == Some(&Component::AnyDepth) {
            components.push(Component::Name(vec![Token::AnyRun]));
        }
        let exact = components.iter().all(Component::is_literal);
        let literal = if exact {
            text.len()
        } else {
            text.find(['*', '?', '[']).unwrap_or(text.len())
        };
        Ok(Self {
            text: text.to_owned(),
            components,
            exact,
            literal,
        })
    }

    /// Stands for a cgroup that could not be read. Matches nothing.
    pub(crate) fn nowhere() -> Self {
        Self {
            text: String::new(),
            components: Vec::new(),
            exact: true,
            literal: 0,
        }
    }

    pub(crate) fn is_nowhere(&self) -> bool {
        self.text.is_empty()
    }

    /// The pattern as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it names one path, without wildcards.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// The longest directory that every match is, or lies below: the path itself if it is exact, otherwise what comes before
    /// the first component with a wildcard. `/` if that is the first one.
    pub fn literal_prefix(&self) -> &str {
        if self.exact {
            return &self.text;
        }
        match self.text[..self.literal].rfind('/') {
            None | Some(0) => "/",
            Some(slash) => &self.text[..slash],
        }
    }

    /// What every match starts with; unlike [`Self::literal_prefix`] it may end within a component.
    pub(crate) fn literal_text(&self) -> &str {
        &self.text[..self.literal]
    }

    /// Whether `path`, from the cgroup root, is a root of this tenant. Cgroups below a match are governed with it, but do not
    /// match by that.
    pub fn matches(&self, path: &str) -> bool {
        if self.exact {
            return self.text == path;
        }
        if !path.starts_with(&self.text[..self.literal]) {
            return false;
        }
        let Some(rest) = path.strip_prefix('/') else {
            return false;
        };
        let parts: Vec<&str> = rest.split('/').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return false;
        }
        star_match(
            &self.components,
            &parts,
            |component| *component == Component::AnyDepth,
            |component, part| match component {
                Component::AnyDepth => false,
                Component::Name(tokens) => {
                    let chars: Vec<char> = part.chars().collect();
                    star_match(
                        tokens,
                        &chars,
                        |token| *token == Token::AnyRun,
                        |token, c| token.matches(*c),
                    )
                }
            },
        )
    }

    /// Whether `path` is a root of this tenant or lies below one.
    pub fn governs(&self, path: &str) -> bool {
        self.matches(path) || ancestors(path).any(|above| self.matches(above))
    }

    /// Whether some path is matched by both.
    pub fn overlaps(&self, other: &Self) -> bool {
        match (self.exact, other.exact) {
            (true, true) => self.text == other.text,
            (true, false) => other.matches(&self.text),
            (false, true) => self.matches(&other.text),
            (false, false) => {
                let (a, b) = (self.literal_text(), other.literal_text());
                (a.starts_with(b) || b.starts_with(a))
                    && last_components_can_meet(&self.components, &other.components)
                    && intersect(
                        &self.components,
                        &other.components,
                        &Component::is_any_depth,
                        &components_meet,
                    )
            }
        }
    }
}

impl PartialEq for CgroupPattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for CgroupPattern {}

impl fmt::Debug for CgroupPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CgroupPattern({:?})", self.text)
    }
}

impl fmt::Display for CgroupPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The paths above `path`, nearest first, without the root.
pub(crate) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.bytes()
        .enumerate()
        .rev()
        .filter(|(at, byte)| *byte == b'/' && *at > 0)
        .map(|(at, _)| &path[..at])
}

fn parse_component(part: &str) -> Result<Vec<Token>, CgroupPatternError> {
    let mut tokens = Vec::new();
    let mut chars = part.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '*' => {
                if tokens.last() == Some(&Token::AnyRun) {
                    return Err(CgroupPatternError::DoubleStar);
                }
                tokens.push(Token::AnyRun);
            }
            '?' => tokens.push(Token::AnyChar),
            '[' => {
                let negated = chars.next_if(|c| matches!(c, '!' | '^')).is_some();
                let mut ranges = Vec::new();
                loop {
                    let from = chars.next().ok_or(CgroupPatternError::OpenBracket)?;
                    // A ] that comes first is a character of the class.
                    if from == ']' && !ranges.is_empty() {
                        break;
                    }
                    let mut ahead = chars.clone();
                    let to = match (ahead.next(), ahead.next()) {
                        (Some('-'), Some(to)) if to != ']' => {
                            chars = ahead;
                            to
                        }
                        _ => from,
                    };
                    if to < from {
                        return Err(CgroupPatternError::EmptyRange { from, to });
                    }
                    ranges.push((from, to));
                }
                tokens.push(Token::Class { negated, ranges });
            }
            c => tokens.push(Token::Char(c)),
        }
    }
    if tokens.iter().all(|token| matches!(token, Token::Char(_))) && part.len() > 255 {
        return Err(CgroupPatternError::TooLong);
    }
    Ok(tokens)
}

impl Component {
    fn is_literal(&self) -> bool {
        matches!(self, Self::Name(tokens) if tokens.iter().all(|token| matches!(token, Token::Char(_))))
    }

    fn is_any_depth(&self) -> bool {
        *self == Self::AnyDepth
    }
}

impl Token {
    fn matches(&self, c: char) -> bool {
        match self {
            Self::Char(own) => *own == c,
            Self::AnyChar => true,
            Self::AnyRun => false,
            Self::Class { negated, ranges } => {
                ranges.iter().any(|(from, to)| (*from..=*to).contains(&c)) != *negated
            }
        }
    }

    fn is_any_run(&self) -> bool {
        *self == Self::AnyRun
    }

    /// Whether one character is matched by both. Neither is a run.
    fn meets(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Char(c), token) | (token, Self::Char(c)) => token.matches(*c),
            (Self::Class { ranges: a, .. }, Self::Class { ranges: b, .. }) => {
                // If the two sets meet at all, they do where one of their ranges starts, or just behind one.
                let edges = a
                    .iter()
                    .chain(b)
                    .flat_map(|(from, to)| [Some(*from), char::from_u32(u32::from(*to) + 1)]);
                edges.flatten().any(|c| self.matches(c) && other.matches(c))
            }
            _ => true,
        }
    }
}

/// Wildcard matching with one kind of star, in time `pattern × items` at most: only the last star seen is ever widened.
fn star_match<P, I>(
    pattern: &[P],
    items: &[I],
    is_star: impl Fn(&P) -> bool,
    one: impl Fn(&P, &I) -> bool,
) -> bool {
    let (mut p, mut i) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while i < items.len() {
        if p < pattern.len() && is_star(&pattern[p]) {
            retry = Some((p + 1, i));
            p += 1;
        } else if p < pattern.len() && one(&pattern[p], &items[i]) {
            p += 1;
            i += 1;
        } else if let Some((after_star, from)) = retry {
            retry = Some((after_star, from + 1));
            p = after_star;
            i = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(is_star)
}

/// Whether some sequence is matched by both patterns.
fn intersect<P>(
    a: &[P],
    b: &[P],
    is_star: &impl Fn(&P) -> bool,
    meets: &impl Fn(&P, &P) -> bool,
) -> bool {
    // meet[j]: whether the rest of a from i and the rest of b from j have a sequence in common; i counts down.
    let mut next = vec![false; b.len() + 1];
    for i in (0..=a.len()).rev() {
        let mut meet = vec![false; b.len() + 1];
        for j in (0..=b.len()).rev() {
            meet[j] = match (a.get(i), b.get(j)) {
                (None, None) => true,
                (Some(x), Some(y)) if !is_star(x) && !is_star(y) => meets(x, y) && next[j + 1],
                (x, y) => {
                    (x.is_some_and(is_star) && (next[j] || (j < b.len() && meet[j + 1])))
                        || (y.is_some_and(is_star) && (meet[j + 1] || (i < a.len() && next[j])))
                }
            };
        }
        next = meet;
    }
    next[0]
}

/// Whether the last components have no different letters at either end. Many globs differ there, and this is cheap.
fn last_components_can_meet(a: &[Component], b: &[Component]) -> bool {
    let (Some(Component::Name(a)), Some(Component::Name(b))) = (a.last(), b.last()) else {
        return true;
    };
    // Up to the first token that is no letter, the letters stand below each other.
    let agree = |pair: (&Token, &Token)| match pair {
        (Token::Char(x), Token::Char(y)) => Some(x == y),
        _ => None,
    };
    a.iter().zip(b).map_while(agree).all(|same| same)
        && a.iter()
            .rev()
            .zip(b.iter().rev())
            .map_while(agree)
            .all(|same| same)
}

fn components_meet(a: &Component, b: &Component) -> bool {
    match (a, b) {
        (Component::Name(a), Component::Name(b)) => {
            intersect(a, b, &Token::is_any_run, &Token::meets)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> CgroupPattern {
        CgroupPattern::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn exact_paths() {
        let exact = pattern("/gpu.slice/vision.slice");
        assert!(exact.is_exact() && exact.matches("/gpu.slice/vision.slice"));
        assert!(
            !exact.matches("/gpu.slice/vision.slice/a")
                && !exact.matches("/gpu.slice")
                && !exact.matches("/")
        );
        assert_eq!(exact.literal_prefix(), "/gpu.slice/vision.slice");
        assert!(
            exact.governs("/gpu.slice/vision.slice/a/b")
                && !exact.governs("/gpu.slice/vision.slice2")
        );
        assert!(pattern(r"/dev-hugepages\x2d1.mount").matches(r"/dev-hugepages\x2d1.mount"));
    }

    #[test]
    fn globs() {
        for (glob, good, bad) in [
            (
                "/a/*",
                &["/a/b", "/a/b.c"][..],
                &["/a", "/a/", "/a/b/c", "/b/b", "a/b"][..],
            ),
            (
                "/a/job-?",
                &["/a/job-1", "/a/job-ä"],
                &["/a/job-", "/a/job-12"],
            ),
            (
                "/a/job-[0-9x]",
                &["/a/job-7", "/a/job-x"],
                &["/a/job-y", "/a/job-"],
            ),
            ("/a/[!ab]*", &["/a/c", "/a/cd"], &["/a/a", "/a/bc"]),
            ("/a/[]x]", &["/a/]", "/a/x"], &["/a/[]x]"]),
            ("/a/[*]", &["/a/*"], &["/a/b"]),
            ("/a/[x-]", &["/a/x", "/a/-"], &["/a/y"]),
            (
                "/a/*-*.scope",
                &["/a/x-1.scope", "/a/--.scope"],
                &["/a/x1.scope", "/a/x-1.scopes"],
            ),
            ("/a/**", &["/a/b", "/a/b/c"], &["/a", "/ab/c", "/"]),
            (
                "/a/**/z",
                &["/a/z", "/a/b/z", "/a/b/c/z"],
                &["/a/b", "/a", "/z"],
            ),
            ("/**/z", &["/z", "/a/z"], &["/a", "/z/a"]),
            ("/**", &["/a", "/a/b"], &["/", ""]),
            ("/a/**/**/z", &["/a/z", "/a/b/z"], &["/a/zz"]),
            ("/*/b/*", &["/a/b/c"], &["/a/b", "/a/c/c"]),
        ] {
            let glob = pattern(glob);
            assert!(!glob.is_exact());
            for path in good {
                assert!(glob.matches(path), "{glob} {path}");
            }
            for path in bad {
                assert!(!glob.matches(path), "{glob} {path}");
            }
        }
    }

    #[test]
    fn prefixes() {
        for (glob, prefix) in [
            ("/a/b/job-*", "/a/b"),
            ("/*", "/"),
            ("/a*", "/"),
            ("/a/**/z", "/a"),
            ("/a/[b]/c", "/a"),
            ("/a/b", "/a/b"),
        ] {
            assert_eq!(pattern(glob).literal_prefix(), prefix, "{glob}");
        }
    }

    #[test]
    fn bad_patterns() {
        use CgroupPatternError as E;
        for (text, want) in [
            ("", E::Relative),
            ("a/b", E::Relative),
            ("/", E::Root),
            ("/a/", E::TrailingSlash),
            ("//", E::TrailingSlash),
            ("/a//b", E::EmptyComponent),
            (
                "/a/../b",
                E::DotComponent {
                    component: "..".into(),
                },
            ),
            (
                "/./a",
                E::DotComponent {
                    component: ".".into(),
                },
            ),
            ("/a**", E::DoubleStar),
            ("/a/***", E::DoubleStar),
            ("/a/[b", E::OpenBracket),
            ("/a/[]", E::OpenBracket),
            ("/a/[b/c]", E::OpenBracket),
            ("/a/[z-a]", E::EmptyRange { from: 'z', to: 'a' }),
            ("/a\n", E::ControlCharacter),
            ("/sys/fs/cgroup/a", E::MountPoint),
        ] {
            assert_eq!(CgroupPattern::parse(text), Err(want), "{text:?}");
        }
        assert_eq!(
            CgroupPattern::parse(&format!("/{}", "a".repeat(256))),
            Err(E::TooLong)
        );
        assert_eq!(CgroupPattern::parse(&"/a".repeat(3000)), Err(E::TooLong));
    }

    #[test]
    fn overlaps() {
        for (a, b, want) in [
            ("/a/b", "/a/b", true),
            ("/a/b", "/a/c", false),
            ("/a/b", "/a/*", true),
            ("/a/b/c", "/a/*", false),
            ("/a/*", "/a/job-*", true),
            ("/a/x*", "/a/*y", true),
            ("/a/x*", "/a/y*", false),
            ("/a/*x", "/a/*y", false),
            ("/a/[0-9]", "/a/[a-z]", false),
            ("/a/[0-9]", "/a/[!0-9]", false),
            ("/a/[0-9]", "/a/[!0-8]", true),
            ("/a/[!0-8]", "/a/[!a-z]", true),
            ("/a/?", "/a/[x-z]", true),
            ("/a/?", "/a/??*", false),
            ("/a/**", "/a/b/*", true),
            ("/a/**/z", "/a/b/*", true),
            ("/a/**/z", "/b/**/z", false),
            ("/a/**/z", "/a/**/y", false),
            ("/**/z", "/a/*", true),
            ("/a/*", "/a/*/*", false),
        ] {
            let (a, b) = (pattern(a), pattern(b));
            assert_eq!(a.overlaps(&b), want, "{a} {b}");
            assert_eq!(b.overlaps(&a), want, "{b} {a}");
        }
    }

    #[test]
    fn long_globs_take_no_time() {
        let glob = pattern(&format!("/{}", "*a".repeat(100)));
        assert!(!glob.matches(&format!("/{}b", "a".repeat(250))));
        let deep = pattern(&"/**/a".repeat(300));
        assert!(!deep.matches(&format!("{}/b", "/a".repeat(2000))));
        assert!(deep.overlaps(&pattern(&"/**/*".repeat(400))));
    }

    #[test]
    fn paths_above() {
        assert_eq!(ancestors("/a/b/c").collect::<Vec<_>>(), ["/a/b", "/a"]);
        assert_eq!(ancestors("/a").count(), 0);
    }
}
