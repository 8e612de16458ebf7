#!/usr/bin/env bash
# The main job in one minute: a policy of three tenants holds unmodified programs to their GPU memory.
#
# usage: demo.sh            on simulated GPUs
#        GPU=real demo.sh   on the NVIDIA GPU of this host
#
# Needs root. Leaves nothing behind: no process, mount, pin or cgroup, also when it is interrupted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

gpu=${GPU:-sim}
bin=$PWD/target/debug
dir=$(mktemp -d -t gpuquota-demo-XXXXXX)
name=gpuquota-demo-$$
top=/$name.slice
pins=/sys/fs/bpf/$name
mounted=()
pids=()

clean_up() {
    trap - EXIT
    trap '' INT TERM
    local pid cgroup
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    "$bin/gpuquotad" --config "$dir/gpuquota.toml" --detach-all 2>/dev/null || true
    if [ -n "${cgroups:-}" ] && [ -d "$cgroups$top" ]; then
        while read -r pid; do
            kill -9 "$pid" 2>/dev/null || true
        done < <(find "$cgroups$top" -name cgroup.procs -exec cat {} + 2>/dev/null)
        for _ in 1 2 3 4 5; do
            find "$cgroups$top" -depth -type d -exec rmdir {} + 2>/dev/null && break
            sleep 0.1
        done
    fi
    if mountpoint -q "$dir/dev" 2>/dev/null; then umount -l "$dir/dev" || true; fi
    for cgroup in "${mounted[@]}"; do umount "$cgroup" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { # prints a command as an admin would type it, then runs it
    printf '  $ %s\n' "$*"
    local command=$1
    shift
    case $command in
    gpuquotactl) "$bin/gpuquotactl" --bus "peer:$dir/run/bus" "$@" ;;
    *) "$command" "$@" ;;
    esac 2>&1 | sed 's/^/    /'
}
wait_for() { # COMMAND...: until it succeeds, a minute at most
    for _ in $(seq 1200); do
        if "$@"; then return 0; fi
        sleep 0.05
    done
    return 1
}
tenant() { # TENANT STEP...: runs a workload in a tenant; its last line says how it went
    printf '  $ gpuquotactl run --tenant %s -- simtenant %s\n' "$1" "${*:2}"
    "$bin/gpuquotactl" --bus "peer:$dir/run/bus" run --socket "$dir/run/listener.sock" --tenant "$1" -- \
        "$bin/simtenant" "${@:2}" 2>&1 | sed 's/^/    /' || true
}

[ "$(id -u)" = 0 ] || {
    echo "error: the demo needs root: it attaches eBPF programs and makes cgroups" >&2
    exit 77
}
printf '== building (minutes the first time)\n'
cargo build --quiet "${workspace[@]}" </dev/null || die "the workspace does not build"
mapfile -t mounted < <(bash scripts/prepare-host.sh)
cgroups=/sys/fs/cgroup
[ -e $cgroups/cgroup.controllers ] || cgroups=/sys/fs/cgroup/unified
mkdir -p "$dir/dev" "$dir/policy.d" "$dir/lib"

if [ "$gpu" = real ]; then
    [ -e /dev/nvidiactl ] || {
        echo "error: GPU=real, but there is no /dev/nvidiactl on this host" >&2
        exit 1
    }
    devices=/dev nvml=
else
    say "Two simulated GPUs of 16 GiB"
    "$bin/simgpu" --dir "$dir/dev" --libs "$dir/lib" </dev/null >"$dir/simgpu.log" 2>&1 &
    pids+=($!)
    wait_for grep -q ready "$dir/simgpu.log" || die "the simulated GPUs do not start: $(cat "$dir/simgpu.log")"
    devices=$dir/dev nvml="nvml-library = \"$dir/lib/libnvidia-ml.so.1\""
    export SIMGPU_DIR=$devices LD_LIBRARY_PATH=$dir/lib
fi

cat >"$dir/gpuquota.toml" <<TOML
bus = "peer:$dir/run/bus"
runtime-directory = "$dir/run"
bpf-directory = "$pins"
[policy]
vendor = "$dir/none"
admin = "$dir/policy.d"
[gpu]
device-dir = "$devices"
$nvml
TOML
cat >"$dir/policy.d/50-teams.toml" <<TOML
[tenant.vision]
cgroup = "$top/vision.slice"
memory.max = "4GiB"
time.weight = 30

[tenant.vision-dev]                 # inside vision: pays from both budgets
cgroup = "$top/vision.slice/dev.slice"
memory.max = "2GiB"

[tenant.speech]
cgroup = "$top/speech.slice"
memory.max = "3GiB"
time.weight = 70
TOML
say "The policy: three tenants, one inside another"
sed 's/^/    /' "$dir/policy.d/50-teams.toml"

"$bin/gpuquotad" --config "$dir/gpuquota.toml" </dev/null 2>"$dir/daemon.log" &
pids+=($!)
wait_for [ -S "$dir/run/bus" ] || {
    echo "error: the daemon did not start:" >&2
    cat "$dir/daemon.log" >&2
    exit 1
}

say "Inside the budget"
tenant vision alloc 2GiB
say "Over the budget: the program sees out of memory, and goes on"
tenant speech script 'alloc 4GiB; alloc 1GiB'
say "The budget is raised while everything runs; the same allocation fits"
show gpuquotactl set-property speech memory.max=6GiB
tenant speech alloc 4GiB
say "Two processes of one tenant have one budget"
"$bin/gpuquotactl" --bus "peer:$dir/run/bus" run --socket "$dir/run/listener.sock" --tenant vision -- \
    "$bin/simtenant" script 'alloc 2GiB; hold 60s' >"$dir/first.log" 2>&1 &
first=$!
pids+=("$first")
wait_for grep -q allocated "$dir/first.log" || die "the first process does not get its memory: $(cat "$dir/first.log")"
echo "  the first holds 2 GiB of vision's 4; a second asks for 2 more:"
tenant vision alloc 2GiB
say "A tenant inside another pays from both: dev's own 2 GiB would do, what is left of vision's 4 does not"
tenant vision-dev alloc 1200MiB
say "Who uses what"
show gpuquotactl status
kill "$first" 2>/dev/null || true
# On a real card time is measured by integration-tests/gpu/run.sh.
if [ "$gpu" != real ]; then
    say "A launch budget: a program that launches as fast as it can is held to 1,000 a second"
    show gpuquotactl set-property --runtime vision launch.max=1000/s
    tenant vision launch --rate max --kernel-us 1 --for 4s
    show gpuquotactl reset-property vision launch.max
    say "GPU time by weight, 30:70, of two programs that keep the GPU busy"
    for name in vision speech; do
        tenant "$name" launch --rate max --kernel-us 500 --for 6s >"$dir/$name.log" &
        pids+=($!)
    done
    sleep 5
    for name in vision speech; do
        # The line of the first GPU in the table of GPU time.
        show gpuquotactl status "$name" | sed -n '1p; /WEIGHT/ { p; n; p }'
    done
    wait "${pids[@]: -2}"
    cat "$dir/vision.log" "$dir/speech.log"
fi
say "Done"
