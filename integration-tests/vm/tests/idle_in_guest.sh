# shellcheck shell=sh
echo "KERNEL $(uname -r)"
exec /opt/gq/idle --nocapture --test-threads 1 \
    who_waits_for_orders_waits_for_io \
    what_cannot_be_looked_at_is_said
