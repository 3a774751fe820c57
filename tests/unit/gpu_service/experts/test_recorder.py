"""Invariant: the recorder's numbers are those of a count by hand, in every mode, whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.recorder import ExpertRecorder
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics
from moebius.models.geometry import MoeGeometry

GEOMETRY = MoeGeometry("qwen3_moe", 48, 6, (1, 2, 4), 7, 3, 20, "silu", "float32")
MAX_ROWS = 9


def recorder(**options: Any) -> ExpertRecorder:
    """On the CPU."""
    return ExpertRecorder(GEOMETRY, HostDeviceStream(), MAX_ROWS, **options)


def steps(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Returns ids int32 [layers, T, K] of steps; the last row of every second step is padding."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        rows = int(torch.randint(1, MAX_ROWS + 1, (), generator=generator))
        ids = torch.rand(3, rows + 1, 7, generator=generator).argsort(-1)[..., :3].int()[:, : max(2, rows)]
        if number % 2:
            ids[:, -1] = -1
        found.append(ids)
    return found


@torch.inference_mode()
def run(target: ExpertRecorder, work: list[torch.Tensor], layers: int = 3) -> None:
    """Steps, cut off after some layers."""
    for ids in work:
        for layer, chosen in zip(GEOMETRY.moe_layers[:layers], ids, strict=False):
            target.record(layer, chosen)


def counted(work: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """By hand: [steps, layers, experts]."""
    found = np.zeros((len(work), 3, 7), np.int64)
    for number, ids in enumerate(work):
        for layer in range(3):
            for expert in ids[layer].flatten().tolist():
                if expert >= 0:
                    found[number, layer, expert] += 1
    return found


def real_rows(work: list[torch.Tensor]) -> torch.Tensor:
    """Returns the ids of rows that are not padding, [tokens, layers, K]."""
    rows = torch.cat([ids.transpose(0, 1) for ids in work])
    return rows[(rows[:, -1] >= 0).any(-1)]


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_counts_are_those_by_hand(mode: str) -> None:
    """Totals, steps, tokens, different experts per step, and each mode's details; padding counts nowhere."""
    target, work = recorder(), steps(5)
    run(target, steps(2, seed=9))
    target.start(mode)
    run(target, work)
    target.stop()
    run(target, steps(1, seed=8))
    found, by_hand = target.dump(), counted(work)
    assert (found.mode, found.steps, found.layers) == (mode, 5, (1, 2, 4))
    assert found.tokens == len(real_rows(work))
    np.testing.assert_array_equal(found.counts, by_hand.sum(0))
    np.testing.assert_array_equal(found.distinct, (by_hand > 0).sum((0, 2)))
    assert found.distinct_per_step()[4] == (by_hand[:, 2] > 0).sum() / 5
    if mode == "per_pass":
        assert found.pass_counts is not None
        np.testing.assert_array_equal(found.pass_counts, by_hand)
    if mode == "per_token":
        assert found.token_ids is not None
        np.testing.assert_array_equal(found.token_ids, real_rows(work).numpy())


def test_choices_without_weights_are_no_experts_but_their_rows_are_tokens() -> None:
    """A row that chose nothing else is a token, too; and a file of choices has no number that no
    expert has.
    """
    target = recorder()
    target.start("per_token")
    ids = torch.tensor([[0, 7, 9], [8, 8, 7], [-1, -1, -1]], dtype=torch.int32)
    run(target, [ids.expand(3, -1, -1)])
    found = target.dump()
    assert (found.tokens, found.counts.tolist()) == (2, [[1, 0, 0, 0, 0, 0, 0]] * 3)
    assert found.distinct.tolist() == [1, 1, 1]
    assert found.token_ids is not None
    assert found.token_ids[:, 0].tolist() == [[0, -1, -1], [-1, -1, -1]]


def test_a_replayed_step_counts_once() -> None:
    """A step that ended early, because an expert server was lost, leaves nothing behind."""
    target, work = recorder(), steps(3)
    target.start("per_pass")
    run(target, work[:1])
    run(target, work[1:2], layers=2)
    run(target, work[1:])
    np.testing.assert_array_equal(target.dump().pass_counts, counted(work))


def test_a_start_within_a_step_waits_for_the_next() -> None:
    """No half step is ever counted; a second start drops what the first recorded."""
    target, work = recorder(), steps(3)
    target.start("stat")
    run(target, work)
    with torch.inference_mode():
        target.record(1, work[0][0])
        target.start("stat")
        target.record(2, work[0][1])
    run(target, work[:1])
    np.testing.assert_array_equal(target.dump().counts, counted(work[:1])[0])


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
def test_details_end_where_room_does(mode: str) -> None:
    """What finds no room is counted all the same, and what was kept stays as it was."""
    work = steps(6)
    target = recorder(detail_bytes=4 * 3 * 7 * 4 if mode == "per_pass" else 5 * 3 * 3 * 2)
    target.start(mode)
    run(target, work)
    found, by_hand = target.dump(), counted(work)
    np.testing.assert_array_equal(found.counts, by_hand.sum(0))
    if mode == "per_pass":
        np.testing.assert_array_equal(found.pass_counts, by_hand[:4])
    else:
        np.testing.assert_array_equal(found.token_ids, real_rows(work)[:5].numpy())


def test_tensors_stay_where_they_are() -> None:
    """A captured graph holds their addresses: a stop and a new start change values only."""
    target = recorder()
    target.start("per_token")
    before = [tensor.data_ptr() for tensor in target._buffers["per_token"].tensors()]
    run(target, steps(2))
    target.stop()
    target.start("stat")
    target.start("per_token")
    assert [tensor.data_ptr() for tensor in target._buffers["per_token"].tensors()] == before
    assert target.dump().tokens == 0
    assert target.needs_eager_steps
    target.stop()
    assert not target.needs_eager_steps


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
@pytest.mark.parametrize("form", ["safetensors", "json"])
def test_files_hold_everything(mode: str, form: Any, tmp_path: Path) -> None:
    """Both file forms give back what was recorded, and neither is a pickle."""
    target, file = recorder(), tmp_path / "statistics"
    target.start(mode)
    run(target, steps(3))
    written = target.dump()
    file.write_bytes(written.encode(form))
    found = ExpertStatistics.read(str(file))
    for name in ("model_type", "num_experts", "top_k", "layers", "mode", "steps", "tokens"):
        assert getattr(found, name) == getattr(written, name)
    for name in ("counts", "distinct", "pass_counts", "token_ids"):
        one, other = getattr(found, name), getattr(written, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    found.check_model(GEOMETRY, str(file))


def test_refusals() -> None:
    """An unknown mode and a dump of nothing are errors that say so."""
    with pytest.raises(UserError, match="mode 'all' is not allowed; allowed: stat, per_pass, per_token"):
        recorder().start("all")
    with pytest.raises(UserError, match="start the expert recorder first"):
        recorder().dump()
