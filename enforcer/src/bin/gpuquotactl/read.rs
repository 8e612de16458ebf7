//! Verbs that read from the daemon: list, status, doctor, version.

use std::fmt::Write as _;

use gpuquota_enforcer::{
    client::{Client, ClientError},
    config::Bus,
    control::{Backend, BackendState, Finding, Gpu, Tenant, TenantGpu, Verdict},
    doctor as host,
};
use serde::Serialize;

use crate::{
    error::Error,
    launches,
    output::{Align, Screen, Style, Table, clean, limit, print, print_json, size},
};

/// `list`
pub async fn list(client: &Client, json: bool) -> Result<(), Error> {
    let tenants = client.tenants().await?;
    if json {
        return print_json(&tenants);
    }
    print(&list_text(&tenants, Screen::stdout()))
}

fn list_text(tenants: &[Tenant], screen: Screen) -> String {
    if tenants.is_empty() {
        return "No tenants: no policy file names one.\n".into();
    }
    let mut table = Table::new(&[
        ("TENANT", Align::Left),
        ("CLASS", Align::Left),
        ("PARENT", Align::Left),
        ("CGROUP", Align::Left),
        ("ACTIVE", Align::Right),
        ("USED", Align::Right),
        ("DENIED", Align::Right),
    ]);
    for tenant in tenants {
        let used: u64 = tenant.gpus.iter().map(|gpu| gpu.memory_used).sum();
        let denials: u64 = tenant.gpus.iter().map(|gpu| gpu.denials).sum();
        let optional = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        table.row([
            (tenant.name.clone(), Style::Plain),
            (optional(&tenant.class), Style::Plain),
            (optional(&tenant.parent), Style::Plain),
            (tenant.cgroup.clone(), Style::Plain),
            (
                tenant.cgroups.len().to_string(),
                if tenant.cgroups.is_empty() {
                    Style::Dim
                } else {
                    Style::Plain
                },
            ),
            (size(used), Style::Plain),
            count(denials, Style::Warn),
        ]);
    }
    table.render(screen)
}

fn count(number: u64, style: Style) -> (String, Style) {
    (
        number.to_string(),
        if number == 0 { Style::Plain } else { style },
    )
}

/// Which tenants `status` is about.
#[derive(Debug)]
pub enum Which {
    All,
    Named(String),
    OfProcess(u32),
}

/// `status`
pub async fn status(client: &Client, which: Which, json: bool) -> Result<(), Error> {
    let tenant = match which {
        Which::All => {
            let tenants = client.tenants().await?;
            if json {
                return print_json(&tenants);
            }
            return print(&all_text(&tenants, Screen::stdout()));
        }
        Which::Named(name) => client.tenant(&name).await?,
        Which::OfProcess(pid) => client.tenant_by_pid(pid).await?,
    };
    if json {
        return print_json(&tenant);
    }
    print(&one_text(&tenant, Screen::stdout()))
}

const USAGE_COLUMNS: [(&str, Align); 7] = [
    ("GPU", Align::Right),
    ("", Align::Left),
    ("USED", Align::Right),
    ("HIGH", Align::Right),
    ("MAX", Align::Right),
    ("PEAK", Align::Right),
    ("DENIED", Align::Right),
];

fn usage_cells(gpu: &TenantGpu, screen: Screen) -> [(String, Style); 7] {
    let style = pressure(gpu);
    let bar = gpu.memory_max.or(gpu.memory_high).map_or_else(
        || (String::new(), Style::Plain),
        |limit| (screen.bar(gpu.memory_used, limit), style),
    );
    [
        (gpu.gpu.to_string(), Style::Plain),
        bar,
        (size(gpu.memory_used), style),
        (limit(gpu.memory_high), Style::Plain),
        (limit(gpu.memory_max), Style::Plain),
        (size(gpu.memory_peak), Style::Plain),
        count(gpu.denials, Style::Warn),
    ]
}

