//! Draws the model. What matters is said by words and signs as well as by colour.

use std::fmt::Write as _;

use gpuquota_enforcer::control::{Gpu, TenantGpu};
use ratatui::{
    buffer::Buffer,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::{Line, Span},
};

use super::{
    heat,
    model::{Model, Page, Row, share},
};
use crate::output::{Screen, clean, counted};

/// Narrower screens are cut off at the right.
pub const MIN_WIDTH: u16 = 60;
/// From here on there is room for more columns.
const WIDE: usize = 110;
/// Width that a GPU takes in the head.
const GPU_WIDTH: usize = 40;

/// How it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub screen: Screen,
    /// On a terminal: with selection and keys.
    pub live: bool,
}

/// What a piece of text says beyond its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Strong,
    Faint,
    Good,
    Warn,
    Bad,
}

impl Look {
    fn span(self, text: impl Into<String>, tone: Tone) -> Span<'static> {
        let style = match tone {
            Tone::Plain => Style::new(),
            Tone::Strong => Style::new().add_modifier(Modifier::BOLD),
            Tone::Faint => Style::new().add_modifier(Modifier::DIM),
            Tone::Good => self.colour(Color::Green),
            Tone::Warn => self.colour(Color::Yellow),
            Tone::Bad => self.colour(Color::Red).add_modifier(Modifier::BOLD),
        };
        Span::styled(text.into(), style)
    }

    fn colour(self, colour: Color) -> Style {
        if self.screen.has_colour() {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    /// Text that stands out.
    pub fn strong(self, text: String) -> Span<'static> {
        self.span(text, Tone::Strong)
    }

    /// A cell of a heat map: a mark, on a colour where there are colours.
    pub fn heat(self, mark: char, colour: Color) -> Span<'static> {
        let style = if self.screen.has_colour() {
            Style::new().bg(colour)
        } else {
            Style::new()
        };
        Span::styled(mark.to_string(), style)
    }

    /// A bar of `width` cells between brackets, full at `limit`, with a mark at `mark`.
    fn bar(self, used: u64, limit: u64, mark: Option<u64>, width: usize) -> String {
        let [full, empty, mark_sign] = if self.screen.has_unicode() {
            ['█', '░', '┃']
        } else {
            ['#', '-', '|']
        };
        let cells = |value: u64| {
            let part = u128::from(value.min(limit)) * (width as u128) / u128::from(limit.max(1));
            usize::try_from(part).unwrap_or(width)
        };
        // Something in use is never shown as nothing.
        let filled = cells(used).max(usize::from(used > 0)).min(width);
        let mark = mark
            .filter(|mark| *mark < limit)
            .map(|mark| cells(mark).min(width.saturating_sub(1)));
        let inner: String = (0..width)
            .map(|at| match mark {
                Some(mark) if mark == at => mark_sign,
                _ if at < filled => full,
                _ => empty,
            })
            .collect();
        format!("[{inner}]")
    }
}

/// Lines of a frame that shows everything.
pub fn height_of_all(model: &Model) -> u16 {
    let lines: usize = model
        .rows()
        .iter()
        .map(|row| lines_of(model, row).len())
        .sum();
    // Columns and, if there is no tenant, the line that says so.
    let list = lines.max(1) + 1;
    u16::try_from(head_lines(model, usize::MAX) + list).unwrap_or(u16::MAX)
}

/// Draws the model into `area`.
pub fn draw(model: &mut Model, look: Look, area: Rect, buffer: &mut Buffer) {
    let width = usize::from(area.width);
    let mut lines = head(model, look, width);
    let mut foot = Vec::new();
    if look.live {
        foot.push(foot_line(model, look));
    }
    if let Some(problem) = model.problem() {
        let text = format!("no news from the daemon: {}", clean(problem));
        foot.insert(0, Line::from(look.span(text, Tone::Bad)));
    }
    let room = usize::from(area.height).saturating_sub(lines.len() + foot.len());
    lines.extend(match model.page().clone() {
        Page::Tenants => tenants(model, look, width, room),
        Page::Processes(name) => processes(model, &name, look, room),
        Page::Heat => heat::lines(model, look, width, room),
        Page::Help => help(),
    });
    lines.truncate(usize::from(area.height).saturating_sub(foot.len()));
    for (y, line) in (area.top()..).zip(&lines) {
        buffer.set_line(area.left(), y, line, area.width);
    }
    let first = area
        .bottom()
        .saturating_sub(u16::try_from(foot.len()).unwrap_or(0));
    for (y, line) in (first.max(area.top())..area.bottom()).zip(&foot) {
        buffer.set_line(area.left(), y, line, area.width);
    }
}

