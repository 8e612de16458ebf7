//! From a policy to rows and limits: who is governed under which index.
//!
//! Pure: takes the policy, the GPUs and the indices in use, and says what the kernel side has to hold.
//!
//! A tenant keeps its index from policy to policy, so its charges stay with it. One that leaves the policy, or
//! that comes to lie in another tenant, retires: its index governs nobody any more, but what was charged to it
//! is still given back along its old parents. What its processes hold then moves to the new index.

use std::collections::{BTreeMap, BTreeSet};

use gpuquota_common::{
    claim::MAX_RESERVATION,
    map::{Budget, MAX_NESTING, MAX_TENANTS, NO_TENANT, TenantRow, host_place, on_max, row},
};
use gpuquota_policy::{HostGpu, Managed, OnBreach, OnMemoryMax, Policy};

/// Why a policy cannot be put into the kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TenancyError {
    /// More tenants than there are indices.
    #[error(
        "{found} tenants, with those whose memory is not yet given back; at most {MAX_TENANTS} fit"
    )]
    TooMany {
        /// How many indices are needed.
        found: usize,
    },
    /// Tenants inside tenants, too deep.
    #[error("tenant \"{tenant}\" lies in {depth} other tenants; at most {most} are allowed", most = MAX_NESTING - 1)]
    TooDeep {
        /// Which tenant.
        tenant: String,
        /// In how many others.
        depth: usize,
    },
}

/// A tenant with its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Name in the policy.
    pub name: String,
    /// Name of the tenant around it.
    pub parent: Option<String>,
    /// Whether the policy in force has it.
    pub in_force: bool,
}

/// Who has which index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seating {
    seats: BTreeMap<u32, Seat>,
    /// Index by name, of those in force.
    names: BTreeMap<String, u32>,
}

impl Seating {
    /// The index of a tenant in force.
    pub fn index(&self, name: &str) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// The tenant at an index, retired ones too.
    pub fn seat(&self, index: u32) -> Option<&Seat> {
        self.seats.get(&index)
    }

    /// Tenants in force: index and seat.
    pub fn in_force(&self) -> impl Iterator<Item = (u32, &Seat)> {
        self.seats
            .iter()
            .filter(|(_, seat)| seat.in_force)
            .map(|(index, seat)| (*index, seat))
    }

    /// Puts a tenant back where an earlier daemon had it.
    pub fn restore(&mut self, index: u32, seat: Seat) {
        if seat.in_force {
            self.names.insert(seat.name.clone(), index);
        }
        self.seats.insert(index, seat);
    }

    /// A tenant governs nobody any more.
    fn retire(&mut self, index: u32) {
        if let Some(seat) = self.seats.get_mut(&index) {
            seat.in_force = false;
            self.names.remove(&seat.name);
        }
    }

    /// All seats, retired ones too, for saving.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Seat)> {
        self.seats.iter().map(|(index, seat)| (*index, seat))
    }
}

/// Tenants of cgroup paths, under one generation of the policy.
#[derive(Debug, Default)]
pub struct PathCache {
    generation: u64,
    tenants: BTreeMap<String, Option<u32>>,
}

impl PathCache {
    /// Paths are tenants' to make: with so many the cache starts over.
    const MOST: usize = 4096;

    /// The tenant of a path under a generation; `find` finds it where it is not known yet. What an older generation says is
    /// not kept.
    pub fn tenant(
        &mut self,
        generation: u64,
        path: &str,
        find: impl FnOnce() -> Option<u32>,
    ) -> Option<u32> {
        if generation < self.generation {
            return find();
        }
        if generation > self.generation {
            self.generation = generation;
            self.tenants.clear();
        }
        if let Some(known) = self.tenants.get(path) {
            return *known;
        }
        let found = find();
        if self.tenants.len() >= Self::MOST {
            self.tenants.clear();
        }
        self.tenants.insert(path.to_owned(), found);
        found
    }
}

/// Limits by index and place, each once. A list: there are 16,000 of them for 1,000 tenants on 8 GPUs, and they are written one
/// after the other.
pub type Budgets = Vec<((u32, u32), Budget)>;
/// Reserved bytes by index and GPU, where there are any.
pub type Reservations = BTreeMap<(u32, u32), u64>;

