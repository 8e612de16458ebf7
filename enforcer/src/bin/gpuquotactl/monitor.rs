//! `monitor`: events as they happen.

use std::time::{SystemTime, UNIX_EPOCH};

use gpuquota_enforcer::{client::Client, control::Notice};
use serde::Serialize;

use crate::{
    error::Error,
    faults, launches,
    output::{Screen, Style, clean, counted, print, size},
    profile,
};

#[derive(Serialize)]
struct Line<'a> {
    /// When it arrived here, in microseconds since 1970.
    time_usec: u64,
    #[serde(flatten)]
    notice: &'a Notice,
}

/// Prints one line per event, or one JSON object per line, until the daemon goes away.
pub async fn monitor(client: &Client, tenant: Option<&str>, json: bool) -> Result<(), Error> {
    let screen = Screen::stdout();
    if let Some(name) = tenant {
        // A misspelt name would wait for ever.
        client.tenant(name).await?;
    }
    let mut notices = client.notices().await?;
    loop {
        let notice = notices.next().await?;
        if tenant.is_some_and(|name| !is_about(&notice, name)) {
            continue;
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let text = if json {
            let line = Line {
                time_usec: u64::try_from(now.as_micros()).unwrap_or(u64::MAX),
                notice: &notice,
            };
            serde_json::to_string(&line).map_err(|error| Error::Output(error.into()))?
        } else {
            let seconds = now.as_secs() % 86_400;
            let (hour, minute) = (seconds / 3600, seconds / 60 % 60);
            let (style, text) = describe(&notice);
            format!(
                "{hour:02}:{minute:02}:{:02}Z  {}",
                seconds % 60,
                screen.paint(style, &clean(&text))
            )
        };
        print(&format!("{text}\n"))?;
    }
}

fn is_about(notice: &Notice, name: &str) -> bool {
    match notice {
        Notice::Denied {
            tenant, limited_by, ..
        }
        | Notice::LaunchDenied {
            tenant, limited_by, ..
        } => tenant == name || limited_by == name,
        Notice::Breached { tenant, .. }
        | Notice::HighReached { tenant, .. }
        | Notice::Reclaimed { tenant, .. }
        | Notice::Throttled { tenant, .. }
        | Notice::Storm { tenant, .. }
        | Notice::Anomaly { tenant, .. }
        | Notice::Xid { tenant, .. }
        | Notice::CgroupAttached { tenant, .. }
        | Notice::CgroupDetached { tenant, .. } => tenant == name,
        Notice::PolicyLoaded(_) => true,
    }
}

#[expect(
    clippy::too_many_lines,
    reason = "one arm for each kind of notice, with its fields"
)]
fn describe(notice: &Notice) -> (Style, String) {
    match notice {
        Notice::Denied {
            tenant,
            limited_by,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => {
            if limited_by.is_empty() {
                let text = format!(
                    "denied    {tenant}: process {pid} asked for {} on GPU {gpu}; {} of {} are in use or reserved for others ({key})",
                    size(*requested),
                    size(*used),
                    size(*limit)
                );
                return (Style::Warn, text);
            }
            let around = if limited_by == tenant {
                String::new()
            } else {
                format!(" of {limited_by}")
            };
            let text = format!(
                "denied    {tenant}: process {pid} asked for {} on GPU {gpu}; {} of {key} = {}{around} in use",
                size(*requested),
                size(*used),
                size(*limit)
            );
            (Style::Warn, text)
        }
        Notice::Breached {
            tenant,
            key,
            gpu,
            pid,
            requested,
            used,
            limit,
        } => {
            let text = format!(
                "breached  {tenant}: process {pid} got {} on GPU {gpu}; {} in use, above {key} = {}",
                size(*requested),
                size(*used),
                size(*limit)
            );
            (Style::Bad, text)
        }
        Notice::HighReached {
            tenant,
            gpu,
            used,
            high,
        } => {
            let text = format!(
                "high      {tenant}: {} in use on GPU {gpu}, above memory.high = {}",
                size(*used),
                size(*high)
            );
            (Style::Warn, text)
        }
        Notice::Reclaimed {
            tenant,
            gpu,
            moved,
            wanted_by,
        } => {
            let why = if wanted_by.is_empty() {
                "above memory.high".to_owned()
            } else {
                format!("the card is full and {wanted_by} wants memory")
            };
            let text = format!(
                "reclaimed {tenant}: {} of managed memory moved from GPU {gpu} to the host, {why}",
                size(*moved)
            );
            (Style::Plain, text)
        }
        Notice::Xid { .. } => faults::describe(notice),
        Notice::Throttled { .. } | Notice::LaunchDenied { .. } | Notice::Storm { .. } => {
            launches::describe(notice)
        }
        Notice::Anomaly { .. } => profile::describe(notice),
        Notice::PolicyLoaded(loaded) => {
            let text = format!(
                "policy    {} in force: {}, {}",
                loaded.generation,
                counted(loaded.tenants as usize, "tenant"),
                counted(loaded.warnings.len(), "warning")
            );
            (Style::Plain, text)
        }
        Notice::CgroupAttached { tenant, cgroup } => (
            Style::Plain,
            format!("attached  {tenant}: {cgroup} appeared"),
        ),
        Notice::CgroupDetached { tenant, cgroup } => (
            Style::Plain,
            format!("detached  {tenant}: {cgroup} is gone"),
        ),
    }
}
