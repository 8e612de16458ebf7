//! What the host offers, what is in use, and what to do about the rest.

use std::{fs, path::Path};

use gpuquota_common::map::counter;
use nix::sys::utsname::uname;

use crate::{
    control::{Backend, BackendState, Finding, Verdict},
    driver::Gpu,
    enforcer::ALARMS,
    kernel::{COMPAT_IOCTL, HOOKS, Hook, LATE_HOOKS},
};

/// A finding.
pub fn finding(subject: &str, verdict: Verdict, detail: String) -> Finding {
    Finding {
        subject: subject.to_owned(),
        verdict,
        detail,
    }
}

/// Findings about the host, for which no daemon is needed.
pub fn host() -> Vec<Finding> {
    let mut findings = vec![kernel(), btf(), lockdown(), cgroups(), seccomp()];
    findings.extend(
        HOOKS
            .iter()
            .chain(LATE_HOOKS)
            .map(|(program, hook)| hook_finding(program, *hook)),
    );
    findings
}

fn kernel() -> Finding {
    let release = uname().map_or_else(
        |error| error.to_string(),
        |name| name.release().to_string_lossy().into_owned(),
    );
    let numbers: Vec<u32> = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .collect();
    let (verdict, detail) = match numbers.as_slice() {
        [major, minor, ..] if (*major, *minor) >= (5, 15) => (Verdict::Ok, release),
        _ => (
            Verdict::Error,
            format!("{release}; at least 5.15 is needed"),
        ),
    };
    finding("kernel", verdict, detail)
}

fn btf() -> Finding {
    if Path::new("/sys/kernel/btf/vmlinux").exists() {
        return finding(
            "BTF",
            Verdict::Ok,
            "kernel structures are described".to_owned(),
        );
    }
    finding(
        "BTF",
        Verdict::Error,
        "no /sys/kernel/btf/vmlinux; a kernel with CONFIG_DEBUG_INFO_BTF is needed".to_owned(),
    )
}

fn lockdown() -> Finding {
    match fs::read_to_string("/sys/kernel/security/lockdown") {
        Ok(text) => {
            let mode = text
                .split_whitespace()
                .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
                .unwrap_or("unknown");
            finding(
                "lockdown",
                Verdict::Info,
                format!(
                    "{mode}; the backends override and rewrite need \"none\", the others work under every mode"
                ),
            )
        }
        Err(_) => finding(
            "lockdown",
            Verdict::Info,
            "securityfs is not mounted, so the mode is not known".to_owned(),
        ),
    }
}

fn cgroups() -> Finding {
    match crate::cgroup::Hierarchy::open(None) {
        Ok(hierarchy) => {
            let root = hierarchy.root().display();
            match hierarchy.finds_by_id() {
                Ok(()) => finding(
                    "cgroup v2",
                    Verdict::Ok,
                    format!("mounted at {root}; cgroups are found by their ids"),
                ),
                Err(error) => finding(
                    "cgroup v2",
                    Verdict::Warning,
                    format!(
                        "mounted at {root}; a new cgroup is found by looking at all of them, later the more there are: \
                         open_by_handle_at: {error}"
                    ),
                ),
            }
        }
        Err(error) => finding("cgroup v2", Verdict::Error, error.to_string()),
    }
}

fn seccomp() -> Finding {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions
        .split_whitespace()
        .any(|action| action == "user_notif")
    {
        return finding(
            "seccomp user notification",
            Verdict::Ok,
            "`gpuquotactl run` can refuse allocations".to_owned(),
        );
    }
    finding(
        "seccomp user notification",
        Verdict::Error,
        "not offered (CONFIG_SECCOMP_FILTER, kernel 5.0): nothing can refuse allocations"
            .to_owned(),
    )
}

fn hook_finding(program: &str, hook: Hook) -> Finding {
    let (group, event) = match hook {
        Hook::Tracepoint(group, event) => (group, event),
        Hook::Raw(event) => (
            event.split_once('_').map_or("sched", |(group, _)| group),
            event,
        ),
    };
    let subject = format!("tracepoint {group}:{event}");
    let roots = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    if roots.iter().any(|root| {
        Path::new(root)
            .join("events")
            .join(group)
            .join(event)
            .exists()
    }) {
        return finding(&subject, Verdict::Ok, format!("for program {program}"));
    }
    finding(
        &subject,
        Verdict::Error,
        format!(
            "not found, and program {program} needs it; is tracefs mounted? mount -t tracefs none \
             /sys/kernel/tracing"
        ),
    )
}

/// The driver's version and what follows from it.
pub fn driver_version(version: &str, enforcing: bool) -> Finding {
    if enforcing {
        finding("NVIDIA driver", Verdict::Ok, version.to_owned())
    } else {
        finding(
            "NVIDIA driver",
            Verdict::Error,
            format!(
                "{version}: nothing is enforced; either the version is not known (add it to gpu.accept-driver \
                 once you have tried it) or enforcement.memory is \"observe\""
            ),
        )
    }
}