/// What the kernel side has to hold for a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Who has which index from now on.
    pub seating: Seating,
    /// Rows by index. Indices that are missing here are absent.
    pub rows: BTreeMap<u32, TenantRow>,
    /// Limits by index and place.
    pub budgets: Budgets,
    /// Reserved bytes by index and GPU, where there are any.
    pub reservations: Reservations,
}

/// Makes the plan.
///
/// `charged` says which indices still have something charged; a retired one without goes.
pub fn plan(
    policy: &Policy,
    gpus: &[HostGpu],
    before: &Seating,
    charged: &BTreeSet<u32>,
) -> Result<Plan, TenancyError> {
    let nesting = policy.nesting();
    let mut seating = Seating::default();
    for (index, seat) in &before.seats {
        let stays = seat.in_force
            && policy.tenants.contains_key(&seat.name)
            && parent_of(&nesting, &seat.name) == seat.parent.as_deref();
        if stays {
            seating.restore(*index, seat.clone());
        } else if charged.contains(index) {
            let retired = Seat {
                in_force: false,
                ..seat.clone()
            };
            seating.restore(*index, retired);
        }
    }
    keep_parents_together(&mut seating);
    // None that was passed over becomes free below.
    let mut indices = 0..MAX_TENANTS;
    for name in policy.tenants.keys() {
        let depth = nesting.get(name.as_str()).map_or(0, Vec::len);
        if depth >= MAX_NESTING as usize {
            return Err(TenancyError::TooDeep {
                tenant: name.clone(),
                depth,
            });
        }
        if seating.index(name).is_some() {
            continue;
        }
        let free = indices
            .find(|index| !seating.seats.contains_key(index) && !charged.contains(index))
            .ok_or(TenancyError::TooMany {
                found: seating.seats.len() + 1,
            })?;
        let seat = Seat {
            name: name.clone(),
            parent: parent_of(&nesting, name).map(str::to_owned),
            in_force: true,
        };
        seating.restore(free, seat);
    }
    let rows = rows(&seating, before);
    let (budgets, reservations) = limits(policy, gpus, &seating);
    Ok(Plan {
        seating,
        rows,
        budgets,
        reservations,
    })
}

fn parent_of<'a>(nesting: &BTreeMap<&str, Vec<&'a str>>, name: &str) -> Option<&'a str> {
    nesting.get(name)?.first().copied()
}

/// A tenant whose parent got a new index needs one too: charges are given back along the parents they were made
/// with.
fn keep_parents_together(seating: &mut Seating) {
    loop {
        let orphan = seating.in_force().find_map(|(index, seat)| {
            let parent = seat.parent.as_deref()?;
            seating.index(parent).is_none().then_some(index)
        });
        let Some(index) = orphan else { return };
        seating.retire(index);
    }
}

fn rows(seating: &Seating, before: &Seating) -> BTreeMap<u32, TenantRow> {
    seating
        .seats
        .iter()
        .map(|(index, seat)| {
            // A retired tenant's parent is the one that it had, which may have retired with it.
            let parent = seat.parent.as_deref().and_then(|parent| {
                if seat.in_force {
                    seating.index(parent)
                } else {
                    before
                        .index(parent)
                        .filter(|index| seating.seats.contains_key(index))
                        .or_else(|| retired_index(seating, parent))
                }
            });
            let state = if seat.in_force {
                row::IN_FORCE
            } else {
                row::RETIRED
            };
            let parent = parent.unwrap_or(NO_TENANT);
            (*index, TenantRow { state, parent })
        })
        .collect()
}

fn retired_index(seating: &Seating, name: &str) -> Option<u32> {
    seating
        .seats
        .iter()
        .find(|(_, seat)| !seat.in_force && seat.name == name)
        .map(|(index, _)| *index)
}

