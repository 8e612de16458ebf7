//! `profile`: which kernels are launched, how often, and how long they are waited for.

use std::fmt::Write as _;

use gpuquota_enforcer::{
    client::{Client, looks::Profile},
    control::{
        Notice,
        profile::{ProfileKernel, ProfileProcess, ProfileReport},
    },
    profile::histogram::quantile,
};

use crate::{
    args::ProfileArgs,
    error::Error,
    look,
    output::{self, Align, Screen, Style, Table, clean, counted},
};

/// Kernels that are shown.
const SHOWN: usize = 30;
/// Characters of a kernel's name in the table.
const NAME: usize = 60;

/// Looks for so long, or until interrupted, and shows what was found; without a target, what looks there are.
pub async fn profile(client: &Client, arguments: &ProfileArgs) -> Result<(), Error> {
    let words = look::Words {
        doing: "profiling the launches",
        none: "no launches are profiled; `gpuquotactl profile TENANT` or PID begins to\n",
    };
    let looked = look::look::<Profile>(client, &arguments.look, arguments.json, &words);
    let Some(report) = looked.await? else {
        return Ok(());
    };
    if arguments.json {
        output::print_json(&report)
    } else {
        output::print(&text(&report, Screen::stdout()))
    }
}

fn text(report: &ProfileReport, screen: Screen) -> String {
    let launches: u64 = report.kernels.iter().map(|kernel| kernel.launches).sum();
    let mut text = format!(
        "{}: {} of {} in {} by {}\n",
        clean(&report.target.to_string()),
        counted(usize::try_from(launches).unwrap_or(usize::MAX), "launch")
            .replace("launchs", "launches"),
        counted(report.kernels.len(), "kernel"),
        span_usec(report.elapsed_usec),
        match report.processes.len() {
            1 => "1 process".to_owned(),
            number => format!("{number} processes"),
        },
    );
    text += &cost(&report.processes);
    for process in &report.processes {
        if let Some(trouble) = &process.trouble {
            let line = format!("process {}: {}", process.pid, clean(trouble));
            let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
        }
    }
    text += &remarks(report, screen);
    if report.kernels.is_empty() {
        return text;
    }
    let mut table = Table::new(&[
        ("LAUNCHES", Align::Right),
        ("GAP", Align::Right),
        ("WAITED", Align::Right),
        ("MEDIAN", Align::Right),
        ("P99", Align::Right),
        ("USUAL", Align::Right),
        ("ANOMALIES", Align::Right),
        ("KERNEL", Align::Left),
    ]);
    for kernel in report.kernels.iter().take(SHOWN) {
        table.row(row(kernel, report));
    }
    text += "\n";
    text += &table.render(screen);
    if let Some(more) = report
        .kernels
        .len()
        .checked_sub(SHOWN)
        .filter(|more| *more > 0)
    {
        let _ = writeln!(text, "\n{} more; --json shows all", counted(more, "kernel"));
    }
    text
}

/// A line of `monitor`.
pub fn describe(notice: &Notice) -> (Style, String) {
    match notice {
        Notice::Anomaly {
            tenant,
            pid,
            kernel,
            duration_usec,
            usual_usec,
        } => {
            let text = format!(
                "anomaly   {tenant}: process {pid} waited {} for {kernel}, usual are {}",
                span_usec(*duration_usec),
                span_usec(*usual_usec)
            );
            (Style::Warn, text)
        }
        // Others have their lines where all notices are.
        other => (Style::Plain, format!("{other:?}")),
    }
}

/// What the probes cost, where most.
fn cost(processes: &[ProfileProcess]) -> String {
    let Some(most) = processes.iter().max_by(|a, b| a.cost.total_cmp(&b.cost)) else {
        return String::new();
    };
    let covered = processes
        .iter()
        .map(|process| process.covered)
        .fold(1.0, f64::min);
    let names = processes
        .iter()
        .map(|process| process.names_covered)
        .fold(1.0, f64::min);
    let mut text = format!(
        "probes cost {:.2}% of a process's time at most ({:.2}% may be), and are in it {:.0}% of the time{}\n",
        100.0 * most.cost,
        100.0 * most.budget,
        100.0 * covered,
        if covered < 0.995 {
            ": what is launched in between is not counted"
        } else {
            ""
        }
    );
    if names < 0.995 {
        let _ = writeln!(
            text,
            "probes on calls that give out kernels are in it {:.0}% of the time: who is asked for once in between has no name",
            100.0 * names
        );
    }
    text
}

