#!/usr/bin/env bash
# What the README says, on a system that has nothing but a shell and apt: a debootstrap root of SUITE.
# usage: run.sh SUITE [MIRROR]     bookworm: Debian 12, trixie: Debian 13, noble: Ubuntu 24.04
#
# 1. `make demo` without the README's packages names what is missing and prints the line to paste.
# 2. That line is the README's; after it a half-made .venv is repaired, and `make demo` answers, twice.
#
# The committed tree is tested, not what is uncommitted. The root is made once, under CACHE, and copied for each
# run. How the host reaches its package registries (pip's and apt's settings, certificates) is copied into it.
set -euo pipefail
suite=${1:?suite}
case $suite in
  bookworm|trixie) mirror=${2:-http://deb.debian.org/debian} ;;
  noble) mirror=${2:-http://archive.ubuntu.com/ubuntu} ;;
  *) echo "suite: $suite is not known; known: bookworm, trixie, noble" >&2; exit 2 ;;
esac
project=$(cd "$(dirname "$0")/../.." && pwd)
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moebius/newcomer}

[ "$(id -u)" = 0 ] || { echo "needs root (chroot, mount)" >&2; exit 77; }
command -v debootstrap >/dev/null || { echo "missing debootstrap: apt-get install debootstrap" >&2; exit 77; }
if [ -z "${NEWCOMER_NAMESPACE:-}" ]; then
  # Mounts of its own, which end with the script whatever it dies of.
  exec env NEWCOMER_NAMESPACE=1 unshare --mount --propagation private "$0" "$@"
fi

base=$cache/$suite
if [ ! -e "$base/.complete" ]; then
  rm -rf "$base" && mkdir -p "$base"
  components=main; [ "$suite" = noble ] && components=main,universe
  debootstrap --variant=minbase --components="$components" "$suite" "$base" "$mirror" >"$cache/$suite.log" 2>&1 || {
    echo "debootstrap $suite failed; the end of $cache/$suite.log:" >&2
    tail -n 5 "$cache/$suite.log" >&2
    exit 77
  }
  touch "$base/.complete"
fi

root=$(mktemp -d "$cache/run-$suite.XXXXXX")
trap 'umount -R "$root" 2>/dev/null; rm -rf "$root"' EXIT
cp -a "$base/." "$root/"
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm" 2>/dev/null || { mkdir -p "$root/dev/shm"; mount -t tmpfs tmpfs "$root/dev/shm"; }
for device in null zero random urandom; do
  touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
cp /etc/resolv.conf "$root/etc/" 2>/dev/null || true
cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
[ -e /etc/pip.conf ] && cp /etc/pip.conf "$root/etc/"
# Folders of wheels that pip's settings name.
for folder in $(env | sed -n 's/^PIP_FIND_LINKS=//p') \
  $(cat /etc/pip.conf ~/.config/pip/pip.conf ~/.pip/pip.conf 2>/dev/null | grep -oE '(file://)?/[^ ]+' | sed 's|^file://||'); do
  folder=${folder%/simple}  # an index names files next to it
  [ -d "$folder" ] && mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder"
done
mkdir -p "$root/root/.config/pip"
cp ~/.config/pip/pip.conf "$root/root/.config/pip/" 2>/dev/null || cp ~/.pip/pip.conf "$root/root/.config/pip/" 2>/dev/null || true
git -C "$project" archive --prefix=moebius/ HEAD | tar -x -C "$root/root"

pass=$(env | sed -nE 's/^((PIP_|SSL_CERT|REQUESTS_CA|CURL_CA|GIT_SSL|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)[A-Za-z_]*)=.*/\1/p')
inside() {
  local settings=()
  for name in $pass; do settings+=("$name=${!name}"); done
  env -i ${settings[@]+"${settings[@]}"} HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /bin/sh -ec "cd /root/moebius; $1"
}
say() { echo "newcomer $suite: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

# What the README says, not what this script knows.
line=$(grep -oE 'sudo apt-get install [a-z0-9+. -]+' "$project/README.md" | head -n 1)
[ -n "$line" ] || fail "the README names no packages"
inside 'apt-get update -qq && apt-get install -qq --no-install-recommends make >/dev/null 2>&1'

say "make demo before the README's packages"
if inside 'make demo' >"$root/first.log" 2>&1; then fail "make demo passed with nothing installed"; fi
grep -qF "$line" "$root/first.log" || { cat "$root/first.log"; fail "the line to paste was not printed"; }

say "${line#sudo }, as the README says"
inside "${line#sudo } -y -qq --no-install-recommends >/dev/null 2>&1"
# After the packages, which make certificates of their own.
mkdir -p "$root/etc/ssl/certs" && mount --bind /etc/ssl/certs "$root/etc/ssl/certs"

say "make demo over a half-made .venv"
inside 'mkdir -p .venv/bin && ln -s /usr/bin/python3 .venv/bin/python3'
inside 'make demo' >"$root/demo.log" 2>&1 || { tail -n 40 "$root/demo.log"; fail "make demo"; }
tail -n 12 "$root/demo.log"

say "make demo once more"
inside 'make demo' >"$root/again.log" 2>&1 || { tail -n 40 "$root/again.log"; fail "the second make demo"; }
grep -q 'tokens' "$root/again.log" || { tail -n 20 "$root/again.log"; fail "no answer"; }
say "passed"
