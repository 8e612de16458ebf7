//! `history`: memory of tenants over time.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::{client::Client, control::insight::MemoryHistory};
use gpuquota_policy::format_duration;

use crate::{
    error::Error,
    output::{Align, Screen, Style, Table, clean, print, print_json, size},
};

/// Columns of a line of history.
const WIDTH: usize = 60;
/// From nothing to full.
const ASCII: [char; 9] = [' ', '.', ':', '-', '=', '+', '*', '%', '#'];
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// `history`
pub async fn history(
    client: &Client,
    tenant: Option<&str>,
    since: Duration,
    json: bool,
) -> Result<(), Error> {
    let histories = client.memory_history(tenant, since).await?;
    if json {
        return print_json(&histories);
    }
    print(&text(&histories, since, Screen::stdout()))
}

fn text(histories: &[MemoryHistory], since: Duration, screen: Screen) -> String {
    if histories.is_empty() {
        return "nobody has used a GPU in the last day\n".to_owned();
    }
    let mut table = Table::new(&[
        ("TENANT", Align::Left),
        ("GPU", Align::Right),
        ("USED", Align::Right),
        ("HIGH WATER", Align::Right),
        ("GROWTH", Align::Right),
        ("OBJECTS", Align::Right),
        ("SMALL", Align::Right),
        ("IN SMALL", Align::Right),
    ]);
    for history in histories {
        let growth = match history.growth_rate {
            0 => "-".to_owned(),
            rate => format!("{}/s", size(rate)),
        };
        // Many small objects keep the driver's 2 MiB pieces apart.
        let style = if history.small_objects > 1000 && history.small_objects * 2 > history.objects {
            Style::Warn
        } else {
            Style::Plain
        };
        table.row([
            (history.tenant.clone(), Style::Bold),
            (history.gpu.to_string(), Style::Plain),
            (size(history.used), Style::Plain),
            (size(history.high_water), Style::Plain),
            (growth, Style::Plain),
            (history.objects.to_string(), Style::Plain),
            (history.small_objects.to_string(), style),
            (size(history.small_bytes), style),
        ]);
    }
    let mut text = table.render(screen);
    for history in histories {
        let peak = history.peak.iter().flatten().copied().max().unwrap_or(0);
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n{} on GPU {}, the last {} in steps of {} s, at most {}:\n|{}|\n",
            clean(&history.tenant),
            history.gpu,
            format_duration(since),
            history.step_sec,
            size(peak),
            line(&history.peak, peak, screen.has_unicode())
        );
    }
    text
}

/// Peaks as a line of characters; `?` where nobody looked.
fn line(peaks: &[Option<u64>], most: u64, unicode: bool) -> String {
    let marks = if unicode { BLOCKS } else { ASCII };
    (0..WIDTH.min(peaks.len()))
        .map(|column| {
            let columns = WIDTH.min(peaks.len());
            let part = &peaks[column * peaks.len() / columns..(column + 1) * peaks.len() / columns];
            match part.iter().flatten().max() {
                None => '?',
                Some(peak) => mark(&marks, *peak, most),
            }
        })
        .collect()
}

/// Something in use is never shown as nothing.
fn mark(marks: &[char; 9], value: u64, most: u64) -> char {
    let steps = u128::try_from(marks.len() - 1).unwrap_or(1);
    let place = (u128::from(value) * steps).div_ceil(u128::from(most.max(1)));
    marks[usize::try_from(place).unwrap_or(0).min(marks.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_peaks_and_holes() {
        let peaks = [Some(0), Some(1), None, Some(500), Some(1000)];
        assert_eq!(line(&peaks, 1000, false), " .?=#");
        let many: Vec<_> = (0..600)
            .map(|at| Some(if at == 300 { 9 } else { 0 }))
            .collect();
        let text = line(&many, 9, false);
        assert_eq!((text.len(), text.find('#')), (60, Some(30)));
        assert_eq!(line(&[], 0, true), "");
    }

    #[test]
    fn a_history_for_people() {
        let history = MemoryHistory {
            tenant: "vision".into(),
            gpu: 0,
            used: 3 << 30,
            high_water: 5 << 30,
            growth_rate: 1 << 20,
            objects: 40,
            small_objects: 8,
            small_bytes: 8 << 16,
            step_sec: 1,
            peak: vec![Some(1 << 30), Some(5 << 30), Some(3 << 30)],
            ..MemoryHistory::default()
        };
        insta::assert_snapshot!(text(&[history], Duration::from_mins(10), Screen::plain()));
    }
}
