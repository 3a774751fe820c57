"""Guards what a step of the prefill lane takes for itself on the device, and that it gives all of it back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpu_service.core.step import Dummy, StepPlan, TokenPool, captured_fields, graph_plan, graph_rows
from gpu_service.device.stream import DeviceEvent, HostDeviceStream
from gpu_service.engine.device_runner import DeviceLane
from gpu_service.engine.model_runner import LaneModelRunner
from gpu_service.engine.sampler import Sampler
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.layers.context import ForwardContext
from gpu_service.parallel.steps import GuardedRunner
from tests.helpers.fake_model import VOCAB, FakeModel, NullAttention, fake_cache, fake_config
from tests.helpers.resident_layers import Shape
from tests.helpers.stored_experts import MadeServer, Streaming, streaming, tensor_split

SHAPE = Shape(hidden=64, intermediate=48, experts=6, top_k=2)


class LateEvent(DeviceEvent):
    """Ends when the test says so."""

    ended = False

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        assert self.ended, "the test would wait for ever"


class LateStream(HostDeviceStream):
    """One whose work is not known to have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.event = LateEvent()

    def record(self) -> DeviceEvent:
        return self.event


class Changes:
    """Resident experts that a test wants to replace."""

    is_held = False

    def begin_step(self) -> None:
        """Called before every step."""


def made(
    guard: Callable[[StepRunner], StepRunner] = lambda runner: runner,
) -> tuple[DeviceLane, LateStream, FakeModel, Streaming, Changes]:
    """Returns a lane on a model without layers, whose streamer has segments of three layers."""
    servers = [MadeServer(SHAPE, "float32", part, 3, 1) for part in tensor_split(SHAPE, 1)]
    found, cache, model, resident = streaming(servers), fake_cache(8, 4), FakeModel(), Changes()
    runner = LaneModelRunner(
        model,
        cache,
        NullAttention(fake_config().layers, cache),
        None,
        TokenPool(2, 32, torch.device("cpu")),
        Sampler(VOCAB, torch.device("cpu"), 2),
        resident=resident,  # type: ignore[arg-type]
        streamer=found.streamer,
    )
    stream = LateStream()
    lane = DeviceLane(
        runner, stream, HostDeviceStream(), is_ready=lambda: True, min_tokens=lambda: (2, 2), guard=guard
    )
    return lane, stream, model, found, resident


def plan() -> StepPlan:
    """Returns one token of one request."""
    rows = graph_rows(captured_fields(()), 1, {Dummy.SLOT: 0, Dummy.STATE: 0})
    return graph_plan(rows, 1, torch.zeros(1, dtype=torch.int64))


def test_a_step_holds_the_ring_and_the_residents_until_its_end() -> None:
    """Neither is another's while the device may read it; `query` and `wait` go by the device's end."""
    lane, stream, _, found, resident = made()
    pending = lane.launch(plan())
    assert not pending.query()
    assert resident.is_held
    assert found.streamer.begin(9) is None, "the main lane streams next to the lane"
    stream.event.ended = True
    assert pending.query()
    pending.wait()
    assert not resident.is_held
    assert found.streamer.begin(9) is not None


def test_a_launch_that_fails_ends_when_what_it_launched_has() -> None:
    """Layers before the error may still write to pages: the failure waits for them, and gives all back."""
    lane, stream, model, found, resident = made()

    def fail(call: int) -> None:
        raise RuntimeError("boom")

    model.before_forward = fail
    pending = lane.launch(plan())
    assert not pending.query()
    stream.event.ended = True
    with pytest.raises(RuntimeError, match="boom"):
        pending.wait()
    assert not resident.is_held
    assert found.streamer.begin_whole(9, lambda has_come: None) is not None


def test_what_one_rank_alone_fails_with_ends_its_group() -> None:
    """The group ends at the launch, before others wait for its collectives; experts that were replaced end
    nothing.
    """
    reported: list[str] = []
    lane, stream, model, found, _ = made(lambda runner: GuardedRunner(runner, reported.append))
    found.source.made[0].is_complete = False
    lost = lane.launch(plan())
    stream.event.ended = True
    with pytest.raises(ExpertUnavailable):
        lost.wait()
    assert reported == []
    found.source.made[0].is_complete = True

    def fail(call: int) -> None:
        raise RuntimeError("boom")

    model.before_forward = fail
    lane.launch(plan())
    assert reported == ["a step failed: RuntimeError('boom')"]


def test_a_lane_without_experts_says_that_they_are_lost() -> None:
    """Segments that are loaded again: the step is computed otherwise, not failed, and the lane tries again
    only after a while, since another rank may still open its segments.
    """
    lane, stream, _, found, _ = made()
    assert lane.is_ready
    found.source.made[0].is_complete = False
    pending = lane.launch(plan())
    assert not lane.is_ready
    stream.event.ended = True
    with pytest.raises(ExpertUnavailable, match="can not be streamed any more"):
        pending.wait()


def test_layers_give_turns() -> None:
    """The model's layers get what the engine wants called between them; the main lane's get nothing."""
    lane, _, model, _, _ = made()
    seen: list[ForwardContext] = []
    original = model.forward

    def forward(context: ForwardContext) -> torch.Tensor:
        seen.append(context)
        return original(context)

    model.forward = forward  # type: ignore[method-assign]
    turns = []
    lane.between_layers = lambda: turns.append(1)
    lane.launch(plan())
    assert isinstance(seen[0].streamed, StreamedExperts)
    assert seen[0].between_layers is not None
    seen[0].between_layers()
    assert turns == [1]
