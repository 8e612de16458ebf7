#!/usr/bin/env bash
# Tries a package on a throw-away copy of this host (an overlay; nothing of the host is changed, and no systemd runs in it):
# installation, upgrade with an edited conffile, removal, purge. Fails at the first thing that is not as it should be.
#
# usage: test-deb.sh PACKAGE NEWER-PACKAGE   (as root)
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

if [ "${1:-}" != inside ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    cp "$1" "$scratch/old.deb"
    cp "$2" "$scratch/new.deb"
    # The mounts end with their namespace.
    unshare --mount --pid --fork --mount-proc "$BASH" "$repo/scripts/test-deb.sh" inside "$scratch"
    exit
fi

scratch=$2
copy=$scratch/root
mkdir "$scratch/upper-fs" "$copy"
mount -t tmpfs none "$scratch/upper-fs"
mkdir "$scratch/upper-fs/upper" "$scratch/upper-fs/work"
mount -t overlay none -o "lowerdir=/,upperdir=$scratch/upper-fs/upper,workdir=$scratch/upper-fs/work" "$copy"
mount -t tmpfs none "$copy/run"
mount -t tmpfs none "$copy/tmp"
mount -t proc none "$copy/proc"
mount --rbind /dev "$copy/dev"
cp "$scratch"/*.deb "$copy/tmp/"

in_copy() { chroot "$copy" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@"; }
fail() { die "package test: $*"; }
there() { for path; do [ -e "$copy$path" ] || fail "$path is missing"; done; }
absent() { for path; do [ ! -e "$copy$path" ] || fail "$path is left"; done; }
# Everything that a package could leave.
listing() {
    # What is not there is not found.
    (
        cd "$copy"
        find etc usr/bin usr/sbin usr/lib/gpuquota usr/lib/systemd usr/lib/tmpfiles.d usr/share/dbus-1 usr/share/polkit-1 \
        usr/share/gpuquota usr/share/doc/gpuquota usr/share/bash-completion usr/share/zsh usr/share/fish var/lib/gpuquota \
        var/lib/systemd 2>/dev/null || true
    ) | sort
}

before=$(listing)
quietly in_copy dpkg --force-depends -i /tmp/old.deb
in_copy dpkg --verify gpuquota | grep . && fail "installed files differ from the package"
there /usr/sbin/gpuquotad /usr/bin/gpuquotactl /lib/systemd/system/gpuquotad.service /etc/gpuquota/gpuquota.toml \
    /etc/gpuquota/policy.d/50-tenants.toml /usr/lib/gpuquota/policy.d/00-classes.toml /usr/lib/tmpfiles.d/gpuquota.conf \
    /usr/share/dbus-1/system.d/org.gpuquota.Enforcer1.conf /usr/share/dbus-1/system-services/org.gpuquota.Enforcer1.service \
    /usr/share/dbus-1/interfaces/org.gpuquota.Enforcer1.Tenant.xml /usr/share/polkit-1/actions/org.gpuquota.enforcer1.policy \
    /usr/share/bash-completion/completions/gpuquotactl /usr/share/zsh/vendor-completions/_gpuquotactl \
    /usr/share/fish/vendor_completions.d/gpuquotactl.fish /usr/share/doc/gpuquota/copyright \
    /usr/share/gpuquota/prometheus-rules.yaml /usr/share/gpuquota/oci/seccomp.json
for page in man1/gpuquotactl.1 man1/gpuquotactl-run.1 man1/gpuquotactl-set-property.1 man8/gpuquotad.8; do
    in_copy dpkg -L gpuquota | grep -qx "/usr/share/man/$page.gz" || fail "no manual page $page"
done
in_copy dpkg -s gpuquota | grep -q '^Status: install ok installed$' || fail "not configured"
[ "$(in_copy dpkg -s gpuquota | grep -c '^ /etc/gpuquota/')" -eq 2 ] || fail "conffiles"
in_copy gpuquotactl --version >/dev/null || fail "gpuquotactl does not run"
in_copy gpuquotactl policy check >/dev/null || fail "the shipped policy does not load"
in_copy gpuquotad --check || fail "the shipped settings do not load"
in_copy test -L /etc/systemd/system/multi-user.target.wants/gpuquotad.service || fail "not enabled"
in_copy test -L /etc/systemd/system/dbus-org.gpuquota.Enforcer1.service || fail "no alias for the bus"
say "package: installs"

# What an admin wrote survives an upgrade and a removal, and so does the decision not to start it.
echo '# edited' >>"$copy/etc/gpuquota/gpuquota.toml"
echo '# mine' >"$copy/etc/gpuquota/policy.d/60-mine.toml"
quietly in_copy systemctl disable gpuquotad.service
quietly in_copy dpkg --force-depends --force-confdef --force-confold -i /tmp/new.deb
in_copy dpkg -s gpuquota | grep '^Version:' | grep -q '~test$' || fail "not upgraded"
grep -q '# edited' "$copy/etc/gpuquota/gpuquota.toml" || fail "an edited conffile was replaced"
absent /etc/systemd/system/multi-user.target.wants/gpuquotad.service
say "package: upgrades"

quietly in_copy dpkg -r gpuquota
absent /usr/sbin/gpuquotad /usr/bin/gpuquotactl /lib/systemd/system/gpuquotad.service
there /etc/gpuquota/gpuquota.toml /etc/gpuquota/policy.d/60-mine.toml
quietly in_copy dpkg -P gpuquota
in_copy dpkg -s gpuquota >/dev/null 2>&1 && fail "still known to dpkg"
left=$(comm -13 <(echo "$before") <(listing))
[ -z "$left" ] || fail "left after purge: $left"
say "package: removes, purges and leaves nothing"
