#!/usr/bin/env bash
# Runs each fuzz target for FUZZ_SECONDS (default 60). Works on the stable compiler: the coverage that libFuzzer needs is
# a stable code generation option, only the sanitizers are not.
#
# usage: fuzz.sh [TARGET...]   default: all targets
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

targets=("$@")
[ "${#targets[@]}" -gt 0 ] || mapfile -t targets < <(cargo fuzz list)
[ "${#targets[@]}" -gt 0 ] || die "there are no fuzz targets in fuzz/"
for target in "${targets[@]}"; do
    say "fuzz $target: ${FUZZ_SECONDS:-60} s"
    options=(-max_total_time="${FUZZ_SECONDS:-60}" -print_final_stats=1)
    [ ! -e "fuzz/$target.dict" ] || options+=(-dict="fuzz/$target.dict")
    cargo fuzz run --sanitizer none "$target" -- "${options[@]}"
done
