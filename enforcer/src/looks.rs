//! The looks into processes of one kind that go on, or are over and kept for a while.
//!
//! What looks are at is their own affair (`insight`, `idle`, `profile`); that there is one at a time for each target, how many
//! there may be and how long one may last, is the same for all.

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use crate::control::leaks::Target;

/// How a kind of look is spoken of.
#[derive(Debug, PartialEq, Eq)]
pub struct Words {
    /// What is looked at, such as "allocations".
    pub what: &'static str,
    /// What is done to it, such as "followed".
    pub done: &'static str,
    /// The verb of `gpuquotactl`.
    pub command: &'static str,
}

/// A look of one kind.
pub trait Look: Send + Sync + Sized + 'static {
    /// What it finds.
    type Report;
    /// What it has to know of the rest of the daemon.
    type Host: ?Sized + Send + Sync;
    /// Why it could not begin.
    type Error: Error + Send + Sync + 'static;
    /// How it is spoken of.
    const WORDS: Words;
    /// Looks that are kept, those that are over among them.
    const MOST: usize;
    /// It may last so long.
    const LONGEST: Duration;

    /// Begins to look.
    fn begin(target: Target, limit: Duration, host: Weak<Self::Host>) -> Result<Self, Self::Error>;
    /// A process has spoken to the driver, or runs another program.
    fn seen(&self, pid: u32);
    /// What it has found.
    fn report(&self) -> Self::Report;
    /// Whether all is known that will be.
    fn is_over(&self) -> bool;
    /// Whether something of it is in processes or in the kernel.
    fn is_attached(&self) -> bool {
        !self.is_over()
    }
    /// Ends it; returns when all is known.
    fn stop(&self);
    /// Ends it, whatever is known by then; returns when nothing of it is left in processes and in the kernel.
    fn abandon(&self) {
        self.stop();
    }
}

/// Why looks do not do what they are asked.
#[derive(Debug, thiserror::Error)]
pub enum LooksError {
    /// It cannot begin.
    #[error("{} of {target} cannot be {}: {source}", .words.what, .words.done)]
    Start {
        /// How the kind is spoken of.
        words: &'static Words,
        /// Whose.
        target: Target,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// One at a time for each target.
    #[error(
        "{} of {target} are being {} already; `gpuquotactl {} {target} --so-far` shows what was found so far",
        .words.what, .words.done, .words.command
    )]
    Running {
        /// How the kind is spoken of.
        words: &'static Words,
        /// Whose.
        target: Target,
    },
    /// So many are there already.
    #[error("{0} looks are running already; end one of them first")]
    TooMany(usize),
    /// Too long, or not at all: this is the most.
    #[error("a look may last from 1 s to {}", span(*.0))]
    Duration(Duration),
    /// The daemon is starting.
    #[error("the daemon is starting; try again in a moment")]
    NotYet,
    /// There is no such look.
    #[error("{} of {target} are not {} and were not lately", .words.what, .words.done)]
    NoLook {
        /// How the kind is spoken of.
        words: &'static Words,
        /// Whose.
        target: Target,
    },
    /// The policy has the last word.
    #[error(
        "launches of {0} are profiled by insight.profile = true; change the policy to end that"
    )]
    Always(Target),
}

fn span(time: Duration) -> String {
    match time.as_secs() / 3600 {
        0 | 1 => format!("{} min", time.as_secs() / 60),
        hours => format!("{hours} h"),
    }
}

/// All looks of one kind.
pub struct Book<L: Look> {
    looks: Mutex<BTreeMap<Target, Arc<L>>>,
    /// Held while a look begins, which takes longer than other questions should wait.
    changing: Mutex<()>,
    /// Weak: the daemon has the looks.
    host: OnceLock<Weak<L::Host>>,
}

