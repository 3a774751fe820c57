"""Guards that loading needs no more memory than the packed slice and one layer, and names what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expert_service.loader import plan_load
from moebius.checkpoint.errors import CheckpointError
from moebius.experts.slices import SliceRequest, plan_slice
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import Array, TinyMoe

# Writes to a file: packed bytes, growth of the peak resident size over the load. Reading VmHWM needs no
# settings. Standard output is the log's, to which other threads write.
MEASURE = """
import pathlib, re, sys
from expert_service.host import ExpertHost
from expert_service.placement import ThreadPlacement
from moebius.experts.slices import SliceRequest
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None)
before = peak()
loaded = host.load(SliceRequest(sys.argv[1], split_index=int(sys.argv[2]), split_count=int(sys.argv[3])))
pathlib.Path(sys.argv[4]).write_text(f"{loaded.engine.packed_bytes} {peak() - before}")
"""
ROOT = Path(__file__).resolve().parents[2]
MODEL = TinyMoe()


@pytest.mark.parametrize("count", [1, 2])
def test_peak_memory_is_the_packed_slice_and_one_layer(tmp_path: Path, count: int) -> None:
    """200 MB of experts; one layer is an eighth of them. Holding or mapping more would show at once."""
    big = TinyMoe(
        hidden_size=512, moe_intermediate_size=1056, num_layers=8, num_experts=4, shards=3, dtype="F32"
    )
    model = big.write(tmp_path / "model")
    layer_bytes = 4 * 3 * 512 * 1056 * 4
    measured = tmp_path / "measured"
    command = [sys.executable, "-c", MEASURE, str(model), str(count - 1), str(count), str(measured)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    packed, growth = map(int, measured.read_text().split())
    assert packed >= 8 * layer_bytes // count * 0.95
    assert growth <= packed + layer_bytes


def broken(tmp_path: Path, name: str, array: Array | None) -> str:
    """Returns the error of a checkpoint with one tensor replaced (None: dropped)."""
    model = MODEL.write(tmp_path / "model", {name: array})
    with pytest.raises(CheckpointError) as caught:
        plan_load(read_geometry(model), str(model))
    return str(caught.value)


NAME = "model.layers.2.mlp.experts.5.down_proj.weight"


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """Even one that another server would hold."""
    assert f"{NAME!r} is missing" in broken(tmp_path, NAME, None)


def test_misshaped_tensor_is_named(tmp_path: Path) -> None:
    """With the shape found and the one the configuration calls for."""
    message = broken(tmp_path, NAME, np.zeros((56, 48), np.float32))
    assert NAME in message
    assert "[56, 48]" in message
    assert "[48, 56]" in message


def test_unpackable_dtype_is_named(tmp_path: Path) -> None:
    """float8 experts are not read as if they were something else."""
    message = broken(tmp_path, NAME, np.zeros((48, 56), np.uint8))
    assert (NAME in message, "F8_E4M3" in message, "BF16" in message) == (True, True, True)


def test_unused_expert_is_named(tmp_path: Path) -> None:
    """An expert beyond the configured number means that file and configuration differ."""
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    assert name in broken(tmp_path, name, np.zeros((56, 48), np.float32))


def test_slices_cover_everything_once(tmp_path: Path) -> None:
    """Both splits: consecutive, complete, in proportion; impossible ones are refused by name."""
    geometry = read_geometry(MODEL.write(tmp_path / "model"))

    def parts(split: str, shares: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        requests = [
            SliceRequest("", "expert" if split == "expert" else "tensor", index, len(shares), shares)
            for index in range(len(shares))
        ]
        found = [plan_slice(geometry, request) for request in requests]
        return [
            (part.expert_begin, part.expert_end, part.intermediate_begin, part.intermediate_end)
            for part in found
        ]

    assert parts("tensor", (1, 1)) == [(0, 7, 0, 32), (0, 7, 32, 56)]
    assert parts("expert", (1, 2)) == [(0, 2, 0, 56), (2, 7, 0, 56)]
    with pytest.raises(ValueError, match="split_index is 2"):
        plan_slice(geometry, SliceRequest("", split_index=2, split_count=2))
    with pytest.raises(ValueError, match="split_shares has 1 entries"):
        plan_slice(geometry, SliceRequest("", split_count=2, split_shares=(1,)))
