# shellcheck shell=bash
# Sourced by the other scripts: finds the repository and the tools, and says things the same way everywhere.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo" || exit 1

# rustup installs cargo below CARGO_HOME and only asks the login shell to put it on PATH.
: "${HOME:=$(getent passwd "$(id -u)" | cut -d: -f6)}"
export HOME
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

# The crate of the eBPF programs compiles for the BPF target only, through the enforcer's build script.
# Every cargo call names the same set of packages, so that no call rebuilds what another one built.
# shellcheck disable=SC2034 # used by the scripts that source this file
workspace=(--workspace --exclude gpuquota-ebpf)

say() { printf '== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Runs a command quietly; shows what it printed only if it failed.
quietly() {
    local log rc=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || rc=$?
    if [ "$rc" -ne 0 ]; then
        tail -n 40 "$log" >&2
    fi
    rm -f "$log"
    return "$rc"
}
