"""What all decoder-only families share: the backbone, the head, and how a family plugs in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.decoder import DecoderLayer
from gpu_service.layers.embedding import Embedding
from gpu_service.layers.linear import Linear
from gpu_service.layers.mlp import GatedMLP
from gpu_service.layers.moe import MoE
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.rope import RotaryEmbedding
from gpu_service.model_config import ModelConfig
from gpu_service.ops.linear import can_pack, linear, pack_weight


class Backbone(nn.Module):
    """Embedding, decoder layers, final norm. Attribute names are those of the checkpoint."""

    def __init__(
        self, config: ModelConfig, layers: list[DecoderLayer], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self._rotary = RotaryEmbedding(config.rope, dtype=dtype, device=device)

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """`[T, H]` after the final norm."""
        inputs = context.inputs
        rope = self._rotary.table(inputs.positions)
        hidden_states = self.embed_tokens(inputs.input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rope, context)
        normalized: torch.Tensor = self.norm(hidden_states)
        return normalized


class CausalLM(nn.Module):
    """A language model without its routed experts.

    Parameters are on the meta device until `loader.load.load_weights` fills them. Use it under
    `torch.inference_mode()`.
    """

    def __init__(
        self, config: ModelConfig, layers: list[DecoderLayer], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.model = Backbone(config, layers, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.lm_head = head
        # Filled by `pack` when the head is the embedding, whose plain layout the look-up needs too.
        self._packed_tied_head: torch.Tensor | None = None

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Hidden states `[T, H]` after the final norm, one row per row of `context.inputs`.

        `context.attention.plan(context.inputs)` must have been called. Side effect: the KV cache holds
        the new tokens. Raises what the expert client raises; then the step may be run again unchanged.
        """
        hidden_states: torch.Tensor = self.model(context)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[L, H]` to logits, float32 `[L, vocab_size]`."""
        if self.lm_head is not None:
            weight: torch.Tensor = self.lm_head.weight
        elif self._packed_tied_head is not None:
            weight = self._packed_tied_head
        else:
            weight = self.model.embed_tokens.weight
        return linear(hidden_states, weight, None).float()

    def pack(self) -> None:
        """Put all loaded weights of products into the device's fastest layout; the loader calls it last."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        embedding = self.model.embed_tokens.weight
        if self.lm_head is None and can_pack(embedding):
            self._packed_tied_head = pack_weight(embedding)


def make_mlp(layer_id: int, config: ModelConfig, *, dtype: torch.dtype) -> GatedMLP | MoE:
    """The layer's second half: MoE where the config says so, else dense."""
    if config.is_moe_layer(layer_id):
        return MoE(layer_id, config.hidden_size, config.moe, config.activation, dtype=dtype)
    return GatedMLP(config.hidden_size, config.intermediate_size, config.activation, dtype=dtype)


def build_causal_lm(
    config: ModelConfig,
    make_attention: Callable[[int], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Compose a model whose layers differ only in what `make_attention(layer_id)` returns."""
    layers = [
        DecoderLayer(config, make_attention(i), make_mlp(i, config, dtype=dtype), dtype=dtype)
        for i in range(config.num_layers)
    ]
    return CausalLM(config, layers, dtype=dtype, device=device)
