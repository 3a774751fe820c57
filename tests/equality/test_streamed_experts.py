"""Invariant: streamed experts give what expert servers give, in every format, however a layer is divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.costs import CostCurve
from gpu_service.experts.resident.experts import Share
from gpu_service.experts.streaming.make import measure_while_serving
from gpu_service.experts.streaming.measure import MeasuredCosts, measure_link, measure_products
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.experts.streaming.streamed_step import StreamedStep
from gpu_service.layers.asked_experts import ask_experts
from gpu_service.layers.deferral import late_choices
from moebius.config import GpuConfig, ModelConfigSection, MoebiusConfig
from tests import tolerances
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, routed
from tests.helpers.stored_experts import (
    MadeExperts,
    MadeServer,
    Part,
    Streaming,
    expert_split,
    streaming,
    tensor_split,
)

SHAPE = Shape(hidden=64, intermediate=48, experts=6, top_k=2)
LAYERS = 3


def made(parts: list[Part], weight_format: str = "float32", shape: Shape = SHAPE) -> list[MadeServer]:
    """Returns the servers of three layers."""
    return [MadeServer(shape, weight_format, part, LAYERS, seed) for seed, part in enumerate(parts)]


def forward(
    client: MadeExperts, streamed: StreamedExperts | None, rows: int = 9, shape: Shape = SHAPE
) -> list[torch.Tensor]:
    """Every layer's sum, as the MoE block asks for it."""
    answers = []
    for layer in range(LAYERS):
        hidden_states, ids, weights = routed(shape, rows, seed=layer)
        asked = ask_experts(layer, hidden_states, ids, weights, client, None, streamed)
        answers.append(asked.collect(torch.full_like(hidden_states, 0.5)))
    return answers


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Up to the order of sums."""
    for ours, theirs in zip(found, wanted, strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerances.EXPERTS_SUMMED_APART


@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
def test_every_format(weight_format: str) -> None:
    """All experts streamed, nothing asked of servers; twice, so that the ring wraps into the next step."""
    found = streaming(made(tensor_split(SHAPE, 1), weight_format))
    wanted = forward(MadeExperts(found.client.servers), None)
    for _ in range(2):
        streamed = found.streamer.begin(9)
        assert streamed is not None
        assert [streamed.share(layer) for layer in range(LAYERS)] == [Share.ALL] * LAYERS
        assert_equal(forward(found.client, streamed), wanted)
        streamed.launched()
    assert found.client.submitted == []


@pytest.mark.parametrize("share", [1, 20, 32, 50, 64])
@pytest.mark.parametrize("split", [tensor_split, expert_split])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_every_division(share: int, split: object, servers: int) -> None:
    """Parts of channels and parts of experts; what is not streamed is asked of servers, nothing twice."""
    found = streaming(made(split(SHAPE, servers)), share=share)  # type: ignore[operator]
    wanted = forward(MadeExperts(found.client.servers), None)
    streamed = found.streamer.begin(9)
    assert streamed is not None
    assert_equal(forward(found.client, streamed), wanted)
    assert bool(found.client.submitted) == (share < 64)


@pytest.mark.parametrize("share", [20, 64])
def test_late_choices_have_a_sum_of_their_own(share: int) -> None:
    """Both parts of a layer's choices are computed while its experts are in the ring."""
    found = streaming(made(tensor_split(SHAPE, 2)), share=share)
    servers = MadeExperts(found.client.servers)
    streamed = found.streamer.begin(9)
    for layer in range(LAYERS):
        rows, ids, weights = routed(SHAPE, 9, seed=layer)
        late = late_choices(ids, weights, 1)
        parts = ids.masked_fill(late, -1), ids.masked_fill(~late, -1)
        asked = ask_experts(layer, rows, ids, weights, found.client, None, streamed, parts)
        partial = torch.full_like(rows, 0.5)
        wanted = [
            ask_experts(layer, rows, part, weights, servers, None).collect(own)
            for part, own in zip(parts, (partial.clone(), torch.zeros_like(rows)), strict=True)
        ]
        computed = asked.compute(partial)
        assert_equal([fetch(own) for fetch, own in zip(asked.fetch, computed, strict=True)], wanted)
    assert streamed is not None
    streamed.launched()


def test_a_bias_is_added_once() -> None:
    """Experts with biases, clamped as gpt-oss does."""
    shape = Shape(hidden=64, intermediate=48, experts=6, activation="gpt_oss", has_bias=True, limit=0.5)
    found = streaming(made(expert_split(shape, 2), "int4_g32", shape), share=30)
    wanted = forward(MadeExperts(found.client.servers), None, shape=shape)
    assert_equal(forward(found.client, found.streamer.begin(9), shape=shape), wanted)


