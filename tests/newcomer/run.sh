#!/usr/bin/env bash
# What README and docs/install.md say, on a system that has nothing but a shell and apt: a debootstrap root of SUITE.
# usage: run.sh SUITE [MIRROR]     bookworm: Debian 12, trixie: Debian 13, noble: Ubuntu 24.04
#
# 1. `make demo` without the README's packages names what is missing and prints the line to paste.
# 2. The blocks of the README that are marked with this script's name, from top to bottom, then those of
#    docs/install.md, as they stand: only `sudo` is left out, for the root has no other user, and a server is started,
#    asked and stopped. Before the first of them half of a .venv lies there, as a broken installation leaves it.
#
# The committed tree is tested, not what is uncommitted. The root is made once, under CACHE, and copied for each
# run; what apt, pip and ccache keep of earlier runs lies there too, so that only the first run downloads gigabytes.
# How the host reaches its package registries (pip's and apt's settings, certificates) is copied into it; to
# spare time, ccache is installed besides what the README names. A server listens in a network of its own, so that
# no other server's port is taken, and no other server answers. STEPS, "readme install" by default, says which pages
# are taken; with `wheel`, wheel.sh installs the wheel in all ways. TESTS="tests/unit -k radix" runs tests there at the end.
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
command -v ip >/dev/null || { echo "missing ip: apt-get install iproute2" >&2; exit 77; }
command -v debootstrap >/dev/null || { echo "missing debootstrap: apt-get install debootstrap" >&2; exit 77; }
if [ -z "${NEWCOMER_NAMESPACE:-}" ]; then
  # Mounts of its own, which end with the script whatever it dies of.
  exec env NEWCOMER_NAMESPACE=1 unshare --mount --propagation private "$0" "$@"
fi

base=$cache/$suite
if [ ! -e "$base/.complete" ]; then
  rm -rf "$base" && mkdir -p "$base"
  components=main; [ "$suite" = noble ] && components=main,universe
  # debootstrap's script of an older release does for one that it does not know.
  script=; [ -e "/usr/share/debootstrap/scripts/$suite" ] || script=/usr/share/debootstrap/scripts/jammy
  debootstrap --variant=minbase --components="$components" "$suite" "$base" "$mirror" ${script:+"$script"} \
    >"$cache/$suite.log" 2>&1 || {
    echo "debootstrap $suite failed; the end of $cache/$suite.log:" >&2
    tail -n 5 "$cache/$suite.log" >&2
    exit 77
  }
  touch "$base/.complete"
fi

root=$(mktemp -d "$cache/run-$suite.XXXXXX")
# Lazily: processes of a run that was ended may still be in it. Only what is not mounted is removed.
trap 'umount --recursive --lazy "$root" 2>/dev/null || ! mountpoint -q "$root" && rm -rf --one-file-system "$root" "$root.lock"' EXIT
# Held while the run lives. Roots of runs that were killed, several GB each, are removed by the next one.
exec 9>"$root.lock" && flock 9
for old in "$cache"/run-*.lock; do
  flock --nonblock "$old" true 2>/dev/null && rm -rf --one-file-system "${old%.lock}" "$old"
done
cp -a "$base/." "$root/"
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm" 2>/dev/null || { mkdir -p "$root/dev/shm"; mount -t tmpfs tmpfs "$root/dev/shm"; }
for device in null zero full random urandom; do
  touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir -p "$root/dev/pts" && mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -sf pts/ptmx "$root/dev/ptmx"
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
git clone --quiet --depth 1 "file://$project" "$root/root/moebius"
# `make wheel` compiles in a temporary directory: below ccache's base its files are those of the first compilation.
mkdir -p "$root/root/tmp"
# keep NAME DIRECTORY: what a program keeps in this directory of the root stays in the cache for the next run.
keep() { mkdir -p "$cache/$1" "$root$2" && mount --bind "$cache/$1" "$root$2"; }
keep pip /root/.cache/pip
keep "apt-$suite" /var/cache/apt/archives
echo 'Binary::apt::APT::Keep-Downloaded-Packages "true"; APT::Keep-Downloaded-Packages "true";' >"$root/etc/apt/apt.conf.d/99keep"
rm -f "$root/etc/apt/apt.conf.d/docker-clean"

