#!/usr/bin/env bash
# Runs the test suites, prints each test program with its closing line, then one total. Fails if anything failed, if a suite
# does not compile, or if a suite ran no test. Full output: target/test-logs/SUITE.log, and on the terminal with V=1.
#
#   crates   unit, property and documentation tests of every crate; no root needed
#   native   the daemon on the simulated GPU, on this host's kernel; needs root
#   vm       the same on other kernels, in QEMU; needs no KVM and no root
#
# usage: test.sh [SUITE...]   default: all
set -uo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

logs=target/test-logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0 bad_suites=()

# `--test NAME` for each test program of a crate, so that it can be run with the whole workspace selected: naming the crate
# instead would resolve other features for its dependencies and build all of them again.
test_programs() { # CRATE-FOLDER
    local file
    for file in "$1"/tests/*.rs; do
        [ -e "$file" ] && printf -- '--test\n%s\n' "$(basename "$file" .rs)"
    done
}

cargo_test() {
    local args
    case $1 in
    crates)
        cargo test "${workspace[@]}" --exclude gpuquota-vm --exclude gpuquota-native --no-fail-fast
        ;;
    *)
        mapfile -t args < <(test_programs "integration-tests/$1")
        [ "${#args[@]}" -gt 0 ] || { echo "no test programs in integration-tests/$1/tests"; return 1; }
        # One test at a time: they share this machine's kernel, its cgroup tree and its two cores.
        cargo test "${workspace[@]}" --no-fail-fast "${args[@]}" -- --test-threads=1
        ;;
    esac
}

# Shows the test programs that have tests, each with the runner's own closing line.
summary_lines() {
    awk '
        /^ +(Running|Doc-tests) / { sub(/^ +/, ""); sub(/ \(.*/, ""); name = $0 }
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

case " ${suites[*]} " in
*" native "* | *" vm "*)
    if [[ " ${suites[*]} " == *" native "* ]]; then
        [ "$(id -u)" -eq 0 ] || die "the native suite needs root; SUITE=crates and SUITE=vm do not"
        scripts/prepare-host.sh | sed 's/^/mounted /'
    fi
    # These suites start the programs themselves. With --all-targets the same features are chosen as for the tests.
    say "building the programs under test"
    cargo build --quiet "${workspace[@]}" --all-targets </dev/null || die "the workspace does not build"
    ;;
esac

for suite in "${suites[@]}"; do
    run_suite "$suite"
done

[ "${#bad_suites[@]}" -eq 0 ] || echo "failed suites: ${bad_suites[*]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
