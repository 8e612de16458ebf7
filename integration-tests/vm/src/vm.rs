//! A virtual machine: what is packed into it, and what came out.

use std::{
    fs,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    Error, Kernel,
    cpio::Ramdisk,
    elf,
    qemu::{self, End, Machine, READY, Run, STATUS},
    workspace,
};

/// The longest that a kernel may take to come up. It takes 2 to 5 s on a quiet host; builds beside it slow it down.
const BOOT_LIMIT: Duration = Duration::from_secs(90);

/// Where the distribution's statically linked busybox lies, which gives the guest its shell and its small tools.
const BUSYBOX: &str = "/bin/busybox";

/// The guest's first process.
const INIT: &str = include_str!("init.sh");

/// A virtual machine before it is started. See the [crate] documentation for an example.
#[derive(Clone, Debug)]
pub struct Vm {
    name: String,
    kernel: Kernel,
    command_line: String,
    memory_mib: u32,
    boot_limit: Duration,
    items: Vec<Item>,
}

#[derive(Clone, Debug)]
enum Item {
    Program { host: PathBuf, guest: PathBuf },
    File { host: PathBuf, guest: PathBuf },
    Text { content: String, guest: PathBuf },
}

/// What a script left behind.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The script's exit status, as a shell reports it: 128 + N if signal N ended it.
    pub status: i32,
    /// What the script printed on both streams. Kernel messages of level error and above are in between.
    pub output: String,
    /// The whole console, from the first kernel message to power-off.
    pub console: String,
    /// The file that holds the console.
    pub log: PathBuf,
}

impl Vm {
    /// A machine with one processor and 512 MiB of memory. The name is that of its log file: one per test.
    #[must_use]
    pub fn new(name: impl Into<String>, kernel: Kernel) -> Self {
        Self {
            name: name.into(),
            kernel,
            command_line: String::new(),
            memory_mib: 512,
            boot_limit: BOOT_LIMIT,
            items: Vec::new(),
        }
    }

    /// Adds to the kernel's command line, for example `lockdown=integrity`.
    #[must_use]
    pub fn cmdline(mut self, parameters: &str) -> Self {
        self.command_line.push(' ');
        self.command_line.push_str(parameters);
        self
    }

    /// Sets the size of the guest's memory, which also holds all packed files, in MiB.
    #[must_use]
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets how long the kernel may take to come up before it counts as hung. Default: 90 s.
    #[must_use]
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// Packs a program into the guest's `/bin` under its own name, with the shared libraries that it is linked with and
    /// without its debug information.
    #[must_use]
    pub fn binary(self, host: impl Into<PathBuf>) -> Self {
        let host = host.into();
        let guest = Path::new("/bin").join(host.file_name().unwrap_or_default());
        self.binary_at(host, guest)
    }

    /// Like [`binary`](Self::binary), but at a path of its own. Also for shared libraries that a program loads itself.
    #[must_use]
    pub fn binary_at(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        self.items.push(Item::Program {
            host: host.into(),
            guest: guest.into(),
        });
        self
    }

    /// Packs a file as it is, with its permissions.
    #[must_use]
    pub fn file(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        self.items.push(Item::File {
            host: host.into(),
            guest: guest.into(),
        });
        self
    }

    /// Packs a file with this content, readable by all.
    #[must_use]
    pub fn text(mut self, content: impl Into<String>, guest: impl Into<PathBuf>) -> Self {
        self.items.push(Item::Text {
            content: content.into(),
            guest: guest.into(),
        });
        self
    }

    /// Boots the machine and runs a shell script as root, with `/bin/sh` of busybox and its standard tools. A failed boot
    /// is tried once more. Proc, sysfs, devtmpfs, cgroup v2, bpffs, tracefs, debugfs, securityfs and empty `/tmp` and
    /// `/run` are mounted at their usual places, and the loopback network is up.
    ///
    /// # Errors
    /// Everything but the script's own failure, which is in [`Outcome::status`].
    pub fn run(&self, script: &str, limit: Duration) -> Result<Outcome, Error> {
        let kernel = self.kernel.files()?;
        let dir = workspace::vm_dir()?;
        let log = dir.join(format!("{}.log", self.name));
        let ramdisk = dir.join(format!("{}.cpio", self.name));
        self.write_ramdisk(&ramdisk, &kernel.modules, script)?;
        let machine = Machine {
            image: &kernel.image,
            ramdisk: &ramdisk,
            command_line: &self.command_line,
            memory_mib: self.memory_mib,
            boot_limit: self.boot_limit,
            script_limit: limit,
            log: &log,
        };
        let mut run = qemu::boot(&machine);
        if matches!(
            run,
            Ok(Run {
                end: End::NotBooted(_),
                ..
            })
        ) {
            run = qemu::boot(&machine);
        }
        // Tens of megabytes that nobody looks at; a leftover is overwritten by the next run.
        let _ = fs::remove_file(&ramdisk);
        outcome(run?, limit, log)
    }

    fn write_ramdisk(&self, path: &Path, modules: &[PathBuf], script: &str) -> Result<(), Error> {
        let disk = self.ramdisk(modules, script)?;
        let file = fs::File::create(path).map_err(Error::file(path))?;
        let mut out = BufWriter::new(file);
        disk.write(&mut out)
            .and_then(|()| out.flush())
            .map_err(Error::file(path))
    }

