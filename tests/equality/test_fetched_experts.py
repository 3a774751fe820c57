"""Invariant: fetched experts give what expert servers give, in every format, however a layer is divided, and
nothing that was copied from memory which has changed since is used.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from gpu_service.device.pinned import NullRegistrar
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.fetching import metrics
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.fetching.kernels import TorchFetchKernels
from gpu_service.experts.resident.experts import LayerSlots, ResidentExperts, TorchResidentKernels
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.source import SegmentSource
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.layers.asked_experts import ask_experts
from gpu_service.layers.deferral import late_choices
from tests import tolerances
from tests.helpers.exchanging_rank import PackedSource
from tests.helpers.fetching_layers import check_layer, fetch_state
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, routed
from tests.helpers.stored_experts import (
    MadeExperts,
    MadeServer,
    Streaming,
    expert_split,
    streaming,
    tensor_split,
)

SHAPE, LAYERS = Shape(hidden=64, intermediate=48, experts=6, top_k=3), 2


@dataclass
class Fetching:
    """An engine's parts without a model; filled by `fetching`."""

    found: Streaming
    fetcher: ExpertFetcher
    costs: ExpertCosts

    def forward(self, rows: int = 2, seed: int = 0, resident: Any = None) -> None:
        """One step, whose sums are those of servers alone."""
        step = self.fetcher.begin()
        check_sums(self.found, step, rows, seed, resident)
        step.launched()
        step.check()


def fetching(
    split: Any, servers: int = 2, weight_format: str = "float32", num_slots: int = 4, shape: Shape = SHAPE
) -> Fetching:
    """With prices at which a good part of a layer is fetched."""
    made = [MadeServer(shape, weight_format, part, LAYERS, n) for n, part in enumerate(split(shape, servers))]
    found, costs = streaming(made), ExpertCosts(shape.experts, shape.top_k)
    state, _ = fetch_state(made, num_slots, segments=found.source.segments())
    state.addresses.zero_()
    costs.served(1.0, 1.0, 1.0)
    return Fetching(found, ExpertFetcher(state, TorchFetchKernels(), found.streamer, costs), costs)


def check_sums(
    found: Streaming, step: StreamedExperts, rows: int, seed: int, resident: ResidentExperts | None
) -> None:
    """Compares the sums of every layer, as the MoE block asks for them."""
    alone, shape = MadeExperts(found.client.servers), found.client.servers[0].shape
    for layer in range(LAYERS):
        hidden_states, ids, weights = routed(shape, rows, seed=1000 * layer + seed)
        partial = torch.full_like(hidden_states, 0.5)
        asked = ask_experts(layer, hidden_states, ids, weights, found.client, resident, step)
        ours = asked.collect(partial.clone())
        theirs = ask_experts(layer, hidden_states, ids, weights, alone, None).collect(partial)
        assert (ours - theirs).abs().max() / theirs.abs().max() < tolerances.EXPERTS_SUMMED_APART


@pytest.mark.covering(1)
@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
@pytest.mark.parametrize("split", [tensor_split, expert_split])
def test_every_format(weight_format: str, split: Any) -> None:
    """Steps that follow one another: experts are fetched, found again, and replaced."""
    world = fetching(split, weight_format=weight_format)
    for seed in range(5):
        world.forward(seed=seed)
    world.fetcher._refreshed = 0.0
    world.forward()
    world.fetcher._refreshed = 0.0
    world.forward()
    figures = world.fetcher.figures
    assert figures.experts > 0
    assert figures.nbytes == sum(
        each.experts * world.fetcher.state.expert_bytes[layer]
        for layer, each in world.fetcher.by_layer.items()
    )
    assert figures.in_slots > figures.experts, "nothing was found again"
    assert 0.0 < world.fetcher.share < 1.0


