//! What is shown and what keys do to it. Nothing here knows a terminal or the daemon.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use clap::ValueEnum;
use gpuquota_enforcer::control::{Gpu, Tenant, TenantGpu, insight::HeatRow};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What the daemon told.
#[derive(Clone, Debug)]
pub struct Data {
    pub gpus: Vec<Gpu>,
    pub tenants: Vec<Tenant>,
    /// Memory over time; only asked for while it is shown.
    pub heat: Vec<HeatRow>,
    /// When.
    pub at: Instant,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            gpus: Vec::new(),
            tenants: Vec::new(),
            heat: Vec::new(),
            at: Instant::now(),
        }
    }
}

/// By what tenants are ordered; the largest or the first name on top.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Bytes in use on all GPUs
    Used,
    /// The largest part of a limit that is in use on one GPU
    Share,
    /// Refused allocations
    Denied,
    /// Name
    Name,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Used => Self::Share,
            Self::Share => Self::Denied,
            Self::Denied => Self::Name,
            Self::Name => Self::Used,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Share => "share of max",
            Self::Denied => "denied",
            Self::Name => "name",
        }
    }
}

/// Which page is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Page {
    Tenants,
    /// The processes of a tenant.
    Processes(String),
    /// Memory of tenants over time.
    Heat,
    Help,
}

/// What a key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Stay,
    Quit,
}

/// A tenant in its place.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub tenant: &'a Tenant,
    /// Tenants around it that are shown above it.
    pub depth: usize,
}

/// A process of the tenant that is looked into.
#[derive(Clone, Copy, Debug)]
pub struct ProcessRow<'a> {
    pub gpu: &'a TenantGpu,
    pub pid: u32,
    pub comm: &'a str,
    pub used: u64,
}

/// The state of the screen.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of its own that a key turns"
)]
pub struct Model {
    data: Data,
    /// Refusals by tenant and GPU before the last answer.
    before: BTreeMap<(String, u32), u64>,
    /// Launches a second between the last two answers, by tenant.
    launches: BTreeMap<String, f64>,
    page: Page,
    sort: Sort,
    reverse: bool,
    tree: bool,
    idle: bool,
    filter: String,
    /// The filter is being typed.
    typing: bool,
    paused: bool,
    /// By name: it stays on the tenant when the order changes.
    selected: Option<String>,
    /// First line that is shown; kept so that the selection is visible.
    top: usize,
    /// Lines that the list has room for, as drawn last.
    room: usize,
    trouble: Option<String>,
}

impl Model {
    pub fn new(sort: Sort, filter: String) -> Self {
        Self {
            data: Data::default(),
            before: BTreeMap::new(),
            launches: BTreeMap::new(),
            page: Page::Tenants,
            sort,
            reverse: false,
            tree: true,
            idle: true,
            filter,
            typing: false,
            paused: false,
            selected: None,
            top: 0,
            room: usize::MAX,
            trouble: None,
        }
    }

    /// Takes a new answer of the daemon.
    pub fn show(&mut self, data: Data) {
        self.trouble = None;
        if self.paused {
            return;
        }
        self.before = denials(&self.data);
        self.launches = rates(&self.data, &data);
        self.data = data;
        if let Page::Processes(name) = &self.page
            && self.tenant(name).is_none()
        {
            self.page = Page::Tenants;
        }
    }

    /// The daemon did not answer; what it said before stays on the screen.
    pub fn trouble(&mut self, text: String) {
        self.trouble = Some(text);
    }

