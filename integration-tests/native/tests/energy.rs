//! The energy of tenants, of nobody and of others adds up to the board's.

use std::{
    thread,
    time::{Duration, Instant},
};

use gpuquota_native_tests::{Bed, PATIENCE};

/// Joules of the board, and of everybody who is told apart, on GPU 0.
fn scrape(address: &str) -> (f64, f64) {
    let answer = gpuquota_native_tests::scrape(address);
    let (mut board, mut parts) = (0.0, 0.0);
    for line in answer.lines().filter(|line| line.contains("gpu=\"0\"")) {
        let Some((name, value)) = line.rsplit_once(' ') else {
            continue;
        };
        let value: f64 = value.parse().unwrap_or(0.0);
        if name.starts_with("gpuquota_gpu_energy_joules_total") {
            board = value;
        } else if name.contains("energy") && name.contains("_joules_total{") {
            parts += value;
        }
    }
    (board, parts)
}

/// A scrape just after the daemon has looked at the board: while nothing runs it looks rarely, and what is told apart is as of
/// its last look.
fn scrape_after_a_look(address: &str) -> (f64, f64) {
    let end = Instant::now() + PATIENCE;
    let (_, before) = scrape(address);
    loop {
        // Scrapes in quick succession get the same answer.
        thread::sleep(Duration::from_millis(250));
        let (board, parts) = scrape(address);
        if (parts - before).abs() > f64::EPSILON {
            return (board, parts);
        }
        assert!(Instant::now() < end, "nobody looks at the board");
    }
}

#[test]
fn energies_add_up_to_the_boards_within_a_percent() {
    let mut bed = Bed::new(
        "[tenant.a]\ncgroup = \"@/a.slice\"\n[tenant.b]\ncgroup = \"@/b.slice\"\ntime.weight = 300\n",
    );
    let address = bed.offer_metrics();
    let mut actors = [bed.actor("a"), bed.actor("b")];
    for actor in &mut actors {
        assert_eq!(actor.tell("context"), "context");
    }
    let (board, parts) = scrape_after_a_look(&address);
    for actor in &mut actors {
        actor.order("launch --rate max --kernel-us 500 --for 8000ms");
    }
    for actor in &mut actors {
        assert!(!actor.answer().is_empty());
    }
    thread::sleep(Duration::from_secs(2));
    let (board_after, parts_after) = scrape_after_a_look(&address);
    let (used, told) = (board_after - board, parts_after - parts);
    // Eight seconds of work are 5 kJ on this board.
    assert!(used > 3000.0, "{used}");
    assert!((told / used - 1.0).abs() < 0.01, "{told} of {used} J");
}
