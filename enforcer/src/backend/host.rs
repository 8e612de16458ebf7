//! What a host offers to the backends.

use std::fs;

use super::Lacking;
use crate::{
    config::MemoryBackend,
    kernel::{DenyHook, Kernel},
};

/// Finds out what does not work here, by trying: programs are loaded, not yet attached.
pub fn lacking(kernel: &Kernel) -> Lacking {
    let mut lacking = Lacking::default();
    for (hook, backend) in [
        (DenyHook::Override, MemoryBackend::Override),
        (DenyHook::Rewrite, MemoryBackend::Rewrite),
        (DenyHook::Lsm, MemoryBackend::Lsm),
    ] {
        if let Err(reason) = kernel.load_deny(hook) {
            lacking.add(backend, explain(hook, &reason));
        }
    }
    if let Some(reason) = lsm_is_idle() {
        lacking.add(MemoryBackend::Lsm, reason);
    }
    if let Some(reason) = no_notification() {
        lacking.add(MemoryBackend::Notify, reason);
    }
    lacking
}

/// The kernel's answer, and what is behind it where that is known.
fn explain(hook: DenyHook, reason: &str) -> String {
    let writes = hook != DenyHook::Lsm;
    if writes && reason.contains("probe_write_user") {
        return format!(
            "the kernel lets no program write to a caller's memory, as under lockdown ({}): {reason}",
            lockdown()
        );
    }
    if reason.contains("override_return") {
        return format!("the kernel is built without CONFIG_BPF_KPROBE_OVERRIDE: {reason}");
    }
    reason.to_owned()
}

/// The lockdown mode.
pub fn lockdown() -> String {
    fs::read_to_string("/sys/kernel/security/lockdown")
        .ok()
        .and_then(|text| {
            text.split_whitespace()
                .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
                .map(str::to_owned)
        })
        .unwrap_or_else(|| "mode not known, securityfs is not mounted".to_owned())
}

/// Programs on security hooks load and attach on any kernel that has them, but are called only if "bpf" is among the
/// active modules.
fn lsm_is_idle() -> Option<String> {
    match fs::read_to_string("/sys/kernel/security/lsm") {
        Ok(active) if active.trim().split(',').any(|module| module == "bpf") => None,
        Ok(active) => Some(format!(
            "\"bpf\" is not among the active security modules ({}); add it to lsm= on the kernel's command line",
            active.trim()
        )),
        Err(error) => Some(format!(
            "/sys/kernel/security/lsm: {error}; it cannot be told whether security hooks call programs; mount securityfs"
        )),
    }
}

fn no_notification() -> Option<String> {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions
        .split_whitespace()
        .any(|action| action == "user_notif")
    {
        return None;
    }
    Some("seccomp user notification is not offered (CONFIG_SECCOMP_FILTER, kernel 5.0)".to_owned())
}
