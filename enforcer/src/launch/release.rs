//! Nobody may stay stopped because the daemon is gone: whoever is left continues them.
//!
//! Three of them do: the daemon's guard, a process that outlives it ([`guard`]); the next daemon, before it does
//! anything else; and `gpuquotad --release-all`, which systemd runs when the daemon has ended ([`everybody`]).

use std::{
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use gpuquota_common::launch::{Calls, HEARTBEAT_STALE_NS, Slot};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{SigHandler, Signal},
};
use tracing::{info, warn};

use super::{
    freezer,
    process::{GoOnError, Process, started, state},
    stopper::Continuation,
};
use crate::{
    cgroup::Hierarchy,
    enforcer::monotonic_ns,
    kernel::{
        KernelError,
        launch::{MAPS, Record},
    },
    time::release::Whereabouts,
};

/// The argument with which the daemon starts its guard.
pub const GUARD_ARGUMENT: &str = "--launch-guard";

/// A launch may be in the probe while the heartbeat is taken away: the guard looks again for so long.
const AFTERWARDS: Duration = Duration::from_millis(1500);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(20);
/// How often the guard of a living daemon looks whether it does its work.
const WATCH: Duration = Duration::from_millis(250);
/// A process that stands still without a stop on record, and was stopped by us so short a time ago, was stopped while
/// its daemon died.
const RECENT_NS: u64 = 5_000_000_000;

/// Whether a process is still stopped by us, as far as the record tells.
fn is_held(slot: &Slot, calls: &Calls, continued: u64, now_ns: u64) -> bool {
    if calls.stops == 0 || started(slot.tgid) != Some(slot.started) {
        return false;
    }
    let recently = now_ns.saturating_sub(calls.stopped_ns) < RECENT_NS;
    calls.stops != continued || (recently && state(slot.tgid) == Some('T'))
}

/// Continues everybody that the record says is stopped by us; returns how many.
///
/// The caller has taken the heartbeat away, or is the daemon and has no probes yet: nobody is stopped meanwhile.
pub fn everybody(record: &Record, hierarchy: &Hierarchy) -> Result<usize, KernelError> {
    let mut count = freezer::thaw_leftovers(record, hierarchy);
    for (at, slot) in record.slots() {
        let calls = record.calls(at)?;
        if !is_held(&slot, &calls, record.continued(at)?, monotonic_ns()) {
            continue;
        }
        match release(record, at, &slot) {
            Ok(()) => count += 1,
            Err(error) => warn!(pid = slot.tgid, %error, "could not be continued"),
        }
    }
    Ok(count)
}

fn release(record: &Record, at: u32, slot: &Slot) -> Result<(), GoOnError> {
    let process = match Process::open_started(slot.tgid, slot.started) {
        Ok(process) => process,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let calls = process.go_on(record, at, Continuation::recovery())?;
    record.set_continued(at, calls.stops)?;
    Ok(())
}

/// Takes the heartbeat away, so that nobody is stopped any more, and continues everybody.
pub fn all_for_good(record: &Record, hierarchy: &Hierarchy) -> Result<usize, KernelError> {
    record.update_settings(|word| {
        word.heartbeat_ns = 0;
        word.helper_tgid = std::process::id();
    })?;
    everybody(record, hierarchy)
}

/// The daemon's end of the line to its guard: the guard sees it close, whatever the daemon dies of.
#[derive(Debug)]
pub struct Line {
    _line: OwnedFd,
    guard: Child,
}

impl Line {
    /// Process id of the guard.
    pub fn guard(&self) -> u32 {
        self.guard.id()
    }

    /// Whether the guard is there.
    pub fn is_up(&mut self) -> bool {
        matches!(self.guard.try_wait(), Ok(None))
    }
}

/// Starts the guard of this process, which also thaws what is frozen on the GPUs.
pub fn start_guard(
    record: &Record,
    hierarchy: &Hierarchy,
    frozen: Option<&Whereabouts>,
) -> io::Result<Line> {
    let ids = record.ids().map(|id| id.to_string()).join(",");
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(GUARD_ARGUMENT)
        .arg(ids)
        .arg(hierarchy.root())
        .args(frozen.map(|frozen| &frozen.pins))
        .args(frozen.map(|frozen| &frozen.device_dir))
        .arg0("gpuquotad: launch guard")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .current_dir("/");
    // SAFETY: setsid is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            // What is sent to the group or the terminal of the daemon is not for its guard.
            nix::unistd::setsid().map(drop).map_err(io::Error::from)
        });
    }
    let mut child = command.spawn()?;
    let line = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
    Ok(Line {
        _line: line.into(),
        guard: child,
    })
}

/// The whole life of the guard: waits for the daemon's end, or until its heartbeat stops, and continues everybody.
///
/// `ids` are those of [`Record::ids`], separated by commas; `root` is where cgroups are mounted; `frozen` says where it
/// is written what is frozen on the GPUs.
pub fn guard(ids: &str, root: &Path, frozen: Option<&Whereabouts>) -> anyhow::Result<()> {
    let ids: Vec<u32> = ids.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let ids: [u32; MAPS] = ids
        .try_into()
        .map_err(|_| anyhow::anyhow!("{MAPS} ids of maps are expected"))?;
    outlive_signals().context("ignoring signals")?;
    let record = Record::by_ids(ids)?;
    let hierarchy = Hierarchy::open(Some(root))?;
    let mut line = io::stdin();
    loop {
        let mut fds = [PollFd::new(line.as_fd(), PollFlags::POLLIN)];
        let patience = PollTimeout::try_from(WATCH).unwrap_or(PollTimeout::ZERO);
        let ready = poll(&mut fds, patience).unwrap_or(0);
        // Nothing is ever written: readable means closed.
        if ready > 0 && line.read(&mut [0]).unwrap_or(0) == 0 {
            break;
        }
        let silent = monotonic_ns().saturating_sub(record.settings()?.heartbeat_ns);
        if silent > 2 * HEARTBEAT_STALE_NS {
            // It lives and does nothing: stopped, or stuck. The programs stop nobody by now.
            everybody(&record, &hierarchy)?;
            if let Some(frozen) = frozen {
                frozen.thaw();
            }
        }
    }
    let mut count = all_for_good_once(&record, &hierarchy)?;
    // A new daemon has thawed what was left before it started its own guard. Thawing takes its time with a driver that
    // is busy, so it comes after what is quick.
    if let Some(frozen) = frozen
        && record.settings()?.helper_tgid == std::process::id()
    {
        frozen.thaw();
        count += everybody(&record, &hierarchy)?;
    }
    let end = Instant::now() + AFTERWARDS;
    while Instant::now() < end {
        std::thread::sleep(LOOK);
        // A new daemon has its own guard.
        if record.settings()?.helper_tgid != std::process::id() {
            break;
        }
        count += everybody(&record, &hierarchy)?;
    }
    if count > 0 {
        info!(count, "continued what the daemon had stopped");
    }
    Ok(())
}

/// Signals that end a service go to all of it; the guard ends when the daemon has.
fn outlive_signals() -> nix::Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // SAFETY: no handler of ours runs.
        unsafe { nix::sys::signal::signal(signal, SigHandler::SigIgn) }?;
    }
    Ok(())
}

/// As [`all_for_good`], unless a new daemon has its own guard already.
fn all_for_good_once(record: &Record, hierarchy: &Hierarchy) -> Result<usize, KernelError> {
    if record.settings()?.helper_tgid != std::process::id() {
        return Ok(0);
    }
    all_for_good(record, hierarchy)
}
