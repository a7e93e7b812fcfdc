#!/bin/busybox sh
# The first process in the guest: the host's root, read-only, with folders of its own where things
# are written; the modules; the command in /run.sh; its exit code to the console; the end.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /host
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
. /settings

for module in $system_modules; do
  $bb insmod /modules/$module || echo "guest: $module cannot be loaded"
done
$bb mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,ro,msize=512000 root /host || {
  echo 'guest: no root'
  $bb poweroff -f
}
for tree in proc sys dev; do
  $bb mount -o bind /$tree /host/$tree
done
$bb mkdir -p /dev/shm
for folder in /dev/shm /tmp /run /var/lib /var/tmp; do
  $bb mount -t tmpfs tmpfs /host$folder
done
# The clone again: it may lie below one of these folders.
$bb mkdir -p "/host$clone"
$bb mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,ro,msize=512000 clone "/host$clone"
$bb mount -t debugfs debugfs /host/sys/kernel/debug
$bb mount -t cgroup2 cgroup /host/sys/fs/cgroup
$bb ip link set lo up

for module in $card_modules; do
  $bb insmod /modules/$module || echo "guest: $module cannot be loaded"
done
$bb cp /run.sh /host/run/run.sh
$bb chroot /host /bin/bash /run/run.sh
echo "guest: exit code $?"
$bb sleep 1 # until the console has written it
# At once: an orderly end would wait for drivers that a test has damaged.
echo b >/proc/sysrq-trigger
