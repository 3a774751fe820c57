#!/usr/bin/env bash
# `make test-wheel`: what docs/install.md says of a wheel: pip in a fresh environment, pipx and uv, each followed by
# `moebius demo`. usage: wheel.sh WHEEL [WAY ...]     ways: pip pipx uv
#
# All of it lies under a temporary home, so that nothing of the project, and no demo model made before, is used.
set -euo pipefail
wheel=$(realpath "${1:?wheel}")
shift
ways=${*:-pip pipx uv}
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir -p "$home/.config"
cp -r "$HOME/.config/pip" "$home/.config/" 2>/dev/null || true  # how this host reaches its index
# The index is pip's; uv does not read pip's settings.
links=$(env | sed -n 's/^PIP_FIND_LINKS=//p')
export HOME=$home XDG_CACHE_HOME=$home/cache PATH=$home/.local/bin:$PATH UV_FIND_LINKS=$links UV_NATIVE_TLS=1
cd "$home"
python=${PYTHON:-python3}
"$python" -m venv tools
pip=(tools/bin/pip --quiet --disable-pip-version-check)

demo() {
  "$1" --version
  "$1" demo --max-num-seqs 2 >demo.log 2>&1 || { tail -n 40 demo.log; echo "wheel: FAILED: $1 demo" >&2; exit 1; }
  grep -E '[0-9]+ tokens, .* tokens/s' demo.log || { tail demo.log; echo "wheel: no answer" >&2; exit 1; }
}

for way in $ways; do
  echo "wheel: $way"
  case $way in
    pip) "$python" -m venv plain && plain/bin/pip install --quiet --disable-pip-version-check "$wheel" && demo plain/bin/moebius ;;
    pipx) "${pip[@]}" install pipx && tools/bin/pipx install --quiet "$wheel" && demo "$home/.local/bin/moebius" && tools/bin/pipx uninstall moebius ;;
    uv) "${pip[@]}" install uv && tools/bin/uv --quiet tool install --python "$(command -v "$python")" "$wheel" && demo "$home/.local/bin/moebius" && tools/bin/uv --quiet tool uninstall moebius ;;
    *) echo "way: $way is not known; known: pip, pipx, uv" >&2; exit 2 ;;
  esac
done
echo "wheel: passed: $ways"
