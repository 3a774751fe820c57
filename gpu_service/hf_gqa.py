"""Readers of families with grouped-query attention that need no file of their own."""

from __future__ import annotations

from typing import Any

from gpu_service.hf_common import read_common
from gpu_service.hf_keys import HfKeys
from gpu_service.hf_rope import read_rope
from gpu_service.model_config import ModelConfig, MoeConfig, RouterConfig


def _refuse_windows(hf: HfKeys) -> None:
    """Raises unless every layer sees the whole context."""
    for name in hf.strings("layer_types"):
        if name != "full_attention":
            raise hf.error("layer_types", name, "full_attention")


def _without_bias(hf: HfKeys, common: dict[str, Any]) -> None:
    """Raises where a family without biases in attention is said to have them."""
    if common["attention_bias"]:
        raise hf.error("attention_bias", True, "false")


def read_qwen2_moe(hf: HfKeys) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-57B-A14B: shared experts are weighed by a gate of their own."""
    common = read_common(hf)
    _without_bias(hf, common)
    common["attention_bias"] = hf.boolean("qkv_bias", default=True)
    if hf.boolean("use_sliding_window", default=False):
        raise hf.error("use_sliding_window", True, "false")
    hf.skip("sliding_window")  # means nothing while use_sliding_window is false
    _refuse_windows(hf)
    dense = set(hf.integers("mlp_only_layers"))
    step = hf.integer("decoder_sparse_step", default=1)
    layers = frozenset(i for i in range(common["num_layers"]) if i not in dense and (i + 1) % step == 0)
    router = RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize" if hf.boolean("norm_topk_prob", default=False) else "none",
    )
    shared = hf.integer("shared_expert_intermediate_size")
    return ModelConfig(
        **common,
        model_type="qwen2_moe",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(router, hf.integer("moe_intermediate_size"), shared, layers, shared_gate=True),
    )
