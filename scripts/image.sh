#!/usr/bin/env bash
# Builds the container image from the Debian package, with podman or docker, as gpuquota:VERSION.
#
# usage: image.sh [BUILD-OPTION...]   such as --build-arg BASE=… where the registries cannot be reached
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

builder=$(command -v podman || command -v docker) || die "neither podman nor docker is installed"
ONLY=build scripts/deb.sh
deb=$(find target/debian -name 'gpuquota_*.deb' | sort | tail -n 1)
version=$(dpkg-deb -f "$deb" Version)
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
cp "$deb" "$context/gpuquota.deb"
cp packaging/container/Containerfile "$context/"
"$builder" build --tag "gpuquota:${version%-*}" --file "$context/Containerfile" "$@" "$context"
say "built gpuquota:${version%-*}"
