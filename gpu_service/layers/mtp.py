"""A layer of multi-token prediction: a decoder layer that looks one token ahead (arXiv:2412.19437, 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import DecoderLayer, ResidualStream
from gpu_service.layers.linear import Linear
from gpu_service.layers.norm import Norm, make_norm
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.layer import Layer
from moebius.models.layers.residual import NextToken


class MtpLayer(DecoderLayer):
    """`layer(eh_proj(cat(enorm(embedding), hnorm(hidden state))))`, normed at its end.

    The projection is whole on every rank of a group, so that all begin with the same stream. Names are the
    checkpoint's, but for the embedding and the head, which are the model's own.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        residual = layer.residual
        assert isinstance(residual, NextToken)
        super().__init__(replace(layer, residual=residual.inner), parts, made)
        own = made.weights(residual.own_weights(layer.norm, made.hidden_size))
        self.enorm = make_norm(layer.norm, own.under("enorm"))
        self.hnorm = make_norm(layer.norm, own.under("hnorm"))
        self.eh_proj = Linear(own.under("eh_proj"))
        self.shared_head = nn.ModuleDict({"norm": make_norm(layer.norm, own.under("shared_head.norm"))})
        self._hidden_first = residual.hidden_first

    def predict(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        next_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        rope: RopeTable | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Returns what the head reads, `[T, H]`, of hidden states and the ids after them, int64 `[T]`;
        `embed`: the model's embedding.
        """
        parts = [self.enorm(embed(next_ids)), self.hnorm(hidden_states)]
        projected: torch.Tensor = self.eh_proj(
            torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1)
        )
        norm = self.shared_head["norm"]
        assert isinstance(norm, Norm)
        stream: ResidualStream = self(ResidualStream(projected), rope, context)
        return stream.normed(norm)

    def best_ids(
        self, hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the likeliest ids int64 `[L]` by `[L, H]` that `predict` returned, by the model's head."""
        return compute_logits(hidden_states).argmax(-1)