fn row(kernel: &ProfileKernel, report: &ProfileReport) -> [(String, Style); 8] {
    let at = |counts: &[u64], part| quantile(counts, part).map_or_else(|| "-".to_owned(), span);
    let waited: u64 = kernel.durations.iter().sum();
    let mut name = clean(&kernel.name);
    if let Some((end, _)) = name.char_indices().nth(NAME) {
        name.truncate(end);
        name += "...";
    }
    // Who it is of, where there is more than one.
    if report
        .kernels
        .iter()
        .any(|other| other.tenant != kernel.tenant)
    {
        name = format!("{}: {name}", clean(&kernel.tenant));
    }
    let usual = kernel
        .usual_usec
        .map_or_else(|| "-".to_owned(), |usual| span(nanos(usual)));
    [
        (kernel.launches.to_string(), Style::Bold),
        (at(&kernel.gaps, 0.5), Style::Plain),
        (waited.to_string(), Style::Plain),
        (at(&kernel.durations, 0.5), Style::Plain),
        (at(&kernel.durations, 0.99), Style::Plain),
        (usual, Style::Plain),
        (
            kernel.anomalies.to_string(),
            if kernel.unusual {
                Style::Bad
            } else if kernel.anomalies > 0 {
                Style::Warn
            } else {
                Style::Plain
            },
        ),
        (name, Style::Plain),
    ]
}

/// What is not known for certain.
fn remarks(report: &ProfileReport, screen: Screen) -> String {
    let gaps = &report.gaps;
    let bare = report
        .kernels
        .iter()
        .filter(|kernel| kernel.symbol.is_none() && kernel.name.starts_with("kernel@"))
        .count();
    let mut text = String::new();
    let mut remark = |what: &str, count: u64| {
        if count > 0 {
            let line = format!("{what}: {count}");
            let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
        }
    };
    remark(
        "kernels shown by their handles, since they were given out before this look or unseen",
        u64::try_from(bare).unwrap_or(u64::MAX),
    );
    remark("waits or names that were lost", gaps.lost);
    remark(
        "launches of kernels that are not told apart, since there are too many",
        gaps.crowded,
    );
    remark(
        "names that were not kept, since there are too many",
        gaps.unnamed,
    );
    remark(
        "arguments that could not be read, whose launches are counted and not timed",
        gaps.unreadable,
    );
    remark(
        "times that a process was not looked at, since there are too many",
        gaps.left_out,
    );
    text
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "microseconds, for people"
)]
fn nanos(usec: f64) -> u64 {
    (usec.max(0.0) * 1e3) as u64
}

/// A time of microseconds, for people.
fn span_usec(usec: u64) -> String {
    span(usec.saturating_mul(1000))
}

#[expect(clippy::cast_precision_loss, reason = "a time, for people")]
fn span(nanos: u64) -> String {
    let short = |value: f64, unit: &str| {
        let digits = usize::from(value < 9.95);
        format!("{value:.digits$} {unit}")
    };
    let time = nanos as f64;
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => short(time / 1e3, "us"),
        1_000_000..1_000_000_000 => short(time / 1e6, "ms"),
        1_000_000_000..120_000_000_000 => short(time / 1e9, "s"),
        120_000_000_000..7_200_000_000_000 => short(time / 60e9, "min"),
        _ => short(time / 3600e9, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short() {
        assert_eq!(span(999), "999 ns");
        assert_eq!(span(1_500), "1.5 us");
        assert_eq!(span(25_300), "25 us");
        assert_eq!(span_usec(250_000), "250 ms");
        assert_eq!(span_usec(30_000_000), "30 s");
        assert_eq!(span_usec(7_200_000_000), "2.0 h");
        assert_eq!(nanos(0.5), 500);
    }
}
