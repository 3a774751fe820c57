"""Guards graphs of prompts that are captured while an engine serves: its tokens are those of eager steps, and
nothing but the device's own failure ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.core.request import Request
from gpu_service.core.step import StepPlan
from gpu_service.device.graphs import CapturedGraph, Cut
from gpu_service.engine import late_graphs
from gpu_service.engine.late_graphs import BEGIN_GRAPHS, CAPTURE_GRAPH, LateGraphs
from gpu_service.engine.step_runner import LaunchedStep, StepRunner
from tests.equality.test_decode_graphs import GREEDY, HOST, OrderedStream, Tiny, prefixed
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import Replay, Setup, TinyEngine, noted_replays, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

SIZES = (12, 30, 32)
LATER = Setup(prompt_graphs=SIZES, largest_graph=8, captures_later=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Returns a model and its experts."""
    directory: Path = tmp_path_factory.mktemp("qwen3_moe")
    make_tiny_model("qwen3_moe", directory)
    return tiny_model(directory, HOST), DenseExperts(directory, 7)


class Backend(RecordedOperations):
    """Notes captures in pieces; `fails` is called before each with its number."""

    def __init__(self, fails: Callable[[int], None] = lambda number: None) -> None:
        self.captured, self._fails = 0, fails

    def capture_pieces(self, work: Callable[[Cut], None]) -> CapturedGraph:
        self._fails(self.captured)
        graph = super().capture_pieces(work)
        self.captured += 1
        return graph


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Returns the steps that are replayed in a test."""
    return noted_replays(monkeypatch)


@contextmanager
def engine(tiny: Tiny, backend: Backend, setup: Setup = LATER) -> Iterator[TinyEngine]:
    """Runs one on the host's twins of stream and graphs."""
    model, experts = tiny
    with tiny_engine(model, experts, OrderedStream(), CapturableAttention, setup, backend) as running:
        yield running


def wanted(name: str = "") -> list[Request]:
    """Returns requests of other namespaces, so that no prefix is another call's."""
    return [
        Request(f"{one.request_id}{name}", one.prompt_token_ids, one.params, cache_namespace=name)
        for one in prefixed(GREEDY)
    ]


def test_graphs_come_while_the_engine_is_idle(tiny: Tiny, replayed: list[Replay]) -> None:
    """None before it begins; then all, without a request, and steps replay them."""
    with engine(tiny, Backend(), Setup()) as eager:
        expected = eager.run(wanted())
    backend = Backend()
    with engine(tiny, backend) as running:
        assert running.run(wanted("before")) == expected
        assert (backend.captured, replayed) == (0, [])
        running.engine.call(BEGIN_GRAPHS).result(60)
        wait_until(lambda: backend.captured == len(SIZES))
        assert running.run(wanted("after")) == expected
        assert {size for *_, size in replayed} == set(SIZES)


def test_graphs_come_between_steps_of_a_busy_engine(
    tiny: Tiny, replayed: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight is committed before each, and a size without a graph runs eagerly meanwhile."""
    with engine(tiny, Backend(), Setup()) as eager:
        expected = eager.run(wanted())
    monkeypatch.setattr(late_graphs, "_PAUSE_S", 0.0)
    backend = Backend()
    with engine(tiny, backend) as running:
        begun = running.engine.call(BEGIN_GRAPHS)
        assert running.run(wanted("during")) == expected
        begun.result(60)
        wait_until(lambda: backend.captured == len(SIZES))
        assert running.run(wanted("after")) == expected
    assert replayed


def test_a_graph_that_fails_is_a_warning(tiny: Tiny, replayed: list[Replay]) -> None:
    """The engine goes on without graphs of prompts, those included that were there, and tries no more."""

    def fails(number: int) -> None:
        if number == 1:
            raise ValueError("cannot be captured")

    with engine(tiny, Backend(), Setup()) as eager:
        expected = eager.run(wanted())
    backend = Backend(fails)
    with engine(tiny, backend) as running:
        with capture_logs() as logs:
            running.engine.call(BEGIN_GRAPHS).result(60)
            wait_until(lambda: any("run without graphs" in line["event"] for line in logs))
        assert [line["because"] for line in logs if line["log_level"] == "warning"] == [
            "ValueError: cannot be captured"
        ]
        running.engine.call(CAPTURE_GRAPH).result(60)
        assert running.run(wanted("after")) == expected
        assert running.engine.is_alive
    assert (backend.captured, replayed) == (1, [])


def test_a_device_that_fails_ends_the_engine(tiny: Tiny) -> None:
    """It may record what comes next instead of computing it: requests end with an error."""

    def fails(number: int) -> None:
        raise torch.AcceleratorError("an illegal instruction")

    lost: list[str] = []
    with engine(tiny, Backend(fails)) as running:
        running.engine.on_lost = lost.append
        running.engine.call(BEGIN_GRAPHS)
        wait_until(lambda: bool(lost))
        assert "an illegal instruction" in lost[0]
        assert not running.engine.is_alive


class Steps(StepRunner):
    """Has a graph left as long as `is_left`."""

    is_left = True

    @property
    def may_capture(self) -> bool:
        return self.is_left

    def launch(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError("no step is launched")

    def zero_pages(self, pages: list[int]) -> None:
        raise AssertionError("no page is cleared")

    def close(self) -> None:
        raise AssertionError("the engine closes it")


def test_a_busy_engine_pauses_between_graphs() -> None:
    """An idle one does not; nothing is due before the engine serves, nor while nothing may be captured."""
    now, steps = 100.0, Steps()
    late = LateGraphs(steps, lambda: None, clock=lambda: now)
    assert (late.due(True), late.due(False)) == ("", "")
    late.operations[BEGIN_GRAPHS]("")
    assert (late.due(True), late.due(False)) == (CAPTURE_GRAPH, "")
    now += late_graphs._PAUSE_S
    assert late.due(False) == CAPTURE_GRAPH
    late.operations[CAPTURE_GRAPH]("")
    assert (late.due(True), late.due(False)) == (CAPTURE_GRAPH, "")
    steps.is_left = False
    now += late_graphs._PAUSE_S
    assert (late.due(True), late.due(False)) == ("", "")
