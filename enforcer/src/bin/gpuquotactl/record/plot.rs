//! A recording as a picture: for each GPU utilisation, memory and power over time, and the memory of each tenant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use super::table::Row;
use crate::output::size;

const WIDTH: f64 = 900.0;
const PANEL: f64 = 130.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 30.0;
/// Points of a line; more are drawn as the largest of each part, so that no peak is lost.
const POINTS: usize = 900;
const COLOURS: [&str; 8] = [
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f",
];

/// A line of a panel: its name and points in seconds and the panel's unit.
type Lines = Vec<(String, Vec<(f64, f64)>)>;

/// A panel: its name, its lines, and how values of it are written.
type Panel = (String, Lines, fn(f64) -> String);

/// The picture.
#[expect(
    clippy::cast_precision_loss,
    reason = "a picture needs no more than seven digits"
)]
pub fn svg(rows: &[Row]) -> String {
    let gpus: BTreeSet<u32> = rows.iter().map(|row| row.gpu).collect();
    let end = rows
        .last()
        .map_or(1.0, |row| row.at.as_secs_f64())
        .max(1e-6);
    let mut panels: Vec<Panel> = Vec::new();
    for gpu in &gpus {
        let of_gpu = || rows.iter().filter(|row| row.gpu == *gpu);
        let card = |value: fn(&Row) -> Option<f64>| -> Lines {
            let points = of_gpu()
                .filter(|row| row.tenant.is_none())
                .filter_map(|row| Some((row.at.as_secs_f64(), value(row)?)))
                .collect();
            vec![("card".to_owned(), points)]
        };
        panels.push((
            format!("GPU {gpu}: utilisation"),
            card(|row| row.percent.map(f64::from)),
            |value| format!("{value:.0} %"),
        ));
        let mut memory = card(|row| Some(row.memory as f64));
        let mut by_tenant: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for row in of_gpu() {
            if let Some(tenant) = &row.tenant {
                by_tenant
                    .entry(tenant)
                    .or_default()
                    .push((row.at.as_secs_f64(), row.memory as f64));
            }
        }
        memory.extend(
            by_tenant
                .into_iter()
                .map(|(tenant, points)| (tenant.to_owned(), points)),
        );
        panels.push((format!("GPU {gpu}: memory"), memory, bytes));
        panels.push((
            format!("GPU {gpu}: power"),
            card(|row| Some(f64::from(row.rest?.power_mw?) / 1000.0)),
            |value| format!("{value:.0} W"),
        ));
    }
    let height = TOP + PANEL * panels.len().max(1) as f64 + 30.0;
    let width = LEFT + WIDTH + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, (name, lines, unit)) in panels.iter().enumerate() {
        panel(
            &mut out,
            TOP + PANEL * index as f64,
            name,
            lines,
            *unit,
            end,
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{0}\">0 s</text><text x=\"{1}\" y=\"{0}\" text-anchor=\"end\">{end:.2} s</text>\n</svg>",
        height - 10.0,
        LEFT + WIDTH
    );
    out
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of bytes, which is neither negative nor above 2^63"
)]
fn bytes(value: f64) -> String {
    size(value as u64)
}

fn panel(out: &mut String, top: f64, name: &str, lines: &Lines, unit: fn(f64) -> String, end: f64) {
    let most = lines
        .iter()
        .flat_map(|(_, points)| points)
        .map(|(_, value)| *value)
        .fold(0.0, f64::max);
    let scale = if most > 0.0 { most } else { 1.0 };
    let room = PANEL - 34.0;
    let bottom = top + room;
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{}</text>\n\
         <rect x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{room}\" fill=\"none\" stroke=\"#cccccc\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        top - 5.0,
        escape(name),
        LEFT - 6.0,
        top + 9.0,
        escape(&unit(most))
    );
    let mut x = LEFT + 200.0;
    for (index, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let mut text = String::new();
        for (at, value) in thin(points) {
            let _ = write!(
                text,
                "{:.1},{:.1} ",
                LEFT + at / end * WIDTH,
                bottom - value / scale * room
            );
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>",
            text.trim_end()
        );
        if lines.len() > 1 {
            let _ = writeln!(
                out,
                "<text x=\"{x}\" y=\"{}\" fill=\"{colour}\">{}</text>",
                top - 5.0,
                escape(name)
            );
            x += 90.0;
        }
    }
}

/// At most [`POINTS`] points: the largest of each part.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS {
        return points.to_vec();
    }
    (0..POINTS)
        .filter_map(|part| {
            let range = part * points.len() / POINTS..(part + 1) * points.len() / POINTS;
            points[range]
                .iter()
                .copied()
                .max_by(|a, b| a.1.total_cmp(&b.1))
        })
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{
        super::table::{Rest, Row},
        *,
    };

    fn row(at: u64, tenant: Option<&str>, memory: u64) -> Row {
        Row {
            at: Duration::from_millis(at),
            gpu: 0,
            tenant: tenant.map(str::to_owned),
            percent: Some(50),
            memory,
            rest: tenant.is_none().then_some(Rest {
                memory_percent: 1,
                power_mw: Some(100_000),
            }),
        }
    }

    #[test]
    fn every_card_and_tenant_has_its_lines() {
        let rows = [
            row(0, None, 4 << 30),
            row(0, Some("a<b"), 1 << 30),
            row(5, None, 8 << 30),
            row(5, Some("a<b"), 2 << 30),
        ];
        let text = svg(&rows);
        // Utilisation, power, and memory of the card and of the tenant.
        assert_eq!(text.matches("<polyline").count(), 4);
        assert!(text.contains("8 GiB") && text.contains("100 W") && text.contains("a&lt;b"));
        assert!(!svg(&[]).is_empty());
    }

    #[test]
    fn a_peak_is_not_lost_among_many_points() {
        let points: Vec<(f64, f64)> = (0..100_000_u32)
            .map(|at| (f64::from(at), if at == 77_777 { 9.0 } else { 1.0 }))
            .collect();
        let thin = thin(&points);
        assert_eq!(thin.len(), POINTS);
        assert!(thin.contains(&(77_777.0, 9.0)));
    }
}
