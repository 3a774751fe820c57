"""Invariant: sliding windows, sinks and chosen blocks mean the same in every backend, whatever a step mixes.

The answer is the naive one in float64; Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.base import AttentionBackend, AttentionLayer, grouped_queries
from gpu_service.attention.cpu_backend import CpuAttention
from gpu_service.attention.flashinfer_backend import FlashInferAttention
from gpu_service.attention.torch_reference import (
    TorchReferenceAttention,
    attend,
    attend_with_lse,
    attend_with_lse_unfused,
)
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.attention.triton_kernels import prefill
from gpu_service.attention.triton_tiles import Tile
from gpu_service.attention.warm_up import kinds_of_layers
from moebius.models.layers.gqa import GQA, Window
from tests.helpers.attention_cases import (
    LAYER,
    MIXTURES,
    Case,
    Geometry,
    Shape,
    as_capturable,
    make_case,
    naive,
    refill,
    run,
)
from tests.helpers.layer_values import mixers_of, with_mixers
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT16, LOGITS_FLOAT32_SELF

FP8 = torch.float8_e4m3fn
SMALL = Tile(rows=16, keys=16, width=16, num_warps=4, precision="ieee")
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "window of one": {"window": 1},
    "sinks": {"sinks": True},
    "both": {"window": 11, "sinks": True},
    "blocks": {"block_size": 3},
    "chunk": {"chunk": 7},
    "chunk and sinks": {"chunk": 32, "sinks": True},
    "blocks and sinks": {"block_size": 18, "sinks": True},
}


def backend_of(name: str, case: Case) -> AttentionBackend:
    config = case.geometry.config()
    if name in ("torch", "cpu"):
        kind = CpuAttention if name == "cpu" else TorchReferenceAttention
        return kind(config.layers, case.cache)
    return TritonAttention(config.layers, case.cache, min_split=16)


def check(name: str, case: Case, tolerance: float = LOGITS_FLOAT32_SELF) -> None:
    expected = naive(case)
    output = run(case, backend_of(name, case))
    assert output.dtype == case.geometry.dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.covering(2)
@pytest.mark.parametrize("option", sorted(OPTIONS))
@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("mixture", sorted(MIXTURES))
def test_mixtures(mixture: str, name: str, option: str) -> None:
    check(name, make_case(Geometry(**OPTIONS[option]), MIXTURES[mixture]))


@pytest.mark.parametrize("window", [3, 9, None])
@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_tokens_of_an_image_see_one_another_within_the_window(name: str, window: int | None) -> None:
    """Nothing changes in layers without a window, and in other rows."""
    shape = [(9, 1), (0, 5), (6, 13), (3, 1), (4, 40), (2, 3)]
    case = make_case(Geometry(window=window), shape)
    ends = torch.cat([torch.arange(start, start + count) + 1 for start, count in shape])
    plain = naive(case)
    # Rows of three requests: a whole chunk, its end, and two images in a longer one.
    for first, last in ((1, 6), (10, 19), (22, 30), (35, 60)):
        ends[first:last] = ends[last - 1]
    case = replace(case, inputs=replace(case.inputs, visible_ends=ends))
    check(name, case)
    assert bool((naive(case) == plain).all()) == (window is None)


def test_the_options_change_the_answer() -> None:
    """Otherwise the comparisons above would pass without them."""
    case = make_case(Geometry(window=7, sinks=True), MIXTURES["mixture"])
    answers = [
        naive(replace(case, layer=AttentionLayer(*options))) for options in ((), (7,), (7, case.layer.sinks))
    ]
    assert (answers[0] - answers[1]).abs().max() > 0.1
    assert (answers[1] - answers[2]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_8_bit_pages_with_scales(name: str) -> None:
    """Scales belong to keys and values; a sink is a logit as it is."""
    case = make_case(Geometry(storage_dtype=FP8, window=9, sinks=True), MIXTURES["mixture"])
    case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = 0.5, 2.0
    check(name, case)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("torch", torch.bfloat16, ATTENTION_BFLOAT16),
        ("cpu", torch.bfloat16, ATTENTION_BFLOAT16),
        ("triton", torch.float16, ATTENTION_FLOAT16),
    ],
)
def test_16_bit_types(name: str, dtype: torch.dtype, tolerance: float) -> None:
    check(name, make_case(Geometry(dtype=dtype, window=9, sinks=True), MIXTURES["mixture"]), tolerance)


@settings(max_examples=12, deadline=None)
@given(
    group=st.integers(1, 8),
    page_size=st.sampled_from([1, 3, 16]),
    shape=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 80)),
    sinks=st.booleans(),
    block_size=st.sampled_from([0, 1, 5, 32]),
    chunk=st.sampled_from([None, 1, 9, 40]),
)
@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_any_geometry(
    name: str,
    group: int,
    page_size: int,
    shape: Shape,
    window: int | None,
    sinks: bool,
    block_size: int,
    chunk: int | None,
) -> None:
    """A layer has at most one of window, blocks and chunk."""
    window, chunk = None if block_size or chunk else window, None if block_size else chunk
    geometry = Geometry(
        group * 2,
        2,
        16,
        page_size,
        window=window,
        sinks=sinks,
        block_size=block_size,
        chunk=chunk,
    )
    check(name, make_case(geometry, shape))


@pytest.mark.parametrize("window", [1, 15, 40])
def test_chunks_longer_than_a_tile(window: int) -> None:
    """Rows of a tile begin to see at different tiles of keys."""
    case = make_case(Geometry(window=window), [(30, 37), (0, 16), (7, 5)])
    case.cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    output = torch.full(case.query.shape, math.nan)
    inputs = case.inputs
    indices = inputs.block_table, inputs.seq_lens_tensor, inputs.query_start_loc_tensor
    tile = replace(SMALL, rows=64)
    prefill(case.query, case.cache.pages(LAYER), output, *indices, 0.25, 1.0, tile, case.layer)
    torch.testing.assert_close(output.flatten(1).double(), naive(case), rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_layers_of_one_step_may_differ() -> None:
    """A plan serves them all: results of one window must not reach another."""
    case = make_case(Geometry(window=20, sinks=True), [(100, 1), (70, 3)])
    layers = [AttentionLayer(), case.layer, AttentionLayer(40), AttentionLayer()]
    for name in ("torch", "triton"):
        backend = backend_of(name, case)
        backend.plan(case.inputs)
        for layer in layers:
            expected = naive(replace(case, layer=layer))
            output = backend.forward(case.query, case.key, case.value, LAYER, layer)
            torch.testing.assert_close(output.double(), expected, rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_layers_of_one_step_may_have_fewer_heads() -> None:
    """Layers take turns, with and without a window: what a layer's splits leave must fit its own heads."""
    case = make_case(Geometry(), [(100, 1), (70, 3)])
    fewer = replace(case, query=case.query[:, :4].contiguous(), geometry=replace(case.geometry, num_heads=4))
    for name in ("torch", "triton"):
        backend = backend_of(name, case)
        backend.plan(case.inputs)
        for one in (case, fewer, replace(fewer, layer=AttentionLayer(40)), case):
            output = backend.forward(one.query, one.key, one.value, LAYER, one.layer)
            torch.testing.assert_close(output.double(), naive(one), rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_a_captured_step_keeps_its_window_while_lengths_grow() -> None:
    """The first visible key follows from the length on the device."""
    case = make_case(Geometry(spare_pages=30, window=40, sinks=True), [(0, 1)] * 3)
    attention = backend_of("triton", case)
    static = as_capturable(case.inputs)
    attention.plan_capture(static)
    later = replace(make_case(Geometry(spare_pages=0), [(5, 1), (100, 1), (40, 1)]), layer=case.layer)
    attention.kv_cache = later.fresh_cache()
    expected = naive(later)
    attention.plan_replay(refill(static, later.inputs))
    output = attention.forward(later.query, later.key, later.value, LAYER, later.layer)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=LOGITS_FLOAT32_SELF)


