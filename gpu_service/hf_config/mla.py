"""How config.json of the families with multi-head latent attention is read.

Sources: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), and the configuration classes of
transformers 5.23. Kimi-K2 is DeepSeek-V3 under a name of its own.
"""

from __future__ import annotations

from typing import Any

from gpu_service.hf_config.common import read_common
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.rope import read_rope
from gpu_service.hf_config.routers import read_biased_router
from gpu_service.model_config import MlaConfig, ModelConfig, MoeConfig, RopeConfig, RouterConfig
from gpu_service.ops.rope_frequencies import yarn_mscale

# Of training, of other engines' parallelism, and what follows from other keys.
_HARMLESS = ("aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux")


def read_mla_common(hf: HfKeys) -> dict[str, Any]:
    """`read_common`, with a query's size for a head's, and what is common to latent attention."""
    hf.skip(*_HARMLESS)
    common = read_common(hf)
    heads = common["num_heads"]
    if common["num_kv_heads"] != heads:
        raise hf.error("num_key_value_heads", common["num_kv_heads"], f"num_attention_heads ({heads})")
    rope_dim = hf.integer("qk_rope_head_dim", minimum=2)
    rope = read_rope(hf, rope_dim, interleaved=hf.boolean("rope_interleave", default=True))
    if rope.rotary_dim != rope_dim:
        raise hf.error("partial_rotary_factor", rope.rotary_dim / rope_dim, "1.0 with latent attention")
    mla = _read_mla(hf, rope)
    return common | {"head_dim": mla.qk_head_dim, "rope": rope, "mla": mla}


def _read_mla(hf: HfKeys, rope: RopeConfig) -> MlaConfig:
    rope_dim, nope_dim = rope.rotary_dim, hf.integer("qk_nope_head_dim")
    # YaRN's temperature, which these families apply to the scores, to the extent that mscale_all_dim says.
    numbers = dict(rope.scaling)
    all_dim = numbers.get("mscale_all_dim")
    temperature = 1.0 if all_dim is None else yarn_mscale(numbers["factor"], all_dim)
    return MlaConfig(
        q_lora_rank=hf.integer("q_lora_rank") if hf.has("q_lora_rank") else None,
        kv_lora_rank=hf.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=hf.integer("v_head_dim"),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * temperature**2,
    )


def read_moe(hf: HfKeys, router: RouterConfig, layers: frozenset[int]) -> MoeConfig:
    """Shared experts are as wide as routed ones."""
    if hf.integer("moe_layer_freq", default=1) != 1:
        raise hf.error("moe_layer_freq", hf.integer("moe_layer_freq"), "1")
    size = hf.integer("moe_intermediate_size")
    return MoeConfig(router, size, hf.integer("n_shared_experts", default=0, minimum=0) * size, layers)


def after_dense(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """MoE layers where the first ones are dense."""
    return frozenset(range(hf.integer("first_k_dense_replace", minimum=0), num_layers))


def listed_or_after_dense(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """MoE layers as `mlp_layer_types` lists them; where it does not, those after the first dense ones."""
    kinds = hf.strings("mlp_layer_types")
    if not kinds:
        return after_dense(hf, num_layers)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'dense' and 'sparse'")
    hf.skip("first_k_dense_replace")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")


def read_v3_router(hf: HfKeys) -> RouterConfig:
    """The one kind that DeepSeek-V3's keys can name here."""
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("topk_method", "noaux_tc")
    return read_biased_router(hf)


def read_deepseek_v3(hf: HfKeys) -> ModelConfig:
    """DeepSeek-V3, R1 and V3.1, and Kimi-K2."""
    common = read_mla_common(hf)
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        moe=read_moe(hf, read_v3_router(hf), after_dense(hf, common["num_layers"])),
        num_mtp_layers=hf.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0),
    )


_V2_METHODS = ("greedy", "group_limited_greedy")


def read_deepseek_v2(hf: HfKeys) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite: softmax scores, chosen among all or within the groups of the best experts."""
    hf.refuse("scoring_func", "softmax")
    hf.refuse("mlp_bias")
    # Transformers and the published code disagree about what it would do; no checkpoint has it.
    hf.refuse("norm_topk_prob")
    method = hf.string("topk_method", default="greedy")
    if method not in _V2_METHODS:
        raise hf.error("topk_method", method, ", ".join(_V2_METHODS))
    hf.skip("n_group", "topk_group")  # mean nothing to the greedy method
    is_grouped = method == "group_limited_greedy"
    router = RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        num_groups=hf.integer("n_group") if is_grouped else 1,
        top_groups=hf.integer("topk_group") if is_grouped else 1,
        group_score="max",
        scale=hf.number("routed_scaling_factor", default=1.0),
        float32_gate=True,
    )
    common = read_mla_common(hf)
    moe = read_moe(hf, router, after_dense(hf, common["num_layers"]))
    return ModelConfig(**common, model_type="deepseek_v2", moe=moe)


def read_glm4_moe_lite(hf: HfKeys) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3's router and attention; layers may be listed by kind."""
    common = read_mla_common(hf)
    return ModelConfig(
        **common,
        model_type="glm4_moe_lite",
        moe=read_moe(hf, read_v3_router(hf), listed_or_after_dense(hf, common["num_layers"])),
        num_mtp_layers=hf.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0),
    )
