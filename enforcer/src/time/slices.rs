//! Dividing a round by weight: pure.
//!
//! The driver gives every channel group its time slice in turn, and skips one that has no work. So shares of GPU
//! time among those that do have work are the ratios of their slices, whatever the others do.

use std::collections::BTreeMap;

/// How far a round may grow so that its smallest slice is not below the least and the proportions still hold.
pub const STRETCH: u64 = 4;
/// Weight of the processes that are in a tenant itself, beside the tenants inside it.
pub const OWN_WEIGHT: u32 = 100;

/// Fractions are in units of 2^-40.
const ONE: u64 = 1 << 40;

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// How long it takes until everybody has had a slice, microseconds.
    pub length_us: u64,
    /// No slice is shorter, microseconds, whatever that makes of the proportions and the length.
    pub least_us: u64,
}

/// A process that has contexts on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Process.
    pub tgid: u32,
    /// Its contexts; each takes its own turns, so they divide the share of the process.
    pub contexts: u32,
    /// Whether it has left the GPU alone for some time; its share is lent to what else its tenant has.
    pub idle: bool,
}

/// A tenant with what is on the GPU in it. One without processes, here and inside, takes no part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Share relative to the nodes beside it.
    pub weight: u32,
    /// Processes in the tenant itself.
    pub own: Vec<Contender>,
    /// Tenants inside.
    pub inside: Vec<Node>,
}

impl Node {
    fn is_active(&self) -> bool {
        self.own
            .iter()
            .any(|process| process.contexts > 0 && !process.idle)
            || self.inside.iter().any(Self::is_active)
    }

    fn is_empty(&self) -> bool {
        self.own.iter().all(|process| process.contexts == 0)
            && self.inside.iter().all(Self::is_empty)
    }
}

/// A divided round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// Sum of the slices of all contexts, microseconds.
    pub round_us: u64,
    /// Slice of each context of a process, microseconds.
    pub slices: BTreeMap<u32, u64>,
}

/// A context's part of the whole.
struct Part {
    process: Contender,
    fraction: u64,
    /// The same with what idle ones beside it in its tenant lend, not less than `fraction`.
    lent: u64,
}

/// Divides a round over `nodes` by weight, over the tenants inside each of them again, and over the
/// processes of a tenant evenly.
///
/// Proportions hold exactly (to a microsecond) as long as no context gets less than the least slice in a round
/// that is [`STRETCH`] times as long; beyond that the smallest get that slice and the others divide the rest. The
/// round grows as much as is needed, so nobody is left without a slice.
///
/// Inside a tenant, who is active has what idle ones have not asked for: two notebooks of a team of which one is
/// forgotten would have half of the team's share else. An idle one keeps the slice that it has when all are active, so
/// a tenant has less than twice its share for as long as it takes to see that it is back. Between the outermost tenants
/// nothing is lent: the driver skips who has no work.
pub fn divide(round: Round, nodes: &[Node]) -> Division {
    let Round {
        length_us,
        least_us,
    } = round;
    let mut parts = Vec::new();
    distribute(
        Whole {
            fraction: ONE,
            lent: ONE,
        },
        nodes.iter().collect(),
        &mut parts,
        false,
    );
    let contexts: u64 = parts
        .iter()
        .map(|part| u64::from(part.process.contexts))
        .sum();
    let Some(smallest) = parts.iter().map(|part| part.fraction).min() else {
        return Division::default();
    };
    let fitting = scale(least_us, ONE, smallest.max(1)).saturating_add(1);
    let stretched = length_us
        .max(fitting.min(length_us.saturating_mul(STRETCH)))
        .max(contexts.saturating_mul(least_us));
    let slices = fill(
        Round {
            length_us: stretched,
            ..round
        },
        contexts,
        &parts,
    );
    Division {
        round_us: parts
            .iter()
            .zip(&slices)
            .map(|(part, slice)| slice * u64::from(part.process.contexts))
            .sum(),
        slices: parts
            .iter()
            .zip(&slices)
            .map(|(part, slice)| {
                let lent = scale(*slice, part.lent, part.fraction);
                (part.process.tgid, lent.max(*slice))
            })
            .collect(),
    }
}

