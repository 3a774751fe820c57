"""The contract of attention backends: planning a step, whatever is read; attending to keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.block_attention import (
    best_blocks,
    best_whole_blocks,
    block_scores,
    mean_block_scores,
)
from gpu_service.ops.rope import Unrotated
from moebius.models.layers.gqa import GQA
from moebius.models.layers.layer import Layers, mixers

# Scores of blocks, float32, that are alive at a time.
MAX_BLOCK_SCORES = 2**24


class PlannedAttention(ABC):
    """Causal attention over pages, for any mixture of prefill chunks and decodes.

    `plan` is host work, done once per step before the forward; a forward is called once per layer and
    uses what the last `plan` left. One plan is alive at a time: a step's forward must have been launched
    before the next `plan`. Not thread-safe. On a GPU every call is made with the stream current on which
    the forwards run: what a plan copies or launches is ordered between the last step and this one.

    In a captured graph a forward reads the tensors that `plan_capture` was given; they are refilled, and
    `plan_replay` called, before each replay. A backend that cannot do this leaves `captures` False.
    """

    captures = False
    # The planned step's; filled by `plan` and `plan_capture`.
    _inputs: ForwardInputs | None = None

    @property
    def _planned(self) -> ForwardInputs:
        assert self._inputs is not None, "plan comes first"
        return self._inputs

    @abstractmethod
    def plan(self, inputs: ForwardInputs) -> None:
        """Prepare whatever all layers of this step share (indices, masks, kernel schedules).

        Raises ValueError when the inputs contradict themselves or exceed the block table.
        """

    def plan_capture(self, inputs: ForwardInputs) -> None:
        """Prepare recording a step of `len(inputs.seq_lens)` requests that compute one token each.

        The tensors of `inputs` keep their memory for the graph's life. Raises NotImplementedError unless
        `captures`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a graph")

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """Prepares a replay of the graph captured for as many requests; `inputs` are its refilled tensors."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured in a graph")


class AttentionLayer(NamedTuple):
    """What layers of one model may differ in; filled by the layer, the same in every step."""

    window: int | None = None  # Latest positions that a query sees, its own included; None: all of them.
    # [num_heads], a learned logit per query head that joins the softmax's sum and has no value; None: none.
    sinks: torch.Tensor | None = None
    # Which blocks of `block_size` tokens each row sees, bool [T, num_kv_heads, blocks]; the step's, by
    # `choose_blocks`; None: all of them.
    kept_blocks: torch.Tensor | None = None
    block_size: int = 0
    # Positions of a chunk: a query sees those of its own chunk up to itself; None: no chunks.
    chunk: int | None = None


PLAIN = AttentionLayer()


def grouped_queries(layers: Layers) -> tuple[GQA, ...]:
    """Returns the mixers whose keys and values are in a `KVCache`, in the order of its layers."""
    return tuple(mixer for mixer in mixers(layers) if isinstance(mixer, GQA))


class AttentionBackend(PlannedAttention):
    """Attention over a paged cache of keys and values; `forward` is called once per layer."""

    def __init__(self, layers: Layers, kv_cache: KVCache) -> None:
        """`layers` are the rank's own, whose mixers that attend have a layer of the cache each."""
        self.mixers = grouped_queries(layers)
        self._choosing = [mixer for mixer in self.mixers if mixer.blocks is not None]
        self.kv_cache = kv_cache
        # Tokens of the planned step's longest sequence, or of the longest that it may be replayed with;
        # filled by `plan` and `plan_capture`.
        self._max_length = 1

    @classmethod
    def unsupported(cls, layers: Layers, kv_cache: KVCache) -> str:
        """Why this backend cannot serve this model and cache on this machine; empty: it can."""
        return ""

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
        self.kv_cache.append(layer_id, key, value, self._planned.slot_mapping)
        return self._attend(query, key, value, layer_id, layer)

    def forward_unrotated(
        self,
        unrotated: Unrotated,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer = PLAIN,
    ) -> torch.Tensor:
        """Computes `forward` of queries and keys before norm and rotation, which are one kernel
        with storing.
        """
        query, key = self.kv_cache.append_rotated(layer_id, unrotated, value, self._planned.slot_mapping)
        if unrotated.table.query_scale is not None:
            query = query * unrotated.table.query_scale
        return self._attend(query, key, value, layer_id, layer)

    def choose_blocks(self, query: torch.Tensor, index_layer: int) -> torch.Tensor | None:
        """Returns which blocks of tokens each row of the step attends to, for `AttentionLayer.kept_blocks`.

        query `[T, num_kv_heads, head_dim of the indexer]`, rotary embedding applied; `index_layer` counts the
        layers that choose, whose keys of the step are in `kv_cache.index_keys` already. A block's score is
        the highest product of query and key among its tokens up to the row; the latest `local_blocks` are
        always chosen. With `shared_heads`, that many queries choose once for all heads, by the keys of whole
        blocks (`mean_block_scores`). Equal scores are chosen together, so that the way a sequence was cut
        into steps cannot decide. None: no sequence has more blocks than may be chosen.
        """
        mixer, inputs = self._choosing[index_layer], self._planned
        sizes = mixer.blocks
        assert sizes is not None
        num_blocks = -(-self._max_length // sizes.block_size)
        if num_blocks <= sizes.top_blocks:
            return None
        score, best = block_scores, best_blocks
        if sizes.shared_heads:
            score, best = mean_block_scores, best_whole_blocks
        keys = self.kv_cache.index_keys
        assert keys is not None, "the cache of this model holds the keys that layers choose by"
        (num_rows, heads, _), positions = query.shape, inputs.positions
        # A backend reads each KV head's own choice.
        num_choices = mixer.num_kv_heads if sizes.shared_heads else heads
        kept = torch.empty((num_rows, num_choices, num_blocks), dtype=torch.bool, device=query.device)
        at_once = max(1, MAX_BLOCK_SCORES // (heads * num_blocks))
        for first in range(0, num_rows, at_once):
            rows = slice(first, first + at_once)
            scores = score(
                query[rows],
                keys.pages(index_layer),
                positions[rows],
                inputs.block_table,
                inputs.query_start_loc_tensor,
                sizes.block_size,
                num_blocks,
                first,
                inputs.is_uniform_decode,
            )
            kept[rows] = best(scores, positions[rows], sizes)
        return kept

    def attend_into(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> None:
        """Computes `forward` of keys and values that are in the cache already, into contiguous `output`
        `[T, num_heads * head_dim]`.
        """
        output.copy_(self._attend(query, key, value, layer_id, layer))

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """Computes `forward` after storing."""
