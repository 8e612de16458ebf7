#!/usr/bin/env bash
# Builds the Debian package into target/debian and, as root, tries it: installation, upgrade, removal and purge.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

made=target/package
architecture=$(dpkg --print-architecture)
say "building"
cargo build --quiet --release -p gpuquota-enforcer
ctl=target/release/gpuquotactl
rm -rf "$made"
mkdir -p "$made/man" "$made/completions" target/debian
"$ctl" man "$made/man"
"$ctl" completions bash >"$made/completions/gpuquotactl"
"$ctl" completions zsh >"$made/completions/_gpuquotactl"
"$ctl" completions fish >"$made/completions/gpuquotactl.fish"

# package VERSION [OPTION...]: prints the path of the package
package() {
    local deb=target/debian/gpuquota_$1_$architecture.deb
    quietly cargo deb --no-build -p gpuquota-enforcer --deb-version "$1" --output "$deb" "${@:2}"
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
if [ "$(id -u)" -eq 0 ]; then
    scripts/test-deb.sh "$deb" "$newer"
else
    say "not tried: that needs root"
fi
