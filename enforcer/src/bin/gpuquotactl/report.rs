//! `report`: a picture of tenants over time, as SVG or in a page.
//!
//! One row for each tenant and GPU, one cell for each part of the time, darker the fuller. Drawn by hand: rectangles and a
//! few words need no library.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpuquota_enforcer::{client::Client, control::insight::HeatRow};
use gpuquota_policy::format_duration;

use crate::{
    error::Error,
    output::{clean, print, size},
};

/// Cells of a row.
const COLUMNS: u32 = 120;
const CELL: usize = 7;
const ROW: usize = 20;
const LEFT: usize = 220;
const RIGHT: usize = 110;
const TOP: usize = 56;
const BOTTOM: usize = 34;

/// What a file is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Svg,
    Html,
}

/// `report`
pub async fn report(
    client: &Client,
    since: Duration,
    output: Option<&PathBuf>,
) -> Result<(), Error> {
    let form = output.map_or(Ok(Form::Svg), |path| form_of(path))?;
    let rows = client.memory_heat_map(since, COLUMNS).await?;
    let svg = svg(&rows, since, now());
    let text = match form {
        Form::Svg => svg,
        Form::Html => page(&svg, &rows),
    };
    match output {
        None => print(&text),
        Some(path) => std::fs::write(path, text).map_err(|source| Error::File {
            path: path.clone(),
            source,
        }),
    }
}

fn form_of(path: &Path) -> Result<Form, Error> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(Form::Svg),
        Some("html" | "htm") => Ok(Form::Html),
        _ => Err(Error::Usage(format!(
            "{}: the name has to end in .svg or .html, which says what is written",
            path.display()
        ))),
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |age| age.as_secs())
}

/// The heat map.
fn svg(rows: &[HeatRow], since: Duration, now: u64) -> String {
    let columns = usize::try_from(COLUMNS).unwrap_or(0);
    let width = LEFT + columns * CELL + RIGHT;
    let height = TOP + rows.len().max(1) * ROW + BOTTOM;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\">GPU memory of tenants, the last {}</text>\n\
         <text x=\"12\" y=\"40\" fill=\"#555555\">until {}; a cell is the peak of {}; dark is full, grey: nobody looked</text>\n",
        format_duration(since),
        utc(now),
        format_duration(cell_time(since))
    );
    if rows.is_empty() {
        let _ = writeln!(
            out,
            "<text x=\"12\" y=\"{}\">Nobody has used a GPU.</text>",
            TOP + 14
        );
    }
    for (index, row) in rows.iter().enumerate() {
        let y = TOP + index * ROW;
        let _ = writeln!(
            out,
            "<text x=\"12\" y=\"{}\">{} <tspan fill=\"#555555\">GPU {}</tspan></text>",
            y + 14,
            escape(&clean(&row.tenant)),
            row.gpu
        );
        for (column, peak) in row.peaks.iter().enumerate() {
            let (colour, told) = match peak {
                None => ("#e4e4e4".to_owned(), "nobody looked".to_owned()),
                Some(peak) => (colour(*peak, row.full), size(*peak)),
            };
            let _ = writeln!(
                out,
                "<rect x=\"{}\" y=\"{y}\" width=\"{CELL}\" height=\"{}\" fill=\"{colour}\"><title>{told}</title></rect>",
                LEFT + column * CELL,
                ROW - 2
            );
        }
        let most = row.peaks.iter().flatten().max().copied().unwrap_or(0);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" fill=\"#555555\">{} of {}</text>",
            LEFT + columns * CELL + 6,
            y + 14,
            size(most),
            size(row.full)
        );
    }
    let y = TOP + rows.len().max(1) * ROW + 16;
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{y}\" fill=\"#555555\">{} ago</text>\n\
         <text x=\"{}\" y=\"{y}\" fill=\"#555555\" text-anchor=\"end\">now</text>\n</svg>",
        format_duration(since),
        LEFT + columns * CELL
    );
    out
}

fn cell_time(since: Duration) -> Duration {
    Duration::from_millis(
        u64::try_from(since.as_millis() / u128::from(COLUMNS)).unwrap_or(u64::MAX),
    )
}

/// From near white to dark red.
fn colour(value: u64, full: u64) -> String {
    let part = u128::from(value.min(full)) * 255 / u128::from(full.max(1));
    let part = u8::try_from(part).unwrap_or(u8::MAX);
    if value == 0 {
        return "#f7f7f7".to_owned();
    }
    let mix = |from: u8, to: u8| {
        let (from, to, part) = (i32::from(from), i32::from(to), i32::from(part));
        from + (to - from) * part / 255
    };
    format!(
        "#{:02x}{:02x}{:02x}",
        mix(255, 128),
        mix(225, 0),
        mix(170, 20)
    )
}

/// A page with the picture and the numbers.
fn page(svg: &str, rows: &[HeatRow]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>gpuquota report</title>\n\
         <style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: 0 1em; text-align: right }}</style></head>\n\
         <body>\n{svg}<table><tr><th>Tenant</th><th>GPU</th><th>Peak</th><th>Full</th></tr>\n"
    );
    for row in rows {
        let most = row.peaks.iter().flatten().max().copied().unwrap_or(0);
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&clean(&row.tenant)),
            row.gpu,
            size(most),
            size(row.full)
        );
    }
    out.push_str("</table>\n</body></html>\n");
    out
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// `2026-11-30 09:14Z`, by the calendar that holds since 1582.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years from March on, so that the leap day is the last of its year.
    let era_days = days + 719_468;
    let (era, day) = (era_days / 146_097, era_days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!(
        "{year}-{month:02}-{day:02} {:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tenant: &str, peaks: Vec<Option<u64>>) -> HeatRow {
        HeatRow {
            tenant: tenant.into(),
            gpu: 0,
            full: 100,
            peaks,
        }
    }

    #[test]
    fn every_tenant_has_its_row_and_every_peak_its_colour() {
        let rows = [
            row("a", vec![None, Some(0), Some(50), Some(100), Some(250)]),
            row("b<script>", vec![Some(1)]),
        ];
        let text = svg(&rows, Duration::from_mins(10), 0);
        assert_eq!(text.matches("<title>").count(), 6);
        for colour in ["#e4e4e4", "#f7f7f7", "#800014"] {
            assert!(text.contains(colour), "{colour} in {text}");
        }
        // Above full is as dark as full.
        assert_eq!(text.matches("#800014").count(), 2);
        assert!(text.contains("b&lt;script&gt;") && !text.contains("<script"));
        let page = page(&text, &rows);
        assert!(
            page.contains("<svg") && page.contains("<td>250 B</td>") && !page.contains("<script")
        );
        assert!(svg(&[], Duration::from_mins(1), 0).contains("Nobody"));
    }

    #[test]
    fn the_name_says_what_is_written() {
        assert_eq!(form_of(Path::new("x.svg")).ok(), Some(Form::Svg));
        assert_eq!(form_of(Path::new("x.html")).ok(), Some(Form::Html));
        let error = form_of(Path::new("x.pdf"))
            .expect_err("unknown")
            .to_string();
        assert!(error.contains(".svg or .html"), "{error}");
    }

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00Z"),
            (951_782_399, "2000-02-28 23:59Z"),
            (951_782_400, "2000-02-29 00:00Z"),
            (1_796_024_040, "2026-11-30 07:34Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
