"""Guards placement in containers: a kernel with two NUMA nodes, and cpusets as the kubelet gives them.

Every server finds its node, runs and allocates there; a wrong layout is named by server and preflight.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
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
    site = Path(sysconfig.get_path("purelib")).resolve()
    interpreter = Path(sys.executable).resolve()
    linker = Path("/lib64/ld-linux-x86-64.so.2")
    for text in {*found, str(interpreter)}:
        path = Path(text)
        target = text.lstrip("/")
        for place, prefix in ((ROOT, "src"), (site, "site"), (Path(sysconfig.get_path("purelib")), "site")):
            if path.is_relative_to(place) and (prefix == "site" or not path.is_relative_to(site)):
                target = f"{prefix}/{path.relative_to(place)}"
        _copy(path, root / target)
    for path in site.glob("*.dist-info/*"):
        if path.name in ("METADATA", "entry_points.txt", "top_level.txt"):
            _copy(path, root / "site" / path.relative_to(site))
    _copy(linker, root / "lib64" / linker.name)
    (root / "dev").mkdir()
    (root / "lib").exists() or (root / "lib").symlink_to("usr/lib")
    _copy(GUEST, root / "guest.py")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.fixture(scope="module", params=[2, 1], ids=["cgroup v2", "cgroup v1"])
def console(request: pytest.FixtureRequest) -> list[str]:
    """Lines that the guest printed, with cgroups of one version."""
    root, version = WORK / "python-root", request.param
    make_root(root)
    command = [SCRIPT, WORK, root, str(Path(sys.executable).resolve()), "/guest.py", str(version)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode == MISSING_TOOL:
        pytest.skip(result.stderr.strip())
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
