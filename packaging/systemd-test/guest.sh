#!/bin/bash
# Runs inside the virtual machine of scripts/test-systemd.sh, as a unit of its systemd: installs the package, sets quotas over the
# bus, upgrades and purges it, and looks after each step whether what should hold does. /opt/test holds what it needs.
set -uo pipefail

here=/opt/test
failed=0
step() { printf -- '-- %s\n' "$*"; }
check() { # WHAT COMMAND...
    local what=$1
    shift
    if "$@" >/tmp/check.log 2>&1; then
        echo "   ok: $what"
    else
        echo "   FAILED: $what"
        tail -n 15 /tmp/check.log
        failed=$((failed + 1))
    fi
}
refused() { ! "$@"; }
wait_for() { # COMMAND...: until it succeeds
    for _ in $(seq 240); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 1
    done
    "$@"
}
bus() { busctl --system call org.gpuquota.Enforcer1 /org/gpuquota/Enforcer1 org.gpuquota.Enforcer1.Manager "$@"; }
set_max() { bus SetQuota 'ssa(ss)b' vision "" 1 memory.max "$1" false; }
as_nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups -- "$@"; }
# A command in a unit of its own, in the slice that the tenant is.
in_slice() { # UNIT COMMAND...
    systemd-run --quiet --wait --collect --pipe --slice=gpu-vision.slice --unit="$1" \
        --setenv=SIMGPU_DIR=/run/simgpu/dev --setenv=LD_LIBRARY_PATH=/opt/sim -- "${@:2}"
}
workload() { # UNIT STEP...
    in_slice "$1" gpuquotactl run --tenant vision -- simtenant "${@:2}"
}
used() { gpuquotactl status vision --json | tr -d ' \n' | grep -o '"memory_used":[0-9]*' | head -n 1 | cut -d: -f2; }
# Everything that a package could leave.
listing() {
    find /etc /usr/bin /usr/sbin /usr/lib/gpuquota /usr/lib/systemd /usr/lib/tmpfiles.d /usr/share /lib/systemd /var/lib /run/gpuquota \
        /sys/fs/bpf \( -path '/var/lib/dpkg/*' -o -path '/var/lib/systemd/*' -o -path '/etc/ld.so.cache' \) -prune -o -print 2>/dev/null | sort
}

step "the machine: $(uname -r), systemd $(systemctl --version | head -n 1 | cut -d' ' -f2)"
insmod /opt/test/fuse.ko 2>/dev/null || true
mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf
systemctl start polkit.service
systemctl start simgpu.service
check "the simulated GPU is there" wait_for test -e /run/simgpu/dev/nvidiactl

before=$(listing)
step "installation"
mkdir -p /etc/gpuquota/gpuquota.toml.d /etc/gpuquota/policy.d
cp $here/settings.toml /etc/gpuquota/gpuquota.toml.d/90-test.toml
cp $here/policy.toml /etc/gpuquota/policy.d/60-test.toml
check "dpkg installs it" dpkg --force-confdef -i $here/old.deb
check "the service is active, so it has said that it is ready" wait_for systemctl is-active gpuquotad.service
if [ "$failed" -gt 0 ]; then
    # Nothing that follows could work.
    systemctl status --no-pager -l gpuquotad.service
    journalctl -b -o cat --no-pager | tail -n 40
    echo "gpuquota-vm: status 1"
    exit 1
fi
check "it is of Type=notify" systemctl show -p Type gpuquotad.service --value
check "it is enabled" systemctl is-enabled gpuquotad.service
check "it owns its name on the system bus" busctl --system status org.gpuquota.Enforcer1
check "gpuquotactl finds it there" gpuquotactl list
check "it hears of GPU faults by the kernel's log" \
    bash -c "gpuquotactl doctor | grep -q 'heard of by kernel-log'"
systemd-analyze security gpuquotad.service --no-pager 2>/dev/null | tail -n 1

