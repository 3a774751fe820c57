#!/usr/bin/env bash
# Builds the CPU image (deploy/Dockerfile.cpu) with podman, on a base made here: no registry of images is needed.
# usage: build_image.sh TAG; needs root. Prints nothing but what the build does; exit status 77 and the missing package on
# stderr when a tool is absent. `CONTAINERS_CONF=build/pod/containers.conf STORAGE_DRIVER=vfs podman …` sees the result.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=$1
work=$PWD/build/pod
mkdir -p "$work"
[ "$(id -u)" = 0 ] || { echo "needs root, for debootstrap and podman" >&2; exit 77; }
for tool in podman runc debootstrap; do
  command -v $tool >/dev/null || { echo "missing $tool: apt-get install podman runc debootstrap" >&2; exit 77; }
done

# Works in containers and virtual machines, too: no systemd, no overlay file system, limits that need not be raised.
cat > "$work/containers.conf" <<'CONF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
CONF
export CONTAINERS_CONF=$work/containers.conf STORAGE_DRIVER=vfs

if ! podman image exists localhost/moebius-base:bookworm; then
  rm -rf "$work/root"
  mirror=$(grep -hoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v snapshot | head -n 1 || true)
  debootstrap --variant=minbase bookworm "$work/root" ${mirror:-http://deb.debian.org/debian} >"$work/debootstrap.log" 2>&1 ||
    { tail -n 5 "$work/debootstrap.log" >&2; exit 1; }
  tar -C "$work/root" -c . | podman import - localhost/moebius-base:bookworm >/dev/null
  rm -rf "$work/root"
fi

# How this host reaches its package index: pip's settings, folders of wheels that they name, certificates.
options=()
setting() { python3 -m pip config get "$1" 2>/dev/null || true; }
for name in index-url extra-index-url find-links; do
  value=$(setting ":env:.$name"); [ -n "$value" ] || value=$(setting "global.$name")
  [ -z "$value" ] && continue
  upper=$(echo "PIP_$name" | tr a-z- A-Z_)
  options+=(--build-arg "$upper=$value")
  for folder in $(echo "$value" | grep -oE '(file://)?/[^ ]+' | sed 's|^file://||'); do
    top=/$(echo "$folder" | cut -d/ -f2-3)
    [ -d "$top" ] && options+=(--volume "$top:$top:ro")
  done
done
certificates=$(setting :env:.cert); [ -n "$certificates" ] || certificates=$(setting global.cert)
if [ -n "$certificates" ]; then
  options+=(--build-arg PIP_CERT=/host-certificates --volume "$certificates:/host-certificates:ro")
fi

exec podman build --network=host --file deploy/Dockerfile.cpu --tag "$tag" --build-arg BASE=localhost/moebius-base:bookworm \
  "${options[@]}" .
