"""Invariant: the blocks of tokens that a row attends to are the best of its KV head, however rows are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention import base
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.kv_cache import KVCache, page_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.memory.plan import StepSize, activation_bytes
from gpu_service.ops.block_attention import best_blocks, block_scores
from gpu_service.ops.triton import block_attention as triton_block_attention
from moebius.models.config import ModelConfig
from moebius.models.layers.gqa import GQA, BlockIndexer
from moebius.models.layers.layer import indexed
from moebius.models.layers.norms import RMSNorm
from tests.helpers.attention_cases import Case, Geometry, Shape, make_case
from tests.helpers.layer_values import mixers_of, with_mixers

SIZES = BlockIndexer(head_dim=12, block_size=5, top_blocks=3, local_blocks=1, norm=RMSNorm(1e-5))
STEPS: dict[str, Shape] = {
    "decodes": [(38, 1), (4, 1), (0, 1)],
    "chunk": [(11, 30)],
    "mixture": [(20, 9), (38, 1), (0, 1), (0, 14)],
}


def _choosing(config: ModelConfig, layer: int) -> ModelConfig:
    """The model whose one layer chooses blocks."""
    found = mixers_of(config, GQA)
    found[layer] = replace(found[layer], blocks=SIZES)
    return with_mixers(config, *found)


def _inputs(case: Case, pages: torch.Tensor, query: torch.Tensor, first: int) -> tuple[Any, ...]:
    inputs, num_blocks = case.inputs, -(-max(case.inputs.seq_lens) // SIZES.block_size)
    where = inputs.block_table, inputs.query_start_loc_tensor
    return (
        query[first:],
        pages,
        inputs.positions[first:],
        *where,
        SIZES.block_size,
        num_blocks,
        first,
        inputs.is_uniform_decode,
    )


def _naive(case: Case, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Row by row and token by token."""
    inputs = case.inputs
    shape = *query.shape[:2], -(-max(inputs.seq_lens) // SIZES.block_size)
    scores = torch.full(shape, float("-inf"))
    row = 0
    for request, new in enumerate(torch.tensor(inputs.query_start_loc).diff().tolist()):
        for _ in range(new):
            for token in range(int(inputs.positions[row]) + 1):
                page = int(inputs.block_table[request, token // pages.shape[1]])
                product = query[row] @ pages[page, token % pages.shape[1]]
                block = token // SIZES.block_size
                scores[row, :, block] = torch.maximum(scores[row, :, block], product)
            row += 1
    return scores


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("step", sorted(STEPS))
def test_scores_are_the_best_token_of_each_block(step: str, first: int) -> None:
    """Scores agree in torch and as a kernel, also of a later part of the rows."""
    case = make_case(Geometry(), STEPS[step])
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(case.cache.num_pages, 4, SIZES.head_dim, generator=generator)
    query = torch.randn(case.query.shape[0], 2, SIZES.head_dim, generator=generator)
    arguments, expected = _inputs(case, pages, query, first), _naive(case, pages, query)[first:]
    for compute in (block_scores.reference, triton_block_attention.block_scores):
        torch.testing.assert_close(compute(*arguments), expected, rtol=0, atol=1e-5)


def test_the_latest_blocks_come_first_and_no_later_one() -> None:
    """Equal scores are chosen together; a row with few blocks sees all that are not after it."""
    scores = torch.tensor([[[5.0, 1.0, 4.0, 2.0]], [[5.0, 9.0, float("-inf"), float("-inf")]]])
    positions = torch.tensor([19, 7])
    one = best_blocks(scores.clone(), positions, replace(SIZES, top_blocks=2))
    assert one[:, 0].tolist() == [[True, False, False, True], [True, True, False, False]]
    two = best_blocks(scores.clone(), positions, replace(SIZES, local_blocks=2))
    assert two[0, 0].tolist() == [True, False, True, True]
    level = best_blocks(torch.tensor([[[3.0, 3.0, 1.0, 2.0]]]), positions[:1], replace(SIZES, top_blocks=2))
    assert level[0, 0].tolist() == [True, True, False, True]
    none = best_blocks(scores[:1].clone(), positions[:1], replace(SIZES, local_blocks=0, top_blocks=1))
    assert none[0, 0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("step", ["chunk", "mixture"])
def test_rows_scored_in_parts_choose_the_same(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory bounds how many rows are scored at once; the choice may not show it."""
    case = make_case(Geometry(), STEPS[step])
    config = _choosing(case.geometry.config(), 0)
    cache = KVCache(config.layers, case.cache.num_pages, 4, torch.float32)
    assert cache.index_keys is not None
    cache.index_keys.pages(0).normal_(generator=torch.Generator().manual_seed(1))
    backend = TorchReferenceAttention(config.layers, cache)
    backend.plan(case.inputs)
    query = torch.randn(case.query.shape[0], 2, SIZES.head_dim, generator=torch.Generator().manual_seed(2))
    whole = backend.choose_blocks(query, 0)
    assert whole is not None
    monkeypatch.setattr(base, "MAX_BLOCK_SCORES", 70)
    parts = backend.choose_blocks(query, 0)
    assert parts is not None
    assert torch.equal(parts, whole)
    most = whole.sum(-1).amax()
    assert 1 <= int(most) <= SIZES.top_blocks


def test_short_sequences_do_not_choose() -> None:
    case = make_case(Geometry(), [(3, 6), (14, 1)])
    config = _choosing(case.geometry.config(), 0)
    backend = TorchReferenceAttention(
        config.layers, KVCache(config.layers, case.cache.num_pages, 4, torch.float32)
    )
    backend.plan(case.inputs)
    assert backend.choose_blocks(torch.zeros(7, 2, SIZES.head_dim), 0) is None


@pytest.mark.parametrize("storage", [None, torch.float8_e4m3fn])
def test_pages_hold_the_keys_that_layers_choose_by(storage: torch.dtype | None) -> None:
    """In the type of activations, planned as they are allocated, of a stage its own layers', and cleared."""
    config = _choosing(Geometry().config(), 1)
    cache = KVCache(config.layers, 6, 4, torch.float32, storage_dtype=storage)
    assert cache.nbytes == 6 * page_bytes(
        config.layers, 4, storage or torch.float32, TORCH_DTYPES[config.dtype]
    )
    keys = cache.index_keys
    assert keys is not None
    assert keys.pages(0).shape == (6, 4, SIZES.head_dim)
    keys.pages(0).fill_(float("nan"))
    cache.zero_pages([2, 3])
    assert keys.pages(0).isnan().flatten(1).all(1).tolist() == [True, True, False, False, True, True]
    stages = [rank_layers(config, ParallelContext(stage=stage, num_stages=2)) for stage in range(2)]
    assert [[part.row for part in indexed(stage)] for stage in stages] == [[], [(SIZES.head_dim,)]]


def test_the_plan_counts_what_a_choice_takes() -> None:
    """A mask of blocks for each token, and scores of as many as are scored at once."""
    dense = replace(Geometry().config(), max_model_len=5000)
    sparse, step = _choosing(dense, 0), StepSize(300, 1)
    needed, less = (activation_bytes(config, step, SOLO, False) for config in (sparse, dense))
    masks = 300 * Geometry().num_kv_heads * 1000
    assert needed - less >= masks + 4 * min(masks, base.MAX_BLOCK_SCORES)


def test_blocks_are_chosen_before_any_request() -> None:
    """What choosing compiles is there when service begins: of short and of long sequences."""
    config = _choosing(Geometry().config(), 0)
    backend = TorchReferenceAttention(config.layers, KVCache(config.layers, 2, 4, torch.float32))
    chosen: list[bool] = []
    choose = backend.choose_blocks

    def counted(query: torch.Tensor, index_layer: int) -> torch.Tensor | None:
        kept = choose(query, index_layer)
        chosen.append(kept is not None)
        return kept

    backend.choose_blocks = counted  # type: ignore[method-assign]
    warm_up_attention(backend, 64)
    assert set(chosen) == {True, False}