@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("split", [tensor_split, expert_split])
@pytest.mark.parametrize("servers", [1, 3])
def test_every_division(rows: int, split: Any, servers: int) -> None:
    """Parts of channels and whole experts, few slots."""
    world = fetching(split, servers, num_slots=2)
    for seed in range(6):
        world.forward(rows, seed)


def test_residents_are_never_computed_twice() -> None:
    """An expert that becomes resident while it is in a fetch slot is the residents' alone."""
    world = fetching(tensor_split, 1)
    stored = world.fetcher.state.layers[0].groups[0].kind
    for seed in range(3):
        world.forward(seed=seed)
    source: Any = PackedSource()
    source.geometry = world.found.client.geometry
    slots = {}
    for layer, part in enumerate(world.found.client.servers[0].engines):
        own = LayerSlots(
            stored,
            torch.empty((3, stored.expert_bytes), dtype=torch.uint8),
            torch.full((SHAPE.experts,), -1, dtype=torch.int32),
            [-1] * 3,
            SHAPE.limit,
        )
        held = [e for e in range(SHAPE.experts) if world.fetcher.state.layers[layer].slot_of_expert[e] >= 0]
        assert held
        for slot, expert in enumerate(held[:3]):
            own.put(slot, expert, torch.from_numpy(part.packed_expert(0, expert).copy()))
        slots[layer] = own
    resident = ResidentExperts(source, slots, TorchResidentKernels(world.found.client.geometry))
    for seed in range(4):
        world.forward(seed=seed, resident=resident)


def test_late_choices_have_a_sum_of_their_own() -> None:
    """Both parts of a layer's choices are computed, each with the fetched experts that are its own."""
    world = fetching(tensor_split)
    alone = MadeExperts(world.found.client.servers)
    for seed in range(4):
        step = world.fetcher.begin()
        rows, ids, weights = routed(SHAPE, 3, seed=seed)
        late = late_choices(ids, weights, 1)
        parts = ids.masked_fill(late, -1), ids.masked_fill(~late, -1)
        asked = ask_experts(0, rows, ids, weights, world.found.client, None, step, parts)
        computed = asked.compute(torch.full_like(rows, 0.5))
        ours = [fetch(own) for fetch, own in zip(asked.fetch, computed, strict=True)]
        for found, part, before in zip(ours, parts, (0.5, 0.0), strict=True):
            wanted = ask_experts(0, rows, part, weights, alone, None).collect(torch.full_like(rows, before))
            assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)
        step.launched()


def test_a_step_whose_experts_were_replaced_is_run_again() -> None:
    """It fails its check; later ones find no address and nothing in slots until segments are opened again."""
    world = fetching(expert_split)
    world.forward()
    step = world.fetcher.begin()
    check_sums(world.found, step, 2, 5, None)
    step.launched()
    world.found.source.made[1].is_complete = False
    with pytest.raises(ExpertUnavailable, match=r"expert server 1 .* while a step fetched them"):
        step.check()
    world.forward()
    assert not world.fetcher.state.addresses.any()
    assert (world.fetcher.state.maps == -1).all()
    made = world.found.source.made[1]
    made.generation, made.is_complete = made.generation + 1, True
    for seed in range(3):
        world.forward(seed=seed)
    segments = world.found.source.segments()
    assert segments is not None
    for number, layer in world.fetcher.state.layers.items():
        assert (layer.slot_of_expert >= 0).any()
        check_layer(layer, number, segments)


