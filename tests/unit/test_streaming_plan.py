"""Invariant: what is streamed is cut, merged and divided without loss, and as much of it as pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.experts.resident.panels import LayerFormat, layer_format
from gpu_service.experts.streaming.costs import CostCurve, LayerCosts, ShareChooser
from gpu_service.experts.streaming.make import ServedPart, ring_of, streams
from gpu_service.experts.streaming.plan import (
    SHARES,
    StoredExperts,
    chosen_experts,
    cut,
    plan_layer,
    ring_layout,
)
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.errors import UserError

KIND = layer_format("int8", "int8", 16, 16, False)
EACH = KIND.expert_bytes


def stored(experts: tuple[int, ...], segment: int = 0, kind: LayerFormat = KIND) -> StoredExperts:
    """Layer 5."""
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


def curve(per_row: float) -> CostCurve:
    """In proportion to rows."""
    return CostCurve.of([(100, 100 * per_row), (200, 200 * per_row)])


# Qwen3-30B-A3B in 4 bits on the reference host: 340 MB a layer over 55 GB/s, 1100 rows a second of 48 layers.
COSTS = LayerCosts(
    copy=0.0062,
    cpu=CostCurve.of([(16, 0.0018), (64, 0.0023), (256, 0.0055), (512, 0.0097)]),
    gpu=curve(0.3e-6),
)


def test_link_and_servers_together_beat_each_alone() -> None:
    """At 512 rows; at 4096 the link has nearly all; few rows stay on the servers."""
    share = COSTS.best_share(512)
    assert 0.55 < share / SHARES < 0.75
    assert COSTS.seconds(512, share) < 0.7 * min(COSTS.seconds(512, 0), COSTS.seconds(512, SHARES))
    assert COSTS.best_share(4096) / SHARES > 0.9
    assert COSTS.best_share(16) == 0


@given(rows=st.integers(1, 60000), least=st.integers(0, 1))
def test_the_choice_is_near_the_best(rows: int, least: int) -> None:
    """Within what simplicity may cost; never worse than all on the servers, where these may have all."""
    best = min(COSTS.seconds(rows, share) for share in range(least, SHARES + 1))
    chosen = COSTS.best_share(rows, least)
    assert least <= chosen <= SHARES
    assert COSTS.seconds(rows, chosen) * 0.63 <= best
    if least == 0:
        assert COSTS.seconds(rows, chosen) <= COSTS.seconds(rows, 0)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 1.0)), min_size=1, unique_by=lambda p: p[0]))
def test_more_rows_never_cost_less(measured: list[tuple[int, float]]) -> None:
    found = CostCurve.of(measured)
    times = [found.at(rows) for rows in (1, 3, 10, 100, 1000, 5000, 20000, 60000)]
    assert times == sorted(times)


def serve(costs: LayerCosts, real: LayerCosts, rows: int, steps: int, other: float = 0.0) -> LayerCosts:
    """What steps teach that take what `real` says and `other` seconds a layer after the servers' answers."""
    for _ in range(steps):
        share = costs.best_share(rows)
        link, servers, gpu = real.parts(rows, share)
        costs = costs.refined(rows, share, max(link, servers + other, gpu), link)
    return costs


@pytest.mark.parametrize(("copy_scale", "cpu_scale"), [(1.0, 2.0), (1.0, 0.6), (1.5, 1.0), (1.5, 0.7)])
@pytest.mark.parametrize("begin", [(1.0, 1.0), (1.5, 0.6), (0.5, 2.0)])
def test_serving_corrects_what_was_measured(
    begin: tuple[float, float], copy_scale: float, cpu_scale: float
) -> None:
    """Whichever of link and servers is faster or slower than was measured, and whatever was learned before:
    steps soon take nearly the best."""
    real = replace(COSTS, copy_scale=copy_scale, cpu_scale=cpu_scale)
    wrong = replace(COSTS, copy_scale=begin[0], cpu_scale=begin[1])
    costs = serve(wrong, real, 512, 40, other=0.0003)
    best = min(real.seconds(512, share) for share in range(SHARES + 1))
    assert real.seconds(512, costs.best_share(512)) < 1.12 * best
    assert costs.copy_scale == pytest.approx(copy_scale, rel=0.1)


@pytest.mark.parametrize("cpu_scale", [0.8, 1.3, 1.6])
@pytest.mark.parametrize("outliers", [0, 1])
def test_few_steps_are_enough(cpu_scale: float, outliers: int) -> None:
    """A user's second and third prompt is divided nearly as well as the hundredth, also when a kernel was
    compiled during the first."""
    real = replace(COSTS, copy_scale=1.06, cpu_scale=cpu_scale)
    costs = COSTS
    for _ in range(outliers):
        costs = costs.refined(512, 41, 30.0, 0.004)
    costs = serve(costs, real, 512, 4, other=0.0005)
    best = min(real.seconds(512, share) for share in range(SHARES + 1))
    assert real.seconds(512, costs.best_share(512)) < 1.15 * best


def test_servers_that_were_slow_for_a_while_are_tried_again() -> None:
    """Once all was streamed because of them nothing else would ever show that they are fast again; prompts
    that are streamed anyway say nothing."""
    real = replace(COSTS, cpu=CostCurve.of([(16, 0.003), (512, 0.02)]))
    slow = replace(real, cpu_scale=4.0)
    assert slow.best_share(512) == SHARES
    assert slow.refined(8192, SHARES, 0.0062, 0.0061).cpu_scale == 4.0
    assert real.best_share(512) < SHARES
    assert serve(slow, real, 512, 40).best_share(512) == pytest.approx(real.best_share(512), abs=4)


def test_a_step_that_took_long_once_is_not_believed() -> None:
    """Kernels that are compiled at first use say nothing of later steps; an unknown time is none."""
    for seconds, copying in ((30.0, 0.004), (1e-6, 1e-6), (0.0, 0.0)):
        costs = COSTS.refined(512, 41, seconds, copying)
        assert 0.7 < costs.cpu_scale < 1.4
        assert 0.7 < costs.copy_scale < 1.4
    # Fewer rows than were measured, and a link with nothing to copy.
    assert COSTS.refined(3, 20, 0.0001, 0.0001).cpu_scale == 1.0
    assert COSTS.refined(512, 0, 0.004, 0.0) == COSTS


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
    chooser = ShareChooser(mode, min_rows, 48)  # type: ignore[arg-type]
    if measured:
        chooser.measured(COSTS)
    found = [chooser.share(n) if chooser.may_stream(n, False) else -1 for n in (8, 512, 4096)]
    assert found == pytest.approx(shares, abs=2)


def test_decode_steps_stream_where_asked() -> None:
    """Not by default: graphs and servers have them; large ones and those above stream_min_rows may."""
    assert not ShareChooser("stream", None, 1).may_stream(64, is_decode=True)
    assert not ShareChooser("auto", None, 1).may_stream(64, is_decode=True)
    assert ShareChooser("auto", None, 1).may_stream(100, is_decode=True)
    assert ShareChooser("stream", 32, 1).may_stream(32, is_decode=True)


def test_who_streams() -> None:
    """Only where there are segments; a CPU only where it is set to."""

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
    """By a layer's products on the GPU, but never so short that the link alone decides; all that there may be
    while nothing is known.
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
    chooser = ShareChooser("auto", None, 48)
    assert chooser.step_tokens(most, 1e-3) == most
    chooser.measured(costs)
    assert chooser.step_tokens(most, 1e-3) == knee
    assert chooser.step_tokens(most, None) == most
