#!/usr/bin/env bash
# Runs the test suites, prints each test program with its closing line, then one total. Fails if anything failed, if a suite
# does not compile, or if a suite ran no test. Full output: target/test-logs/SUITE.log, and on the terminal with V=1.
# ALL=1 runs the tests of the native and the vm suite that are left out because they depend on more than this repository.
#
#   crates   unit, property and documentation tests of every crate; no root needed
#   native   the daemon on the simulated GPU, on this host's kernel; needs root
#   vm       the same on other kernels, in QEMU; needs no KVM and no root
#
# usage: test.sh [SUITE...]   default: all
set -uo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

# The lines that are picked out below are looked for without colours.
export CARGO_TERM_COLOR=never
logs=target/test-logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0 bad_suites=()

# The folder that a suite's test programs are in; every other test program of the workspace belongs to the suite crates.
suite_folder() { echo "integration-tests/$1"; }

# Prints `--test NAME` for each test program in the tests folders of these crates. With programs named this way, and not by
# their crate, cargo resolves features for the whole workspace each time and builds every dependency once.
test_programs() { # CRATE-FOLDER...
    local crate file
    for crate in "$@"; do
        for file in "$crate"/tests/*.rs "$crate"/tests/*/main.rs; do
            [ -e "$file" ] || continue
            [ "${file##*/}" != main.rs ] || file=${file%/main.rs}
            printf -- '--test\n%s\n' "$(basename "$file" .rs)"
        done
    done
}

cargo_test() { # SUITE
    local crates args rc=0
    if [ "$1" = crates ]; then
        mapfile -t crates < <(find . -name target -prune -o -name Cargo.toml -printf '%h\n' |
            grep -vxF -e "./$(suite_folder native)" -e "./$(suite_folder vm)" -e .)
        mapfile -t args < <(test_programs "${crates[@]}")
        cargo test "${workspace[@]}" --no-fail-fast --lib --bins "${args[@]}" || rc=1
        cargo test "${workspace[@]}" --no-fail-fast --doc || rc=1
        cargo test -p gpuquota-enforcer --features parquet --bin gpuquotactl record:: || rc=1
        return "$rc"
    fi
    mapfile -t args < <(test_programs "$(suite_folder "$1")")
    [ "${#args[@]}" -gt 0 ] || {
        echo "error: no test programs in $(suite_folder "$1")/tests"
        return 1
    }
    # The native tests share this host's one cgroup tree and its BPF hooks; virtual machines share nothing.
    args+=(--)
    [ "$1" = vm ] || args+=(--test-threads=1)
    [ -z "${ALL:-}" ] || args+=(--include-ignored)
    cargo test "${workspace[@]}" --no-fail-fast "${args[@]}"
}

# Shows the test programs that have tests, each with the runner's own closing line.
summary_lines() {
    awk '
        /^ +(Running|Doc-tests) / {
            name = $0
            sub(/^ +(Running )?/, "", name)
            # "unittests src/lib.rs (target/debug/deps/CRATE-HASH)" says the crate only at its end.
            if (match(name, / \(.*\/deps\//)) {
                crate = substr(name, RSTART + RLENGTH)
                sub(/-[^-]*$/, "", crate)
                name = substr(name, 1, RSTART - 1)
                if (name ~ /^unittests/) { name = name " of " crate }
            }
        }
        /^test result: / {
            if ($0 !~ / 0 passed; 0 failed; 0 ignored;/) { print "  " name; print $0 }
            fflush()
        }'
}

run_suite() {
    local suite=$1 log=$logs/$1.log start=$SECONDS rc=0 counts p f s
    say "suite $suite"
    if [ -n "${V:-}" ]; then
        cargo_test "$suite" </dev/null 2>&1 | tee "$log"
    else
        cargo_test "$suite" </dev/null 2>&1 | tee "$log" | summary_lines
    fi
    rc=${PIPESTATUS[0]}
    counts=$(awk '/^test result: / { p += $4; f += $6; s += $8 } END { print p + 0, f + 0, s + 0 }' "$log")
    read -r p f s <<<"$counts"
    # A suite that does not compile, or whose process dies, has no failed test to count.
    if [ "$rc" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    if [ "$rc" -eq 0 ] && [ "$p" -eq 0 ]; then
        echo "suite $suite ran no test"
        f=1
    fi
    if [ "$f" -gt 0 ]; then
        bad_suites+=("$suite")
        if [ -z "${V:-}" ]; then
            echo "-- failures of suite $suite, from $log:"
            awk '/^error(\[|:)/ || /^failures:$/ { on = 1 } /^test result: / { on = 0 } on' "$log" | head -n 400
        fi
        say "suite $suite: FAILED, $p tests passed and $f failed in $((SECONDS - start)) s"
    else
        say "suite $suite: ok, $p tests in $((SECONDS - start)) s"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

suites=("$@")
[ "${#suites[@]}" -gt 0 ] || suites=(crates native vm)
for suite in "${suites[@]}"; do
    case $suite in
    crates | native | vm) ;;
    *) die "unknown suite '$suite'; known: crates native vm" ;;
    esac
done

if [[ " ${suites[*]} " == *" native "* ]]; then
    [ "$(id -u)" -eq 0 ] || die "the native suite needs root; SUITE=crates and SUITE=vm do not"
    scripts/prepare-host.sh | sed 's/^/mounted /' || die "the host lacks what the native suite needs"
fi
# The native and the vm suite start programs that cargo does not build for them. With --all-targets the same features are
# chosen as for the tests.
say "building"
cargo build --quiet "${workspace[@]}" --all-targets </dev/null || die "the workspace does not build"

for suite in "${suites[@]}"; do
    run_suite "$suite"
done

[ "${#bad_suites[@]}" -eq 0 ] || echo "failed suites: ${bad_suites[*]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
