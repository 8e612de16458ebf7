//! Reports as folded stacks: a line for each call site, outermost function first, with the bytes that it holds. Flame graph
//! programs read that.

use crate::control::leaks::LeakReport;

/// The report as text; sites that hold nothing are left out.
pub fn folded(report: &LeakReport) -> String {
    let mut lines: Vec<String> = report
        .sites
        .iter()
        .filter(|site| site.live_bytes > 0)
        .map(|site| {
            let mut names: Vec<String> = site
                .frames
                .iter()
                .rev()
                // Semicolons and line ends would mean something else.
                .map(|frame| {
                    frame
                        .to_string()
                        .replace(';', ":")
                        .replace(['\n', '\r'], " ")
                })
                .collect();
            if site.cut {
                names.insert(0, "[cut]".to_owned());
            }
            names.push(site.call.clone());
            format!("{} {}", names.join(";"), site.live_bytes)
        })
        .collect();
    lines.sort_unstable();
    // Every line ends, and no line is no text.
    lines.push(String::new());
    lines.join("\n")
}
