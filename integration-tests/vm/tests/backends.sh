# shellcheck shell=sh
set -e
echo "KERNEL $(uname -r)"
/opt/gq/conformance --nocapture --test-threads 1
# Programs of the native tests that this kernel is to pass as well, where the test has packed some.
for program in /opt/gq/also-*; do
    [ ! -e "$program" ] || "$program" --nocapture --test-threads 1
done
