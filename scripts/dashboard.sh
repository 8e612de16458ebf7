#!/usr/bin/env bash
# Draws docs/dashboard.png: the panels of the Grafana dashboard from a real Prometheus that scrapes a daemon with simulated GPUs,
# while four tenants do different things for a minute. Not Grafana: see render-dashboard.py. Needs root, python3-matplotlib, and
# what `make test` needs.
#
# usage: dashboard.sh [OUT.png]
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

out=${1:-docs/dashboard.png}
seconds=${SECONDS_SHOWN:-75}
bin=$repo/target/debug
dir=$(mktemp -d -t gpuquota-dashboard-XXXXXX)
top=/gpuquota-dashboard-$$.slice
pids=()
metrics=127.0.0.1:19835
prometheus=127.0.0.1:19090

clean_up() {
    trap - EXIT
    local pid folder=/sys/fs/cgroup
    [ -e $folder/cgroup.controllers ] || folder=/sys/fs/cgroup/unified
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    "$bin/gpuquotad" --config "$dir/gpuquota.toml" --detach-all 2>/dev/null || true
    while read -r pid; do
        kill -9 "$pid" 2>/dev/null || true
    done < <(find "$folder$top" -name cgroup.procs -exec cat {} + 2>/dev/null)
    sleep 0.5
    find "$folder$top" -depth -type d -exec rmdir {} + 2>/dev/null || true
    mountpoint -q "$dir/dev" && umount -l "$dir/dev"
    rm -rf "$dir"
}
trap clean_up EXIT

until_true() { # TENTHS COMMAND...
    local tries=$1
    shift
    for _ in $(seq "$tries"); do
        if "$@"; then return 0; fi
        sleep 0.1
    done
    return 1
}

scripts/prepare-host.sh
mkdir -p "$dir"/{dev,lib,policy.d}
"$bin/simgpu" --dir "$dir/dev" --libs "$dir/lib" </dev/null >"$dir/simgpu.log" 2>&1 &
pids+=($!)
until_true 100 grep -q ready "$dir/simgpu.log"
export SIMGPU_DIR=$dir/dev LD_LIBRARY_PATH=$dir/lib
cat >"$dir/gpuquota.toml" <<TOML
bus = "peer:$dir/run/bus"
runtime-directory = "$dir/run"
bpf-directory = "/sys/fs/bpf/gpuquota-dashboard-$$"
[policy]
vendor = "$dir/none"
admin = "$dir/policy.d"
[gpu]
device-dir = "$dir/dev"
nvml-library = "$dir/lib/libnvidia-ml.so.1"
[metrics]
address = "$metrics"
TOML
cat >"$dir/policy.d/50.toml" <<TOML
[tenant.vision]
cgroup = "$top/vision.slice"
class = "guaranteed"
memory.max = "8GiB"
memory.high = "6GiB"
time.weight = 700
launch.max = "20000/s"
[tenant.speech]
cgroup = "$top/speech.slice"
memory.max = "4GiB"
time.weight = 300
launch.max = "5000/s"
[tenant.notebooks]
cgroup = "$top/notebooks.slice"
memory.max = "3GiB"
memory.high = "2GiB"
[tenant.batch]
cgroup = "$top/batch.slice"
class = "best-effort"
memory.max = "2GiB"
TOML
"$bin/gpuquotad" --config "$dir/gpuquota.toml" </dev/null 2>"$dir/daemon.log" &
pids+=($!)
until_true 200 test -S "$dir/run/bus"
cat >"$dir/prometheus.yml" <<YAML
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$repo/config/prometheus-rules.yaml"]
scrape_configs: [{job_name: gpuquota, static_configs: [{targets: ["$metrics"]}]}]
YAML
program=$repo/target/tools/usr/bin/prometheus
[ -x "$program" ] || program=prometheus
"$program" --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/tsdb" --web.listen-address="$prometheus" \
    >"$dir/prometheus.log" 2>&1 &
pids+=($!)

tenant() { # TENANT DEVICE SCRIPT: again and again
    local name=$1 device=$2 script=$3
    while :; do
        "$bin/gpuquotactl" --bus "peer:$dir/run/bus" run --socket "$dir/run/listener.sock" --tenant "$name" -- \
            "$bin/simtenant" --device "$device" script "$script" >/dev/null 2>&1 || sleep 0.2
    done
}
tenant vision 0 'alloc 3GiB; launch --for 8s; alloc 2GiB; launch --for 8s; alloc 1500MiB; launch --for 10s; free' &
pids+=($!)
tenant speech 0 'alloc 1GiB; launch --rate 8000/s --for 20s; alloc 2GiB; hold 5s; alloc 2GiB' &
pids+=($!)
tenant notebooks 1 'alloc 700MiB; hold 4s; alloc 600MiB; launch --rate 500/s --for 4s; alloc 900MiB; alloc 900MiB; hold 6s' &
pids+=($!)
tenant batch 1 'alloc 1GiB; launch --rate 1000/s --for 6s; alloc 1GiB; hold 2s' &
pids+=($!)
say "running for $seconds s"
sleep "$seconds"
python3 scripts/render-dashboard.py "http://$prometheus" config/grafana-dashboard.json "$seconds" "$out"
say "drawn $out"
