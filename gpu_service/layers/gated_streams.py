"""Decoder layers with gated residual streams, and embeddings of n-grams that some of them add; see
`ops.gated_streams` and `ops.ngrams`. Every rank has all of both, but for the tables of n-grams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import ResidualStream
from gpu_service.layers.hyper_connections import HyperStreams
from gpu_service.layers.linear import Linear
from gpu_service.layers.ngrams import HashedNGrams, NGramRows
from gpu_service.layers.norm import OnePlusWeightRMSNorm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.layers.states import ConvTaps, LayerStates, StepSequences
from gpu_service.ops.gated_streams import gate_values, inject_update, mix_gated_streams, norm_streams
from gpu_service.ops.ngrams import ngram_table
from gpu_service.ops.rope import RopeTable
from moebius.models.layers import residual as specs
from moebius.models.layers.layer import Layer, Places
from moebius.models.layers.ngrams import NGramConfig, NGrams


class StreamNorm(OnePlusWeightRMSNorm):
    """The norm of each residual stream by itself; the weights of all streams are one `[N * H]`."""

    def __init__(self, own: RankWeights, eps: float, num_streams: int) -> None:
        super().__init__(own, eps)
        self._num_streams = num_streams

    @property
    def by_stream(self) -> torch.Tensor:
        """View `[N, H]` of the weights."""
        return self.weight.view(self._num_streams, -1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Streams `[T, N, H]` to new ones."""
        return norm_streams(hidden_states, self.by_stream, self.eps)


class StreamMixer(nn.Module):
    """What the streams are read as, at the end of a model; attribute names are those of transformers."""

    def __init__(self, hyper: specs.GatedStreams, eps: float, own: RankWeights) -> None:
        super().__init__()
        self._rank, self._num_streams = hyper.rank, hyper.num_streams
        self.hc_norm = StreamNorm(own.under("hc_norm"), eps, hyper.num_streams)
        self.down = Linear(own.under("down"))
        self.input_mix_weight_up = Linear(own.under("input_mix_weight_up"))

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams `[T, N, H]` to `[T, H]`, and `[T, N]` (or nothing) for `inject_update`."""
        normed = self.hc_norm(streams)
        narrow = self.down(normed.flatten(1))
        mix = self.input_mix_weight_up(functional.silu(narrow[:, : self._rank] / self._num_streams))
        return mix_gated_streams(mix, normed), narrow[:, self._rank :]


class StreamConnection(StreamMixer):
    """Around one half of a layer."""

    def around(self, streams: torch.Tensor, half: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Streams `[T, N, H]` after a half of a layer that turns `[T, H]` into a new `[T, H]`; in place."""
        hidden_states, inject = self(streams)
        inject_update(half(hidden_states), streams, inject)


class GatedStreams(HyperStreams):
    """Streams that the model's last norm, a `StreamMixer`, reads together."""

    def mixed(self, mixer: StreamMixer) -> torch.Tensor:
        """Returns what the streams end as, `[T, H]`."""
        output: torch.Tensor = mixer(self.streams)[0]
        return output


class NGramEmbedding(HashedNGrams):
    """A token's rows of the table, one after another. Its factors follow from config.json."""

    def __init__(self, spec: NGrams, own: RankWeights, places: Places, made: Composition) -> None:
        super().__init__(spec.sizes, places, made.device)
        self._table = ngram_table(spec.sizes, spec.place, made.vocab_size, "cpu")
        self._end = spec.sizes.end_token_id
        first_row = spec.table_part(made.parallel.tp_rank, made.parallel.tp_size).begin
        self.ngram_embedding = NGramRows(own.under("ngram_embedding"), first_row, made)

    @property
    def table(self) -> NGramRows:
        return self.ngram_embedding


class NGramLayer(nn.Module):
    """Adds embedded n-grams to every stream, gated by the stream, and a convolution of them over time."""

    def __init__(self, spec: NGrams, eps: float, own: RankWeights, places: Places, made: Composition) -> None:
        """`eps` is that of the norms."""
        super().__init__()
        assert places.state is not None
        self._state, self._sequences = places.state, made.shared(StepSequences)
        self._hidden_size, num_streams = made.hidden_size, spec.stream_size // made.hidden_size
        self.ple_embedding = NGramEmbedding(spec, own.under("ple_embedding"), places, made)
        self.kv_proj = Linear(own.under("kv_proj"))
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamNorm(own.under(name), eps, num_streams) for name in ("norm_key", "norm_query", "norm_conv")
        )
        self.conv1d = SpreadTaps(own.under("conv1d"), spec.sizes)

    def forward(self, streams: torch.Tensor, context: ForwardContext) -> None:
        """Streams `[T, N, H]` are added to in place; the states after the step are in its slots. The step has
        called `begin` of what is embedded.
        """
        inputs, states = context.inputs, context.states
        assert states is not None, "a model that embeds n-grams needs states"
        tokens, recent = states.of(self._state)
        embedded = self.ple_embedding.embedded(context)
        keys, values = self.kv_proj(embedded).split((streams[0].numel(), self._hidden_size), dim=1)
        weights = self.norm_key.by_stream, self.norm_query.by_stream
        gated = gate_values(keys.reshape(streams.shape), streams, values, *weights, self.norm_key.eps)
        rows: torch.Tensor = self.norm_conv(gated).flatten(1)
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        slots = inputs.state_reads, inputs.state_writes
        sequences = None if inputs.is_uniform_decode else self._sequences.of(inputs)
        own = LayerStates(recent, tokens, slots, sequences, inputs.depths)
        convolved = own.convolve(rows, self.conv1d)
        streams.add_(gated).add_(convolved.view(streams.shape))


class SpreadTaps(ConvTaps):
    """Taps of a convolution over every `size`-th token, as one over all with zeros in between."""

    def __init__(self, own: RankWeights, sizes: NGramConfig) -> None:
        super().__init__(own)
        self._sizes = sizes

    def pack(self) -> None:
        """Puts the zeros in; the loader calls it once."""
        stored = self.weight
        spread = stored.new_zeros(*stored.shape[:2], self._sizes.conv_width)
        spread[..., :: self._sizes.size] = stored
        self.weight = nn.Parameter(spread, requires_grad=False)


class GatedStreamLayer(nn.Module):
    """A decoder layer each of whose halves reads all streams and adds to all; no other norms.

    The attention's name is the checkpoint's.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        residual, eps = layer.residual, layer.norm.eps
        assert isinstance(residual, specs.GatedStreams)
        assert layer.mixer is not None
        own = made.weights(residual.weights(layer.norm, made.hidden_size))
        attention, self.mlp = parts.both()
        self._attention_name = layer.mixer.name
        self.ple: NGramLayer | None = None
        if residual.ngrams is not None:
            self.ple = NGramLayer(residual.ngrams, eps, own.under("ple"), parts.places[-1], made)
        self.attn_hyper_connection = StreamConnection(residual, eps, own.under("attn_hyper_connection"))
        self.add_module(self._attention_name, attention)
        self.mlp_hyper_connection = StreamConnection(residual, eps, own.under("mlp_hyper_connection"))

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Changes the streams in place and returns them."""
        assert isinstance(stream, GatedStreams), "the backbone makes the streams of its layers"
        streams, attention = stream.streams, self.get_submodule(self._attention_name)
        if self.ple is not None:
            self.ple(streams, context)
        self.attn_hyper_connection.around(streams, lambda rows: attention(rows, rope, context))
        self.mlp_hyper_connection.around(streams, lambda rows: self.mlp(rows, context))
        return stream
