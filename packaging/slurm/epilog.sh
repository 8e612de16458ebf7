#!/bin/sh
# Slurm's Epilog: takes the tenant of a job away again. Put `Epilog=/usr/share/gpuquota/slurm/epilog.sh` into slurm.conf.
set -eu

policy=${GPUQUOTA_SLURM_POLICY:-/run/gpuquota/policy.d}
job=${SLURM_JOB_ID:?}
case $job in *[!0-9]*)
    echo "gpuquota: SLURM_JOB_ID is no number: $job" >&2
    exit 1
    ;;
esac
file=$policy/85-slurm-job-$job.toml
[ -e "$file" ] || exit 0
rm -f "$file"
# A daemon that is away reads what is there when it starts: that is no reason to drain a node.
gpuquotactl reload >&2 || echo "gpuquota: job $job is over, and the daemon was not told" >&2
