# shellcheck shell=sh
echo "KERNEL $(uname -r)"
exec /opt/gq/launch --nocapture --test-threads 1 \
    who_has_no_launch_budget_is_not_touched \
    every_way_to_launch_is_counted_once \
    the_death_of_the_daemon_leaves_nothing_frozen \
    deny_ends_a_process_that_goes_over_its_budget
