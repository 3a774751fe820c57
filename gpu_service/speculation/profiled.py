"""For measuring memory: a model whose steps also run what proposes draft tokens."""

from __future__ import annotations

import torch

from gpu_service.attention.registry import make_attention
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.speculation.draft_model import DraftModel


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
        for head in range(heads):
            made = self._model.predict_further(head, made, context.inputs.input_ids, context)
        if self._drafting is not None:
            small, cache = self._drafting.model, context.kv_cache.beside
            assert cache is not None
            attention = make_attention(small.rank_layers, cache, small.device, self._backend)
            text = self._drafting.text(context.inputs, context.inputs.input_ids)
            attention.plan(text)
            self._drafting.forward(text, cache, attention)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[L, H]` to float32 `[L, V]`."""
        return self._model.compute_logits(hidden_states)
