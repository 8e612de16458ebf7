# shellcheck shell=sh
echo "KERNEL $(uname -r)"
exec /opt/gq/conformance --nocapture --test-threads 1