fn pressure(gpu: &TenantGpu) -> Style {
    let above = |limit: Option<u64>| limit.is_some_and(|limit| gpu.memory_used > limit);
    let full = gpu.memory_used > 0 && gpu.memory_max == Some(gpu.memory_used);
    if above(gpu.memory_max) || full {
        Style::Bad
    } else if above(gpu.memory_high) {
        Style::Warn
    } else if gpu.memory_used > 0 {
        Style::Good
    } else {
        Style::Plain
    }
}

fn all_text(tenants: &[Tenant], screen: Screen) -> String {
    if tenants.is_empty() {
        return list_text(tenants, screen);
    }
    let mut columns = vec![("TENANT", Align::Left)];
    columns.extend(USAGE_COLUMNS);
    let mut table = Table::new(&columns);
    let mut notes = String::new();
    for tenant in tenants {
        for (i, gpu) in tenant.gpus.iter().enumerate() {
            // The name once per tenant, as a heading of its rows.
            let name = if i == 0 {
                tenant.name.clone()
            } else {
                String::new()
            };
            let [index, bar, used, high, max, peak, denied] = usage_cells(gpu, screen);
            table.row([
                (name, Style::Bold),
                index,
                bar,
                used,
                high,
                max,
                peak,
                denied,
            ]);
        }
        notes.push_str(&breaches(tenant, screen));
    }
    let mut text = table.render(screen);
    text.push_str(&notes);
    text
}

fn breaches(tenant: &Tenant, screen: Screen) -> String {
    let breaches: u64 = tenant.gpus.iter().map(|gpu| gpu.breaches).sum();
    if breaches == 0 {
        return String::new();
    }
    let text = format!(
        "{}: {breaches} allocations went above memory.max because no backend could refuse them; `gpuquotactl doctor` says why",
        clean(&tenant.name)
    );
    format!("{}\n", screen.paint(Style::Bad, &text))
}

fn one_text(tenant: &Tenant, screen: Screen) -> String {
    let mut text = screen.paint(Style::Bold, &clean(&tenant.name));
    text.push('\n');
    let mut field = |name: &str, value: &str| {
        let _ = writeln!(text, "  {name:<8} {}", clean(value));
    };
    field("cgroup", &tenant.cgroup);
    if let Some(class) = &tenant.class {
        field("class", class);
    }
    if let Some(parent) = &tenant.parent {
        field("parent", parent);
    }
    if tenant.cgroups.is_empty() {
        field(
            "active",
            "no such cgroup now; governed as soon as it appears",
        );
    }
    for cgroup in &tenant.cgroups {
        field("active", cgroup);
    }
    text.push('\n');
    let mut table = Table::new(&USAGE_COLUMNS);
    for gpu in &tenant.gpus {
        table.row(usage_cells(gpu, screen));
    }
    text.push_str(&table.render(screen));
    text.push_str(&breaches(tenant, screen));

    if let Some(memory) = memory_text(tenant, screen) {
        text.push('\n');
        text.push_str(&memory);
    }
    if let Some(time) = time_text(tenant, screen) {
        text.push('\n');
        text.push_str(&time);
    }
    if let Some(launches) = launches::text(tenant, screen) {
        text.push('\n');
        text.push_str(&launches);
    }
    if tenant.gpus.iter().any(|gpu| !gpu.processes.is_empty()) {
        let mut table = Table::new(&[
            ("GPU", Align::Right),
            ("PID", Align::Right),
            ("USED", Align::Right),
            ("COMMAND", Align::Left),
        ]);
        for gpu in &tenant.gpus {
            let mut processes: Vec<_> = gpu.processes.iter().collect();
            processes.sort_by_key(|process| (std::cmp::Reverse(process.memory_used), process.pid));
            for process in processes {
                table.row([
                    (gpu.gpu.to_string(), Style::Plain),
                    (process.pid.to_string(), Style::Plain),
                    (size(process.memory_used), Style::Plain),
                    (process.comm.clone(), Style::Plain),
                ]);
            }
        }
        text.push('\n');
        text.push_str(&table.render(screen));
    }
    text
}