/// Limits and reservations of the tenants in force on every GPU.
fn limits(policy: &Policy, gpus: &[HostGpu], seating: &Seating) -> (Budgets, Reservations) {
    let places = gpus.len() * 2;
    let mut budgets = Budgets::with_capacity(policy.tenants.len() * places);
    let mut reservations = Reservations::new();
    let on_gpus = policy.on_each(gpus);
    for (index, seat) in seating.in_force() {
        for (gpu, memory) in on_gpus.memory(&seat.name) {
            let budget = Budget {
                memory_max: memory.max.unwrap_or(u64::MAX),
                memory_high: memory.high.unwrap_or(u64::MAX),
                wait_ns: u64::try_from(memory.wait_timeout.as_nanos()).unwrap_or(u64::MAX),
                on_max: match memory.on_max {
                    OnMemoryMax::Deny => on_max::DENY,
                    OnMemoryMax::Wait => on_max::WAIT,
                    OnMemoryMax::Kill => on_max::KILL,
                },
                deny_managed: u16::from(memory.managed == Managed::Deny),
                end_on_breach: u32::from(memory.on_breach == OnBreach::Kill),
            };
            let pinned = Budget {
                memory_max: memory.host.unwrap_or(u64::MAX),
                memory_high: u64::MAX,
                ..budget
            };
            budgets.push(((index, gpu), budget));
            budgets.push(((index, host_place(gpu)), pinned));
            if memory.min > 0 {
                reservations.insert((index, gpu), memory.min.min(MAX_RESERVATION));
            }
        }
    }
    (budgets, reservations)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use gpuquota_policy::{Layer, Source};
    use proptest::prelude::*;

    use super::*;

    fn policy(text: &str) -> Policy {
        let source = Source::new("/p.toml", Layer::Admin, text);
        Policy::load(&[source], None).expect("valid policy").policy
    }

    fn gpus() -> Vec<HostGpu> {
        vec![HostGpu {
            index: 0,
            uuid: "GPU-00000000-0000-4000-8000-000000000001".into(),
            memory: 16 << 30,
        }]
    }

    fn tenants(paths: &[(&str, &str)]) -> String {
        let mut text = String::new();
        for (name, path) in paths {
            let _ = writeln!(
                text,
                "[tenant.{name}]\ncgroup = \"{path}\"\nmemory.max = \"1GiB\""
            );
        }
        text
    }

    #[test]
    fn paths_are_looked_up_once_under_each_policy() {
        let mut cache = PathCache::default();
        let never = || panic!("known already");
        assert_eq!(cache.tenant(1, "/a", || Some(7)), Some(7));
        assert_eq!(cache.tenant(1, "/a", never), Some(7));
        assert_eq!(cache.tenant(1, "/b", || None), None);
        assert_eq!(cache.tenant(1, "/b", never), None);
        // Another policy; and one who still reads the old one.
        assert_eq!(cache.tenant(2, "/a", || Some(8)), Some(8));
        assert_eq!(cache.tenant(1, "/a", || Some(7)), Some(7));
        assert_eq!(cache.tenant(2, "/a", never), Some(8));
        for at in 0..2 * PathCache::MOST {
            cache.tenant(2, &format!("/{at}"), || None);
        }
        assert!(cache.tenants.len() <= PathCache::MOST);
    }

    #[test]
    fn a_tenant_keeps_its_index() {
        let first = policy(&tenants(&[("b", "/b"), ("c", "/c")]));
        let second = policy(&tenants(&[("a", "/a"), ("b", "/b"), ("c", "/c")]));
        let before = plan(&first, &gpus(), &Seating::default(), &BTreeSet::new()).expect("fits");
        let after = plan(&second, &gpus(), &before.seating, &BTreeSet::new()).expect("fits");
        for name in ["b", "c"] {
            assert_eq!(before.seating.index(name), after.seating.index(name));
        }
        // On the card and in the host.
        assert_eq!(after.budgets.len(), 2 * 3);
    }

    #[test]
    fn nested_tenants_have_the_nearest_as_parent() {
        let policy = policy(&tenants(&[("a", "/a"), ("b", "/a/b"), ("c", "/a/b/x/c")]));
        let plan = plan(&policy, &gpus(), &Seating::default(), &BTreeSet::new()).expect("fits");
        let index = |name| plan.seating.index(name).expect("seated");
        assert_eq!(plan.rows[&index("a")].parent, NO_TENANT);
        assert_eq!(plan.rows[&index("b")].parent, index("a"));
        assert_eq!(plan.rows[&index("c")].parent, index("b"));
    }

    #[test]
    fn a_tenant_with_charges_retires_with_its_parent_and_its_index_is_not_given_away() {
        let first = policy(&tenants(&[("a", "/a"), ("b", "/a/b")]));
        let second = policy(&tenants(&[("b", "/b"), ("d", "/d")]));
        let before = plan(&first, &gpus(), &Seating::default(), &BTreeSet::new()).expect("fits");
        let (a, b) = (
            before.seating.index("a").expect("seated"),
            before.seating.index("b").expect("seated"),
        );
        let after = plan(&second, &gpus(), &before.seating, &BTreeSet::from([a, b])).expect("fits");
        assert_eq!(
            after.rows[&b],
            TenantRow {
                state: row::RETIRED,
                parent: a
            }
        );
        assert_eq!(after.rows[&a].state, row::RETIRED);
        assert_ne!(after.seating.index("b"), Some(b));
        let settled = plan(&second, &gpus(), &after.seating, &BTreeSet::new()).expect("fits");
        assert!(settled.seating.seat(a).is_none() && settled.seating.seat(b).is_none());
    }

    #[test]
    fn pinned_memory_has_a_budget_of_its_own() {
        let policy = policy(
            "[tenant.a]\ncgroup = \"/a\"\nmemory.max = \"4GiB\"\nmemory.host = \"1GiB\"\nmemory.min = \"2GiB\"\n\
             [tenant.b]\ncgroup = \"/b\"\n",
        );
        let plan = plan(&policy, &gpus(), &Seating::default(), &BTreeSet::new()).expect("fits");
        let (a, b) = (
            plan.seating.index("a").expect("seated"),
            plan.seating.index("b").expect("seated"),
        );
        let max = |place: (u32, u32)| {
            let found = plan.budgets.iter().find(|(at, _)| *at == place);
            found.map(|(_, budget)| budget.memory_max)
        };
        assert_eq!(max((a, 0)), Some(4 << 30));
        assert_eq!(max((a, host_place(0))), Some(1 << 30));
        assert_eq!(max((b, host_place(0))), Some(u64::MAX));
        assert_eq!(plan.reservations, BTreeMap::from([((a, 0), 2 << 30)]));
    }

    #[test]
    fn too_deep_is_refused_with_the_tenants_name() {
        let paths: Vec<(String, String)> = (0..=MAX_NESTING)
            .map(|depth| (format!("t{depth}"), "/x".repeat(depth as usize + 1)))
            .collect();
        let borrowed: Vec<(&str, &str)> = paths
            .iter()
            .map(|(name, path)| (name.as_str(), path.as_str()))
            .collect();
        let error = plan(
            &policy(&tenants(&borrowed)),
            &gpus(),
            &Seating::default(),
            &BTreeSet::new(),
        )
        .expect_err("too deep");
        assert!(matches!(error, TenancyError::TooDeep { ref tenant, .. } if tenant == "t8"));
    }

    proptest! {
        /// Over any sequence of policies: no two tenants share an index, every parent row exists, and an index
        /// with charges never passes to another tenant.
        #[test]
        fn indices_are_never_confused(
            rounds in prop::collection::vec(
                (prop::collection::btree_set(0usize..6, 0..6), prop::collection::btree_set(0u32..8, 0..4)),
                1..8,
            )
        ) {
            const PATHS: [&str; 6] = ["/a", "/a/b", "/a/b/c", "/d", "/d/e", "/f"];
            let mut seating = Seating::default();
            for (present, charged) in rounds {
                let names: Vec<String> = present.iter().map(|at| format!("t{at}")).collect();
                let list: Vec<(&str, &str)> = names
                    .iter()
                    .zip(&present)
                    .map(|(name, at)| (name.as_str(), PATHS[*at]))
                    .collect();
                let plan = plan(&policy(&tenants(&list)), &gpus(), &seating, &charged)
                    .expect("small policies fit");
                for (index, seat) in seating.all() {
                    if charged.contains(&index) {
                        let kept = plan.seating.seat(index).expect("charged seats stay");
                        prop_assert_eq!(&kept.name, &seat.name);
                    }
                }
                for name in &names {
                    prop_assert!(plan.seating.index(name).is_some());
                }
                for row in plan.rows.values() {
                    prop_assert!(row.parent == NO_TENANT || plan.rows.contains_key(&row.parent));
                }
                seating = plan.seating;
            }
        }
    }
}
