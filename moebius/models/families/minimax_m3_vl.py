"""MiniMax-M3: attention to blocks of tokens that each KV head chooses, gpt-oss' SwiGLU.

Sources: the configuration class and the checkpoint conversion of transformers 5.23; keys as the published
config.json has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.names import ONE_PLUS_WEIGHT_NORM_RULES, gguf_layer, gguf_linear
from moebius.models.common import (
    FULL,
    Common,
    listed_or_after_dense,
    read_biased_router,
    read_common,
    read_flags,
    read_mtp_layers,
    refuse_bias,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts
from moebius.models.layers.gqa import BlockIndexer, QkNorm
from moebius.models.layers.norms import RMSNorm
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_rope
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_SPARSE = "minimax_m3_sparse"
# Of training, of images (what their processor says as well), and of parts that these models do not have.
_HARMLESS = (
    "image_grid_pinpoints",
    "image_seq_length",
    "img_token_compression_config",
    "merged_hidden_size",
    "mtp_transformer_layers",
    "num_nextn_predict_layers",  # Beside `num_mtp_modules`, of each module.
    "process_image_mode",
    "projector_hidden_act",
    "projector_hidden_size",  # The tower's builder reads it.
    "router_jitter_noise",
    "use_mtp",
    "video_token_index",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)

_ALWAYS = ("multimodal_projector_bias", "use_gemma_norm", "use_qk_norm", "use_routing_bias")


def _read_blocks(hf: HfKeys, common: Common, norm: RMSNorm) -> tuple[BlockIndexer | None, frozenset[int]]:
    """How blocks are chosen, and the layers that do: in a section as published, or among the other keys as
    transformers writes it; None: no layer chooses.
    """
    num_layers, kv_heads = common.num_layers, common.num_kv_heads
    section = hf.section("sparse_attention_config")
    kinds = hf.strings("layer_types") or (FULL,) * num_layers
    own, names = hf, ("index_n_heads", "index_head_dim", "index_block_size")
    more = "index_topk_blocks", "index_local_blocks"
    if section is not None:
        own, names = section, ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size")
        more = "sparse_topk_blocks", "sparse_local_block"
        # Values of their own are switched off by a list that is not read: no checkpoint has them.
        section.skip("sparse_disable_index_value")
        section.refuse("sparse_init_block", 0)
        section.refuse("sparse_score_type", "max")
        flags = read_flags(section, "sparse_attention_freq", num_layers)
        if not section.boolean("use_sparse_attention", default=True):
            flags = [0] * num_layers
        kinds = tuple(_SPARSE if flag else FULL for flag in flags)
    heads = own.integer(names[0], default=4)
    sizes = own.integer(names[1], default=128), own.integer(names[2], default=128)
    top, local = own.integer(more[0], default=16), own.integer(more[1], default=1, minimum=0)
    if section is not None and section.unread:
        raise section.error(section.unread[0], "...", "keys of MiniMax-M3's sparse attention")
    if len(kinds) != num_layers or not set(kinds) <= {FULL, _SPARSE}:
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {FULL} and {_SPARSE}")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == _SPARSE)
    if not layers:
        return None, layers
    if heads != kv_heads:
        raise own.error(names[0], heads, f"num_key_value_heads ({kv_heads})")
    if local > top:
        raise own.error(more[1], local, f"at most {more[0]} ({top})")
    return BlockIndexer(*sizes, top_blocks=top, local_blocks=local, norm=norm), layers


def _moe_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    if hf.has("moe_layer_freq") and not hf.has("mlp_layer_types"):
        flags = read_flags(hf, "moe_layer_freq", num_layers)
        return frozenset(layer for layer, flag in enumerate(flags) if flag)
    return listed_or_after_dense(hf, num_layers, default=0)


def read_minimax_m3(hf: HfKeys) -> ModelConfig:
    """`intermediate_size` is an expert's; queries and keys are normed head by head."""
    hf.skip(*_HARMLESS)
    hf.refuse("hidden_act", "silu", "swigluoai")
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("qk_norm_type", "per_head")
    hf.refuse("n_shared_experts", 1)
    hf.refuse("attention_output_gate")
    hf.refuse("num_reward_heads", 0)
    for name in _ALWAYS:
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    common = read_common(
        hf.with_values(hidden_act="silu"), dense_size=hf.integer("dense_intermediate_size", default=12288)
    )
    refuse_bias(hf, common)
    limit, alpha = hf.number("swiglu_limit", default=7.0), hf.number("swiglu_alpha", default=1.702)
    common = replace(common, activation="gpt_oss", limit=limit, alpha=alpha)
    head_dim, norm = common.head_dim, RMSNorm(common.eps, one_plus_weight=True)
    rotated = hf.integer("rotary_dim", default=min(64, head_dim)) / head_dim
    blocks, choosing = _read_blocks(hf, common, norm)
    rope = read_rope(hf, head_dim, default_theta=5e6, default_partial_factor=rotated)
    if blocks is not None and rope.rotary_dim > blocks.head_dim:
        raise hf.error("index_head_dim", blocks.head_dim, f"at least what is rotated ({rope.rotary_dim})")
    moe = common.moe(
        read_biased_router(hf, scale=2.0),
        Experts(hf.integer("intermediate_size"), "gpt_oss", alpha, limit),
        hf.integer("shared_intermediate_size", default=3072),
    )
    attention = common.gqa(rope, qk_norm=QkNorm(norm))
    layers = range(common.num_layers)
    return common.model(
        [replace(attention, blocks=blocks) if layer in choosing else attention for layer in layers],
        common.ffns(moe, _moe_layers(hf, common.num_layers)),
        norm=norm,
        num_mtp_layers=read_mtp_layers(hf, "num_mtp_modules"),
    )


