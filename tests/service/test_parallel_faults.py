"""Guards that a group of ranks ends as one: whichever is lost, the others say which rank it was, and end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from moebius.errors import PEER_LOST_EXIT
from tests.helpers.rank_faults import started_group
from tests.helpers.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(MODEL, directory, seed=3)
    return directory


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_killed_rank_ends_all_at_once(model: Path, tmp_path: Path, lost: int) -> None:
    """SIGKILL in the middle of decoding: every other rank names it and ends with the group's status."""
    with started_group(model, tmp_path, tp=1, pp=3, timeout_s=60) as group:
        group.kill(lost, signal.SIGKILL)
        assert group.exit_codes(but=lost) == [PEER_LOST_EXIT] * 2
        for rank in {0, 1, 2} - {lost}:
            assert f"rank {lost}" in group.log(rank), group.log(rank)


def test_a_rank_that_hangs_is_given_up(model: Path, tmp_path: Path) -> None:
    """A stopped process says nothing and closes nothing: its silence ends the group."""
    with started_group(model, tmp_path, tp=2, pp=1, timeout_s=15) as group:
        group.kill(1, signal.SIGSTOP)
        assert group.exit_codes(but=1) == [PEER_LOST_EXIT]
        assert "rank 1" in group.log(0)
        assert "rank_timeout_s" in group.log(0)


@pytest.mark.parametrize(
    ("stuck", "tp", "pp"),
    [(1, 2, 1), pytest.param(0, 2, 1, marks=pytest.mark.full), pytest.param(1, 1, 3, marks=pytest.mark.full)],
)
def test_a_rank_that_is_stuck_in_a_step_is_named(
    model: Path, tmp_path: Path, stuck: int, tp: int, pp: int
) -> None:
    """Its heartbeats go on, while the others wait for it in a collective: they end the group, and name it."""
    with started_group(model, tmp_path, tp=tp, pp=pp, timeout_s=15, stuck_rank=stuck) as group:
        assert group.exit_codes() == [1 if rank == stuck == 0 else PEER_LOST_EXIT for rank in range(tp * pp)]
        for rank in range(tp * pp):
            assert f"rank {stuck}: others have waited in a step for" in group.log(rank)


def test_an_error_in_one_ranks_step_ends_the_group(model: Path, tmp_path: Path) -> None:
    """The rank with the error says what it was and exits with 1; the others repeat it."""
    with started_group(model, tmp_path, tp=2, pp=1, timeout_s=60, failing_rank=1) as group:
        assert group.exit_codes() == [PEER_LOST_EXIT, 1]
        for rank in (0, 1):
            assert "rank 1: a step failed: ValueError('broken weights')" in group.log(rank)


def test_lost_experts_are_lost_for_all_ranks(model: Path, tmp_path: Path) -> None:
    """One rank's experts vanish in a step, another's in a later one: both are run again by all ranks."""
    with started_group(model, tmp_path, tp=2, pp=1, timeout_s=60, flaky=()) as group:
        expected = group.tokens()
    with started_group(model, tmp_path, tp=2, pp=1, timeout_s=60, flaky=(3, 11)) as group:
        assert group.tokens() == expected
        assert group.exit_codes() == [0, 0]
