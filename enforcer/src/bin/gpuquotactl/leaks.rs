//! `leaks`: which call sites obtain memory and do not give it back.

use std::{fmt::Write as _, path::Path, time::Duration};

use gpuquota_enforcer::{
    client::{Client, looks::Leaks},
    control::leaks::{LeakReport, LeakSite},
    insight::{folded::folded, pprof},
};

use crate::{
    args::LeaksArgs,
    error::Error,
    look::{self, Remarks},
    output::{self, Align, Screen, Style, Table, clean, counted, size},
};

/// Call sites that are shown with their stacks.
const SHOWN: usize = 20;
/// Frames of a stack that are shown.
const FRAMES: usize = 24;

/// Looks for so long, or until interrupted, and shows what was found; without a target, what looks there are.
pub async fn leaks(client: &Client, arguments: &LeaksArgs) -> Result<(), Error> {
    let words = look::Words {
        doing: "following the allocations",
        none: "no allocations are followed; `gpuquotactl leaks TENANT` or PID begins to\n",
    };
    let looked = look::look::<Leaks>(client, &arguments.look, arguments.json, &words);
    let Some(report) = looked.await? else {
        return Ok(());
    };
    if let Some(file) = &arguments.pprof {
        write(file, &pprof::encode(&report))?;
    }
    if let Some(file) = &arguments.folded {
        write(file, folded(&report).as_bytes())?;
    }
    if arguments.json {
        output::print_json(&report)
    } else {
        output::print(&text(&report, Screen::stdout()))
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    std::fs::write(path, bytes).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
}

fn text(report: &LeakReport, screen: Screen) -> String {
    let held: u64 = report.sites.iter().map(|site| site.live_bytes).sum();
    let number: u64 = report.sites.iter().map(|site| site.live).sum();
    let mut text = format!(
        "{}: {} in {} not given back, obtained in the last {} by {}\n",
        clean(&report.target.to_string()),
        size(held),
        counted(usize::try_from(number).unwrap_or(usize::MAX), "allocation"),
        span(report.elapsed_usec),
        match report.processes.len() {
            1 => "1 process".to_owned(),
            number => format!("{number} processes"),
        },
    );
    for process in &report.processes {
        if let Some(trouble) = &process.trouble {
            let line = format!("process {}: {}", process.pid, clean(trouble));
            let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
        }
    }
    text += &remarks(report, screen);
    let holding: Vec<&LeakSite> = report.sites.iter().filter(|site| site.live > 0).collect();
    if !holding.is_empty() {
        let mut table = Table::new(&[
            ("", Align::Right),
            ("LIVE", Align::Right),
            ("COUNT", Align::Right),
            ("OF", Align::Right),
            ("GROWTH", Align::Right),
            ("OLDEST", Align::Right),
            ("MEDIAN", Align::Right),
            ("SURVIVES", Align::Right),
            ("BY", Align::Left),
        ]);
        for (at, site) in holding.iter().take(SHOWN).enumerate() {
            table.row(row(at + 1, site));
        }
        text += "\n";
        text += &table.render(screen);
        for (at, site) in holding.iter().take(SHOWN).enumerate() {
            text += &stack(at + 1, site, screen);
        }
        if let Some(more) = holding.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            let _ = writeln!(
                text,
                "\n{} more; --json shows all",
                counted(more, "call site")
            );
        }
    }
    text
}

fn row(at: usize, site: &LeakSite) -> [(String, Style); 9] {
    let age = |usec: Option<u64>| usec.map_or_else(|| "-".to_owned(), span);
    let growth = site.growth.map_or_else(|| "-".to_owned(), growth);
    let grows = site.growth.is_some_and(|rate| rate > 1.0);
    [
        (format!("#{at}"), Style::Plain),
        (size(site.live_bytes), Style::Bold),
        (site.live.to_string(), Style::Plain),
        (site.allocations.to_string(), Style::Plain),
        (growth, if grows { Style::Warn } else { Style::Plain }),
        (age(site.oldest_usec), Style::Plain),
        (age(site.median_usec), Style::Plain),
        (
            site.survival.last().map_or_else(
                || "-".to_owned(),
                |(age, share)| format!("{:.0}% {}", 100.0 * share, span(*age)),
            ),
            Style::Plain,
        ),
        (
            site.frames
                .first()
                .map_or_else(|| site.call.clone(), |frame| clean(&frame.to_string())),
            Style::Plain,
        ),
    ]
}

fn stack(at: usize, site: &LeakSite, screen: Screen) -> String {
    let mut text = format!("\n#{at} {}\n", screen.paint(Style::Bold, &site.call));
    text += &look::frames(&site.frames, site.cut, FRAMES, screen);
    text
}

/// What is not known for certain.
fn remarks(report: &LeakReport, screen: Screen) -> String {
    let gaps = &report.gaps;
    let mut remarks = Remarks::default();
    remarks.count(
        gaps.lost,
        "calls were lost: what is told to be live may have been given back",
    );
    remarks.count(
        gaps.overflowed,
        "allocations are not followed: there are too many at once",
    );
    remarks.count(
        gaps.crowded,
        "allocations are of call sites that are not told apart: there are too many",
    );
    remarks.count(
        gaps.contexts_ended,
        "contexts ended: what was obtained in them is gone, and may be told to be live",
    );
    remarks.count(
        gaps.older_frees,
        "times memory was given back that was obtained before this look",
    );
    remarks.stacks(&gaps.unnamed, &gaps.too_large);
    remarks.shown(screen)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bytes a second, for people"
)]
fn growth(rate: f64) -> String {
    let sign = if rate < 0.0 { "-" } else { "+" };
    let bytes = rate.abs().round() as u64;
    if bytes == 0 {
        "0".to_owned()
    } else {
        format!("{sign}{}/s", size(bytes))
    }
}

fn span(usec: u64) -> String {
    let seconds = Duration::from_micros(usec).as_secs_f64();
    match usec {
        0..1_000 => format!("{usec} us"),
        1_000..1_000_000 => format!("{:.0} ms", seconds * 1e3),
        1_000_000..120_000_000 => format!("{seconds:.0} s"),
        120_000_000..7_200_000_000 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_growth_are_short() {
        assert_eq!(span(999), "999 us");
        assert_eq!(span(59_400_000), "59 s");
        assert_eq!(span(7_200_000_000), "2.0 h");
        assert_eq!(growth(0.2), "0");
        assert_eq!(growth(-2048.0), "-2 KiB/s");
    }
}
