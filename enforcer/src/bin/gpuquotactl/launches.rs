//! Launches in `status`.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::control::{
    Notice, Tenant,
    launch::{LaunchRate, TenantLaunch},
};

use crate::output::{Align, Screen, Style, Table};

/// The launches of a tenant; `None` while no launch budget holds for it.
pub fn text(tenant: &Tenant, screen: Screen) -> Option<String> {
    let launch = tenant.launch.as_ref()?;
    let mut table = Table::new(&[
        ("LAUNCH MAX", Align::Right),
        ("BURST", Align::Right),
        ("LAUNCHES", Align::Right),
        ("DELAYED", Align::Right),
        ("WAITED", Align::Right),
        ("PRESSURE", Align::Right),
        ("MEDIAN GAP", Align::Right),
    ]);
    table.row([
        (
            launch.max.map_or_else(|| "-".to_owned(), rate),
            Style::Plain,
        ),
        (launch.burst.to_string(), Style::Plain),
        (launch.launches.to_string(), Style::Plain),
        (
            launch.delayed.to_string(),
            if launch.delayed == 0 {
                Style::Plain
            } else {
                Style::Warn
            },
        ),
        (span(Duration::from_micros(launch.delay_usec)), Style::Plain),
        (
            format!("{:.0}%", 100.0 * launch.pressure.some.avg10),
            Style::Plain,
        ),
        (
            median_gap(&launch.gaps)
                .map_or_else(|| "-".to_owned(), |gap| format!("under {}", span(gap))),
            Style::Plain,
        ),
    ]);
    let mut text = table.render(screen);
    text.push_str(&remarks(launch, screen));
    if !launch.processes.is_empty() {
        let mut table = Table::new(&[
            ("PID", Align::Right),
            ("LAUNCHES", Align::Right),
            ("DELAYED", Align::Right),
            ("WAITED", Align::Right),
            ("COMMAND", Align::Left),
        ]);
        for process in &launch.processes {
            table.row([
                (process.pid.to_string(), Style::Plain),
                (process.launches.to_string(), Style::Plain),
                (process.delayed.to_string(), Style::Plain),
                (
                    span(Duration::from_micros(process.delay_usec)),
                    Style::Plain,
                ),
                (process.comm.clone(), Style::Plain),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render(screen));
    }
    Some(text)
}

/// What an admin should not overlook.
fn remarks(launch: &TenantLaunch, screen: Screen) -> String {
    let mut text = String::new();
    let mut remark = |count: u64, what: &str| {
        if count > 0 {
            let line = format!("{count} launches {what}");
            let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
        }
    };
    remark(
        launch.overdue,
        "went early, since no delay is longer than launch.max-delay",
    );
    remark(
        launch.denied,
        "were over the budget of a tenant whose processes are ended for it",
    );
    remark(
        launch.unheld,
        "went at once, since the daemon was not there to delay them",
    );
    remark(
        launch.evaded,
        "came from processes that somebody else had continued",
    );
    text
}

/// A notice about launches as a line of `monitor`.
pub fn describe(notice: &Notice) -> (Style, String) {
    match notice {
        Notice::Throttled {
            tenant,
            pid,
            symbol,
            delayed,
            delay_usec,
        } => {
            let text = format!(
                "throttled {tenant}: process {pid} is over launch.max; {delayed} launches delayed by {:.3} s so far, \
                 by {symbol} last",
                std::time::Duration::from_micros(*delay_usec).as_secs_f64()
            );
            (Style::Warn, text)
        }
        Notice::LaunchDenied {
            tenant,
            limited_by,
            pid,
            symbol,
            patience_usec,
        } => {
            let around = if limited_by == tenant {
                String::new()
            } else {
                format!(" of {limited_by}")
            };
            let text = format!(
                "ended     {tenant}: process {pid} went over launch.max{around} by {symbol} and has {:.1} s to end",
                std::time::Duration::from_micros(*patience_usec).as_secs_f64()
            );
            (Style::Bad, text)
        }
        Notice::Storm {
            tenant,
            pid,
            symbol,
            wanted,
            budget,
        } => {
            let text = format!(
                "storm     {tenant}: process {pid} wants some {wanted} launches a second by {symbol}, and may have {budget}"
            );
            (Style::Warn, text)
        }
        // Others have their lines where all notices are.
        other => (Style::Plain, format!("{other:?}")),
    }
}

fn rate(rate: LaunchRate) -> String {
    match rate.per_usec {
        1_000_000 => format!("{}/s", rate.count),
        60_000_000 => format!("{}/min", rate.count),
        3_600_000_000 => format!("{}/h", rate.count),
        other => format!("{}/{}", rate.count, span(Duration::from_micros(other))),
    }
}

fn span(span: Duration) -> String {
    let seconds = span.as_secs_f64();
    match span.as_micros() {
        0..1_000 => format!("{:.1} us", seconds * 1e6),
        1_000..1_000_000 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

/// The upper end of the element that holds the middle one.
fn median_gap(gaps: &[u64]) -> Option<Duration> {
    let all: u64 = gaps.iter().sum();
    let mut passed = 0;
    let index = gaps.iter().position(|count| {
        passed += count;
        all > 0 && passed * 2 >= all
    })?;
    Some(Duration::from_nanos(1 << index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_shown_as_they_are_written() {
        let shown = |count, per_usec| rate(LaunchRate { count, per_usec });
        assert_eq!(shown(20_000, 1_000_000), "20000/s");
        assert_eq!(shown(90, 3_600_000_000), "90/h");
    }

    #[test]
    fn the_median_is_in_the_middle() {
        let mut gaps = vec![0; 40];
        assert_eq!(median_gap(&gaps), None);
        gaps[11] = 3;
        gaps[20] = 2;
        assert_eq!(median_gap(&gaps), Some(Duration::from_nanos(2048)));
    }
}
