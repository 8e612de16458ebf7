#!/usr/bin/env bash
# Makes a kernel for the virtual machine tests ready and prints the folder that it lies in, with these files:
#   vmlinuz        the kernel image
#   modules.load   names of the module files beside it that have to be loaded, in order; absent where all is built in
#   origin         where it came from
# They are kept in $GPUQUOTA_VM_CACHE, by default integration-tests/vm/cache.
#
# usage: vm-kernel.sh stock | backport | newest | override
#   stock      the distribution's default cloud kernel
#   backport   the distribution's 6.12 cloud kernel
#   newest     the cloud kernel of the distribution's next release's backports
#   override   6.12 with bpf_override_return: $GPUQUOTA_OVERRIDE_KERNEL, else a prebuilt one beside the repository,
#              else built from the distribution's source package
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

kernel=${1:?usage: vm-kernel.sh stock | backport | newest | override}
cache=${GPUQUOTA_VM_CACHE:-$repo/integration-tests/vm/cache}
dir=$cache/$kernel
# What the tests need and some kernels have as a module.
modules=(fuse)

[ "$(uname -m)" = x86_64 ] || die "the virtual machine tests need an x86-64 host"

# Options for apt-get and apt-cache; empty means the host's own sources.
apt_view=()

# Looks at another release of the distribution, from the server that the host's own sources name, without changing them.
use_release() { # SUITE
    local state=$cache/apt-$1 site
    # shellcheck disable=SC2016 # apt fills these in
    site=$(apt-get indextargets --format '$(SITE) $(COMPONENT)' 'Identifier: Packages' |
        awk '$2 == "main" && $1 !~ /security/ && !found++ { print $1 }')
    [ -n "$site" ] || die "apt's sources name no server of the distribution"
    mkdir -p "$state"/{lists/partial,cache/archives/partial,parts}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $1 main" >"$state/sources.list"
    apt_view=(-o "Dir::Etc::SourceList=$state/sources.list" -o "Dir::Etc::SourceParts=$state/parts"
        -o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state/cache")
    quietly apt-get "${apt_view[@]}" update || die "cannot read the package lists of $1"
}

# The first package that PACKAGE depends on and whose name starts with PREFIX and a version. Nothing if there is none.
dependency() { # PACKAGE PREFIX
    { apt-cache "${apt_view[@]}" depends --important "$1" 2>/dev/null || true; } |
        sed -n "s/^ *Depends: \\($2-[0-9].*\\)/\\1/p" | head -n 1
}

from_package() { # META-PACKAGE
    local meta=$1 package binary name module list
    package=$(dependency "$meta" linux-image)
    if [ -z "$package" ] && [ "${#apt_view[@]}" -eq 0 ] && [ "$(id -u)" -eq 0 ]; then
        quietly apt-get update || true
        package=$(dependency "$meta" linux-image)
    fi
    [ -n "$package" ] || die "no package $meta in apt's lists; run 'apt-get update' as root, with a network, and try again"
    # Since 7.2 the image has a package of its own, and the package of that name is empty.
    binary=$(dependency "$package" linux-binary)
    package=${binary:-$package}
    work=$(mktemp -d "$cache/tmp.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # apt downloads as its own user if that one may write here.
    chmod 777 "$work"
    (cd "$work" && quietly apt-get "${apt_view[@]}" download "$package") || die "cannot download the package $package"
    dpkg-deb -x "$work"/*.deb "$work/x"
    mkdir "$work/kernel"
    find "$work/x" -name 'vmlinuz*' -type f -exec cp {} "$work/kernel/vmlinuz" \;
    [ -e "$work/kernel/vmlinuz" ] || die "the package $package holds no kernel image"
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
newest)
    if ! [ -e "$dir/vmlinuz" ]; then
        use_release trixie-backports
        from_package linux-image-cloud-amd64
    fi
    ;;
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
*) die "unknown kernel '$kernel'; known: stock backport newest override" ;;
esac
echo "$dir"