fn gpus_in_a_line(width: usize) -> usize {
    (width / GPU_WIDTH).clamp(1, 4)
}

fn head_lines(model: &Model, width: usize) -> usize {
    1 + model
        .gpus()
        .len()
        .div_ceil(gpus_in_a_line(width.min(usize::from(u16::MAX))))
}

fn head(model: &Model, look: Look, width: usize) -> Vec<Line<'static>> {
    let (sort, reverse) = model.sort();
    let (filter, typing) = model.filter();
    let mut text = format!("{}, by {}", counted(model.tenants(), "tenant"), sort.word());
    if reverse {
        text.push_str(", reversed");
    }
    if model.hides_idle() {
        text.push_str(", idle ones hidden");
    }
    let mut title = vec![
        look.span("gpuquota  ", Tone::Strong),
        look.span(text, Tone::Plain),
    ];
    if typing || !filter.is_empty() {
        let cursor = if typing { "_" } else { "" };
        title.push(look.span(format!("  filter: {}{cursor}", clean(filter)), Tone::Warn));
    }
    if model.is_paused() {
        title.push(look.span("  PAUSED", Tone::Warn));
    }
    let mut lines = vec![Line::from(title)];
    for some in model.gpus().chunks(gpus_in_a_line(width)) {
        lines.push(Line::from(
            some.iter()
                .map(|gpu| gpu_text(gpu, look))
                .collect::<String>(),
        ));
    }
    lines
}

fn gpu_text(gpu: &Gpu, look: Look) -> String {
    let total = size(gpu.memory_total);
    let text = match gpu.memory_used {
        Some(used) => {
            let bar = look.bar(used, gpu.memory_total, None, 12);
            format!("GPU {:<2} {bar} {} of {total}", gpu.index, size(used))
        }
        None => format!("GPU {:<2} {:14} ? of {total}", gpu.index, ""),
    };
    format!("{text:<GPU_WIDTH$}")
}

/// Widths of the columns that are not fixed.
struct Columns {
    name: usize,
    bar: usize,
    wide: bool,
}

impl Columns {
    fn new(width: usize) -> Self {
        let wide = width >= WIDE;
        // Sign, GPU, percentage, used, high, max, denied and time with their gaps; peak, processes, launches, class.
        let fixed = 49 + if wide { 40 } else { 0 };
        let rest = width.saturating_sub(fixed).max(16);
        let name = (rest * 11 / 20).min(40);
        Self {
            name,
            bar: rest - name,
            wide,
        }
    }

    fn head(&self, look: Look) -> Line<'static> {
        let name = self.name;
        let bar = self.bar + 5;
        let mut text = format!(
            "  {:name$} GPU {:bar$} {:>7} {:>7} {:>7} {:>6} {:>5}",
            "TENANT", "OF MAX", "USED", "HIGH", "MAX", "DENIED", "TIME"
        );
        if self.wide {
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                " {:>7} {:>5} {:>9}  {:15}",
                "PEAK", "PROCS", "LAUNCH/S", "CLASS"
            );
        }
        Line::from(look.span(text, Tone::Strong))
    }
}

/// GPUs of a tenant that have a line: all, or those in use.
fn lines_of<'a>(model: &Model, row: &Row<'a>) -> Vec<&'a TenantGpu> {
    let gpus = row.tenant.gpus.iter();
    let mut lines: Vec<_> = gpus
        .filter(|gpu| !model.hides_idle() || gpu.memory_used > 0)
        .collect();
    if lines.is_empty() {
        lines.extend(row.tenant.gpus.first());
    }
    lines
}

fn tenants(model: &mut Model, look: Look, width: usize, room: usize) -> Vec<Line<'static>> {
    let columns = Columns::new(width);
    let mut lines = vec![columns.head(look)];
    let mut list = Vec::new();
    let mut keep = None;
    {
        let rows = model.rows();
        let selected = if look.live {
            model.position(&rows).or(Some(0))
        } else {
            None
        };
        for (at, row) in rows.iter().enumerate() {
            let from = list.len();
            for (i, gpu) in lines_of(model, row).into_iter().enumerate() {
                let mut line = tenant_line(model, row, gpu, i == 0, &columns, look);
                if selected == Some(at) {
                    line = line.style(Style::new().add_modifier(Modifier::REVERSED));
                }
                list.push(line);
            }
            if selected == Some(at) {
                keep = Some((from, list.len()));
            }
        }
    }
    if list.is_empty() {
        let text = if model.tenants() == 0 {
            "  No tenants: no policy file names one."
        } else {
            "  No tenant matches; Esc drops the filter, i shows idle ones."
        };
        lines.push(Line::from(look.span(text, Tone::Faint)));
        return lines;
    }
    let room = room.saturating_sub(1);
    let top = model.scroll(room, list.len(), keep);
    lines.extend(list.into_iter().skip(top).take(room));
    lines
}

