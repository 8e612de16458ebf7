//! `policy check`, `policy show`, `policy explain`: policy files without the daemon.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use gpuquota_enforcer::{
    client::Client,
    config::{Bus, Config},
};
use gpuquota_policy::{
    Diagnostic, ExplainedValue, GpuSelector, HostGpu, Layer, Policy, Severity, Source, merge_order,
};
use serde::Serialize;

use crate::{
    args::PolicyFiles,
    error::{BAD_CONFIGURATION, Error},
    output::{Align, Screen, Style, Table, counted, print, print_json},
};

/// The files that `files` means, read, in merge order.
fn sources(files: &PolicyFiles) -> Result<Vec<Source>, Error> {
    let mut found = Vec::new();
    if files.paths.is_empty() {
        let config = Config::load(files.config.as_deref())?;
        for (layer, directory) in Layer::ALL.into_iter().zip(config.policy.in_order()) {
            match entries(directory) {
                Ok(entries) => found.extend(entries.into_iter().map(|path| (layer, path))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::file(directory)(error)),
            }
        }
        found = merge_order(&found);
    } else {
        for path in &files.paths {
            let entries = match entries(path) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => vec![path.clone()],
                Ok(entries) => in_order(entries),
                Err(error) => return Err(Error::file(path)(error)),
            };
            found.extend(entries.into_iter().map(|path| (Layer::Admin, path)));
        }
    }
    found
        .into_iter()
        .map(|(layer, path)| {
            let text = fs::read(&path).map_err(Error::file(&path))?;
            Ok(Source::new(path, layer, text))
        })
        .collect()
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

fn in_order(entries: Vec<PathBuf>) -> Vec<PathBuf> {
    let entries: Vec<_> = entries
        .into_iter()
        .map(|path| (Layer::Admin, path))
        .collect();
    merge_order(&entries)
        .into_iter()
        .map(|(_, path)| path)
        .collect()
}

/// A policy that loads; its warnings go to standard error.
fn load(files: &PolicyFiles) -> Result<Policy, Error> {
    let sources = sources(files)?;
    let loaded =
        Policy::load(&sources, None).map_err(|problems| Error::Policy(render(problems.iter())))?;
    if !loaded.warnings.is_empty() {
        eprintln!("{}", render(loaded.warnings.iter()));
    }
    Ok(loaded.policy)
}

fn render<'a>(problems: impl Iterator<Item = &'a Diagnostic>) -> String {
    problems
        .map(Diagnostic::render)
        .map(|text| text.trim_end().to_owned())
        .collect::<Vec<_>>()
        .join("\n")
}

#[derive(Serialize)]
struct CheckReport<'a> {
    /// Whether the daemon would take the policy.
    valid: bool,
    files: Vec<String>,
    tenants: usize,
    problems: Vec<Problem<'a>>,
}

#[derive(Serialize)]
struct Problem<'a> {
    severity: String,
    file: String,
    line: u32,
    column: u32,
    message: &'a str,
    help: Option<&'a str>,
    related: Option<Related<'a>>,
}

#[derive(Serialize)]
struct Related<'a> {
    file: String,
    line: u32,
    column: u32,
    message: &'a str,
}

impl<'a> From<&'a Diagnostic> for Problem<'a> {
    fn from(diagnostic: &'a Diagnostic) -> Self {
        Self {
            severity: diagnostic.severity.to_string(),
            file: diagnostic.path.display().to_string(),
            line: diagnostic.line,
            column: diagnostic.col,
            message: &diagnostic.message,
            help: diagnostic.help.as_deref(),
            related: diagnostic.related.as_ref().map(|related| Related {
                file: related.path.display().to_string(),
                line: related.line,
                column: related.col,
                message: &related.message,
            }),
        }
    }
}

/// `policy check`
pub fn check(files: &PolicyFiles, json: bool) -> Result<(), Error> {
    let sources = sources(files)?;
    let result = Policy::load(&sources, None);
    let (problems, tenants): (Vec<&Diagnostic>, usize) = match &result {
        Ok(loaded) => (
            loaded.warnings.iter().collect(),
            loaded.policy.tenants.len(),
        ),
        Err(problems) => (problems.iter().collect(), 0),
    };
    if json {
        print_json(&CheckReport {
            valid: result.is_ok(),
            files: sources
                .iter()
                .map(|source| source.path.display().to_string())
                .collect(),
            tenants,
            problems: problems.iter().copied().map(Into::into).collect(),
        })?;
    } else {
        if !problems.is_empty() {
            eprintln!("{}", render(problems.iter().copied()));
        }
        let errors = problems
            .iter()
            .filter(|problem| problem.severity == Severity::Error)
            .count();
        let warnings = problems.len() - errors;
        let summary = format!(
            "{}, {}: {}, {}\n",
            counted(sources.len(), "file"),
            if result.is_ok() {
                counted(tenants, "tenant")
            } else {
                "not loaded".into()
            },
            counted(errors, "error"),
            counted(warnings, "warning")
        );
        print(&summary)?;
    }
    if result.is_ok() {
        Ok(())
    } else {
        Err(Error::Reported(BAD_CONFIGURATION))
    }
}

