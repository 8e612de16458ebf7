//! From the text of the policy files to one merged policy.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned as TomlSpanned;
use toml::de::{DeTable, DeValue};

use crate::cgroup::CgroupPattern;
use crate::diagnostic::{Diagnostic, Diagnostics, Report, Severity, quote};
use crate::gpu::{GpuSelector, GpuSelectorError, Host, SELECTOR_HELP};
use crate::limits::{Key, Limits};
use crate::name::{NAME_HELP, is_name};
use crate::policy::{Class, Policy, Tenant};
use crate::property::{check_cgroup, check_class_name};
use crate::raw::{Mistake, Raw, in_context};
use crate::source::{Origin, Source, SourceMap, Spanned};
use crate::suggest::{nearest, nearest_keys};
use crate::validate::{self, Context};
use crate::values::{Setting, integer_within};

/// The longest policy file that is read, in bytes. Policies are typed by people; 1,000 tenants take about 200 kB.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// Syntax errors shown for one file; more than these follow from the first ones.
const MAX_SYNTAX_ERRORS: usize = 20;

/// The highest priority of a class.
const MAX_PRIORITY: u32 = 1000;

/// What [`Policy::load`] gives.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The merged and checked policy.
    pub policy: Policy,
    /// What is probably not meant, sorted as [`Diagnostics`] are.
    pub warnings: Vec<Diagnostic>,
}

impl Policy {
    /// Reads all files, merges them in the order given (see [`merge_order`](crate::merge_order)), and checks the result.
    ///
    /// With `host`, selectors and reservations are checked against its GPUs too. A GPU that is not there is a warning.
    ///
    /// # Errors
    /// All problems of all files, warnings included, if at least one of them is an error.
    pub fn load(sources: &[Source], host: Option<&Host>) -> Result<Loaded, Diagnostics> {
        let mut report = Report::default();
        let mut draft = Draft::default();
        let mut broken = Vec::new();
        let texts: Vec<Cow<'_, str>> = sources
            .iter()
            .map(|source| String::from_utf8_lossy(&source.text))
            .collect();
        let mut maps = Vec::with_capacity(sources.len());
        for (index, (source, text)) in sources.iter().zip(&texts).enumerate() {
            let map = SourceMap::new(index, &source.path, text);
            let complete = check_text(source, &map, &mut report);
            if source.text.len() <= MAX_FILE_BYTES {
                let parsed = read_file(&map, &mut draft, &mut report);
                if !(complete && parsed) {
                    broken.push(map.text());
                }
            }
            maps.push(map);
        }
        let (policy, selectors) = draft.finish(&broken, &mut report);
        validate::check(
            &Context {
                policy: &policy,
                selectors: &selectors,
                host,
                broken: &broken,
            },
            &mut report,
        );
        let found = report.finish(&maps);
        if found.iter().any(|one| one.severity == Severity::Error) {
            return Err(found);
        }
        Ok(Loaded {
            policy,
            warnings: found.into_vec(),
        })
    }
}

/// Whether the source is text and not too long. Bytes that are no text are replaced, so that the rest is still read.
fn check_text(source: &Source, map: &SourceMap<'_>, report: &mut Report) -> bool {
    if source.text.len() > MAX_FILE_BYTES {
        let message = format!(
            "the file has {} bytes; more than {MAX_FILE_BYTES} are not read",
            source.text.len()
        );
        let start = map.origin(0..0);
        report.push(Diagnostic::error(&start, message).help("split it into several files"));
        return false;
    }
    let Err(error) = std::str::from_utf8(&source.text) else {
        return true;
    };
    let at = error.valid_up_to();
    let byte = source.text.get(at).copied().unwrap_or_default();
    let origin = map.origin(at..at + char::REPLACEMENT_CHARACTER.len_utf8());
    let message = format!("the file is not UTF-8: byte 0x{byte:02x}");
    report.push(Diagnostic::error(&origin, message).help("save it as UTF-8"));
    false
}

