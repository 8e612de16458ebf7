//! A preemptible kernel passes over programs while another task is preempted in the middle of one, or of an operation on a
//! map. Workloads share a processor with a task that preempts them all the time; the ledger must never have less than the
//! driver, and nobody may get past a budget unnoticed.
//!
//! With `GPUQUOTA_IS_PREEMPTIBLE` in the environment it must have happened; without, the host may never do it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpuquota_common::map::counter;
use gpuquota_native_tests::{Actor, Bed, PATIENCE};

const GIB: u64 = 1 << 30;
const POLICY: &str = "[tenant.a]\ncgroup = \"@/a.slice\"\nmemory.max = \"4GiB\"\n";
const WORKLOADS: usize = 5;
/// Allocations and frees by each workload while it is preempted.
const ROUNDS: usize = 500;
/// The same where the processor is an emulated one.
const ROUNDS_EMULATED: usize = 50;

/// Keeps a process on the first processor that this one may use.
fn keep_on_one_processor(pid: i32) {
    // SAFETY: plain structures that outlive the calls; the process is one that this test started, or the caller.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        assert_eq!(libc::sched_getaffinity(0, size, &raw mut allowed), 0);
        let first = (0..libc::CPU_SETSIZE.cast_unsigned() as usize)
            .find(|cpu| libc::CPU_ISSET(*cpu, &allowed))
            .expect("a processor");
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(first, &mut one);
        assert_eq!(libc::sched_setaffinity(pid, size, &raw const one), 0);
    }
}

/// A thread of the highest class that takes the processor from whoever has it, again and again, until it is dropped.
struct Preempting {
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Preempting {
    fn start() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            keep_on_one_processor(0);
            let parameters = libc::sched_param { sched_priority: 10 };
            // SAFETY: a plain structure that outlives the call; 0 is the calling thread.
            let set =
                unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
            assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
            while !seen.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_micros(50));
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(50) {}
            }
        });
        Self {
            ends,
            thread: Some(thread),
        }
    }
}

impl Drop for Preempting {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Does something with every workload at the same time.
fn at_once(actors: Vec<Actor>, act: impl Fn(&mut Actor) + Sync) -> Vec<Actor> {
    let act = &act;
    thread::scope(|scope| {
        let threads: Vec<_> = actors
            .into_iter()
            .map(|mut actor| {
                scope.spawn(move || {
                    act(&mut actor);
                    actor
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a workload"))
            .collect()
    })
}

#[test]
fn nothing_is_lost_when_tasks_are_preempted_in_the_programs() {
    let bed = Bed::new(POLICY);
    let actors: Vec<Actor> = (0..WORKLOADS)
        .map(|_| {
            let mut actor = bed.raw_actor("a");
            let answer = actor.tell("measure --rounds 1");
            assert!(answer.starts_with("measured"), "{answer}");
            keep_on_one_processor(actor.workload_pid().cast_signed());
            actor
        })
        .collect();
    let held = || -> u64 {
        let truth = bed.sim.truth().expect("the truth");
        truth
            .clients
            .iter()
            .flat_map(|client| &client.memory)
            .map(|memory| memory.bytes)
            .sum()
    };
    println!("ready");
    let must_happen = std::env::var_os("GPUQUOTA_IS_PREEMPTIBLE").is_some();
    let rounds = if must_happen { ROUNDS_EMULATED } else { ROUNDS };
    let preempting = Preempting::start();
    let actors = at_once(actors, |actor| {
        let answer = actor.tell(&format!("measure --rounds {rounds}"));
        assert!(answer.starts_with("measured"), "{answer}");
    });
    println!("measured");
    // Twice what there is. A workload that nothing could refuse is ended for it.
    let actors = at_once(actors, |actor| {
        for _ in 0..2 {
            let answer = actor.tell("alloc 832MiB");
            let expected = ["allocated", "out of memory"];
            assert!(
                answer.is_empty() || expected.iter().any(|start| answer.starts_with(start)),
                "{answer}"
            );
        }
    });
    drop(preempting);
    // An emulated processor has much to catch up with.
    let end = Instant::now() + PATIENCE;
    while bed.call(async |client| client.dump_state().await).is_err() {
        assert!(Instant::now() < end, "{}", bed.log());
    }
    let usage = bed.usage("a", 0);
    let held = held();
    let [entries, exits, refused] = [
        counter::LATE_ENTRIES,
        counter::LATE_EXITS,
        counter::UNSEEN_REFUSED,
    ]
    .map(|index| bed.counter(index));
    println!(
        "{held} bytes held, {} charged, {} breaches; {entries} entries and {exits} exits were late, {refused} calls were made again",
        usage.memory_used, usage.breaches
    );
    assert!(usage.memory_used >= held, "{usage:?}, {held} held");
    assert!(held <= 4 * GIB || usage.breaches > 0, "{held} held");
    assert!(usage.denials + usage.breaches > 0, "{usage:?}");
    // What is charged beyond that goes when the driver has been asked.
    let used = bed.wait_usage("a", 0, |used| used == held);
    assert_eq!(used, held, "{}", bed.differences());
    if must_happen {
        assert!(entries + exits + refused > 0, "nothing was passed over");
    }
    drop(actors);
    assert_eq!(bed.wait_for_nothing(PATIENCE), []);
}