    /// Does what a key means.
    pub fn key(&mut self, key: KeyEvent) -> Flow {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c' | 'd') => Flow::Quit,
                _ => Flow::Stay,
            };
        }
        if self.typing {
            self.type_filter(key.code);
            return Flow::Stay;
        }
        if self.page == Page::Help {
            // Any key leads back.
            self.page = Page::Tenants;
            return Flow::Stay;
        }
        match key.code {
            KeyCode::Char('q') => return Flow::Quit,
            KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => self.back(),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.page = Page::Help,
            KeyCode::Char('m') if self.page == Page::Heat => self.back(),
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-self.page_length()),
            KeyCode::PageDown => self.step(self.page_length()),
            KeyCode::Home | KeyCode::Char('g') => self.step(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.step(isize::MAX),
            code if self.page == Page::Tenants => self.tenants_key(code),
            _ => {}
        }
        Flow::Stay
    }

    fn tenants_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter | KeyCode::Right => {
                if let Some(name) = self.selection() {
                    self.page = Page::Processes(name);
                    self.top = 0;
                }
            }
            KeyCode::Char('m') => {
                self.page = Page::Heat;
                self.top = 0;
            }
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('t') => self.tree = !self.tree,
            KeyCode::Char('i') => self.idle = !self.idle,
            _ => {}
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) if !c.is_control() && self.filter.len() < 64 => self.filter.push(c),
            _ => {}
        }
    }

    fn back(&mut self) {
        match self.page {
            Page::Tenants => self.filter.clear(),
            Page::Processes(_) | Page::Heat | Page::Help => {
                self.page = Page::Tenants;
                self.top = 0;
            }
        }
    }

    fn page_length(&self) -> isize {
        isize::try_from(self.room.clamp(1, 1000)).unwrap_or(1)
    }

    fn step(&mut self, by: isize) {
        let lines = match self.page {
            Page::Processes(_) => Some(self.processes().len()),
            Page::Heat => Some(self.data.heat.len()),
            Page::Tenants | Page::Help => None,
        };
        if let Some(lines) = lines {
            let last = lines.saturating_sub(self.room);
            self.top = self.top.saturating_add_signed(by).min(last);
            return;
        }
        let rows = self.rows();
        let Some(last) = rows.len().checked_sub(1) else {
            return;
        };
        let at = self.position(&rows).unwrap_or(0);
        let name = rows[at.saturating_add_signed(by).min(last)]
            .tenant
            .name
            .clone();
        self.selected = Some(name);
    }

    /// Tenants that are to be seen, in order.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let shown = self.shown();
        let mut rows = Vec::new();
        if !self.tree {
            let mut all: Vec<&Tenant> = shown;
            self.order(&mut all);
            rows.extend(all.into_iter().map(|tenant| Row { tenant, depth: 0 }));
            return rows;
        }
        let names: BTreeSet<&str> = shown.iter().map(|tenant| tenant.name.as_str()).collect();
        let mut children: BTreeMap<Option<&str>, Vec<&Tenant>> = BTreeMap::new();
        for tenant in shown {
            let parent = tenant
                .parent
                .as_deref()
                .filter(|parent| names.contains(parent));
            children.entry(parent).or_default().push(tenant);
        }
        for siblings in children.values_mut() {
            self.order(siblings);
        }
        let mut open: Vec<Row<'_>> = children
            .get(&None)
            .into_iter()
            .flatten()
            .rev()
            .map(|tenant| Row { tenant, depth: 0 })
            .collect();
        // Each tenant has one parent, so nobody is visited twice.
        while let Some(row) = open.pop() {
            rows.push(row);
            let below = children.get(&Some(row.tenant.name.as_str()));
            open.extend(below.into_iter().flatten().rev().map(|tenant| Row {
                tenant,
                depth: row.depth + 1,
            }));
        }
        rows
    }

    /// Tenants that the filter lets through; in a tree with those around them.
    fn shown(&self) -> Vec<&Tenant> {
        let needle = self.filter.to_lowercase();
        let matches = |tenant: &&Tenant| {
            let text = |text: &str| text.to_lowercase().contains(&needle);
            let named = text(&tenant.name)
                || text(&tenant.cgroup)
                || tenant.class.as_deref().is_some_and(text);
            let busy = tenant.gpus.iter().any(|gpu| gpu.memory_used > 0);
            named && (self.idle || busy)
        };
        let mut wanted: BTreeSet<&str> = BTreeSet::new();
        for tenant in self.data.tenants.iter().filter(matches) {
            let mut next = Some(tenant);
            while let Some(tenant) = next.filter(|tenant| wanted.insert(&tenant.name)) {
                let parent = tenant.parent.as_deref().filter(|_| self.tree);
                next = parent.and_then(|parent| self.tenant(parent));
            }
        }
        let all = self.data.tenants.iter();
        all.filter(|tenant| wanted.contains(tenant.name.as_str()))
            .collect()
    }

    fn order(&self, tenants: &mut [&Tenant]) {
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        match self.sort {
            Sort::Used => tenants.sort_by_key(|tenant| Reverse(used(tenant))),
            Sort::Share => tenants.sort_by_key(|tenant| Reverse(largest_share(tenant))),
            Sort::Denied => tenants.sort_by_key(|tenant| Reverse(denied(tenant))),
            Sort::Name => {}
        }
        if self.reverse {
            tenants.reverse();
        }
    }

    /// Processes of the tenant that is looked into, the largest first.
    pub fn processes(&self) -> Vec<ProcessRow<'_>> {
        let Page::Processes(name) = &self.page else {
            return Vec::new();
        };
        let mut rows: Vec<_> = self
            .tenant(name)
            .into_iter()
            .flat_map(|tenant| &tenant.gpus)
            .flat_map(|gpu| {
                gpu.processes.iter().map(move |process| ProcessRow {
                    gpu,
                    pid: process.pid,
                    comm: &process.comm,
                    used: process.memory_used,
                })
            })
            .collect();
        rows.sort_by_key(|row| (Reverse(row.used), row.pid, row.gpu.gpu));
        rows
    }

    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.data.tenants.iter().find(|tenant| tenant.name == name)
    }

    /// Refusals since the answer before this one.
    pub fn new_denials(&self, tenant: &str, gpu: &TenantGpu) -> u64 {
        let before = self.before.get(&(tenant.to_owned(), gpu.gpu));
        before.map_or(0, |before| gpu.denials.saturating_sub(*before))
    }

    /// Launches a second, of a tenant with a launch budget.
    pub fn launches(&self, tenant: &Tenant) -> Option<f64> {
        self.launches.get(&tenant.name).copied()
    }

    /// Where the selection is.
    pub fn position(&self, rows: &[Row<'_>]) -> Option<usize> {
        let name = self.selected.as_deref()?;
        rows.iter().position(|row| row.tenant.name == name)
    }

    /// The selected tenant; the first one if none is.
    fn selection(&self) -> Option<String> {
        let rows = self.rows();
        let row = rows.get(self.position(&rows).unwrap_or(0))?;
        Some(row.tenant.name.clone())
    }

    /// First line to be shown of a list with `room` lines; moves so that lines `from..to` are seen.
    pub fn scroll(&mut self, room: usize, total: usize, keep: Option<(usize, usize)>) -> usize {
        self.room = room;
        if let Some((from, to)) = keep {
            if to > self.top.saturating_add(room) {
                self.top = to - room;
            }
            self.top = self.top.min(from);
        }
        self.top = self.top.min(total.saturating_sub(room));
        self.top
    }

    pub fn page(&self) -> &Page {
        &self.page
    }

    pub fn heat(&self) -> &[HeatRow] {
        &self.data.heat
    }

    pub fn gpus(&self) -> &[Gpu] {
        &self.data.gpus
    }

    pub fn tenants(&self) -> usize {
        self.data.tenants.len()
    }

    pub fn sort(&self) -> (Sort, bool) {
        (self.sort, self.reverse)
    }

    pub fn filter(&self) -> (&str, bool) {
        (&self.filter, self.typing)
    }

    pub fn hides_idle(&self) -> bool {
        !self.idle
    }

    pub fn is_paused(&self) -> bool {
        self.paused
    }

    pub fn problem(&self) -> Option<&str> {
        self.trouble.as_deref()
    }
}