fn tenant_line(
    model: &Model,
    row: &Row<'_>,
    gpu: &TenantGpu,
    first: bool,
    columns: &Columns,
    look: Look,
) -> Line<'static> {
    let (sign, tone) = condition(model, row, gpu);
    let name = if first {
        let indent = "  ".repeat(row.depth);
        cut(
            &format!("{indent}{}", clean(&row.tenant.name)),
            columns.name,
        )
    } else {
        String::new()
    };
    let card = model.gpus().iter().find(|card| card.index == gpu.gpu);
    let (limit, percent) = match (gpu.memory_max, share(gpu)) {
        (Some(max), Some(share)) => (max, format!("{:>3}%", (share / 10).min(999))),
        // Without a limit the bar is of the whole card.
        _ => (card.map_or(0, |card| card.memory_total), "   -".to_owned()),
    };
    let width = columns.name;
    let mut spans = vec![
        look.span(format!("{sign} "), tone),
        look.span(
            format!("{name:width$} "),
            if first { Tone::Strong } else { Tone::Plain },
        ),
        look.span(format!("{:>3} ", gpu.gpu), Tone::Plain),
        look.span(
            look.bar(gpu.memory_used, limit, gpu.memory_high, columns.bar - 2),
            tone,
        ),
        look.span(format!(" {percent}"), tone),
        look.span(format!(" {:>7}", size(gpu.memory_used)), tone),
        look.span(
            format!(
                " {:>7} {:>7}",
                bound(gpu.memory_high),
                bound(gpu.memory_max)
            ),
            Tone::Plain,
        ),
        look.span(
            format!(" {:>6}", gpu.denials),
            if model.new_denials(&row.tenant.name, gpu) > 0 {
                Tone::Bad
            } else {
                Tone::Plain
            },
        ),
        look.span(format!(" {:>5}", time_share(gpu)), Tone::Plain),
    ];
    if columns.wide {
        let launches = model.launches(row.tenant).filter(|_| first);
        let class = if first {
            row.tenant.class.as_deref().unwrap_or("-")
        } else {
            ""
        };
        spans.push(look.span(
            format!(
                " {:>7} {:>5} {:>9}  {}",
                size(gpu.memory_peak),
                gpu.processes.len(),
                launches.map_or_else(String::new, |rate| format!("{rate:.0}")),
                cut(&clean(class), 15)
            ),
            Tone::Plain,
        ));
    }
    Line::from(spans)
}

/// Part of the GPU's time in the last ten seconds.
fn time_share(gpu: &TenantGpu) -> String {
    gpu.time.as_ref().map_or_else(
        || "-".to_owned(),
        |time| format!("{:.0}%", time.share_10s * 100.0),
    )
}

/// The sign before a line, so that nothing is told by colour alone.
fn condition(model: &Model, row: &Row<'_>, gpu: &TenantGpu) -> (char, Tone) {
    let above = |limit: Option<u64>| limit.is_some_and(|limit| gpu.memory_used > limit);
    let full = gpu.memory_used > 0 && gpu.memory_max == Some(gpu.memory_used);
    let frozen = gpu
        .time
        .as_ref()
        .is_some_and(|time| !time.frozen.is_empty());
    if above(gpu.memory_max) {
        ('x', Tone::Bad)
    } else if frozen {
        ('F', Tone::Warn)
    } else if full || model.new_denials(&row.tenant.name, gpu) > 0 {
        ('!', Tone::Bad)
    } else if above(gpu.memory_high) {
        ('^', Tone::Warn)
    } else if gpu.memory_used > 0 {
        (' ', Tone::Good)
    } else {
        (' ', Tone::Plain)
    }
}

