"""What several published configurations have in common."""

from __future__ import annotations

from typing import Any

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# What libraries write into every file, and nothing here looks at.
SAVED = {"initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True}


def common(
    model_type: str, sizes: tuple[int, int, int, int, int, int], length: int, theta: float, eps: float = 1e-6
) -> dict[str, Any]:
    """`sizes`: vocabulary, hidden, dense MLP, layers, heads, KV heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": model_type,
        **dict(zip((*names, "num_key_value_heads"), sizes, strict=True)),
        "max_position_embeddings": length,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **SAVED,
    }


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The configuration but for some keys."""
    return {key: value for key, value in config.items() if key not in names}


def deepseek_moe(experts: tuple[int, int, int, int], dense: int, scale: float, **more: Any) -> dict[str, Any]:
    """`experts`: how many, chosen, width, shared; `dense`: layers before the first that has them."""
    count, chosen, width, shared = experts
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scale,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        **more,
    }


def yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    """DeepSeek's, which stretches 4096 positions."""
    scaling: dict[str, Any] = {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale}
    lengths = {"original_max_position_embeddings": 4096, "beta_fast": beta_fast, "beta_slow": 1.0}
    return {"rope_scaling": scaling | lengths}
