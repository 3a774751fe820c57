"""Latent attention by FlashInfer.

Absorbed steps, decodes and chunks alike, take BatchMLAPagedAttention (one wrapper per captured batch size);
steps of first chunks may write keys out and take BatchPrefillWithRaggedKVCache where it has a kernel for
the head sizes. Plans and their memory are as in `attention/flashinfer_plan.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from gpu_service.attention.flashinfer_plan import (
    HALF_TYPES,
    PlanStaging,
    eager_bytes,
    host_int32,
    list_pages,
    page_bounds,
    unsupported_device,
)
from gpu_service.attention.mla.base import MlaAttentionBackend, MlaDimensions, has_only_first_chunks
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs

# The one geometry of latents that FlashInfer's kernels have: that of all published families.
LATENT_DIMS = (512, 64)
# (nope + rope, value) sizes with a ragged kernel.
NON_ABSORBED_DIMS = ((192, 128), (256, 256), (128, 128))


class FlashInferMlaAttention(MlaAttentionBackend):
    """Absorbed steps by one wrapper (and one for each captured batch size), first chunks by another."""

    captures = True

    def __init__(self, dimensions: MlaDimensions, cache: MlaCache, events: Any = None) -> None:
        super().__init__(dimensions, cache)
        import flashinfer

        self._library: Any = flashinfer
        heads, expanded = dimensions.num_heads, dimensions.nope_dim + dimensions.rope_dim
        self._staging = PlanStaging(cache.device, eager_bytes(heads, heads, expanded, cache.device), events)
        self._indices = torch.zeros(1, dtype=torch.int32, device=cache.device)
        results = self._staging.results
        self._absorbed = self._staging.adopt(flashinfer.mla.BatchMLAPagedAttentionWrapper(results))
        self._ragged = self._staging.adopt(
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(results, "NHD", backend="fa2")
        )
        self._captured: dict[int, Any] = {}
        self._wrapper: Any = None

    @classmethod
    def unsupported(cls, dimensions: MlaDimensions, cache: MlaCache) -> str:
        sizes = dimensions.latent_dim, dimensions.rope_dim
        if dimensions.index is not None:
            return "FlashInfer's latent attention reads all tokens, and this model attends to selected ones"
        if dimensions.has_sinks:
            return "this model has attention sinks, which FlashInfer's latent attention does not know"
        if cache.dtype not in HALF_TYPES:
            return f"FlashInfer computes in float16 and bfloat16, not in {cache.dtype}"
        if cache.is_quantised:
            return f"FlashInfer's latent attention is not used with pages of {cache.storage_dtype}"
        if sizes != LATENT_DIMS:
            return f"FlashInfer has kernels for latents of {LATENT_DIMS} elements, not {sizes}"
        return unsupported_device(cache.device) or _unsupported_interface()

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.cache.page_size)
        self._inputs = inputs
        num_pages = sum(-(-length // self.cache.page_size) for length in inputs.seq_lens)
        if self._indices.shape[0] < num_pages:
            self._indices = self._indices.new_empty(2 * num_pages)
        sizes = self.dimensions.nope_dim + self.dimensions.rope_dim, self.dimensions.value_dim
        self.non_absorbed = has_only_first_chunks(inputs) and sizes in NON_ABSORBED_DIMS
        if self.non_absorbed:
            self._plan_ragged(inputs)
        else:
            self._plan_absorbed(self._absorbed, inputs, self._indices)

    def plan_capture(self, inputs: ForwardInputs) -> None:
        inputs.check(self.cache.page_size)
        num_requests = len(inputs.seq_lens)
        if num_requests not in self._captured:
            self._captured[num_requests] = self._new_captured(num_requests, inputs.block_table.shape[1])
        self._inputs, self.non_absorbed = inputs, False
        self.plan_replay(inputs)

    def plan_replay(self, inputs: ForwardInputs) -> None:
        wrapper = self._captured.get(len(inputs.seq_lens))
        if wrapper is None:
            raise ValueError(
                f"no step of {len(inputs.seq_lens)} requests was captured; captured: {sorted(self._captured)}"
            )
        self._plan_absorbed(wrapper, inputs, wrapper._kv_indices_buf)

    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Raises ValueError for a step that was planned for `forward_non_absorbed`."""
        if selection is not None or sinks is not None:
            raise NotImplementedError("FlashInferMlaAttention has neither selected tokens nor sinks")
        if self._wrapper is self._ragged:
            raise ValueError("this step was planned for forward_non_absorbed: `non_absorbed` is True")
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        pages = self.cache.latents(layer_id), self.cache.rotated(layer_id)
        self._wrapper.run(query, query_rope, *pages, out=output)
        return output

    def _attend_first_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        self._ragged.run(query, key, value, out=output)
        return output

    def _new_captured(self, num_requests: int, max_pages: int) -> Any:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.cache.device)

        return self._staging.adopt(
            self._library.mla.BatchMLAPagedAttentionWrapper(
                self._staging.results,
                use_cuda_graph=True,
                qo_indptr=buffer(num_requests + 1),
                kv_indptr=buffer(num_requests + 1),
                kv_indices=buffer(num_requests * max_pages),
                kv_len_arr=buffer(num_requests),
            )
        )

    def _plan_absorbed(self, wrapper: Any, inputs: ForwardInputs, indices: torch.Tensor) -> None:
        cache, sizes = self.cache, self.dimensions
        bounds = page_bounds(inputs.seq_lens, cache.page_size, cache.device)
        list_pages(inputs.block_table, inputs.seq_lens_tensor, indices, cache.page_size)
        self._staging.plan(
            wrapper,
            wrapper.plan,
            host_int32(inputs.query_start_loc, cache.device),
            bounds.indptr,
            indices[: bounds.num_pages],
            host_int32(inputs.seq_lens, cache.device),
            sizes.num_heads,
            sizes.latent_dim,
            sizes.rope_dim,
            cache.page_size,
            any(end - begin > 1 for begin, end in pairwise(inputs.query_start_loc)),
            sizes.softmax_scale,
            cache.dtype,
            cache.storage_dtype,
        )
        self._wrapper = wrapper

    def _plan_ragged(self, inputs: ForwardInputs) -> None:
        starts, sizes = host_int32(inputs.query_start_loc, self.cache.device), self.dimensions
        self._staging.plan(
            self._ragged,
            self._ragged.plan,
            starts,
            starts,
            sizes.num_heads,
            sizes.num_heads,
            sizes.nope_dim + sizes.rope_dim,
            sizes.value_dim,
            causal=True,
            sm_scale=sizes.softmax_scale,
            q_data_type=self.cache.dtype,
            kv_data_type=self.cache.dtype,
        )
        self._wrapper = self._ragged


def _unsupported_interface() -> str:
    import flashinfer

    if hasattr(flashinfer.mla, "MLAPlanMetadata"):
        return "this FlashInfer plans latent attention in the way of 0.7; supported: flashinfer-python 0.6.13"
    return ""
