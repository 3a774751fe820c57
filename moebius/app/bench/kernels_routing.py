"""Which experts the rows of a benchmark choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Routing:
    """One call's choice; filled by `uniform` and `exact`."""

    # [rows, top_k] int32; -1 chooses nothing.
    topk_ids: NDArray[np.int32]
    # [rows, top_k] float32, each row's sum is 1.
    topk_weights: NDArray[np.float32]
    # Experts that at least one row chose.
    distinct_experts: int
    # (row, expert) pairs to compute.
    pairs: int

    @property
    def rows(self) -> int:
        return len(self.topk_ids)


def uniform(rows: int, num_experts: int, top_k: int, random: np.random.Generator) -> Routing:
    """Every row chooses `top_k` distinct experts, all equally likely, independently of other rows."""
    keys = random.random((rows, num_experts), dtype=np.float32)
    ids = (
        np.argpartition(keys, top_k - 1, axis=1)[:, :top_k]
        if top_k < num_experts
        else np.argsort(keys, axis=1)
    )
    return _routing(ids.astype(np.int32), random)


def exact(rows_per_expert: int, num_experts: int, top_k: int, random: np.random.Generator) -> Routing:
    """As many rows as give each expert exactly `rows_per_expert` of them, `top_k` distinct experts a row.

    Experts are dealt out in turn, so two of one row never meet; where the last row would have too many, it
    chooses fewer.
    """
    pairs = rows_per_expert * num_experts
    rows = -(-pairs // top_k)
    dealt = np.full(rows * top_k, -1, dtype=np.int32)
    dealt[:pairs] = np.tile(random.permutation(num_experts).astype(np.int32), rows_per_expert)
    return _routing(random.permutation(dealt.reshape(rows, top_k), axis=0), random)


def _routing(ids: NDArray[np.int32], random: np.random.Generator) -> Routing:
    weights = random.random(ids.shape, dtype=np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    chosen = ids[ids >= 0]
    return Routing(np.ascontiguousarray(ids), weights, len(np.unique(chosen)), len(chosen))
