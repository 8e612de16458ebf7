//! Giving back: what happens to charges when objects, files and processes end.
//!
//! The kernel side releases what a single call frees. Everything that frees more than it names is done here:
//! a freed device or client takes along what hangs below it, a process takes its clients along unless another one
//! still holds their files (see [`crate::open_files`]). [`Reaper`] waits until a process is really gone, files and all, because only then
//! has the driver the memory back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use gpuquota_common::map::{
    AccountKey, Client, DeviceKey, ORPHAN_CLIENT, Object, ObjectKey, PARKED, Process, is_context,
    kind,
};
use nix::{
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    time::clock_getcpuclockid,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tracing::{debug, warn};

use crate::{
    driver::nvidia,
    kernel::{Kernel, KernelError},
    open_files::{FileView, Holder},
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

/// What becomes of a client, and of what was made in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Its memory is back with the driver.
    Release,
    /// Its file lives on, in another process or in none ([`PARKED`]).
    Inherit {
        /// Who has it.
        tgid: u32,
        /// Under this descriptor.
        fd: u32,
    },
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

/// What objects hang below although it is not there any more: they were freed with it.
pub fn gone(objects: &BTreeMap<ObjectKey, Object>) -> BTreeSet<ObjectKey> {
    objects
        .iter()
        .filter(|(key, object)| {
            key.client != ORPHAN_CLIENT && !is_context(key.client) && object.kind != kind::CLIENT
        })
        .flat_map(|(key, object)| {
            [object.parent, key.client].map(|handle| ObjectKey {
                client: key.client,
                handle,
            })
        })
        .filter(|above| !objects.contains_key(above))
        .collect()
}

/// What becomes of the clients in which processes that are gone have made something.
///
/// `objects` holds what they have made and the clients of that. `children` names, by dead process, the living ones that
/// were forked from it, directly or not.
pub fn fates(
    objects: &BTreeMap<ObjectKey, Object>,
    dead: &BTreeSet<u32>,
    children: &BTreeMap<u32, Vec<u32>>,
    view: &dyn ProcessView,
    files: &dyn FileView,
) -> BTreeMap<u32, Fate> {
    let used: BTreeSet<u32> = objects
        .keys()
        .map(|key| key.client)
        .filter(|client| *client != ORPHAN_CLIENT)
        .collect();
    used.into_iter()
        .map(|handle| {
            let client = objects.get(&ObjectKey {
                client: handle,
                handle,
            });
            let fate = match client {
                None => Fate::Release,
                // Made in the client of somebody who lives.
                Some(client) if !dead.contains(&client.tgid) => Fate::Inherit {
                    tgid: client.tgid,
                    fd: client.fd,
                },
                Some(client) if client.file != 0 => whereabouts(handle, client, files),
                // Not known which file it is: a child that has the control node under the same number has it.
                Some(client) => children
                    .get(&client.tgid)
                    .and_then(|children| {
                        children
                            .iter()
                            .copied()
                            .find(|child| view.holds_control(*child, client.fd))
                    })
                    .map_or(Fate::Release, |tgid| Fate::Inherit {
                        tgid,
                        fd: client.fd,
                    }),
            };
            (handle, fate)
        })
        .collect()
}

/// What becomes of a client that no living process is known to have.
fn whereabouts(handle: u32, client: &Object, files: &dyn FileView) -> Fate {
    if !files.is_open(client.file) {
        return Fate::Release;
    }
    match files.holder(handle, client.file) {
        Holder::Process { tgid, fd } => Fate::Inherit { tgid, fd },
        Holder::Unseen => Fate::Inherit {
            tgid: PARKED,
            fd: client.fd,
        },
        Holder::Nobody => Fate::Release,
    }
}

/// Releases what hangs below a freed object.
pub fn release_subtree(kernel: &Kernel, top: ObjectKey) -> Result<usize, KernelError> {
    let objects: BTreeMap<ObjectKey, Object> = kernel.objects_of(top.client).into_iter().collect();
    let keys = subtree(&objects, top);
    for key in &keys {
        kernel.release_object(*key)?;
    }
    Ok(keys.len())
}

/// Releases what processes had that are gone, or gives it to who has their files now.
pub fn release_processes(
    kernel: &Kernel,
    dead: &BTreeSet<u32>,
    view: &dyn ProcessView,
    files: &dyn FileView,
) -> Result<(), KernelError> {
    if dead.is_empty() {
        return Ok(());
    }
    let mut objects: BTreeMap<ObjectKey, Object> = kernel
        .objects_where(|client| client.mixed != 0 || dead.contains(&client.tgid))
        .into_iter()
        .filter(|(_, object)| dead.contains(&object.tgid))
        .collect();
    let clients: BTreeSet<ObjectKey> = objects
        .keys()
        .map(|key| ObjectKey {
            client: key.client,
            handle: key.client,
        })
        .collect();
    for key in clients {
        if let Some(client) = kernel.object(key) {
            objects.insert(key, client);
        }
    }
    let children = descendants(kernel, dead);
    let fates = fates(&objects, dead, &children, view, files);
    // What others have made in a client goes with it.
    let shared: BTreeSet<u32> = objects
        .iter()
        .filter(|(key, object)| {
            object.kind == kind::CLIENT
                && object.dups != 0
                && fates.get(&key.client) == Some(&Fate::Release)
        })
        .map(|(key, _)| key.client)
        .collect();
    if !shared.is_empty() {
        objects.extend(
            shared
                .into_iter()
                .flat_map(|client| kernel.objects_of(client)),
        );
    }
    for (key, object) in &objects {
        match fates.get(&key.client) {
            Some(Fate::Release) => kernel.release_object(*key)?,
            Some(Fate::Inherit { tgid, fd }) if dead.contains(&object.tgid) => {
                kernel.move_object(*key, *tgid, object.tenant, *fd)?;
                watch_heir(kernel, *tgid, object, view)?;
            }
            _ => {}
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
    debug!(?dead, ?fates, objects = objects.len(), "released");
    Ok(())
}

/// Sees to it that the end of a process is noticed to which a client came without a call of its own.
fn watch_heir(
    kernel: &Kernel,
    tgid: u32,
    object: &Object,
    view: &dyn ProcessView,
) -> Result<(), KernelError> {
    if tgid == PARKED || object.kind != kind::CLIENT || kernel.process(tgid).is_some() {
        return Ok(());
    }
    // One that is gone by now is found with the dead.
    let Some(started) = view.started(tgid) else {
        return Ok(());
    };
    let start_ns = started * (1_000_000_000 / ticks_per_second());
    kernel.adopt_process(tgid, start_ns, object.tenant, object.cgroup)
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

/// Those of the clients whose process lives and has let go of their file, and what becomes of them. No hook sees a file
/// closed.
pub fn loose_clients(
    kernel: &Kernel,
    clients: impl IntoIterator<Item = u32>,
    view: &dyn ProcessView,
    files: &dyn FileView,
) -> Vec<(ObjectKey, Fate)> {
    clients
        .into_iter()
        .filter_map(|client| {
            let key = ObjectKey {
                client,
                handle: client,
            };
            Some((key, kernel.object(key)?))
        })
        .filter(|(_, object)| object.kind == kind::CLIENT)
        .filter_map(|(key, client)| Some((key, loose(key.handle, &client, view, files)?)))
        .collect()
}

/// What becomes of a client; `None` if everything stays as it is.
fn loose(
    handle: u32,
    client: &Object,
    view: &dyn ProcessView,
    files: &dyn FileView,
) -> Option<Fate> {
    let parked = client.tgid == PARKED;
    // The dead are seen to elsewhere.
    if !parked && view.started(client.tgid).is_none() {
        return None;
    }
    if client.file != 0 && !files.is_open(client.file) {
        return Some(Fate::Release);
    }
    if !parked {
        if view.holds_control(client.tgid, client.fd) || view.holds_any_control(client.tgid) {
            return None;
        }
        if client.file == 0 {
            return Some(Fate::Release);
        }
    }
    match whereabouts(handle, client, files) {
        // On its way. Until it arrives, it stays with who has sent it.
        Fate::Inherit { tgid: PARKED, .. } => None,
        fate => Some(fate),
    }
}

/// Gives a client to who has its file now, with what its process has made in it.
pub fn hand_over(
    kernel: &Kernel,
    client: ObjectKey,
    (tgid, fd): (u32, u32),
    view: &dyn ProcessView,
) -> Result<(), KernelError> {
    let Some(before) = kernel.object(client) else {
        return Ok(());
    };
    let objects: Vec<(ObjectKey, Object)> = kernel
        .objects_of(client.client)
        .into_iter()
        .filter(|(_, object)| object.tgid == before.tgid)
        .collect();
    for (key, object) in objects {
        kernel.move_object(key, tgid, object.tenant, fd)?;
    }
    watch_heir(kernel, tgid, &before, view)
}

/// Who is in the ledger, as of one look. To go over a map takes as long as it is large, however little is in it: so a
/// look is made once, for all who ask.
#[derive(Debug)]
pub struct Roll {
    /// Processes that have spoken to the driver.
    pub processes: Vec<(u32, Process)>,
    /// Clients that have objects.
    pub clients: Vec<(u32, Client)>,
    /// Charged bytes.
    pub accounts: Vec<(AccountKey, u64)>,
}

impl Roll {
    /// Looks.
    pub fn call(kernel: &Kernel) -> Self {
        Self {
            processes: kernel.processes(),
            clients: kernel.clients().collect(),
            accounts: kernel.accounts().collect(),
        }
    }
}

/// Processes in the ledger that are gone, or whose number another process has now.
pub fn dead_processes(kernel: &Kernel, roll: &Roll, view: &dyn ProcessView) -> BTreeSet<u32> {
    let ticks = ticks_per_second();
    let known: BTreeSet<u32> = roll.processes.iter().map(|(tgid, _)| *tgid).collect();
    let mut dead: BTreeSet<u32> = roll
        .processes
        .iter()
        .filter(|(tgid, process)| match view.started(*tgid) {
            None => true,
            // proc shows the start in ticks; the kernel side has nanoseconds.
            Some(started) => {
                process.start_ns != 0 && started != process.start_ns / (1_000_000_000 / ticks)
            }
        })
        .map(|(tgid, _)| *tgid)
        .collect();
    // What a kernel-side release left behind while no daemon was there.
    let strangers: BTreeSet<u32> = roll
        .clients
        .iter()
        .filter(|(_, client)| client.mixed == 0)
        .map(|(_, client)| client.tgid)
        .chain(roll.accounts.iter().map(|(key, _)| key.tgid))
        .chain(
            kernel
                .objects_below(&roll.clients, |client| client.mixed != 0)
                .into_iter()
                .map(|(_, object)| object.tgid),
        )
        .filter(|tgid| !known.contains(tgid))
        .collect();
    dead.extend(
        strangers
            .into_iter()
            .filter(|tgid| *tgid != PARKED && view.started(*tgid).is_none()),
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

    /// CPU time that a process has used so far, all its threads together; `None` if it is gone.
    pub fn cpu_time(&self, tgid: u32) -> Option<Duration> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(tgid).ok()?);
        let used = clock_getcpuclockid(pid).ok()?.now().ok()?;
        Some(used.into())
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
    use std::time::Instant;

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
    fn cpu_time_is_that_of_the_process() {
        let processes = Proc {
            control: DeviceKey::default(),
        };
        let own = || processes.cpu_time(std::process::id()).expect("it runs");
        let before = own();
        let started = Instant::now();
        while own() < before + Duration::from_millis(20) {
            assert!(started.elapsed() < Duration::from_mins(1));
        }
        let mut other = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("a process that does nothing");
        let used = processes.cpu_time(other.id()).expect("it runs");
        assert!(used < Duration::from_secs(1), "{used:?}");
        other.kill().expect("killed");
        other.wait().expect("gone");
        assert_eq!(processes.cpu_time(other.id()), None);
    }

    #[test]
    fn a_device_takes_along_what_hangs_below_it() {
        assert_eq!(subtree(&tree(), key(2)), [key(2), key(3), key(4), key(5)]);
        assert_eq!(subtree(&tree(), key(CLIENT)).len(), 7);
    }

    #[test]
    fn what_hangs_below_something_gone_has_fallen() {
        let fallen = |objects: &BTreeMap<ObjectKey, Object>| -> BTreeSet<ObjectKey> {
            gone(objects)
                .into_iter()
                .flat_map(|top| subtree(objects, top))
                .collect()
        };
        let mut objects = tree();
        assert_eq!(gone(&objects), BTreeSet::new());
        objects.remove(&key(2));
        assert_eq!(gone(&objects), BTreeSet::from([key(2)]));
        // What hangs below those falls with them.
        assert_eq!(fallen(&objects), BTreeSet::from([key(3), key(4), key(5)]));
        objects.remove(&key(CLIENT));
        assert_eq!(gone(&objects), BTreeSet::from([key(2), key(CLIENT)]));
        assert_eq!(fallen(&objects).len(), objects.len());
        let orphan = ObjectKey {
            client: ORPHAN_CLIENT,
            handle: 9,
        };
        let of_context = gpuquota_common::map::context_key(10, 0);
        let apart = BTreeMap::from([
            (orphan, object(kind::MEMORY, 2, 10)),
            (of_context, object(kind::MEMORY, 2, 10)),
        ]);
        assert_eq!(gone(&apart), BTreeSet::new());
    }

    #[test]
    fn a_subtree_is_found_although_its_top_is_gone() {
        let mut objects = tree();
        objects.remove(&key(2));
        assert_eq!(subtree(&objects, key(2)), [key(3), key(4), key(5)]);
    }

    /// An open file that is where it is told to be.
    struct File(Option<Holder>);

    impl FileView for File {
        fn is_open(&self, file: u64) -> bool {
            assert_eq!(file, FILE);
            self.0.is_some()
        }
        fn holder(&self, client: u32, file: u64) -> Holder {
            assert_eq!((client, file), (CLIENT, FILE));
            self.0.expect("only open files are looked for")
        }
    }

    const FILE: u64 = 0xffff_8880_1234_5600;

    fn tree_with_file() -> BTreeMap<ObjectKey, Object> {
        let mut objects = tree();
        objects.get_mut(&key(CLIENT)).expect("a client").file = FILE;
        objects
    }

    fn fate(
        objects: &BTreeMap<ObjectKey, Object>,
        children: &[u32],
        holding: &[(u32, u32)],
        file: Option<Holder>,
    ) -> Fate {
        fates(
            objects,
            &BTreeSet::from([10]),
            &BTreeMap::from([(10, children.to_vec())]),
            &View(holding.iter().copied().collect()),
            &File(file),
        )[&CLIENT]
    }

    #[test]
    fn the_dead_are_released() {
        assert_eq!(fate(&tree(), &[], &[], None), Fate::Release);
        assert_eq!(fate(&tree_with_file(), &[], &[], None), Fate::Release);
    }

    #[test]
    fn a_child_that_holds_the_file_inherits() {
        let inherits = Fate::Inherit { tgid: 12, fd: 5 };
        assert_eq!(fate(&tree(), &[11, 12], &[(12, 5)], None), inherits);
    }

    #[test]
    fn a_child_that_holds_another_file_does_not() {
        assert_eq!(fate(&tree(), &[11], &[(11, 6)], None), Fate::Release);
    }

    #[test]
    fn whoever_holds_the_file_inherits() {
        let holder = Holder::Process { tgid: 77, fd: 3 };
        let fate = fate(&tree_with_file(), &[], &[], Some(holder));
        assert_eq!(fate, Fate::Inherit { tgid: 77, fd: 3 });
    }

    #[test]
    fn a_file_that_is_on_its_way_keeps_the_charge() {
        let fate = fate(&tree_with_file(), &[], &[], Some(Holder::Unseen));
        assert_eq!(
            fate,
            Fate::Inherit {
                tgid: PARKED,
                fd: 5
            }
        );
    }

    #[test]
    fn another_file_at_its_address_is_not_the_file() {
        // A child has the control node open under the same number, but that is not the file.
        let fate = fate(&tree_with_file(), &[11], &[(11, 5)], Some(Holder::Nobody));
        assert_eq!(fate, Fate::Release);
    }

    #[test]
    fn what_was_made_in_the_client_of_a_living_process_stays_with_that() {
        let mut objects = tree();
        objects.get_mut(&key(CLIENT)).expect("a client").tgid = 9;
        let fate = fate(&objects, &[], &[], None);
        assert_eq!(fate, Fate::Inherit { tgid: 9, fd: 5 });
    }

    #[test]
    fn a_living_process_keeps_its_client_until_the_file_is_closed_or_elsewhere() {
        struct Living(bool);
        impl ProcessView for Living {
            fn started(&self, tgid: u32) -> Option<u64> {
                (tgid == 10).then_some(1)
            }
            fn holds_control(&self, _tgid: u32, _fd: u32) -> bool {
                self.0
            }
            fn holds_any_control(&self, _tgid: u32) -> bool {
                self.0
            }
        }
        let mut client = tree_with_file()[&key(CLIENT)];
        let look =
            |client: &Object, holds, file| loose(CLIENT, client, &Living(holds), &File(file));
        let elsewhere = Holder::Process { tgid: 77, fd: 3 };
        assert_eq!(look(&client, true, Some(elsewhere)), None);
        assert_eq!(look(&client, false, Some(Holder::Unseen)), None);
        // Closed, although the process has other control files open.
        assert_eq!(look(&client, true, None), Some(Fate::Release));
        let inherits = Some(Fate::Inherit { tgid: 77, fd: 3 });
        assert_eq!(look(&client, false, Some(elsewhere)), inherits);
        client.tgid = PARKED;
        assert_eq!(look(&client, false, Some(Holder::Unseen)), None);
        assert_eq!(look(&client, false, Some(elsewhere)), inherits);
        assert_eq!(look(&client, false, None), Some(Fate::Release));
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
