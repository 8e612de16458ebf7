//! Giving back: what happens to charges when objects, files and processes end.
//!
//! The kernel side releases what a single call frees. Everything that frees more than it names is done here:
//! a freed device or client takes along what hangs below it, a process takes its clients along unless a child
//! still holds their files. [`Reaper`] waits until a process is really gone, files and all, because only then
//! has the driver the memory back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::mpsc,
    thread,
};

use gpuquota_common::map::{
    AccountKey, DeviceKey, NO_TENANT, ORPHAN_CLIENT, Object, ObjectKey, kind,
};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tracing::{debug, warn};

use crate::{
    driver::nvidia,
    kernel::{Kernel, KernelError},
};

/// What the rest of the system has to be asked about processes; the seam for tests.
pub trait ProcessView {
    /// When the process was started, in clock ticks since boot; `None` if it is gone.
    fn started(&self, tgid: u32) -> Option<u64>;
    /// Whether this fd of the process is the driver's control node.
    fn holds_control(&self, tgid: u32, fd: u32) -> bool;
    /// Whether any fd of the process is the driver's control node.
    fn holds_any_control(&self, tgid: u32) -> bool;
}

/// What to do about one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposal {
    /// Its memory is back with the driver.
    Release(ObjectKey),
    /// Its file lives on in another process.
    Inherit(ObjectKey, u32),
}

/// Objects at and below `top`, by the parents they were made with.
///
/// A handle that is used again is a new object: something older than its parent hangs below the parent's
/// predecessor, which is gone, so it counts as below too.
pub fn subtree(objects: &BTreeMap<ObjectKey, Object>, top: ObjectKey) -> Vec<ObjectKey> {
    let range = ObjectKey {
        client: top.client,
        handle: 0,
    }..=ObjectKey {
        client: top.client,
        handle: u32::MAX,
    };
    if top.handle == top.client {
        return objects.range(range).map(|(key, _)| *key).collect();
    }
    let mut below = BTreeSet::from([top.handle]);
    // Trees are three or four levels deep: every round finds one.
    loop {
        let more: Vec<u32> = objects
            .range(range.clone())
            .filter(|(key, object)| below.contains(&object.parent) && !below.contains(&key.handle))
            .map(|(key, _)| key.handle)
            .collect();
        if more.is_empty() {
            break;
        }
        below.extend(more);
    }
    below
        .into_iter()
        .map(|handle| ObjectKey {
            client: top.client,
            handle,
        })
        .filter(|key| objects.contains_key(key))
        .collect()
}

/// What becomes of the objects of processes that are gone.
///
/// `children` names, by dead process, the living ones that were forked from it, directly or not.
pub fn dispose(
    objects: &BTreeMap<ObjectKey, Object>,
    dead: &BTreeSet<u32>,
    children: &BTreeMap<u32, Vec<u32>>,
    view: &dyn ProcessView,
) -> Vec<Disposal> {
    let mut heirs: BTreeMap<u32, Option<u32>> = BTreeMap::new();
    for (key, object) in objects {
        if object.kind == kind::CLIENT && dead.contains(&object.tgid) {
            let heir = children.get(&object.tgid).and_then(|children| {
                children
                    .iter()
                    .copied()
                    .find(|child| view.holds_control(*child, object.fd))
            });
            heirs.insert(key.client, heir);
        }
    }
    objects
        .iter()
        .filter(|(key, object)| dead.contains(&object.tgid) && key.client != ORPHAN_CLIENT)
        .map(|(key, _)| match heirs.get(&key.client).copied().flatten() {
            Some(heir) => Disposal::Inherit(*key, heir),
            None => Disposal::Release(*key),
        })
        .collect()
}

/// Releases what hangs below a freed object.
pub fn release_subtree(kernel: &Kernel, top: ObjectKey) -> Result<usize, KernelError> {
    let objects: BTreeMap<ObjectKey, Object> = kernel
        .objects()
        .filter(|(key, _)| key.client == top.client)
        .collect();
    let keys = subtree(&objects, top);
    for key in &keys {
        kernel.release_object(*key)?;
    }
    Ok(keys.len())
}

