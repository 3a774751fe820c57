"""Guards that stages have the layers that memory and speed of their GPUs call for: what fits with equal
numbers fits, and is not slower.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.planning import fill
from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.fill import DeviceUse
from app.planning.gpu_models import GPU_MODELS, least_of
from app.planning.gpu_use import plan_capacity
from app.planning.report import quiet
from app.planning.stage_division import LayerNeeds, StageRoom, divide_layers, equal_division
from tests.helpers.plan_models import GIB, PUBLISHED, hardware, settings, write_config

LAYERS = st.lists(
    st.builds(
        LayerNeeds,
        fixed=st.integers(1, 30),
        token=st.sampled_from([0.0, 0.5, 1.0]),
        experts=st.integers(0, 60),
        read=st.integers(1, 30).map(float),
        read_experts=st.integers(0, 20).map(float),
    ),
    min_size=2,
    max_size=6,
)
ROOMS = st.lists(
    st.builds(
        StageRoom,
        nbytes=st.integers(0, 300),
        ring=st.integers(0, 20),
        bandwidth=st.sampled_from([1.0, 1.1, 4.0]),
    ),
    min_size=2,
    max_size=3,
)
SHARES = [each / 4 for each in range(5)]


def _seconds(
    layers: list[LayerNeeds], rooms: list[StageRoom], division: tuple[int, ...], tokens: int, share: float
) -> float | None:
    """Returns how long a token takes, by the plainest arithmetic; None: a stage has no room."""
    total, begin = 0.0, 0
    for room, size in zip(rooms, division, strict=True):
        own = layers[begin : begin + size]
        needed = sum(each.fixed + share * each.experts + tokens * each.token for each in own)
        if needed > room.nbytes + (room.ring if share == 1 else 0):
            return None
        total += sum(each.read + share * each.read_experts for each in own) / room.bandwidth
        begin += size
    return total


@given(LAYERS, ROOMS, st.integers(0, 20))
def test_most_experts_then_speed(layers: list[LayerNeeds], rooms: list[StageRoom], tokens: int) -> None:
    """No division has more experts resident; none of those that have as many is more than a twentieth faster,
    and equal numbers are no faster.
    """
    if len(layers) < len(rooms):
        return
    count = len(layers)
    found = divide_layers(layers, rooms, tokens, SHARES)
    bounds = [(0, *inner, count) for inner in combinations(range(1, count), len(rooms) - 1)]
    every = [tuple(end - begin for begin, end in pairwise(each)) for each in bounds]

    def fitting(share: float) -> dict[tuple[int, ...], float]:
        times = {each: _seconds(layers, rooms, each, tokens, share) for each in every}
        return {each: seconds for each, seconds in times.items() if seconds is not None}

    best = max((share for share in SHARES if fitting(share)), default=None)
    if best is None:
        assert found is None
        return
    shares = [share for share in SHARES if found in fitting(share)]
    assert found is not None
    assert max(shares) == best
    times = fitting(best)
    assert times[found] <= 1.05 * min(times.values()) + 1e-9
    equal = times.get(equal_division(count, len(rooms)))
    assert equal is None or times[found] <= equal + 1e-9


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a published model's config.json."""
    return write_config(tmp_path_factory.mktemp("qwen"), PUBLISHED["qwen3-30b-a3b"][0])


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 80))]
)
def test_any_two_gpus_hold_what_equal_numbers_would(seed: int, qwen: Path) -> None:
    """Any two cards: no stage is over its memory, it fits where equal numbers fit, and is not slower."""
    chosen = random.Random(seed)
    pair = [chosen.choice(list(GPU_MODELS.values())) for _ in range(2)]
    host = replace(hardware(pair[0].name, 2, ram_gib=2 ** chosen.uniform(4, 8)), gpu=least_of(pair))
    flags = {"expert_dtype": chosen.choice(["int4", "int8"]), "pipeline_parallel_size": "2"}

    def planned(**more: str) -> CapacityPlan | None:
        try:
            with quiet():
                return plan_capacity(settings(qwen, **flags, **more), host, Wish(), fill=True)
        except DoesNotFit:
            return None

    found, equal = planned(), planned(pipeline_layers="24,24")
    if equal is not None:
        assert found is not None, (pair, equal.residency.share)
        assert found.decode[0].tokens_per_second >= equal.decode[0].tokens_per_second
    if found is not None:
        assert all(found.total_of(place) <= found.budgets[place] for place in found.places)


def test_a_refusal_on_unequal_gpus_names_no_more_such_gpus(qwen: Path) -> None:
    """There are none such; it says what is missing."""
    host = replace(hardware("4060", 2), gpu=least_of([GPU_MODELS["RTX 4060"], GPU_MODELS["RTX 2070"]]))
    with quiet(), pytest.raises(DoesNotFit) as refused:
        plan_capacity(settings(qwen), host, Wish(32768, 64), fill=True)
    assert "such GPUs" not in str(refused.value)


@pytest.mark.parametrize(
    ("names", "layers"),
    [(("RTX 4090", "RTX 3060"), 2), (("RTX 4090", "RTX 4090"), 0), (("RTX 5090", "RTX 3060"), 0)],
)
def test_serve_uses_unequal_gpus_together(
    names: tuple[str, ...], layers: int, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger stage on the larger card, and a line that says why; the first card alone where it holds all
    experts, and as ever where cards are equal.
    """
    monkeypatch.setattr(fill, "available_memory", lambda: 64 * GIB)
    memory = tuple(DeviceUse(*[GPU_MODELS[name].memory_bytes] * 2) for name in names)
    config = settings(qwen, expert_dtype="int4", max_num_seqs="16")
    with quiet():
        found = fill.filled(config, memory, names)
    assert found is not None
    assert len(found.parallel.pipeline_layers) == layers
    assert bool(found.reason) == bool(layers)
    if layers:
        first, second = found.parallel.pipeline_layers
        assert first > second
        assert "by memory and speed of RTX 4090 + RTX 3060" in found.reason
        assert found.placement.gpu_experts_ratio == 1.0
