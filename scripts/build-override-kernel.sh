#!/usr/bin/env bash
# Builds the override kernel for the virtual machine tests from the distribution's source package: a small kernel with
# bpf_override_return, as integration-tests/vm/kernel.fragment says. Takes 7 to 15 minutes on two cores.
#
# usage: build-override-kernel.sh [FOLDER]   default: where the tests look for it
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

package=linux-source-6.12
dir=${1:-${GPUQUOTA_VM_CACHE:-$repo/integration-tests/vm/cache}/override}

build() {
    scripts/setup.sh kernel
    say "building the override kernel from $package; this takes minutes"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # apt downloads as its own user if that one may write here.
    chmod 777 "$work"
    (cd "$work" && quietly apt-get download "$package") || die "cannot download the package $package"
    dpkg-deb -x "$work"/*.deb "$work/deb"
    mkdir "$work/source"
    tar -xf "$work"/deb/usr/src/linux-source-*.tar.xz -C "$work/source" --strip-components=1
    cd "$work/source"
    quietly make tinyconfig
    quietly ./scripts/kconfig/merge_config.sh -m .config "$repo/integration-tests/vm/kernel.fragment"
    quietly make olddefconfig
    # kconfig drops in silence what it cannot have.
    for option in BPF_KPROBE_OVERRIDE BPF_LSM DEBUG_INFO_BTF FUSE_FS UPROBES SECCOMP_FILTER; do
        grep -qx "CONFIG_$option=y" .config || die "the kernel's configuration lacks CONFIG_$option"
    done
    quietly make -j"$(nproc)" bzImage
    # Moved into place as a whole, so that a build that was interrupted leaves no half kernel.
    mkdir -p "$dir"
    cp arch/x86/boot/bzImage "$dir/vmlinuz.new"
    basename "$work"/*.deb .deb >"$dir/origin"
    mv "$dir/vmlinuz.new" "$dir/vmlinuz"
    say "built $dir/vmlinuz"
}

# A function, so that bash has read all of it before the minutes begin: the file may change meanwhile.
build
