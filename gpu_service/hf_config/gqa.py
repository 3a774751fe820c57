"""Readers of families with grouped-query attention that need no file of their own."""

from __future__ import annotations

from typing import Any

from gpu_service.hf_config.common import read_common
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.rope import SectionDefaults, read_rope
from gpu_service.hf_config.routers import (
    read_biased_router,
    read_softmax_router,
    read_sparse_layers,
    refuse_used_window,
)
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
    refuse_used_window(hf)
    _refuse_windows(hf)
    layers = read_sparse_layers(hf, common["num_layers"])
    router = read_softmax_router(hf)
    shared = hf.integer("shared_expert_intermediate_size")
    return ModelConfig(
        **common,
        model_type="qwen2_moe",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(router, hf.integer("moe_intermediate_size"), shared, layers, shared_gate=True),
    )


def read_qwen3_moe(
    hf: HfKeys, *, default_theta: float = 10000.0, mrope: SectionDefaults | None = None
) -> ModelConfig:
    """Qwen3-MoE and Qwen3-Coder; the defaults are those of the text tower that uses this too."""
    common = read_common(hf)
    refuse_used_window(hf)
    # Qwen3-Coder names what its relatives have and it has not.
    hf.refuse("qkv_bias")
    hf.refuse("shared_expert_intermediate_size", 0)
    if not hf.boolean("use_qk_norm", default=True):
        raise hf.error("use_qk_norm", False, "true")
    layers = read_sparse_layers(hf, common["num_layers"])
    router = read_softmax_router(hf)
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        rope=read_rope(hf, common["head_dim"], default_theta=default_theta, mrope=mrope),
        moe=MoeConfig(router, hf.integer("moe_intermediate_size"), 0, layers),
        qk_norm=True,
    )


def read_glm4_moe(hf: HfKeys, *, mrope: SectionDefaults | None = None) -> ModelConfig:
    """GLM-4.5 to 4.7: sigmoid router with groups, dense first layers, half of a head rotated."""
    common = read_common(hf)
    hf.refuse("sliding_window")
    first_moe = hf.integer("first_k_dense_replace", default=1, minimum=0)
    router = read_biased_router(hf)
    moe_size = hf.integer("moe_intermediate_size")
    shared = hf.integer("n_shared_experts", default=1, minimum=0) * moe_size
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        rope=read_rope(hf, common["head_dim"], default_partial_factor=0.5, mrope=mrope),
        moe=MoeConfig(router, moe_size, shared, frozenset(range(first_moe, common["num_layers"]))),
        qk_norm=hf.boolean("use_qk_norm", default=False),
        num_mtp_layers=hf.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0),
    )


def read_mixtral(hf: HfKeys) -> ModelConfig:
    """Mixtral: every layer is MoE, and `intermediate_size` is an expert's."""
    common = read_common(hf)
    _without_bias(hf, common)
    hf.refuse("sliding_window")
    hf.skip("router_jitter_noise")  # of training
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize",
    )
    return ModelConfig(
        **common,
        model_type="mixtral",
        rope=read_rope(hf, common["head_dim"], default_theta=1e6),
        moe=MoeConfig(router, common["intermediate_size"], 0, frozenset(range(common["num_layers"]))),
    )


def read_olmoe(hf: HfKeys) -> ModelConfig:
    """OLMoE: every layer is MoE, `intermediate_size` is an expert's, queries and keys are normed."""
    common = read_common(hf)
    hf.refuse("clip_qkv")
    hf.refuse("sliding_window")
    router = read_softmax_router(hf)
    return ModelConfig(
        **common,
        model_type="olmoe",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(router, common["intermediate_size"], 0, frozenset(range(common["num_layers"]))),
        qk_norm=True,
    )