fn denials(data: &Data) -> BTreeMap<(String, u32), u64> {
    data.tenants
        .iter()
        .flat_map(|tenant| {
            let gpus = tenant.gpus.iter();
            gpus.map(|gpu| ((tenant.name.clone(), gpu.gpu), gpu.denials))
        })
        .collect()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "shown with no digits after the point"
)]
fn rates(old: &Data, new: &Data) -> BTreeMap<String, f64> {
    let count = |tenant: &Tenant| Some((tenant.name.clone(), tenant.launch.as_ref()?.launches));
    let before: BTreeMap<String, u64> = old.tenants.iter().filter_map(count).collect();
    let seconds = new
        .at
        .saturating_duration_since(old.at)
        .as_secs_f64()
        .max(0.001);
    new.tenants
        .iter()
        .filter_map(count)
        .filter_map(|(name, launches)| {
            let since = launches.saturating_sub(*before.get(&name)?);
            Some((name, since as f64 / seconds))
        })
        .collect()
}

fn used(tenant: &Tenant) -> u64 {
    tenant.gpus.iter().map(|gpu| gpu.memory_used).sum()
}

fn denied(tenant: &Tenant) -> u64 {
    tenant.gpus.iter().map(|gpu| gpu.denials).sum()
}

/// In thousandths.
pub fn share(gpu: &TenantGpu) -> Option<u64> {
    let max = gpu.memory_max?;
    let share = u128::from(gpu.memory_used) * 1000 / u128::from(max.max(1));
    Some(u64::try_from(share).unwrap_or(u64::MAX))
}

