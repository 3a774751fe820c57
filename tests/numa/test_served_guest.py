"""Guards CPUs without AVX-512, and two NUMA nodes: models are served on emulated machines of both kinds.

On the first the demo answers, too, and doctor names the instruction set; on the second doctor and plan see
both nodes, and the weights of each expert server lie on its own. The guest (served_guest.py) prints a line
per check; skipped, with the missing package, where it cannot boot. Half an hour each on a busy machine, a
third of that on a quiet one: emulation takes its time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT
from tests.numa.served_root import make_image
from tests.numa.test_numa_guest import MISSING_TOOL, SCRIPT

WORK = ROOT / "build" / "numa"
GUEST_S = 5400
EXPECTED_CHECKS = {
    "desktop": (
        "the CPU has AVX2",
        "the CPU has no AVX-512",
        "doctor names the instruction set",
        "the demo answers",
        "a server answers",
        "the server stops",
    ),
    "two-nodes": (
        "doctor starts a server on each node",
        "plan counts both nodes",
        "a server answers",
        "bench numa read all pairs of nodes",
        "each node has an expert server",
        "weights lie on their node",
        "the server stops",
    ),
}


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """Yields the disk of both guests."""
    check = subprocess.run([SCRIPT, WORK, "check"], capture_output=True, text=True, check=False)
    if check.returncode == MISSING_TOOL:
        pytest.skip(check.stderr.strip())
    if shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        pytest.skip("missing mke2fs: apt-get install e2fsprogs")
    image = WORK / "served.img"
    make_image(image)
    yield image
    image.unlink()


def boot(image: Path, machine: str) -> list[str]:
    """Returns the lines that the guest printed; they are kept in build/numa as well."""
    python, log_file = Path(sys.executable).resolve(), WORK / f"{machine}.log"
    command: list[str | Path] = [SCRIPT, WORK, image, python, "/guest.py", machine]
    with log_file.open("wb") as log:
        result = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=GUEST_S + 60
        )
    text = log_file.read_text(errors="replace")
    assert result.returncode == 0, text[-8000:]
    return [line.strip() for line in text.splitlines()]


@pytest.mark.numa
@pytest.mark.timeout(GUEST_S + 300)
@pytest.mark.parametrize("machine", EXPECTED_CHECKS)
def test_models_are_served_on_emulated_machines(image: Path, machine: str) -> None:
    """Each promised check was really made, and passed."""
    console = boot(image, machine)
    assert [line for line in console if line.startswith("FAIL")] == []
    assert "DONE 0" in console, "\n".join(console[-30:])
    passed = [line.removeprefix("PASS ").partition(":")[0] for line in console if line.startswith("PASS ")]
    assert passed == list(EXPECTED_CHECKS[machine])
