"""The torch reference, and for captured decode steps a dense form that looks at tensors only."""

from __future__ import annotations

import torch

from gpu_service.attention.base import AttentionLayer
from gpu_service.attention.torch_reference import TorchReferenceAttention, block_mask
from gpu_service.core.step import ForwardInputs


class CapturableAttention(TorchReferenceAttention):
    """In a captured step every request attends to its whole block table, masked by its length."""

    captures = True
    _captured: ForwardInputs | None = None

    def plan(self, inputs: ForwardInputs) -> None:
        self._captured = None
        super().plan(inputs)

    def plan_capture(self, inputs: ForwardInputs) -> None:
        self._captured = self._inputs = inputs
        self._max_length = inputs.block_table.shape[1] * self.kv_cache.page_size

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """Checks what a backend that plans on the host relies on."""
        assert inputs.seq_lens == inputs.seq_lens_tensor.tolist()
        assert inputs.query_start_loc == inputs.query_start_loc_tensor.tolist()
        assert all(length >= 1 for length in inputs.seq_lens)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        inputs = self._captured
        if inputs is None:
            return super()._attend(query, key, value, layer_id, layer)
        kv_heads, (rows, heads, head_dim) = self.kv_cache.kv_heads(layer_id), query.shape
        history = self.kv_cache.pages(layer_id)[inputs.block_table.long()]
        history = history.reshape(rows, -1, 2 * kv_heads, head_dim)
        keys, values = history[:, :, :kv_heads], history[:, :, kv_heads:]
        grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("rkgd,rtkd->rkgt", grouped, keys) * self.mixers[layer_id].scale
        positions = torch.arange(history.shape[1], device=query.device)
        lengths = inputs.seq_lens_tensor[:, None]
        hidden = positions >= lengths
        if layer.window is not None:
            hidden = hidden | (positions < lengths - layer.window)
        if layer.chunk is not None:
            hidden = hidden | (positions < (lengths - 1) // layer.chunk * layer.chunk)
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        if layer.kept_blocks is not None:
            scores = scores + block_mask(layer, history.shape[1], scores.dtype)[:, :, None]
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, kv_heads, -1, 1).expand(rows, -1, -1, -1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : history.shape[1]]
        return torch.einsum("rkgt,rtkd->rkgd", weights, values).reshape(rows, -1)
