"""The part of a model's description that an expert server needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.ffn import Experts, MoE, is_gated
from moebius.models.layers.router import ExpertKindsConfig


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """The routed experts' geometry; filled by `of`. Sizes in elements."""

    model_type: str
    hidden_size: int  # Of what experts are given and give back; with a latent space, its size.
    num_layers: int  # All decoder layers, dense ones included.
    # The layers that route to experts, ascending.
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    # "silu": down(silu(gate(x)) * up(x)); "relu2": down(relu(up(x))^2); others as in kernels/gemm/gemm.h.
    activation: str
    dtype: str  # "float32", "bfloat16" or "float16": what the config says weights and activations are.
    # Of the activations that have them: the sigmoid's slope, and where gate and up are clamped.
    alpha: float = 1.702
    limit: float = 7.0
    # Where the experts of each decoder layer clamp instead; infinite: they do not; empty: `limit` in all.
    layer_limits: tuple[float, ...] = ()
    has_bias: bool = False  # Whether experts have biases.
    # Experts are parts of those that the checkpoint stores; None: they are as stored.
    kinds: ExpertKindsConfig | None = None
    num_zero_experts: int = 0  # Choices of the router besides, which no server knows of.
    mtp_heads: int = 0  # The last of `num_layers` that are multi-token prediction.

    @property
    def passed_layers(self) -> tuple[int, ...]:
        """Those of `moe_layers` that every token passes: not multi-token prediction's."""
        return tuple(layer for layer in self.moe_layers if layer < self.num_layers - self.mtp_heads)

    @property
    def is_gated(self) -> bool:
        """Returns whether experts have three matrices: gate, up and down, not only the last two."""
        return is_gated(self.activation)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of an expert's matrices: `gate` unless it has none, `up`, `down`."""
        return Experts(self.moe_intermediate_size, self.activation).matrices(self.hidden_size)

    @property
    def mean_top_k(self) -> float:
        """Experts that a token chooses on average, where it chooses evenly."""
        return self.top_k * self.num_experts / (self.num_experts + self.num_zero_experts)

    def stored_place(self, expert: int) -> tuple[int, int, int]:
        """Returns its number in the checkpoint, its first channel there, and the channels that are stored."""
        if self.kinds is None:
            return expert, 0, self.moe_intermediate_size
        return self.kinds.stored_place(expert)

    def limit_of(self, layer: int) -> float:
        """Returns where the experts of a decoder layer clamp."""
        return self.layer_limits[layer] if self.layer_limits else self.limit

    @staticmethod
    def of(config: ModelConfig) -> MoeGeometry:
        """The geometry of the whole model, not of a rank's part.

        Raises ModelConfigError for a model without experts.
        """
        if not config.routed:
            raise ModelConfigError(f"{config.model_type}: no layer has experts; allowed: models with experts")
        first = next(iter(config.routed.values()))
        limits = {layer: ffn.experts.limit for layer, ffn in config.routed.items()}
        differ = len(set(limits.values())) > 1
        return MoeGeometry(
            model_type=config.model_type,
            hidden_size=first.expert_input_size(config.hidden_size),
            num_layers=config.num_stored_layers,
            moe_layers=config.moe_layer_ids,
            num_experts=first.router.num_experts,
            top_k=first.router.top_k,
            moe_intermediate_size=first.experts.intermediate_size,
            activation=first.experts.activation,
            dtype=config.dtype,
            alpha=first.experts.alpha,
            limit=first.experts.limit,
            layer_limits=tuple(limits.get(i, math.inf) for i in range(config.num_stored_layers))
            if differ
            else (),
            has_bias=first.experts.has_bias,
            kinds=first.kinds if isinstance(first, MoE) else None,
            num_zero_experts=first.router.num_zero_experts,
            mtp_heads=config.num_mtp_heads,
        )