/// Reads one file into the draft. Returns whether it has no syntax errors.
fn read_file(map: &SourceMap<'_>, draft: &mut Draft, report: &mut Report) -> bool {
    let (table, errors) = DeTable::parse_recoverable(map.text());
    let mut broken_spans = Vec::new();
    for (index, error) in errors.iter().enumerate() {
        let span = error.span().unwrap_or(0..0);
        let origin = map.origin(span.clone());
        if index == MAX_SYNTAX_ERRORS {
            let message = format!(
                "TOML syntax: {} more errors are not shown",
                errors.len() - index
            );
            report.push(Diagnostic::error(&origin, message));
            break;
        }
        report.push(syntax_error(map, &origin, &span, error.message()));
        broken_spans.push(span);
    }
    let mut reader = Reader {
        map,
        report,
        broken_spans,
    };
    reader.root(table.get_ref(), draft);
    errors.is_empty()
}

fn syntax_error(
    map: &SourceMap<'_>,
    origin: &Origin,
    span: &Range<usize>,
    message: &str,
) -> Diagnostic {
    let before = map.text().get(..span.start).unwrap_or_default();
    let is_value = before.trim_end_matches([' ', '\t']).ends_with('=');
    if message.starts_with("string values must be quoted") && is_value {
        let text = map.text().get(span.clone()).unwrap_or_default();
        if text.is_empty() {
            return Diagnostic::error(origin, "TOML syntax: the value is missing");
        }
        return Diagnostic::error(
            origin,
            format!("TOML syntax: {} is no TOML value", quote(text)),
        )
        .help(format!("strings stand in quotes: {}", quote(text)));
    }
    let diagnostic = Diagnostic::error(origin, format!("TOML syntax: {message}"));
    if message.starts_with("duplicate key") {
        return diagnostic
            .help("within one file every key stands once; a later file may set it again");
    }
    diagnostic
}

/// What has been read so far.
#[derive(Default)]
struct Draft {
    tenants: BTreeMap<String, TenantDraft>,
    classes: BTreeMap<String, Class>,
    selectors: Vec<Spanned<GpuSelector>>,
}

struct TenantDraft {
    origin: Origin,
    /// Whether a cgroup was given, if only a bad one.
    cgroup_given: bool,
    cgroup: Option<Spanned<CgroupPattern>>,
    class: Option<Spanned<String>>,
    limits: Limits,
    gpu: BTreeMap<GpuSelector, Box<Limits>>,
}

impl Draft {
    fn finish(self, broken: &[&str], report: &mut Report) -> (Policy, Vec<Spanned<GpuSelector>>) {
        let mut tenants = BTreeMap::new();
        for (name, draft) in self.tenants {
            let cgroup = draft.cgroup.unwrap_or_else(|| {
                // The cgroup may stand where a file with syntax errors could not be read.
                if !draft.cgroup_given && !broken.iter().any(|text| text.contains(&name)) {
                    let message = format!("tenant {} has no cgroup", quote(&name));
                    report.push(Diagnostic::error(&draft.origin, message).help(
                        "add cgroup = \"/path/of/its.slice\" here or in another file; if the tenant is gone, remove what is left of it",
                    ));
                }
                // An error is reported in every case. The rest of the tenant is still checked.
                Spanned {
                    value: CgroupPattern::nowhere(),
                    origin: draft.origin.clone(),
                }
            });
            let tenant = Tenant {
                name: name.clone(),
                origin: draft.origin,
                cgroup,
                class: draft.class,
                limits: draft.limits,
                gpu: draft.gpu,
            };
            tenants.insert(name, tenant);
        }
        (
            Policy {
                classes: self.classes,
                tenants,
            },
            self.selectors,
        )
    }
}

