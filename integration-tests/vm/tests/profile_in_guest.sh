# shellcheck shell=sh
echo "KERNEL $(uname -r)"
exec /opt/gq/profile --nocapture --test-threads 1 \
    a_policy_can_ask_for_it_at_all_times \
    launches_are_counted_named_and_timed