/// A backend for memory budgets.
pub fn backend(backend: &Backend) -> Finding {
    let verdict = match backend.state {
        BackendState::Active => Verdict::Ok,
        BackendState::Available | BackendState::Unavailable => Verdict::Info,
    };
    let state = match backend.state {
        BackendState::Active => "in use",
        BackendState::Available => "not in use",
        BackendState::Unavailable => "not offered",
    };
    finding(
        &format!("memory backend {}", backend.name),
        verdict,
        format!("{state}: {}", backend.reason),
    )
}

/// System calls of 32-bit programs, which a 64-bit program can make as well. `refused` says whether something in the kernel
/// refuses to tenants what takes memory that way.
pub fn compat(refused: bool) -> Finding {
    let subject = "32-bit system calls";
    if refused {
        return finding(
            subject,
            Verdict::Ok,
            "what takes video memory that way is refused to tenants".to_owned(),
        );
    }
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if !serves_compat(&symbols, &command_line) {
        return finding(subject, Verdict::Ok, "not served by this kernel".to_owned());
    }
    finding(
        subject,
        Verdict::Warning,
        "served by this kernel and not seen: no tracepoint reports them, and there is neither a security hook nor a kprobe. \
         They are refused to what is started by `gpuquotactl run` or under the seccomp profile; any other program of a \
         tenant gets past memory budgets with them. Boot with ia32_emulation=off (Linux 6.7), or with bpf in lsm="
            .to_owned(),
    )
}

fn serves_compat(symbols: &str, command_line: &str) -> bool {
    let has_entry = symbols.lines().any(|line| {
        line.split_whitespace()
            .nth(2)
            .is_some_and(|name| name == COMPAT_IOCTL)
    });
    let is_off = command_line
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("ia32_emulation="))
        .next_back()
        .is_some_and(|value| matches!(value, "off" | "0" | "n" | "N" | "no" | "false"));
    has_entry && !is_off
}

/// A GPU and whether its number in the driver's calls is known.
pub fn gpu(gpu: &Gpu) -> Finding {
    let card = &gpu.card;
    let subject = format!("GPU {}", card.index);
    let text = format!(
        "{} {} ({} MiB)",
        card.uuid,
        card.name,
        card.memory_total >> 20
    );
    if gpu.instance_known {
        return finding(&subject, Verdict::Ok, text);
    }
    finding(
        &subject,
        Verdict::Warning,
        format!(
            "{text}; the driver did not tell its device instance, {} was taken",
            gpu.instance
        ),
    )
}

/// Driver calls, or others, that the kernel has not shown to the programs.
pub fn passed_over(count: u64) -> Option<Finding> {
    (count > 0).then(|| {
        finding(
            "ioctls passed over",
            Verdict::Warning,
            format!(
                "{count}: this kernel is preemptible, and now and then does not run the programs on an ioctl. A driver call whose \
                 entry they have not seen is read and charged at its exit, or refused and made again where there is a \
                 security hook; one whose exit they have not seen is charged as it was asked for until the driver has said \
                 whether it has the memory. A call of which both are missing is found when the ledger is compared with \
                 NVML. Before Linux 7.0, preempt=none or preempt=voluntary on the kernel's command line ends it"
            ),
        )
    })
}

/// Counters that should be zero.
pub fn counters(counters: &[u64; counter::COUNT as usize]) -> Vec<Finding> {
    ALARMS
        .iter()
        .filter_map(|(index, name, meaning)| {
            let value = counters[*index as usize];
            (value > 0).then(|| finding(name, Verdict::Warning, format!("{value}: {meaning}")))
        })
        .collect()
}

/// Name of a process; whatever it is made of.
pub(crate) fn comm(pid: u32) -> String {
    fs::read(format!("/proc/{pid}/comm")).map_or_else(
        |_| String::new(),
        |bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hook_of_the_observer_is_looked_at() {
        let findings = host();
        for (program, _) in HOOKS.iter().chain(LATE_HOOKS) {
            assert!(
                findings
                    .iter()
                    .any(|finding| finding.detail.contains(program)),
                "{program}"
            );
        }
    }

    #[test]
    fn a_kernel_serves_32_bit_calls_if_it_has_the_entry_and_is_not_told_otherwise() {
        let symbols =
            format!("0000000000000000 T __x64_sys_ioctl\n0000000000000000 T {COMPAT_IOCTL}\n");
        assert!(serves_compat(&symbols, "quiet"));
        assert!(serves_compat(
            &symbols,
            "ia32_emulation=off ia32_emulation=on"
        ));
        assert!(!serves_compat(&symbols, "quiet ia32_emulation=off"));
        assert!(!serves_compat("0000000000000000 T __x64_sys_ioctl\n", ""));
    }

    #[test]
    fn quiet_counters_are_not_mentioned() {
        let mut values = [0; counter::COUNT as usize];
        assert!(counters(&values).is_empty());
        values[counter::OBJECTS_FULL as usize] = 3;
        assert_eq!(counters(&values).len(), 1);
    }
}
