#!/usr/bin/env bash
# Tries a Debian package under a booted systemd with D-Bus and polkit: a Debian image in QEMU, on the stock kernel, with a
# simulated GPU in it. Installation, a quota set over the bus, upgrade, removal, purge; packaging/systemd-test/guest.sh says what.
# Needs root, to make the image, and no KVM. The image is kept with the kernels, in integration-tests/vm/cache/systemd.
#
# usage: test-systemd.sh PACKAGE NEWER-PACKAGE
#        CAPS=1 test-systemd.sh …          also drops the daemon's capabilities one at a time: with all of them nothing may go
#                                          wrong, and without each of them something has to
#        KERNEL=newest test-systemd.sh …   on another kernel of vm-kernel.sh than the distribution's
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

cache=${GPUQUOTA_VM_CACHE:-$repo/integration-tests/vm/cache}
image=$cache/systemd/root.cpio
built=$repo/target/debug
limit=${LIMIT:-$([ -z "${CAPS:-}" ] && echo 900 || echo 3600)}

make_image() {
    [ ! -e "$image" ] || return 0
    local work suite mirror
    say "making an image with systemd"
    # The release and the server are the host's own.
    # shellcheck disable=SC1091
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    # shellcheck disable=SC2016 # apt fills these in
    mirror=$(apt-get indextargets --format '$(SITE) $(COMPONENT) $(RELEASE)' 'Identifier: Packages' |
        awk '$2 == "main" && $1 !~ /security/ && !found++ { print $1 }')
    [ -n "$mirror" ] || die "apt's sources name no server of the distribution"
    work=$(mktemp -d)
    quietly mmdebstrap --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --include=systemd,systemd-sysv,dbus,polkitd,init-system-helpers,kmod,procps,fuse3 "$suite" "$work/root" "$mirror" ||
        die "mmdebstrap cannot make an image"
    rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/*
    mkdir -p "$(dirname "$image")"
    (cd "$work/root" && find . -print0 | cpio --quiet --null -o -H newc) >"$image.new"
    rm -rf "$work"
    mv "$image.new" "$image"
}

# What differs from run to run: packed behind the image, which the kernel unpacks first.
pack() { # FOLDER
    local root=$1 library
    mkdir -p "$root"/opt/{test,sim} "$root"/etc/systemd/system/multi-user.target.wants "$root/usr/local/bin"
    cp "$old" "$root/opt/test/old.deb"
    cp "$new" "$root/opt/test/new.deb"
    cp packaging/systemd-test/guest.sh "$root/opt/test/"
    [ -z "${CAPS:-}" ] || touch "$root/opt/test/capabilities"
    [ ! -e "$kernel/fuse.ko" ] || cp "$kernel/fuse.ko" "$root/opt/test/"
    for program in simgpu simtenant; do
        strip -o "$root/usr/local/bin/$program" "$built/$program"
        chmod 755 "$root/usr/local/bin/$program"
    done
    strip -o "$root/opt/sim/libcuda.so" "$built/libcuda.so"
    strip -o "$root/opt/sim/libnvidia_ml.so" "$built/libnvidia_ml.so"
    for library in libcuda.so.1:libcuda.so libnvidia-ml.so.1:libnvidia_ml.so; do
        ln -s "${library#*:}" "$root/opt/sim/${library%:*}"
    done
    cat >"$root/opt/test/settings.toml" <<'TOML'
[gpu]
device-dir = "/run/simgpu/dev"
nvml-library = "/opt/sim/libnvidia-ml.so.1"
[faults]
source = "kernel-log"
TOML
    cat >"$root/opt/test/policy.toml" <<'TOML'
[tenant.vision]
cgroup = "/gpu.slice/gpu-vision.slice"
memory.max = "2GiB"
TOML
    # The simulated NVML asks there; and programs without optimization read the types of the kernel for a minute on an emulated processor.
    mkdir -p "$root/etc/systemd/system/gpuquotad.service.d"
    printf '[Service]\nTimeoutStartSec=5min\nEnvironment=SIMGPU_DIR=/run/simgpu/dev\n' >"$root/etc/systemd/system/gpuquotad.service.d/10-slow.conf"
    cat >"$root/etc/systemd/system/simgpu.service" <<'UNIT'
[Unit]
Description=Simulated GPUs
[Service]
ExecStartPre=/bin/mkdir -p /run/simgpu/dev
ExecStart=/usr/local/bin/simgpu --dir /run/simgpu/dev
UNIT
    cat >"$root/etc/systemd/system/package-test.service" <<'UNIT'
[Unit]
Description=The test
After=multi-user.target dbus.service
[Service]
Type=oneshot
Environment=PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C DEBIAN_FRONTEND=noninteractive
ExecStart=/bin/bash /opt/test/guest.sh
StandardOutput=tty
TTYPath=/dev/ttyS0
ExecStopPost=/bin/systemctl --force --force poweroff
UNIT
    ln -s ../package-test.service "$root/etc/systemd/system/multi-user.target.wants/"
    ln -s /dev/null "$root/etc/systemd/system/serial-getty@ttyS0.service"
    ln -s /dev/null "$root/etc/systemd/system/getty@tty1.service"
    ln -s /sbin/init "$root/init"
}

[ "$(id -u)" -eq 0 ] || die "making the image needs root"
old=$(realpath "$1")
new=$(realpath "$2")
for program in simgpu simtenant libcuda.so libnvidia_ml.so; do
    [ -e "$built/$program" ] || die "$built/$program is not built; run cargo build first"
done
kernel=$(scripts/vm-kernel.sh "${KERNEL:-stock}")
make_image
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pack "$scratch/root"
{
    cat "$image"
    (cd "$scratch/root" && find . -print0 | cpio --quiet --null -o -H newc)
} >"$scratch/ramdisk"
log=$repo/target/vm/systemd.log
mkdir -p "$(dirname "$log")"
start=$SECONDS
# One processor: with two, the emulator now and then corrupts code that the kernel patches while booting.
timeout -k 5 "$limit" qemu-system-x86_64 -accel tcg,tb-size=256 -cpu max -smp 1 -m 2048 -nodefaults -display none \
    -serial "file:$log.raw" -no-reboot -kernel "$kernel/vmlinuz" -initrd "$scratch/ramdisk" \
    -append "console=ttyS0 panic=-1 quiet systemd.show_status=0 systemd.log_level=warning lsm=landlock,lockdown,bpf rdinit=/init" \
    </dev/null || say "the machine did not end by itself"
tr -d '\r' <"$log.raw" >"$log"
rm -f "$log.raw"
grep -E '^ *(--|ok:|FAILED|   |dropped)|→|Overall' "$log" || true
say "package under systemd: $((SECONDS - start)) s; the console is in $log"
grep -q '^gpuquota-vm: status 0' "$log" || die "the package does not do under systemd what it should; see $log"