/// `policy show`
pub fn show(files: &PolicyFiles, json: bool) -> Result<(), Error> {
    let text = load(files)?.to_toml();
    if !json {
        return print(&text);
    }
    let table: toml::Table = toml::from_str(&text)
        .map_err(|error| Error::Policy(format!("the merged policy: {error}")))?;
    print_json(&table)
}

#[derive(Serialize)]
struct Explained {
    tenant: String,
    gpu: Option<String>,
    values: BTreeMap<&'static str, ExplainedJson>,
}

#[derive(Serialize)]
struct ExplainedJson {
    value: String,
    from: String,
    file: Option<String>,
    line: Option<u32>,
    column: Option<u32>,
}

impl From<ExplainedValue> for ExplainedJson {
    fn from(value: ExplainedValue) -> Self {
        Self {
            value: value.value,
            from: value.level.to_string(),
            file: value
                .origin
                .as_ref()
                .map(|origin| origin.path.display().to_string()),
            line: value.origin.as_ref().map(|origin| origin.line),
            column: value.origin.as_ref().map(|origin| origin.col),
        }
    }
}

/// `policy explain`
pub async fn explain(
    files: &PolicyFiles,
    tenant: &str,
    gpu: Option<&GpuSelector>,
    bus: &Bus,
    json: bool,
) -> Result<(), Error> {
    let policy = load(files)?;
    let Some(entry) = policy.tenants.get(tenant) else {
        return Err(Error::NoSuchTenant(tenant.to_owned()));
    };
    let host_gpu = match gpu {
        Some(selector) => resolve(selector, bus).await,
        // No table names such a GPU: what holds for every GPU without an entry of its own.
        None => HostGpu {
            index: u32::MAX,
            uuid: String::new(),
            memory: 0,
        },
    };
    let values = policy.explain(tenant, &host_gpu);
    if json {
        return print_json(&Explained {
            tenant: tenant.to_owned(),
            gpu: gpu.map(ToString::to_string),
            values: values
                .into_iter()
                .map(|value| (value.key, value.into()))
                .collect(),
        });
    }
    let mut table = Table::new(&[
        ("KEY", Align::Left),
        ("VALUE", Align::Left),
        ("FROM", Align::Left),
        ("FILE", Align::Left),
    ]);
    for value in values {
        let style = if value.origin.is_some() {
            Style::Plain
        } else {
            Style::Dim
        };
        let file = value
            .origin
            .as_ref()
            .map_or_else(String::new, ToString::to_string);
        table.row([
            (value.key.to_owned(), style),
            (value.value, style),
            (value.level.to_string(), style),
            (file, style),
        ]);
    }
    let mut text = table.render(Screen::stdout());
    if gpu.is_none() {
        let class = policy.classes.get(entry.class_name());
        let tables = class.into_iter().flat_map(|class| class.gpu.keys());
        let named: Vec<_> = entry
            .gpu
            .keys()
            .chain(tables)
            .filter(|selector| **selector != GpuSelector::Any)
            .map(ToString::to_string)
            .collect();
        if !named.is_empty() {
            let _ = writeln!(
                text,
                "\nDiffers on GPU {}: add --gpu to see what holds there.",
                named.join(", ")
            );
        }
    }
    print(&text)
}

/// The GPU with both its index and its UUID, because a policy may name it by either.
///
/// Only the daemon knows both; without it the name given has to do.
async fn resolve(selector: &GpuSelector, bus: &Bus) -> HostGpu {
    let gpus = async { Client::connect(bus).await?.gpus().await };
    match gpus.await {
        Ok(gpus) => {
            let found = gpus
                .into_iter()
                .map(|gpu| HostGpu {
                    index: gpu.index,
                    uuid: gpu.uuid,
                    memory: gpu.memory_total,
                })
                .find(|gpu| selector.matches(gpu));
            if let Some(gpu) = found {
                return gpu;
            }
            eprintln!("gpuquotactl: this host has no GPU {selector}");
        }
        Err(error) => eprintln!(
            "gpuquotactl: {error}\n  entries that name GPU {selector} in another way are not shown"
        ),
    }
    let (index, uuid) = match selector {
        GpuSelector::Index(index) => (*index, String::new()),
        GpuSelector::Uuid(uuid) => (u32::MAX, uuid.clone()),
        GpuSelector::Any => (u32::MAX, String::new()),
    };
    HostGpu {
        index,
        uuid,
        memory: 0,
    }
}
