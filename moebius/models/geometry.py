"""The part of a model's description that an expert server needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moebius.models.attention_config import ExpertKindsConfig

if TYPE_CHECKING:
    from moebius.models.config import ModelConfig


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
        return self.activation != "relu2"

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
        """Returns the geometry of the whole model, not of a rank's part."""
        moe = config.moe
        return MoeGeometry(
            model_type=config.model_type,
            hidden_size=moe.latent_size or config.hidden_size,
            num_layers=config.num_layers,
            moe_layers=config.moe_layer_ids,
            num_experts=moe.router.num_experts,
            top_k=moe.router.top_k,
            moe_intermediate_size=moe.intermediate_size,
            activation=moe.expert_activation,
            dtype=config.dtype,
            alpha=moe.expert_alpha,
            limit=moe.expert_limit,
            layer_limits=moe.expert_limits,
            has_bias=moe.expert_bias,
            kinds=moe.kinds,
            num_zero_experts=moe.router.num_zero_experts,
            mtp_heads=config.num_mtp_heads,
        )