/// Releases what processes had that are gone.
pub fn release_processes(
    kernel: &Kernel,
    dead: &BTreeSet<u32>,
    view: &dyn ProcessView,
) -> Result<(), KernelError> {
    if dead.is_empty() {
        return Ok(());
    }
    let objects: BTreeMap<ObjectKey, Object> = kernel
        .objects()
        .filter(|(_, object)| dead.contains(&object.tgid))
        .collect();
    let children = descendants(kernel, dead);
    let mut heirs = BTreeSet::new();
    for disposal in dispose(&objects, dead, &children, view) {
        match disposal {
            Disposal::Release(key) => kernel.release_object(key)?,
            Disposal::Inherit(key, heir) => {
                let tenant = objects.get(&key).map_or(NO_TENANT, |object| object.tenant);
                kernel.move_object(key, heir, tenant)?;
                heirs.insert(heir);
            }
        }
    }
    let accounts: Vec<AccountKey> = kernel
        .accounts()
        .map(|(key, _)| key)
        .filter(|key| dead.contains(&key.tgid))
        .collect();
    for key in accounts {
        kernel.release_account(key)?;
    }
    for tgid in dead {
        kernel.forget_process(*tgid)?;
    }
    debug!(?dead, ?heirs, objects = objects.len(), "released");
    Ok(())
}

/// Living processes forked from the dead ones, directly or through others.
fn descendants(kernel: &Kernel, dead: &BTreeSet<u32>) -> BTreeMap<u32, Vec<u32>> {
    let processes: BTreeMap<u32, u32> = kernel
        .processes()
        .into_iter()
        .map(|(tgid, process)| (tgid, process.forked_from))
        .collect();
    let mut found: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for tgid in processes.keys().filter(|tgid| !dead.contains(tgid)) {
        let mut at = *tgid;
        // A chain longer than this is no chain of processes.
        for _ in 0..64 {
            match processes.get(&at) {
                Some(parent) if *parent != 0 && *parent != at => at = *parent,
                _ => break,
            }
            if dead.contains(&at) {
                found.entry(at).or_default().push(*tgid);
            }
        }
    }
    found
}

/// Clients of living processes whose file is closed: released by nothing that a hook can see.
pub fn closed_clients(kernel: &Kernel, view: &dyn ProcessView) -> Vec<ObjectKey> {
    kernel
        .objects()
        .filter(|(_, object)| object.kind == kind::CLIENT)
        .filter(|(_, object)| view.started(object.tgid).is_some())
        .filter(|(_, object)| {
            !view.holds_control(object.tgid, object.fd) && !view.holds_any_control(object.tgid)
        })
        .map(|(key, _)| key)
        .collect()
}

/// Processes in the ledger that are gone, or whose number another process has now.
pub fn dead_processes(kernel: &Kernel, view: &dyn ProcessView) -> BTreeSet<u32> {
    let ticks = ticks_per_second();
    let mut dead: BTreeSet<u32> = kernel
        .processes()
        .into_iter()
        .filter(|(tgid, process)| match view.started(*tgid) {
            None => true,
            // proc shows the start in ticks; the kernel side has nanoseconds.
            Some(started) => {
                process.start_ns != 0 && started != process.start_ns / (1_000_000_000 / ticks)
            }
        })
        .map(|(tgid, _)| tgid)
        .collect();
    let known: BTreeSet<u32> = kernel
        .processes()
        .into_iter()
        .map(|(tgid, _)| tgid)
        .collect();
    // What a kernel-side release left behind while no daemon was there.
    dead.extend(
        kernel
            .objects()
            .map(|(_, object)| object.tgid)
            .chain(kernel.accounts().map(|(key, _)| key.tgid))
            .filter(|tgid| !known.contains(tgid) && view.started(*tgid).is_none()),
    );
    dead
}

fn ticks_per_second() -> u64 {
    // SAFETY: no memory is involved.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks)
        .ok()
        .filter(|ticks| *ticks > 0)
        .unwrap_or(100)
}

/// Processes as `/proc` shows them.
#[derive(Debug)]
pub struct Proc {
    control: DeviceKey,
}

impl Proc {
    /// `control` is the driver's control node.
    pub fn new(control: &Path) -> io::Result<Self> {
        Ok(Self {
            control: nvidia::key_of(control)?,
        })
    }

    /// The control node.
    pub fn control(&self) -> DeviceKey {
        self.control
    }