/// One file being read.
struct Reader<'a, 'b> {
    map: &'a SourceMap<'a>,
    report: &'b mut Report,
    broken_spans: Vec<Range<usize>>,
}

type Entry<'a, 'i> = (&'a TomlSpanned<Cow<'i, str>>, &'a TomlSpanned<DeValue<'i>>);

/// The kind of table that keys stand in.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Tenant,
    Class,
    Gpu,
}

impl Place {
    /// All keys that may stand here.
    fn keys(self) -> Vec<&'static str> {
        let own: &[&str] = match self {
            Self::Tenant => &["cgroup", "class", "gpu"],
            Self::Class => &["priority", "exclusive", "gpu"],
            Self::Gpu => &[],
        };
        own.iter()
            .copied()
            .chain(Key::ALL.iter().map(|key| key.name()))
            .collect()
    }

    /// Whether `name` is a key here, or the first part of one.
    fn has(self, name: &str) -> bool {
        self.keys()
            .iter()
            .any(|key| key.split('.').next() == Some(name))
    }

    fn describe(self) -> &'static str {
        match self {
            Self::Tenant => "a tenant",
            Self::Class => "a class",
            Self::Gpu => "a table of one GPU",
        }
    }
}

impl Reader<'_, '_> {
    fn error(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        // What a syntax error covers is no second problem.
        if self
            .broken_spans
            .iter()
            .any(|broken| broken.start <= span.end && span.start <= broken.end)
        {
            return;
        }
        let diagnostic = Diagnostic::error(&self.map.origin(span), message);
        let help = help.into();
        self.report.push(if help.is_empty() {
            diagnostic
        } else {
            diagnostic.help(help)
        });
    }

    fn mistake(&mut self, key: &str, raw: &Raw<'_>, span: Range<usize>, mistake: &Mistake) {
        self.error(span, in_context(key, raw, mistake), mistake.help.clone());
    }

