//! Listening for faults: the driver's tracepoint, the kernel's log, or NVML, on a thread of its own.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use gpuquota_common::fault::XidRecord;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvml_wrapper::{Nvml, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError};
use tracing::warn;

use super::{Device, Fault, Source, message};
use crate::config::FaultSource;

/// How long a thread waits at most before it looks whether it should end. Nobody waits for that.
const LOOK: Duration = Duration::from_secs(10);
/// Pause where a log has no way to say that there is more, and after an error.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause before NVML is asked again after an error.
const NVML_PAUSE: Duration = Duration::from_secs(5);
/// Longest record of the kernel's log.
const RECORD: usize = 8192;

/// Which source is used, and why others are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The one in use.
    pub used: Option<Source>,
    /// Those that come first and are not.
    pub refused: Vec<(Source, String)>,
}

/// Tries the sources that are wanted in their order, until one opens.
pub fn choose<T>(
    wanted: FaultSource,
    mut open: impl FnMut(Source) -> Result<T, String>,
) -> (Choice, Option<T>) {
    let order: &[Source] = match wanted {
        FaultSource::Auto => &[Source::Tracepoint, Source::KernelLog, Source::Nvml],
        FaultSource::Tracepoint => &[Source::Tracepoint],
        FaultSource::KernelLog => &[Source::KernelLog],
        FaultSource::Nvml => &[Source::Nvml],
        FaultSource::Off => &[],
    };
    let mut choice = Choice::default();
    for source in order {
        match open(*source) {
            Ok(opened) => {
                choice.used = Some(*source);
                return (choice, Some(opened));
            }
            Err(why) => choice.refused.push((*source, why)),
        }
    }
    (choice, None)
}

/// A source that can be listened to.
pub enum Listener {
    /// The ring of the tracepoint's program.
    Tracepoint(RingBuf<MapData>),
    /// The log.
    KernelLog(KernelLog),
    /// Where the library is.
    Nvml(Option<PathBuf>),
}

impl Listener {
    /// Hands every fault to `sink` until `stop` says so.
    pub fn run(self, sink: impl Fn(Fault), stop: impl Fn() -> bool) {
        match self {
            Self::Tracepoint(ring) => follow_ring(ring, sink, stop),
            Self::KernelLog(log) => log.follow(sink, stop),
            Self::Nvml(library) => follow_nvml(library.as_deref(), sink, stop),
        }
    }
}

fn wait_for(fd: BorrowedFd<'_>) {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    // An interrupted wait only means an early look.
    let _ = poll(
        &mut fds,
        PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO),
    );
}

fn follow_ring(mut ring: RingBuf<MapData>, sink: impl Fn(Fault), stop: impl Fn() -> bool) {
    let fd = ring.as_raw_fd();
    while !stop() {
        // SAFETY: `ring` owns the descriptor and lives as long as this loop.
        wait_for(unsafe { BorrowedFd::borrow_raw(fd) });
        while let Some(item) = ring.next() {
            if let Some(fault) = fault_of(&item) {
                sink(fault);
            } else {
                warn!("the driver's tracepoint told a fault that makes no sense");
            }
        }
    }
}

/// A fault from a record of the tracepoint's program.
pub fn fault_of(bytes: &[u8]) -> Option<Fault> {
    if bytes.len() != size_of::<XidRecord>() {
        return None;
    }
    // SAFETY: the length was checked, and every bit pattern is a record.
    let record: XidRecord = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
    message::from_fields(&text(&record.device), record.code, &text(&record.message))
}