def test_pages_before_the_window_are_not_read() -> None:
    """Neither backend pays for them, and what they hold does not matter."""
    case = make_case(Geometry(window=6), [(40, 1), (40, 3)])
    case.cache.pages(LAYER)[case.inputs.block_table[:, :8].flatten().long()] = math.nan
    for name in ("torch", "triton"):
        assert run(case, backend_of(name, case)).isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_products_without_a_fused_kernel_are_the_same(causal: bool) -> None:
    """What a device that is no CPU uses."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, 3, 9, 16) for _ in range(3))
    mask = None if causal else torch.randn(2, 1, 9, 9).masked_fill_(torch.rand(2, 1, 9, 9) > 0.7, -math.inf)
    fused = attend_with_lse(query, key, value, mask, 0.3)
    plain = attend_with_lse_unfused(query, key, value, mask, 0.3)
    torch.testing.assert_close(fused, plain, rtol=0, atol=LOGITS_FLOAT32_SELF)
    # A sink that is far below every score is none.
    none = attend(query, key, value, mask, 0.3)
    low = attend(query, key, value, mask, 0.3, torch.full((3, 1), -100.0))
    torch.testing.assert_close(low, none, rtol=0, atol=LOGITS_FLOAT32_SELF)


@pytest.mark.parametrize(("options", "word"), [({"window": 8}, "windows"), ({"sinks": True}, "sinks")])
def test_flashinfer_leaves_such_models_to_others(options: dict[str, Any], word: str) -> None:
    case = make_case(Geometry(head_dim=64, dtype=torch.bfloat16, **options), [(3, 1)])
    assert word in FlashInferAttention.unsupported(case.geometry.config().layers, case.cache)


def test_the_warm_up_meets_every_kind_of_layer_once() -> None:
    cpu = torch.device("cpu")
    config = Geometry(sinks=True).config()
    (attention, _) = mixers_of(config, GQA)
    windows = Window(128), None, Window(128), None
    config = with_mixers(config, *(replace(attention, sight=window) for window in windows))
    kinds = kinds_of_layers(grouped_queries(config.layers), torch.float32, cpu)
    assert {(at, shape.num_heads, layer.window) for at, shape, layer in kinds} == {(0, 6, 128), (1, 6, None)}
    assert all(layer.sinks is not None and layer.sinks.shape == (6,) for _, _, layer in kinds)
    heads = zip(mixers_of(config, GQA), (6, 4, 2, 4), (2, 2, 2, 1), strict=True)
    layers = (replace(layer, num_heads=queries, num_kv_heads=keys) for layer, queries, keys in heads)
    config = with_mixers(config, *layers)
    differing = kinds_of_layers(grouped_queries(config.layers), torch.float32, cpu)
    assert {(at, shape.num_heads, shape.num_kv_heads) for at, shape, _ in differing} == {
        (0, 6, 2),
        (1, 4, 2),
        (2, 2, 2),
        (3, 4, 1),
    }
    plain = grouped_queries(Geometry().config().layers)
    assert [layer.sinks for _, _, layer in kinds_of_layers(plain, torch.float32, cpu)] == [None]