fn processes(model: &mut Model, name: &str, look: Look, room: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(tenant) = model.tenant(name) {
        let dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), clean);
        lines.push(Line::from(vec![
            look.span(clean(&tenant.name), Tone::Strong),
            look.span(
                format!(
                    "  class {}  parent {}",
                    dash(&tenant.class),
                    dash(&tenant.parent)
                ),
                Tone::Plain,
            ),
        ]));
        let state = if tenant.cgroups.is_empty() {
            "  (does not exist now)"
        } else {
            ""
        };
        lines.push(Line::from(format!(
            "cgroup {}{state}",
            clean(&tenant.cgroup)
        )));
        for gpu in &tenant.gpus {
            let memory = &gpu.memory;
            if memory.min > 0 || memory.host_used > 0 || memory.host_max.is_some() {
                lines.push(Line::from(format!(
                    "GPU {}: reserved {}, pinned in the host {} of {}",
                    gpu.gpu,
                    size(memory.min),
                    size(memory.host_used),
                    bound(memory.host_max)
                )));
            }
        }
        let head = format!(
            "{:>9} {:>3} {:>7} {:>5}  COMMAND",
            "PID", "GPU", "USED", "OF"
        );
        lines.push(Line::from(look.span(head, Tone::Strong)));
    }
    let room = room.saturating_sub(lines.len());
    let list: Vec<Line<'static>> = model
        .processes()
        .iter()
        .map(|process| {
            let of = process.gpu.memory_used.max(1);
            let percent = u128::from(process.used) * 100 / u128::from(of);
            Line::from(format!(
                "{:>9} {:>3} {:>7} {:>4}%  {}",
                process.pid,
                process.gpu.gpu,
                size(process.used),
                percent.min(100),
                clean(process.comm)
            ))
        })
        .collect();
    if list.is_empty() {
        let text = "  No process of its own holds GPU memory; nested tenants have theirs.";
        lines.push(Line::from(look.span(text, Tone::Faint)));
    }
    let top = model.scroll(room, list.len(), None);
    lines.extend(list.into_iter().skip(top).take(room));
    lines
}

fn foot_line(model: &Model, look: Look) -> Line<'static> {
    let text = match model.page() {
        _ if model.filter().1 => "type to filter   Enter keep   Esc drop",
        Page::Tenants => {
            "Enter processes  m heat map  / filter  s sort  i idle  p pause  ? help  q quit"
        }
        Page::Processes(_) | Page::Heat => "Up Down scroll  Esc back  p pause  q quit",
        Page::Help => "any key goes back",
    };
    Line::from(look.span(text, Tone::Faint))
}

fn help() -> Vec<Line<'static>> {
    [
        "Bars show the use of memory.max, or of the whole card where there is none; the",
        "mark is memory.high. Use includes that of nested tenants, which stand below.",
        "",
        "  x  above memory.max: nothing could refuse it      !  full, or refused just now",
        "  ^  above memory.high                              F  frozen",
        "  TIME is the part of the GPU's time in the last ten seconds.",
        "",
        "  Up Down k j, PgUp PgDn, Home End    select",
        "  Enter Right                         processes of the selected tenant",
        "  Esc Left                            back; drops the filter",
        "  m                                   memory of the last ten minutes",
        "  /                                   filter by name, cgroup or class",
        "  s r                                 next order, reverse it",
        "  t                                   tree or flat list",
        "  i                                   hide or show what is idle",
        "  p Space                             pause",
        "  q Ctrl-C                            quit",
    ]
    .into_iter()
    .map(Line::from)
    .collect()
}

/// At most seven characters: `140.4G`, `512M`.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "K", "M", "G", "T", "P", "E"];
    let mut unit = 0;
    let mut scale = 1_u64;
    while unit + 1 < UNITS.len() && bytes / scale >= 1024 {
        unit += 1;
        scale <<= 10;
    }
    if bytes.is_multiple_of(scale) {
        return format!("{}{}", bytes / scale, UNITS[unit]);
    }
    let tenths = u128::from(bytes) * 10 / u128::from(scale);
    format!("{}.{}{}", tenths / 10, tenths % 10, UNITS[unit])
}

fn bound(limit: Option<u64>) -> String {
    limit.map_or_else(|| "-".to_owned(), size)
}

