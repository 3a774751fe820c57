"""Which blocks of tokens attention reads: MiniMax-M3's choice by the best token of each block, Qwen4's by the
mean of each whole block.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from gpu_service.ops.registry import Op
from moebius.models.layers.gqa import BlockIndexer


@Op
def block_scores(
    query: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_row: int,
    one_row_each: bool,
) -> torch.Tensor:
    """Returns the highest product of a query with the keys of each block, float32 `[n, H, num_blocks]`.

    query `[n, H, D]`: the step's rows from `first_row` on; pages `[num_pages, page_size, D]`, which hold one
    key for each token, the step's included; positions int64 `[n]`, of these rows; block_table int32
    `[R, pages]`, query_starts int32 `[R + 1]` as in `ForwardInputs`, of all rows. Tokens after a row's own
    position do not count; of blocks without any other, the score is -inf. `one_row_each`: whether each
    request of the step has one row; then nothing is asked of the host, and the launch can be captured.
    """
    at = torch.arange(num_blocks * block_size, device=query.device)
    products = _products(query, pages, at, block_table, query_starts, first_row, one_row_each)
    products.masked_fill_(at > positions[:, None, None], float("-inf"))
    return products.view(*query.shape[:2], num_blocks, block_size).amax(-1)


@Op
def mean_block_scores(
    query: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_row: int,
    one_row_each: bool,
) -> torch.Tensor:
    """Returns positive products of all queries with the key of each whole block, added up: float32 `[n, 1,
    num_blocks]`, -inf for blocks that end after a row's own position.

    As `block_scores`, but for pages `[num_pages, page_size, D or more]`, where the first D elements of a
    block's last token are the key of the block (`ops.kv.mean_index_keys`).
    """
    last = torch.arange(1, num_blocks + 1, device=query.device) * block_size - 1
    keys = pages[..., : query.shape[-1]]
    products = _products(query, keys, last, block_table, query_starts, first_row, one_row_each)
    scores = products.relu_().sum(1, keepdim=True)
    return scores.masked_fill_(last > positions[:, None, None], float("-inf"))


def _products(
    query: torch.Tensor,
    pages: torch.Tensor,
    at: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    first_row: int,
    one_row_each: bool,
) -> torch.Tensor:
    """Returns the products of each row's queries with the keys of its request at positions `at`, float32 `[n,
    H, len(at)]`.
    """
    page_size = pages.shape[1]
    columns, within = (at // page_size).clamp(max=block_table.shape[1] - 1), at % page_size
    if one_row_each:
        own_tables = block_table[first_row : first_row + query.shape[0]]
        keys = pages[own_tables[:, columns].long(), within]
        return torch.einsum("rhd,rkd->rhk", query.float(), keys.float())
    products = query.new_zeros((*query.shape[:2], at.shape[0]), dtype=torch.float32)
    starts = query_starts.tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        own = slice(max(0, begin - first_row), max(0, end - first_row))
        if query[own].shape[0]:
            keys = pages[block_table[request, columns].long(), within].float()
            products[own] = query[own].float() @ keys.T
    return products


def best_blocks(scores: torch.Tensor, positions: torch.Tensor, sizes: BlockIndexer) -> torch.Tensor:
    """Returns bool `[n, H, num_blocks]`: the `top_blocks` best of each row and head, the latest ones first of
    all.

    scores as of `block_scores`, which may be overwritten; positions int64 `[n]`. Blocks of equal scores are
    chosen together.
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    own = (positions // sizes.block_size)[:, None, None]
    local = (block <= own) & (block > own - sizes.local_blocks)
    scores.masked_fill_(local, float("inf"))
    return _best(scores, sizes) & (block <= own)


def best_whole_blocks(scores: torch.Tensor, positions: torch.Tensor, sizes: BlockIndexer) -> torch.Tensor:
    """Returns bool `[n, 1, num_blocks]`: the `top_blocks` best whole blocks of each row, and the tokens after
    them.

    scores as of `mean_block_scores`; positions int64 `[n]`. Blocks of equal scores are chosen together.
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    num_whole = ((positions + 1) // sizes.block_size)[:, None, None]
    return (_best(scores, sizes) & (block < num_whole)) | (block == num_whole)


def _best(scores: torch.Tensor, sizes: BlockIndexer) -> torch.Tensor:
    """Bool, of the shape of `scores`: as good as the last of the `top_blocks` best."""
    count = min(sizes.top_blocks, scores.shape[-1])
    return scores >= scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
