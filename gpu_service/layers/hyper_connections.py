"""Decoder layers with several residual streams; see `ops.hyper_connections`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch
from torch import nn

from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import DecoderLayer, ResidualStream
from gpu_service.layers.engram import EngramLayer
from gpu_service.layers.norm import Norm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.hyper_connections import collapse_streams, mix_streams, weigh_streams
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.layer import Layer
from moebius.models.layers.residual import HyperConnections, Sequential


class HyperConnection(nn.Module):
    """Weights of one half of a layer, float32 as they are used; attribute names are those of transformers."""

    def __init__(self, hyper: HyperConnections, eps: float, own: RankWeights) -> None:
        super().__init__()
        self._sizes, self._norm_eps = hyper, eps
        self.fn, self.base, self.scale = (own.parameter(name) for name in ("fn", "base", "scale"))

    def forward(self, stream: HyperStreams, half: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Changes the streams as a half of a layer does that turns `[T, H]` into a new `[T, H]`."""
        sizes, weights, streams = self._sizes, (self.fn, self.base, self.scale), stream.streams
        given = stream.given_weights() if sizes.lags else None
        hidden_states, post, comb, pre = collapse_streams(
            streams, *weights, self._norm_eps, sizes.eps, sizes.iterations, sizes.magnitude, given
        )
        mix_streams(half(hidden_states), streams, post, comb)
        if sizes.lags:
            stream.weights = pre


class HyperHead(nn.Module):
    """Weights of the last sum of streams, float32; attribute names are those of transformers."""

    def __init__(self, hyper: HyperConnections, eps: float, own: RankWeights) -> None:
        super().__init__()
        self._norm_eps, self._eps = eps, hyper.eps
        names = "hc_fn", "hc_base", "hc_scale"
        self.hc_fn, self.hc_base, self.hc_scale = (own.parameter(name) for name in names)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams `[T, N, H]` to `[T, H]`, weighed by sigmoids that depend on all of them."""
        return weigh_streams(streams, self.hc_fn, self.hc_base, self.hc_scale, self._norm_eps, self._eps)


class HyperStreams(ResidualStream):
    """The N streams of each token where other models have one sum; read as their mean, or weighed."""

    def __init__(self, total: torch.Tensor, num_streams: int) -> None:
        """`total` `[T, N * H]`: a token's streams, one after another; changed in place."""
        super().__init__(total)
        # Weighs the streams at their end; None: their mean is read. Filled by the backbone.
        self.head: HyperHead | None = None
        # With which the next half reads the streams, float32 `[T, N]`, where the latest one computed them.
        self.weights: torch.Tensor | None = None
        # A view: what a stage hands to the next is `sum`, their concatenation.
        self.streams = total.view(total.shape[0], num_streams, -1)

    @classmethod
    def embedded(cls, hidden_states: torch.Tensor, num_streams: int) -> Self:
        """Returns the streams of embedded tokens `[T, H]`, which are all alike."""
        return cls(hidden_states.repeat(1, num_streams), num_streams)

    def given_weights(self) -> torch.Tensor:
        """Returns with what a lagging half reads the streams, float32 `[T, N]`; the model's first half reads
        the first one.
        """
        if self.weights is None:
            tokens, num_streams = self.streams.shape[:2]
            self.weights = torch.zeros(tokens, num_streams, device=self.streams.device)
            self.weights[:, 0] = 1.0
        return self.weights

    def ended(self) -> torch.Tensor:
        """Returns what the streams end as, `[T, H]`."""
        if self.weights is not None:
            return (self.weights[..., None] * self.streams).sum(1).to(self.streams.dtype)
        return self.streams.mean(1) if self.head is None else self.head(self.streams)

    def normed(self, norm: Norm) -> torch.Tensor:
        """Returns the norm of what the streams end as, `[T, H]`."""
        output: torch.Tensor = norm(self.ended())
        return output


class HyperDecoderLayer(DecoderLayer):
    """A decoder layer each of whose halves has a hyper-connection around it."""

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        residual = layer.residual
        assert isinstance(residual, HyperConnections)
        super().__init__(replace(layer, residual=Sequential()), parts, made)
        own, eps = made.weights(residual.weights(layer.norm, made.hidden_size)), layer.norm.eps
        self.attn_hc = HyperConnection(residual, eps, own.under("attn_hc"))
        self.ffn_hc = HyperConnection(residual, eps, own.under("ffn_hc"))
        self.engram: EngramLayer | None = None
        if residual.ngrams is not None:
            self.engram = EngramLayer(residual.ngrams, eps, own.under("engram"), parts.places[-1], made)

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Changes the streams in place and returns them."""
        assert isinstance(stream, HyperStreams), "the backbone makes the streams of its layers"
        attention = self.get_submodule(self._attention_name)
        before_attention, before_mlp = self.input_layernorm, self.post_attention_layernorm
        assert before_attention is not None, "streams are read normed"
        assert before_mlp is not None
        if self.engram is not None:
            self.engram(stream.streams, context)
        self.attn_hc(stream, lambda rows: attention(before_attention(rows), rope, context))
        self.ffn_hc(stream, lambda rows: self.mlp(before_mlp(rows), context))
        return stream
