//! Prints what the kernel that it runs on offers, one `name: value` a line. The kernel tests run it in the guest, which
//! shows at once that a program built on the host runs there.

use std::{fs, io, path::Path, process::ExitCode};

fn main() -> ExitCode {
    match facts() {
        Ok(facts) => {
            for (name, value) in facts {
                println!("{name}: {value}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("guest-facts: {error}");
            ExitCode::FAILURE
        }
    }
}

fn facts() -> io::Result<Vec<(&'static str, String)>> {
    let has = |path: &str| Path::new(path).exists().to_string();
    let filesystems = read("/proc/filesystems")?;
    // Absent where the kernel has no error injection.
    let injectable =
        fs::read_to_string("/sys/kernel/debug/error_injection/list").unwrap_or_default();
    Ok(vec![
        ("release", read("/proc/sys/kernel/osrelease")?),
        ("lockdown", read("/sys/kernel/security/lockdown")?),
        ("lsm", read("/sys/kernel/security/lsm")?),
        ("btf", has("/sys/kernel/btf/vmlinux")),
        ("bpffs", mounted("/sys/fs/bpf", "bpf")?),
        (
            "ioctl tracepoint",
            has("/sys/kernel/tracing/events/syscalls/sys_enter_ioctl/id"),
        ),
        (
            "fuse",
            filesystems
                .lines()
                .any(|line| line.ends_with("\tfuse"))
                .to_string(),
        ),
        ("fuse device", has("/dev/fuse")),
        (
            "override",
            injectable.contains("__x64_sys_ioctl").to_string(),
        ),
        ("cgroup", enter_cgroup()?),
    ])
}

fn read(path: &str) -> io::Result<String> {
    let text = fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    Ok(text.trim().to_owned())
}

fn mounted(path: &str, kind: &str) -> io::Result<String> {
    Ok(read("/proc/mounts")?
        .contains(&format!(" {path} {kind} "))
        .to_string())
}

/// Makes a cgroup, enters it, and says where this process is then.
fn enter_cgroup() -> io::Result<String> {
    fs::create_dir("/sys/fs/cgroup/facts")?;
    fs::write("/sys/fs/cgroup/facts/cgroup.procs", "0")?;
    read("/proc/self/cgroup")
}
