"""Latent attention on a CPU by the kernels of `kernels/dense`.

Single tokens and chunks of a few (draft tokens) read latents where they lie, in blocks with a running softmax
(Dao et al. 2022, arXiv:2205.14135); nothing is gathered. Longer chunks are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.attention.cpu_backend import AttendingRows, HostAttention, LoneRow, divide_rows
from gpu_service.attention.mla.base import MlaDimensions
from gpu_service.attention.mla.torch_reference import TorchMlaAttention
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.host_kernels import dense_threads


class CpuMlaAttention(TorchMlaAttention, HostAttention):
    """Latents as they are stored, in the activations' float32 or bfloat16 or as e4m3, attended to by all
    tokens after them.
    """

    def __init__(self, dimensions: MlaDimensions, cache: MlaCache) -> None:
        super().__init__(dimensions, cache)
        self.threads = dense_threads(torch.get_num_threads())
        # Of the planned step: rows that are computed one by one, and requests whose rows are not.
        self._lone: list[LoneRow] = []
        self._prompts: list[int] = []
        self._rows: AttendingRows | None = None  # What the former see; made once.

    @classmethod
    def unsupported(cls, dimensions: MlaDimensions, cache: MlaCache) -> str:
        """Returns the reason, as `MlaAttentionBackend.unsupported`."""
        if cache.dtype not in (torch.float32, torch.bfloat16):
            return f"activations are {cache.dtype}; allowed: float32, bfloat16"
        if dimensions.index is not None:
            return "an indexer chooses which tokens are attended to"
        sizes = dimensions.latent_dim, dimensions.rope_dim
        if any(size % 16 for size in sizes):
            return f"latents have {sizes[0]} + {sizes[1]} elements; allowed: multiples of 16"
        return ""

    @property
    def paged_cache(self) -> MlaCache:
        """Returns the latents."""
        return self.cache

    def plan(self, inputs: ForwardInputs) -> None:
        self._lone, self._prompts = divide_rows(inputs)
        self._rows = None
        super().plan(inputs)

    def lone_rows(self, window: int | None, chunk: int | None) -> AttendingRows | None:
        """Returns the rows as `HostAttention`; layers of this kind have no window and no chunk."""
        if self._prompts or self.non_absorbed:
            return None
        return self._attending_rows()

    def _gathered(self, inputs: ForwardInputs) -> Sequence[int]:
        return self._prompts

    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._prompts:
            return self._attend_rows(query, query_rope, layer_id, sinks)
        output = super()._attend(query, query_rope, layer_id, selection, sinks)
        if self._lone:
            index = torch.tensor([lone.row for lone in self._lone])
            output[index] = self._attend_rows(query[index], query_rope[index], layer_id, sinks)
        return output

    def _attend_rows(
        self, query: torch.Tensor, query_rope: torch.Tensor, layer_id: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes the lone rows; arguments and result as `forward`'s."""
        sizes, pages, rows = self.dimensions, self.cache.pages(layer_id), self._attending_rows()
        dtype, (is_float8, page_scale, _) = self.cache.dtype, self.cache.host_storage(layer_id)
        query = query.to(dtype).contiguous()
        query_rope = query_rope.to(dtype)
        if query_rope.stride(2) != 1:
            query_rope = query_rope.contiguous()
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        output, table = torch.empty_like(query), self._planned.block_table
        self.threads.attend_latents(
            dtype == torch.bfloat16,
            query.data_ptr(),
            query_rope.data_ptr(),
            query_rope.stride(0),
            query_rope.stride(1),
            pages.data_ptr(),
            self.cache.page_size,
            table.data_ptr(),
            table.stride(0),
            rows.requests.data_ptr(),
            rows.ends.data_ptr(),
            0 if wide_sinks is None else wide_sinks.data_ptr(),
            output.data_ptr(),
            sizes.softmax_scale,
            query.shape[0],
            query.shape[1],
            sizes.latent_dim,
            sizes.rope_dim,
            is_float8,
            page_scale,
        )
        return output

    def _attending_rows(self) -> AttendingRows:
        if self._rows is None:
            columns = [(lone.request, 0, lone.position + 1) for lone in self._lone]
            self._rows = AttendingRows(*torch.tensor(columns, dtype=torch.int32).t().contiguous())
        return self._rows
