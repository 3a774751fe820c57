"""An EAGLE-3 head (arXiv:2503.01840): one decoder layer that reads several layers of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gpu_service.core.parallel import ParallelContext
from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import Embedding, ResidualStream, gather_logits
from gpu_service.layers.linear import Linear
from gpu_service.layers.norm import make_norm
from gpu_service.ops.rope import RopeTable
from moebius.checkpoint.errors import CheckpointError
from moebius.models.layers.layer import Layer
from moebius.models.layers.residual import Eagle3


class Eagle3Layer(nn.Module):
    """`x += attention(cat(norm(embedding), norm(x))); x += mlp(norm(x))`.

    `x` is at first `fc` of the model's layers, or what the head made of the token before. Names are those of
    published checkpoints.
    """

    def __init__(self, layer: Layer, parts: LayerParts, made: Composition) -> None:
        super().__init__()
        residual = layer.residual
        assert isinstance(residual, Eagle3)
        own = made.weights(residual.weights(layer.norm, made.hidden_size))
        self.fc = Linear(own.under("fc"))
        self.input_layernorm = make_norm(layer.norm, own.under("input_layernorm"))
        self.hidden_norm = make_norm(layer.norm, own.under("hidden_norm"))
        self.self_attn, self.mlp = parts.both()
        self.post_attention_layernorm = make_norm(layer.norm, own.under("post_attention_layernorm"))
        self.norm = make_norm(layer.norm, own.under("norm"))
        table = own.under("embed_tokens")
        self.embed_tokens = Embedding(table, made.dtype, made.parallel) if table else None
        self.lm_head = Linear(head) if (head := own.under("lm_head")) else None
        self.d2t = own.optional("d2t")
        self.read_layers = residual.read_layers
        self._norm_before_residual = residual.norm_before_residual
        self._size, self._vocab_size = residual.draft_vocab_size, residual.vocab_size
        self._parallel: ParallelContext = made.parallel
        # int64 `[draft_vocab_size]`, the model's id of each of the head's tokens, by `pack`; None: the same.
        self._ids: torch.Tensor | None = None

    def pack(self) -> None:
        """Makes ids of the stored differences; the loader calls it once. Raises CheckpointError for ids that
        the model does not have.
        """
        if self.d2t is None:
            return
        ids = self.d2t.long() + torch.arange(self._size, device=self.d2t.device)
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise CheckpointError(
                f"the EAGLE-3 head's d2t names tokens beyond the model's {self._vocab_size}"
            )
        self._ids = ids

    def combined(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what the head first reads, `[T, H]`, of the streams at `read_layers`, each `[T, H]`."""
        projected: torch.Tensor = self.fc(torch.cat(list(states), dim=-1))
        return projected

    def predict(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        next_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        rope: RopeTable | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Returns the head's stream `[T, H]` of hidden states and the ids after them, int64 `[T]`.

        `embed`: the model's embedding, for heads without one.
        """
        embedded = embed(next_ids) if self.embed_tokens is None else self.embed_tokens(next_ids)
        normed = self.hidden_norm(hidden_states)
        stream = ResidualStream((normed if self._norm_before_residual else hidden_states).clone())
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        stream.add(self.self_attn(both, rope, context))
        stream.add(self.mlp(stream.normed(self.post_attention_layernorm), context))
        return stream.sum()

    def best_ids(
        self, hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the likeliest ids int64 `[L]` by `[L, H]` of its stream.

        `compute_logits`: of the model's head, for heads without one of their own.
        """
        normed = self.norm(hidden_states)
        if self.lm_head is None:
            return compute_logits(normed).argmax(-1)
        best = gather_logits(self.lm_head(normed), self._size, self._parallel).argmax(-1)
        return best if self._ids is None else self._ids[best]
