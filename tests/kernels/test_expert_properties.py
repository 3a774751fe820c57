"""What holds for every expert layer whatever its weights: rows and experts may be permuted, skipped ids add
nothing, experts may be divided among servers, and router weights enter linearly."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels import ExpertEngine
from tests.helpers.moe_golden import Routed, random_rows, relative_error
from tests.helpers.packed_experts import Shape
from tests.helpers.weight_golden import GoldenExpert, golden_experts, load_golden
from tests.tolerances import EXPERTS_SUMMED_APART

FORMATS = {
    "bfloat16": "bfloat16",
    "fp8_block": "fp8_block",
    "compressed_int4_g32": "int4_g32",
    "nvfp4": "nvfp4",
}
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 72, 40, 6, 3


@functools.cache
def experts_of(encoder: str) -> tuple[Shape, list[GoldenExpert]]:
    shape = Shape(HIDDEN, INTERMEDIATE, EXPERTS, FORMATS[encoder], FORMATS[encoder])
    return shape, golden_experts(encoder, shape, seed=3)


def engine_of(encoder: str, order: list[int], first: int = 0) -> ExpertEngine:
    """Returns an engine that holds these experts, in this order, as ids from `first` on."""
    shape, experts = experts_of(encoder)
    engine = ExpertEngine(
        HIDDEN,
        INTERMEDIATE,
        len(order),
        1,
        expert_begin=first,
        weight_format=FORMATS[encoder],
        num_threads=2,
    )
    load_golden(engine, [experts[index] for index in order], shape, first)
    return engine


@functools.cache
def whole_engine(encoder: str) -> ExpertEngine:
    return engine_of(encoder, list(range(EXPERTS)))


def forward(engine: ExpertEngine, routed: Routed) -> np.ndarray:
    return engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)


@st.composite
def requests(draw: st.DrawFn) -> Routed:
    """1 to 40 rows that choose among all experts and -1."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    return random_rows(rng, draw(st.integers(1, 40)), HIDDEN, TOP_K, (-1, EXPERTS))


def for_every_format(test: Callable[..., None]) -> Callable[..., None]:
    """Returns both decorators: hypothesis draws requests, pytest formats."""
    drawn = settings(deadline=None, database=None)(given(routed=requests(), data=st.data())(test))
    marked: Callable[..., None] = pytest.mark.parametrize("encoder", FORMATS)(drawn)
    return marked


@for_every_format
def test_rows_may_be_permuted(encoder: str, routed: Routed, data: st.DataObject) -> None:
    """A row's bits do not depend on its place."""
    order = data.draw(st.permutations(range(len(routed.topk_ids))))
    permuted = Routed(routed.hidden_states[order], routed.topk_ids[order], routed.topk_weights[order])
    engine = whole_engine(encoder)
    np.testing.assert_array_equal(forward(engine, permuted), forward(engine, routed)[order])


@for_every_format
def test_experts_may_be_renumbered(encoder: str, routed: Routed, data: st.DataObject) -> None:
    """Ids are only names: the sum runs in another order, nothing else changes."""
    order = data.draw(st.permutations(range(EXPERTS)))
    names = np.append(np.argsort(order), -1).astype(np.int32)  # new id of each old one; -1 stays
    renamed = Routed(routed.hidden_states, names[routed.topk_ids], routed.topk_weights)
    wanted = forward(whole_engine(encoder), routed).astype(np.float64)
    assert relative_error(forward(engine_of(encoder, list(order)), renamed), wanted) <= EXPERTS_SUMMED_APART


@for_every_format
def test_skipped_ids_add_nothing(encoder: str, routed: Routed, data: st.DataObject) -> None:
    """An id of -1 or of another server is as good as a weight of zero."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    skip = rng.random(routed.topk_ids.shape) < 0.5
    elsewhere = rng.choice([-1, EXPERTS, EXPERTS + 100], routed.topk_ids.shape)
    skipped = np.where(skip, elsewhere, routed.topk_ids).astype(np.int32)
    weightless = np.where(skip, 0, routed.topk_weights).astype(np.float32)
    engine = whole_engine(encoder)
    np.testing.assert_array_equal(
        forward(engine, Routed(routed.hidden_states, skipped, routed.topk_weights)),
        forward(engine, Routed(routed.hidden_states, routed.topk_ids, weightless)),
    )


@for_every_format
def test_servers_add_up(encoder: str, routed: Routed, data: st.DataObject) -> None:
    """Two engines with a part of the experts each give sums whose sum is that of one engine with all."""
    cut = data.draw(st.integers(1, EXPERTS - 1))
    first = engine_of(encoder, list(range(cut)))
    second = engine_of(encoder, list(range(cut, EXPERTS)), first=cut)
    together = forward(first, routed) + forward(second, routed)
    wanted = forward(whole_engine(encoder), routed).astype(np.float64)
    assert relative_error(together, wanted) <= EXPERTS_SUMMED_APART


@for_every_format
def test_linear_in_router_weights(encoder: str, routed: Routed, data: st.DataObject) -> None:
    """Powers of two scale exactly; sums of weights give sums of results."""
    power = data.draw(st.sampled_from([0.25, 2.0, 8.0]))
    other = np.random.default_rng(data.draw(st.integers(0, 99))).random(routed.topk_weights.shape, np.float32)
    engine = whole_engine(encoder)

    def with_weights(weights: np.ndarray) -> np.ndarray:
        return forward(engine, Routed(routed.hidden_states, routed.topk_ids, weights.astype(np.float32)))

    plain = with_weights(routed.topk_weights)
    np.testing.assert_array_equal(
        with_weights(routed.topk_weights * np.float32(power)), plain * np.float32(power)
    )
    wanted = plain.astype(np.float64) + with_weights(other)
    assert relative_error(with_weights(routed.topk_weights + other), wanted) <= EXPERTS_SUMMED_APART
