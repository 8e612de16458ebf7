#!/usr/bin/env bash
# Formatting, clippy, documentation, unused dependencies and the shell scripts. Runs every check, then fails if one failed.
set -uo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

failed=()
check() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    if "$@" </dev/null; then
        say "$name: ok ($((SECONDS - start)) s)"
    else
        say "$name: FAILED"
        failed+=("$name")
    fi
}

# The eBPF crate is checked as enforcer/build.rs compiles it: by Debian's compiler, for the BPF target. `cargo clippy` would
# take rustup's, so its wrapper is named instead.
ebpf_clippy() {
    local flags
    flags=$(printf '%s\x1f' "--cfg=bpf_target_arch=\"$(uname -m)\"" -Ctarget-cpu=v3)-Dwarnings
    RUSTC=/usr/bin/rustc RUSTC_WORKSPACE_WRAPPER=/usr/bin/clippy-driver RUSTC_BOOTSTRAP=aya_ebpf,gpuquota_ebpf,gpuquota_profile,gpuquota_idle \
        CARGO_ENCODED_RUSTFLAGS=$flags \
        cargo check --quiet -p gpuquota-ebpf --bins --release --target bpfel-unknown-none --target-dir target/ebpf-lint
}

docs() {
    RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps "${workspace[@]}"
}

scripts_check() {
    git ls-files -z -- '*.sh' .ci/run | xargs -0 -r shellcheck -x
}

check "cargo fmt" cargo fmt --all --check
check "cargo fmt, fuzz targets" cargo fmt --manifest-path fuzz/Cargo.toml --check
check "clippy" cargo clippy --quiet "${workspace[@]}" --all-targets -- -D warnings
check "clippy, with Parquet" cargo clippy --quiet -p gpuquota-enforcer --features parquet --bin gpuquotactl -- -D warnings
check "clippy, eBPF programs" ebpf_clippy
check "cargo doc" docs
check "unused dependencies" quietly cargo machete .
check "shellcheck" scripts_check

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'lint failed: %s\n' "$(IFS=','; echo "${failed[*]}")"
    exit 1
fi
echo "lint passed"