def read_dots1(hf: HfKeys) -> ModelConfig:
    """dots.llm1: attention of Qwen3, router and shared experts of DeepSeek-V3."""
    common = read_common(hf)
    _refuse_windows(hf)
    if hf.has("sliding_window") and hf.integer("max_window_layers", default=62) < common["num_layers"]:
        raise hf.error("sliding_window", "...", "with max_window_layers of all layers, or absent")
    hf.refuse("moe_layer_freq", 1)
    hf.refuse("scoring_func", "sigmoid", "noaux_tc")
    hf.refuse("topk_method", "noaux_tc")
    router = read_biased_router(hf, renormalizes=False)
    first_moe = hf.integer("first_k_dense_replace", default=0, minimum=0)
    moe_size = hf.integer("moe_intermediate_size")
    return ModelConfig(
        **common,
        model_type="dots1",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(
            router,
            moe_size,
            hf.integer("n_shared_experts") * moe_size,
            frozenset(range(first_moe, common["num_layers"])),
        ),
        qk_norm=True,
    )


def read_ernie4_5_moe(hf: HfKeys) -> ModelConfig:
    """ERNIE 4.5 text models; MoE layers are every n-th of a range."""
    common = read_common(hf)
    _without_bias(hf, common)
    hf.refuse("use_bias")
    hf.refuse("sliding_window")
    if not hf.boolean("moe_use_aux_free", default=True):
        raise hf.error("moe_use_aux_free", False, "true")
    hf.skip("moe_capacity", "moe_gate")  # of training; the router is always the same
    common["tie_word_embeddings"] = hf.boolean("tie_word_embeddings", default=True)
    last = common["num_layers"] - 1
    first_moe = hf.integer("moe_layer_start_index", default=1, minimum=0)
    end = hf.integer("moe_layer_end_index", default=-1, minimum=-1)
    step = hf.integer("moe_layer_interval", default=1)
    layers = range(first_moe, min(last if end == -1 else end, last) + 1)
    router = RouterConfig(
        num_experts=hf.integer("moe_num_experts", "num_experts", default=64),
        top_k=hf.integer("moe_k", "num_experts_per_tok", default=6),
        score="softmax",
        correction_bias=True,
        correction_bias_is_row=True,
        post="renormalize",
        # The family divides by at least this much; it makes a difference to sums of its own order only.
        renormalize_epsilon=hf.number("moe_norm_min", default=1e-12),
        float32_gate=True,
    )
    moe_size = hf.integer("moe_intermediate_size")
    shared = hf.integer("moe_num_shared_experts", default=2, minimum=0) * moe_size
    return ModelConfig(
        **common,
        model_type="ernie4_5_moe",
        rope=read_rope(hf, common["head_dim"], default_theta=500000.0, interleaved=True),
        moe=MoeConfig(router, moe_size, shared, frozenset(i for i in layers if (i + 1) % step == 0)),
        num_mtp_layers=hf.integer("num_nextn_predict_layers", default=0, minimum=0),
    )


def read_minimax_m2(hf: HfKeys) -> ModelConfig:
    """MiniMax-M2 and M2.1: every layer is MoE, and `intermediate_size` is an expert's."""
    common = read_common(hf)
    _without_bias(hf, common)
    hf.refuse("sliding_window")
    hf.refuse("shared_intermediate_size", 0)
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("qk_norm_type", "per_layer")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    for kind in hf.integers("attn_type_list"):
        if kind != 1:
            raise hf.error("attn_type_list", kind, "1 (attention to the whole context)")
    # Of training, of prediction heads, and of parts that these models do not have.
    hf.skip("router_jitter_noise", "use_mtp", "mtp_transformer_layers", "mlp_intermediate_size")
    hf.skip("shared_moe_mode")
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        post="renormalize",
        # As its checkpoints store the gate's weights.
        float32_gate=True,
    )
    head_dim = common["head_dim"]
    rotated = hf.integer("rotary_dim", default=head_dim) / head_dim
    return ModelConfig(
        **common,
        model_type="minimax_m2",
        rope=read_rope(hf, head_dim, default_theta=5e6, default_partial_factor=rotated),
        moe=MoeConfig(router, common["intermediate_size"], 0, frozenset(range(common["num_layers"]))),
        qk_norm=True,
        num_mtp_layers=hf.integer("num_mtp_modules", default=0, minimum=0),
    )
