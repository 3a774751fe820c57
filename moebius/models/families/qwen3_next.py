"""Qwen3-Next, Qwen3-Coder-Next and Qwen3.5-MoE: linear attention, and gated attention in a quarter of the
layers.

Qwen3-Next has one input projection for all of linear attention; Qwen3.5 has separate ones, a router in every
layer, positions in three dimensions and a vision tower.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, rotated
from moebius.checkpoint.gguf.linear_heads import linear_heads
from moebius.checkpoint.gguf.names import ONE_PLUS_WEIGHT_NORM_RULES, gguf_layer, gguf_linear
from moebius.models.common import (
    FULL,
    Common,
    read_common,
    read_mtp_layers,
    read_softmax_router,
    read_sparse_layers,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family, MtpFamily, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import MoE
from moebius.models.layers.gqa import Gate, QkNorm
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.recurrent import GatedDeltaNet
from moebius.models.layers.router import RouterConfig
from moebius.models.names import MTP, ROTARY, SHARED, TEXT, TEXT_SHARED, VISION, VISUAL, TensorNames, rename
from moebius.models.rope import SectionDefaults, read_rope
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

LINEAR = "linear_attention"
# Of the published models: a quarter of a head is rotated.
PARTIAL_FACTOR = 0.25
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
LINEAR_KEYS = SPARSE_KEYS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
# Time, height and width have parts of what is rotated.
SECTIONS = SectionDefaults((11, 11, 10), interleaved=True)


def read_linear_attention(
    hf: HfKeys, common: Common, *, interleaved: bool
) -> tuple[GatedDeltaNet, frozenset[int]]:
    """Linear attention, and the layers that have it, by `layer_types`; without such a list, every
    `full_attention_interval`-th layer attends.

    Raises ModelConfigError for a list of another length, an unknown type, value heads that key heads do not
    divide, or a model without layers of either kind.
    """
    num_layers, interval = common.num_layers, hf.integer("full_attention_interval", default=4)
    default = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (FULL, LINEAR)]:
        raise hf.error("layer_types", unknown[0], f"{FULL}, {LINEAR}")
    if set(kinds) != {FULL, LINEAR}:
        raise hf.error("layer_types", list(kinds), "layers of both types")
    key_heads = hf.integer("linear_num_key_heads", default=16)
    value_heads = hf.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise hf.error("linear_num_value_heads", value_heads, f"a multiple of {key_heads} (key heads)")
    linear = GatedDeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=hf.integer("linear_key_head_dim", default=128),
        value_head_dim=hf.integer("linear_value_head_dim", default=128),
        conv_width=hf.integer("linear_conv_kernel_dim", default=4, minimum=2),
        eps=common.eps,
        interleaved=interleaved,
    )
    return linear, frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def read_gated_moe(hf: HfKeys, common: Common, router: RouterConfig) -> MoE:
    """Shared experts are weighed by a gate of their own."""
    shared = hf.integer("shared_expert_intermediate_size")
    return common.moe(router, hf.integer("moe_intermediate_size"), shared, shared_gate=True)


def read_qwen3_next(hf: HfKeys) -> ModelConfig:
    """Reads Qwen3-Next and Qwen3-Coder-Next."""
    common = read_common(hf)
    router = read_softmax_router(hf, renormalizes=True)
    config = _config(hf, common, router, read_sparse_layers(hf, common.num_layers), interleaved=True)
    # Where config.json does not say, the checkpoint may have the one layer that was published.
    return replace(config, num_mtp_layers=hf.integer(*MTP_KEYS, default=1, minimum=0))


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
    layers = range(common.num_layers)
    return _config(hf, common, router, layers, interleaved=False, mrope=SECTIONS)


def _config(
    hf: HfKeys,
    common: Common,
    router: RouterConfig,
    layers: Container[int],
    *,
    interleaved: bool,
    mrope: SectionDefaults | None = None,
) -> ModelConfig:
    """`layers`: those with experts; `interleaved`: how the input projection of linear attention is laid
    out.
    """
    norm = RMSNorm(common.eps, one_plus_weight=True)
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_partial_factor=PARTIAL_FACTOR, mrope=mrope),
        qk_norm=QkNorm(norm),
        gate=Gate("query"),
        output_bias=common.attention_bias,
    )
    linear, own = read_linear_attention(hf, common, interleaved=interleaved)
    return common.model(
        [linear if layer in own else attention for layer in range(common.num_layers)],
        common.ffns(read_gated_moe(hf, common, router), layers),
        norm=norm,
        num_mtp_layers=read_mtp_layers(hf, *MTP_KEYS),
    )


def gguf_linear_attention(keys: MetadataKeys, config: Config) -> Config:
    """Layers without softmax attention have a decay."""
    heads = linear_heads(keys.model)
    keys.skip("full_attention_interval", "ssm.inner_size")
    own = keys.layers_with("ssm_a")
    kinds = [LINEAR if layer in own else FULL for layer in range(config["num_hidden_layers"])]
    # A file says how many layers of prediction it has, or has none.
    predicting = {"num_nextn_predict_layers": config.get("num_nextn_predict_layers", 0)}
    return (
        rotated(keys, config) | predicting | {"layer_types": kinds, "linear_value_head_dim": heads.value_dim}
    )


# The layer of multi-token prediction that is published is one that attends.
_MTP_RULES = (
    rename("mtp.fc.**", "mtp.0.eh_proj.**"),
    rename("mtp.pre_fc_norm_embedding.**", "mtp.0.enorm.**"),
    rename("mtp.pre_fc_norm_hidden.**", "mtp.0.hnorm.**"),
    rename("mtp.norm.**", "mtp.0.shared_head.norm.**"),
    rename("mtp.layers.*.mlp.shared_expert.**", "mtp.*.mlp.shared_experts.**"),
    rename("mtp.layers.*.**", "mtp.*.**"),
)
_NEXT_RULES = (
    *ONE_PLUS_WEIGHT_NORM_RULES,
    gguf_layer("attn_qkv.weight", "linear_attn.in_proj_qkvz.weight", "mixed_part"),
    gguf_layer("attn_gate.weight", "linear_attn.in_proj_qkvz.weight", "gate_part"),
    # Early files have both in one, as published.
    *gguf_linear("ssm_in", "linear_attn.in_proj_qkvz"),
    *gguf_linear("ssm_ba", "linear_attn.in_proj_ba"),
    gguf_layer("ssm_a", "linear_attn.A_log", "decay"),
    gguf_layer("ssm_dt.bias", "linear_attn.dt_bias"),
    gguf_layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "taps"),
    *gguf_linear("ssm_out", "linear_attn.out_proj"),
)
RULES_3_5 = (
    *ONE_PLUS_WEIGHT_NORM_RULES,
    gguf_layer("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "tiled_mixed"),
    gguf_layer("attn_gate.weight", "linear_attn.in_proj_z.weight", "tiled_rows"),
    gguf_layer("ssm_beta.weight", "linear_attn.in_proj_b.weight", "tiled_rows"),
    gguf_layer("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "tiled_rows"),
    gguf_layer("ssm_a", "linear_attn.A_log", "tiled_decay"),
    gguf_layer("ssm_dt.bias", "linear_attn.dt_bias", "tiled_rows"),
    gguf_layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "tiled_taps"),
    gguf_layer("ssm_out.weight", "linear_attn.out_proj.weight", "tiled_columns"),
)


def linear_of_three(keys: MetadataKeys, config: Config) -> Config:
    """Returns the same with positions in time, height and width; files have room for a fourth part."""
    found, name = gguf_linear_attention(keys, config), "rope.dimension_sections"
    keys.skip(name)
    listed = keys.model.value(name)
    if listed is None:
        return found
    if not isinstance(listed, list) or len(listed) not in (3, 4) or any(listed[3:]):
        raise keys.error(name, listed, "three numbers, or a zero after them")
    sections = {"mrope_section": listed[:3]}
    if "rope_scaling" in config:
        return found | {"rope_scaling": config["rope_scaling"] | sections}
    return found | sections


FAMILIES = (
    Family(
        "qwen3_next",
        read_qwen3_next,
        # In GGUF files multi-token prediction follows as one more layer.
        TensorNames((ROTARY, MTP, SHARED), mtp_layers=True, mtp_renames=_MTP_RULES),
        gguf=(
            GgufFamily(
                "qwen3next",
                LINEAR_KEYS,
                1,
                {"norm_topk_prob": True},
                gguf_linear_attention,
                rules=_NEXT_RULES,
            ),
        ),
        mtp=MtpFamily(),
    ),
    Family(
        "qwen3_5_moe",
        read_qwen3_5_moe,
        TensorNames((MTP, VISION, TEXT_SHARED, TEXT), ("fused", "per_expert"), mtp_renames=_MTP_RULES),
        VisionFamily(read_grid_vision, (VISUAL,), tower="Qwen3_5Moe", processor="qwen"),
        mtp=MtpFamily(),
    ),
    Family(
        "qwen3_5_moe_text",
        read_qwen3_5_moe,
        # In GGUF files multi-token prediction follows as one more layer.
        TensorNames(
            (MTP, VISION, TEXT_SHARED, TEXT, SHARED),
            ("fused", "per_expert"),
            mtp_layers=True,
            mtp_renames=_MTP_RULES,
        ),
        # Without the vision tower, which is a file of another kind.
        gguf=(
            GgufFamily(
                "qwen35moe", LINEAR_KEYS, 1, {"norm_topk_prob": True}, linear_of_three, rules=RULES_3_5
            ),
        ),
        mtp=MtpFamily(),
    ),
)
