"""Paged attention in plain torch: the oracle of every other backend, and what a machine without GPU runs.

Requests that compute one token share padded, masked products (one per class of similar length); each
prefill chunk gets its own. Keys are gathered by whole pages, because long contiguous rows copy fastest.
"""

from __future__ import annotations

import torch

from gpu_service.attention.base import PLAIN, AttentionBackend, AttentionLayer, check_step
from gpu_service.attention.torch_plan import Chunk, DecodeGroup, StepPlan, plan_step
from gpu_service.attention.torch_products import attend
from gpu_service.cache.fp8 import dequantise_into
from gpu_service.cache.kv_cache import KVCache
from gpu_service.engine.step import ForwardInputs
from gpu_service.model_config import ModelConfig


class TorchReferenceAttention(AttentionBackend):
    """Gather pages, then torch's scaled dot-product attention."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache) -> None:
        super().__init__(config, kv_cache)
        self._inputs: ForwardInputs | None = None
        self._table = torch.empty(0, dtype=torch.int64)
        self._plans: dict[int | None, StepPlan] = {}
        # Gathered pages of one layer, kept between calls: fresh memory of this size costs a page fault per
        # 4 KiB, which is more than the copy itself. A second one where pages must be converted, too.
        shape = (0, *kv_cache.pages(0).shape[1:])
        self._gathered = torch.empty(shape, dtype=kv_cache.storage_dtype, device=kv_cache.device)
        self._dequantised = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)

    def plan(self, inputs: ForwardInputs) -> None:
        """See the base class."""
        check_step(inputs, self.kv_cache.page_size)
        self._inputs, self._table = inputs, inputs.block_table.long()
        self._plans = {}
        self._plan_of(None)

    def _plan_of(self, window: int | None) -> StepPlan:
        """The step's plan for layers of this window, made when the first of them asks."""
        plan = self._plans.get(window)
        if plan is None:
            assert self._inputs is not None, "plan comes first"
            cache = self.kv_cache
            plan = plan_step(self._inputs, self._table, cache.page_size, cache.dtype, window)
            self._plans[window] = plan
            if self._gathered.shape[0] < plan.most_pages:
                self._gathered = self._gathered.new_empty(plan.most_pages, *self._gathered.shape[1:])
                if cache.is_quantised:
                    self._dequantised = self._dequantised.new_empty(self._gathered.shape)
        return plan

    def _gather(self, layer_id: int, pages: torch.Tensor) -> torch.Tensor:
        """Copy pages side by side, in the compute type; valid until the next gather."""
        cache, gathered = self.kv_cache.pages(layer_id), self._gathered[: pages.shape[0]]
        if not self.kv_cache.is_quantised:
            return torch.index_select(cache, 0, pages, out=gathered)
        torch.index_select(cache.view(torch.uint8), 0, pages, out=gathered.view(torch.uint8))
        dequantised = self._dequantised[: pages.shape[0]]
        scales = self.kv_cache.key_scales[layer_id], self.kv_cache.value_scales[layer_id]
        dequantise_into(dequantised, gathered, *scales)
        return dequantised

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer = PLAIN,
    ) -> torch.Tensor:
        """See the base class."""
        assert self._inputs is not None, "plan comes first"
        self.kv_cache.append(layer_id, key, value, self._inputs.slot_mapping)
        plan, sinks = self._plan_of(layer.window), layer.sinks
        if len(plan.decode_groups) == 1 and plan.decode_groups[0].rows is None:
            return self._decode(query, layer_id, plan.decode_groups[0], sinks)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in plan.decode_groups:
            assert group.rows is not None
            output.index_copy_(0, group.rows, self._decode(query[group.rows], layer_id, group, sinks))
        for chunk in plan.chunks:
            rows = slice(chunk.begin, chunk.end)
            output[rows] = self._attend_chunk(query[rows], layer_id, chunk, sinks)
        return output

    def _decode(
        self, query: torch.Tensor, layer_id: int, group: DecodeGroup, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query `[R, num_heads, D]`; the heads of a KV group stand in the place of query positions."""
        kv_heads, head_dim = self.kv_cache.num_kv_heads, query.shape[-1]
        gathered = self._gather(layer_id, group.pages)
        gathered = gathered.view(group.num_requests, -1, 2 * kv_heads, head_dim).transpose(1, 2)
        output = attend(
            query.view(group.num_requests, kv_heads, -1, head_dim),
            gathered[:, :kv_heads],
            gathered[:, kv_heads:],
            group.mask,
            self.config.softmax_scale,
            None if sinks is None else sinks.view(kv_heads, -1),
        )
        return output.reshape(group.num_requests, -1)

    def _attend_chunk(
        self, query: torch.Tensor, layer_id: int, chunk: Chunk, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query `[n, num_heads, D]`; KV heads stand in the place of the batch, so keys are not repeated."""
        kv_heads, (num_new, num_heads, head_dim) = self.kv_cache.num_kv_heads, query.shape
        groups = num_heads // kv_heads
        gathered = self._gather(layer_id, chunk.pages).view(-1, 2 * kv_heads, head_dim)[: chunk.kv_len]
        by_head = gathered.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        output = attend(
            query.view(num_new, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            by_head[:kv_heads],
            by_head[kv_heads:],
            chunk.mask,
            self.config.softmax_scale,
            None if sinks is None else sinks.view(kv_heads, groups, 1),
        )
        return output.permute(2, 0, 1, 3).reshape(num_new, -1)
