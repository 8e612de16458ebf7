//! What NVML knows: cards, their memory, and what each process has on them.
//!
//! NVML may block for seconds, and a broken card can block it for good. So it runs on its own thread, and
//! everybody else reads the last [`Snapshot`]; enforcement never waits for it.

mod counter;
mod nvml;

use std::{
    io,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tracing::warn;

use crate::{
    faults::PciAddress,
    stir::{CALM_PAUSE, Stir, Witness},
};

pub use counter::EnergyReadings;
pub use nvml::NvmlSource;

/// Why NVML does not answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TelemetryError {
    /// The library cannot be used.
    #[error("NVML: {0}")]
    Nvml(String),
    /// No answer within the time allowed.
    #[error("NVML did not answer within {0:?}")]
    Timeout(Duration),
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Index in NVML's order.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Where it is on the bus; absent where NVML does not tell.
    pub pci: Option<PciAddress>,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes in use.
    pub memory_used: u64,
    /// What the board draws, milliwatts; absent where it does not tell.
    pub power_mw: Option<u32>,
    /// What the board has used since the driver was loaded, millijoules, some seconds old; absent where it does not count.
    pub energy_mj: Option<u64>,
    /// Processes with a context: process id and bytes, absent where NVML does not tell.
    pub processes: Vec<(u32, Option<u64>)>,
}

impl Card {
    /// Bytes that processes use; `None` if NVML does not tell of one of them.
    pub fn used_by_processes(&self) -> Option<u64> {
        self.processes
            .iter()
            .map(|(_, bytes)| *bytes)
            .sum::<Option<u64>>()
    }
}

/// What NVML said last.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Driver version.
    pub driver_version: String,
    /// The cards, by index.
    pub cards: Vec<Card>,
    /// When.
    pub at: Instant,
}

impl Snapshot {
    /// Whether any process has a context on any card.
    pub fn shows_processes(&self) -> bool {
        self.cards.iter().any(|card| !card.processes.is_empty())
    }
}

/// A source of snapshots; the seam for tests.
pub trait Source: Send {
    /// Asks once. May block.
    fn read(&mut self) -> Result<Snapshot, TelemetryError>;
}

#[derive(Default)]
struct Shared {
    last: Mutex<Option<Result<Arc<Snapshot>, TelemetryError>>>,
    news: Condvar,
    stop: AtomicBool,
}

/// The thread that asks NVML, seen from outside.
pub struct Telemetry {
    shared: Arc<Shared>,
    interval: Duration,
}

impl Telemetry {
    /// Starts to read `open()`'s source every `interval`, less often while `stir` says that nothing moves; tells it whether there
    /// are processes. The source is opened on the thread itself.
    pub fn spawn<S, F>(interval: Duration, stir: Arc<Stir>, open: F) -> io::Result<Self>
    where
        S: Source,
        F: FnMut() -> Result<S, TelemetryError> + Send + 'static,
    {
        let shared = Arc::new(Shared::default());
        let ours = Arc::clone(&shared);
        thread::Builder::new()
            .name("nvml".into())
            .spawn(move || run(&ours, interval, &stir, open))?;
        Ok(Self { shared, interval })
    }

    /// Starts with the NVML library at `library`, or where the loader finds it.
    pub fn nvml(
        interval: Duration,
        stir: Arc<Stir>,
        library: Option<&Path>,
        energy: Arc<EnergyReadings>,
    ) -> io::Result<Self> {
        let library = library.map(Path::to_owned);
        Self::spawn(interval, stir, move || {
            NvmlSource::open(library.as_deref(), Arc::clone(&energy))
        })
    }

    /// The first answer, or an error once `patience` is over.
    pub fn first(&self, patience: Duration) -> Result<Arc<Snapshot>, TelemetryError> {
        let last = self.lock();
        let (last, _) = self
            .shared
            .news
            .wait_timeout_while(last, patience, |last| last.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        last.clone()
            .unwrap_or(Err(TelemetryError::Timeout(patience)))
    }

    /// The last answer, unless it is so old that it says nothing about now.
    pub fn latest(&self) -> Option<Arc<Snapshot>> {
        let oldest = self.interval * 3 + CALM_PAUSE + Duration::from_secs(2);
        self.lock()
            .as_ref()?
            .as_ref()
            .ok()
            .filter(|snapshot| snapshot.at.elapsed() < oldest)
            .cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Result<Arc<Snapshot>, TelemetryError>>> {
        self.shared
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        // The thread may be stuck in NVML: it ends when it comes back, and nobody waits for it.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn run<S: Source>(
    shared: &Shared,
    interval: Duration,
    stir: &Stir,
    mut open: impl FnMut() -> Result<S, TelemetryError>,
) {
    let mut source = None;
    let mut reported = false;
    while !shared.stop.load(Ordering::Relaxed) {
        let answer = match &mut source {
            None => open().and_then(|mut opened| {
                let answer = opened.read();
                source = Some(opened);
                answer
            }),
            Some(source) => source.read(),
        };
        match &answer {
            Ok(_) => reported = false,
            Err(error) => {
                if !reported {
                    warn!(%error, "no telemetry; enforcement goes on without it");
                }
                reported = true;
                // A driver that was reloaded needs a library that is initialised again.
                source = None;
            }
        }
        let used = answer.as_ref().map_or(true, Snapshot::shows_processes);
        *shared.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer.map(Arc::new));
        shared.news.notify_all();
        stir.testify(Witness::Nvml, used);
        stir.pause(interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Slow(Duration);

    impl Source for Slow {
        fn read(&mut self) -> Result<Snapshot, TelemetryError> {
            thread::sleep(self.0);
            Ok(Snapshot {
                driver_version: "580".into(),
                cards: Vec::new(),
                at: Instant::now(),
            })
        }
    }

    #[test]
    fn a_library_that_hangs_hangs_nobody() {
        let telemetry = Telemetry::spawn(Duration::from_millis(1), Arc::default(), || {
            Ok(Slow(Duration::from_hours(1)))
        })
        .expect("a thread");
        let error = telemetry
            .first(Duration::from_millis(20))
            .expect_err("too slow");
        assert!(matches!(error, TelemetryError::Timeout(_)));
        assert!(telemetry.latest().is_none());
    }

    #[test]
    fn an_answer_is_there_for_everybody() {
        let telemetry = Telemetry::spawn(Duration::from_millis(1), Arc::default(), || {
            Ok(Slow(Duration::ZERO))
        })
        .expect("a thread");
        let first = telemetry.first(Duration::from_secs(5)).expect("answers");
        assert_eq!(first.driver_version, "580");
        assert!(telemetry.latest().is_some());
    }
}
