"""For measuring memory: a model whose steps also run what proposes draft tokens."""

from __future__ import annotations

import torch

from gpu_service.attention.registry import Attention, make_attention
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.speculation.draft_model import DraftModel
from gpu_service.speculation.mtp import beside
from moebius.models.layers.layer import Layers, divided


class WithHeads:
    """The model, then its heads or a draft model over all rows."""

    def __init__(self, model: CausalLM, drafting: DraftModel | None, attention_backend: str) -> None:
        """`attention_backend`: the setting."""
        self._model, self._drafting, self._backend = model, drafting, attention_backend

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns the model's hidden states `[T, H]`."""
        hidden_states = made = self._model.forward(context)
        heads = self._model.config.num_draft_layers
        if heads:
            made = self._model.draft_inputs(hidden_states, context)
            _, apart = divided(self._model.rank_layers)
            if apart:
                attention = self._attention(apart, context)
                attention.plan(context.inputs)
                context = beside(context, attention)
        for head in range(heads):
            made = self._model.predict_further(head, made, context.inputs.input_ids, context)
        if self._drafting is not None:
            cache = context.kv_cache.beside
            assert cache is not None
            attention = self._attention(self._drafting.model.rank_layers, context)
            text = self._drafting.text(context.inputs, context.inputs.input_ids)
            attention.plan(text)
            self._drafting.forward(text, cache, attention)
        return hidden_states

    def _attention(self, layers: Layers, context: ForwardContext) -> Attention:
        cache = context.kv_cache.beside
        assert cache is not None, "asked only of models with such a cache"
        return make_attention(layers, cache, self._model.device, self._backend)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[L, H]` to float32 `[L, V]`."""
        return self._model.compute_logits(hidden_states)
