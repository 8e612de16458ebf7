#!/bin/sh
# The first process of the virtual machine: mounts what a system has, runs the script, says how it ended, switches off.
export PATH=/bin HOME=/root
/bin/busybox --install -s /bin

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t securityfs securityfs /sys/kernel/security
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
ln -s /proc/self/fd /dev/fd
ln -s /proc/mounts /etc/mtab
ifconfig lo 127.0.0.1 up

while read -r module; do
    insmod "$module" || echo "cannot load $module"
done </etc/vm/modules

# shellcheck source=/dev/null # sets ready and status, the two lines that the host waits for
. /etc/vm/markers
cd /root || exit
# shellcheck disable=SC2154
echo "$ready"
sh /etc/vm/script </dev/null
rc=$?
# The script may have left a line without an end.
echo
# shellcheck disable=SC2154
echo "$status$rc"
# Not every kernel here can switch the machine off; the emulator is told to end at a reboot instead.
reboot -f