step "a quota set over the bus holds for a unit in a slice"
check "root may set it" set_max 3GiB
check "polkit refuses nobody" refused as_nobody busctl --system call org.gpuquota.Enforcer1 /org/gpuquota/Enforcer1 \
    org.gpuquota.Enforcer1.Manager SetQuota 'ssa(ss)b' vision "" 1 memory.max 9GiB false
check "nobody may read" as_nobody busctl --system call org.gpuquota.Enforcer1 /org/gpuquota/Enforcer1 \
    org.gpuquota.Enforcer1.Manager ListTenants
check "what fits is granted" workload fits alloc 1GiB
# The daemon hears of a new cgroup by an event, which takes its time on an emulated processor.
check "the slice is governed" wait_for bash -c "gpuquotactl list --json | tr -d ' \n' | grep -q '/gpu.slice/gpu-vision.slice\"\]'"
check "what does not is refused" refused workload over alloc 4GiB
check "the refusal is in the journal, with its tenant" \
    bash -c 'journalctl -o json MESSAGE_ID=6c1d9a0f5b3e4e0f8f0c7a4d1e2b9a31 | grep -q "\"TENANT\":\"vision\""'
check "after a higher quota it is granted" bash -c "$(declare -f bus set_max in_slice workload); set_max 6GiB && workload more alloc 4GiB"
check "systemctl reload reads the files" systemctl reload gpuquotad.service

step "upgrade"
check "back to the lower quota" set_max 3GiB
systemd-run --quiet --collect --slice=gpu-vision.slice --unit=holder --setenv=SIMGPU_DIR=/run/simgpu/dev \
    --setenv=LD_LIBRARY_PATH=/opt/sim -- gpuquotactl run --tenant vision -- simtenant script 'alloc 1GiB; hold 2h'
check "somebody holds memory" wait_for bash -c "$(declare -f used); [ \"\$(used)\" -gt 1073741824 ]"
held=$(used)
# Tries to get past the limit as long as the upgrade takes.
systemd-run --quiet --collect --slice=gpu-vision.slice --unit=prober --setenv=SIMGPU_DIR=/run/simgpu/dev \
    --setenv=LD_LIBRARY_PATH=/opt/sim -- bash -c \
    'while :; do gpuquotactl run --tenant vision -- simtenant alloc 3GiB && touch /tmp/got-past; sleep 0.1; done'
pid=$(systemctl show -p MainPID --value gpuquotad.service)
check "dpkg upgrades it" dpkg --force-confdef --force-confold -i $here/new.deb
check "another daemon runs" bash -c "[ \"\$(systemctl show -p MainPID --value gpuquotad.service)\" != $pid ]"
check "the service is active" systemctl is-active gpuquotad.service
check "who held memory still runs" systemctl is-active holder.service
check "the charge is what it was" bash -c "$(declare -f used); [ \"\$(used)\" -ge $held ]"
check "the quota is what it was" refused workload again alloc 3GiB
systemctl stop prober.service
check "nobody got past it meanwhile" test ! -e /tmp/got-past
check "a killed daemon comes back" bash -c "$(declare -f wait_for); systemctl kill -s KILL gpuquotad.service; sleep 2; wait_for systemctl is-active gpuquotad.service"
pid=$(systemctl show -p MainPID --value gpuquotad.service)
systemctl kill -s STOP gpuquotad.service
another() { ! [[ "$(systemctl show -p MainPID --value gpuquotad.service)" =~ ^(0|$1)$ ]]; }
check "one that stands still is ended, and another comes" bash -c "$(declare -f wait_for another); wait_for another $pid && wait_for systemctl is-active gpuquotad.service"
check "and the charge with it" bash -c "$(declare -f used wait_for); wait_for gpuquotactl list && [ \"\$(used)\" -ge $held ]"

