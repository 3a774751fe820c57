"""What all decoder-only families share: the backbone, the head, and how a family plugs in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import shard_config, stage_layers
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import (
    DecoderLayer,
    Embedding,
    Head,
    LearnedRotation,
    NormedResidualLayer,
    ParallelLayer,
    ResidualStream,
    RotaryEmbedding,
    ShortcutLayer,
    SingleLayer,
    gather_logits,
)
from gpu_service.layers.deferral import DeferralRule
from gpu_service.layers.gated_streams import GatedStreamLayer, GatedStreams, NGramLayer, StreamMixer
from gpu_service.layers.hyper_connections import HyperDecoderLayer, HyperHead, HyperStreams
from gpu_service.layers.linear import Packed
from gpu_service.layers.moe import MLP, MoE, MoEWithOwnNorms
from gpu_service.layers.mtp import MtpLayer
from gpu_service.layers.norm import Norm, make_norm
from gpu_service.ops.linear import can_pack, linear, pack_weight
from gpu_service.ops.overflow import EMBEDDING, FINAL_NORM, is_noted, note_overflow
from moebius.models.config import ModelConfig


class Backbone(nn.Module):
    """Embedding, decoder layers, final norm. Attribute names are those of the checkpoint.

    A pipeline stage has its own layers only; the first one has the embedding, the last one the norm (and,
    where the head is the embedding, the embedding too).
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext = SOLO,
    ) -> None:
        super().__init__()
        size, last = config.hidden_size, parallel.is_last_stage
        self._parallel = parallel
        self._first_layer = stage_layers(config, parallel).start
        self._stream_size, self._dtype, self._hyper = config.stream_size, dtype, config.hyper
        embeds = parallel.is_first_stage or (last and config.tie_word_embeddings)
        self.embed_tokens = (
            Embedding(config.vocab_size, size, dtype=dtype, parallel=parallel) if embeds else None
        )
        self.layers = nn.ModuleList(layers)
        self._streams = GatedStreams if has_gated_streams(config) else HyperStreams
        self.norm: Norm | StreamMixer | None = None
        if last and has_gated_streams(config):
            self.norm = StreamMixer(config, dtype=dtype)
        elif last:
            self.norm = make_norm(config, size, dtype=dtype)
        weighs = config.hyper is not None and config.hyper.weighs_last
        self.hc_head = HyperHead(config) if last and weighs else None
        ropes = config.layer_ropes or (config.rope,) * config.num_layers
        # One table for each kind of layer, and which one a layer takes.
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        longest = config.max_model_len
        self._rotaries = [RotaryEmbedding(rope, longest, dtype=dtype, device=device) for rope in kinds]
        self._rotary_of = [None if rope is None else kinds.index(rope) for rope in ropes]
        self.rotary_emb: LearnedRotation | None = None
        if config.rope is not None and config.rope.learned:
            self.rotary_emb = LearnedRotation(self._rotaries)
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(config.embedding_scale, device="cpu").to(dtype).item()
        # Of this stage's layers, those that every token passes: layers of multi-token prediction are last.
        self._num_passed = len(layers) - (config.num_mtp_heads if last else 0)
        # Which experts are added a layer late; None: none. Set before the first step.
        self.deferral: DeferralRule | None = None

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """`[T, H]` after the final norm; on a stage that is not the last, what was sent to the next one."""
        inputs, images = context.inputs, context.inputs.image_features
        if self.deferral is not None and context.deferral is None:
            context = replace(context, deferral=self.deferral.begin())
        by_axis = inputs.mrope_positions
        positions = inputs.positions if by_axis is None else by_axis
        ropes = [rotary.table(positions) for rotary in self._rotaries]
        stream = self._begin(inputs)
        overflow = context.first_overflow
        if overflow is not None and self._parallel.is_first_stage:
            _note(overflow, stream, EMBEDDING)
        for index, layer in enumerate(islice(self.layers, self._num_passed), self._first_layer):
            rotary = self._rotary_of[index]
            stream = layer(stream, None if rotary is None else ropes[rotary], context)
            if images is not None and images.reaches(index):
                images.add_after(index, stream.sum())
            if overflow is not None and is_noted(index, self._dtype == torch.float16):
                _note(overflow, stream, index)
            if context.between_layers is not None:
                context.between_layers()
        if self.norm is None:
            hidden_states = stream.sum()
            self._parallel.send_to_next_stage(hidden_states)
            return hidden_states
        hidden_states = self._ended(stream, self.norm)
        if overflow is not None:
            note_overflow(overflow, hidden_states, None, FINAL_NORM)
        return hidden_states

    def _ended(self, stream: ResidualStream, norm: Norm | StreamMixer) -> torch.Tensor:
        """What the stream ends as, `[T, H]`, normed."""
        if isinstance(stream, HyperStreams):
            stream.head = self.hc_head
        if isinstance(norm, StreamMixer):
            assert isinstance(stream, GatedStreams)
            return stream.mixed(norm)
        return stream.normed(norm)

    def _begin(self, inputs: ForwardInputs) -> ResidualStream:
        """Of embedded tokens and images, or of what the previous stage sent."""
        ids, hyper = inputs.input_ids, self._hyper
        if not self._parallel.is_first_stage:
            received = torch.empty((ids.shape[0], self._stream_size), dtype=self._dtype, device=ids.device)
            received = self._parallel.receive_from_previous_stage(received)
            return ResidualStream(received) if hyper is None else self._streams(received, hyper.num_streams)
        embedded = self._embedded(ids)
        if inputs.image_features is not None:
            inputs.image_features.replace_embeddings(embedded)
        if hyper is None:
            return ResidualStream(embedded)
        return self._streams.embedded(embedded, hyper.num_streams)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None
        embedded: torch.Tensor = self.embed_tokens(ids)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def predict_further(
        self, head: int, hidden_states: torch.Tensor, next_ids: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `CausalLM.predict_further`."""
        index = self._num_passed + head
        layer, rotary = self.layers[index], self._rotary_of[self._first_layer + index]
        assert isinstance(layer, MtpLayer)
        inputs = context.inputs
        positions = inputs.positions if inputs.mrope_positions is None else inputs.mrope_positions
        rope = None if rotary is None else self._rotaries[rotary].table(positions)
        stream = layer.begin(self._embedded(next_ids), hidden_states)
        return layer.ended(layer(stream, rope, context))


class CausalLM(nn.Module):
    """A language model without its routed experts, or a rank's part of one.

    Parameters are on the meta device until `loader.load.load_weights` fills them. Use it under
    `torch.inference_mode()`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext = SOLO,
    ) -> None:
        super().__init__()
        # The whole model's, and what attention and cache of this rank see.
        self.config = config
        self.rank_config = shard_config(config, parallel)
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.model = Backbone(config, layers, dtype=dtype, device=device, parallel=parallel)
        has_head = parallel.is_last_stage and not config.tie_word_embeddings
        self.lm_head = (
            Head(config.hidden_size, config.vocab_size, bias=config.head_bias, dtype=dtype, parallel=parallel)
            if has_head
            else None
        )
        # Filled by `pack` when the head is the embedding, whose plain layout the look-up needs too.
        self._packed_tied_head: torch.Tensor | None = None

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Hidden states `[T, H]` after the final norm, one row per row of `context.inputs`.

        `context.attention.plan(context.inputs)` must have been called. Side effect: the KV cache holds
        the new tokens. Raises what the expert client raises; then the step may be run again unchanged.
        """
        hidden_states: torch.Tensor = self.model(context)
        return hidden_states

    def predict_further(
        self, head: int, hidden_states: torch.Tensor, next_ids: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """What a layer of multi-token prediction (`head`, from 0) makes of a step's rows, `[T, H]`, normed.

        A row at position p has the hidden state of p after the final norm (or what the head before made of
        it) and the id, int64 `[T]`, of the token at p + 1; with `compute_logits` its output predicts the
        token at p + 2, and once more with another head, or the same, the one after. The layer's cache holds
        the row in the slot of position p, and rotates it by p: transformers rotates by p + 1, which turns
        queries and keys alike.
        """
        return self.model.predict_further(head, hidden_states, next_ids, context)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[L, H]` to logits, float32 `[L, vocab_size]`, the same on all ranks of the stage.

        Stages before the last have none: `[L, 0]`.
        """
        if not self.parallel.is_last_stage:
            return hidden_states.new_empty((hidden_states.shape[0], 0), dtype=torch.float32)
        logits = self._own_logits(hidden_states)
        whole = gather_logits(logits, self.config.vocab_size, self.parallel).float()
        if self.config.logit_scale != 1.0:
            whole = whole * self.config.logit_scale
        cap = self.config.final_logit_softcap
        return whole.div_(cap).tanh_().mul_(cap) if cap else whole

    def _own_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[L, part]` of this rank's part of the vocabulary."""
        if self.lm_head is not None:
            logits: torch.Tensor = self.lm_head(hidden_states)
            return logits
        weight = self._packed_tied_head
        if weight is None:
            assert self.model.embed_tokens is not None
            weight = self.model.embed_tokens.weight
        return linear(hidden_states, weight, None)

    def pack(self) -> None:
        """Put all loaded weights into the form that they are used in; the loader calls it last, and once."""
        for module in self.modules():
            if module is not self and isinstance(module, Packed):
                module.pack()
        if self.lm_head is not None or not self.parallel.is_last_stage:
            return
        assert self.model.embed_tokens is not None
        embedding = self.model.embed_tokens.weight
        if can_pack(embedding):
            self._packed_tied_head = pack_weight(embedding)


def _note(overflow: torch.Tensor, stream: ResidualStream, layer: int) -> None:
    total, update = stream.parts()
    note_overflow(overflow, total, update, layer)


def has_gated_streams(config: ModelConfig) -> bool:
    """Whether the residual streams are those of `layers.gated_streams`."""
    return config.hyper is not None and config.hyper.rank > 0


def make_mlp(
    layer_id: int, config: ModelConfig, *, dtype: torch.dtype, parallel: ParallelContext = SOLO
) -> MLP | MoE:
    """The layer's second half: MoE where the config says so, else dense."""
    size, activation = config.hidden_size, config.activation
    limit = config.mlp_limits[layer_id] if config.mlp_limits else math.inf
    if config.is_moe_layer(layer_id) and config.moe.own_norms:
        return MoEWithOwnNorms(layer_id, config, dtype=dtype, parallel=parallel)
    if config.is_moe_layer(layer_id):
        tokens = config.vocab_size if layer_id in config.moe.hash_layers else 0
        return MoE(
            layer_id,
            size,
            config.moe,
            activation,
            limit=limit,
            hashed_tokens=tokens,
            dtype=dtype,
            parallel=parallel,
        )
    return _make_dense(config, limit, dtype=dtype, parallel=parallel)


def _make_dense(
    config: ModelConfig, limit: float = math.inf, *, dtype: torch.dtype, parallel: ParallelContext
) -> MLP:
    size, width, alpha = config.hidden_size, config.intermediate_size, config.moe.expert_alpha
    return MLP(size, width, config.activation, limit=limit, alpha=alpha, dtype=dtype, parallel=parallel)


def _make_shortcut_layer(
    config: ModelConfig,
    attentions: Sequence[nn.Module],
    experts: nn.Module,
    *,
    dtype: torch.dtype,
    parallel: ParallelContext,
) -> ShortcutLayer:
    assert isinstance(experts, MoE), "the family's reader lists all layers as MoE"
    dense = [_make_dense(config, dtype=dtype, parallel=parallel) for _ in attentions]
    return ShortcutLayer(config, attentions, dense, experts, dtype=dtype)


def build_causal_lm(
    config: ModelConfig,
    make_attention: Callable[[int], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext = SOLO,
    make_ngrams: Callable[[int], NGramLayer | None] = lambda layer_id: None,
) -> CausalLM:
    """Compose a model whose layers differ only in what `make_attention` and `make_ngrams` return.

    `make_attention` is given the layer's index in this stage, or, where layers attend twice, the attention's;
    experts and n-grams know layers by their index in the checkpoint.
    """
    layer_class = DecoderLayer if config.hyper is None else HyperDecoderLayer

    def make_layer(index: int, layer_id: int) -> nn.Module:
        if not config.has_mlp(layer_id):
            return SingleLayer(config, make_attention(index), dtype=dtype)
        mlp = make_mlp(layer_id, config, dtype=dtype, parallel=parallel)
        if not config.has_attention(layer_id):
            return SingleLayer(config, mlp, dtype=dtype)
        if config.shortcut_experts:
            attentions = [make_attention(2 * index), make_attention(2 * index + 1)]
            return _make_shortcut_layer(config, attentions, mlp, dtype=dtype, parallel=parallel)
        attention = make_attention(index)
        if layer_id >= config.num_decoder_layers:
            return MtpLayer(config, attention, mlp, dtype=dtype)
        if config.normed_residuals is not None:
            is_linear = config.linear is not None and layer_id in config.linear.layers
            return NormedResidualLayer(config, attention, mlp, is_linear=is_linear, dtype=dtype)
        if config.parallel_halves:
            return ParallelLayer(config, attention, mlp, dtype=dtype)
        if has_gated_streams(config):
            return GatedStreamLayer(config, attention, mlp, dtype=dtype, ngrams=make_ngrams(layer_id))
        return layer_class(config, attention, mlp, dtype=dtype)

    layers = [make_layer(index, layer_id) for index, layer_id in enumerate(stage_layers(config, parallel))]
    return CausalLM(config, layers, dtype=dtype, device=device, parallel=parallel)
