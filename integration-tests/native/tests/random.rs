//! Ten thousand random sequences of allocate, free, fork and kill, against a model of what must happen.
//!
//! The seed is printed; `GPUQUOTA_SEED` repeats a run, `GPUQUOTA_SEQUENCES` makes it shorter or longer.

use std::{collections::BTreeMap, time::Duration};

use gpuquota_native_tests::{Actor, Bed};

const MIB: u64 = 1 << 20;
/// Outer and inner tenant share a chain; the third is beside them.
const POLICY: &str = "[tenant.outer]\ncgroup = \"@/o.slice\"\nmemory.max = \"2GiB\"\n\
    [tenant.inner]\ncgroup = \"@/o.slice/i.slice\"\nmemory.max = \"1GiB\"\n\
    [tenant.beside]\ncgroup = \"@/b.slice\"\nmemory.max = \"1536MiB\"\n";
const TENANTS: [(&str, u64, &[&str]); 3] = [
    ("outer", 2048 * MIB, &["outer"]),
    ("inner", 1024 * MIB, &["inner", "outer"]),
    ("beside", 1536 * MIB, &["beside"]),
];

/// Random numbers that a seed repeats (xorshift).
struct Random(u64);

impl Random {
    fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).expect("below a length")
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn seed() -> u64 {
    environment("GPUQUOTA_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("after 1970");
        u64::from(now.subsec_nanos()) << 20 | now.as_secs() & 0xf_ffff | 1
    })
}

/// A workload and what it must be holding.
struct Modelled {
    actor: Actor,
    tenant: usize,
    held: Vec<u64>,
    children: Vec<i32>,
}

impl Modelled {
    fn start(bed: &Bed, tenant: usize) -> Self {
        Self {
            actor: bed.raw_actor(TENANTS[tenant].0),
            tenant,
            held: Vec::new(),
            children: Vec::new(),
        }
    }

    fn total(&self) -> u64 {
        self.held.iter().sum()
    }
}

/// Bytes that each tenant must be charged for what these workloads hold.
fn charges(workloads: &[Modelled]) -> BTreeMap<&'static str, u64> {
    let mut charges: BTreeMap<&str, u64> = TENANTS.iter().map(|(name, ..)| (*name, 0)).collect();
    for workload in workloads {
        for payer in TENANTS[workload.tenant].2 {
            *charges.get_mut(payer).expect("a tenant") += workload.total();
        }
    }
    charges
}

fn fits(workloads: &[Modelled], tenant: usize, bytes: u64) -> bool {
    let charges = charges(workloads);
    TENANTS[tenant].2.iter().all(|payer| {
        let max = TENANTS
            .iter()
            .find(|(name, ..)| name == payer)
            .expect("a tenant")
            .1;
        charges[payer] + bytes <= max
    })
}