_TOWER, _VIT = "vision_tower.", "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_VISION = VisionFamily(
    read_grid_vision,
    (
        rename(_VIT + "embeddings.patch_embedding.**", _TOWER + "embeddings.proj.**"),
        rename(_VIT + "encoder.layers.**", _TOWER + "layers.**"),
        rename(_VIT + "pre_layrnorm.**", _TOWER + "pre_layrnorm.**"),
        rename(_PROJECTOR + "**", _PROJECTOR + "**"),
        rename("patch_merge_mlp.**", _PROJECTOR + "merge_**"),
        # Names that the modules do not have are an error, not left out.
        rename(_TOWER + "**", _TOWER + "**"),
    ),
    tower="MiniMaxM3VL",
    processor="minimax",
    tokens={"start": "]<]start of image[>[", "end": "]<]end of image[>["},
)
_GGUF_KEYS = {
    "attention.indexer.block_size": "index_block_size",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.local_blocks": "index_local_blocks",
    "attention.indexer.top_k": "index_topk_blocks",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "feed_forward_length": "dense_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.dimension_count": "rotary_dim",
}


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Layers with an indexer choose; shared experts are as wide as routed ones."""
    if not keys.get("expert_weights_norm"):
        raise keys.error("expert_weights_norm", False, "true")
    own = keys.layers_with("indexer.q_proj.weight")
    kinds = [_SPARSE if layer in own else FULL for layer in range(config["num_hidden_layers"])]
    shared = config.get("n_shared_experts", 1) * config["intermediate_size"]
    return {"layer_types": kinds, "shared_intermediate_size": shared}


_GGUF_RULES = (
    *ONE_PLUS_WEIGHT_NORM_RULES,
    gguf_layer("ffn_norm.weight", "post_attention_layernorm.weight", "one_plus_weight"),
    *gguf_linear("indexer.q_proj", "self_attn.indexer.q_proj"),
    *gguf_linear("indexer.k_proj", "self_attn.indexer.k_proj"),
    gguf_layer("indexer.q_norm.weight", "self_attn.indexer.q_norm.weight", "one_plus_weight"),
    gguf_layer("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", "one_plus_weight"),
)
_PUBLISHED, _LAYER = "language_model.model.", "model.layers.*."
_BLOCK, _ATTENTION = _PUBLISHED + "layers.*.block_sparse_moe.", _PUBLISHED + "layers.*.self_attn."
FAMILIES = (
    Family(
        "minimax_m3_vl",
        read_minimax_m3,
        TensorNames(
            (
                ROTARY,
                drop("vision_tower.**"),
                drop("multi_modal_projector.**"),
                drop("patch_merge_mlp.**"),
                drop("mtp.**"),
                drop("language_model.mtp.**"),
                drop("language_model.model.mtp.**"),
                rename("language_model.lm_head.**", "lm_head.**"),
                rename(_BLOCK + "e_score_correction_bias", _LAYER + "mlp.gate.e_score_correction_bias"),
                rename(_BLOCK + "gate.**", _LAYER + "mlp.gate.**"),
                rename(_BLOCK + "shared_experts.**", _LAYER + "mlp.shared_experts.**"),
                *(
                    rename(_ATTENTION + f"index_{part}.**", _LAYER + f"self_attn.indexer.{part}.**")
                    for part in ("q_proj", "k_proj", "q_norm", "k_norm")
                ),
                rename(_PUBLISHED + "**", "model.**"),
            ),
            ("per_expert_w123",),
            mtp_layers=True,
        ),
        _VISION,
        # Without the vision tower, which is a file of another kind.
        gguf=(GgufFamily("minimax-m3", _GGUF_KEYS, 2, derive=_gguf_config, rules=_GGUF_RULES),),
    ),
)