    /// Nanoseconds since boot as the ticks in which `/proc` shows the start of a process; `None` for 0, unknown.
    pub fn ticks(&self, start_ns: u64) -> Option<u64> {
        (start_ns != 0).then(|| start_ns / (1_000_000_000 / ticks_per_second()))
    }

    /// The opposite of [`Proc::ticks`].
    pub fn start_ns(&self, ticks: u64) -> u64 {
        ticks * (1_000_000_000 / ticks_per_second())
    }

    fn is_control(&self, path: &Path) -> bool {
        nvidia::key_of(path).is_ok_and(|key| key == self.control)
    }
}

impl ProcessView for Proc {
    fn started(&self, tgid: u32) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{tgid}/stat")).ok()?;
        // The name in the second field may hold anything; what follows the last bracket is field 3 on.
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split(' ').collect();
        let [state, threads, started] = [3, 20, 22].map(|field| fields.get(field - 3).copied());
        // A zombie has no files any more, unless it is only the first thread that has ended.
        if matches!(state?, "Z" | "X") && threads?.parse::<u32>().ok()? <= 1 {
            return None;
        }
        started?.parse().ok()
    }

    fn holds_control(&self, tgid: u32, fd: u32) -> bool {
        self.is_control(Path::new(&format!("/proc/{tgid}/fd/{fd}")))
    }

    fn holds_any_control(&self, tgid: u32) -> bool {
        let Ok(entries) = fs::read_dir(format!("/proc/{tgid}/fd")) else {
            // A process that cannot be looked at keeps what it has.
            return fs::metadata(format!("/proc/{tgid}")).is_ok();
        };
        entries
            .filter_map(Result::ok)
            .any(|entry| self.is_control(&entry.path()))
    }
}

/// Waits for the end of processes.
pub struct Reaper {
    watch: mpsc::Sender<u32>,

    wake: OwnedFd,
}

impl Reaper {
    /// Starts the thread; `gone` is called with processes that are gone, files and all.
    pub fn spawn(gone: impl FnMut(BTreeSet<u32>) + Send + 'static) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let wake: OwnedFd = nix::sys::eventfd::EventFd::from_flags(
            nix::sys::eventfd::EfdFlags::EFD_CLOEXEC | nix::sys::eventfd::EfdFlags::EFD_NONBLOCK,
        )?
        .into();
        epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        let (watch, watched) = mpsc::channel();
        let woken = wake.try_clone()?;
        thread::Builder::new()
            .name("reaper".into())
            .spawn(move || reap(&epoll, &woken, &watched, gone))?;
        Ok(Self { watch, wake })
    }

    /// Waits for the end of this process too. One that is gone already is reported at once.
    pub fn watch(&self, tgid: u32) {
        if self.watch.send(tgid).is_ok() {
            // Only a counter at its maximum refuses, and then the thread is awake anyway.
            let _ = nix::unistd::write(self.wake.as_fd(), &1u64.to_ne_bytes());
        }
    }
}

/// Epoll data of the wake-up; no process id is that large.
const WAKE: u64 = u64::MAX;

fn reap(
    epoll: &Epoll,
    wake: &OwnedFd,
    watched: &mpsc::Receiver<u32>,
    mut gone: impl FnMut(BTreeSet<u32>),
) {
    let mut open: BTreeMap<u32, OwnedFd> = BTreeMap::new();
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(nix::Error::EINTR) => continue,
            Err(error) => {
                warn!(%error, "cannot wait for processes; the reconciler finds them");
                return;
            }
        };
        let mut ended = BTreeSet::new();
        for event in &events[..count] {
            match u32::try_from(event.data()) {
                Ok(tgid) => {
                    // Closing the descriptor takes it off the epoll set.
                    open.remove(&tgid);
                    ended.insert(tgid);
                }
                Err(_) => drop(nix::unistd::read(wake.as_fd(), &mut [0; 8])),
            }
        }
        loop {
            match watched.try_recv() {
                Ok(tgid) if open.contains_key(&tgid) => {}
                Ok(tgid) => match pidfd(tgid) {
                    Ok(fd) => {
                        let event = EpollEvent::new(EpollFlags::EPOLLIN, u64::from(tgid));
                        match epoll.add(&fd, event) {
                            Ok(()) => drop(open.insert(tgid, fd)),
                            Err(error) => warn!(tgid, %error, "cannot wait for a process"),
                        }
                    }
                    Err(_) => {
                        ended.insert(tgid);
                    }
                },
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
        }
        if !ended.is_empty() {
            gone(ended);
        }
    }
}

