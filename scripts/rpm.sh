#!/usr/bin/env bash
# Builds the RPM package into target/rpm from the files of the Debian package, and tries it in a folder of its own:
# installation, verification, upgrade, removal. Needs no host with RPM.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

ONLY=build scripts/deb.sh
deb=$(find target/debian -name 'gpuquota_*.deb' ! -name '*~test*' | sort | tail -n 1)
[ -n "$deb" ] || die "no Debian package in target/debian"
version=$(dpkg-deb -f "$deb" Version)
version=${version%-*}
made=$repo/target/rpm
rm -rf "$made"
mkdir -p "$made/staged"
dpkg-deb -x "$deb" "$made/staged"

# Where RPM distributions have these.
move() { # FROM TO
    mkdir -p "$(dirname "$made/staged/$2")"
    mv "$made/staged/$1" "$made/staged/$2"
    rmdir -p --ignore-fail-on-non-empty "$made/staged/$(dirname "$1")"
}
move lib/systemd/system/gpuquotad.service usr/lib/systemd/system/gpuquotad.service
move usr/share/zsh/vendor-completions/_gpuquotactl usr/share/zsh/site-functions/_gpuquotactl
find "$made/staged/usr/share/doc" -name 'changelog*' -delete

# Only what the admin edits is configuration; folders of the distribution are not ours.
(cd "$made/staged" && find . -type f -printf '/%P\n') | sed \
    -e 's|^/etc/gpuquota/.*|%config(noreplace) &|' -e 's|^/usr/share/doc/.*|%doc &|' >"$made/files"
for folder in /etc/gpuquota /etc/gpuquota/policy.d /usr/lib/gpuquota /usr/lib/gpuquota/policy.d /usr/share/gpuquota; do
    echo "%dir $folder" >>"$made/files"
done

build() { # VERSION: prints the path of the package
    quietly rpmbuild -bb --target x86_64 --define "_topdir $made/build" --define "_rpmdir $made" \
        --define "package_version $1" --define "staged $made/staged" --define "staged_files $made/files" \
        packaging/rpm/gpuquota.spec
    find "$made" -maxdepth 2 -name "gpuquota-$1-*.rpm"
}
rpm=$(build "$version")
newer=$(build "$version.1")
say "built $rpm"

# A folder as root, so that no host is needed; scripts would run programs that are not in there.
root=$made/root
into_root() { quietly rpm --root "$root" --dbpath /var/lib/rpm "$@"; }
fail() { die "rpm test: $*"; }
mkdir -p "$root"
into_root -i --nodeps --noscripts --ignorearch "$rpm"
for path in usr/sbin/gpuquotad usr/bin/gpuquotactl usr/lib/systemd/system/gpuquotad.service etc/gpuquota/gpuquota.toml \
    usr/share/dbus-1/system.d/org.gpuquota.Enforcer1.conf usr/share/zsh/site-functions/_gpuquotactl; do
    [ -e "$root/$path" ] || fail "/$path is missing"
done
into_root -V --nodeps --noscripts gpuquota || fail "installed files differ from the package"
[ "$(rpm -qcp "$rpm" | grep -c '^/etc/gpuquota/')" -eq 2 ] || fail "configuration files"
for script in postinstall preuninstall postuninstall; do
    rpm -qp --scripts "$rpm" | grep -q "^$script scriptlet" || fail "no $script script"
done
rpm -qp --scripts "$rpm" | sed '/scriptlet (using/d' | sh -n || fail "a script is no shell script"
echo '# edited' >>"$root/etc/gpuquota/gpuquota.toml"
into_root -U --nodeps --noscripts --ignorearch "$newer"
grep -q '# edited' "$root/etc/gpuquota/gpuquota.toml" || fail "an edited configuration file was replaced"
rpm --root "$root" --dbpath /var/lib/rpm -q gpuquota | grep -q "$version.1" || fail "not upgraded"
into_root -e --nodeps --noscripts gpuquota
left=$(find "$root" -path "$root/var/lib/rpm" -prune -o -type f -print | grep -v '\.rpmsave$' || true)
[ -z "$left" ] || fail "left after removal: $left"
rm -rf "$root" "$newer"
say "rpm: installs, verifies, upgrades and removes"
