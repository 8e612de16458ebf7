#!/usr/bin/env bash
# Launch budgets on the GPU of this host: rates, costs, crash of the daemon, PyTorch, graphs; see README.md in this folder.
# usage: launch.sh [rates] [paces] [cost] [crash] [torch] [graphs] [collective]
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
for need in nvidia-smi python3; do
    command -v "$need" >/dev/null || { echo "error: $need is not installed" >&2; exit 1; }
done
[ -e "${BIN:-$here/../../target/release}/gpuquotad" ] || {
    echo "error: no gpuquotad in ${BIN:-target/release}: build it (cargo build --release) or name its folder in BIN" >&2
    exit 1
}
exec python3 "$here/launch_rates.py" "$@"
