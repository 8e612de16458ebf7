//! Freezing the cgroups of a tenant that launches too fast, and thawing only what we froze.
//!
//! `cgroup.freeze` has no owner: it holds what was written last. Somebody else's write is seen by inotify; from then on
//! the cgroup is theirs, frozen or not.

use std::{
    collections::BTreeMap,
    fs, io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::inotify;
use tracing::{error, warn};

use super::Host;
use crate::{cgroup::Hierarchy, kernel::launch::Record};

/// The file in a cgroup's folder.
const FILE: &str = "cgroup.freeze";

/// A cgroup that we froze.
#[derive(Debug)]
struct Held {
    file: PathBuf,
    due_ns: u64,
    /// Descriptor of the watch on `file`.
    watch: Option<i32>,
    /// Somebody else has written to it since.
    theirs: bool,
}

/// What is frozen for launches.
pub struct Freezer {
    host: Arc<dyn Host>,
    kernel: Arc<crate::kernel::Kernel>,
    inotify: Option<OwnedFd>,
    /// By cgroup id.
    held: BTreeMap<u64, Held>,
}

impl Freezer {
    /// Nothing is frozen yet.
    pub fn new(host: Arc<dyn Host>, kernel: Arc<crate::kernel::Kernel>) -> Self {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let inotify = inotify::init(flags)
            .inspect_err(|error| warn!(%error, "no inotify: others' freezing is not noticed"))
            .ok();
        Self {
            host,
            kernel,
            inotify,
            held: BTreeMap::new(),
        }
    }

    /// Freezes the cgroups of a tenant until a moment.
    pub fn freeze(&mut self, tenant: u32, until_ns: u64) {
        for (id, folder) in self.host.roots(tenant) {
            if let Some(held) = self.held.get_mut(&id) {
                held.due_ns = held.due_ns.max(until_ns);
                continue;
            }
            if let Err(error) = self.freeze_one(id, &folder, until_ns) {
                // A cgroup may go at any time.
                if error.kind() != io::ErrorKind::NotFound {
                    error!(cgroup = %folder.display(), %error, "cannot be frozen");
                }
            }
        }
    }

    fn freeze_one(&mut self, id: u64, folder: &Path, until_ns: u64) -> io::Result<()> {
        let file = folder.join(FILE);
        if is_frozen(&file)? {
            // Somebody else's; it launches nothing anyway.
            return Ok(());
        }
        // On record before it is done: whoever comes after us thaws it.
        self.record()
            .set_frozen(id, until_ns)
            .map_err(io::Error::other)?;
        let watch = self.inotify.as_ref().and_then(|inotify| {
            inotify::add_watch(inotify, &file, inotify::WatchFlags::MODIFY).ok()
        });
        fs::write(&file, "1")?;
        let held = Held {
            file,
            due_ns: until_ns,
            watch,
            theirs: false,
        };
        self.held.insert(id, held);
        // Our own write was seen as well; what comes from now on is others'.
        self.take_events(false);
        Ok(())
    }

    /// The next moment at which something is to be thawed.
    pub fn next_due(&self) -> Option<u64> {
        self.held.values().map(|held| held.due_ns).min()
    }

    /// Thaws what is due.
    pub fn serve_due(&mut self, now_ns: u64) {
        let due: Vec<u64> = self
            .held
            .iter()
            .filter(|(_, held)| held.due_ns <= now_ns)
            .map(|(id, _)| *id)
            .collect();
        if due.is_empty() {
            return;
        }
        self.take_events(true);
        for id in due {
            self.thaw(id);
        }
    }

    /// Thaws everything that is ours.
    pub fn thaw_all(&mut self) {
        self.take_events(true);
        for id in self.held.keys().copied().collect::<Vec<_>>() {
            self.thaw(id);
        }
    }

    fn thaw(&mut self, id: u64) {
        let Some(held) = self.held.remove(&id) else {
            return;
        };
        if let (Some(inotify), Some(watch)) = (&self.inotify, held.watch) {
            // Gone with its file is fine.
            let _ = inotify::remove_watch(inotify, watch);
        }
        let thawed = if held.theirs {
            Ok(())
        } else {
            fs::write(&held.file, "0")
        };
        match thawed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                error!(file = %held.file.display(), %error, "cannot be thawed; it stays on record");
            }
            _ => {
                if let Err(error) = self.record().clear_frozen(id) {
                    error!(%error, "the record of what is frozen");
                }
            }
        }
    }

    fn record(&self) -> &Record {
        &self.kernel.launch().record
    }

    /// Reads what was written to the files since; `others` says whether it was others who did.
    fn take_events(&mut self, others: bool) {
        let Some(inotify) = &self.inotify else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        let mut seen = Vec::new();
        while let Ok(event) = reader.next() {
            seen.push(event.wd());
        }
        if others {
            for held in self.held.values_mut() {
                held.theirs |= held.watch.is_some_and(|watch| seen.contains(&watch));
            }
        }
    }
}

fn is_frozen(file: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(file)?.trim_ascii() == "1")
}

/// Thaws what a daemon that is gone has frozen; returns how much.
pub fn thaw_leftovers(record: &Record, hierarchy: &Hierarchy) -> usize {
    let mut count = 0;
    for id in record.frozen() {
        if let Some(path) = hierarchy.path(id)
            && let Ok(folder) = hierarchy.folder(&path)
        {
            match fs::write(folder.join(FILE), "0") {
                Ok(()) => count += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    error!(cgroup = path, %error, "cannot be thawed; it stays on record");
                    continue;
                }
            }
        }
        if let Err(error) = record.clear_frozen(id) {
            error!(%error, "the record of what is frozen");
        }
    }
    count
}