pass=$(env | sed -nE 's/^((PIP_|SSL_CERT|REQUESTS_CA|CURL_CA|GIT_SSL|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)[A-Za-z_]*)=.*/\1/p')
alone() { unshare --net sh -ec 'ip link set lo up; exec "$@"' sh "$@"; }
inside() {
  local settings=()
  for name in $pass; do settings+=("$name=${!name}"); done
  ${ALONE:+alone} env -i ${settings[@]+"${settings[@]}"} HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    CCACHE_BASEDIR=/root CCACHE_NOHASHDIR=1 TMPDIR=/root/tmp \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /bin/sh -ec "cd /root/moebius; $1"
}
say() { echo "newcomer $suite $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))): $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

# The commands of the blocks of a page that are marked with this script's name; continued lines are joined.
blocks() {
  awk '/^<!-- run by: tests\/newcomer\/run.sh -->/ { marked = 1; next }
       marked && /^```sh/ { inside = 1; next }
       inside && /^```/ { inside = 0; marked = 0; next }
       inside' "$project/$1" | sed -e ':a;/\\$/{N;s/\\\n//;ba}'
}
# A server stays up: it is asked what the README's next block asks, then stopped.
serve() {
  local ask
  ask=$(awk '/^```sh/ { getline; if ($1 == "curl") { print; while (/\\$/) { getline; print }; exit } }' "$project/README.md")
  cat >"$root/root/ask.sh" <<END
$1 & server=\$!
for i in \$(seq 600); do
  curl -sf http://127.0.0.1:8000/ready >/dev/null && break
  kill -0 \$server || exit 1
  sleep 1
done
echo "ready after \$i s"
$ask
echo
.venv/bin/moebius chat --prompt 'What is the capital of France?' --max-tokens 16
kill -INT -- -\$server 2>/dev/null || kill \$server
wait \$server || true
END
  ALONE=1 inside 'exec timeout 900 sh -m /root/ask.sh' >"$root/serve.log" 2>&1 || { tail -n 40 "$root/serve.log"; fail "$1"; }
  say "answered: $(grep -oE '"content":"[^"]*"' "$root/serve.log" | head -n 1)"
  grep -q '"content":' "$root/serve.log" || { tail -n 40 "$root/serve.log"; fail "no answer from $1"; }
}
run() {
  say "$1"
  case $1 in
    'make serve'*) serve "$1" ;;
    'sudo apt-get install'*) inside "${1#sudo } -y -qq --no-install-recommends >/dev/null 2>&1" ;;
    'sudo '*) inside "${1#sudo }" >"$root/step.log" 2>&1 || { tail -n 40 "$root/step.log"; fail "$1"; } ;;
    *) inside "export PATH=$PATH_INSIDE; $1" >"$root/step.log" 2>&1 || { tail -n 40 "$root/step.log"; fail "$1"; } ;;
  esac
  case $1 in
    *demo) grep -E '[0-9]+ tokens, .* tokens/s' "$root/step.log" || { tail -n 20 "$root/step.log"; fail "no answer"; } ;;
  esac
}
PATH_INSIDE=/usr/sbin:/usr/bin:/sbin:/bin

line=$(blocks README.md | grep '^sudo apt-get install') || fail "the README names no packages"
inside 'apt-get update -qq && apt-get install -qq --no-install-recommends make >/dev/null 2>&1'
say "make demo before the README's packages"
if inside 'make demo' >"$root/first.log" 2>&1; then fail "make demo passed with nothing installed"; fi
grep -qF "$line" "$root/first.log" || { cat "$root/first.log"; fail "the line to paste was not printed"; }

inside 'mkdir -p .venv/bin && ln -s /usr/bin/python3 .venv/bin/python3'
steps=" ${STEPS:-readme install} "
while read -r command; do
  # Without the page, what it installs is needed all the same.
  case $steps/$command in *" readme "*) ;; */make*) continue ;; esac
  run "$command" </dev/null
  case $command in
    'sudo apt-get install'*)
      inside 'apt-get install -y -qq --no-install-recommends ccache >/dev/null 2>&1'
      # After the packages, which make certificates of their own.
      mkdir -p "$root/etc/ssl/certs" && mount --bind /etc/ssl/certs "$root/etc/ssl/certs"
      keep "ccache-$suite" /root/.cache/ccache ;;
  esac
done < <(blocks README.md)
case $steps in
  *" install "*) while read -r command; do run "$command" </dev/null; done < <(blocks docs/install.md) ;;
esac
case $steps in
  *" wheel "*)
    run 'ls dist/moebius-*.whl || make wheel'
    run 'tests/newcomer/wheel.sh dist/moebius-*.whl'
    grep '^wheel:\|tokens/s' "$root/step.log" ;;
esac
[ -z "${TESTS:-}" ] || { run ".venv/bin/python -m pytest -q $TESTS" && tail -n 5 "$root/step.log"; }
say "passed: $(inside 'python3 --version')"
