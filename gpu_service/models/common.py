"""What all decoder-only families share: the backbone, the head, and how a family plugs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import rank_layers, stage_layers
from gpu_service.core.step import ForwardInputs
from gpu_service.layers import gated_streams as streams
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import (
    Embedding,
    LearnedRotation,
    ResidualStream,
    RotaryEmbedding,
    gather_logits,
)
from gpu_service.layers.deferral import DeferralRule
from gpu_service.layers.eagle3 import Eagle3Layer
from gpu_service.layers.gated_streams import StreamMixer
from gpu_service.layers.host_layers import HostRuns
from gpu_service.layers.hyper_connections import HyperHead, HyperStreams
from gpu_service.layers.linear import Linear, Packed
from gpu_service.layers.mtp import MtpLayer
from gpu_service.layers.ngrams import HashedNGrams
from gpu_service.layers.norm import Norm, make_norm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.linear import can_pack, linear, pack_weight
from gpu_service.ops.overflow import EMBEDDING, FINAL_NORM, is_noted, note_overflow
from gpu_service.ops.rope import RopeTable
from moebius.models.config import ModelConfig
from moebius.models.layers.residual import GatedStreams, HyperConnections
from moebius.models.weights import HEAD, outside_weights


class Backbone(nn.Module):
    """Embedding, decoder layers, final norm. Attribute names are those of the checkpoint.

    A pipeline stage has its own layers only; the first one has the embedding, the last one the norm (and,
    where the head is the embedding, the embedding too).
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[nn.Module],
        own: RankWeights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext = SOLO,
    ) -> None:
        """`own`: what belongs to no layer."""
        super().__init__()
        last, longest = parallel.is_last_stage, config.max_model_len
        first, final = config.layers[0].residual, config.layers[config.num_decoder_layers - 1].norm
        self._parallel, self._is_first_stage = parallel, parallel.is_first_stage
        self._dtype, self._hidden_size = dtype, config.hidden_size
        self._first_layer = stage_layers(config, parallel).start
        # None: one residual stream.
        self._streams: type[HyperStreams] | None = None
        hyper = first if isinstance(first, HyperConnections | GatedStreams) else None
        self._num_streams = 1 if hyper is None else hyper.num_streams
        # Whether a stage's first half reads the streams with weights that the stage before computed.
        self._lags = isinstance(first, HyperConnections) and first.lags
        embeds = self._is_first_stage or (last and config.tie_word_embeddings)
        self.embed_tokens = Embedding(own.under("embed_tokens"), dtype, parallel) if embeds else None
        self.layers = nn.ModuleList(layers)
        self.norm: Norm | StreamMixer | None = None
        if isinstance(first, HyperConnections):
            self._streams = HyperStreams
        elif isinstance(first, GatedStreams):
            self._streams = streams.GatedStreams
            if last:
                self.norm = StreamMixer(first, final.eps, own.under("norm"))
        if last and self.norm is None:
            self.norm = make_norm(final, own.under("norm"))
        self.hc_head: HyperHead | None = None
        if last and isinstance(first, HyperConnections) and first.weighs_last:
            self.hc_head = HyperHead(first, final.eps, own.under("hc_head"))
        ropes = [layer.mixer.rope if layer.mixer is not None else None for layer in config.layers]
        # One table for each kind of layer, and which one a layer takes.
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._rotaries = [RotaryEmbedding(rope, longest, dtype=dtype, device=device) for rope in kinds]
        self._rotary_of = [None if rope is None else kinds.index(rope) for rope in ropes]
        self.rotary_emb: LearnedRotation | None = None
        if any(rope.learned for rope in kinds):
            self.rotary_emb = LearnedRotation(self._rotaries, own.under("rotary_emb"))
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(config.embedding_scale, device="cpu").to(dtype).item()
        # Of this stage's layers, those that every token passes: those that propose draft tokens are last.
        self._num_passed = len(layers) - (config.num_draft_layers if last else 0)
        # Tables that those layers need.
        used = self._rotary_of[self._first_layer : self._first_layer + self._num_passed]
        self._num_tables = 1 + max((index for index in used if index is not None), default=-1)
        head = layers[-1]
        self._read_layers = head.read_layers if isinstance(head, Eagle3Layer) else ()
        passed = layers[: self._num_passed]
        self._ngrams = _ngrams_of(passed)
        self._host_runs = HostRuns(passed, self._first_layer, self._rotary_of, self._read_layers)
        # Which experts are added a layer late; None: none. Set before the first step.
        self.deferral: DeferralRule | None = None

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns `[T, H]` after the final norm; on a stage that is not the last, what was sent to the next
        one.
        """
        inputs, overflow = context.inputs, context.first_overflow
        for ngrams in self._ngrams:
            ngrams.begin(context)
        if self.deferral is not None and context.deferral is None:
            context = replace(context, deferral=self.deferral.begin())
        by_axis = inputs.mrope_positions
        positions = inputs.positions if by_axis is None else by_axis
        ropes = [rotary.table(positions) for rotary in self._rotaries[: self._num_tables]]
        stream = self._begin(inputs)
        context.read_streams.clear()
        if overflow is not None and self._is_first_stage:
            _note(overflow, stream, EMBEDDING)
        stream = self._pass_layers(stream, ropes, context)
        if self.norm is None:
            return self._sent(stream)
        hidden_states = self._ended(stream, self.norm)
        if overflow is not None:
            note_overflow(overflow, hidden_states, None, FINAL_NORM)
        return hidden_states

    def _pass_layers(
        self, stream: ResidualStream, ropes: list[RopeTable], context: ForwardContext
    ) -> ResidualStream:
        """Returns the stream after all layers of this stage that every token passes."""
        images, overflow = context.inputs.image_features, context.first_overflow
        runs, done = self._host_runs.of_step(context), self._first_layer
        for index, layer in enumerate(islice(self.layers, self._num_passed), self._first_layer):
            if index < done:
                continue
            if index in self._read_layers:
                context.read_streams.append(stream.copied())
            run = runs.get(index)
            if run is not None and run.forward(stream, ropes, context):
                done = run.end
                continue
            rotary = self._rotary_of[index]
            stream = layer(stream, None if rotary is None else ropes[rotary], context)
            if images is not None and images.reaches(index):
                images.add_after(index, stream.sum())
            if overflow is not None and is_noted(index, self._dtype == torch.float16):
                _note(overflow, stream, index)
            if context.between_layers is not None:
                context.between_layers()
        if self._num_passed in self._read_layers:
            context.read_streams.append(stream.copied())
        return stream

    def _sent(self, stream: ResidualStream) -> torch.Tensor:
        """Sends the stream to the next stage; returns what was sent of it, `[T, H]`."""
        hidden_states = stream.sum()
        self._parallel.send_to_next_stage(hidden_states)
        if self._lags and isinstance(stream, HyperStreams):
            self._parallel.send_to_next_stage(stream.given_weights())
        return hidden_states

    def _ended(self, stream: ResidualStream, norm: Norm | StreamMixer) -> torch.Tensor:
        """Returns what the stream ends as, `[T, H]`, normed."""
        if isinstance(stream, HyperStreams):
            stream.head = self.hc_head
        if isinstance(norm, StreamMixer):
            assert isinstance(stream, streams.GatedStreams)
            return stream.mixed(norm)
        return stream.normed(norm)

    def _begin(self, inputs: ForwardInputs) -> ResidualStream:
        """Returns the stream of embedded tokens and images, or of what the previous stage sent."""
        ids, kind, num_streams = inputs.input_ids, self._streams, self._num_streams
        if not self._is_first_stage:
            shape = ids.shape[0], num_streams * self._hidden_size
            received = torch.empty(shape, dtype=self._dtype, device=ids.device)
            received = self._parallel.receive_from_previous_stage(received)
            if kind is None:
                return ResidualStream(received)
            stream = kind(received, num_streams)
            if self._lags:
                weights = torch.empty(ids.shape[0], num_streams, dtype=torch.float32, device=ids.device)
                stream.weights = self._parallel.receive_from_previous_stage(weights)
            return stream
        embedded = self._embedded(ids)
        if inputs.image_features is not None:
            inputs.image_features.replace_embeddings(embedded)
        return ResidualStream(embedded) if kind is None else kind.embedded(embedded, num_streams)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None
        embedded: torch.Tensor = self.embed_tokens(ids)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def predict_further(
        self, head: int, hidden_states: torch.Tensor, next_ids: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Computes what `CausalLM.predict_further` says."""
        index = self._num_passed + head
        layer, rotary = self._draft_layer(head), self._rotary_of[self._first_layer + index]
        inputs = context.inputs
        positions = inputs.positions if inputs.mrope_positions is None else inputs.mrope_positions
        rope = None if rotary is None else self._rotaries[rotary].table(positions)
        return layer.predict(self._embedded, next_ids, hidden_states, rope, context)

    def _draft_layer(self, head: int) -> MtpLayer | Eagle3Layer:
        layer = self.layers[self._num_passed + head]
        assert isinstance(layer, MtpLayer | Eagle3Layer)
        return layer

    def draft_inputs(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Computes what `CausalLM.draft_inputs` says."""
        layer = self._draft_layer(0)
        return layer.combined(context.read_streams) if isinstance(layer, Eagle3Layer) else hidden_states

    def best_drafts(
        self, head: int, made: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Computes what `CausalLM.best_drafts` says, `compute_logits` being the model's."""
        return self._draft_layer(head).best_ids(made, compute_logits)


def _ngrams_of(layers: list[nn.Module]) -> list[HashedNGrams]:
    """Returns what embeds n-grams, rows of whose tables are read ahead of the layers."""
    modules = (module for layer in layers for module in layer.modules())
    return [module for module in modules if isinstance(module, HashedNGrams)]


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
        self.rank_layers = rank_layers(config, parallel)
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        last = self._is_last_stage = parallel.is_last_stage
        outside = outside_weights(config, is_first=parallel.is_first_stage, is_last=last)
        own = RankWeights(outside, dtype, parallel)
        inner = own.under("model")
        self.model = Backbone(config, layers, inner, dtype=dtype, device=device, parallel=parallel)
        # None: the head is the embedding, or another stage's.
        self.lm_head = Linear(head) if (head := own.under(HEAD)) else None
        # Filled by `pack` when the head is the embedding, whose plain layout the look-up needs too.
        self._packed_tied_head: torch.Tensor | None = None

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns hidden states `[T, H]` after the final norm, one row per row of `context.inputs`.

        `context.attention.plan(context.inputs)` must have been called. Side effect: the KV cache holds
        the new tokens. Raises what the expert client raises; then the step may be run again unchanged.
        """
        hidden_states: torch.Tensor = self.model(context)
        return hidden_states

    def predict_further(
        self, head: int, hidden_states: torch.Tensor, next_ids: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Returns what a layer that proposes draft tokens (`head`, from 0) makes of a step's rows, `[T, H]`;
        of multi-token prediction it is normed.

        A row at position p has what `draft_inputs` gives of p (or what the head before made of it) and the
        id, int64 `[T]`, of the token at p + 1; `best_drafts` of its output is the token at p + 2, and once
        more with another head, or the same, the one after. The layer's cache holds the row in the slot of
        position p, and rotates it by p: transformers rotates by p + 1, which turns queries and keys alike.
        """
        return self.model.predict_further(head, hidden_states, next_ids, context)

    def draft_inputs(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns what the first such layer reads of a step, `[T, H]`, whose `forward` had this context.

        Of multi-token prediction the hidden states themselves, of an EAGLE-3 head what it makes of several
        layers' streams.
        """
        return self.model.draft_inputs(hidden_states, context)

    def best_drafts(self, head: int, made: torch.Tensor) -> torch.Tensor:
        """Returns the likeliest ids int64 `[L]` by `[L, H]` that `predict_further` made."""
        return self.model.best_drafts(head, made, self.compute_logits)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `[L, H]` to logits, float32 `[L, vocab_size]`, the same on all ranks of the
        stage.

        Stages before the last have none: `[L, 0]`.
        """
        if not self._is_last_stage:
            return hidden_states.new_empty((hidden_states.shape[0], 0), dtype=torch.float32)
        logits = self._own_logits(hidden_states)
        whole = gather_logits(logits, self.config.vocab_size, self.parallel).float()
        if self.config.logit_scale != 1.0:
            whole = whole * self.config.logit_scale
        cap = self.config.final_logit_softcap
        return whole.div_(cap).tanh_().mul_(cap) if cap else whole

    def _own_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns `[L, part]` of this rank's part of the vocabulary."""
        if self.lm_head is not None:
            logits: torch.Tensor = self.lm_head(hidden_states)
            return logits
        weight = self._packed_tied_head
        if weight is None:
            assert self.model.embed_tokens is not None
            if self.model.embed_tokens.packed is not None:
                return self.model.embed_tokens.packed.linear(hidden_states, None)
            weight = self.model.embed_tokens.weight
        return linear(hidden_states, weight, None)

    def pack(self) -> None:
        """Put all loaded weights into the form that they are used in; the loader calls it last, and once."""
        for module in self.modules():
            if module is not self and isinstance(module, Packed):
                module.pack()
        if self.lm_head is not None or not self._is_last_stage:
            return
        assert self.model.embed_tokens is not None
        embedding = self.model.embed_tokens.weight
        if can_pack(embedding):
            self._packed_tied_head = pack_weight(embedding)


def _note(overflow: torch.Tensor, stream: ResidualStream, layer: int) -> None:
    total, update = stream.parts()
    note_overflow(overflow, total, update, layer)