def test_damage_empties_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that servers found damaged may have been copied before: nothing is fetched for a minute.

    So with values that were not finite, but for one step.
    """
    world = fetching(tensor_split)
    world.forward()
    assert (world.fetcher.state.maps >= 0).any()
    world.fetcher.distrust()
    before = world.fetcher.state.maps.clone()
    world.fetcher.begin().launched()
    assert (before >= 0).any()
    assert (world.fetcher.state.maps == -1).all()
    world.forward()
    assert (world.fetcher.state.maps >= 0).any()
    now = world.fetcher._refreshed
    monkeypatch.setattr("gpu_service.experts.fetching.fetcher.time.monotonic", lambda: now)
    world.fetcher.damages = lambda: 1
    world.forward()
    assert (world.fetcher.state.maps == -1).all()
    now += 61.0
    world.forward()
    assert (world.fetcher.state.maps >= 0).any()


def test_memory_is_given_up_when_no_step_reads_it() -> None:
    """`withdraw` waits for a step that is being launched, and for the end of what was."""
    world = fetching(tensor_split)
    waited: list[Any] = []
    world.fetcher._device = device = type(world.found.streamer.device)()
    device.wait = waited.append  # type: ignore[assignment, method-assign]
    step = world.fetcher.begin()
    thread = threading.Thread(target=world.fetcher.withdraw)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert not waited
    step.launched()
    thread.join(60)
    assert not thread.is_alive()
    assert len(waited) == 1
    # A launch that failed half-way: the next one, or the end of the engine, says that it is over.
    world.fetcher.begin()
    thread = threading.Thread(target=world.fetcher.withdraw)
    thread.start()
    world.fetcher.close()
    thread.join(60)
    assert not thread.is_alive()


def test_segments_are_unregistered_after_their_readers_said_so() -> None:
    """Before memory is taken back from the device, what reads it by address is asked."""
    world, noted = fetching(tensor_split), list[str]()

    class Noting(NullRegistrar):
        def unregister(self, address: int) -> None:
            noted.append("unregistered")

    made, layers = world.found.source.made, range(LAYERS)
    source = SegmentSource(
        lambda: ExpertSegments(made, layers),
        world.found.streamer.device,
        Noting(),
        on_release=lambda: noted.append("released"),
    )
    assert source.wait_ready(30.0)
    assert not noted
    made[0].generation += 1
    assert source.segments() is None
    assert source.wait_ready(30.0)
    parts = ["unregistered"] * 2 * LAYERS
    assert noted == ["released", *parts]
    source.close()
    assert noted == 2 * ["released", *parts]


def test_a_lane_has_the_link_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its step streams, others compute what is in slots and copy nothing; from its end on they do."""
    world = fetching(tensor_split, num_slots=2)
    world.forward()
    lane = world.found.streamer.begin_whole(4, lambda has_come: None)
    assert lane is not None
    before = world.fetcher.state.counters.clone()
    for seed in range(4):
        world.forward(seed=seed)
    copied, in_slots, left = (world.fetcher.state.counters - before).sum(0).tolist()
    assert copied == 0
    assert in_slots > 0 < left
    lane.end()
    for seed in range(4):
        world.forward(seed=seed)
    assert (world.fetcher.state.counters - before)[:, 0].all()


def test_metrics_are_the_figures() -> None:
    """The metrics have the names in docs/placement.md and the values of the figures."""
    world, registry = fetching(tensor_split), CollectorRegistry()
    metrics.export(world.fetcher, "m", registry)
    for seed in range(3):
        world.fetcher._refreshed = 0.0
        world.forward(seed=seed)
    labels, found = {"model_name": "m", "engine": "0"}, world.fetcher.figures
    names = ("expert_fetches", "expert_fetched_bytes", "expert_fetch_hits", "expert_fetch_misses")
    values = [registry.get_sample_value(f"moebius:{name}_total", labels) for name in names]
    assert values == [found.experts, found.nbytes, found.in_slots, found.left]
    assert found.experts > 0


def test_nothing_is_fetched_before_costs_are_known() -> None:
    """Without what servers take, no copy is known to be worth it."""
    world = fetching(tensor_split)
    world.costs.forget()
    for seed in range(3):
        world.forward(seed=seed)
    assert not world.fetcher.state.counters[:, 0].any()
    world.costs.served(1.0, 1.0, 1.0)
    world.fetcher._refreshed = 0.0
    world.forward()
    assert world.fetcher.state.counters[:, 0].all()