@pytest.mark.parametrize("share", [24, 64])
def test_ranks_stream_parts_that_add_up(share: int) -> None:
    """Each rank streams its part of the experts; servers' rows, which one rank has here, come on top."""
    servers = made(tensor_split(SHAPE, 2))
    wanted = forward(MadeExperts(servers), None)
    total = [torch.full_like(one, -0.5) for one in wanted]
    copied = []
    for rank in range(2):
        found = streaming(servers, share=share, parallel=ParallelContext(tp_rank=rank, tp_size=2))
        client = found.client if rank == 0 else Nothing(servers)
        for layer, part in enumerate(forward(client, found.streamer.begin(9))):
            total[layer] += part
        copied.append(found.source.copied_bytes)
    assert_equal(total, wanted)
    assert max(copied) <= 2 * min(copied)


class Nothing(MadeExperts):
    """Another rank's face of the servers: no row is this one's."""

    def collect(self, ticket: object, partial: torch.Tensor | None = None) -> torch.Tensor:
        assert partial is not None
        return partial


def test_a_step_that_lost_its_experts_is_run_again() -> None:
    """A new generation is found out when the step ends, even when loading has ended by then."""
    found = streaming(made(tensor_split(SHAPE, 1)))
    streamed = found.streamer.begin(9)
    assert streamed is not None
    forward(found.client, streamed)
    found.source.made[0].generation += 1
    with pytest.raises(ExpertUnavailable, match="reloaded its experts while a step streamed them"):
        streamed.launched()
    assert found.streamer.begin(9) is None
    again = found.streamer.begin(9)
    assert again is not None
    assert_equal(forward(found.client, again), forward(MadeExperts(found.client.servers), None))
    again.launched()


def test_incomplete_segments_leave_all_to_servers() -> None:
    """Neither lane streams, until the segment is complete again."""
    found = streaming(made(tensor_split(SHAPE, 2)))
    assert found.streamer.can_stream
    found.source.made[1].is_complete = False
    assert found.streamer.begin(9) is None
    assert found.streamer.begin_whole(9, at_once) is None
    assert not found.streamer.can_stream
    found.source.made[1].is_complete = True
    assert found.streamer.can_stream


def at_once(has_come: Callable[[], bool]) -> None:
    """The host is the device."""
    assert has_come()


def whole(found: Streaming) -> StreamedStep:
    """Returns a lane's step."""
    step = found.streamer.begin_whole(ROUTED_ROWS, at_once)
    assert step is not None
    return step


def test_a_lane_keeps_the_ring_until_its_end() -> None:
    """Its step needs no client; others do not stream meanwhile, and do afterwards."""
    found = streaming(made(expert_split(SHAPE, 2)), share=32)
    wanted = forward(MadeExperts(found.client.servers), None)
    step = whole(found)
    assert found.streamer.begin(9) is None
    assert found.streamer.begin_whole(9, at_once) is None
    found.client.submitted.clear()
    assert_equal(forward(None, step), wanted)  # type: ignore[arg-type]
    step.launched()
    step.check()
    assert found.chooser.observed == []
    step.end()
    streamed = found.streamer.begin(9)
    assert streamed is not None
    assert_equal(forward(found.client, streamed), wanted)
    streamed.launched()
    ((rows, share, seconds, copying),) = found.chooser.observed
    assert (rows, share) == (9, 32)
    assert 0 < copying <= seconds
    # One that was broken off half-way prevents no other from streaming.
    whole(found).end()
    assert_equal(forward(None, whole(found)), wanted)  # type: ignore[arg-type]


def test_a_step_that_was_followed_streams_no_more() -> None:
    """Its buffers are another step's by then."""
    found = streaming(made(tensor_split(SHAPE, 1)))
    first = found.streamer.begin(9)
    found.streamer.begin(9)
    with pytest.raises(RuntimeError, match="another one has followed"):
        forward(found.client, first)


def test_all_ranks_stream_or_none() -> None:
    """A rank whose segments cannot be read keeps the others from it; the largest share is taken by all."""
    answers: list[int] = []

    def largest(values: torch.Tensor) -> torch.Tensor:
        return values.clamp(min=answers.pop(0)) if answers else values

    found = streaming(made(tensor_split(SHAPE, 1)), share=10, largest=largest)
    answers.append(65)
    assert found.streamer.begin(9) is None
    answers.append(40)
    streamed = found.streamer.begin(9)
    assert isinstance(streamed, StreamedStep)
    assert streamed.plan.share == 40
    forward(found.client, streamed)
    answers.append(1)
    with pytest.raises(ExpertUnavailable, match="another rank"):
        streamed.check()