/// Up to the NUL; the driver's text holds names of processes, which need not be UTF-8.
fn text(bytes: &[u8]) -> String {
    let length = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// The kernel's log, from its end on.
#[derive(Debug)]
pub struct KernelLog {
    file: File,
    /// The part of a record that was read without its end.
    rest: Vec<u8>,
}

impl KernelLog {
    /// Opens a log as `/dev/kmsg` writes it: one record a line, what belongs to it on lines that begin with a space.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        // A pipe has no end to go to.
        let _ = file.seek(SeekFrom::End(0));
        Ok(Self {
            file,
            rest: Vec::new(),
        })
    }

    fn follow(mut self, sink: impl Fn(Fault), stop: impl Fn() -> bool) {
        while !stop() {
            match self.read() {
                Ok(Some(faults)) => faults.into_iter().for_each(&sink),
                Ok(None) => {
                    wait_for(self.file.as_fd());
                    // A regular file is always ready.
                    thread::sleep(PAUSE);
                }
                Err(error) => {
                    warn!(%error, "the kernel's log cannot be read");
                    thread::sleep(NVML_PAUSE);
                }
            }
        }
    }

    /// What has come; `None` if nothing has.
    fn read(&mut self) -> io::Result<Option<Vec<Fault>>> {
        let mut buffer = [0; RECORD];
        match self.file.read(&mut buffer) {
            Ok(0) => Ok(None),
            Ok(length) => {
                self.rest.extend_from_slice(&buffer[..length]);
                Ok(Some(self.records()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // Records were overwritten before they were read; the next read goes on after them.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => Ok(Some(Vec::new())),
            Err(error) => Err(error),
        }
    }

    fn records(&mut self) -> Vec<Fault> {
        let mut faults = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            faults.extend(message::from_record(&String::from_utf8_lossy(&line[..end])));
        }
        // No record is so long.
        if self.rest.len() > RECORD {
            self.rest.clear();
        }
        faults
    }
}

/// Whether NVML tells of faults at all.
pub fn nvml_offers(library: Option<&Path>) -> Result<(), String> {
    let nvml = open_nvml(library).map_err(|error| error.to_string())?;
    register(&nvml)
        .map(drop)
        .map_err(|error| format!("NVML offers no events: {error}"))
}

fn open_nvml(library: Option<&Path>) -> Result<Nvml, NvmlError> {
    let name = library.map_or(std::ffi::OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
    Nvml::builder().lib_path(name).init()
}

fn register(nvml: &Nvml) -> Result<nvml_wrapper::EventSet<'_>, NvmlError> {
    let mut set = nvml.create_event_set()?;
    for index in 0..nvml.device_count()? {
        set = nvml
            .device_by_index(index)?
            .register_events(EventTypes::CRITICAL_XID_ERROR, set)
            .map_err(|with_set| with_set.error)?;
    }
    Ok(set)
}

fn follow_nvml(library: Option<&Path>, sink: impl Fn(Fault), stop: impl Fn() -> bool) {
    let mut reported = false;
    while !stop() {
        let outcome = open_nvml(library).and_then(|nvml| {
            let set = register(&nvml)?;
            wait_for_events(&set, &sink, &stop)
        });
        if let Err(error) = outcome {
            if !reported {
                warn!(%error, "NVML does not tell of GPU faults");
            }
            reported = true;
            thread::sleep(NVML_PAUSE);
        }
    }
}

fn wait_for_events(
    set: &nvml_wrapper::EventSet<'_>,
    sink: &impl Fn(Fault),
    stop: &impl Fn() -> bool,
) -> Result<(), NvmlError> {
    let patience = u32::try_from(LOOK.as_millis()).unwrap_or(u32::MAX);
    while !stop() {
        let event = match set.wait(patience) {
            Ok(event) => event,
            Err(NvmlError::Timeout) => continue,
            Err(error) => return Err(error),
        };
        let xid = match event.event_data {
            Some(XidError::Value(xid)) => u32::try_from(xid).unwrap_or(0),
            // NVML has no code for it.
            Some(XidError::Unknown) => 0,
            None => continue,
        };
        sink(Fault {
            device: Device::Index(event.device.index()?),
            xid,
            pid: None,
            text: String::new(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, sync::Mutex};

    use super::*;

    #[test]
    fn the_first_that_opens_is_used_and_the_others_say_why_not() {
        let (choice, opened) = choose(FaultSource::Auto, |source| match source {
            Source::Tracepoint => Err("no tracepoint".to_owned()),
            other => Ok(other),
        });
        assert_eq!(opened, Some(Source::KernelLog));
        assert_eq!(choice.used, opened);
        assert_eq!(
            choice.refused,
            [(Source::Tracepoint, "no tracepoint".to_owned())]
        );
        let (choice, _) = choose(FaultSource::Nvml, |source| Err::<(), _>(source.to_string()));
        assert_eq!(choice.used, None);
        assert_eq!(choice.refused, [(Source::Nvml, "nvml".to_owned())]);
        let (choice, _) = choose(FaultSource::Off, |_| Ok(()));
        assert_eq!(choice, Choice::default());
    }

    #[test]
    fn a_log_is_read_from_its_end_on_record_by_record() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let line = |pid: u32| {
            format!("3,1,1,-;NVRM: Xid (PCI:0000:41:00): 31, pid={pid}, name=x\n DEVICE=x\n")
        };
        file.write_all(line(1).as_bytes()).expect("written");
        let mut log = KernelLog::open(file.path()).expect("opened");
        assert!(log.read().expect("read").is_none());
        let (first, second) = (line(2), line(3));
        let all = format!("{first}12,1,1,-;{}{second}", &line(9)[8..]);
        let (before, after) = all.split_at(first.len() + 20);
        let mut pids = Vec::new();
        for part in [before, after] {
            file.write_all(part.as_bytes()).expect("written");
            let faults = log.read().expect("read").expect("something");
            pids.extend(faults.into_iter().filter_map(|fault| fault.pid));
        }
        assert_eq!(pids, [2, 3]);
    }

    #[test]
    fn a_log_without_line_ends_takes_no_memory() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let mut log = KernelLog::open(file.path()).expect("opened");
        file.write_all("x".repeat(100_000).as_bytes())
            .expect("written");
        while log.read().expect("read").is_some() {}
        assert!(log.rest.len() <= RECORD);
    }

    #[test]
    fn records_of_the_program_are_read() {
        let mut record = XidRecord {
            code: 31,
            ..XidRecord::default()
        };
        record.device[..12].copy_from_slice(b"0000:41:00.0");
        record.message[..17].copy_from_slice(b"pid=7, name=\xff, Ch");
        // SAFETY: a plain structure without padding.
        let bytes: [u8; size_of::<XidRecord>()] = unsafe { std::mem::transmute(record) };
        let fault = fault_of(&bytes).expect("a fault");
        assert_eq!((fault.xid, fault.pid), (31, Some(7)));
        assert_eq!(fault_of(&bytes[1..]), None);
        assert_eq!(fault_of(&[0; size_of::<XidRecord>()]), None, "no device");
    }

    #[test]
    fn a_listener_ends_when_it_is_told() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let log = KernelLog::open(file.path()).expect("opened");
        let asked = Mutex::new(0);
        log.follow(
            |_| {},
            || {
                let mut asked = asked.lock().expect("not poisoned");
                *asked += 1;
                *asked > 1
            },
        );
    }
}
