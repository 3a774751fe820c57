"""The Triton attention backend: runs wherever Triton compiles, with nothing planned on the host."""

from __future__ import annotations

from itertools import pairwise

import torch

from gpu_service.attention.base import AttentionLayer
from gpu_service.attention.fused_decode import FusedDecodeAttention
from gpu_service.attention.triton_kernels import MIN_SPLIT, decode, prefill
from gpu_service.attention.triton_tiles import Partial, PartialResults, num_splits, streaming_multiprocessors
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from moebius.models.layers.layer import Layers


class TritonAttention(FusedDecodeAttention):
    """Requests of one token take the split kernel, chunks the tiled one; a mixed step launches both.

    All indices are read from the step's device tensors, so a plan only counts and a captured step needs no
    plan before its replay.
    """

    captures = True

    def __init__(self, layers: Layers, kv_cache: KVCache, min_split: int = MIN_SPLIT) -> None:
        super().__init__(layers, kv_cache)
        self._min_split = min_split
        self._num_sms = streaming_multiprocessors(kv_cache.device)
        # Of the step, by window, query heads, KV heads and elements of a head.
        self._partial: dict[tuple[int | None, int, int, int], Partial | None] = {}
        self._has_decodes = self._has_chunks = False
        group = max(mixer.num_heads // mixer.num_kv_heads for mixer in self.mixers)
        head_dim = max(mixer.head_dim for mixer in self.mixers)
        self._partials = PartialResults(group, head_dim, kv_cache.device)

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.kv_cache.page_size)
        self._prepare(inputs, max(inputs.seq_lens, default=1))

    def plan_capture(self, inputs: ForwardInputs) -> None:
        """Splits are chosen for the longest sequence that the block table can hold."""
        inputs.check(self.kv_cache.page_size)
        self._prepare(inputs, inputs.block_table.shape[1] * self.kv_cache.page_size)

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """The recorded kernels find all they need in the refilled tensors."""

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        inputs, cache = self._planned, self.kv_cache
        key_scale, value_scale = cache.key_scales[layer_id], cache.value_scales[layer_id]
        pages, output = (
            cache.pages(layer_id),
            torch.empty(query.shape, dtype=query.dtype, device=query.device),
        )
        score_scale = self.mixers[layer_id].scale * key_scale
        indices = (inputs.block_table, inputs.seq_lens_tensor, inputs.query_start_loc_tensor)
        if self._has_decodes:
            # A chunk holds no more keys than it is long.
            kind = layer.window or layer.chunk, query.shape[1], cache.kv_heads(layer_id), query.shape[2]
            partial, scales = self._partial_of(*kind), (score_scale, value_scale)
            decode(query, pages, output, partial, *indices, *scales, min_split=self._min_split, layer=layer)
        if self._has_chunks:
            ahead = None if layer.window is None else inputs.visible_ends
            prefill(query, pages, output, *indices, score_scale, value_scale, layer=layer, visible_ends=ahead)
        return output.view(query.shape[0], -1)

    def _prepare(self, inputs: ForwardInputs, max_length: int) -> None:
        starts = inputs.query_start_loc
        counts = [end - begin for begin, end in pairwise(starts)]
        self._inputs = inputs
        self._has_decodes = 1 in counts
        self._has_chunks = any(count > 1 for count in counts)
        self._max_length, self._partial = max_length, {}

    def _partial_of(self, window: int | None, num_heads: int, kv_heads: int, head_dim: int) -> Partial | None:
        """Where the step's splits of layers of a kind leave their results; one after the other."""
        kind = window, num_heads, kv_heads, head_dim
        if kind in self._partial:
            return self._partial[kind]
        num_requests = len(self._planned.seq_lens)
        length = self._max_length if window is None else min(self._max_length, window)
        splits = num_splits(num_requests, kv_heads, length, self._min_split, self._num_sms)
        partial = self._partials.take(num_requests, num_heads, splits, head_dim)
        self._partial[kind] = partial
        return partial
