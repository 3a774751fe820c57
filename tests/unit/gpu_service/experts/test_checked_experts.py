"""Guards what happens when an expert server returns: it computes as before, or nothing is computed by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpu_service.core.parallel import SOLO
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.servers import CheckedExperts, Newcomers
from gpu_service.parallel.experts import RankExperts
from gpu_service.verify.self_test import ExpertsUnderTest, check_again, run_self_test
from moebius.config import MoebiusConfig
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe


class Returning(LocalExpertClient):
    """A client whose server is another process after each recovery, for which the test chooses weights."""

    def __init__(self, geometry: MoeGeometry, models: list[Path | None]) -> None:
        """`models`: what the processes compute, one after another; None: that one is killed when it is asked.

        None left: the server does not return.
        """
        super().__init__(str(models[0]), geometry, torch.float32)
        self.models = models[1:]
        self.process = 1
        self.rejected: list[str] = []
        self.known = Newcomers(1, "")
        self.known.arrived([1])
        self.current: LocalExpertClient | None = LocalExpertClient(str(models[0]), geometry, torch.float32)

    def submit(self, layer, hidden_states, topk_ids, topk_weights):  # type: ignore[no-untyped-def]
        """By the present process."""
        if self.current is None:
            raise ExpertUnavailable(0, "its process is gone")
        return self.current.submit(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket, partial=None):  # type: ignore[no-untyped-def]
        """By the present process."""
        return self.current.collect(ticket, partial)

    def recover(self, timeout_s: float) -> None:
        """The next process."""
        if not self.models:
            raise ExpertUnavailable(0, f"not ready within {timeout_s:.0f} s")
        self.process += 1
        model = self.models.pop(0)
        self.current = LocalExpertClient(str(model), self.geometry, torch.float32) if model else None
        self.known.arrived([self.process])

    def newcomers(self) -> tuple[int, ...]:
        return self.known.unconfirmed()

    def confirm(self) -> None:
        self.known.confirm()

    def reject(self, reason: str) -> None:
        self.rejected.append(reason)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what was loaded at the start."""
    return TinyMoe(family="glm4_moe", seed=0).write(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same shapes with other weights."""
    return TinyMoe(family="glm4_moe", seed=1).write(tmp_path_factory.mktemp("bad") / "model")


def started(good: Path, later: list[Path | None], **experts: int) -> tuple[CheckedExperts, Returning]:
    """Returns a client that has passed the self-test, with what its servers will be when they return."""
    geometry = read_geometry(good)
    returning = Returning(geometry, [good, *later])
    checked = CheckedExperts(returning)
    config = MoebiusConfig.model_validate(
        {"model": {"model": str(good)}, "experts": {"expert_transport": "local", **experts}}
    )
    stream = HostDeviceStream()
    tested = ExpertsUnderTest(geometry, geometry.moe_layers, checked, None, stream, torch.float32)
    report = run_self_test(config, tested)
    again: Callable[[], str] | None = None
    if report is not None:
        kept = report

        def again() -> str:
            return check_again(tested, kept)

    checked.check_with(again)
    return checked, returning


def test_a_server_that_computes_as_before_is_welcome(good: Path) -> None:
    """Nothing is rejected, and it stays confirmed."""
    checked, returning = started(good, [good])
    checked.recover(60)
    assert returning.rejected == []
    assert returning.newcomers() == ()


def test_a_wrong_server_is_sent_away_until_a_right_one_returns(good: Path, bad: Path) -> None:
    """The server is refused by what it computes: layer, expert and error are named."""
    checked, returning = started(good, [bad, bad, good])
    checked.recover(60)
    assert len(returning.rejected) == 2
    assert "relative error" in returning.rejected[0]
    assert "expert 0" in returning.rejected[0]
    assert returning.newcomers() == ()


def test_no_right_server_in_time_is_an_error_that_names_the_reason(good: Path, bad: Path) -> None:
    """The step fails with it; nothing was computed."""
    checked, _ = started(good, [bad])
    with pytest.raises(ExpertUnavailable, match=r"not ready within .*was refused: layer \d+, expert"):
        checked.recover(60)


def test_what_is_wanted_is_remembered_and_not_read_again(tmp_path: Path, bad: Path) -> None:
    """Files that have changed since must not make their own weights the right ones."""
    model = TinyMoe(family="glm4_moe", seed=0).write(tmp_path / "model")
    checked, returning = started(model, [model])
    for file in bad.glob("*.safetensors"):
        (model / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ExpertUnavailable, match="was refused"):
        checked.recover(60)
    assert len(returning.rejected) == 1


def test_without_a_self_test_nothing_is_checked(good: Path, bad: Path) -> None:
    """The setting that switches it off does so for returning servers, too."""
    checked, returning = started(good, [bad], self_test_layers=0)
    checked.recover(60)
    assert returning.rejected == []
    assert returning.newcomers() == ()


def test_a_server_that_is_lost_again_while_it_is_checked_is_waited_for(good: Path, bad: Path) -> None:
    """However often that happens, and among servers that are sent away; none is blamed for being killed."""
    checked, returning = started(good, [None, None, bad, None, None, good])
    checked.recover(60)
    assert len(returning.rejected) == 1
    assert returning.newcomers() == ()


def test_servers_that_are_lost_in_every_check_end_with_the_time(good: Path) -> None:
    """The bound is the time to recover; the error names the last loss."""
    checked, returning = started(good, [None] * 1000)
    with pytest.raises(ExpertUnavailable, match="its process is gone"):
        checked.recover(0.2)
    assert returning.newcomers() == (0,), "confirmed without a check"


def test_ranks_give_up_together(good: Path) -> None:
    """One that left alone when its own clock says so would keep the others waiting for it."""
    barrier, values = threading.Barrier(2, timeout=60), [0, 0]

    def rank(number: int, timeout_s: float) -> str:
        def agree(value: int) -> int:
            values[number] = value
            barrier.wait()
            largest = max(values)
            barrier.wait()
            return largest

        returning = Returning(read_geometry(good), [good, *[None] * 1000])
        checked = CheckedExperts(RankExperts(returning, SOLO, agree, divides=False))
        checked.check_with(lambda: _lost())
        with pytest.raises(ExpertUnavailable) as caught:
            checked.recover(timeout_s)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(rank, number, timeout_s) for number, timeout_s in enumerate((0.1, 3600.0))]
        assert ["killed" in end.result(60) for end in ends] == [True, True]


def _lost() -> str:
    raise ExpertUnavailable(0, "killed")
