"""The Triton backend of latent attention: nothing planned on the host, any step captured."""

from __future__ import annotations

import torch

from gpu_service.attention.mla.base import MlaAttentionBackend, MlaDimensions
from gpu_service.attention.mla.triton_kernels import MAX_SCORES, choose_tokens, mla_attention, mla_tile
from gpu_service.attention.triton_kernels import MIN_SPLIT
from gpu_service.attention.triton_tiles import Partial, PartialResults, num_splits, streaming_multiprocessors
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs


class TritonMlaAttention(MlaAttentionBackend):
    """Indices are read from the step's device tensors. First chunks take torch's attention, head by head."""

    captures = True

    def __init__(self, dimensions: MlaDimensions, cache: MlaCache, min_split: int = MIN_SPLIT) -> None:
        super().__init__(dimensions, cache)
        self._min_split = min_split
        self._num_sms = streaming_multiprocessors(cache.device)
        self._longest = 1
        self._partial: Partial | None = None
        self._tile = mla_tile(cache.dtype, 1, dimensions.num_heads, self._num_sms)
        # Programs with more heads than these have no splits.
        heads = min(dimensions.num_heads, self._tile.rows)
        # One for all layers: in stream order, no two use it at a time.
        num_scores = 0 if dimensions.index is None else MAX_SCORES
        self._scores = torch.empty(num_scores, dtype=torch.float32, device=cache.device)
        self._partials = PartialResults(heads, dimensions.latent_dim, cache.device)

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.cache.page_size)
        self._prepare(inputs, max(inputs.seq_lens, default=1))
        self.non_absorbed = self._writes_keys_out(inputs)

    def plan_capture(self, inputs: ForwardInputs) -> None:
        """Splits are chosen for the longest sequence that the block table can hold."""
        inputs.check(self.cache.page_size)
        self._prepare(inputs, inputs.block_table.shape[1] * self.cache.page_size)
        self.non_absorbed = False

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """The recorded kernels find all they need in the refilled tensors."""

    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs, scale = self._planned, self.cache.scales[layer_id]
        return mla_attention(
            query,
            query_rope,
            self.cache.pages(layer_id),
            self._partial,
            inputs.block_table,
            inputs.seq_lens_tensor,
            inputs.query_start_loc_tensor,
            self.dimensions.softmax_scale * scale,
            scale,
            self._tile,
            self._min_split,
            selection,
            sinks,
        )

    def select(self, query: torch.Tensor, head_weights: torch.Tensor, index_layer: int) -> torch.Tensor:
        index, keys, inputs = self.dimensions.index, self.cache.index_keys, self._planned
        assert index is not None, "asked only where `selects`"
        assert keys is not None, "the cache of this model holds the indexer's keys"
        return choose_tokens(
            query,
            head_weights,
            keys.pages(index_layer),
            inputs.block_table,
            inputs.seq_lens_tensor,
            inputs.query_start_loc_tensor,
            self._longest,
            index,
            self._scores,
        )

    def _prepare(self, inputs: ForwardInputs, max_length: int) -> None:
        self._inputs, self._longest = inputs, max_length
        self.selects = self._may_select(max_length)
        if self.selects:
            assert self.dimensions.index is not None
            max_length = self.dimensions.index.selected
        num_rows, heads = inputs.query_start_loc[-1], self.dimensions.num_heads
        self._tile = mla_tile(self.cache.dtype, num_rows, heads, self._num_sms)
        blocks = -(-heads // self._tile.rows)
        splits = num_splits(num_rows, blocks, max_length, self._min_split, self._num_sms)
        self._partial = self._partials.take(num_rows, heads, splits)