/// A descriptor that becomes readable when the process has ended; its files are closed before that.
fn pidfd(tgid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(tgid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: u32 = 0xc1d0_0001;

    fn key(handle: u32) -> ObjectKey {
        ObjectKey {
            client: CLIENT,
            handle,
        }
    }

    fn object(kind: u32, parent: u32, tgid: u32) -> Object {
        Object {
            kind,
            parent,
            tgid,
            fd: 5,
            ..Object::default()
        }
    }

    fn tree() -> BTreeMap<ObjectKey, Object> {
        BTreeMap::from([
            (key(CLIENT), object(kind::CLIENT, CLIENT, 10)),
            (key(2), object(kind::DEVICE, CLIENT, 10)),
            (key(3), object(kind::SUBDEVICE, 2, 10)),
            (key(4), object(kind::MEMORY, 2, 10)),
            (key(5), object(kind::MEMORY, 3, 10)),
            (key(6), object(kind::DEVICE, CLIENT, 10)),
            (key(7), object(kind::MEMORY, 6, 10)),
        ])
    }

    struct View(BTreeSet<(u32, u32)>);

    impl ProcessView for View {
        fn started(&self, _tgid: u32) -> Option<u64> {
            None
        }
        fn holds_control(&self, tgid: u32, fd: u32) -> bool {
            self.0.contains(&(tgid, fd))
        }
        fn holds_any_control(&self, tgid: u32) -> bool {
            self.0.iter().any(|(holder, _)| *holder == tgid)
        }
    }

    #[test]
    fn a_device_takes_along_what_hangs_below_it() {
        assert_eq!(subtree(&tree(), key(2)), [key(2), key(3), key(4), key(5)]);
        assert_eq!(subtree(&tree(), key(CLIENT)).len(), 7);
    }

    #[test]
    fn a_subtree_is_found_although_its_top_is_gone() {
        let mut objects = tree();
        objects.remove(&key(2));
        assert_eq!(subtree(&objects, key(2)), [key(3), key(4), key(5)]);
    }

    #[test]
    fn the_dead_are_released() {
        let found = dispose(
            &tree(),
            &BTreeSet::from([10]),
            &BTreeMap::new(),
            &View(BTreeSet::new()),
        );
        assert_eq!(found.len(), 7);
        assert!(
            found
                .iter()
                .all(|disposal| matches!(disposal, Disposal::Release(_)))
        );
    }

    #[test]
    fn a_child_that_holds_the_file_inherits() {
        let children = BTreeMap::from([(10, vec![11, 12])]);
        let view = View(BTreeSet::from([(12, 5)]));
        let found = dispose(&tree(), &BTreeSet::from([10]), &children, &view);
        assert!(
            found
                .iter()
                .all(|disposal| matches!(disposal, Disposal::Inherit(_, 12)))
        );
    }

    #[test]
    fn a_child_that_holds_another_file_does_not() {
        let children = BTreeMap::from([(10, vec![11])]);
        let view = View(BTreeSet::from([(11, 6)]));
        let found = dispose(&tree(), &BTreeSet::from([10]), &children, &view);
        assert!(
            found
                .iter()
                .all(|disposal| matches!(disposal, Disposal::Release(_)))
        );
    }

    #[test]
    fn the_end_of_a_process_is_noticed() {
        let (sender, receiver) = mpsc::channel();
        let reaper = Reaper::spawn(move |gone| drop(sender.send(gone))).expect("a thread");
        let mut child = std::process::Command::new("sleep")
            .arg("0.05")
            .spawn()
            .expect("sleep");
        reaper.watch(child.id());
        let gone = receiver
            .recv_timeout(std::time::Duration::from_secs(5))
            .expect("noticed");
        assert_eq!(gone, BTreeSet::from([child.id()]));
        child.wait().expect("reaped");
        reaper.watch(child.id());
        let gone = receiver
            .recv_timeout(std::time::Duration::from_secs(5))
            .expect("at once");
        assert_eq!(gone, BTreeSet::from([child.id()]));
    }
}