/// What there is to divide, without and with what idle ones lend.
#[derive(Clone, Copy)]
struct Whole {
    fraction: u64,
    lent: u64,
}

/// What somebody weighs, and how much of that counts as active.
#[derive(Clone, Copy)]
struct Weight {
    all: u64,
    active: u64,
}

impl Weight {
    fn new(all: u64, is_active: bool) -> Self {
        Self {
            all,
            active: if is_active { all } else { 0 },
        }
    }

    fn sum(weights: impl Iterator<Item = Self>) -> Self {
        weights.fold(Self { all: 0, active: 0 }, |sum, weight| Self {
            all: sum.all + weight.all,
            active: sum.active + weight.active,
        })
    }
}

impl Whole {
    /// The part of who weighs that much of all by right, and of the active ones if the others lend theirs.
    fn part(self, of: Weight, among: Weight) -> Self {
        let fraction = scale(self.fraction, of.all, among.all);
        let lent = if of.active > 0 {
            scale(self.lent, of.active, among.active)
        } else {
            fraction
        };
        Self { fraction, lent }
    }
}

/// Fractions of the whole for every process in `nodes`, each per context.
fn distribute(whole: Whole, nodes: Vec<&Node>, parts: &mut Vec<Part>, lends: bool) {
    let nodes: Vec<&Node> = nodes.into_iter().filter(|node| !node.is_empty()).collect();
    let weight = |node: &Node, lends: bool| {
        Weight::new(u64::from(node.weight.max(1)), !lends || node.is_active())
    };
    let all = Weight::sum(nodes.iter().map(|node| weight(node, lends)));
    for node in nodes {
        let share = whole.part(weight(node, lends), all);
        let own: Vec<Contender> = node
            .own
            .iter()
            .copied()
            .filter(|process| process.contexts > 0)
            .collect();
        let inside: Vec<&Node> = node.inside.iter().filter(|node| !node.is_empty()).collect();
        let one = |process: &Contender| Weight::new(1, !process.idle);
        let processes = Weight::sum(own.iter().map(one));
        let of_own = if own.is_empty() {
            Weight::new(0, false)
        } else {
            Weight::new(u64::from(OWN_WEIGHT), processes.active > 0)
        };
        let of_inside = Weight::sum(inside.iter().map(|node| weight(node, true)));
        let both = Weight::sum([of_own, of_inside].into_iter());
        let own_share = share.part(of_own, both);
        parts.extend(own.into_iter().map(|process| {
            let share = own_share.part(one(&process), processes);
            let contexts = u64::from(process.contexts);
            Part {
                process,
                fraction: share.fraction / contexts,
                lent: share.lent / contexts,
            }
        }));
        distribute(share.part(of_inside, both), inside, parts, true);
    }
}

/// Slices per context that are proportional to the fractions, none below the least.
fn fill(round: Round, contexts: u64, parts: &[Part]) -> Vec<u64> {
    let Round {
        length_us,
        least_us,
    } = round;
    if contexts.saturating_mul(least_us) >= length_us {
        return vec![least_us; parts.len()];
    }
    let mut least = vec![false; parts.len()];
    loop {
        let count = |least: &[bool], wanted: bool, of: &dyn Fn(&Part) -> u64| -> u64 {
            parts
                .iter()
                .zip(least)
                .filter(|(_, least)| **least == wanted)
                .map(|(part, _)| of(part) * u64::from(part.process.contexts))
                .sum()
        };
        let rest = length_us.saturating_sub(count(&least, true, &|_| least_us));
        let fractions = count(&least, false, &|part| part.fraction).max(1);
        let slices: Vec<u64> = parts
            .iter()
            .zip(&least)
            .map(|(part, least)| {
                if *least {
                    least_us
                } else {
                    scale(rest, part.fraction, fractions)
                }
            })
            .collect();
        if slices.iter().all(|slice| *slice >= least_us) {
            return slices;
        }
        for (least, slice) in least.iter_mut().zip(&slices) {
            *least |= *slice < least_us;
        }
    }
}

