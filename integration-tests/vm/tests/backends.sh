# shellcheck shell=sh
exec /opt/gq/conformance --nocapture --test-threads 1
