"""The frame of every model: embedding, rotary tables, decoder layer, residual stream, output head."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostMixer, HostPlaces
from gpu_service.layers.linear import ReadsSeam, Seam, StoredWeight
from gpu_service.layers.moe import MLP, MoE, MoEWithOwnNorms
from gpu_service.layers.norm import Norm, RMSNorm, make_norm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.rope import RopeTable, query_scales, rope_table, section_axes
from gpu_service.ops.rope_frequencies import inverse_frequencies
from moebius import _kernels
from moebius.models.layers.layer import Layer
from moebius.models.layers.residual import NormedStream, Sequential, Shortcut
from moebius.models.layers.rope import RopeConfig


class Embedding(StoredWeight):
    """Row look-up; a rank holds the rows of its part of the vocabulary, padded with zeros to equal parts."""

    def __init__(self, own: RankWeights, dtype: torch.dtype, parallel: ParallelContext) -> None:
        super().__init__(own)
        self._shard, self._parallel, self._dtype = own.rows("weight"), parallel, dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 `[T]` to `[T, hidden_size]`: each id's row from the rank that has it, zeros
        from others.
        """
        if self._parallel.tp_size == 1:
            return self._rows(input_ids)
        rows = input_ids - self._shard.begin
        elsewhere = (rows < 0) | (rows >= self._shard.size)
        embedded = self._rows(rows.masked_fill(elsewhere, 0))
        return self._parallel.tensor_group.all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.take_rows(rows, self._dtype)
        return functional.embedding(rows, self.weight)

    def pack(self) -> None:
        """The loader calls it once: a kept weight may be the head as well."""
        if self.packed is not None:
            self.packed.calibrate()


def gather_logits(logits: torch.Tensor, vocab_size: int, parallel: ParallelContext) -> torch.Tensor:
    """Returns each rank's `[L, padded part]` to all ranks' `[L, vocab_size]`."""
    if parallel.tp_size == 1:
        return logits
    return parallel.tensor_group.all_gather(logits)[:, :vocab_size]


