"""Invariant: the Triton backend is causal attention over pages, for every mixture, geometry and splitting.

The kernels run in Triton's interpreter here, in float32 and float16; tests/gpu repeats this on a device.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention import triton_backend
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.attention.triton_kernels import MIN_SPLIT, decode, prefill
from gpu_service.attention.triton_tiles import (
    MAX_SPLITS,
    PartialResults,
    Tile,
    decode_tile,
    num_splits,
    prefill_tile,
)
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
from tests.tolerances import ATTENTION_FLOAT16, LOGITS_FLOAT32_SELF

FP8 = torch.float8_e4m3fn
PARTIALS = PartialResults(2, 4, torch.device("cpu"))
SMALL = Tile(rows=16, keys=16, width=16, num_warps=4, precision="ieee")


def triton_attention(case: Case, min_split: int = 64) -> TritonAttention:
    return TritonAttention(case.geometry.config().layers, case.cache, min_split)


def check(case: Case, output: torch.Tensor) -> None:
    tolerance = ATTENTION_FLOAT16 if case.geometry.dtype == torch.float16 else LOGITS_FLOAT32_SELF
    assert output.dtype == case.geometry.dtype
    torch.testing.assert_close(output.double(), naive(case), rtol=0, atol=tolerance)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("storage", [None, FP8])
@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_mixtures(name: str, storage: torch.dtype | None, dtype: torch.dtype) -> None:
    case = make_case(Geometry(dtype=dtype, storage_dtype=storage), MIXTURES[name])
    case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = (0.5, 2.0) if storage else (1.0, 1.0)
    expected = naive(case)
    output = run(case, triton_attention(case))
    tolerance = ATTENTION_FLOAT16 if dtype == torch.float16 else LOGITS_FLOAT32_SELF
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@settings(max_examples=12, deadline=None)
@given(
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 24, 40]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    shape=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=3),
)
def test_any_geometry(group: int, kv_heads: int, head_dim: int, page_size: int, shape: Shape) -> None:
    case = make_case(Geometry(group * kv_heads, kv_heads, head_dim, page_size), shape)
    check(case, run(case, triton_attention(case)))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims_of_real_models(head_dim: int) -> None:
    case = make_case(Geometry(4, 1, head_dim, 16), [(20, 1), (3, 5)])
    check(case, run(case, triton_attention(case)))


@pytest.mark.parametrize("splits", [1, 3, 32])
def test_any_number_of_splits(splits: int) -> None:
    """Short requests leave splits without keys; long ones fill them all."""
    case = make_case(Geometry(), [(99, 1), (0, 1), (15, 1), (16, 1)])
    case.cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    output = torch.full(case.query.shape, math.nan)
    partial = None
    if splits > 1:
        # What an earlier step left there must not be read.
        partial = torch.full((4, 6, splits, 16), math.nan), torch.full((4, 6, splits), math.nan)
    inputs = case.inputs
    indices = inputs.block_table, inputs.seq_lens_tensor, inputs.query_start_loc_tensor
    pages = case.cache.pages(LAYER)
    decode(case.query, pages, output, partial, *indices, 0.25, 1.0, SMALL, min_split=16)
    check(case, output.flatten(1))


@pytest.mark.parametrize("rows", [16, 64])
def test_chunks_longer_than_a_tile(rows: int) -> None:
    """Groups that do not divide the tile leave rows unused; chunk ends fall anywhere."""
    case = make_case(Geometry(num_heads=6, num_kv_heads=2), [(30, 37), (0, 16), (7, 5)])
    case.cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    output = torch.full(case.query.shape, math.nan)
    inputs = case.inputs
    indices = inputs.block_table, inputs.seq_lens_tensor, inputs.query_start_loc_tensor
    tile = replace(SMALL, rows=rows)
    prefill(case.query, case.cache.pages(LAYER), output, *indices, 0.25, 1.0, tile)
    check(case, output.flatten(1))


def test_queries_may_be_a_part_of_wider_rows() -> None:
    """Only the last dimension of queries is contiguous, as a fused projection leaves them."""
    case = make_case(Geometry(), MIXTURES["mixture"])
    parts = (case.query, case.key, case.value)
    fused = torch.cat(parts, dim=1)
    case.query, case.key, case.value = fused.split([part.shape[1] for part in parts], dim=1)
    assert not case.query.is_contiguous()
    check(case, run(case, triton_attention(case)))


def test_a_captured_step_follows_its_refilled_tensors() -> None:
    """What a graph replays: the same launches with the same tensors. Padded rows read the dummy page."""
    shape = [(5, 1), (100, 1), (30, 1), (0, 1)]
    case = make_case(Geometry(spare_pages=30), [(0, 1)] * 4)
    attention = triton_attention(case)
    static = as_capturable(case.inputs)
    attention.plan_capture(static)
    # Two requests and two rows of padding, whose slot and pages are those of page 0.
    later = make_case(Geometry(spare_pages=0), shape)
    later.inputs.slot_mapping[2:] = 0
    later.inputs.block_table[2:] = 0
    later.inputs.seq_lens_tensor[2:] = 1
    later.inputs.seq_lens[2:] = [1, 1]
    attention.kv_cache = later.fresh_cache()
    expected = naive(later)
    attention.plan_replay(refill(static, later.inputs))
    output = attention.forward(later.query, later.key, later.value, LAYER)
    torch.testing.assert_close(output.double()[:2], expected[:2], rtol=0, atol=LOGITS_FLOAT32_SELF)
    assert output.isfinite().all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 100_000))
def test_partial_results_of_any_step_fit(num_requests: int, kv_heads: int, max_length: int) -> None:
    """Their memory is made once, before any step, and never grows: graphs hold its address."""
    splits = num_splits(num_requests, kv_heads, max_length, MIN_SPLIT, 132)
    taken = PARTIALS.take(num_requests, 2 * kv_heads, splits)
    assert (taken is None) == (splits == 1)
    if taken is not None:
        assert taken[0].shape == (num_requests, 2 * kv_heads, splits, 4)


def test_splits_fill_the_device_but_not_beyond_lengths() -> None:
    assert num_splits(1, 4, 40960, 256, 132) == MAX_SPLITS
    assert num_splits(64, 4, 40960, 256, 132) == 2
    assert num_splits(256, 8, 40960, 256, 132) == 1
    assert num_splits(1, 4, 200, 256, 132) == 1
    assert num_splits(1, 4, 600, 256, 132) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 12, 16])
def test_tiles_hold_their_group(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every head of a group in one tile, sizes powers of two, keys and values in shared memory."""
    for tile in (decode_tile(group, head_dim, dtype), prefill_tile(group, head_dim, dtype)):
        assert tile.rows >= group
        assert all(size & (size - 1) == 0 for size in (tile.rows, tile.keys, tile.width))
        assert tile.width >= head_dim
        # Three stages of both, and the queries, within the 227 KiB of a Hopper multiprocessor.
        assert (6 * tile.keys + tile.rows) * tile.width * dtype.itemsize <= 227 * 1024


def test_planning_launches_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host work of a step is counting: no tensor is made from its lists."""
    case = make_case(Geometry(), MIXTURES["mixture"])
    attention = triton_attention(case)
    attention.plan(case.inputs)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a plan must not make tensors")

    monkeypatch.setattr(triton_backend.torch, "empty", refuse)  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_backend.torch, "tensor", refuse)  # type: ignore[attr-defined]
    attention.plan(case.inputs)


def test_contradicting_inputs_are_refused() -> None:
    case = make_case(Geometry(), [(5, 6)])
    attention = triton_attention(case)
    with pytest.raises(ValueError, match="query_start_loc"):
        attention.plan(replace(case.inputs, query_start_loc=[0, 5]))
    with pytest.raises(ValueError, match="99 tokens exceeds its block table"):
        attention.plan_capture(replace(case.inputs, seq_lens=[99]))
