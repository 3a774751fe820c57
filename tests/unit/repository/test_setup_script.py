"""Guards `tools/setup`: that it ends with success when all went well, and says what did not when not."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.locks import locked

ROOT = Path(__file__).resolve().parents[3]
# Stands for the environment's interpreter and its pip: nothing is installed.
PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >> "$0.calls"
case "$*" in
  *version_info*) echo 3.12 ;;
  *torch==*+cpu*) exit $CPU_TORCH ;;
  *" config list") printf "global.index-url='https://mirror/simple'\\nglobal.find-links='/a /b'\\n" ;;
  *--verbose*) echo "  [20/76] Building CXX object a.o"; echo "a.cc:1: error: no" >&2; exit $KERNELS ;;
esac
exit 0
"""

pytestmark = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs Python's headers, as setup does",
)


def run_setup(
    venv: Path, kernels: int, cpu_torch: int = 0, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Returns the script with pip that installs all, or all but the kernels, or has no CPU build of torch."""
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    python = venv / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "KERNELS": str(kernels),
        "CPU_TORCH": str(cpu_torch),
    }
    environment |= settings
    command = [str(ROOT / "tools" / "setup"), str(venv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_it_ends_with_success(tmp_path: Path) -> None:
    """Steps and files are counted, the environment is marked as ready, and make goes on."""
    run = run_setup(tmp_path / "venv", kernels=0)
    assert run.returncode == 0, run.stderr
    assert "20 of 76 files" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("setup: done in ")
    assert (tmp_path / "venv" / ".ready").exists()


def test_kernels_that_do_not_compile_are_shown(tmp_path: Path) -> None:
    """The compiler's words and where all of them are; the environment is not marked as ready."""
    run = run_setup(tmp_path / "venv", kernels=1)
    assert run.returncode == 1
    assert "a.cc:1: error: no" in run.stderr
    assert "kernels.log" in run.stderr
    assert not (tmp_path / "venv" / ".ready").exists()


def installed(venv: Path) -> list[str]:
    """Returns the arguments of `pip install`, in order."""
    lines = (venv / "bin" / "python.calls").read_text().splitlines()
    return [
        line.partition(" install ")[2] for line in lines if " -m pip " in f" {line}" and " install " in line
    ]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="is about machines without a GPU")
def test_all_but_torch_is_installed_by_its_hash(tmp_path: Path) -> None:
    """torch's CPU build alone, of the locked version and without what it asks for; the rest from the locks of
    the environment's Python. Where there is no CPU build, the CUDA build is taken by its hash, too. Without
    uv pip installs all of it."""
    version = locked("3.12", "cuda")["torch"]
    for cpu_torch, kinds in ((0, ("serve", "dev", "cpu")), (1, ("serve", "dev", "cuda"))):
        venv = tmp_path / f"venv{cpu_torch}"
        assert run_setup(venv, 0, cpu_torch).returncode == 0
        torch, uv, everything, ours = installed(venv)
        assert torch.startswith(f"--quiet --no-deps torch=={version}+cpu")
        assert uv.startswith("--quiet --require-hashes --only-binary :all: -r /dev/fd/")
        files = " ".join(f"-r deploy/locks/python3.12/{kind}.txt" for kind in kinds)
        assert everything == f"--quiet --no-deps --require-hashes --only-binary :all: {files}"
        assert ours.endswith("--no-build-isolation --no-deps -e lab -e .")


def test_uv_installs_what_is_locked_from_where_pip_would(tmp_path: Path) -> None:
    """uv has the indexes of pip's settings, and pip installs nothing that uv has installed."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    uv = venv / "bin" / "uv"
    uv.write_text('#!/bin/sh\nprintf "%s\\n" "$UV_DEFAULT_INDEX" "$UV_FIND_LINKS" "$*" > "$0.calls"\n')
    uv.chmod(0o755)
    outside = dict.fromkeys(("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"), "")
    assert run_setup(venv, 0, **outside).returncode == 0
    index, links, arguments = (venv / "bin" / "uv.calls").read_text().splitlines()
    assert (index, links) == ("https://mirror/simple", "/a,/b")
    assert "--compile-bytecode" in arguments
    assert "--no-deps --require-hashes" in arguments
    assert "-r deploy/locks/python3.12/serve.txt" in arguments
    assert not any("locks" in line for line in installed(venv))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="is about machines without a GPU")
def test_the_newest_is_taken_when_asked(tmp_path: Path) -> None:
    """The newest is within the ranges of pyproject.toml, or whatever they say; torch stays."""
    for newest, line in (("ranges", "transformers>=5.23,<6"), ("all", "transformers")):
        venv = tmp_path / newest
        assert run_setup(venv, 0, NEWEST=newest).returncode == 0
        _, cpu, everything, _ = installed(venv)
        assert cpu.endswith("-r deploy/locks/python3.12/cpu.txt")
        assert everything == f"--quiet --upgrade --upgrade-strategy eager -r {venv}/requirements.txt"
        # The file is written by the environment's Python, which does nothing here: its code is tried apart.
        calls = (venv / "bin" / "python.calls").read_text()
        begin, end = calls.index("import re, sys, tomllib"), calls.index(f" {newest}\n")
        code = calls[begin:end]
        command = [sys.executable, "-c", code, newest]
        written = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert line in written
        assert [one for one in written if one.startswith("torch")] == [
            f"torch=={locked('3.12', 'cuda')['torch']}"
        ]