/// Reservations and pinned host memory by GPU; `None` where there is neither.
fn memory_text(tenant: &Tenant, screen: Screen) -> Option<String> {
    let mut table = Table::new(&[
        ("GPU", Align::Right),
        ("RESERVED", Align::Right),
        ("CONTEXTS", Align::Right),
        ("MANAGED", Align::Right),
        ("PINNED", Align::Right),
        ("PINNED MAX", Align::Right),
        ("PINNED PEAK", Align::Right),
        ("DENIED", Align::Right),
    ]);
    let mut any = false;
    for gpu in &tenant.gpus {
        let memory = &gpu.memory;
        if memory.is_plain() {
            continue;
        }
        any = true;
        let full = memory.host_max.is_some_and(|max| memory.host_used >= max);
        table.row([
            (gpu.gpu.to_string(), Style::Plain),
            (size(memory.min), Style::Plain),
            (size(memory.context), Style::Plain),
            (size(memory.managed), Style::Plain),
            (
                size(memory.host_used),
                if full { Style::Bad } else { Style::Plain },
            ),
            (limit(memory.host_max), Style::Plain),
            (size(memory.host_peak), Style::Plain),
            count(memory.host_denials, Style::Warn),
        ]);
    }
    any.then(|| table.render(screen))
}

/// GPU time by GPU; `None` where it is not controlled.
fn time_text(tenant: &Tenant, screen: Screen) -> Option<String> {
    let mut table = Table::new(&[
        ("GPU", Align::Right),
        ("WEIGHT", Align::Right),
        ("TIME MAX", Align::Right),
        ("LAST 1s", Align::Right),
        ("10s", Align::Right),
        ("60s", Align::Right),
        ("GPU TIME", Align::Right),
        ("ENERGY", Align::Right),
        ("POWER", Align::Right),
        ("WAITED 10s", Align::Right),
        ("FROZEN", Align::Left),
    ]);
    let mut notes = String::new();
    let mut any = false;
    for gpu in &tenant.gpus {
        let Some(time) = &gpu.time else { continue };
        any = true;
        let (frozen, style) = if time.frozen.is_empty() {
            ("no".to_owned(), Style::Plain)
        } else {
            (time.frozen.join(", "), Style::Warn)
        };
        table.row([
            (gpu.gpu.to_string(), Style::Plain),
            (time.weight.to_string(), Style::Plain),
            (time.max.map_or_else(|| "-".into(), percent), Style::Plain),
            (percent(time.share_1s), Style::Plain),
            (percent(time.share_10s), Style::Plain),
            (percent(time.share_60s), Style::Plain),
            (format!("{:.1} s", time.used.as_secs_f64()), Style::Plain),
            (joules(time.energy_joules), Style::Plain),
            (format!("{:.0} W", time.power_watts), Style::Plain),
            (percent(time.pressure.some.avg10), Style::Plain),
            (frozen, style),
        ]);
        for process in &time.uncontrolled {
            let text = format!(
                "GPU {}: the time of process {} is not controlled: {}",
                gpu.gpu,
                process.pid,
                clean(&process.why)
            );
            let _ = writeln!(notes, "{}", screen.paint(Style::Warn, &text));
        }
    }
    any.then(|| table.render(screen) + &notes)
}

