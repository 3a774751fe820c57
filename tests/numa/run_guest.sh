#!/bin/sh
# Boots a real kernel with two NUMA nodes of two cores with two threads each under emulation and runs numa_guest.cc as its /init.
# usage: run_guest.sh [WORK_DIR [check]]; prints the guest's console. Installs nothing: exit status 77 and the
# missing package on stderr when a tool is absent.
#        run_guest.sh WORK_DIR ROOT INIT [ARGUMENT...] boots another root with INIT of it: a directory, or the
# image of a disk, which stays as it is. Of a disk's guest the last argument two-nodes is its machine's as well.
#
# The kernel comes from (first that exists): WORK_DIR/vmlinuz, an unpacked or installed Debian cloud kernel.
# Without root: apt-get download the package that linux-image-cloud-amd64 depends on, then
# dpkg -x linux-image-*-cloud-amd64_*.deb WORK_DIR/kernel
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=${1:-$root/build/numa}
mkdir -p "$work"

need() {
  command -v "$1" >/dev/null 2>&1 || { echo "missing $1: apt-get install $2" >&2; exit 77; }
}
need qemu-system-x86_64 qemu-system-x86
need cpio cpio
[ $# -gt 1 ] || need g++ g++

kernel=
for candidate in "$work"/vmlinuz "$work"/kernel/boot/vmlinuz-*-cloud-amd64 /boot/vmlinuz-*-cloud-amd64; do
  if [ -r "$candidate" ]; then kernel=$candidate; break; fi
done
if [ -z "$kernel" ]; then
  echo "missing a kernel: apt-get install linux-image-cloud-amd64, or unpack that package into $work/kernel" >&2
  exit 77
fi

[ "${2:-}" != check ] || exit 0

# Emulation (tcg) needs no privilege and works inside virtual machines; the guest takes a few seconds. On a busy host
# the kernel finds its timer too slow and stops, unless it is not to look (no_timer_check).
if [ -f "${2:-}" ]; then
  image=$2 init=$3
  shift 3
  # One node, as a desktop has, or two of two cores. Of an AMD processor it would hide the sockets.
  machine="-cpu max -smp 2 -m 6G"
  case "$*" in *two-nodes)
    machine="-cpu max,vendor=GenuineIntel -smp 4,sockets=2,cores=2,threads=1 -m 6G \
      -object memory-backend-ram,id=m0,size=3G -numa node,nodeid=0,cpus=0-1,memdev=m0 \
      -object memory-backend-ram,id=m1,size=3G -numa node,nodeid=1,cpus=2-3,memdev=m1" ;;
  esac
  # Drivers of NVMe and ext4 are part of the cloud kernel: no modules, no initramfs.
  # shellcheck disable=SC2086
  exec timeout 5400 qemu-system-x86_64 -accel tcg,thread=multi $machine \
    -drive file="$image",format=raw,if=none,id=disk,snapshot=on -device nvme,drive=disk,serial=disk \
    -kernel "$kernel" -append "console=ttyS0 quiet no_timer_check panic=-1 root=/dev/nvme0n1 rw init=$init -- $*" \
    -nographic -no-reboot
fi

if [ $# -gt 1 ]; then
  tree=$2 init=$3 memory=2G
  shift 3
else
  tree=$work/root init=/init memory=1G
  set --
  rm -rf "$tree"
  mkdir -p "$tree/dev"
  g++ -std=c++20 -O1 -static -I"$root" -o "$tree/init" \
    "$root/tests/numa/numa_guest.cc" "$root"/kernels/topology/*.cc
fi
(cd "$tree" && find . | cpio --quiet -o -H newc) > "$work/initramfs"

# Emulation (tcg) needs no privilege and works inside virtual machines; the guest takes a few seconds. Of an AMD processor
# it would hide which CPUs are threads of one core.
half=$((${memory%G} * 512))M
exec timeout 540 qemu-system-x86_64 -accel tcg -cpu max,vendor=GenuineIntel -smp 8,sockets=2,cores=2,threads=2 -m $memory \
  -object memory-backend-ram,id=m0,size=$half -numa node,nodeid=0,cpus=0-3,memdev=m0 \
  -object memory-backend-ram,id=m1,size=$half -numa node,nodeid=1,cpus=4-7,memdev=m1 \
  -kernel "$kernel" -initrd "$work/initramfs" -append "console=ttyS0 quiet no_timer_check panic=-1 rdinit=$init -- $*" \
  -nographic -no-reboot
