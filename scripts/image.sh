#!/usr/bin/env bash
# Builds the container image from the Debian package, with podman or docker, as gpuquota:VERSION.
#
# usage: image.sh [BUILD-OPTION...]   such as --build-arg BASE=… where the registries cannot be reached
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

# The first that works: docker may be there without its daemon. Found before minutes go into the package.
builder='' unusable=()
for name in podman docker; do
    command -v "$name" >/dev/null || continue
    if "$name" info >/dev/null 2>&1; then
        builder=$name
        break
    fi
    unusable+=("$name")
done
if [ -z "$builder" ]; then
    [ "${#unusable[@]}" -gt 0 ] || die "neither podman nor docker is installed"
    die "${unusable[*]}: installed, but \`${unusable[0]} info\` fails, as it does without the daemon; no image was built"
fi
ONLY=build scripts/deb.sh
deb=$(find target/debian -name 'gpuquota_*.deb' | sort | tail -n 1)
version=$(dpkg-deb -f "$deb" Version)
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
cp "$deb" "$context/gpuquota.deb"
cp packaging/container/Containerfile "$context/"
"$builder" build --tag "gpuquota:${version%-*}" --file "$context/Containerfile" "$@" "$context"
say "built gpuquota:${version%-*}"