/// `value * numerator / denominator` without overflow, rounded to the nearest.
fn scale(value: u64, numerator: u64, denominator: u64) -> u64 {
    let denominator = u128::from(denominator.max(1));
    let product = u128::from(value) * u128::from(numerator) + denominator / 2;
    u64::try_from(product / denominator).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEAST_US: u64 = 500;

    fn round(length_us: u64) -> Round {
        Round {
            length_us,
            least_us: LEAST_US,
        }
    }

    fn process(tgid: u32) -> Contender {
        Contender {
            tgid,
            contexts: 1,
            idle: false,
        }
    }

    fn tenant(weight: u32, tgids: &[u32]) -> Node {
        Node {
            weight,
            own: tgids.iter().copied().map(process).collect(),
            inside: Vec::new(),
        }
    }

    #[test]
    fn the_shares_of_the_measured_table() {
        for (a, b, slices) in [
            (50, 50, [5000, 5000]),
            (25, 75, [2500, 7500]),
            (30, 70, [3000, 7000]),
            (10, 90, [1000, 9000]),
        ] {
            let division = divide(round(10_000), &[tenant(a, &[1]), tenant(b, &[2])]);
            assert_eq!([division.slices[&1], division.slices[&2]], slices);
            assert_eq!(division.round_us, 10_000);
        }
    }

    #[test]
    fn two_processes_in_one_tenant_count_as_one_tenant() {
        let division = divide(round(20_000), &[tenant(100, &[1, 2]), tenant(100, &[3])]);
        assert_eq!(
            division.slices[&1] + division.slices[&2],
            division.slices[&3]
        );
    }

    #[test]
    fn two_contexts_in_one_process_count_as_one_process() {
        let mut first = tenant(100, &[1]);
        first.own[0].contexts = 2;
        let division = divide(round(20_000), &[first, tenant(100, &[2])]);
        assert_eq!(2 * division.slices[&1], division.slices[&2]);
    }

    #[test]
    fn tenants_inside_a_tenant_divide_its_share() {
        let outer = Node {
            weight: 300,
            own: vec![process(1)],
            inside: vec![tenant(100, &[2]), tenant(100, &[3])],
        };
        let division = divide(round(12_000), &[outer, tenant(100, &[4])]);
        assert_eq!(division.slices[&4], 3000);
        for tgid in 1..=3 {
            assert_eq!(division.slices[&tgid], 3000);
        }
    }

    fn idle(mut node: Node, tgids: &[u32]) -> Node {
        for process in &mut node.own {
            process.idle = tgids.contains(&process.tgid);
        }
        node
    }

    #[test]
    fn an_idle_process_lends_its_share_to_the_others_of_its_tenant() {
        let beside = tenant(100, &[4]);
        let division = divide(
            round(20_000),
            &[idle(tenant(100, &[1, 2]), &[2]), beside.clone()],
        );
        assert_eq!(
            [1, 2, 4].map(|tgid| division.slices[&tgid]),
            [10_000, 5000, 10_000]
        );
        // All idle: as if all were active, and nobody beside them has more or less.
        let division = divide(
            round(20_000),
            &[idle(tenant(100, &[1, 2]), &[1, 2]), beside],
        );
        assert_eq!(
            [1, 2, 4].map(|tgid| division.slices[&tgid]),
            [5000, 5000, 10_000]
        );
    }

    #[test]
    fn an_idle_tenant_inside_lends_its_share_to_those_beside_it() {
        let outer = |idle_ones: &[u32]| Node {
            weight: 100,
            own: idle(tenant(1, &[1]), idle_ones).own,
            inside: vec![
                idle(tenant(100, &[2]), idle_ones),
                idle(tenant(200, &[3]), idle_ones),
            ],
        };
        let slices = |idle_ones: &[u32]| {
            let division = divide(round(16_000), &[outer(idle_ones), tenant(100, &[4])]);
            [1, 2, 3, 4].map(|tgid| division.slices[&tgid])
        };
        assert_eq!(slices(&[]), [2000, 2000, 4000, 8000]);
        assert_eq!(slices(&[1]), [2000, 2667, 5333, 8000]);
        assert_eq!(slices(&[3]), [4000, 4000, 4000, 8000]);
        assert_eq!(slices(&[1, 2]), [2000, 2000, 8000, 8000]);
        // Outermost tenants lend nothing.
        assert_eq!(slices(&[1, 2, 3]), [2000, 2000, 4000, 8000]);
    }

    #[test]
    fn a_round_grows_before_proportions_are_given_up() {
        let division = divide(round(10_000), &[tenant(2, &[1]), tenant(98, &[2])]);
        assert_eq!(division.slices[&1], 500);
        assert!(division.slices[&2].abs_diff(24_500) <= 50, "{division:?}");
        let steep = divide(round(10_000), &[tenant(1, &[1]), tenant(10_000, &[2])]);
        assert_eq!(steep.slices[&1], 500);
        assert_eq!(steep.slices[&2], 39_500);
    }

    #[test]
    fn slices_are_as_short_as_the_least() {
        let short = |least_us| Round {
            length_us: 4000,
            least_us,
        };
        let tenants = [tenant(95, &[1]), tenant(5, &[2])];
        for (least_us, wanted) in [(200, [3800, 200]), (500, [9500, 500])] {
            let slices = divide(short(least_us), &tenants).slices;
            // A round that grows does so by a few microseconds more than it must.
            for (tgid, wanted) in [1, 2].into_iter().zip(wanted) {
                assert!(
                    slices[&tgid].abs_diff(wanted) <= 20,
                    "{least_us}: {slices:?}"
                );
            }
        }
    }

    #[test]
    fn nobody_there_divides_nothing() {
        assert_eq!(
            divide(round(10_000), &[tenant(1, &[])]),
            Division::default()
        );
    }

    /// Up to 64 tenants with up to 4 processes each.
    fn tenants() -> impl Strategy<Value = Vec<(u32, usize)>> {
        prop::collection::vec((1..=10_000u32, 1..=4usize), 1..=64)
    }

    fn build(tenants: &[(u32, usize)]) -> Vec<Node> {
        let mut next = 0;
        tenants
            .iter()
            .map(|(weight, processes)| {
                let tgids: Vec<u32> = (0..*processes)
                    .map(|_| {
                        next += 1;
                        next
                    })
                    .collect();
                tenant(*weight, &tgids)
            })
            .collect()
    }

    fn share(division: &Division, node: &Node) -> u64 {
        node.own
            .iter()
            .map(|process| division.slices[&process.tgid])
            .sum()
    }

    proptest! {
        #[test]
        fn slices_fill_the_round_and_nobody_starves(
            tenants in tenants(),
            length in 1000..100_000u64,
        ) {
            let nodes = build(&tenants);
            let division = divide(round(length), &nodes);
            let count = division.slices.len() as u64;
            prop_assert_eq!(count, tenants.iter().map(|(_, n)| *n as u64).sum::<u64>());
            prop_assert!(division.slices.values().all(|slice| *slice >= LEAST_US));
            let sum: u64 = division.slices.values().sum();
            prop_assert_eq!(sum, division.round_us);
            // Rounding alone makes it differ from what was asked for, unless it had to grow.
            let least = count * LEAST_US;
            prop_assert!(sum + count >= length.max(least), "{} of {}", sum, length);
            prop_assert!(sum <= (length * STRETCH).max(least) + count);
        }

        #[test]
        fn slices_are_proportional_where_none_is_the_least(
            tenants in prop::collection::vec((100..1000u32, 1..=3usize), 1..=6),
            length in 10_000..100_000u64,
        ) {
            let nodes = build(&tenants);
            let division = divide(round(length), &nodes);
            prop_assume!(division.slices.values().all(|slice| *slice > LEAST_US));
            let weights: u64 = tenants.iter().map(|(weight, _)| u64::from(*weight)).sum();
            for (node, (weight, processes)) in nodes.iter().zip(&tenants) {
                let exact = division.round_us * u64::from(*weight) / weights;
                prop_assert!(
                    share(&division, node).abs_diff(exact) <= *processes as u64 + 1,
                    "{} of {}", share(&division, node), exact
                );
            }
        }

        /// Whoever is idle: the active ones of a tenant have its whole share, nobody less than by right, and the tenant
        /// less than twice its share if all came back at once.
        #[test]
        fn what_is_lent_is_the_tenants_own(
            tenants in prop::collection::vec((100..1000u32, 1..=4usize), 1..=6),
            idle_ones in prop::collection::btree_set(1..24u32, 0..24),
            length in 20_000..100_000u64,
        ) {
            let all = build(&tenants);
            let some: Vec<Node> = all.iter().map(|node| {
                let ones: Vec<u32> = idle_ones.iter().copied().collect();
                idle(node.clone(), &ones)
            }).collect();
            let (by_right, lent) = (divide(round(length), &all), divide(round(length), &some));
            prop_assert_eq!(by_right.round_us, lent.round_us);
            for (node, plain) in some.iter().zip(&all) {
                let whole = share(&by_right, plain);
                let active: u64 = node.own.iter().filter(|process| !process.idle).map(|process| lent.slices[&process.tgid]).sum();
                let few = node.own.len() as u64 + 1;
                prop_assert!(active == 0 || active.abs_diff(whole) <= few, "{} of {}", active, whole);
                prop_assert!(share(&lent, node) <= 2 * whole + few);
                for process in &node.own {
                    prop_assert!(lent.slices[&process.tgid] >= by_right.slices[&process.tgid]);
                }
            }
        }

        #[test]
        fn more_weight_is_never_less_time(
            tenants in tenants(),
            length in 1000..100_000u64,
        ) {
            let single: Vec<(u32, usize)> = tenants.iter().map(|(weight, _)| (*weight, 1)).collect();
            let nodes = build(&single);
            let division = divide(round(length), &nodes);
            let mut sorted: Vec<(u32, u64)> = nodes
                .iter()
                .map(|node| (node.weight, share(&division, node)))
                .collect();
            sorted.sort_unstable();
            prop_assert!(sorted.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        }

        #[test]
        fn any_tree_is_divided(
            weights in prop::collection::vec((1..=10_000u32, 0..3u32, 0..3usize), 1..20),
            length in 1..50_000u64,
        ) {
            // Every tenant lies inside the one before it, or beside.
            let mut roots: Vec<Node> = Vec::new();
            for (index, (weight, contexts, depth)) in weights.iter().enumerate() {
                let node = Node {
                    weight: *weight,
                    own: vec![Contender {
                        tgid: u32::try_from(index).unwrap(),
                        contexts: *contexts,
                        idle: false,
                    }],
                    inside: Vec::new(),
                };
                let mut level = &mut roots;
                for _ in 0..*depth {
                    if level.is_empty() {
                        break;
                    }
                    level = &mut level.last_mut().unwrap().inside;
                }
                level.push(node);
            }
            let division = divide(round(length), &roots);
            let present = weights.iter().filter(|(_, contexts, _)| *contexts > 0).count();
            prop_assert_eq!(division.slices.len(), present);
            prop_assert!(division.slices.values().all(|slice| *slice >= LEAST_US));
        }
    }
}
