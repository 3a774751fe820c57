"""Qwen3.5-MoE: linear attention with separate input projections, gated attention, mRoPE, a vision tower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.names import CENTERED_NORM_RULES, gguf_layer
from moebius.models.common import read_common, read_mtp_layers
from moebius.models.config import ModelConfig, RouterConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import MTP, SHARED, TEXT, TEXT_SHARED, VISION, VISUAL, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys
from moebius.models.family import VisionFamily
from moebius.models.linear import (
    LINEAR_KEYS,
    MTP_KEYS,
    PARTIAL_FACTOR,
    gguf_linear_attention,
    read_gated_moe,
    read_linear_attention,
)
from moebius.models.rope import SectionDefaults
from moebius.models.vision import read_grid_vision

# Time, height and width have parts of what is rotated.
_SECTIONS = SectionDefaults((11, 11, 10), interleaved=True)


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
        rope=read_rope(hf, common["head_dim"], default_partial_factor=PARTIAL_FACTOR, mrope=_SECTIONS),
        moe=read_gated_moe(hf, router, frozenset(range(common["num_layers"]))),
        qk_norm=True,
        output_gate=True,
        output_bias=common["attention_bias"],
        one_plus_weight_norms=True,
        linear=read_linear_attention(hf, common["num_layers"], interleaved=False),
        num_mtp_layers=read_mtp_layers(hf, *MTP_KEYS),
    )


_RULES = (
    *CENTERED_NORM_RULES,
    gguf_layer("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "tiled_mixed"),
    gguf_layer("attn_gate.weight", "linear_attn.in_proj_z.weight", "tiled_rows"),
    gguf_layer("ssm_beta.weight", "linear_attn.in_proj_b.weight", "tiled_rows"),
    gguf_layer("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "tiled_rows"),
    gguf_layer("ssm_a", "linear_attn.A_log", "tiled_decay"),
    gguf_layer("ssm_dt.bias", "linear_attn.dt_bias", "tiled_rows"),
    gguf_layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "tiled_taps"),
    gguf_layer("ssm_out.weight", "linear_attn.out_proj.weight", "tiled_columns"),
)


def _linear_of_three(keys: MetadataKeys, config: Config) -> Config:
    """The same with positions in time, height and width; files have room for a fourth part."""
    found, name = gguf_linear_attention(keys, config), "rope.dimension_sections"
    keys.skip(name)
    listed = keys.model.value(name)
    if listed is None:
        return found
    if not isinstance(listed, list) or len(listed) not in (3, 4) or any(listed[3:]):
        raise keys.error(name, listed, "three numbers, or a zero behind them")
    sections = {"mrope_section": listed[:3]}
    if "rope_scaling" in config:
        return found | {"rope_scaling": config["rope_scaling"] | sections}
    return found | sections


FAMILIES = (
    Family(
        "qwen3_5_moe",
        read_qwen3_5_moe,
        TensorNames((MTP, VISION, TEXT_SHARED, TEXT), ("fused", "per_expert")),
        VisionFamily(read_grid_vision, (VISUAL,), tower="Qwen3_5Moe", processor="qwen"),
    ),
    Family(
        "qwen3_5_moe_text",
        read_qwen3_5_moe,
        # In GGUF files multi-token prediction follows as one more layer.
        TensorNames((MTP, VISION, TEXT_SHARED, TEXT, SHARED), ("fused", "per_expert"), mtp_layers=True),
        # Without the vision tower, which is a file of another kind.
        gguf=(
            GgufFamily("qwen35moe", LINEAR_KEYS, 1, {"norm_topk_prob": True}, _linear_of_three, rules=_RULES),
        ),
    ),
)
