#!/usr/bin/env bash
# Makes a kernel for the virtual machine tests ready and prints the folder that it lies in, with these files:
#   vmlinuz        the kernel image
#   modules.load   names of the module files beside it that have to be loaded, in order; absent where all is built in
#   origin         where it came from
#
# usage: vm-kernel.sh stock | backport | override
#   stock      the distribution's default cloud kernel
#   backport   the distribution's 6.12 cloud kernel
#   override   6.12 with bpf_override_return: $GPUQUOTA_OVERRIDE_KERNEL, else a prebuilt one beside the repository,
#              else built from the distribution's source package
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

kernel=${1:?usage: vm-kernel.sh stock | backport | override}
cache=$repo/integration-tests/vm/cache
dir=$cache/$kernel
# What the tests need and some kernels have as a module.
modules=(fuse)

[ "$(uname -m)" = x86_64 ] || die "the virtual machine tests need an x86-64 host"

# The package that a meta package stands for at present.
real_package() { # META
    apt-cache depends --important "$1" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}

from_package() { # META
    local meta=$1 package name module list
    package=$(real_package "$meta")
    if [ -z "$package" ] && [ "$(id -u)" -eq 0 ]; then
        quietly apt-get update || true
        package=$(real_package "$meta")
    fi
    [ -n "$package" ] || die "no package $meta in apt's lists; run 'apt-get update' as root, with a network, and try again"
    work=$(mktemp -d "$cache/tmp.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # apt downloads as its own user if that one may write here.
    chmod 777 "$work"
    (cd "$work" && quietly apt-get download "$package") || die "cannot download the package $package"
    dpkg-deb -x "$work"/*.deb "$work/x"
    mkdir "$work/kernel"
    cp "$work"/x/boot/vmlinuz-* "$work/kernel/vmlinuz"
    list=$work/kernel/modules.load
    : >"$list"
    for name in "${modules[@]}"; do
        module=$(find "$work/x" -name "$name.ko" -o -name "$name.ko.xz" | head -n 1)
        [ -n "$module" ] || continue
        cp "$module" "$work/kernel/"
        [ "$module" = "${module%.xz}" ] || xz -d "$work/kernel/$name.ko.xz"
        echo "$name.ko" >>"$list"
    done
    basename "$work"/*.deb .deb >"$work/kernel/origin"
    mv "$work/kernel" "$dir"
}

from_image() { # FILE
    [ -r "$1" ] || die "cannot read the kernel $1"
    # The cache follows the file: another one, or a newer one, replaces it.
    if [ -e "$dir/vmlinuz" ] && cmp -s "$1" "$dir/vmlinuz"; then return 0; fi
    rm -rf "$dir"
    mkdir "$dir"
    install -m 644 "$1" "$dir/vmlinuz"
    echo "$1" >"$dir/origin"
}

mkdir -p "$cache"
# Several tests may ask for the same kernel at once.
exec 9>"$cache/.lock"
flock 9

case $kernel in
stock) [ -e "$dir/vmlinuz" ] || from_package linux-image-cloud-amd64 ;;
backport) [ -e "$dir/vmlinuz" ] || from_package linux-image-6.12-cloud-amd64 ;;
override)
    shipped=$repo/../shared/vm/bzImage-6.12-override
    if [ -n "${GPUQUOTA_OVERRIDE_KERNEL:-}" ]; then
        from_image "$GPUQUOTA_OVERRIDE_KERNEL"
    elif [ -e "$shipped" ]; then
        from_image "$shipped"
    elif ! [ -e "$dir/vmlinuz" ]; then
        scripts/build-override-kernel.sh "$dir" >&2
    fi
    ;;
*) die "unknown kernel '$kernel'; known: stock backport override" ;;
esac
echo "$dir"
