"""Readers of families most of whose layers are linear attention: Qwen3-Next and Qwen3.5-MoE."""

from __future__ import annotations

from gpu_service.hf_config.common import read_common
from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.rope import SectionDefaults, read_rope
from gpu_service.hf_config.routers import read_softmax_router, read_sparse_layers
from gpu_service.model_config import LinearAttentionConfig, ModelConfig, MoeConfig, RouterConfig

_FULL, _LINEAR = "full_attention", "linear_attention"
# Of the published models: a quarter of a head is rotated, of which time, height and width have parts.
_PARTIAL_FACTOR = 0.25
_SECTIONS = SectionDefaults((11, 11, 10), interleaved=True)


def read_linear_attention(hf: HfKeys, num_layers: int) -> LinearAttentionConfig:
    """Sizes, and `layer_types`; without such a list, every `full_attention_interval`-th layer attends.

    Raises ModelConfigError for a list of another length, an unknown type, value heads that key heads do not
    divide, or a model without layers of either kind.
    """
    interval = hf.integer("full_attention_interval", default=4)
    default = tuple(_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (_FULL, _LINEAR)]:
        raise hf.error("layer_types", unknown[0], f"{_FULL}, {_LINEAR}")
    if set(kinds) != {_FULL, _LINEAR}:
        raise hf.error("layer_types", list(kinds), "layers of both types")
    key_heads = hf.integer("linear_num_key_heads", default=16)
    value_heads = hf.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise hf.error("linear_num_value_heads", value_heads, f"a multiple of {key_heads} (key heads)")
    return LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=hf.integer("linear_key_head_dim", default=128),
        value_head_dim=hf.integer("linear_value_head_dim", default=128),
        conv_width=hf.integer("linear_conv_kernel_dim", default=4, minimum=2),
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR),
    )


def read_qwen3_next(hf: HfKeys) -> ModelConfig:
    """Qwen3-Next and Qwen3-Coder-Next."""
    common = read_common(hf)
    router = read_softmax_router(hf, renormalizes=True)
    layers = read_sparse_layers(hf, common["num_layers"])
    return ModelConfig(
        **common,
        model_type="qwen3_next",
        rope=read_rope(hf, common["head_dim"], default_partial_factor=_PARTIAL_FACTOR),
        moe=_moe(hf, router, layers),
        qk_norm=True,
        centered_norms=True,
        linear=read_linear_attention(hf, common["num_layers"]),
        num_mtp_layers=_prediction_layers(hf),
    )


def read_qwen3_5_moe(hf: HfKeys) -> ModelConfig:
    """The language model of Qwen3.5-MoE: every layer is MoE, and a token has three positions."""
    common = read_common(hf, dense_size=0)
    # Of layers that the family does not have, of the router that it always has, of states, which are float32
    # here, and of prediction.
    hf.skip("intermediate_size", "norm_topk_prob", "mamba_ssm_dtype", "mtp_use_dedicated_embeddings")
    hf.refuse("mlp_only_layers", [])
    if not hf.boolean("attn_output_gate", default=True):
        raise hf.error("attn_output_gate", False, "true")
    # Of linear attention's outputs; those of layers that attend have a sigmoid.
    hf.refuse("output_gate_type", "silu", "swish")
    router = RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize",
    )
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        rope=read_rope(hf, common["head_dim"], default_partial_factor=_PARTIAL_FACTOR, mrope=_SECTIONS),
        moe=_moe(hf, router, frozenset(range(common["num_layers"]))),
        qk_norm=True,
        centered_norms=True,
        linear=read_linear_attention(hf, common["num_layers"]),
        num_mtp_layers=_prediction_layers(hf),
    )


def _prediction_layers(hf: HfKeys) -> int:
    return hf.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, minimum=0)


def _moe(hf: HfKeys, router: RouterConfig, layers: frozenset[int]) -> MoeConfig:
    """Shared experts are weighed by a gate of their own."""
    shared = hf.integer("shared_expert_intermediate_size")
    return MoeConfig(router, hf.integer("moe_intermediate_size"), shared, layers, shared_gate=True)
