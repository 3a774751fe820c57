"""Guards that the doorbell kernels compile without a compiler, once, and when the copy engine takes over."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gpu_service.device import cuda_program
from gpu_service.experts.doorbell import program as doorbell_program
from gpu_service.experts.doorbell.crossover import Crossover, crossing
from gpu_service.experts.doorbell.program import ClientFailure, program  # type: ignore[attr-defined]
from moebius.errors import UserError
from tests.helpers.compiled_sources import compiled

ARCHITECTURES = (80, 86, 89, 90, 100, 120)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_the_kernels_for_every_architecture() -> None:
    """Nothing of a newer GPU's is used, and registers hold what a thread needs."""
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
    _, said = compiled(["nvcc", "-std=c++17", "-fatbin", "-Xptxas", "-v", *targets], program(), ".cu")
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert len(spills) >= 2 * len(ARCHITECTURES)
    assert set(spills) == {"0"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels(arch: str) -> None:
    """Both kernels are in the machine code."""
    pytest.importorskip("cuda.core")
    code = cuda_program.compile_source(program(), "doorbell", arch)
    assert b"pack_and_ring" in code
    assert b"wait_and_add" in code


def test_compiled_code_is_kept_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start compiles nothing; another architecture or source does."""
    compiled: list[str] = []

    def fake(source: str, name: str, arch: str) -> bytes:
        compiled.append(arch)
        return f"code of {arch} {len(compiled)}".encode()

    monkeypatch.setattr(cuda_program, "compile_source", fake)
    monkeypatch.setattr(cuda_program, "_directory", str(tmp_path))
    first = cuda_program.compiled(program(), "doorbell", "sm_90")
    assert cuda_program.compiled(program(), "doorbell", "sm_90") == first
    assert cuda_program.compiled(program(), "doorbell", "sm_80") != first
    assert compiled == ["sm_90", "sm_80"]
    assert cuda_program.compiled("another source", "doorbell", "sm_90") != first
    assert len(list(tmp_path.rglob("*.cubin"))) == 3


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting and the place are in the message."""
    monkeypatch.setattr(cuda_program, "compile_source", lambda *_: b"code")
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setattr(cuda_program, "_directory", str(occupied))
    with pytest.raises(UserError, match=r"jit_cache_dir.*file"):
        cuda_program.compiled(program(), "doorbell", "sm_90")


def test_failures_have_the_numbers_of_the_layout() -> None:
    """`ClientFailure` of layout.h, which is what the preamble gives the kernels."""
    layout = (Path(doorbell_program.__file__).parents[3] / "kernels/mailbox/layout.h").read_text()
    names = {
        "NONE": "kNone",
        "DEADLINE": "kDeadline",
        "STALE_EPOCH": "kStaleEpoch",
        "COMPUTE": "kComputeFailed",
        "RESTARTED": "kRestarted",
        "ABANDONED": "kAbandoned",
        "PEER": "kPeer",
        "SHUT_DOWN": "kShutDown",
    }
    assert set(names) == {failure.name for failure in ClientFailure}
    for failure in ClientFailure:
        assert f"  {names[failure.name]} = {failure.value},\n" in layout
        assert f"#define FAILED_{failure.name} {failure.value}u\n" in program()


def test_copy_engine_takes_over_where_it_stays_faster() -> None:
    """One lucky size in the middle does not decide; never, when the largest is slower."""
    sizes = [1, 2, 4, 8]
    assert crossing(sizes, [1, 2, 4, 8], [3, 1, 3, 5]) == 2
    assert crossing(sizes, [1, 2, 4, 8], [0, 3, 3, 5]) == 4
    assert crossing(sizes, [1, 2, 4, 8], [0, 0, 0, 9]) is None
    assert crossing(sizes, [9, 9, 9, 9], [1, 1, 1, 1]) == 1
    assert Crossover(4, None).copies_request(4)
    assert not Crossover(4, None).copies_request(3)
    assert not Crossover(4, None).copies_response(1 << 30)
