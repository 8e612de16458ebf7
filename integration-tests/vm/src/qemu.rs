//! Runs the emulator and reads the guest's console.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use crate::Error;

/// Printed by the guest's init when everything is mounted and the script starts.
pub(crate) const READY: &str = "gpuquota-vm: ready";
/// Printed by the guest's init with the script's exit status behind it.
pub(crate) const STATUS: &str = "gpuquota-vm: status ";

/// How long the emulator may take to end by itself after the last thing that matters.
const GRACE: Duration = Duration::from_secs(5);

/// What is booted.
pub(crate) struct Machine<'a> {
    pub(crate) image: &'a Path,
    pub(crate) ramdisk: &'a Path,
    pub(crate) command_line: &'a str,
    pub(crate) memory_mib: u32,
    /// How long the kernel may take until init is ready.
    pub(crate) boot_limit: Duration,
    /// How long the script may run.
    pub(crate) script_limit: Duration,
    /// Receives the whole console as it comes.
    pub(crate) log: &'a Path,
}

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The script ended with this status.
    Status(i32),
    /// The kernel did not reach init.
    NotBooted(&'static str),
    /// The kernel died while the script ran.
    Died,
    /// The script did not end in time.
    Timeout,
}

/// A run's end and its console, with plain line ends.
pub(crate) struct Run {
    pub(crate) end: End,
    pub(crate) console: String,
}

/// Kills the emulator when the run is over, however it ended.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if it has already ended and been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots the machine and watches it until the script ended or it is clear that it will not.
pub(crate) fn boot(machine: &Machine<'_>) -> Result<Run, Error> {
    let mut log = File::create(machine.log).map_err(Error::file(machine.log))?;
    let mut emulator = start(machine)?;
    let lines = console_lines(&mut emulator.0);
    let mut watch = Watch::new(machine, Instant::now());
    let mut console = String::new();
    while !watch.over() {
        match lines.recv_timeout(watch.deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                log.write_all(line.as_bytes())
                    .map_err(Error::file(machine.log))?;
                console.push_str(&line);
                watch.line(line.trim_end(), Instant::now());
            }
            Err(RecvTimeoutError::Timeout) => watch.deadline_passed(),
            Err(RecvTimeoutError::Disconnected) => watch.ended(),
        }
    }
    Ok(Run {
        end: watch.end(),
        console,
    })
}

fn start(machine: &Machine<'_>) -> Result<Running, Error> {
    // setpriv ends the emulator with the thread that started it, also when a test run is killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]);
    // One processor: with two, the emulator now and then corrupts code that the kernel patches while booting.
    command.args(["-accel", "tcg,tb-size=256", "-cpu", "max", "-smp", "1"]);
    command.args([
        "-nodefaults",
        "-display",
        "none",
        "-serial",
        "stdio",
        "-no-reboot",
    ]);
    command.arg("-m").arg(machine.memory_mib.to_string());
    command
        .arg("-kernel")
        .arg(machine.image)
        .arg("-initrd")
        .arg(machine.ramdisk);
    // With -no-reboot, a panic then ends the emulator instead of eating the time limit.
    command.arg("-append").arg(format!(
        "console=ttyS0 panic=-1 oops=panic quiet {}",
        machine.command_line
    ));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let failed = |reason: String| Error::Tool {
        command: "qemu-system-x86_64".to_owned(),
        reason,
    };
    command
        .spawn()
        .map(Running)
        .map_err(|error| failed(error.to_string()))
}

/// The lines of the console, and of the emulator's own complaints, as they come. Read on threads so that waiting for one can
/// end at a deadline.
fn console_lines(emulator: &mut Child) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(stderr) = emulator.stderr.take() {
        forward_lines(stderr, sender.clone());
    }
    if let Some(stdout) = emulator.stdout.take() {
        forward_lines(stdout, sender);
    }
    receiver
}

fn forward_lines(from: impl Read + Send + 'static, to: Sender<String>) {
    thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        while reader
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            let text = String::from_utf8_lossy(&line).replace('\r', "");
            // The receiver is gone once the run is over.
            if to.send(text).is_err() {
                return;
            }
            line.clear();
        }
    });
}

