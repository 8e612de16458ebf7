//! The page of memory over time: a line for each tenant and GPU, a cell for each part of the last ten minutes.

use gpuquota_enforcer::control::insight::HeatRow;
use ratatui::{
    style::Color,
    text::{Line, Span},
};

use super::{model::Model, view::Look};
use crate::output::clean;

/// Time that is shown.
pub const SINCE: std::time::Duration = std::time::Duration::from_mins(10);
/// Cells that are asked for; a narrow screen shows the newest of them.
pub const COLUMNS: u32 = 120;
/// Width of the names.
const NAMES: usize = 24;
/// From nothing to full.
const MARKS: [char; 10] = [' ', '.', ':', '-', '=', '+', '*', '%', '#', '@'];
/// Background colours of the 256-colour palette, from cold to hot.
const COLOURS: [u8; 10] = [236, 17, 18, 19, 54, 90, 126, 162, 197, 196];

/// The lines of the page.
pub fn lines(model: &mut Model, look: Look, width: usize, room: usize) -> Vec<Line<'static>> {
    let cells = width.saturating_sub(NAMES).min(COLUMNS as usize);
    let mut lines = vec![Line::from(look.strong(format!(
        "{:<NAMES$}the last 10 min, newest right; full is memory.max or the card",
        "  TENANT            GPU"
    )))];
    let rows: Vec<HeatRow> = model.heat().to_vec();
    if rows.is_empty() {
        lines.push(Line::from("  Nobody has used a GPU."));
    }
    let room = room.saturating_sub(lines.len());
    let top = model.scroll(room, rows.len(), None);
    lines.extend(
        rows.iter()
            .skip(top)
            .take(room)
            .map(|row| line(row, look, cells)),
    );
    lines
}

fn line(row: &HeatRow, look: Look, cells: usize) -> Line<'static> {
    let name: String = clean(&row.tenant).chars().take(NAMES - 7).collect();
    let mut spans = vec![Span::raw(format!("  {name:<17} {:>3} ", row.gpu))];
    let first = row.peaks.len().saturating_sub(cells);
    for peak in &row.peaks[first..] {
        spans.push(match peak {
            None => Span::raw("?"),
            Some(peak) => {
                let step = step(*peak, row.full);
                look.heat(MARKS[step], Color::Indexed(COLOURS[step]))
            }
        });
    }
    Line::from(spans)
}

/// Something in use is never shown as nothing.
fn step(value: u64, full: u64) -> usize {
    let steps = u128::try_from(MARKS.len() - 1).unwrap_or(1);
    let step = (u128::from(value.min(full)) * steps).div_ceil(u128::from(full.max(1)));
    usize::try_from(step)
        .unwrap_or(0)
        .max(usize::from(value > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Screen;

    #[test]
    fn a_line_shows_the_newest_cells() {
        let row = HeatRow {
            tenant: "vision".into(),
            gpu: 1,
            full: 100,
            peaks: vec![Some(100), None, Some(0), Some(1), Some(50), Some(200)],
        };
        let look = Look {
            screen: Screen::plain(),
            live: true,
        };
        let text = |cells| line(&row, look, cells).to_string();
        assert_eq!(text(6), "  vision              1 @? .+@");
        assert_eq!(text(2), "  vision              1 +@");
        assert_eq!(step(5, 0), 1);
    }
}