    fn root(&mut self, table: &DeTable<'_>, draft: &mut Draft) {
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            match name {
                "tenant" | "class" => {
                    let describe = || {
                        let help =
                            format!("write [{name}.NAME] and the keys of the {name} below it");
                        (name.to_owned(), help)
                    };
                    let Some(entries) = self.table(value, describe) else {
                        continue;
                    };
                    for entry in entries {
                        if name == "tenant" {
                            self.tenant(entry, draft);
                        } else {
                            self.class(entry, draft);
                        }
                    }
                }
                // The header of the table that it stood in could not be read.
                _ if !self.broken_spans.is_empty()
                    && (Place::Tenant.has(name) || Place::Class.has(name)) => {}
                _ => {
                    let help = match nearest(name, ["tenant", "class"]) {
                        Some(near) => format!("did you mean [{near}.NAME]?"),
                        None => "a policy file has [tenant.NAME] and [class.NAME]; settings of the daemon stand in gpuquota.toml".to_owned(),
                    };
                    self.error(key.span(), format!("unknown key {}", quote(name)), help);
                }
            }
        }
    }

    /// The table that `value` is, or an error with the name and the help that `describe` gives.
    fn table<'v, 'i>(
        &mut self,
        value: &'v TomlSpanned<DeValue<'i>>,
        describe: impl FnOnce() -> (String, String),
    ) -> Option<&'v DeTable<'i>> {
        if let DeValue::Table(table) = value.get_ref() {
            return Some(table);
        }
        let raw = Raw::of(value.get_ref());
        let (name, help) = describe();
        let mistake = Mistake::wrong_type(&raw, help);
        self.mistake(&name, &raw, value.span(), &mistake);
        None
    }

    /// Checks the name of a tenant or class.
    fn name(&mut self, kind: &str, key: &TomlSpanned<Cow<'_, str>>) -> bool {
        let good = is_name(key.get_ref());
        if !good {
            self.error(
                key.span(),
                format!("{} can't be the name of a {kind}", quote(key.get_ref())),
                NAME_HELP,
            );
        }
        good
    }

    fn tenant(&mut self, (key, value): Entry<'_, '_>, draft: &mut Draft) {
        let name = key.get_ref().as_ref();
        let good_name = self.name("tenant", key);
        let describe = || {
            let help = "a tenant is a table: write [tenant.NAME]";
            (format!("tenant.{name}"), help.to_owned())
        };
        let Some(entries) = self.table(value, describe) else {
            return;
        };
        let mut fresh = TenantDraft {
            origin: self.map.origin(key.span()),
            cgroup_given: false,
            cgroup: None,
            class: None,
            limits: Limits::default(),
            gpu: BTreeMap::new(),
        };
        let mut unnamed = Vec::new();
        let (tenant, selectors) = if good_name {
            (
                draft.tenants.entry(name.to_owned()).or_insert(fresh),
                &mut draft.selectors,
            )
        } else {
            (&mut fresh, &mut unnamed)
        };
        for (key, value) in entries {
            match key.get_ref().as_ref() {
                "cgroup" => {
                    tenant.cgroup_given = true;
                    if let Some(cgroup) = self.value("cgroup", value, check_cgroup) {
                        tenant.cgroup = Some(cgroup);
                    }
                }
                "class" => {
                    if let Some(class) = self.value("class", value, check_class_name) {
                        tenant.class = Some(class);
                    }
                }
                "gpu" => self.gpu(value, &mut tenant.gpu, selectors),
                _ => self.limit(Place::Tenant, key, value, &mut tenant.limits),
            }
        }
    }

    fn class(&mut self, (key, value): Entry<'_, '_>, draft: &mut Draft) {
        let name = key.get_ref().as_ref();
        let good_name = self.name("class", key);
        let describe = || {
            let help = "a class is a table: write [class.NAME]";
            (format!("class.{name}"), help.to_owned())
        };
        let Some(entries) = self.table(value, describe) else {
            return;
        };
        let mut fresh = Class {
            name: name.to_owned(),
            origin: self.map.origin(key.span()),
            priority: None,
            exclusive: None,
            limits: Limits::default(),
            gpu: BTreeMap::new(),
        };
        let mut unnamed = Vec::new();
        let (class, selectors) = if good_name {
            (
                draft.classes.entry(name.to_owned()).or_insert(fresh),
                &mut draft.selectors,
            )
        } else {
            (&mut fresh, &mut unnamed)
        };
        for (key, value) in entries {
            match key.get_ref().as_ref() {
                "priority" => {
                    let read = |raw: &Raw<'_>| {
                        integer_within(raw, 0..=MAX_PRIORITY, || {
                            format!(
                                "a priority is an integer from 0 to {MAX_PRIORITY}, larger wins"
                            )
                        })
                    };
                    if let Some(priority) = self.value("priority", value, read) {
                        class.priority = Some(priority);
                    }
                }
                "exclusive" => {
                    if let Some(exclusive) = self.value("exclusive", value, bool::read) {
                        class.exclusive = Some(exclusive);
                    }
                }
                "gpu" => self.gpu(value, &mut class.gpu, selectors),
                _ => self.limit(Place::Class, key, value, &mut class.limits),
            }
        }
    }

    fn value<T>(
        &mut self,
        key: &str,
        value: &TomlSpanned<DeValue<'_>>,
        read: impl Fn(&Raw<'_>) -> Result<T, Mistake>,
    ) -> Option<Spanned<T>> {
        let raw = Raw::of(value.get_ref());
        match read(&raw) {
            Ok(read) => Some(Spanned {
                value: read,
                origin: self.map.origin(value.span()),
            }),
            Err(mistake) => {
                self.mistake(key, &raw, value.span(), &mistake);
                None
            }
        }
    }

    fn gpu(
        &mut self,
        value: &TomlSpanned<DeValue<'_>>,
        gpus: &mut BTreeMap<GpuSelector, Box<Limits>>,
        selectors: &mut Vec<Spanned<GpuSelector>>,
    ) {
        const HELP: &str = "limits of one GPU stand in a table such as [tenant.NAME.gpu.\"0\"]";
        let Some(entries) = self.table(value, || ("gpu".to_owned(), HELP.to_owned())) else {
            return;
        };
        for (key, value) in entries {
            let text = key.get_ref().as_ref();
            let selector = match GpuSelector::parse(text) {
                Ok(selector) => Some(selector),
                Err(error) => {
                    let what = match error {
                        GpuSelectorError::Uuid { .. } => "is not a whole GPU UUID",
                        GpuSelectorError::Unknown { .. } => "names no GPU",
                    };
                    // `gpu.memory.max = …`: the GPU was left out, what follows is no table of one.
                    let left_out = Key::GROUPS.contains(&text);
                    let help = if left_out { HELP } else { SELECTOR_HELP };
                    self.error(key.span(), format!("{} {what}", quote(text)), help);
                    if left_out {
                        continue;
                    }
                    None
                }
            };
            let Some(entries) =
                self.table(value, || (format!("gpu.{}", quote(text)), HELP.to_owned()))
            else {
                continue;
            };
            let mut unnamed = Limits::default();
            let limits = match selector {
                Some(selector) => {
                    selectors.push(Spanned {
                        value: selector.clone(),
                        origin: self.map.origin(key.span()),
                    });
                    gpus.entry(selector).or_default()
                }
                None => &mut unnamed,
            };
            for (key, value) in entries {
                self.limit(Place::Gpu, key, value, limits);
            }
        }
    }

    /// A key that is none of the place's own: `memory`, `launch` or `time` with their keys, or unknown.
    fn limit(
        &mut self,
        place: Place,
        key: &TomlSpanned<Cow<'_, str>>,
        value: &TomlSpanned<DeValue<'_>>,
        limits: &mut Limits,
    ) {
        let group = key.get_ref().as_ref();
        if !Key::GROUPS.contains(&group) {
            self.unknown(place, group, key.span());
            return;
        }
        let describe = || {
            let inside: Vec<&str> = Key::ALL
                .iter()
                .filter(|key| key.split().0 == group)
                .map(|key| key.name())
                .collect();
            let help = format!("{group} is a table; its keys are {}", inside.join(", "));
            (group.to_owned(), help)
        };
        let Some(entries) = self.table(value, describe) else {
            return;
        };
        for (key, value) in entries {
            let name = key.get_ref().as_ref();
            let Some(known) = Key::from_parts(group, name) else {
                self.unknown(place, &format!("{group}.{name}"), key.span());
                continue;
            };
            let raw = Raw::of(value.get_ref());
            if let Err(mistake) = limits.set(known, &raw, self.map.origin(value.span())) {
                self.mistake(known.name(), &raw, value.span(), &mistake);
            }
        }
    }

    fn unknown(&mut self, place: Place, name: &str, span: Range<usize>) {
        let keys = place.keys();
        let near = nearest_keys(name, &keys);
        let help = match name {
            "cgroup" | "class" => format!("{name} belongs to a tenant"),
            "priority" | "exclusive" => format!("{name} belongs to a class"),
            "gpu" => "a table of one GPU stands in a tenant or a class".to_owned(),
            _ if !near.is_empty() => format!("did you mean {}?", near.join(" or ")),
            _ => {
                let group = name
                    .split('.')
                    .next()
                    .filter(|group| Key::GROUPS.contains(group) && name.contains('.'));
                let shown: Vec<&str> = keys
                    .into_iter()
                    .filter(|key| group.is_none() || key.split('.').next() == group)
                    .collect();
                format!("the keys here are {}", shown.join(", "))
            }
        };
        self.error(
            span,
            format!("unknown key {} in {}", quote(name), place.describe()),
            help,
        );
    }
}
