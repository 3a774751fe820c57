"""Guards CPUs without AVX-512: the demo and a served model answer on an emulated one, and doctor names it.

The guest (served_guest.py) prints a line per check; skipped, with the missing package, where it cannot boot.
Half an hour on a busy machine, a third of that on a quiet one: emulation takes its time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.chart import ROOT
from tests.numa.served_root import make_image
from tests.numa.test_numa_guest import MISSING_TOOL, SCRIPT

WORK = ROOT / "build" / "numa"
GUEST_S = 5400
EXPECTED_CHECKS = (
    "the CPU has AVX2",
    "the CPU has no AVX-512",
    "doctor names the instruction set",
    "the demo answers",
    "a server answers",
    "the server stops",
)


@pytest.fixture(scope="module")
def console() -> list[str]:
    """Returns the lines that the guest printed; they are kept in build/numa/served.log as well."""
    check = subprocess.run([SCRIPT, WORK, "check"], capture_output=True, text=True, check=False)
    if check.returncode == MISSING_TOOL:
        pytest.skip(check.stderr.strip())
    if shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        pytest.skip("missing mke2fs: apt-get install e2fsprogs")
    image = WORK / "served.img"
    make_image(image)
    command: list[str | Path] = [SCRIPT, WORK, image, str(Path(sys.executable).resolve()), "/guest.py"]
    with (WORK / "served.log").open("wb") as log:
        result = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=GUEST_S + 60
        )
    text = (WORK / "served.log").read_text(errors="replace")
    image.unlink()
    assert result.returncode == 0, text[-8000:]
    return [line.strip() for line in text.splitlines()]


@pytest.mark.numa
@pytest.mark.timeout(GUEST_S + 300)
def test_everything_answers_without_avx512(console: list[str]) -> None:
    """Each promised check was really made, and passed."""
    assert [line for line in console if line.startswith("FAIL")] == []
    assert "DONE 0" in console, "\n".join(console[-30:])
    passed = [line.removeprefix("PASS ").partition(":")[0] for line in console if line.startswith("PASS ")]
    assert passed == list(EXPECTED_CHECKS)