/// Shortens a text; the sign at the end says so.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let short: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{short}~")
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend, crossterm::event::KeyCode};

    use super::{
        super::{
            frame,
            model::{Data, Sort, tests::example, tests::model},
        },
        *,
    };

    const PLAIN: fn() -> Look = || Look {
        screen: Screen::plain(),
        live: true,
    };

    fn screen(model: &mut Model, look: Look, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen");
        terminal
            .draw(|frame| draw(model, look, frame.area(), frame.buffer_mut()))
            .expect("drawn");
        terminal.backend().to_string()
    }

    #[test]
    fn at_80_by_24() {
        insta::assert_snapshot!(screen(&mut model(), PLAIN(), 80, 24));
    }

    #[test]
    fn on_a_wide_screen() {
        let look = Look {
            screen: Screen::colourful(),
            live: true,
        };
        insta::assert_snapshot!(screen(&mut model(), look, 132, 16));
    }

    #[test]
    fn processes_of_a_tenant() {
        let mut model = model();
        model.key(KeyCode::Down.into());
        model.key(KeyCode::Enter.into());
        insta::assert_snapshot!(screen(&mut model, PLAIN(), 80, 12));
    }

    #[test]
    fn the_help_fits() {
        let mut model = model();
        model.key(KeyCode::Char('?').into());
        insta::assert_snapshot!(screen(&mut model, PLAIN(), 80, 24));
    }

    #[test]
    fn one_frame_as_text() {
        insta::assert_snapshot!(frame(&mut model(), Some(80), Screen::plain()));
    }

    #[test]
    fn without_tenants_it_says_so() {
        let mut model = Model::new(Sort::Used, String::new());
        model.show(Data {
            tenants: Vec::new(),
            ..example()
        });
        let text = frame(&mut model, None, Screen::plain());
        assert!(text.contains("No tenants"), "{text}");
        let mut model = Model::new(Sort::Used, "nobody".into());
        model.show(example());
        assert!(frame(&mut model, None, Screen::plain()).contains("No tenant matches"));
    }

    #[test]
    fn a_daemon_that_is_away_is_told_of_and_the_numbers_stay() {
        let mut model = model();
        model.trouble("it went\u{1b}[2J away".into());
        let text = screen(&mut model, PLAIN(), 80, 24);
        assert!(text.contains("no news from the daemon: it went"), "{text}");
        assert!(
            text.contains("vision") && !text.contains('\u{1b}'),
            "{text}"
        );
    }

    #[test]
    fn colour_adds_nothing_that_is_not_written() {
        let with = Look {
            screen: Screen::colourful(),
            live: true,
        };
        let plain = screen(&mut model(), PLAIN(), 80, 24);
        let colourful = screen(&mut model(), with, 80, 24);
        let words = |text: &str| -> String {
            text.chars().filter(|c| !"#█-░|┃".contains(*c)).collect()
        };
        assert_eq!(words(&plain), words(&colourful));
    }

    #[test]
    fn the_selection_is_always_visible() {
        let mut data = example();
        let pattern = data.tenants[0].clone();
        data.tenants = (0..100)
            .map(|i| {
                let mut tenant = pattern.clone();
                tenant.name = format!("tenant-{i:03}");
                tenant
            })
            .collect();
        let mut model = Model::new(Sort::Name, String::new());
        model.show(data);
        screen(&mut model, PLAIN(), 80, 24);
        for (key, wanted) in [
            (KeyCode::End, "tenant-099"),
            (KeyCode::Up, "tenant-098"),
            (KeyCode::Home, "tenant-000"),
            (KeyCode::PageDown, "tenant-020"),
        ] {
            model.key(key.into());
            let text = screen(&mut model, PLAIN(), 80, 24);
            assert!(text.contains(wanted), "{key:?} {text}");
        }
    }

    #[test]
    fn no_size_of_screen_panics() {
        for width in [1, 5, 30, 59, 60, 80, 109, 110, 300] {
            for height in [1, 2, 3, 5, 24] {
                for keys in ["", "\n", "?", "/x", "i"] {
                    let mut model = model();
                    for key in keys.chars() {
                        let code = if key == '\n' {
                            KeyCode::Enter
                        } else {
                            KeyCode::Char(key)
                        };
                        model.key(code.into());
                    }
                    screen(&mut model, PLAIN(), width, height);
                }
            }
        }
    }

    #[test]
    fn bars_show_use_and_mark() {
        let look = PLAIN();
        assert_eq!(look.bar(0, 100, None, 10), "[----------]");
        assert_eq!(look.bar(1, 1000, None, 10), "[#---------]");
        assert_eq!(look.bar(50, 100, Some(90), 10), "[#####----|]");
        assert_eq!(look.bar(100, 100, Some(90), 10), "[#########|]");
        assert_eq!(look.bar(u64::MAX, 100, Some(100), 10), "[##########]");
        assert_eq!(look.bar(5, 0, None, 4), "[#---]");
        assert_eq!(look.bar(5, 5, Some(1), 0), "[]");
    }

    #[test]
    fn sizes_fit_their_column() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (40 << 30, "40G"),
            ((1023 << 20) + 1023, "1023.0M"),
            (150_754_820_096, "140.4G"),
            (u64::MAX, "15.9E"),
        ] {
            assert_eq!(size(bytes), text);
            assert!(text.len() <= 7);
        }
    }
}
