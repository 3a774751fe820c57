"""Shapes of published models, as the families qwen3_moe, glm4_moe and glm5_next express them, and their
config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

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

    # Before the names of layers, embedding and norm.
    prefix: ClassVar[str] = "model."
    fewest_layers: ClassVar[int] = 1
    # Whether it is also written as one GGUF file.
    has_gguf: ClassVar[bool] = True
    # Layers of multi-token prediction after the others.
    num_mtp_layers: ClassVar[int] = 0

    def hf_config(self, quantization: dict[str, Any] | None) -> dict[str, Any]:
        """Returns config.json of the shape's family; `quantization`: of its experts, None: they
        have 16 bits.
        """
        config = self._hf_keys()
        return config if quantization is None else config | {"quantization_config": quantization}

    def _hf_keys(self) -> dict[str, Any]:
        """Returns the keys of family qwen3_moe: every layer is MoE, embeddings are not tied."""
        return {
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


@dataclass(frozen=True)
class GlmShape(RandomShape):
    """A shape of the first layers, which have no experts, and of the others; filled by `SHAPES`."""

    dense_size: int = 12288
    dense_layers: int = 3
    # What routed experts add is multiplied by it.
    routed_scaling: float = 2.5

    has_gguf: ClassVar[bool] = False

    def _hf_moe(self) -> dict[str, Any]:
        """Returns the keys of config.json for the router and the expert of all tokens."""
        return {
            "moe_intermediate_size": self.moe_intermediate_size,
            "n_group": 1,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": self.top_k,
            "routed_scaling_factor": self.routed_scaling,
            "topk_group": 1,
        }


@dataclass(frozen=True)
class Glm4Shape(GlmShape):
    """GLM-4.5-Air's: softmax attention with biases, and a layer of multi-token prediction."""

    # One with experts.
    fewest_layers: ClassVar[int] = 2
    num_mtp_layers: ClassVar[int] = 1

    def _hf_keys(self) -> dict[str, Any]:
        """Returns the keys of family glm4_moe."""
        return self._hf_moe() | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": self.dense_layers,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.dense_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_nextn_predict_layers": self.num_mtp_layers,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_qk_norm": False,
            "vocab_size": self.vocab_size,
        }


_LINEAR, _INDEXED = "linear_attention", "indexed_attention"


@dataclass(frozen=True)
class Glm5Shape(GlmShape):
    """Sizes beyond those of all shapes, in elements; filled by `SHAPES`. `head_dim`: of a query and a key."""

    value_dim: int = 256
    query_rank: int = 1536
    key_value_rank: int = 512
    linear_heads: int = 64
    linear_dim: int = 128
    index_heads: int = 32
    index_dim: int = 128
    index_pool: int = 4
    index_top_k: int = 2048
    streams: int = 4

    prefix: ClassVar[str] = "model.language_model."
    # The first with latent attention; the reader wants layers of both kinds.
    fewest_layers: ClassVar[int] = 4

    def attends(self, layer: int) -> bool:
        """Returns whether a layer has latent attention, not linear attention."""
        return layer % 4 == 3

    def _hf_keys(self) -> dict[str, Any]:
        """Returns the keys of family glm5_next, without a tower."""
        kinds = [_INDEXED if self.attends(layer) else _LINEAR for layer in range(self.num_layers)]
        mlps = ["dense" if layer < self.dense_layers else "sparse" for layer in range(self.num_layers)]
        text = self._hf_moe() | {
            "model_type": "glm5_next_text",
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "hc_eps": 1e-6,
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": 20,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "index_head_dim": self.index_dim,
            "index_kpool": self.index_pool,
            "index_n_heads": self.index_heads,
            "index_topk": self.index_top_k,
            "intermediate_size": self.dense_size,
            "kv_lora_rank": self.key_value_rank,
            "layer_types": kinds,
            "linear_attn_config": {
                "gate_lower_bound": -5.0,
                "head_dim": self.linear_dim,
                "num_heads": self.linear_heads,
                "safe_gate": True,
                "short_conv_kernel_size": 4,
            },
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_layer_types": mlps,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_heads,
            "num_nextn_predict_layers": 0,
            "pad_token_id": 0,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": 0,
            "rms_norm_eps": 1e-5,
            "scoring_func": "sigmoid",
            "swiglu_limit": 10.0,
            "topk_method": "noaux_tc",
            "v_head_dim": self.value_dim,
            "vocab_size": self.vocab_size,
        }
        return {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "text_config": text,
            "tie_word_embeddings": False,
        }


# The second has the experts and the attention sizes of Qwen3-Next, but softmax attention in all its layers
# and no shared expert: this family has no others. The "-tiny" ones have layers of all kinds.
SHAPES: dict[str, RandomShape] = {
    shape.name: shape
    for shape in (
        RandomShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 128, 8, 151936),
        RandomShape("qwen3-next-80b", 48, 2048, 16, 2, 256, 512, 512, 10, 151936),
        RandomShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 128, 8, 151936),
        Glm4Shape(
            "glm-4.5-air", 46, 4096, 96, 8, 128, 1408, 128, 8, 151552, 131072,
            dense_size=10944, dense_layers=1, routed_scaling=1.0,
        ),
        RandomShape("tiny", 2, 64, 4, 2, 32, 64, 8, 2, 512, 2048),
        RandomShape("small", 4, 256, 4, 2, 128, 128, 32, 4, 2048, 4096),
        Glm4Shape(
            "glm-4.5-air-tiny", 3, 64, 4, 2, 32, 64, 8, 2, 512, 2048,
            dense_size=128, dense_layers=1, routed_scaling=1.0,
        ),
        Glm5Shape("glm-5.3-flash", 45, 4096, 64, 64, 256, 2048, 288, 8, 154880, 1048576),
        Glm5Shape(
            "glm-5.3-flash-tiny", 5, 64, 4, 4, 32, 64, 8, 2, 512, 2048,
            value_dim=32, query_rank=32, key_value_rank=32, linear_heads=2, linear_dim=32, index_heads=4,
            index_dim=32, index_top_k=32, dense_size=128, dense_layers=1,
        ),
    )
}  # fmt: skip


def parse_shape(name: str, layers: int) -> RandomShape:
    """A shape by name, with `layers` layers (0: the model's own). Raises UserError."""
    if name not in SHAPES:
        raise UserError(f"--shape: {name!r} is not allowed; allowed: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if layers and layers < shape.fewest_layers:
        allowed = f"0 (the model's own), or {shape.fewest_layers} or more"
        raise UserError(f"--layers: {layers} is not allowed; allowed: {allowed}")
    return replace(shape, num_layers=layers) if layers else shape