impl<L: Look> Default for Book<L> {
    fn default() -> Self {
        Self {
            looks: Mutex::default(),
            changing: Mutex::default(),
            host: OnceLock::new(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<L: Look> Book<L> {
    /// How the kind is spoken of.
    const WORDS: &'static Words = &L::WORDS;

    /// Says who knows the rest of the daemon; the first word counts.
    pub fn ask(&self, host: &Arc<L::Host>) {
        let _ = self.host.set(Arc::downgrade(host));
    }

    /// Who knows the rest of the daemon.
    pub fn host(&self) -> Result<Weak<L::Host>, LooksError> {
        self.host.get().map(Weak::clone).ok_or(LooksError::NotYet)
    }

    /// Begins to look. A look at the same target that is over makes place for it, and so does another one where there is no
    /// room.
    pub fn start(&self, target: &Target, limit: Duration) -> Result<(), LooksError> {
        let host = self.host()?;
        if !(Duration::from_secs(1)..=L::LONGEST).contains(&limit) {
            return Err(LooksError::Duration(L::LONGEST));
        }
        let _changing = lock(&self.changing);
        let over = self.make_room(target)?;
        drop(over);
        let look = L::begin(target.clone(), limit, host)
            .map_err(|source| Self::refused(target, source))?;
        lock(&self.looks).insert(target.clone(), Arc::new(look));
        Ok(())
    }

    /// Why a look at a target did not begin.
    pub fn refused(target: &Target, source: L::Error) -> LooksError {
        LooksError::Start {
            words: Self::WORDS,
            target: target.clone(),
            source: Box::new(source),
        }
    }

    /// Takes out those that make place for a look at a target.
    fn make_room(&self, target: &Target) -> Result<Vec<Arc<L>>, LooksError> {
        let mut looks = lock(&self.looks);
        if looks.get(target).is_some_and(|look| !look.is_over()) {
            return Err(LooksError::Running {
                words: Self::WORDS,
                target: target.clone(),
            });
        }
        let mut out: Vec<Arc<L>> = looks.remove(target).into_iter().collect();
        if looks.len() >= L::MOST {
            let over = looks
                .iter()
                .find(|(_, look)| look.is_over())
                .map(|(target, _)| target.clone())
                .ok_or(LooksError::TooMany(L::MOST))?;
            out.extend(looks.remove(&over));
        }
        Ok(out)
    }

    /// A look at a target.
    pub fn get(&self, target: &Target) -> Result<Arc<L>, LooksError> {
        let found = lock(&self.looks).get(target).map(Arc::clone);
        found.ok_or_else(|| LooksError::NoLook {
            words: Self::WORDS,
            target: target.clone(),
        })
    }

    /// What a look has found.
    pub fn report(&self, target: &Target) -> Result<L::Report, LooksError> {
        Ok(self.get(target)?.report())
    }

    /// Ends a look and returns what it found, which is kept for a while.
    pub fn stop(&self, target: &Target) -> Result<L::Report, LooksError> {
        let look = self.get(target)?;
        look.stop();
        Ok(look.report())
    }

    /// Whom is or was looked at.
    pub fn targets(&self) -> Vec<Target> {
        lock(&self.looks).keys().cloned().collect()
    }

    /// A process has spoken to the driver, or runs another program.
    pub fn seen(&self, pid: u32) {
        for look in lock(&self.looks).values() {
            look.seen(pid);
        }
    }

    /// How many looks have something in processes or in the kernel.
    pub fn running(&self) -> usize {
        lock(&self.looks)
            .values()
            .filter(|look| look.is_attached())
            .count()
    }

    /// Ends all looks.
    pub fn end(&self) {
        let _changing = lock(&self.changing);
        let looks = std::mem::take(&mut *lock(&self.looks));
        for look in looks.values() {
            look.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    use super::*;

    /// A look at nothing.
    struct Glance {
        over: AtomicBool,
        seen: AtomicU32,
        host: Weak<AtomicU32>,
    }

    impl Look for Glance {
        type Report = u32;
        type Host = AtomicU32;
        type Error = fmt::Error;
        const WORDS: Words = Words {
            what: "clouds",
            done: "watched",
            command: "clouds",
        };
        const MOST: usize = 2;
        const LONGEST: Duration = Duration::from_hours(1);

        fn begin(target: Target, _: Duration, host: Weak<AtomicU32>) -> Result<Self, fmt::Error> {
            if target == Target::Process(13) {
                return Err(fmt::Error);
            }
            Ok(Self {
                over: AtomicBool::new(false),
                seen: AtomicU32::new(0),
                host,
            })
        }

        fn seen(&self, pid: u32) {
            self.seen.store(pid, Relaxed);
        }

        fn report(&self) -> u32 {
            self.seen.load(Relaxed)
        }

        fn is_over(&self) -> bool {
            self.over.load(Relaxed)
        }

        fn stop(&self) {
            self.over.store(true, Relaxed);
        }

        fn abandon(&self) {
            self.stop();
            if let Some(host) = self.host.upgrade() {
                host.fetch_add(1, Relaxed);
            }
        }
    }

    const LIMIT: Duration = Duration::from_secs(30);

    fn said<T>(result: Result<T, LooksError>) -> String {
        result
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn one_at_a_time_for_each_target_and_no_more_than_there_may_be() {
        let book = Book::<Glance>::default();
        let [one, two, three] = [1, 2, 3].map(Target::Process);
        assert_eq!(
            said(book.start(&one, LIMIT)),
            "the daemon is starting; try again in a moment"
        );
        let host = Arc::new(AtomicU32::new(0));
        book.ask(&host);
        book.start(&one, LIMIT).expect("room");
        assert!(
            said(book.start(&one, LIMIT))
                .contains("clouds of 1 are being watched already; `gpuquotactl clouds 1 --so-far`")
        );
        book.start(&two, LIMIT).expect("room");
        assert!(said(book.start(&three, LIMIT)).starts_with("2 looks are running already"));
        book.seen(7);
        assert_eq!(book.stop(&one).expect("there"), 7);
        assert_eq!((book.running(), book.targets().len()), (1, 2));
        // One that is over is kept until its place is needed.
        assert_eq!(book.report(&one).expect("kept"), 7);
        book.start(&three, LIMIT).expect("the place of the first");
        assert_eq!(
            said(book.report(&one)),
            "clouds of 1 are not watched and were not lately"
        );
        // One at the same target that is over makes place too, and takes nobody else's.
        book.stop(&two).expect("there");
        book.start(&two, LIMIT).expect("its own place");
        assert_eq!((book.running(), book.targets()), (2, vec![two, three]));
        book.end();
        assert_eq!((book.targets().len(), host.load(Relaxed)), (0, 2));
    }

    #[test]
    fn what_cannot_be_is_said() {
        let book = Book::<Glance>::default();
        book.ask(&Arc::new(AtomicU32::new(0)));
        for limit in [Duration::ZERO, Duration::from_mins(61)] {
            assert_eq!(
                said(book.start(&Target::Process(1), limit)),
                "a look may last from 1 s to 60 min"
            );
        }
        assert!(
            LooksError::Duration(Duration::from_hours(24))
                .to_string()
                .ends_with("24 h")
        );
        let refused = said(book.start(&Target::Process(13), LIMIT));
        assert!(
            refused.starts_with("clouds of 13 cannot be watched: "),
            "{refused}"
        );
        assert!(book.targets().is_empty());
    }
}