fn kill(pid: i32) {
    // SAFETY: a process that this test started.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// One random step of one workload; what it answers must be what the model says.
fn step(bed: &Bed, random: &mut Random, workloads: &mut [Modelled]) {
    let at = random.index(workloads.len());
    match random.below(100) {
        0..55 => {
            let bytes = (1 + random.below(160)) * 2 * MIB;
            let granted = fits(workloads, workloads[at].tenant, bytes);
            let answer = workloads[at].actor.tell(&format!("alloc {bytes}"));
            let name = TENANTS[workloads[at].tenant].0;
            if granted {
                assert_eq!(answer, format!("allocated {bytes}"), "{name}");
                workloads[at].held.push(bytes);
            } else {
                assert!(answer.starts_with("out of memory"), "{name}: {answer}");
            }
        }
        55..93 => {
            if workloads[at].held.is_empty() {
                return;
            }
            let answer = workloads[at].actor.tell("free --newest 1");
            assert!(answer.starts_with("freed"), "{answer}");
            workloads[at].held.pop();
        }
        93..96 => {
            let answer = workloads[at].actor.tell("fork --hold 60s");
            let child = answer.trim_start_matches("forked ").parse();
            workloads[at]
                .children
                .push(child.unwrap_or_else(|_| panic!("{answer}")));
        }
        _ => {
            // Its children still hold the files: only with the last of them the memory goes.
            workloads[at].actor.kill_workload();
            for child in &workloads[at].children {
                kill(*child);
            }
            let tenant = workloads[at].tenant;
            workloads[at] = Modelled::start(bed, tenant);
            settle(bed, workloads);
        }
    }
}

/// The ledger must come to what the model says, and the driver's truth with it.
fn settle(bed: &Bed, workloads: &[Modelled]) {
    for (tenant, bytes) in charges(workloads) {
        assert_eq!(
            bed.wait_usage(tenant, 0, |used| used == bytes),
            bytes,
            "{tenant}"
        );
    }
}

#[test]
fn random_sequences_end_with_the_ledger_that_the_model_says() {
    let seed = seed();
    let sequences = environment("GPUQUOTA_SEQUENCES").unwrap_or(10_000);
    println!("GPUQUOTA_SEED={seed}");
    let mut random = Random(seed);
    let bed = Bed::new(POLICY);
    let mut workloads: Vec<Modelled> = (0..6)
        .map(|number| Modelled::start(&bed, number % TENANTS.len()))
        .collect();
    for sequence in 0..sequences {
        for _ in 0..=random.below(6) {
            step(&bed, &mut random, &mut workloads);
        }
        if sequence % 10 == 0 {
            settle(&bed, &workloads);
        }
    }
    for workload in workloads {
        workload.children.iter().copied().for_each(kill);
        workload.actor.finish();
    }
    assert_eq!(
        bed.wait_for_nothing(Duration::from_secs(5)),
        [],
        "seed {seed}"
    );
    for (tenant, max, _) in TENANTS {
        let usage = bed.usage(tenant, 0);
        assert!(
            usage.memory_peak <= max,
            "seed {seed}: {tenant} had {}",
            usage.memory_peak
        );
        assert_eq!(usage.breaches, 0, "seed {seed}: {tenant}");
    }
    let truth = bed.sim.truth().expect("the truth");
    assert_eq!(truth.gpus[0].used, 0, "seed {seed}");
    println!(
        "{sequences} sequences, {} allocations granted by the driver",
        truth.gpus[0].allocations
    );
}

#[test]
fn racing_workloads_never_get_more_than_their_budget() {
    let seed = seed();
    println!("GPUQUOTA_SEED={seed}");
    let mut random = Random(seed);
    let bed = Bed::new(POLICY);
    for _ in 0..3 {
        let mut workloads: Vec<Modelled> = (0..6)
            .map(|number| Modelled::start(&bed, number % TENANTS.len()))
            .collect();
        for workload in &mut workloads {
            let step = format!(
                "random --seed {} --ops 100 --largest 256MiB",
                random.below(1 << 30)
            );
            workload.actor.order(&step);
        }
        std::thread::sleep(Duration::from_millis(20 + random.below(80)));
        // Some die in the middle of it, the others go on to the end.
        for workload in workloads.iter().filter(|_| random.below(3) == 0) {
            workload.actor.kill_workload();
        }
        for mut workload in workloads {
            workload.actor.answer();
            workload.actor.finish();
        }
        assert_eq!(
            bed.wait_for_nothing(Duration::from_secs(5)),
            [],
            "seed {seed}"
        );
    }
    for (tenant, max, _) in TENANTS {
        let usage = bed.usage(tenant, 0);
        assert!(
            usage.memory_peak <= max,
            "seed {seed}: {tenant} had {}",
            usage.memory_peak
        );
        assert_eq!(usage.breaches, 0, "seed {seed}: {tenant}");
        assert!(
            usage.memory_peak > max / 4,
            "seed {seed}: {tenant} was hardly used"
        );
    }
    let truth = bed.sim.truth().expect("the truth");
    // A channel group costs the driver something that no call asks for (the simulated one: 2 MiB a process).
    let unasked = 6 * 2 * MIB;
    let most = TENANTS[0].1 + TENANTS[2].1 + unasked;
    assert!(
        truth.gpus[0].peak <= most,
        "seed {seed}: {} were out at once",
        truth.gpus[0].peak
    );
    assert_eq!(truth.gpus[0].used, 0, "seed {seed}");
}
