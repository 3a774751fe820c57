"""The contract of an attention backend."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from gpu_service.attention.planning import PlannedAttention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.engine.step import ForwardInputs
from gpu_service.model_config import ModelConfig


class AttentionLayer(NamedTuple):
    """What layers of one model may differ in; filled by the layer, the same in every step."""

    # Latest positions that a query sees, its own included; None: all of them.
    window: int | None = None
    # [num_heads], a learned logit per query head that joins the softmax's sum and has no value; None: none.
    sinks: torch.Tensor | None = None


PLAIN = AttentionLayer()


class AttentionBackend(PlannedAttention):
    """Attention over a paged cache of keys and values; `forward` is called once per layer."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache) -> None:
        """`config` is the rank's own: its `num_heads` and the cache's `num_kv_heads` are what it computes.

        Layers of `layer_num_heads` have that many heads instead, none more than `num_heads`.
        """
        self.config = config
        self.kv_cache = kv_cache

    @classmethod
    def unsupported(cls, config: ModelConfig, kv_cache: KVCache) -> str:
        """Why this backend can not serve this model and cache on this machine; empty: it can."""
        return ""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer = PLAIN,
    ) -> torch.Tensor:
        """Store the new keys and values of this layer, then attend.

        query `[T, num_heads, head_dim]`, of the layer's own number of heads; key, value `[T, num_kv_heads,
        head_dim]`; all of the cache's `dtype` (whatever its pages hold), rows in the order of
        `ForwardInputs`, rotary embedding already applied. Row at position p of a request attends to that
        request's positions 0..p, with a window w to the last w of them. Returns `[T, num_heads * head_dim]`.
        """


def check_step(inputs: ForwardInputs, page_size: int) -> None:
    """Raises ValueError when the inputs contradict themselves or exceed the block table."""
    starts, seq_lens = inputs.query_start_loc, inputs.seq_lens
    if len(starts) != len(seq_lens) + 1 or starts[-1] != inputs.slot_mapping.shape[0]:
        raise ValueError(
            f"step of {inputs.slot_mapping.shape[0]} rows and {len(seq_lens)} requests has "
            f"query_start_loc {starts}"
        )
    capacity = inputs.block_table.shape[1] * page_size
    if seq_lens and max(seq_lens) > capacity:
        raise ValueError(f"sequence of {max(seq_lens)} tokens exceeds its block table of {capacity}")
