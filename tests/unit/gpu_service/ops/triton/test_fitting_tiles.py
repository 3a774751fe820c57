"""Invariant: a launch takes the best tile that its device can hold, and finds it once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from gpu_service.attention.triton_tiles import decode_tile, prefill_tile, with_smaller
from gpu_service.device import limits
from gpu_service.experts.resident.triton_kernels import launch as resident
from gpu_service.ops.triton.jit import launch_fitting

CPU = torch.device("cpu")


def test_the_first_tile_that_fits_is_found_once() -> None:
    """A step that is captured or replayed must not meet a tile that fails."""
    tried: list[int] = []

    def launch(kib: int) -> None:
        tried.append(kib)
        if kib > 99:
            raise OutOfResources(kib * 1024, 99 * 1024, "shared memory")

    assert launch_fitting("found once", "a", CPU, (120, 108, 72, 40), launch) == 72
    assert launch_fitting("found once", "a", CPU, (120, 108, 72, 40), launch) == 72
    assert tried == [120, 108, 72, 72]
    launch_fitting("found once", "another variant", CPU, (120, 40), launch)
    assert tried[4:] == [120, 40]


def test_another_device_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of GPU may serve in one process."""
    tried: list[int] = []
    launch_fitting("again", None, CPU, (120, 72), tried.append)
    monkeypatch.setattr(limits, "WITHOUT_GPU", replace(limits.WITHOUT_GPU, architecture=86))
    launch_fitting("again", None, CPU, (120, 72), tried.append)
    assert tried == [120, 120]


def test_none_that_fits_raises_what_the_last_one_met() -> None:
    """The caller's fallback names it."""

    def launch(kib: int) -> None:
        raise OutOfResources(kib * 1024, 99 * 1024, "shared memory")

    with pytest.raises(OutOfResources, match=str(110 * 1024)):
        launch_fitting("none", None, CPU, (120, 110), launch)
    with pytest.raises(ZeroDivisionError):
        launch_fitting("an error of another kind", None, CPU, (1, 2), lambda tile: tile // 0)


@pytest.mark.parametrize("group", [1, 8, 12, 16])
def test_smaller_tiles_hold_the_group_and_end(group: int) -> None:
    """Each comes once; rows stay enough for all heads that share keys, and products deep enough."""
    for head_dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            for tile in (decode_tile(group, head_dim, dtype), prefill_tile(group, head_dim, dtype)):
                tiles = with_smaller(tile, 16)
                assert tiles[0] == tile
                assert len(set(tiles)) == len(tiles)
                assert all(smaller.rows >= 16 and smaller.keys >= 16 for smaller in tiles)
                assert tiles[-1].num_stages == 1
    for chosen in (resident.tile(10, 5, False), resident.tile(10_000, 5, False), resident.tile(10, 5, True)):
        sizes = [tile.rows * tile.columns for tile in resident.with_smaller(chosen)]
        assert sizes == sorted(set(sizes), reverse=True)
