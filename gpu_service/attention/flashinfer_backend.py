"""Grouped-query attention by FlashInfer.

| step | wrapper | captured |
|---|---|---|
| few requests, one token each, of layers that `fused_decode.py` knows | none | yes |
| every request computes one token | BatchDecodeWithPagedKVCache | yes, one wrapper per batch size |
| first chunks only, pages hold what is computed in | BatchPrefillWithRaggedKVCache, reads no page | no |
| anything else | BatchPrefillWithPagedKVCache, every request a chunk | no |

Plans are made from host lists; the page list is made on the device. How they survive overlap scheduling:
`flashinfer_plan.py`. With 8-bit pages first chunks read the pages too, so that a prompt's answer does not
depend on how it was cut into chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from gpu_service.attention.base import AttentionLayer, grouped_queries
from gpu_service.attention.flashinfer_plan import (
    CHUNK_KERNELS,
    DECODE_KERNELS,
    SCALAR_GROUPS,
    PageBounds,
    PlanStaging,
    captured_bytes,
    eager_bytes,
    host_int32,
    list_pages,
    page_bounds,
    unsupported_device,
    unsupported_layers,
    unsupported_types,
)
from gpu_service.attention.fused_decode import FusedDecodeAttention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from moebius.models.layers.layer import Layers


class FlashInferAttention(FusedDecodeAttention):
    """One FlashInfer wrapper for each kind of step, as in the table above.

    `deterministic` keeps every request's keys in one piece; `chunk_kernels` is "fa2" or "fa3" (Hopper);
    `events` makes what `torch.cuda.Event` makes, for tests.
    """

    captures = True

    def __init__(
        self,
        layers: Layers,
        kv_cache: KVCache,
        deterministic: bool = False,
        chunk_kernels: str = CHUNK_KERNELS,
        events: Any = None,
    ) -> None:
        super().__init__(layers, kv_cache)
        import flashinfer

        self._library: Any = flashinfer
        # Kernels for Hopper never split keys and know no such option.
        self._pieces = {"disable_split_kv": deterministic} if chunk_kernels == "fa2" else {}
        self._deterministic = deterministic
        # All layers are alike.
        mixer = self.mixers[0]
        self._scale, self._group = mixer.scale, mixer.num_heads // mixer.num_kv_heads
        self._sizes = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        self._staging = PlanStaging(kv_cache.device, eager_bytes(*self._sizes, kv_cache.device), events)
        self._indices = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
        results = self._staging.results
        self._decode = self._adopt(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                results, "NHD", use_tensor_cores=self._tensor_cores, backend=DECODE_KERNELS
            )
        )
        self._paged = self._adopt(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(results, "NHD", backend=chunk_kernels)
        )
        self._ragged = self._adopt(
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(results, "NHD", backend=chunk_kernels)
        )
        self._captured: dict[int, Any] = {}
        # Wrappers that a step has run: a graph without them needs no plan.
        self._run: set[Any] = set()
        self._wrapper: Any = None  # the one the last plan chose

    @classmethod
    def unsupported(cls, layers: Layers, kv_cache: KVCache) -> str:
        mixers = grouped_queries(layers)
        return (
            unsupported_layers(mixers)
            or unsupported_types(kv_cache.dtype, mixers[0].head_dim)
            or unsupported_device(kv_cache.device)
        )

    @property
    def _tensor_cores(self) -> bool:
        return self._group not in SCALAR_GROUPS

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.kv_cache.page_size)
        self._inputs = inputs
        if not inputs.is_uniform_decode and self._is_first_chunks(inputs):
            self._plan_ragged(inputs)
            return
        bounds = page_bounds(inputs.seq_lens, self.kv_cache.page_size, self.kv_cache.device)
        if self._indices.shape[0] < bounds.num_pages:
            self._indices = self._indices.new_empty(2 * bounds.num_pages)
        if inputs.is_uniform_decode:
            self._plan_decode(self._decode, inputs, bounds, self._indices)
        else:
            self._plan_paged(inputs, bounds)

    def plan_capture(self, inputs: ForwardInputs) -> None:
        inputs.check(self.kv_cache.page_size)
        num_requests = len(inputs.seq_lens)
        wrapper = self._captured.get(num_requests)
        if wrapper is None:
            wrapper = self._new_captured(num_requests, inputs.block_table.shape[1])
            self._captured[num_requests] = wrapper
        self._inputs = inputs
        bounds = page_bounds(inputs.seq_lens, self.kv_cache.page_size, self.kv_cache.device)
        self._plan_decode(wrapper, inputs, bounds, wrapper._paged_kv_indices_buf)

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """What the graph reads of pages is written on the device; the rest of the plan is FlashInfer's own
        shorter way for a wrapper that was planned before: no copies of indices, nothing asked of the device.
        """
        wrapper = self._captured.get(len(inputs.seq_lens))
        if wrapper is None:
            raise ValueError(
                f"no step of {len(inputs.seq_lens)} requests was captured; captured: {sorted(self._captured)}"
            )
        if wrapper not in self._run:
            return
        page_size = self.kv_cache.page_size
        bounds = page_bounds(inputs.seq_lens, page_size, self.kv_cache.device, pinned=False)
        indices = wrapper._paged_kv_indices_buf
        list_pages(
            inputs.block_table,
            inputs.seq_lens_tensor,
            indices,
            page_size,
            (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf),
        )
        self._staging.plan(
            wrapper,
            self._library.decode.fast_decode_plan,
            wrapper,
            *self._decode_arguments(bounds, indices),
            global_override_indptr_cpu=bounds.indptr,
            **self._decode_options(),
        )
        self._wrapper = wrapper

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.attend_into(output, query, key, value, layer_id, layer)
        return output.view(query.shape[0], -1)

    def attend_into(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> None:
        """Layers are all alike here; `unsupported` refuses models where they differ."""
        cache = self.kv_cache
        key_scale, value_scale = cache.key_scales[layer_id], cache.value_scales[layer_id]
        output = output.view(query.shape)
        self._run.add(self._wrapper)
        if self._wrapper is self._ragged:
            self._ragged.run(query, key, value, out=output)
        else:
            pages = (cache.keys(layer_id), cache.values(layer_id))
            scales: dict[str, float] = {}
            if cache.is_quantised:
                scales = {"k_scale": key_scale, "v_scale": value_scale}
            self._wrapper.run(query, pages, out=output, **scales)

    def _is_first_chunks(self, inputs: ForwardInputs) -> bool:
        starts = inputs.query_start_loc
        new = (end - begin for begin, end in pairwise(starts))
        return not self.kv_cache.is_quantised and list(new) == inputs.seq_lens

    def _new_captured(self, num_requests: int, max_pages: int) -> Any:
        """Returns a decode wrapper for batches of this size; its buffers keep their memory, as a
        graph needs.
        """
        device = self.kv_cache.device

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._staging.reserve(captured_bytes(num_requests, *self._sizes))
        return self._adopt(
            self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._staging.results,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=buffer(num_requests + 1),
                paged_kv_indices_buffer=buffer(num_requests * max_pages),
                paged_kv_last_page_len_buffer=buffer(num_requests),
                backend=DECODE_KERNELS,
            )
        )

    def _adopt(self, wrapper: Any) -> Any:
        return self._staging.adopt(wrapper)

    def _plan_decode(
        self, wrapper: Any, inputs: ForwardInputs, bounds: PageBounds, indices: torch.Tensor
    ) -> None:
        self._list_pages(inputs, indices)
        arguments = self._decode_arguments(bounds, indices)
        self._staging.plan(wrapper, wrapper.plan, *arguments, **self._decode_options())
        self._wrapper = wrapper

    def _decode_arguments(self, bounds: PageBounds, indices: torch.Tensor) -> tuple[Any, ...]:
        pages = (bounds.indptr, indices[: bounds.num_pages], bounds.last_page_len)
        return (*pages, *self._sizes, self.kv_cache.page_size)

    def _decode_options(self) -> dict[str, Any]:
        options = self._types()
        if self._tensor_cores:
            options["disable_split_kv"] = self._deterministic
        return options

    def _plan_paged(self, inputs: ForwardInputs, bounds: PageBounds) -> None:
        self._list_pages(inputs, self._indices)
        self._staging.plan(
            self._paged,
            self._paged.plan,
            host_int32(inputs.query_start_loc, self.kv_cache.device),
            bounds.indptr,
            self._indices[: bounds.num_pages],
            bounds.last_page_len,
            *self._sizes,
            self.kv_cache.page_size,
            causal=True,
            **self._pieces,
            **self._types(),
        )
        self._wrapper = self._paged

    def _plan_ragged(self, inputs: ForwardInputs) -> None:
        starts = host_int32(inputs.query_start_loc, self.kv_cache.device)
        self._staging.plan(
            self._ragged,
            self._ragged.plan,
            starts,
            starts,
            *self._sizes,
            causal=True,
            **self._pieces,
            **self._types(),
        )
        self._wrapper = self._ragged

    def _list_pages(self, inputs: ForwardInputs, indices: torch.Tensor) -> None:
        list_pages(inputs.block_table, inputs.seq_lens_tensor, indices, self.kv_cache.page_size)

    def _types(self) -> dict[str, Any]:
        cache = self.kv_cache
        return {
            "q_data_type": cache.dtype,
            "kv_data_type": cache.storage_dtype,
            "sm_scale": self._scale,
        }
