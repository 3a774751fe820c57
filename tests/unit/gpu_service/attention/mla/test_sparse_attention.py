"""Invariant: sparse attention is plain attention over exactly the tokens with the highest index scores.

Torch and Triton choose the same tokens, in whatever steps; what has not more tokens than
may be chosen is dense attention bit by bit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.mla import triton_kernels
from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.mla.flashinfer_backend import FlashInferMlaAttention
from gpu_service.attention.mla.torch_reference import TorchMlaAttention, select_tokens
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.mla.triton_kernels import mla_tile
from gpu_service.attention.triton_tiles import num_splits
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.fp8 import E4M3
from gpu_service.cache.kv_cache import MlaCache, page_bytes
from gpu_service.ops.rope import apply_rope, half_split, rope_table
from tests.helpers.attention_cases import Shape, as_capturable, refill
from tests.helpers.layer_values import latent_layers
from tests.helpers.mla_cases import (
    LAYER,
    TINY,
    TINY_SPARSE,
    MlaCase,
    make_mla_case,
    naive_mla,
    naive_selection,
    run_absorbed,
)
from tests.tolerances import ATTENTION_FLOAT16, MLA_FLOAT32

BACKENDS = pytest.mark.parametrize("name", ["torch", "triton"])
TOP_K = 6
# Of tokens up to a row, every number around the one that may be chosen, in decodes and in chunks.
DECODES = [(4, 1), (5, 1), (6, 1), (40, 1)]
CHUNKS = [(0, 8), (4, 3)]


def backend_for(case: MlaCase, name: str) -> MlaAttentionBackend:
    if name == "torch":
        return TorchMlaAttention(case.dimensions, case.cache)
    return TritonMlaAttention(case.dimensions, case.cache, min_split=16)


def listed(selection: torch.Tensor) -> list[list[int]]:
    """Returns rows without their padding, which must be at their ends."""
    rows = []
    for row in selection.tolist():
        count = len([position for position in row if position >= 0])
        assert row[count:] == [-1] * (len(row) - count)
        rows.append(row[:count])
    return rows


@BACKENDS
@pytest.mark.parametrize(
    ("shape", "storage"), [(DECODES, None), (DECODES, E4M3), (CHUNKS, None)], ids=["decodes", "fp8", "chunks"]
)
def test_attention_to_the_chosen_tokens(shape: Shape, storage: torch.dtype | None, name: str) -> None:
    case = make_mla_case(TINY_SPARSE, shape, storage_dtype=storage)
    case.cache.scales[LAYER] = 0.5 if storage else 1.0
    backend, chosen = backend_for(case, name), naive_selection(case)
    assert any(len(row) == TOP_K for row in chosen)
    backend.plan(case.inputs)
    assert (backend.selects, backend.non_absorbed) == (True, False)
    assert listed(backend.select(case.index_query, case.head_weights, 0)) == chosen
    expected = naive_mla(case, chosen)
    output = run_absorbed(case, backend)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


@BACKENDS
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [[*DECODES, (70, 1)], [*CHUNKS, (0, 1)]], ids=["decodes", "chunks"])
def test_sinks_take_their_share_of_the_softmax_once(shape: Shape, sparse: bool, name: str) -> None:
    """Sinks count once with one split or several, over all tokens or the chosen ones; first chunks take the
    same form.
    """
    dimensions = replace(TINY_SPARSE if sparse else TINY, has_sinks=True)
    case = make_mla_case(dimensions, shape)
    assert case.sinks is not None
    expected = naive_mla(case, naive_selection(case) if sparse else None)
    without = naive_mla(replace(case, sinks=None), naive_selection(case) if sparse else None)
    assert (expected - without).abs().max() > 0.1
    output = run_absorbed(case, backend_for(case, name))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)
    first = make_mla_case(dimensions, [(0, 5)])
    backend = backend_for(first, name)
    backend.plan(first.inputs)
    assert not backend.non_absorbed, "keys written out would leave the sinks out"


def test_many_heads_of_a_row_share_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are rows enough, 64 heads instead of 16 do; one block of heads is not full here."""
    module = "gpu_service.attention.mla.triton_backend"
    monkeypatch.setattr(f"{module}.streaming_multiprocessors", lambda device: 1)
    many_heads = replace(TINY_SPARSE, num_heads=70)
    case = make_mla_case(many_heads, [(20, 5), (0, 3)], dtype=torch.float16)
    expected = naive_mla(case, naive_selection(case))
    backend = TritonMlaAttention(many_heads, case.cache)
    output = run_absorbed(case, backend)
    assert backend._tile.rows == 64
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=ATTENTION_FLOAT16)
    for rows, sms in itertools.product((1, 66, 131, 132, 4096), (1, 132)):
        for heads in (16, 64, 70, 128):
            tile = mla_tile(torch.float16, rows, heads, sms)
            splits = num_splits(rows, -(-heads // tile.rows), 10**6, 16, sms)
            assert tile.rows == 16 or splits == 1, "memory for splits is for 16 heads of a program"


@BACKENDS
def test_few_tokens_are_dense_attention_bit_by_bit(name: str) -> None:
    """Alone, where nothing is chosen, and with a request that has to choose."""
    short = [(5, 1), (2, 2), (0, 3)]
    case = make_mla_case(TINY_SPARSE, [*short, (30, 1)])
    backend = backend_for(case, name)
    sparse = run_absorbed(case, backend)
    assert backend.selects
    dense = make_mla_case(TINY_SPARSE, [*short, (30, 1)])
    dense.dimensions = TINY
    few = run_absorbed(dense, backend_for(dense, name))[:6]
    assert torch.equal(sparse[:6], few)
    alone = make_mla_case(TINY_SPARSE, short)
    backend = backend_for(alone, name)
    backend.plan(alone.inputs)
    assert not backend.selects


@BACKENDS
def test_equal_scores_go_to_the_earliest_tokens(name: str) -> None:
    """Zeros of both signs, and others of few whole values; in one step or token by token."""
    case = make_mla_case(TINY_SPARSE, [(0, 15)])
    assert case.cache.index_keys is not None
    for tensor in (case.index_query, case.head_weights, case.cache.index_keys.pages(0)):
        tensor.round_().clamp_(-1, 1)
    case.index_query[::2] = 0.0
    backend = backend_for(case, name)
    backend.plan(case.inputs)
    chosen = listed(backend.select(case.index_query, case.head_weights, 0))
    assert chosen == naive_selection(case)
    assert chosen[14] == list(range(TOP_K))
    for row in (9, 12, 13):
        single = make_mla_case(TINY_SPARSE, [(row, 1)])
        single.cache.index_keys = case.cache.index_keys
        single.inputs = replace(single.inputs, block_table=case.inputs.block_table)
        backend = backend_for(single, name)
        backend.plan(single.inputs)
        rows = slice(row, row + 1)
        again = backend.select(case.index_query[rows], case.head_weights[rows], 0)
        assert listed(again) == chosen[rows]


@pytest.mark.parametrize("max_scores", [100, 450])
def test_scores_are_served_in_batches(max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are used where not all rows' scores fit into memory at once, and one row's not into a program's
    tile.

    Batches of 2 and of 10 rows: each ends within a request, and a tile of rows with it.
    """
    monkeypatch.setattr(triton_kernels, "_BLOCK_SCORES", 16)
    monkeypatch.setattr("gpu_service.attention.mla.triton_backend.MAX_SCORES", max_scores)
    case = make_mla_case(TINY_SPARSE, [(40, 1), (0, 5), (3, 1), (20, 19)])
    backend = backend_for(case, "triton")
    backend.plan(case.inputs)
    assert listed(backend.select(case.index_query, case.head_weights, 0)) == naive_selection(case)


def test_a_captured_step_follows_its_refilled_tensors() -> None:
    """The step is captured with short sequences; later ones must choose."""
    case = make_mla_case(TINY_SPARSE, [(0, 1)] * 3, spare_pages=30)
    attention = TritonMlaAttention(TINY_SPARSE, case.cache, min_split=16)
    static = as_capturable(case.inputs)
    attention.plan_capture(static)
    assert attention.selects
    later = make_mla_case(TINY_SPARSE, [(70, 1), (7, 1), (0, 1)])
    expected = naive_mla(later, naive_selection(later))
    attention.cache = later.fresh_cache()
    attention.plan_replay(refill(static, later.inputs))
    output = run_absorbed(later, attention, planned=True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


def test_a_row_that_is_not_a_number_chooses_nothing() -> None:
    """Its attention is not a number either, so that the request fails instead of saying anything."""
    scores = torch.tensor([[1.0, float("nan"), 3.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
    chosen = select_tokens(scores, torch.tensor([4, 4]), 2)
    assert listed(chosen) == [[], [0, 1]]


def test_the_warm_up_chooses_on_the_dummy_page_only() -> None:
    case = make_mla_case(TINY_SPARSE, [(60, 1)])
    for layer in range(case.cache.num_layers):
        case.cache.pages(layer)[1:] = 7.0
    backend, counts = backend_for(case, "torch"), []
    select = backend.select

    def watch(*arguments: torch.Tensor | int) -> torch.Tensor:
        counts.append(1)
        return select(*arguments)  # type: ignore[arg-type]

    backend.select = watch  # type: ignore[assignment, method-assign]
    warm_up_attention(backend, 8)
    assert counts
    assert all((case.cache.pages(layer)[1:] == 7.0).all() for layer in range(case.cache.num_layers))


def test_cache_arithmetic_and_cleared_pages() -> None:
    """A page's bytes include index keys, which keep their type; clearing a page clears them."""
    layers = latent_layers(3, 24, 8, (10, 10))
    cache = MlaCache(layers, 5, 4, torch.bfloat16, storage_dtype=E4M3)
    assert cache.index_keys is not None
    assert cache.nbytes == 5 * page_bytes(layers, 4, E4M3, torch.bfloat16)
    assert cache.nbytes == 5 * 4 * (3 * (24 + 8) + 2 * 10 * 2)
    for layer in range(2):
        cache.index_keys.pages(layer).fill_(float("nan"))
    cache.zero_pages([2])
    for layer in range(2):
        held = cache.index_keys.pages(layer).isnan().all(-1).all(-1)
        assert held.tolist() == [True, True, False, True, True]


def test_flashinfer_is_refused_by_name() -> None:
    case = make_mla_case(TINY_SPARSE, [(9, 1)], dtype=torch.bfloat16)
    reason = FlashInferMlaAttention.unsupported(case.dimensions, case.cache)
    assert "attends to selected ones" in reason


def test_the_indexers_rotary_table_has_the_layers_angles() -> None:
    """The table is that for half-split pairs, made from one for adjacent ones; a table for half-split pairs
    comes back as it is.
    """
    frequencies, positions = torch.tensor([1.0, 0.3, 0.05]), torch.tensor([0, 4, 900])
    adjacent = rope_table(positions, frequencies, torch.float32, True, 1.3)
    split = rope_table(positions, frequencies, torch.float32, False, 1.3)
    made = half_split(adjacent)
    assert half_split(split) is split
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(apply_rope(heads.clone(), made), apply_rope(heads.clone(), split))
    assert not torch.equal(apply_rope(heads.clone(), adjacent), apply_rope(heads.clone(), split))
    assert replace(TINY_SPARSE, index=None) == TINY
