//! Whether anything moves on the GPUs, so that nobody looks often where nothing does.
//!
//! Threads that look at something in turns pause through [`Stir`]: as usual while a process uses a GPU or lately did, and for
//! [`CALM_PAUSE`] while none does. News of the kernel side end such a long pause at once.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Pause between two looks while no process uses a GPU.
pub const CALM_PAUSE: Duration = Duration::from_secs(5);
/// For so long after the last news nothing counts as calm: what they announce may not be in the ledger yet, nor with NVML.
const LINGER: Duration = Duration::from_secs(5);

/// Who says that a GPU is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// The ledger has charges or contexts.
    Ledger,
    /// NVML shows processes, or does not answer.
    Nvml,
}

/// What is known; pure.
#[derive(Clone, Debug)]
struct Scene {
    last_news: Instant,
    /// Counts news, so that whoever pauses sees that there were some.
    news: u64,
    /// By [`Witness`]; in use until both have looked.
    used: [bool; 2],
}

impl Scene {
    fn new(now: Instant) -> Self {
        Self {
            last_news: now,
            news: 0,
            used: [true; 2],
        }
    }

    fn note_news(&mut self, now: Instant) {
        self.last_news = now;
        self.news += 1;
    }

    /// Takes what a witness says; whether that is news.
    fn testify(&mut self, witness: Witness, used: bool, now: Instant) -> bool {
        let before = std::mem::replace(&mut self.used[witness as usize], used);
        let is_news = used && !before;
        if is_news {
            self.note_news(now);
        }
        is_news
    }

    fn is_calm(&self, now: Instant) -> bool {
        self.used == [false; 2] && now.saturating_duration_since(self.last_news) >= LINGER
    }
}

/// The scene, shared by threads.
#[derive(Debug)]
pub struct Stir {
    scene: Mutex<Scene>,
    told: Condvar,
}

impl Default for Stir {
    fn default() -> Self {
        Self {
            scene: Mutex::new(Scene::new(Instant::now())),
            told: Condvar::new(),
        }
    }
}

impl Stir {
    fn lock(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened: a process came, an object was made, a charge changed. Ends every long pause.
    pub fn news(&self) {
        self.lock().note_news(Instant::now());
        self.told.notify_all();
    }

    /// A witness has looked whether any GPU is in use.
    pub fn testify(&self, witness: Witness, used: bool) {
        if self.lock().testify(witness, used, Instant::now()) {
            self.told.notify_all();
        }
    }

    /// Whether no process uses a GPU, or lately did.
    pub fn is_calm(&self) -> bool {
        self.lock().is_calm(Instant::now())
    }

    /// The pause until the next look, where it is `usual` while a GPU is in use.
    pub fn interval(&self, usual: Duration) -> Duration {
        if self.is_calm() {
            usual.max(CALM_PAUSE)
        } else {
            usual
        }
    }

    /// Pauses before the next look: for `usual`, or while nothing moves for longer and until something does.
    pub fn pause(&self, usual: Duration) {
        let scene = self.lock();
        if !scene.is_calm(Instant::now()) {
            drop(scene);
            thread::sleep(usual);
            return;
        }
        let before = scene.news;
        // Woken by news, by the time, or by nothing at all: each time a look is right.
        drop(
            self.told
                .wait_timeout_while(scene, usual.max(CALM_PAUSE), |scene| scene.news == before),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn it_is_calm_once_both_see_nobody_and_no_news_came_for_a_while() {
        let begin = Instant::now();
        let mut scene = Scene::new(begin);
        let later = begin + LINGER;
        assert!(!scene.is_calm(later), "nobody has looked");
        assert!(!scene.testify(Witness::Ledger, false, begin));
        assert!(!scene.is_calm(later), "NVML has not answered");
        scene.testify(Witness::Nvml, false, begin);
        assert!(!scene.is_calm(begin), "the daemon has just begun");
        assert!(scene.is_calm(later));
        scene.note_news(later);
        assert!(!scene.is_calm(later));
        assert!(scene.is_calm(later + LINGER));
    }

    #[test]
    fn use_is_news_once() {
        let begin = Instant::now();
        let mut scene = Scene::new(begin);
        scene.testify(Witness::Nvml, false, begin);
        scene.testify(Witness::Ledger, false, begin);
        let later = begin + 2 * LINGER;
        assert!(scene.testify(Witness::Nvml, true, later));
        assert!(!scene.testify(Witness::Nvml, true, later));
        scene.testify(Witness::Nvml, false, later);
        assert!(!scene.is_calm(later), "it was in use a moment before");
    }

    #[test]
    fn news_end_a_long_pause() {
        let stir = Arc::new(Stir::default());
        {
            let mut scene = stir.lock();
            scene.used = [false; 2];
            scene.last_news -= LINGER;
        }
        assert!(stir.is_calm());
        assert_eq!(stir.interval(Duration::ZERO), CALM_PAUSE);
        let (done, ended) = mpsc::channel();
        let paused = Arc::clone(&stir);
        let sleeper = thread::spawn(move || {
            // Longer than any test may take: only news end it.
            paused.pause(Duration::from_hours(1));
            done.send(()).expect("somebody waits");
        });
        while ended.try_recv().is_err() {
            // As `news`, but the scene stays calm: whoever begins to pause only now is not to sleep through.
            stir.lock().news += 1;
            stir.told.notify_all();
            thread::yield_now();
        }
        sleeper.join().expect("no panic");
    }
}
