#!/bin/sh
# Slurm's Prolog: makes a tenant of a job, with the properties that /etc/gpuquota/slurm.conf gives its partition, before its first
# step starts. Put `Prolog=/usr/share/gpuquota/slurm/prolog.sh` into slurm.conf. If it fails, Slurm drains the node and queues the
# job again, so no job runs without its limits.
#
# A line of /etc/gpuquota/slurm.conf: PARTITION KEY=VALUE…   (* for every other partition; # starts a comment)
set -eu

conf=${GPUQUOTA_SLURM_CONF:-/etc/gpuquota/slurm.conf}
policy=${GPUQUOTA_SLURM_POLICY:-/run/gpuquota/policy.d}
# Where slurmstepd makes the cgroups of jobs (cgroup v2).
scope=${GPUQUOTA_SLURM_SCOPE:-/system.slice/slurmstepd.scope}

fail() {
    echo "gpuquota: $*" >&2
    exit 1
}

job=${SLURM_JOB_ID:?}
partition=${SLURM_JOB_PARTITION:-}
case $job in *[!0-9]*) fail "SLURM_JOB_ID is no number: $job" ;; esac
[ -r "$conf" ] || fail "cannot read $conf"

# Properties of the partition, else those of *; none means that the job is no tenant of its own.
properties=$(awk -v want="$partition" '
    { sub(/#.*/, "") }
    $1 == want && !found { found = 1; own = $0; sub(/^[ \t]*[^ \t]+[ \t]*/, "", own) }
    $1 == "*" && !other { other = 1; all = $0; sub(/^[ \t]*[^ \t]+[ \t]*/, "", all) }
    END { print found ? own : all }' "$conf")
[ -n "$properties" ] || exit 0

file=$policy/85-slurm-job-$job.toml
mkdir -p "$policy"
# Does not end in .toml, so it is no policy before it is whole.
new=$file.new
{
    echo "# Written by Slurm's prolog for job $job; its epilog removes it."
    echo "[tenant.slurm-$job]"
    echo "cgroup = \"$scope/job_$job\""
    # shellcheck disable=SC2086 # one property a word
    for property in $properties; do
        case $property in
        *[\"\\]*) fail "$conf: a property has no quotation mark or backslash: $property" ;;
        *=*) ;;
        *) fail "$conf: write KEY=VALUE instead of $property" ;;
        esac
        value=${property#*=}
        case $value in
        *[!0-9]* | "") echo "${property%%=*} = \"$value\"" ;;
        *) echo "${property%%=*} = $value" ;;
        esac
    done
} >"$new"
mv "$new" "$file"
if ! gpuquotactl reload >&2; then
    rm -f "$file"
    fail "job $job: the tenant was not accepted; see above"
fi