/// What has been seen of a run so far, and until when to wait for more.
struct Watch {
    script_limit: Duration,
    deadline: Instant,
    ready: bool,
    panicked: bool,
    status: Option<i32>,
    stop: Option<Stop>,
}

/// Why there is nothing more to wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The emulator has closed the console.
    Ended,
    /// The deadline has passed.
    TimedOut,
}

impl Watch {
    fn new(machine: &Machine<'_>, now: Instant) -> Self {
        Self {
            script_limit: machine.script_limit,
            deadline: now + machine.boot_limit,
            ready: false,
            panicked: false,
            status: None,
            stop: None,
        }
    }

    fn over(&self) -> bool {
        self.stop.is_some()
    }

    fn line(&mut self, line: &str, now: Instant) {
        if line == READY {
            self.ready = true;
            self.deadline = now + self.script_limit;
        } else if let Some(status) = line.strip_prefix(STATUS).and_then(|text| text.parse().ok()) {
            self.status = Some(status);
            self.deadline = now + GRACE;
        } else if !self.panicked && line.contains("Kernel panic - not syncing") {
            self.panicked = true;
            self.deadline = self.deadline.min(now + GRACE);
        }
    }

    fn deadline_passed(&mut self) {
        self.stop = Some(Stop::TimedOut);
    }

    fn ended(&mut self) {
        self.stop = Some(Stop::Ended);
    }

    fn end(&self) -> End {
        let timed_out = self.stop == Some(Stop::TimedOut);
        match self.status {
            Some(status) => End::Status(status),
            None if self.ready && timed_out && !self.panicked => End::Timeout,
            None if self.ready => End::Died,
            None if self.panicked => End::NotBooted("it panicked"),
            None if timed_out => End::NotBooted("it hung"),
            None => End::NotBooted("the emulator ended early"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(lines: &[&str], after: fn(&mut Watch)) -> (End, Duration) {
        let start = Instant::now();
        let machine = Machine {
            image: Path::new(""),
            ramdisk: Path::new(""),
            command_line: "",
            memory_mib: 0,
            boot_limit: Duration::from_mins(1),
            script_limit: Duration::from_secs(30),
            log: Path::new(""),
        };
        let mut watch = Watch::new(&machine, start);
        for line in lines {
            watch.line(line, start);
        }
        after(&mut watch);
        assert!(watch.over());
        (watch.end(), watch.deadline - start)
    }

    const PANIC: &str = "[    2.0] Kernel panic - not syncing: Fatal exception";

    #[test]
    fn a_status_is_the_end_even_if_power_off_hangs() {
        assert_eq!(
            watch(&[READY, "hello", "gpuquota-vm: status 3"], Watch::ended).0,
            End::Status(3)
        );
        let (end, deadline) = watch(&[READY, "gpuquota-vm: status 0"], Watch::deadline_passed);
        assert_eq!((end, deadline), (End::Status(0), GRACE));
    }

    #[test]
    fn before_init_every_end_is_a_failed_boot() {
        assert_eq!(
            watch(&[PANIC], Watch::ended).0,
            End::NotBooted("it panicked")
        );
        assert_eq!(
            watch(&["early"], Watch::ended).0,
            End::NotBooted("the emulator ended early")
        );
        assert_eq!(
            watch(&[], Watch::deadline_passed),
            (End::NotBooted("it hung"), Duration::from_mins(1))
        );
    }

    #[test]
    fn a_panic_is_not_waited_out() {
        assert_eq!(
            watch(&[READY, PANIC], Watch::deadline_passed),
            (End::Died, GRACE)
        );
        assert_eq!(watch(&[READY], Watch::ended).0, End::Died);
    }

    #[test]
    fn the_script_has_its_own_limit() {
        assert_eq!(
            watch(&[READY, "hello"], Watch::deadline_passed),
            (End::Timeout, Duration::from_secs(30))
        );
    }

    #[test]
    fn a_marker_counts_only_as_a_whole_line() {
        assert_eq!(
            watch(&[READY, "gpuquota-vm: status many"], Watch::ended).0,
            End::Died
        );
        assert_eq!(
            watch(&["echo gpuquota-vm: ready"], Watch::ended).0,
            End::NotBooted("the emulator ended early")
        );
    }
}
