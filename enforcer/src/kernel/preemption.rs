//! Whether this kernel preempts tasks while they are in it, and with them programs and operations on maps.

use std::fs;

use nix::sys::utsname::uname;

/// Whether a task may be preempted in the kernel. One that cannot be told is taken for preemptible, which only costs.
pub(super) fn is_preemptible() -> bool {
    let Ok(name) = uname() else {
        return true;
    };
    // Neither may be readable: debugfs may not be mounted, or be closed by lockdown.
    let mode = fs::read_to_string("/sys/kernel/debug/sched/preempt").unwrap_or_default();
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    preempts(
        &name.release().to_string_lossy(),
        &name.version().to_string_lossy(),
        &mode,
        &command_line,
    )
}

/// The same from what the kernel says of itself: `uname -r`, `uname -v`, `sched/preempt` of debugfs, its command line.
fn preempts(release: &str, version: &str, mode: &str, command_line: &str) -> bool {
    let words = || version.split_whitespace();
    if words().any(|word| matches!(word, "PREEMPT" | "PREEMPT_RT" | "PREEMPT_LAZY")) {
        return true;
    }
    if !words().any(|word| word == "PREEMPT_DYNAMIC") {
        return false;
    }
    let in_force = mode
        .split_whitespace()
        .find_map(|word| word.strip_prefix('(')?.strip_suffix(')'))
        .or_else(|| {
            // Linux 7.0 knows no other modes than these two, whatever is on its command line.
            let major: u32 = release.split('.').next()?.parse().ok()?;
            (major >= 7).then_some("lazy")
        })
        .or_else(|| {
            command_line
                .split_whitespace()
                .filter_map(|word| word.strip_prefix("preempt="))
                .next_back()
        });
    !matches!(in_force, Some("none" | "voluntary"))
}

#[cfg(test)]
mod tests {
    use super::preempts;

    #[test]
    fn a_kernel_says_how_it_preempts() {
        let dynamic = "#1 SMP PREEMPT_DYNAMIC Debian 6.1.1-1 (2023-01-01)";
        assert!(!preempts("6.1.0", "#1 SMP Debian", "", ""));
        assert!(preempts("6.1.0", "#1 SMP PREEMPT Debian", "", ""));
        assert!(preempts("6.1.0", "#1 SMP PREEMPT_RT Debian", "", ""));
        assert!(!preempts("6.1.0", dynamic, "none (voluntary) full", ""));
        assert!(preempts("6.1.0", dynamic, "none voluntary (full)", ""));
        assert!(preempts("7.2.0", dynamic, "full (lazy)", "preempt=none"));
        assert!(!preempts("6.1.0", dynamic, "", "quiet preempt=none"));
        assert!(preempts("7.2.0", dynamic, "", "quiet preempt=none"));
        assert!(preempts("6.1.0", dynamic, "", "preempt=none preempt=full"));
        assert!(preempts("6.1.0", dynamic, "", "quiet"));
    }
}
