"""Guards placement in containers: a kernel with two NUMA nodes, and cpusets as the kubelet gives them.

Every server finds its node, runs and allocates there; a wrong layout is named by server and preflight.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT
from tests.numa.cpuset_guest import LAYOUTS
from tests.numa.test_numa_guest import MISSING_TOOL, SCRIPT

GUEST = ROOT / "tests" / "numa" / "cpuset_guest.py"
WORK = ROOT / "build" / "numa"


def make_root(root: Path) -> None:
    """The files that Python loads for it: ours below /src, packages below /site, all else in its place."""
    found = subprocess.run(
        [sys.executable, GUEST, "files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    shutil.rmtree(root, ignore_errors=True)
    interpreter = Path(sys.executable).resolve()
    linker = Path("/lib64/ld-linux-x86-64.so.2")
    for text in {*(line for line in found if line.startswith("/")), str(interpreter)}:
        path = Path(text)
        _, mark, rest = text.rpartition("/site-packages/")
        if mark:
            # Our own extension lies there where the package was installed in place.
            target = f"src/{rest}" if rest.startswith("moebius/") else f"site/{rest}"
        elif path.is_relative_to(ROOT):
            target = f"src/{path.relative_to(ROOT)}"
        else:
            target = text.lstrip("/")
        _copy(path, root / target)
        if ".so." in path.name:
            # Loaded by another name, of which the kernel only tells the file.
            for link in path.parent.glob(f"{path.name.partition('.so.')[0]}.so*"):
                if link.resolve() == path:
                    _copy(path, root / str(link).lstrip("/"))
    for package in metadata.distributions():
        for name in ("METADATA", "entry_points.txt"):
            text = package.read_text(name)
            place = root / "site" / f"{package.name}-{package.version}.dist-info" / name
            if text is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
    _copy(linker, root / "lib64" / linker.name)
    (root / "dev").mkdir()
    (root / "lib").exists() or (root / "lib").symlink_to("usr/lib")
    _copy(GUEST, root / "guest.py")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.fixture(scope="module", params=[2, 1], ids=["cgroup v2", "cgroup v1"])
def console(request: pytest.FixtureRequest) -> list[str]:
    """Returns the lines that the guest printed, with cgroups of one version."""
    version = request.param
    # Another worker may run the other version at the same time.
    root = WORK / f"python-root-{version}"
    check = subprocess.run([SCRIPT, WORK, "check"], capture_output=True, text=True, check=False)
    if check.returncode == MISSING_TOOL:
        pytest.skip(check.stderr.strip())
    make_root(root)
    command = [SCRIPT, WORK, root, str(Path(sys.executable).resolve()), "/guest.py", str(version)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, result.stderr + result.stdout
    return [line.strip() for line in result.stdout.splitlines()]


@pytest.mark.numa
@pytest.mark.timeout(600)
def test_servers_and_preflight_agree_with_the_kernel(console: list[str]) -> None:
    """All layouts were looked at, twice each, and nothing failed."""
    assert [line for line in console if line.startswith("FAIL")] == []
    assert "DONE 0" in console, "\n".join(console[-30:])
    passed = [line.split(" ", 2)[2].split(": ")[0] for line in console if line.startswith("PASS ")]
    assert sorted(passed) == sorted(f"{who}, {name}" for who in ("server", "preflight") for name in LAYOUTS)
