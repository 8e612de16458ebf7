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

# The eBPF crate is checked as the enforcer's build script compiles it: by Debian's compiler, for the BPF target.
ebpf_clippy() {
    RUSTC_BOOTSTRAP=aya_ebpf CARGO_ENCODED_RUSTFLAGS="--cfg=bpf_target_arch=\"$(uname -m)\"" \
        rustup run debian-bpf cargo clippy --quiet -p gpuquota-ebpf --bins --release --target bpfel-unknown-none \
        --target-dir target/ebpf-lint -- -D warnings
}

docs() {
    RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps "${workspace[@]}"
}

scripts_check() {
    git ls-files -z -- '*.sh' .ci/run | xargs -0 -r shellcheck -x
}

check "cargo fmt" cargo fmt --all --check
check "clippy" cargo clippy --quiet "${workspace[@]}" --all-targets -- -D warnings
check "clippy, eBPF programs" ebpf_clippy
check "cargo doc" docs
check "unused dependencies" quietly cargo machete .
check "shellcheck" scripts_check

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'lint failed: %s\n' "$(IFS=','; echo "${failed[*]}")"
    exit 1
fi
echo "lint passed"
