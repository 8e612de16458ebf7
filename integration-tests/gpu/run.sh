#!/usr/bin/env bash
# Measures gpuquota on the NVIDIA GPU of this host, beside what the driver and MPS do by themselves, and writes the tables and
# plots of docs/benchmarks.md from what it measured. README.md in this folder says more.
#
# usage: run.sh                    everything: about 80 minutes; QUICK=1: about 30
#        run.sh PART [SUBPART...]  one part, without the report: memory paths lifecycle launches collective insight profile idle time tail
#                                  overhead neighbours control telemetry hami
#        run.sh report             tables and plots from the raw data that is there
#
# BIN: folder of gpuquotad and gpuquotactl (target/release)   OUT: folder for raw data (docs/benchmarks)   GPU: which one (0)
# HAMI_CORE: a build of HAMi-core (libvgpu.so) to compare with   HAMI_CORE_VERSION: what to call it
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
repo=$(readlink -f "$here/../..")
export BIN=${BIN:-$repo/target/release} OUT=${OUT:-$repo/docs/benchmarks} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
parts=(memory paths lifecycle launches collective insight profile idle time tail overhead neighbours control telemetry hami)

script() { # the file of a part
    case $1 in
    # Not by their own names, which are those of modules of Python that others import.
    time) echo "$here/gputime.py" ;;
    profile) echo "$here/launch_profile.py" ;;
    *) echo "$here/$1.py" ;;
    esac
}

mkdir -p "$OUT"
case ${1:-all} in
report) exec python3 "$here/report.py" ;;
all)
    python3 "$here/ground.py"
    rc=0
    for part in "${parts[@]}"; do
        python3 "$(script "$part")" || rc=1
    done
    python3 "$here/report.py"
    exit "$rc"
    ;;
*)
    [[ " ${parts[*]} " == *" $1 "* ]] || { echo "error: no part '$1'; there are: ${parts[*]}, report" >&2; exit 1; }
    python3 "$here/ground.py"
    part=$1
    shift
    exec python3 "$(script "$part")" "$@"
    ;;
esac