@pytest.mark.parametrize("has_lane_step", [False, True])
def test_a_serving_engine_measures_as_at_its_start(has_lane_step: bool) -> None:
    """Servers, products and link between two steps; nothing while a lane's step has the ring; steps go on."""
    made_up = streaming(made(tensor_split(SHAPE, 1)))
    wanted = forward(made_up.client, None)
    lane = whole(made_up) if has_lane_step else None
    config = MoebiusConfig(model=ModelConfigSection(model="/m"), gpu=GpuConfig(prefill_experts="auto"))
    segments = made_up.source.segments()
    assert segments is not None
    kind = segments.stored[0][0].kind
    made_up.streamer.products = measure_products(made_up.streamer, kind, torch.float32, ROUTED_ROWS)
    measure_while_serving(config, made_up.streamer, made_up.client, HostDeviceStream(), torch.float32)
    costs = made_up.chooser.costs
    assert (costs is None) is has_lane_step
    if costs is not None:
        assert costs.copy > 0
        assert costs.cpu.points[0][1] > 0
        assert costs.gpu.points[0][1] > 0
    if lane is not None:
        lane.end()
    streamed = made_up.streamer.begin(9)
    assert streamed is not None
    assert_equal(forward(made_up.client, streamed), wanted)


def test_the_link_is_as_fast_as_its_fastest_copy() -> None:
    """A host that comes late between two copies makes the link no slower than it is."""
    made_up = streaming(made(tensor_split(SHAPE, 2)))
    late = itertools.cycle([8.0, 1.0, 3.0])
    made_up.source.seconds_of = lambda run: next(late) * run.nbytes / 50e9
    segments = made_up.source.segments()
    assert segments is not None
    curve = CostCurve(((1, 1.0),))
    measure_link(made_up.streamer, made_up.source, segments, MeasuredCosts(curve, curve))
    costs = made_up.chooser.costs
    assert costs is not None
    layer_bytes = sum(stored.nbytes for stored in segments.stored[0])
    assert costs.copy == pytest.approx(layer_bytes / 50e9)


def chosen_of(experts: tuple[int, ...], streamed: StreamedExperts, client: MadeExperts | None) -> None:
    """A step's layers whose rows choose these experts only, each of them."""
    for layer in range(LAYERS):
        hidden_states, ids, weights = routed(SHAPE, ROUTED_ROWS, seed=layer)
        ids = torch.tensor(experts, dtype=torch.int32)[ids.long() % len(experts)]
        ask_experts(layer, hidden_states, ids, weights, client, None, streamed).collect(None)  # type: ignore[arg-type]
    streamed.launched()


ROUTED_ROWS = 200


@pytest.mark.parametrize("in_lane", [False, True], ids=["main", "lane"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_without_rows_are_not_copied(ranks: int, in_lane: bool) -> None:
    """Experts without rows are not copied once a step has shown who they are; of ranks none copies them.

    When one is chosen again, servers compute it, or in the lane its bytes are copied alone, by the rank that
    has it.
    """
    few, most = (0, 2, 3, 5), (0, 1, 2, 3, 5)
    copied, asked = [0, 0, 0], 0
    for rank in range(ranks):
        parallel = ParallelContext(tp_rank=rank, tp_size=ranks)
        found = streaming(made(tensor_split(SHAPE, 1)), parallel=parallel, asks_servers=True)
        layer = found.source.segments().stored[0][0]  # type: ignore[union-attr]
        for number, experts in enumerate((few, few, most)):
            found.client.submitted.clear()
            before = found.source.copied_bytes, found.streamer.streamed_bytes
            if in_lane:
                streamed: StreamedExperts | None = found.streamer.begin_whole(ROUTED_ROWS, at_once)
            else:
                streamed = found.streamer.begin(ROUTED_ROWS)
            assert streamed is not None
            chosen_of(experts, streamed, None if in_lane else found.client)
            streamed.end()
            copied[number] += found.source.copied_bytes - before[0]
            assert found.streamer.streamed_bytes - before[1] == found.source.copied_bytes - before[0]
            asked += sum(int((ids >= 0).sum()) for _, ids in found.client.submitted) if number < 2 else 0
    every = LAYERS * layer.kind.expert_bytes
    assert copied == [6 * every, 4 * every, (5 if in_lane else 4) * every]
    assert asked == 0


def test_ranks_plan_by_what_all_of_them_counted() -> None:
    """One whose rounding routed a row elsewhere would else leave an expert to one that has it not."""
    others = torch.zeros(LAYERS + 1, SHAPE.experts, dtype=torch.int64)

    def largest(values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, others) if values.shape == others.shape else values

    found = streaming(made(tensor_split(SHAPE, 1)), largest=largest)
    others[0, 4] = 1
    step = whole(found)
    chosen_of((0, 2, 3, 5), step, None)
    step.end()
    plan = whole(found).plan
    assert [layer.deferred for layer in plan.layers] == [(1,), (1, 4), (1, 4)]


def test_products_are_measured_for_the_longest_steps() -> None:
    """Products are measured up to the rows of a step that streams, not of a usual one: beyond the last point
    a curve is a line.
    """
    found = streaming(made(tensor_split(SHAPE, 1)), experts_per_buffer=3)
    (kind,) = {stored.kind for stored in found.source.segments().stored[0]}  # type: ignore[union-attr]
    curve = measure_products(found.streamer, kind, torch.float32, 600)
    assert [rows for rows, _ in curve.points] == [64, 512, 600]
    assert all(seconds > 0 for _, seconds in curve.points)