    fn ramdisk(&self, modules: &[PathBuf], script: &str) -> Result<Ramdisk, Error> {
        let mut disk = Ramdisk::default();
        disk.device("/dev/console", 5, 1)?;
        for dir in ["/proc", "/sys", "/tmp", "/run", "/var/lib", "/root", "/mnt"] {
            disk.directory(dir)?;
        }
        disk.file(BUSYBOX, read(Path::new(BUSYBOX))?, 0o755)?;
        disk.symlink("/bin/sh", "busybox")?;
        disk.symlink("/sbin", "bin")?;
        disk.file(
            "/etc/passwd",
            b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n".to_vec(),
            0o644,
        )?;
        disk.file(
            "/etc/group",
            b"root:x:0:\nnogroup:x:65534:\n".to_vec(),
            0o644,
        )?;
        for module in modules {
            disk.file(guest_module(module), read(module)?, 0o644)?;
        }
        let load: String = modules
            .iter()
            .flat_map(|module| [guest_module(module).display().to_string(), "\n".to_owned()])
            .collect();
        disk.file("/etc/vm/modules", load.into_bytes(), 0o644)?;
        disk.file(
            "/etc/vm/markers",
            format!("ready='{READY}'\nstatus='{STATUS}'\n").into_bytes(),
            0o644,
        )?;
        disk.file("/etc/vm/script", script.as_bytes().to_vec(), 0o644)?;
        disk.file("/init", INIT.as_bytes().to_vec(), 0o755)?;
        for item in &self.items {
            match item {
                Item::Program { host, guest } => {
                    disk.file(guest, elf::stripped(host)?, 0o755)?;
                    for library in elf::libraries(host)? {
                        if !disk.contains(&library) {
                            disk.file(&library, elf::stripped(&library)?, 0o755)?;
                        }
                    }
                }
                Item::File { host, guest } => disk.file(guest, read(host)?, permissions(host)?)?,
                Item::Text { content, guest } => {
                    disk.file(guest, content.clone().into_bytes(), 0o644)?;
                }
            }
        }
        Ok(disk)
    }
}

fn guest_module(host: &Path) -> PathBuf {
    Path::new("/lib/modules").join(host.file_name().unwrap_or_default())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(Error::file(path))
}

fn permissions(path: &Path) -> Result<u32, Error> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = fs::metadata(path).map_err(Error::file(path))?;
    Ok(metadata.permissions().mode() & 0o7777)
}

fn outcome(run: Run, limit: Duration, log: PathBuf) -> Result<Outcome, Error> {
    let tail = || telling_part(&run.console, 40);
    match run.end {
        End::Status(status) => Ok(Outcome {
            status,
            output: script_output(&run.console),
            console: run.console,
            log,
        }),
        End::NotBooted(reason) => Err(Error::Boot {
            reason: reason.to_owned(),
            tail: tail(),
            log,
        }),
        End::Died => Err(Error::Died { tail: tail(), log }),
        End::Timeout => Err(Error::Timeout {
            limit,
            tail: tail(),
            log,
        }),
    }
}

/// What stands between the two markers, less the line end that init prints before the second one in case the script's
/// last line has none.
fn script_output(console: &str) -> String {
    let mut output: String = console
        .lines()
        .skip_while(|line| *line != READY)
        .skip(1)
        .take_while(|line| !line.starts_with(STATUS))
        .flat_map(|line| [line, "\n"])
        .collect();
    output.pop();
    output
}

/// The part of a console that says what happened: from shortly before the kernel's first complaint, else the end.
fn telling_part(console: &str, count: usize) -> String {
    const BEFORE: usize = 5;
    const COMPLAINTS: [&str; 3] = ["BUG: ", "Oops: ", "Kernel panic - not syncing"];
    let lines: Vec<_> = console.lines().collect();
    let complaint = lines
        .iter()
        .position(|line| COMPLAINTS.iter().any(|complaint| line.contains(complaint)));
    let last = lines.len().saturating_sub(count);
    let start = complaint.map_or(last, |at| at.saturating_sub(BEFORE).min(last));
    lines[start..]
        .iter()
        .take(count)
        .copied()
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_what_stands_between_the_markers() {
        let console = format!("boot\n{READY}\none\n\ntwo\n\n{STATUS}0\nreboot\n");
        assert_eq!(script_output(&console), "one\n\ntwo\n");
        assert_eq!(
            script_output(&format!("{READY}\nno end\n{STATUS}0\n")),
            "no end"
        );
    }

    #[test]
    fn without_a_complaint_the_end_tells_most() {
        assert_eq!(telling_part("a\nb\nc\n", 2), "b\nc");
        assert_eq!(telling_part("a", 2), "a");
    }

    #[test]
    fn a_complaint_is_shown_however_much_follows() {
        let dump = "register\n".repeat(100);
        let part = telling_part(&format!("started\n[ 1.0] BUG: bad address\n{dump}"), 10);
        assert!(
            part.starts_with("started\n[ 1.0] BUG: bad address\nregister\n"),
            "{part}"
        );
        assert_eq!(part.lines().count(), 10);
        let part = telling_part("a\n[ 1.0] Kernel panic - not syncing: why", 10);
        assert_eq!(part, "a\n[ 1.0] Kernel panic - not syncing: why");
    }
}
