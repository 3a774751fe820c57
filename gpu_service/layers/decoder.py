"""The pre-norm decoder layer, and the stream of sums that layers add to."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.norm import RMSNorm, make_norm
from gpu_service.model_config import ModelConfig
from gpu_service.ops.rope import RopeTable


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

        Float32 beside a 16-bit stream is welcome: it saves a cast and a rounding.
        """
        self.sum()
        self._pending = update

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """The norm of the sum, a tensor that the caller may keep."""
        if self._pending is None:
            output: torch.Tensor = norm(self._total)
            return output
        update, self._pending = self._pending, None
        return norm.after_adding(update, self._total)

    def sum(self) -> torch.Tensor:
        """The sum itself, `[T, H]`: what a pipeline stage hands to the next. Later additions change it."""
        if self._pending is not None:
            self._total.add_(self._pending)
            self._pending = None
        return self._total


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`; `mlp` is a `GatedMLP` or a `MoE`.

    The attention's name is the checkpoint's: `linear_attn` where its class says so.
    """

    def __init__(
        self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self._attention_name: str = getattr(attention, "checkpoint_name", "self_attn")
        self.add_module(self._attention_name, attention)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.mlp = mlp

    def forward(self, stream: ResidualStream, rope: RopeTable, context: ForwardContext) -> ResidualStream:
        """Adds the layer's two halves to the stream and returns it."""
        attention = self.get_submodule(self._attention_name)
        stream.add(attention(stream.normed(self.input_layernorm), rope, context))
        stream.add(self.mlp(stream.normed(self.post_attention_layernorm), context))
        return stream
