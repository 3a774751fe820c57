"""Guards properties of every plan: sums, and that more memory or bandwidth never makes anything worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_models import GPU_MODELS
from app.planning.hardware import Hardware
from app.planning.memory import RAM
from app.planning.planner import Planner
from lab.random_model.shapes import parse_shape
from tests.helpers.plan_models import GIB, hardware, settings, write_config

gpu_gib = st.floats(2.6, 24)
ram_gib = st.floats(0.5, 12)
streams = st.sampled_from([1, 2, 7, 32])


@pytest.fixture(scope="module")
def planners(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Planner]:
    """On a GPU or not, of a small shape, made once: properties ask for hundreds of plans."""
    config = parse_shape("small", 0).hf_config(None)
    directory = write_config(tmp_path_factory.mktemp("plan") / "small", config)
    return {
        # A larger GPU may spend memory on streaming, for which a smaller one has no room: no comparison.
        True: Planner(settings(directory, prefill_experts="cpu"), on_gpu=True),
        False: Planner(settings(directory, kv_cache_gib="0.2"), on_gpu=False),
    }


def gpu_host(memory_gib: float, ram: float = 64.0) -> Hardware:
    """Returns one GPU of so much memory."""
    host = hardware("4090", ram_gib=ram)
    return replace(host, gpu=replace(GPU_MODELS["RTX 4090"], memory_bytes=int(memory_gib * GIB)))


def plan_or_none(planner: Planner, host: Hardware, wish: Wish | None = None) -> CapacityPlan | None:
    """None: it does not fit."""
    try:
        return planner.plan(host, wish)
    except DoesNotFit:
        return None


@given(gpu_gib, ram_gib, st.booleans())
@examples(deadline=None)
def test_components_make_up_the_total(
    planners: Mapping[bool, Planner], memory: float, ram: float, on_gpu: bool
) -> None:
    """Places together are the total, no part is negative, and no place exceeds its budget."""
    found = plan_or_none(planners[on_gpu], gpu_host(memory, ram) if on_gpu else hardware(ram_gib=ram))
    assume(found is not None)
    assert found is not None
    assert sum(found.total_of(place) for place in found.places) == found.total
    assert sum(part.nbytes for part in found.components) == found.total
    assert all(part.nbytes >= 0 for part in found.components)
    assert all(found.total_of(place) <= found.budgets[place] for place in found.places)


@given(ram_gib, st.floats(0, 8), st.booleans())
@examples(deadline=None)
def test_more_ram_never_hurts(
    planners: Mapping[bool, Planner], ram: float, more: float, on_gpu: bool
) -> None:
    """What fits still fits, and is planned alike."""
    less, larger = (
        plan_or_none(planners[on_gpu], gpu_host(3.2, size) if on_gpu else hardware(ram_gib=size))
        for size in (ram, ram + more)
    )
    if less is not None:
        assert larger is not None
        assert larger.components == less.components


@given(gpu_gib, st.floats(0, 24), streams)
@examples(deadline=None)
def test_more_gpu_memory_never_hurts(
    planners: Mapping[bool, Planner], memory: float, more: float, concurrency: int
) -> None:
    """What fits still fits, with as many resident experts or more."""
    wish = Wish(context=2048, concurrency=concurrency)
    less, larger = (plan_or_none(planners[True], gpu_host(size), wish) for size in (memory, memory + more))
    if less is not None:
        assert larger is not None
        assert larger.residency.count >= less.residency.count


@given(gpu_gib, st.floats(0, 24))
@examples(deadline=None)
def test_tokens_grow_with_memory(planners: Mapping[bool, Planner], memory: float, more: float) -> None:
    """More memory leaves room for more tokens with the same placement."""
    try:
        less = planners[True].plan(gpu_host(memory), fill=False)
    except DoesNotFit:
        return
    larger = planners[True].plan(gpu_host(memory + more), fill=False)
    assert larger.kv.tokens >= less.kv.tokens > 0


@given(gpu_gib, streams, streams)
@examples(deadline=None)
def test_a_larger_wish_never_fits_where_a_smaller_does_not(
    planners: Mapping[bool, Planner], memory: float, one: int, other: int
) -> None:
    """And what is demanded is kept: the pool holds the wish."""
    fewer, most = sorted((one, other))
    small, large = (
        plan_or_none(planners[True], gpu_host(memory), Wish(2048, count)) for count in (fewer, most)
    )
    if large is not None:
        assert large.kv.tokens >= 2048 * most
        assert small is not None
        assert small.residency.count >= large.residency.count


@given(st.floats(10, 800), st.floats(1, 4), st.integers(1, 64), st.booleans())
@examples(deadline=None)
def test_more_bandwidth_is_never_slower(
    planners: Mapping[bool, Planner], bandwidth: float, factor: float, rows: int, on_gpu: bool
) -> None:
    """More bandwidth of RAM is not slower; and a step of more streams never takes less time, nor fewer
    different experts.
    """
    host = gpu_host(2.8) if on_gpu else hardware(ram_gib=12)
    wish = Wish(streams=(rows, rows + 1))
    slow, fast = (
        planners[on_gpu].plan(replace(host, bandwidth=speed * 1e9), wish).decode
        for speed in (bandwidth, bandwidth * factor)
    )
    assert fast[0].tokens_per_second >= slow[0].tokens_per_second
    assert slow[1].seconds.total >= 0.9 * slow[0].seconds.total
    assert slow[1].distinct_experts >= slow[0].distinct_experts


def test_ram_holds_experts_unless_gpus_hold_all(planners: Mapping[bool, Planner]) -> None:
    """No expert is counted in RAM once every one is on the GPU."""
    plan = planners[True].plan(gpu_host(24))
    assert plan.residency.is_everything
    assert not [part for part in plan.components if part.place == RAM and "experts" in part.part]