if [ -e $here/capabilities ]; then
    step "capabilities, dropped one at a time"
    unit=/lib/systemd/system/gpuquotad.service
    all=$(sed -n 's/^CapabilityBoundingSet=//p' $unit)
    override=/run/systemd/system/gpuquotad.service.d/90.conf
    mkdir -p "${override%/*}"
    policy=/etc/gpuquota/policy.d/70-capabilities.toml
    cat >$policy <<'TOML'
[tenant.vision]
launch.max = "50/s"
[tenant.ending]
cgroup = "/gpu.slice/gpu-ending.slice"
launch.max = "20/s"
launch.on-max = "deny"
launch.patience = "1s"
memory.max = "1GiB"
memory.on-max = "kill"
TOML
    check "the policy of this step loads" systemctl reload gpuquotad.service
    # A command with a limit of time: one that stays stopped would wait for ever.
    limited() { # UNIT SLICE COMMAND...
        systemd-run --quiet --wait --collect --pipe --slice="$2" --unit="$1" --property=RuntimeMaxSec=60 \
            --setenv=SIMGPU_DIR=/run/simgpu/dev --setenv=LD_LIBRARY_PATH=/opt/sim -- "${@:3}"
    }
    run() { limited "$1" gpu-vision.slice gpuquotactl run --tenant vision -- simtenant "${@:2}"; }
    other_user() { # UNIT TENANT STEP...
        limited "$1" "gpu-$2.slice" setpriv --reuid=65534 --regid=65534 --clear-groups -- simtenant "${@:3}"
    }
    # What a workload meets: 2 is its exit code for want of memory. systemd takes an end by SIGTERM as a good one, but who is
    # ended says nothing of what it did.
    meets() { # COMMAND...
        "$@" >/tmp/workload.log 2>&1
        case $? in
        0) if grep -Eq '^(allocated|launched)' /tmp/workload.log; then echo "granted"; else echo "ended"; fi ;;
        2) echo "refused" ;;
        *) echo "ended" ;;
        esac
    }
    lost=()
    should() { # WHAT WANTED FOUND
        [ "$2" = "$3" ] || lost+=("$1: $3")
    }
    yes_or_no() { if "$@" >/dev/null 2>&1; then echo yes; else echo no; fi; }
    # How many launches a workload said that it made.
    launches() { sed -n 's/^launched \([0-9]*\) in .*/\1/p' /tmp/workload.log; }
    try() {
        local found
        lost=()
        : >/tmp/doctor.log
        systemctl daemon-reload
        systemctl reset-failed gpuquotad.service
        if ! systemctl restart gpuquotad.service; then
            lost=("does not start: $(journalctl -u gpuquotad -n 20 -o cat | grep -m 1 -i error)")
            return
        fi
        should "what fits, under run" granted "$(meets run cap-fits alloc 512MiB)"
        should "what does not, under run" refused "$(meets run cap-over alloc 4GiB)"
        should "what does not, under run as another user" refused \
            "$(meets limited cap-foreign gpu-vision.slice gpuquotactl run --tenant vision --uid 65534 --gid 65534 -- simtenant alloc 4GiB)"
        should "what fits, without run" granted "$(meets other_user cap-plain vision alloc 512MiB)"
        should "what does not, without run" refused "$(meets other_user cap-plain-over vision alloc 4GiB)"
        should "charges of before" yes "$(yes_or_no test "$(used)" -ge "$held")"
        should "freeze" yes "$(yes_or_no gpuquotactl freeze vision)"
        should "thaw" yes "$(yes_or_no gpuquotactl thaw vision)"
        # Another user's, so stopping and continuing it is signalling across users.
        found=$(meets other_user cap-launch vision launch --for 4s)
        should "launches of another user" granted "$found"
        if [ "$found" = granted ]; then should "their pace is held" yes "$(yes_or_no test "$(launches)" -lt 600)"; fi
        should "one who may not wait" ended "$(meets other_user cap-deny ending launch --for 30s)"
        # It goes on after a refusal, until it is ended.
        should "one over its memory" ended \
            "$(meets other_user cap-kill ending script 'random --seed 1 --ops 200 --largest 512MiB; hold 15s; free; alloc 1MiB')"
        should "pacing thread at real-time priority" yes \
            "$(yes_or_no grep -q 'launch-pacer.*FF' <(ps -L -o comm=,cls= -p "$(systemctl show -p MainPID --value gpuquotad.service)"))"
        gpuquotactl doctor >/tmp/doctor.log 2>&1
        should "GPU faults heard of by the kernel's log" yes "$(yes_or_no grep -q 'heard of by kernel-log' /tmp/doctor.log)"
        should "cgroups found by their ids" yes "$(yes_or_no grep -q 'found by their ids' /tmp/doctor.log)"
        should "backend rewrite" yes "$(yes_or_no grep -Eq '^ *rewrite +(active|available)' /tmp/doctor.log)"
    }
    say_lost() { printf '      %s\n' "${lost[@]}"; }
    warnings() {
        journalctl -u gpuquotad --since="$1" -p warning -o cat --no-pager | grep -v 'leaves little\|^ \|^help' |
            sed 's/pid=[0-9]* *//' | sort -u | head -n 6 | sed 's/^/      says: /'
    }
    # Beside the single ones: whether those that CAP_SYS_ADMIN was divided into do instead of it.
    parts="CAP_BPF CAP_PERFMON CAP_CHECKPOINT_RESTORE"
    for dropped in none $all "CAP_SYS_ADMIN for its parts"; do
        kept=$(for capability in $all; do [ "$capability" = "${dropped%% *}" ] || printf '%s ' "$capability"; done)
        [ "$dropped" = "${dropped%% *}" ] || kept="$kept$parts"
        printf '[Service]\nCapabilityBoundingSet=\nCapabilityBoundingSet=%s\n' "$kept" >$override
        since=$(date '+%F %T')
        try
        echo "   dropped $dropped: ${#lost[@]} things go wrong"
        [ "${#lost[@]}" -eq 0 ] || say_lost
        warnings "$since"
        if [ "$dropped" = none ]; then
            cp /tmp/doctor.log /tmp/doctor.all
            check "with all of them nothing goes wrong" test "${#lost[@]}" -eq 0
        else
            diff /tmp/doctor.all /tmp/doctor.log | sed -n 's/^>/      doctor:/p'
            # Older kernels take CAP_SYS_ADMIN for it as well, as Linux 6.18 does not.
            if [ "$dropped" = CAP_SYSLOG ] && setpriv --bounding-set=-syslog dd if=/dev/kmsg of=/dev/null bs=8192 count=1 2>/dev/null; then
                echo "   not looked at: this kernel's log needs no CAP_SYSLOG beside CAP_SYS_ADMIN"
                continue
            fi
            check "without $dropped something does" test "${#lost[@]}" -gt 0
        fi
    done
    rm -r "${override%/*}" $policy
    systemctl daemon-reload
    systemctl restart gpuquotad.service
fi

step "removal and purge"
check "dpkg removes it" dpkg -r gpuquota
check "the daemon is gone" refused systemctl is-active gpuquotad.service
check "nothing of it is attached any more" test ! -e /sys/fs/bpf/gpuquota
check "what the admin wrote is there" test -e /etc/gpuquota/policy.d/60-test.toml
check "without it, memory is without limits again" in_slice free simtenant alloc 4GiB
check "dpkg purges it" dpkg -P gpuquota
systemctl stop holder.service
systemctl daemon-reload
left=$(comm -13 <(echo "$before") <(listing) | grep -v '^/var/lib/private' || true)
check "nothing is left" test -z "$left"
[ -z "$left" ] || echo "$left"
check "no unit has failed" bash -c '! systemctl list-units --state=failed --plain --no-legend | grep -v "holder\|prober" | grep .'

if [ "$failed" -gt 0 ]; then
    journalctl -u gpuquotad -o cat --no-pager | tail -n 60
    echo "gpuquota-vm: status 1"
else
    echo "gpuquota-vm: status 0"
fi
