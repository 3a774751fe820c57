"""Shapes of published models, as far as the family qwen3_moe expresses them, and their config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moebius.errors import UserError


@dataclass(frozen=True)
class RandomShape:
    """Sizes of one model, in elements; filled by the table below, `num_layers` also by the command line."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_position_embeddings: int = 40960

    def hf_config(self, quantization: dict[str, Any] | None) -> dict[str, Any]:
        """config.json of family qwen3_moe, every layer MoE, no tied embeddings."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "decoder_sparse_step": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.moe_intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": True,
            "num_attention_heads": self.num_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
        if quantization is not None:
            config["quantization_config"] = quantization
        return config


# The second has the experts and the attention sizes of Qwen3-Next, but softmax attention in all its layers
# and no shared expert: this family has no others.
SHAPES = {
    shape.name: shape
    for shape in (
        RandomShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 128, 8, 151936),
        RandomShape("qwen3-next-80b", 48, 2048, 16, 2, 256, 512, 512, 10, 151936),
        RandomShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 128, 8, 151936),
        RandomShape("tiny", 2, 64, 4, 2, 32, 64, 8, 2, 512, 2048),
        RandomShape("small", 4, 256, 4, 2, 128, 128, 32, 4, 2048, 4096),
    )
}


def parse_shape(name: str, layers: int) -> RandomShape:
    """A shape by name, with `layers` layers (0: the model's own). Raises UserError."""
    if name not in SHAPES:
        raise UserError(f"--shape: {name!r} is not allowed; allowed: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if layers < 0:
        raise UserError(f"--layers: {layers} is not allowed; allowed: 0 (the model's own) or more")
    return replace(shape, num_layers=layers) if layers else shape
