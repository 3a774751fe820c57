"""No read or write outside of memory, no undefined behaviour and no data race: random engines, formats and
routings under sanitizers, each compared with a golden. `make test-fuzz` and `make test-all` have them, whose
build would take a tenth of `make test`; `make fuzz` goes on from a new seed.

Built from the sources of the tree without optimisation, as building takes far longer than the cases do; the
first build takes half a minute, later ones only what changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
CASES = 60


def build(sanitizer: str) -> Path:
    """Returns the fuzz program under that sanitizer, in a directory that later runs share."""
    directory = ROOT / "build" / f"test-fuzz-{sanitizer}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None or not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs cmake and the source tree")
    settings = {
        "MOEBIUS_SANITIZE": sanitizer,
        "MOEBIUS_FUZZ_OPTIMISATION": "-O0",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    given = [f"-D{name}={value}" for name, value in settings.items()]
    configure = ["-S", str(ROOT), "-B", str(directory), "-G", "Ninja", *given]
    for arguments in (configure, ["--build", str(directory), "--target", "moebius_fuzz"]):
        result = subprocess.run([cmake, *arguments], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return directory / "moebius_fuzz"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_fuzz_under_sanitizer(sanitizer: str) -> None:
    """The program exits with 0: no sanitizer report, no wrong result, no lost task of the pool."""
    program = build(sanitizer)
    result = subprocess.run(
        [program, "--seed", "1", "--cases", str(CASES), "--pool-runs", "2000"], capture_output=True, text=True
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
    assert f"{CASES} cases from seed 1" in result.stdout


def test_failures_are_not_hidden(tmp_path: Path) -> None:
    """A program that cannot fail proves nothing: a wrong option ends it with an error of its own."""
    program = build("address")  # which is there
    result = subprocess.run([program, "--cases", "many"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "--cases: 'many' is not a number" in result.stderr
