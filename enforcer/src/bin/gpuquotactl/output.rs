//! Text for people: aligned columns, sizes, bars and colours; and JSON for programs.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal, Write as _},
};

use serde::Serialize;

use crate::error::Error;

/// How a piece of text stands out on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Warn,
    Bad,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Good => "32",
            Self::Warn => "33",
            Self::Bad => "31",
        }
    }
}

/// Where the text goes.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    colour: bool,
    unicode: bool,
}

impl Screen {
    /// Standard output: colours on a terminal unless `NO_COLOR` is set, block characters in a UTF-8 locale.
    pub fn stdout() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_none_or(|term| term == "dumb");
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let utf8 = locale.is_some_and(|locale| {
            let locale = locale.to_string_lossy().to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        Self {
            colour: io::stdout().is_terminal() && set("NO_COLOR").is_none() && !dumb,
            unicode: utf8 && io::stdout().is_terminal(),
        }
    }

    /// Whether colours are wanted.
    pub fn has_colour(self) -> bool {
        self.colour
    }

    /// Whether block characters can be shown.
    pub fn has_unicode(self) -> bool {
        self.unicode
    }

    #[cfg(test)]
    pub fn colourful() -> Self {
        Self {
            colour: true,
            unicode: true,
        }
    }

    #[cfg(test)]
    pub fn plain() -> Self {
        Self {
            colour: false,
            unicode: false,
        }
    }

    /// Marks text that is already harmless.
    pub fn paint(self, style: Style, text: &str) -> String {
        if !self.colour || style == Style::Plain || text.is_empty() {
            return text.to_owned();
        }
        format!("\x1b[{}m{text}\x1b[0m", style.code())
    }

    /// A bar of 16 characters that is full at `limit`.
    pub fn bar(self, used: u64, limit: u64) -> String {
        const WIDTH: u64 = 16;
        let filled = if limit == 0 {
            if used == 0 { 0 } else { WIDTH }
        } else {
            let share = u128::from(used.min(limit)) * u128::from(WIDTH) / u128::from(limit);
            u64::try_from(share).unwrap_or(WIDTH)
        };
        // Something in use is never shown as nothing.
        let filled = usize::try_from(filled.max(u64::from(used != 0))).unwrap_or(0);
        let empty = usize::try_from(WIDTH).unwrap_or(0) - filled;
        if self.unicode {
            format!("{}{}", "█".repeat(filled), "░".repeat(empty))
        } else {
            format!("[{}{}]", "#".repeat(filled), "-".repeat(empty))
        }
    }
}

/// Makes text from the daemon or a tenant harmless on a terminal: no control sequences, and nothing that is
/// invisible or turns the direction of writing.
pub fn clean(text: &str) -> String {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    text.chars()
        .map(|c| if harmful(c) { '\u{fffd}' } else { c })
        .collect()
}

/// `1 tenant`, `2 tenants`.
pub fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A size for people, in powers of 1024, rounded to one decimal.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = 0;
    let mut scale = 1024_u64;
    while unit + 1 < UNITS.len() && bytes / scale >= 1024 {
        unit += 1;
        scale <<= 10;
    }
    if bytes.is_multiple_of(scale) {
        return format!("{} {}", bytes / scale, UNITS[unit]);
    }
    let tenths = (u128::from(bytes) * 10 + u128::from(scale / 2)) / u128::from(scale);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// A limit for people.
pub fn limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "max".to_owned(), size)
}

/// How a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Aligned columns under headings.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<(String, Style)>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row of as many cells as there are columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = (String, Style)>) {
        let cells: Vec<(String, Style)> = cells
            .into_iter()
            .map(|(text, style)| (clean(&text), style))
            .collect();
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// The text, with a line feed after every line.
    pub fn render(&self, screen: Screen) -> String {
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, (heading, _))| {
                self.rows
                    .iter()
                    .map(|row| row[i].0.chars().count())
                    .chain([heading.len()])
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let heading: Vec<_> = self
            .columns
            .iter()
            .map(|(heading, _)| ((*heading).to_owned(), Style::Bold))
            .collect();
        let mut text = String::new();
        for row in std::iter::once(&heading).chain(&self.rows) {
            let mut line = String::new();
            for (i, (cell, style)) in row.iter().enumerate() {
                if i > 0 {
                    line.push_str("  ");
                }
                let padding = " ".repeat(widths[i] - cell.chars().count());
                let painted = screen.paint(*style, cell);
                match self.columns[i].1 {
                    Align::Left => line.extend([painted, padding]),
                    Align::Right => line.extend([padding, painted]),
                }
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

/// Writes to standard output. A reader that left early, such as `head`, is no error.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Error::Reported(0)),
        other => other.map_err(Error::Output),
    }
}

/// Writes a value as indented JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Error> {
    let mut text =
        serde_json::to_string_pretty(value).map_err(|error| Error::Output(error.into()))?;
    text.push('\n');
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_and_right() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            ((1 << 20) + (1 << 19), "1.5 MiB"),
            (40 << 30, "40 GiB"),
            (150_754_820_096, "140.4 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(limit(None), "max");
    }

    #[test]
    fn a_bar_shows_that_something_is_used_and_never_overflows() {
        let screen = Screen::plain();
        assert_eq!(screen.bar(0, 100), "[----------------]");
        assert_eq!(screen.bar(1, 1 << 40), "[#---------------]");
        assert_eq!(screen.bar(50, 100), "[########--------]");
        assert_eq!(screen.bar(u64::MAX, 1), "[################]");
        assert_eq!(screen.bar(1, 0), "[################]");
    }

    #[test]
    fn text_of_a_tenant_cannot_move_the_cursor() {
        let mut table = Table::new(&[("A", Align::Left), ("B", Align::Right)]);
        table.row([
            ("x\x1b[2J\n".into(), Style::Plain),
            ("1".into(), Style::Bad),
        ]);
        let text = table.render(Screen::plain());
        assert_eq!(text, "A       B\nx\u{fffd}[2J\u{fffd}  1\n");
    }

    #[test]
    fn colours_do_not_change_the_alignment() {
        let mut table = Table::new(&[("A", Align::Left), ("B", Align::Left)]);
        table.row([("long".into(), Style::Bad), ("1".into(), Style::Plain)]);
        table.row([("s".into(), Style::Good), ("2".into(), Style::Plain)]);
        let screen = Screen {
            colour: true,
            unicode: false,
        };
        let text = table.render(screen);
        assert!(text.contains("\x1b[31mlong\x1b[0m  1\n"), "{text:?}");
        assert!(text.contains("\x1b[32ms\x1b[0m     2\n"), "{text:?}");
    }
}
