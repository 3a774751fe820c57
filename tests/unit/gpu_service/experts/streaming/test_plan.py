"""Invariant: what is streamed is cut, merged and divided without loss, by the settings and by costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.experts.costs import CostCurve, ExpertCosts, LayerCosts
from gpu_service.experts.resident.panels import LayerFormat, layer_format
from gpu_service.experts.streaming.make import ServedPart, ring_of, streams
from gpu_service.experts.streaming.plan import (
    SHARES,
    StoredExperts,
    chosen_experts,
    cut,
    plan_layer,
    ring_layout,
)
from gpu_service.experts.streaming.share import ShareChooser
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.errors import UserError
from tests.unit.gpu_service.experts.test_costs import COSTS, LAYER_BYTES

KIND = layer_format("int8", "int8", 16, 16, False)
EACH = KIND.expert_bytes


def stored(experts: tuple[int, ...], segment: int = 0, kind: LayerFormat = KIND) -> StoredExperts:
    """Returns layer 5."""
    return StoredExperts(5, segment, 4096, experts, kind)


@given(
    held=st.sets(st.integers(0, 40), min_size=1),
    wanted=st.sets(st.integers(0, 40)),
    capacity=st.integers(1, 9),
    rest=st.integers(0, EACH - 1),
)
def test_pieces_hold_every_wanted_expert_once(
    held: set[int], wanted: set[int], capacity: int, rest: int
) -> None:
    """Each at its place, within the buffer, in as few copies as the gaps allow."""
    layer = stored(tuple(sorted(held)))
    pieces = cut(layer, wanted, capacity * EACH + rest)
    assert [e for piece in pieces for e in piece.experts] == sorted(held & wanted)
    sizes = [len(piece.experts) for piece in pieces]
    assert not sizes or (max(sizes) <= capacity and max(sizes) - min(sizes) <= 1)
    for piece in pieces:
        found = {}
        for run in piece.runs:
            assert run.nbytes % EACH == 0
            for number in range(run.nbytes // EACH):
                slot = (run.source + number * EACH - layer.offset) // EACH
                found[run.target // EACH + number] = layer.experts[slot]
        assert [found[place] for place in range(len(piece.experts))] == list(piece.experts)
        places = [layer.experts.index(expert) for expert in piece.experts]
        gaps = sum(after - before != 1 for before, after in itertools.pairwise(places))
        assert len(piece.runs) == 1 + gaps


def test_an_expert_that_fits_no_buffer_is_named() -> None:
    with pytest.raises(ValueError, match=f"an expert of {EACH} bytes does not fit"):
        cut(stored((0, 1)), {1}, EACH - 1)


@given(
    resident=st.sets(st.integers(0, 15)),
    share=st.integers(0, SHARES),
    ranks=st.integers(1, 4),
    servers=st.integers(1, 3),
    is_tensor=st.booleans(),
    counts=st.lists(st.integers(0, 9), min_size=16, max_size=16),
)
def test_ranks_and_servers_divide_a_layer(
    resident: set[int], share: int, ranks: int, servers: int, is_tensor: bool, counts: list[int]
) -> None:
    """Every chosen expert is one rank's, of every server that has a part; none is resident or missed."""
    left = tuple(e for e in range(16) if e not in resident)
    if not left:
        return
    parts = [
        stored(left if is_tensor else tuple(e for e in left if e % servers == number), number)
        for number in range(servers)
    ]
    plans = [plan_layer(parts, resident, 16, share, 3 * EACH, rank, ranks, counts) for rank in range(ranks)]
    assert len({plan.experts for plan in plans}) == 1
    chosen = plans[0].experts
    assert len(chosen) == -(-len(left) * share // SHARES)
    assert plans[0].is_whole == (len(chosen) == len(left))
    streamed = sorted((p.stored.segment, e) for plan in plans for p in plan.pieces for e in p.experts)
    wanted = sorted((part.segment, e) for part in parts for e in chosen if e in part.experts)
    assert streamed == wanted
    kept = set(left) - set(chosen)
    assert max((counts[e] for e in kept), default=0) <= min((counts[e] for e in chosen), default=9)


def test_experts_of_which_a_part_is_missing_stay_with_the_servers() -> None:
    """A segment without an expert that another one has a part of."""
    plan = plan_layer([stored((0, 1, 2)), stored((0, 2), 1)], (), 3, SHARES, 9 * EACH)
    assert plan.experts == (0, 2)
    assert not plan.is_whole


def test_without_counts_the_first_experts_are_streamed_together() -> None:
    assert chosen_experts(range(4, 12), SHARES // 2) == (4, 5, 6, 7)
    assert chosen_experts(range(4), SHARES // 2, [0, 5, 1, 9]) == (1, 3)


@given(
    layer=st.integers(1, 10**10),
    experts=st.integers(1, 512),
    parts=st.integers(1, 8),
    most=st.none() | st.integers(1, 10**11),
)
def test_a_ring_holds_two_layers_or_what_there_is_room_for(
    layer: int, experts: int, parts: int, most: int | None
) -> None:
    each = -(-layer // experts)
    try:
        ring = ring_layout(layer, each, parts, most)
    except ValueError:
        assert most is not None
        assert most < 2 * (each + 4096)
        return
    assert ring.num_buffers >= 2
    assert ring.buffer_bytes >= each
    if most is None:
        # Whole experts fill a buffer to all but one.
        assert ring.num_buffers * (ring.buffer_bytes - each) >= 2 * layer
    else:
        assert ring.nbytes <= most


def test_rings_of_published_shapes() -> None:
    """Qwen3-30B-A3B and DeepSeek-V3 in 4 bits: 0.7 GiB, and less than two layers on a small GPU."""
    qwen = ServedPart(128, layer_format("int4_g32", "int4_g32", 2048, 768, False))
    ring = ring_of({0: [qwen], 1: [qwen]}, 1, 141 * 10**9)
    assert ring is not None
    assert 0.6 < ring.nbytes / 2**30 < 0.8
    assert ring.num_buffers == 4
    deepseek = ServedPart(256, layer_format("int4_g32", "int4_g32", 7168, 2048, False))
    ring = ring_of({3: [deepseek]}, 1, 24 * 10**9)
    assert ring is not None
    assert ring.nbytes <= 2 * 10**9
    # Two ranks share a layer.
    halves = ring_of({0: [qwen]}, 2, None)
    assert halves is not None
    assert halves.nbytes < 0.6 * 2 * qwen.num_experts * qwen.kind.expert_bytes
    assert ring_of({0: [ServedPart(0, qwen.kind)]}, 1, None) is None
    with pytest.raises(UserError, match="prefill_experts: two experts"):
        ring_of({3: [deepseek]}, 1, 10**8)


@pytest.mark.parametrize(
    ("mode", "min_rows", "measured", "shares"),
    [
        # For steps of 8, 512 and 4096 rows; -1: may not stream.
        ("auto", None, False, (0, 0, 0)),
        ("auto", None, True, (0, 41, SHARES)),
        ("auto", 100, True, (-1, 41, SHARES)),
        ("auto", 100, False, (-1, SHARES, SHARES)),
        ("auto", 5, True, (15, 41, SHARES)),
        ("stream", None, False, (SHARES, SHARES, SHARES)),
        ("stream", 600, True, (-1, -1, SHARES)),
    ],
)
def test_settings(mode: str, min_rows: int | None, measured: bool, shares: tuple[int, ...]) -> None:
    chooser = ShareChooser(mode, min_rows, 48, ExpertCosts(128, 8))  # type: ignore[arg-type]
    if measured:
        chooser.measured(COSTS, LAYER_BYTES)
    found = [chooser.share(n) if chooser.may_stream(n, False) else -1 for n in (8, 512, 4096)]
    assert found == pytest.approx(shares, abs=2)


def test_decode_steps_stream_where_asked() -> None:
    """Decode steps do not stream by default: graphs and servers have them; large ones and those above
    stream_min_rows may.
    """
    assert not ShareChooser("stream", None, 1, ExpertCosts(128, 8)).may_stream(64, is_decode=True)
    assert not ShareChooser("auto", None, 1, ExpertCosts(128, 8)).may_stream(64, is_decode=True)
    assert ShareChooser("auto", None, 1, ExpertCosts(128, 8)).may_stream(100, is_decode=True)
    assert ShareChooser("stream", 32, 1, ExpertCosts(128, 8)).may_stream(32, is_decode=True)


def test_who_streams() -> None:
    """An engine streams only where there are segments, on a CPU only where it is set to."""

    def settings(mode: str, directory: str) -> MoebiusConfig:
        return MoebiusConfig(
            model=ModelConfigSection(model="/m"),
            gpu=GpuConfig(prefill_experts=mode),  # type: ignore[arg-type]
            experts=ExpertConfig(expert_weights_dir=directory),
        )

    assert streams(settings("auto", "/w"), "cuda")
    assert not streams(settings("auto", "/w"), "cpu")
    assert streams(settings("stream", "/w"), "cpu")
    assert not streams(settings("auto", ""), "cuda")
    assert not streams(settings("cpu", "/w"), "cuda")
    with pytest.raises(UserError, match=r"prefill_experts is 'stream', but expert_weights_dir is empty"):
        streams(settings("stream", ""), "cuda")


def test_streamed_steps_are_as_long_as_others_may_wait() -> None:
    """The length follows a layer's products on the GPU, but is never so short that the link alone decides;
    all that there may be while nothing is known.
    """
    gpu = CostCurve(((64, 0.5e-3), (4096, 4e-3)))
    costs = LayerCosts(6e-3, CostCurve(((64, 1e-3),)), gpu)
    most = 16384
    knee = costs.step_tokens(most, 1e-3)
    assert gpu.at(knee) <= 6e-3 < gpu.at(knee + 256)
    assert costs.step_tokens(most, 6e-3) == knee
    longer = costs.step_tokens(most, 8e-3)
    assert gpu.at(longer) <= 8e-3 < gpu.at(longer + 256)
    assert costs.step_tokens(most, 1.0) == most
    assert LayerCosts(1e-4, costs.cpu, gpu).step_tokens(most, 1e-4) == 256
    chooser = ShareChooser("auto", None, 48, ExpertCosts(128, 8))
    assert chooser.step_tokens(most, 1e-3) == most
    chooser.measured(costs, 1e9)
    assert chooser.step_tokens(most, 1e-3) == knee
    assert chooser.step_tokens(most, None) == most
