//! The programs that refuse. Each is loaded only where the kernel takes it; none is needed to observe.

use std::path::Path;

use aya::{
    Btf, Ebpf,
    programs::{KProbe, Lsm, ProgramError, TracePoint, links::FdLink},
};
use tracing::debug;

use super::{Kernel, KernelError, PinDir, lock, program, program_error, replace_pin};

/// A set of programs that refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenyHook {
    /// kprobe on the system call, with `bpf_override_return`.
    Override,
    /// Tracepoints of the system call, which change the request.
    Rewrite,
    /// Security hook.
    Lsm,
}

/// How a program is attached.
#[derive(Clone, Copy, Debug)]
enum Attach {
    Kprobe(&'static str),
    Tracepoint(&'static str),
    Lsm(&'static str),
}

/// One of the programs.
struct Part {
    hook: DenyHook,
    program: &'static str,
    attach: Attach,
    /// Whether a kernel may lack the place that it is attached to.
    optional: bool,
}

#[cfg(target_arch = "x86_64")]
const NATIVE_IOCTL: &str = "__x64_sys_ioctl";
#[cfg(target_arch = "x86_64")]
pub(crate) const COMPAT_IOCTL: &str = "__ia32_compat_sys_ioctl";
#[cfg(target_arch = "aarch64")]
const NATIVE_IOCTL: &str = "__arm64_sys_ioctl";
#[cfg(target_arch = "aarch64")]
pub(crate) const COMPAT_IOCTL: &str = "__arm64_compat_sys_ioctl";

const fn part(hook: DenyHook, program: &'static str, attach: Attach, optional: bool) -> Part {
    Part {
        hook,
        program,
        attach,
        optional,
    }
}

/// All programs, in the order of attachment.
const PARTS: &[Part] = &[
    part(
        DenyHook::Override,
        "deny_override",
        Attach::Kprobe(NATIVE_IOCTL),
        false,
    ),
    part(
        DenyHook::Override,
        "deny_override_compat",
        Attach::Kprobe(COMPAT_IOCTL),
        true,
    ),
    part(
        DenyHook::Rewrite,
        "deny_rewrite_exit",
        Attach::Tracepoint("sys_exit_ioctl"),
        false,
    ),
    part(
        DenyHook::Rewrite,
        "deny_rewrite",
        Attach::Tracepoint("sys_enter_ioctl"),
        false,
    ),
    part(DenyHook::Lsm, "deny_lsm", Attach::Lsm("file_ioctl"), false),
    part(
        DenyHook::Lsm,
        "deny_lsm_compat",
        Attach::Lsm("file_ioctl_compat"),
        true,
    ),
];

fn parts(hook: DenyHook) -> impl Iterator<Item = &'static Part> {
    PARTS.iter().filter(move |part| part.hook == hook)
}

impl Kernel {
    /// Loads the programs of a hook; once is enough. The error is the kernel's reason, for a person.
    pub fn load_deny(&self, hook: DenyHook) -> Result<(), String> {
        let mut ebpf = lock(&self.ebpf);
        // Read once: it takes long.
        let btf = match hook {
            DenyHook::Lsm => Some(Btf::from_sys_fs().map_err(|error| error.to_string())?),
            DenyHook::Override | DenyHook::Rewrite => None,
        };
        for part in parts(hook) {
            match load(&mut ebpf, part, btf.as_ref()) {
                Ok(()) => {}
                Err(error) if part.optional => debug!(part.program, reason = reason(&error)),
                Err(error) => return Err(reason(&error)),
            }
        }
        Ok(())
    }

    /// Attaches the programs of a hook, in the place of those of an earlier daemon.
    pub fn attach_deny(&self, hook: DenyHook, pins: Option<&PinDir>) -> Result<(), KernelError> {
        let mut ebpf = lock(&self.ebpf);
        let mut links = Vec::new();
        for part in parts(hook) {
            match attach(&mut ebpf, part) {
                Ok(link) => links.push((part.program, link)),
                Err(error) if part.optional => debug!(part.program, %error),
                Err(error) => return Err(error),
            }
        }
        let Some(pins) = pins else {
            lock(&self.deny_links).extend(links.into_iter().map(|(_, link)| link));
            return Ok(());
        };
        links
            .into_iter()
            .try_for_each(|(name, link)| replace_pin(&pins.link(name), link))
    }

    /// Detaches what an earlier daemon attached and this one does not use.
    pub fn detach_other_denies(
        &self,
        used: &[DenyHook],
        pins: Option<&PinDir>,
    ) -> Result<(), KernelError> {
        let Some(pins) = pins else { return Ok(()) };
        for part in PARTS.iter().filter(|part| !used.contains(&part.hook)) {
            unpin(&pins.link(part.program))?;
        }
        Ok(())
    }
}

pub(super) fn unpin(path: &Path) -> Result<(), KernelError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(KernelError::Pin {
            path: path.to_owned(),
            source: error,
        }),
        _ => Ok(()),
    }
}

fn load(ebpf: &mut Ebpf, part: &Part, btf: Option<&Btf>) -> Result<(), KernelError> {
    let name = part.program;
    let loaded = match part.attach {
        Attach::Kprobe(_) => program::<KProbe>(ebpf, name)?.load(),
        Attach::Tracepoint(_) => program::<TracePoint>(ebpf, name)?.load(),
        Attach::Lsm(hook) => match btf {
            Some(btf) => program::<Lsm>(ebpf, name)?.load(hook, btf),
            None => return Err(KernelError::Missing("BTF")),
        },
    };
    match loaded {
        Ok(()) | Err(ProgramError::AlreadyLoaded) => Ok(()),
        Err(error) => Err(program_error(name)(error)),
    }
}

fn attach(ebpf: &mut Ebpf, part: &Part) -> Result<FdLink, KernelError> {
    let name = part.program;
    let link_error = |source| KernelError::Link {
        program: name,
        source,
    };
    match part.attach {
        Attach::Kprobe(function) => {
            let program: &mut KProbe = program(ebpf, name)?;
            let id = program.attach(function, 0).map_err(program_error(name))?;
            let link = program.take_link(id).map_err(program_error(name))?;
            link.try_into().map_err(link_error)
        }
        Attach::Tracepoint(event) => {
            let program: &mut TracePoint = program(ebpf, name)?;
            let id = program
                .attach("syscalls", event)
                .map_err(program_error(name))?;
            let link = program.take_link(id).map_err(program_error(name))?;
            link.try_into().map_err(link_error)
        }
        Attach::Lsm(_) => {
            let program: &mut Lsm = program(ebpf, name)?;
            let id = program.attach().map_err(program_error(name))?;
            Ok(program.take_link(id).map_err(program_error(name))?.into())
        }
    }
}

/// What the kernel says, in one line: the verifier's last word, or the error.
fn reason(error: &KernelError) -> String {
    let KernelError::Program {
        source: ProgramError::LoadError {
            io_error,
            verifier_log,
        },
        ..
    } = error
    else {
        return error.to_string();
    };
    let log = verifier_log.to_string();
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let statistics = |line: &&str| {
        [
            "processed ",
            "stack depth",
            "verification time",
            "peak_states",
        ]
        .iter()
        .any(|start| line.starts_with(start))
    };
    let said = lines()
        .find(|line| line.contains("cannot use helper"))
        .or_else(|| lines().rfind(|line| !statistics(line)));
    match said {
        Some(line) => format!("{line} ({io_error})"),
        None => io_error.to_string(),
    }
}
