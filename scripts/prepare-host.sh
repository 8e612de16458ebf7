#!/usr/bin/env bash
# Mounts the kernel filesystems that the daemon and the tests use where the host lacks them: tracefs, bpffs, securityfs and
# cgroup v2. Needs root. Prints each mount point that it mounted, one a line, so that a caller can unmount them again.
set -euo pipefail

mounted() { # FSTYPE DIRECTORY
    awk -v type="$1" -v dir="$2" '$2 == dir && $3 == type { found = 1 } END { exit !found }' /proc/self/mounts
}

mount_if_absent() { # FSTYPE DIRECTORY
    if mounted "$1" "$2"; then return 0; fi
    mkdir -p "$2"
    mount -t "$1" "$1" "$2"
    echo "$2"
}

[ "$(id -u)" -eq 0 ] || {
    echo "error: mounting kernel filesystems needs root" >&2
    exit 1
}

mount_if_absent tracefs /sys/kernel/tracing
mount_if_absent bpf /sys/fs/bpf
# Says which security modules are active and whether the kernel is locked down. Not every kernel has it.
if grep -qw securityfs /proc/filesystems; then
    mount_if_absent securityfs /sys/kernel/security
fi
if ! awk '$3 == "cgroup2" { found = 1 } END { exit !found }' /proc/self/mounts; then
    if grep -q ' /sys/fs/cgroup ' /proc/self/mounts; then
        # The version 1 controllers are in use: version 2 goes beside them, where systemd's hybrid layout has it.
        mount_if_absent cgroup2 /sys/fs/cgroup/unified
    else
        mount_if_absent cgroup2 /sys/fs/cgroup
    fi
fi