fn largest_share(tenant: &Tenant) -> u64 {
    tenant.gpus.iter().filter_map(share).max().unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use gpuquota_enforcer::control::ProcessUse;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn on(gpu: u32, used: u64, max: Option<u64>, denials: u64) -> TenantGpu {
        TenantGpu {
            gpu,
            uuid: format!("GPU-{gpu}"),
            memory_max: max,
            memory_high: max.map(|max| max / 10 * 9),
            memory_used: used,
            memory_peak: used,
            denials,
            ..example().tenants[0].gpus[0].clone()
        }
    }

    /// Three tenants on two GPUs, one inside another.
    pub fn example() -> Data {
        // As the daemon's JSON, so that fields of other parts of the daemon need no mention here.
        let json = include_str!("example.json");
        let data: (Vec<Gpu>, Vec<Tenant>) = serde_json::from_str(json).expect("an example");
        Data {
            heat: Vec::new(),
            gpus: data.0,
            tenants: data.1,
            at: Instant::now(),
        }
    }

    pub fn model() -> Model {
        let mut model = Model::new(Sort::Used, String::new());
        model.show(example());
        model
    }

    fn press(model: &mut Model, keys: &str) -> Flow {
        let mut flow = Flow::Stay;
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                key => KeyCode::Char(key),
            };
            flow = model.key(code.into());
        }
        flow
    }

    fn names(model: &Model) -> Vec<String> {
        let rows = model.rows();
        rows.iter()
            .map(|row| format!("{}{}", ">".repeat(row.depth), row.tenant.name))
            .collect()
    }

    #[test]
    fn nested_tenants_stand_below_those_around_them() {
        let mut model = model();
        assert_eq!(names(&model), ["research", ">vision", ">speech", "batch"]);
        press(&mut model, "t");
        assert_eq!(names(&model), ["research", "vision", "batch", "speech"]);
    }

    #[test]
    fn tenants_are_ordered_by_what_is_asked_for() {
        let mut model = model();
        press(&mut model, "t");
        press(&mut model, "s");
        assert_eq!(model.sort().0, Sort::Share);
        assert_eq!(names(&model), ["vision", "batch", "research", "speech"]);
        press(&mut model, "s");
        assert_eq!(names(&model), ["vision", "batch", "research", "speech"]);
        press(&mut model, "sr");
        assert_eq!(names(&model), ["vision", "speech", "research", "batch"]);
        press(&mut model, "sr");
        assert_eq!(model.sort(), (Sort::Used, false));
    }

    #[test]
    fn a_filter_keeps_what_is_around_a_match() {
        let mut model = model();
        press(&mut model, "/SPE");
        assert_eq!(names(&model), ["research", ">speech"]);
        // While typing, letters are letters.
        assert_eq!(press(&mut model, "q"), Flow::Stay);
        assert_eq!(names(&model), Vec::<String>::new());
        press(&mut model, "\u{8}\n");
        assert_eq!(names(&model), ["research", ">speech"]);
        press(&mut model, "\u{1b}");
        assert_eq!(names(&model).len(), 4);
        press(&mut model, "/best-effort\n");
        assert_eq!(names(&model), ["batch"]);
    }

    #[test]
    fn idle_tenants_can_be_hidden() {
        let mut model = model();
        let mut data = example();
        for gpu in &mut data.tenants[0].gpus {
            gpu.memory_used = 0;
        }
        let name = data.tenants[0].name.clone();
        model.show(data);
        press(&mut model, "i");
        assert!(!names(&model).contains(&name), "{name}");
    }

    #[test]
    fn the_selection_follows_its_tenant() {
        let mut model = model();
        press(&mut model, "jj");
        assert_eq!(model.selected.as_deref(), Some("speech"));
        press(&mut model, "ts");
        let rows = model.rows();
        assert_eq!(
            rows[model.position(&rows).expect("shown")].tenant.name,
            "speech"
        );
        press(&mut model, "G");
        press(&mut model, "g");
        press(&mut model, "k");
        assert_eq!(model.selected.as_deref(), Some("vision"));
    }

    #[test]
    fn a_tenant_opens_and_closes() {
        let mut model = model();
        press(&mut model, "j\n");
        assert_eq!(model.page(), &Page::Processes("vision".into()));
        let processes = model.processes();
        assert_eq!(processes[0].comm, "python3");
        assert!(processes[0].used >= processes[1].used);
        press(&mut model, "\u{1b}");
        assert_eq!(model.page(), &Page::Tenants);
        // A tenant that is gone has no page.
        press(&mut model, "\n");
        model.show(Data::default());
        assert_eq!(model.page(), &Page::Tenants);
        assert_eq!(press(&mut model, "jk\n"), Flow::Stay);
        assert_eq!(press(&mut model, "?"), Flow::Stay);
        assert_eq!(
            press(&mut model, "q"),
            Flow::Stay,
            "any key closes the help"
        );
        assert_eq!(press(&mut model, "q"), Flow::Quit);
    }

    #[test]
    fn ctrl_c_ends_it_everywhere() {
        let ctrl_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for before in ["", "/abc", "?", "\n"] {
            let mut model = model();
            press(&mut model, before);
            assert_eq!(model.key(ctrl_c), Flow::Quit, "{before:?}");
        }
    }

    #[test]
    fn refusals_are_new_once() {
        let mut model = model();
        let mut data = example();
        data.tenants[0].gpus[0] = on(0, GIB, Some(GIB), 1000);
        let name = data.tenants[0].name.clone();
        let before = example().tenants[0].gpus[0].denials;
        model.show(data.clone());
        assert_eq!(
            model.new_denials(&name, &data.tenants[0].gpus[0]),
            1000 - before
        );
        model.show(data.clone());
        assert_eq!(model.new_denials(&name, &data.tenants[0].gpus[0]), 0);
        // A first answer has nothing to compare with.
        let mut fresh = Model::new(Sort::Used, String::new());
        fresh.show(data.clone());
        assert_eq!(fresh.new_denials(&name, &data.tenants[0].gpus[0]), 0);
    }

    #[test]
    fn launches_are_counted_by_the_time_between_two_answers() {
        let mut model = model();
        let mut data = example();
        let vision = |data: &Data| data.tenants[3].clone();
        assert_eq!(model.launches(&vision(&data)), None, "a first answer");
        data.at = model.data.at + std::time::Duration::from_secs(2);
        let launch = data.tenants[3].launch.as_mut().expect("a launch budget");
        launch.launches += 500;
        let now = vision(&data);
        model.show(data);
        let rate = model.launches(&now).expect("known");
        assert!((rate - 250.0).abs() < 1.0, "{rate}");
    }

    #[test]
    fn a_pause_keeps_the_numbers_and_trouble_keeps_them_too() {
        let mut model = model();
        press(&mut model, "p");
        model.show(Data::default());
        assert_eq!(model.tenants(), 4);
        press(&mut model, "p");
        model.trouble("away".into());
        assert_eq!((model.tenants(), model.problem()), (4, Some("away")));
        model.show(Data::default());
        assert_eq!((model.tenants(), model.problem()), (0, None));
    }

    #[test]
    fn a_list_scrolls_no_further_than_it_has_to() {
        let mut model = model();
        assert_eq!(model.scroll(5, 20, Some((0, 2))), 0);
        assert_eq!(model.scroll(5, 20, Some((6, 8))), 3);
        assert_eq!(model.scroll(5, 20, Some((4, 6))), 3);
        assert_eq!(model.scroll(5, 20, Some((1, 3))), 1);
        assert_eq!(model.scroll(5, 3, None), 0);
        assert_eq!(model.scroll(2, 20, Some((4, 10))), 4);
    }

    #[test]
    fn no_sequence_of_keys_panics() {
        use proptest::prelude::*;
        let key = prop_oneof![
            any::<char>().prop_map(KeyCode::Char),
            "[qhjkgGsrti/? p]".prop_map(|text| KeyCode::Char(text.chars().next().unwrap_or('x'))),
            Just(KeyCode::Enter),
            Just(KeyCode::Esc),
            Just(KeyCode::PageDown),
            Just(KeyCode::PageUp),
            Just(KeyCode::Backspace),
        ];
        proptest!(|(keys in proptest::collection::vec(key, 0..60), room in 0_usize..40)| {
            let mut model = model();
            for key in keys {
                model.key(key.into());
                model.scroll(room, model.rows().len(), Some((0, 2)));
            }
            prop_assert!(model.rows().len() <= 4);
        });
    }

    #[test]
    fn processes_know_their_names() {
        let process = ProcessUse {
            pid: 1,
            comm: "x".into(),
            memory_used: 1,
        };
        let mut data = example();
        data.tenants[0].gpus[0].processes = vec![process];
        let name = data.tenants[0].name.clone();
        let mut model = model();
        model.show(data);
        model.page = Page::Processes(name);
        assert_eq!(model.processes().len(), 1);
    }
}
