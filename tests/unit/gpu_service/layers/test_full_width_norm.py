"""Invariant: normed over all heads, each rank has what one process gives, however heads are shared."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from gpu_service.core.parallel import Collectives, ParallelContext
from gpu_service.layers.norm import FullWidthNorm, norm_full_width
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.norm import rms_norm
from moebius.models.layers.ranks import Cut, Even, KvHeads, ShardRange, even_shard
from moebius.models.layers.weights import rms_norm as rms_norm_weight

HEADS, KV_HEADS, HEAD_DIM, TOKENS, EPS = 8, 2, 6, 5, 1e-3


class _AddsUp:
    """Stands for a group: the first call of each rank notes its part, later ones return the sum."""

    def __init__(self, num_ranks: int) -> None:
        self.parts: list[torch.Tensor] = []
        self.num_ranks = num_ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.parts) < self.num_ranks:
            self.parts.append(tensor)
            return tensor
        return torch.stack(self.parts).sum(dim=0)


def _module(cut: Cut, rows: ShardRange, weight: torch.Tensor, rank: int, num_ranks: int) -> FullWidthNorm:
    declared = rms_norm_weight("norm", len(weight), cut)
    own = RankWeights(declared, weight.dtype, ParallelContext(rank, num_ranks))
    norm = FullWidthNorm(own.under("norm"), num_ranks, EPS)
    assert norm.rows == rows
    norm.to_empty(device="cpu")
    norm.weight.data.copy_(weight[norm.rows.slice])
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_norm_by_the_statistics_of_all(num_ranks: int, dtype: torch.dtype) -> None:
    """With 4 and 8 ranks several hold the same KV head, which must count once in the mean."""
    torch.manual_seed(num_ranks)
    query = torch.randn(TOKENS, HEADS, HEAD_DIM, dtype=dtype) * 2
    key = torch.randn(TOKENS, KV_HEADS, HEAD_DIM, dtype=dtype) * 3
    q_weight, k_weight = (torch.randn(n * HEAD_DIM, dtype=dtype) for n in (HEADS, KV_HEADS))
    wanted_query = rms_norm(query.flatten(1), q_weight, EPS).view_as(query)
    wanted_key = rms_norm(key.flatten(1), k_weight, EPS).view_as(key)
    group = _AddsUp(num_ranks)
    for _ in range(2):
        found = []
        for rank in range(num_ranks):
            heads = even_shard(HEADS, rank, num_ranks)
            copies = max(num_ranks // KV_HEADS, 1)
            kv = even_shard(KV_HEADS, rank // copies, num_ranks // copies)
            # Values follow in the same product, so the rows of a token are apart.
            own = torch.cat((query[:, heads.slice], key[:, kv.slice], key[:, kv.slice]), dim=1)
            q_norm, k_norm = (
                _module(cut, shard.scaled(HEAD_DIM), weight, rank, num_ranks)
                for cut, shard, weight in (
                    (Even(HEADS), heads, q_weight),
                    (KvHeads(KV_HEADS), ShardRange(kv.begin, kv.end, KV_HEADS), k_weight),
                )
            )
            both = own[:, : heads.size], own[:, heads.size : heads.size + kv.size]
            found.append((heads, kv, *norm_full_width(*both, q_norm, k_norm, cast(Collectives, group))))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for heads, kv, its_query, its_key in found:
        torch.testing.assert_close(its_query, wanted_query[:, heads.slice], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(its_key, wanted_key[:, kv.slice], rtol=tolerance, atol=tolerance)
    assert len(group.parts) == (num_ranks if num_ranks > 1 else 0)
