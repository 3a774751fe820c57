"""Latent attention in plain torch, and for captured decode steps a dense form that looks at tensors only."""

from __future__ import annotations

import torch

from gpu_service.attention.mla.torch_reference import TorchMlaAttention, index_scores, select_tokens
from gpu_service.attention.registry import mla_dimensions
from gpu_service.cache.kv_cache import MlaCache, PagedCache
from gpu_service.core.step import ForwardInputs
from moebius.models.layers.layer import Layers
from tests.helpers.capturable_attention import CapturableAttention


class CapturableMlaAttention(TorchMlaAttention):
    """In a captured step every request reads its whole block table, masked by its length and its choice."""

    captures = True
    _captured: ForwardInputs | None = None

    def plan(self, inputs: ForwardInputs) -> None:
        self._captured = None
        super().plan(inputs)

    def plan_capture(self, inputs: ForwardInputs) -> None:
        self._captured = self._inputs = inputs
        self.non_absorbed = False
        self.selects = self._may_select(inputs.block_table.shape[1] * self.cache.page_size)

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """Checks what a backend that plans on the host relies on."""
        assert inputs.seq_lens == inputs.seq_lens_tensor.tolist()

    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = self._captured
        if inputs is None:
            return super()._attend(query, query_rope, layer_id, selection, sinks)
        keys = _history(self.cache.pages(layer_id), inputs)
        width = keys.shape[1]
        visible = torch.arange(width, device=keys.device) < inputs.seq_lens_tensor[:, None]
        if selection is not None:
            chosen = torch.zeros(keys.shape[0], width + 1, dtype=torch.bool, device=keys.device)
            chosen.scatter_(1, selection.long() % (width + 1), True)
            visible = visible & chosen[:, :width]
        query = torch.cat((query, query_rope), dim=-1)
        scores = torch.einsum("rhd,rtd->rht", query, keys) * self.dimensions.softmax_scale
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype)[None, :, None].expand(len(scores), -1, 1)), -1)
        weights = scores.softmax(dim=-1)[..., :width]
        return torch.einsum("rht,rtd->rhd", weights, keys[..., : self.dimensions.latent_dim])

    def select(self, query: torch.Tensor, head_weights: torch.Tensor, index_layer: int) -> torch.Tensor:
        inputs, index, index_keys = self._captured, self.dimensions.index, self.cache.index_keys
        if inputs is None:
            return super().select(query, head_weights, index_layer)
        assert index is not None
        assert index_keys is not None
        keys = _history(index_keys.pages(index_layer), inputs)
        rows = [
            index_scores(query[i : i + 1], head_weights[i : i + 1], keys[i]) for i in range(query.shape[0])
        ]
        return select_tokens(torch.cat(rows), inputs.seq_lens_tensor, index.top_k)


def _history(pages: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
    """Returns all slots of each request's block table, `[R, columns * page_size, row]`."""
    return pages[inputs.block_table.long()].flatten(1, 2)


def make_capturable_attention(
    layers: Layers, cache: PagedCache, *_: object
) -> CapturableAttention | CapturableMlaAttention:
    """Returns the one that belongs to the cache; called as `gpu_service.attention.registry.make_attention`
    is.
    """
    if isinstance(cache, MlaCache):
        return CapturableMlaAttention(mla_dimensions(layers), cache)
    return CapturableAttention(layers, cache)
