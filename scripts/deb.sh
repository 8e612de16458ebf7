#!/usr/bin/env bash
# Builds the Debian package into target/debian and, as root, tries it: installation, upgrade, removal and purge.
#
# usage: deb.sh
#        PROFILE=dev deb.sh      with the programs that tests use, not optimized: quick to build
#        ONLY=build deb.sh       without trying it; the newer package for an upgrade is target/package/newer.deb
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

made=target/package
architecture=$(dpkg --print-architecture)
profile=${PROFILE:-release}
folder=target/$profile
[ "$profile" != dev ] || folder=target/debug
say "building"
cargo build --quiet --profile "$profile" "${workspace[@]}" --bin gpuquotad --bin gpuquotactl
ctl=$folder/gpuquotactl
rm -rf "$made"
mkdir -p "$made/man" "$made/completions" target/debian
"$ctl" man "$made/man"
"$ctl" completions bash >"$made/completions/gpuquotactl"
"$ctl" completions zsh >"$made/completions/_gpuquotactl"
"$ctl" completions fish >"$made/completions/gpuquotactl.fish"

# package VERSION [OPTION...]: prints the path of the package
package() {
    local deb=target/debian/gpuquota_$1_$architecture.deb
    quietly cargo deb --no-build --profile "$profile" --strip -p gpuquota-enforcer --deb-version "$1" --output "$deb" "${@:2}"
    echo "$deb"
}

version=$(cargo metadata --format-version 1 --no-deps --offline |
    sed -n 's/.*"name":"gpuquota-enforcer","version":"\([^"]*\)".*/\1/p')
[ -n "$version" ] || die "cargo does not tell the version of gpuquota-enforcer"
# First and out of the way: cargo-deb removes the packages that it made before.
newer=$made/newer.deb
mv "$(package "$version-2~test" --fast)" "$newer"
deb=$(package "$version-1")
say "built $deb"
if [ "${ONLY:-}" = build ]; then exit 0; fi
if [ "$(id -u)" -eq 0 ]; then
    scripts/test-deb.sh "$deb" "$newer"
else
    say "not tried: that needs root"
fi