class RotaryEmbedding:
    """Not a module: it holds no checkpoint tensor, so nothing of it may wait for the loader."""

    def __init__(
        self, config: RopeConfig, max_model_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`max_model_len`: tokens of the longest sequence that is served.

        It alone chooses between LongRoPE's two sets of factors: keys stay in the cache as they were rotated,
        and one step holds sequences of all lengths, so that a set for each length would have none agree.
        """
        scaling, factors = dict(config.scaling), config.pair_factors
        is_long = bool(factors) and max_model_len > scaling["original_max_position_embeddings"]
        frequencies = inverse_frequencies(
            config.theta, config.rotary_dim, config.scaling_kind, scaling, factors[is_long] if factors else ()
        )
        # float32 [rotary_dim / 2], radians per token.
        self.frequencies = frequencies.to(device)
        self._dtype = dtype
        self._interleaved = config.interleaved
        self._attention_factor = config.attention_factor
        self._query_growth, self._query_growth_length = config.query_growth, config.query_growth_length
        # int64 [rotary_dim / 2]; None: the model has one position a token.
        self._axes: torch.Tensor | None = None
        if config.mrope_sections:
            kind = config.mrope_interleaved, config.mrope_time_last
            self._axes = section_axes(config.mrope_sections, *kind).to(device)

    def table(self, positions: torch.Tensor) -> RopeTable:
        """Returns the factors for all layers of the step.

        positions: int64 `[T]`; of a model with mRoPE also `[3, T]`, rows of time, height and width. Where
        these are equal, as in text, both give the same table bit by bit. Raises ValueError for `[3, T]`
        and a model without mRoPE.
        """
        if positions.dim() == 2:
            if self._axes is None:
                raise ValueError(f"positions {tuple(positions.shape)} need a model with mRoPE")
            positions = positions.index_select(0, self._axes).t()
        table = rope_table(
            positions, self.frequencies, self._dtype, self._interleaved, self._attention_factor
        )
        if not self._query_growth:
            return table
        scales = query_scales(positions, self._query_growth, self._query_growth_length, self._dtype)
        return table._replace(query_scale=scales)


class LearnedRotation(nn.Module):
    """Factors of a model's rotary frequencies, as logarithms that the checkpoint holds (LeRoPE)."""

    def __init__(self, rotaries: list[RotaryEmbedding], own: RankWeights) -> None:
        """Raises ValueError unless the model has one kind of rotation."""
        super().__init__()
        if len(rotaries) != 1:
            raise ValueError(f"learned frequencies belong to one kind of rotation, not to {len(rotaries)}")
        self._rotary, self.alpha = rotaries[0], own.parameter("alpha")

    def pack(self) -> None:
        """From here on the frequencies are the learned ones; the loader calls it once."""
        self._rotary.frequencies *= self.alpha.exp()


class ResidualStream:
    """The sum `[T, H]` that every layer adds to; the last addition waits for the norm that follows it.

    An addition and the norm of the sum are one kernel on a GPU. So a layer hands on what it computed
    unadded, and the next reader, who starts with a norm, does both.
    """

    def __init__(self, total: torch.Tensor) -> None:
        """`total` becomes the stream's own memory and is added to in place."""
        self._total = total
        self._pending: torch.Tensor | None = None

    def add(self, update: torch.Tensor) -> None:
        """`update` `[T, H]` becomes part of the sum; its memory is the stream's from now on.

        Float32 on a 16-bit stream is welcome: it saves a cast and a rounding.
        """
        self.sum()
        self._pending = update

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of the sum, a tensor that the caller may keep."""
        if self._pending is None:
            output: torch.Tensor = norm(self._total)
            return output
        update, self._pending = self._pending, None
        return norm.after_adding(update, self._total)

    def read_for(
        self, reader: nn.Module, norm: Norm | None, inputs: ForwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """`read`, and where `reader` starts with a product of it, what comes of that: what it is called with.

        Of few rows the addition, the norm and the product are one kernel on a GPU.
        """
        # Of the class: whether an object has all of a protocol's methods takes longer than a norm.
        reads_seam = hasattr(type(reader), ReadsSeam.read_seam.__name__)
        if reads_seam and isinstance(norm, RMSNorm):
            seam = Seam(self._total, self._pending, norm.weight, norm.eps)
            found = cast(ReadsSeam, reader).read_seam(seam, inputs)
            if found is not None:
                self._total, self._pending = found[0], None
                return found[1:]
        return (self.read(norm),)

    def read(self, norm: Norm | None) -> torch.Tensor:
        """Returns `normed`, or a copy of the sum where nothing is normed; a tensor that the caller
        may keep.
        """
        return self.sum().clone() if norm is None else self.normed(norm)

    def sum(self) -> torch.Tensor:
        """Returns the sum itself, `[T, H]`: what a pipeline stage hands to the next.

        Later additions change it.
        """
        if self._pending is not None:
            self._total.add_(self._pending)
            self._pending = None
        return self._total

    def copied(self) -> torch.Tensor:
        """Returns the sum `[T, N]` in memory of its own; the addition that waits goes on waiting."""
        if self._pending is None:
            return self._total.clone()
        return (self._total + self._pending).to(self._total.dtype)

    def restart(self, total: torch.Tensor, update: torch.Tensor, kept: float, added: float) -> None:
        """The stream becomes `kept * total + added * update`, both `[T, H]`, whose memory is its own now."""
        self._total = total if kept == 1.0 else total.mul_(kept)
        self._pending = update if added == 1.0 else update.mul_(added)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns what the sum is of: a tensor `[T, N]`, and what is to be added to it.

        To be read at once only.
        """
        return self._total, self._pending

    def scale(self, factor: torch.Tensor) -> None:
        """The sum is multiplied by a factor `[1]`, in place."""
        self.sum().mul_(factor)


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`; `mlp` is an `MLP` or a `MoE`.

    Its `Sequential` says where and what is normed and multiplied. The attention's name is the checkpoint's.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        residual, self._dtype, self.hidden_size = layer.residual, made.dtype, made.hidden_size
        assert isinstance(residual, Sequential)
        assert layer.mixer is not None
        own = made.weights(residual.weights(layer.norm, made.hidden_size))

        def norm(name: str) -> Norm | None:
            return make_norm(layer.norm, declared) if (declared := own.under(name)) else None

        attention, mlp = parts.both()
        self.input_layernorm = norm("input_layernorm")
        self._attention_name = layer.mixer.name
        self.add_module(self._attention_name, attention)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = mlp
        self.post_self_attn_layernorm = norm("post_self_attn_layernorm")
        self.post_mlp_layernorm = norm("post_mlp_layernorm")
        self.layer_scalar = own.optional("layer_scalar")
        self._scale = residual.scale

    @property
    def block(self) -> nn.Module:
        """The layer's MLP or experts."""
        return self.mlp

    @property
    def host_mixer(self) -> HostMixer | None:
        """The layer's mixer, if one call may compute it with its neighbours."""
        mixer = self._modules[self._attention_name]
        return mixer if isinstance(mixer, HostMixer) else None

    def host_weights(self, places: HostPlaces) -> _kernels.LayerWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: it is another kind of layer."""
        mixer, mlp = self.host_mixer, self.mlp
        norms = self.input_layernorm, self.post_attention_layernorm
        after = self.post_self_attn_layernorm, self.post_mlp_layernorm, self.layer_scalar
        if any(part is not None for part in after):
            return None
        if mixer is None or not all(isinstance(norm, RMSNorm) for norm in norms):
            return None
        mixes, block = mixer.host_weights(places), _host_block(mlp)
        if mixes is None or block is None:
            return None
        first, second = (norm.host_weights() for norm in norms if isinstance(norm, RMSNorm))
        return _kernels.LayerWeights(first, mixes, second, *block, self._scale)

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Adds the layer's two halves to the stream and returns it."""
        attention = self._modules[self._attention_name]
        assert attention is not None, "made with the layer"
        hidden_states, *projected = stream.read_for(attention, self.input_layernorm, context.inputs)
        attended = attention(hidden_states, rope, context, *projected)
        stream.add(self._normed(self.post_self_attn_layernorm, attended))
        if isinstance(self.mlp, MoEWithOwnNorms):
            hidden_states = stream.read(self.post_attention_layernorm)
            output = self.mlp.forward_with_residual(hidden_states, stream.sum(), context)
        else:
            norm = self.post_attention_layernorm
            hidden_states, *begun = stream.read_for(self.mlp, norm, context.inputs)
            output = self.mlp(hidden_states, context, *begun)
        stream.add(self._normed(self.post_mlp_layernorm, output))
        if self.layer_scalar is not None:
            stream.scale(self.layer_scalar)
        return stream

    def _normed(self, norm: Norm | None, update: torch.Tensor) -> torch.Tensor:
        """A sum over experts is float32 and stays so where no norm follows."""
        normed = update if norm is None else norm(update.to(self._dtype))
        return normed if self._scale == 1.0 else normed.mul_(self._scale)


def _host_block(
    block: nn.Module,
) -> tuple[_kernels.MlpWeights | None, _kernels.RouterWeights | None, int] | None:
    """Returns an MLP, or experts and those that are always active, as `_kernels.LayerWeights` ends with them;
    None: it is another kind.
    """
    if isinstance(block, MoE):
        found = block.host_weights()
        return None if found is None else (*found, block.layer_id)
    dense = block.host_weights() if isinstance(block, MLP) else None
    return None if dense is None else (dense, None, 0)


class SingleLayer(nn.Module):
    """`x += mixer(norm(x))`: a layer that attends, has a state, or is an MLP or a `MoE`, and nothing else."""

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        own = made.weights(layer.residual.weights(layer.norm, made.hidden_size))
        self.hidden_size = made.hidden_size
        self.norm = make_norm(layer.norm, own.under("norm"))
        self.mixer = parts.single()

    @property
    def block(self) -> nn.Module:
        """The layer's MLP or experts, or what it is instead."""
        return self.mixer

    @property
    def host_mixer(self) -> HostMixer | None:
        """The layer's mixer, if it is one that a call may compute with its neighbours."""
        return self.mixer if isinstance(self.mixer, HostMixer) else None

    def host_weights(self, places: HostPlaces) -> _kernels.LayerWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: it is another kind of layer."""
        mixer, block = self.host_mixer, _host_block(self.mixer)
        if not isinstance(self.norm, RMSNorm):
            return None
        norm = self.norm.host_weights()
        if block is not None:
            return _kernels.LayerWeights(None, None, norm, *block)
        mixes = None if mixer is None else mixer.host_weights(places)
        return None if mixes is None else _kernels.LayerWeights(norm, mixes, None, None, None, 0)

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Adds what the layer computes to the stream and returns it."""
        hidden_states, *begun = stream.read_for(self.mixer, self.norm, context.inputs)
        is_mlp = isinstance(self.mixer, MLP | MoE)
        stream.add(self.mixer(hidden_states, *(() if is_mlp else (rope,)), context, *begun))
        return stream


class NormedResidualLayer(nn.Module):
    """`x = norm(x); x = a x + b attention(x)`, then the same of the MLP."""

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        residual = layer.residual
        assert isinstance(residual, NormedStream)
        own = made.weights(residual.weights(layer.norm, made.hidden_size))
        self.hidden_size = made.hidden_size
        self.input_layernorm = make_norm(layer.norm, own.under("input_layernorm"))
        self.self_attn, mlp = parts.both()
        self.post_attention_layernorm = make_norm(layer.norm, own.under("post_attention_layernorm"))
        self.mlp = mlp
        self._attention_weights, self._mlp_weights = residual.mixer, residual.ffn

    @property
    def block(self) -> nn.Module:
        """What follows attention."""
        return self.mlp

    @property
    def host_mixer(self) -> HostMixer | None:
        """The layer's mixer, if one call may compute it with its neighbours."""
        return self.self_attn if isinstance(self.self_attn, HostMixer) else None

    def host_weights(self, places: HostPlaces) -> _kernels.LayerWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: it is another kind of layer."""
        mixer, first, second = self.host_mixer, self.input_layernorm, self.post_attention_layernorm
        if mixer is None or not isinstance(first, RMSNorm) or not isinstance(second, RMSNorm):
            return None
        mixes, block = mixer.host_weights(places), _host_block(self.mlp)
        if mixes is None or block is None:
            return None
        factors = *self._attention_weights, *self._mlp_weights
        return _kernels.LayerWeights(
            first.host_weights(), mixes, second.host_weights(), *block, normed_stream=factors
        )

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Puts the layer's two halves into the stream and returns it."""
        hidden_states = stream.normed(self.input_layernorm)
        update = self.self_attn(hidden_states, rope, context)
        stream.restart(hidden_states, update, *self._attention_weights)
        hidden_states, *begun = stream.read_for(self.mlp, self.post_attention_layernorm, context.inputs)
        stream.restart(hidden_states, self.mlp(hidden_states, context, *begun), *self._mlp_weights)
        return stream


class ParallelLayer(nn.Module):
    """`x += attention(norm(x)) + mlp(norm(x))`, one norm for both.

    Servers compute the experts while the layer attends.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        own = made.weights(layer.residual.weights(layer.norm, made.hidden_size))
        self.input_layernorm = make_norm(layer.norm, own.under("input_layernorm"))
        self.self_attn, self.mlp = parts.both()

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Adds the layer's two halves to the stream and returns it."""
        hidden_states = stream.normed(self.input_layernorm)
        finish = self.mlp.start(hidden_states, context) if isinstance(self.mlp, MoE) else None
        stream.add(self.self_attn(hidden_states, rope, context))
        stream.add(self.mlp(hidden_states, context) if finish is None else finish())
        return stream


class ShortcutLayer(nn.Module):
    """Attention and a dense MLP, twice; experts read what the first MLP reads and are added at the end.

    So all that follows the first attention is computed while servers compute the experts.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        residual, halves = layer.residual, range(len(parts.mixers))
        assert isinstance(residual, Shortcut)
        assert isinstance(parts.ffn, MoE), "the family's reader lists all layers as MoE"

        own = made.weights(layer.weights(made.hidden_size))

        def norms(name: str) -> nn.ModuleList:
            return nn.ModuleList(make_norm(layer.norm, own.under(f"{name}.{half}")) for half in halves)

        self.input_layernorm = norms("input_layernorm")
        self.self_attn = nn.ModuleList(parts.mixers)
        self.post_attention_layernorm = norms("post_attention_layernorm")
        dense = residual.dense
        self.mlps = nn.ModuleList(MLP(dense, own.under(f"mlps.{half}"), made.parallel) for half in halves)
        self.mlp = parts.ffn

    def forward(
        self, stream: ResidualStream, rope: RopeTable | None, context: ForwardContext
    ) -> ResidualStream:
        """Adds the two MLPs, the two attentions and the experts to the stream and returns it."""
        finish: Callable[[], torch.Tensor] | None = None
        halves = zip(
            self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlps, strict=True
        )
        for input_norm, attention, mlp_norm, mlp in halves:
            stream.add(attention(_normed(stream, input_norm), rope, context))
            hidden_states = _normed(stream, mlp_norm)
            if finish is None:
                finish = self.mlp.start(hidden_states, context)
            stream.add(mlp(hidden_states, context))
        assert finish is not None
        stream.add(finish())
        return stream


def _normed(stream: ResidualStream, norm: nn.Module) -> torch.Tensor:
    assert isinstance(norm, Norm)
    return stream.normed(norm)
