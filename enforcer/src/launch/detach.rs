//! Detaching probes, which the kernel takes its time for.
//!
//! Where links of many probes are not to be had (before Linux 6.12) every probe is an event of its own, and the end of each waits for every CPU to pass by while it
//! holds a lock that attaching needs too. So one thread detaches them one by one, and only while nobody is being
//! attached: a host that starts and ends many processes would otherwise leave new ones without probes for seconds.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use crate::kernel::Probe;

/// The longest that a probe waits to be detached for others to be attached.
const PATIENCE: Duration = Duration::from_secs(2);

/// How many are attaching right now.
#[derive(Debug, Default)]
struct Gate {
    attaching: Mutex<usize>,
    quiet: Condvar,
}

/// The thread that detaches.
#[derive(Clone, Debug)]
pub struct Detacher {
    links: Sender<Work>,
    gate: Arc<Gate>,
}

/// Links to let go of, and what to do afterwards.
type Work = (Vec<Probe>, Box<dyn FnOnce() + Send>);

/// Held while probes are attached.
#[derive(Debug)]
pub struct Attaching(Arc<Gate>);

impl Detacher {
    /// Starts the thread; it ends with the last handle.
    pub fn start() -> io::Result<Self> {
        let gate = Arc::new(Gate::default());
        let (links, work) = mpsc::channel();
        let watched = Arc::clone(&gate);
        thread::Builder::new()
            .name("launch-detach".into())
            .spawn(move || run(&work, &watched))?;
        Ok(Self { links, gate })
    }

    /// Lets go of links some time, and then calls `after`.
    pub fn detach(&self, links: Vec<Probe>, after: impl FnOnce() + Send + 'static) {
        if let Err(mpsc::SendError((links, after))) = self.links.send((links, Box::new(after))) {
            drop(links);
            after();
        }
    }

    /// Says that probes are about to be attached.
    pub fn attaching(&self) -> Attaching {
        *self
            .gate
            .attaching
            .lock()
            .unwrap_or_else(PoisonError::into_inner) += 1;
        Attaching(Arc::clone(&self.gate))
    }
}

impl Drop for Attaching {
    fn drop(&mut self) {
        let mut attaching = self
            .0
            .attaching
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *attaching -= 1;
        if *attaching == 0 {
            self.0.quiet.notify_all();
        }
    }
}

fn run(work: &Receiver<Work>, gate: &Gate) {
    while let Ok((links, after)) = work.recv() {
        for link in links {
            let attaching = gate
                .attaching
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            // Nothing comes of the result: a link that has waited for so long goes all the same.
            drop(
                gate.quiet
                    .wait_timeout_while(attaching, PATIENCE, |attaching| *attaching > 0),
            );
            drop(link);
        }
        after();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn descriptor() -> Probe {
        Probe::Many(std::fs::File::open("/dev/null").expect("it opens").into())
    }

    #[test]
    fn links_wait_for_those_who_attach() {
        let detacher = Detacher::start().expect("a thread");
        let attaching = detacher.attaching();
        let (done, gone) = mpsc::channel();
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        detacher.detach(vec![descriptor()], move || {
            // The test may have ended by its patience.
            let _ = done.send(seen.load(Ordering::SeqCst));
        });
        thread::sleep(Duration::from_millis(50));
        over.store(true, Ordering::SeqCst);
        drop(attaching);
        assert_eq!(gone.recv_timeout(PATIENCE), Ok(true));
    }
}