fn joules(joules: f64) -> String {
    if joules < 10_000.0 {
        format!("{joules:.0} J")
    } else {
        format!("{:.1} kJ", joules / 1000.0)
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[derive(Serialize)]
struct Report {
    findings: Vec<Finding>,
    backends: Vec<Backend>,
    gpus: Vec<Gpu>,
}

/// `doctor`; fails if enforcement does not work. Without a daemon it tells what the host offers, and fails because
/// the daemon is not there.
pub async fn doctor(bus: &Bus, json: bool) -> Result<(), Error> {
    let asked = async {
        let client = Client::connect(bus).await?;
        Ok(Report {
            findings: client.doctor().await?,
            backends: client.backends().await?,
            gpus: client.gpus().await?,
        })
    };
    let (report, absence) = match asked.await {
        Ok(report) => (report, None),
        Err(error @ (ClientError::Unavailable { .. } | ClientError::Timeout { .. })) => {
            (without_daemon(&error), Some(error))
        }
        Err(error) => return Err(error.into()),
    };
    if json {
        print_json(&report)?;
    } else {
        print(&doctor_text(&report, Screen::stdout()))?;
    }
    if let Some(error) = absence {
        return Err(error.into());
    }
    let broken = report
        .findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Error);
    if broken {
        Err(Error::Reported(1))
    } else {
        Ok(())
    }
}

/// What is known without a daemon.
fn without_daemon(error: &ClientError) -> Report {
    let mut findings = vec![host::finding(
        "gpuquotad",
        Verdict::Error,
        error.to_string(),
    )];
    findings.extend(host::host());
    Report {
        findings,
        backends: Vec::new(),
        gpus: Vec::new(),
    }
}

fn doctor_text(report: &Report, screen: Screen) -> String {
    let mut findings = Table::new(&[
        ("CHECK", Align::Left),
        ("VERDICT", Align::Left),
        ("DETAIL", Align::Left),
    ]);
    for finding in &report.findings {
        let style = match finding.verdict {
            Verdict::Ok => Style::Good,
            Verdict::Info => Style::Dim,
            Verdict::Warning => Style::Warn,
            Verdict::Error => Style::Bad,
        };
        findings.row([
            (finding.subject.clone(), Style::Plain),
            (finding.verdict.to_string(), style),
            (finding.detail.clone(), Style::Plain),
        ]);
    }
    let mut backends = Table::new(&[
        ("BACKEND", Align::Left),
        ("STATE", Align::Left),
        ("REASON", Align::Left),
    ]);
    for backend in &report.backends {
        let style = match backend.state {
            BackendState::Active => Style::Good,
            BackendState::Available => Style::Plain,
            BackendState::Unavailable => Style::Dim,
        };
        backends.row([
            (backend.name.clone(), Style::Plain),
            (backend.state.to_string(), style),
            (backend.reason.clone(), Style::Plain),
        ]);
    }
    let mut gpus = Table::new(&[
        ("GPU", Align::Right),
        ("NAME", Align::Left),
        ("USED", Align::Right),
        ("TOTAL", Align::Right),
        ("UUID", Align::Left),
    ]);
    for gpu in &report.gpus {
        gpus.row([
            (gpu.index.to_string(), Style::Plain),
            (gpu.name.clone(), Style::Plain),
            (
                gpu.memory_used.map_or_else(|| "?".to_owned(), size),
                Style::Plain,
            ),
            (size(gpu.memory_total), Style::Plain),
            (gpu.uuid.clone(), Style::Plain),
        ]);
    }
    [
        (findings, true),
        (backends, !report.backends.is_empty()),
        (gpus, !report.gpus.is_empty()),
    ]
    .into_iter()
    .filter(|(_, shown)| *shown)
    .map(|(table, _)| table.render(screen))
    .collect::<Vec<_>>()
    .join("\n")
}

#[derive(Serialize)]
struct Versions {
    gpuquotactl: &'static str,
    gpuquotad: Option<String>,
    policy_generation: Option<u64>,
}

/// `version`; a missing daemon is an answer, not an error.
pub async fn version(bus: &Bus, json: bool) -> Result<(), Error> {
    let mut versions = Versions {
        gpuquotactl: env!("CARGO_PKG_VERSION"),
        gpuquotad: None,
        policy_generation: None,
    };
    let asked = async {
        let client = Client::connect(bus).await?;
        Ok((client.version().await?, client.policy_generation().await?))
    };
    let absence = match asked.await {
        Ok((version, generation)) => {
            versions.gpuquotad = Some(version);
            versions.policy_generation = Some(generation);
            None
        }
        Err(error @ (ClientError::Unavailable { .. } | ClientError::Timeout { .. })) => Some(error),
        Err(error) => return Err(error.into()),
    };
    if json {
        return print_json(&versions);
    }
    let daemon = match (&versions.gpuquotad, absence) {
        (Some(version), _) => format!("gpuquotad {}", clean(version)),
        (None, Some(error)) => error.to_string(),
        (None, None) => String::new(),
    };
    print(&format!("gpuquotactl {}\n{daemon}\n", versions.gpuquotactl))
}

/// `dump-state`
pub async fn dump_state(client: &Client) -> Result<(), Error> {
    print_json(&client.dump_state().await?)
}
