"""LFM2 and LFM2.5 (Liquid AI, 8B-A1B, 24B-A2B): short convolutions in most layers, attention in some; sigmoid
router with a bias.

Sources: configuration class, model and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily
from moebius.checkpoint.gguf.names import gguf_layer, gguf_linear, gguf_top
from moebius.models.common import FULL, read_common, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.layers.recurrent import ShortConv
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_CONV = "conv"


def _conv_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Raises ModelConfigError unless each layer is listed as of one of the two kinds, and both are there."""
    kinds = hf.strings("layer_types")
    if len(kinds) != num_layers or set(kinds) != {_CONV, FULL}:
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {_CONV!r} and {FULL!r}, both of them")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _CONV)


def _read_router(hf: HfKeys) -> RouterConfig:
    return RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=hf.boolean("use_expert_bias", default=True),
        post="renormalize" if hf.boolean("norm_topk_prob", default=True) else "none",
        renormalize_epsilon=1e-6,
        scale=hf.number("routed_scaling_factor", default=1.0),
    )


def read_lfm2_moe(hf: HfKeys) -> ModelConfig:
    """The head is the embedding unless it is said to be another matrix; the first layers are dense."""
    tied = hf.boolean("tie_embedding", "tie_word_embeddings", default=True)
    eps = hf.number("norm_eps", default=1e-5)
    common = read_common(hf.with_values(tie_word_embeddings=tied, rms_norm_eps=eps))
    refuse_bias(hf, common)
    hf.refuse("conv_bias")
    num_layers, size = common.num_layers, common.hidden_size
    conv_layers = _conv_layers(hf, num_layers)
    dense = hf.integer("num_dense_layers", default=2, minimum=0)
    attention = common.gqa(read_rope(hf, common.head_dim, default_theta=1e6), qk_norm=QkNorm(common.norm))
    convolution = ShortConv(
        num_key_heads=size,
        num_value_heads=size,
        key_head_dim=0,
        value_head_dim=1,
        conv_width=hf.integer("conv_L_cache", default=3, minimum=2),
        eps=common.eps,
    )
    return common.model(
        [convolution if layer in conv_layers else attention for layer in range(num_layers)],
        common.ffns(
            common.moe(_read_router(hf), hf.integer("moe_intermediate_size")), range(dense, num_layers)
        ),
    )


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """Layers without key and value heads are convolutions."""
    count = config["num_hidden_layers"]
    heads = keys.listed("attention.head_count_kv", count)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if one else _CONV for one in heads],
        "norm_eps": config["rms_norm_eps"],
    }


_LAYER = "model.layers.*."
FAMILIES = (
    Family(
        "lfm2_moe",
        read_lfm2_moe,
        TensorNames(
            (
                ROTARY,
                rename("model.embedding_norm.**", "model.norm.**"),
                rename(_LAYER + "operator_norm.**", _LAYER + "input_layernorm.**"),
                rename(_LAYER + "ffn_norm.**", _LAYER + "post_attention_layernorm.**"),
                rename(_LAYER + "self_attn.q_layernorm.**", _LAYER + "self_attn.q_norm.**"),
                rename(_LAYER + "self_attn.k_layernorm.**", _LAYER + "self_attn.k_norm.**"),
                rename(_LAYER + "self_attn.out_proj.**", _LAYER + "self_attn.o_proj.**"),
                rename(_LAYER + "feed_forward.expert_bias", _LAYER + "mlp.gate.e_score_correction_bias"),
                rename(_LAYER + "feed_forward.w1.**", _LAYER + "mlp.gate_proj.**"),
                rename(_LAYER + "feed_forward.w3.**", _LAYER + "mlp.up_proj.**"),
                rename(_LAYER + "feed_forward.w2.**", _LAYER + "mlp.down_proj.**"),
                rename(_LAYER + "feed_forward.**", _LAYER + "mlp.**"),
            ),
            ("per_expert_w123_feed_forward",),
        ),
        gguf=(
            GgufFamily(
                "lfm2moe",
                SPARSE_KEYS
                | {"leading_dense_block_count": "num_dense_layers", "shortconv.l_cache": "conv_L_cache"},
                2,
                {"norm_topk_prob": True, "use_expert_bias": True},
                derive=_gguf,
                by_layer=("attention.head_count_kv",),
                rules=(
                    gguf_top("token_embd_norm.weight", "model.norm.weight"),
                    gguf_layer("shortconv.conv.weight", "conv.conv.weight", "channel_taps"),
                    *gguf_linear("shortconv.in_proj", "conv.in_proj"),
                    *gguf_linear("shortconv.out_proj", "conv.out_proj"),
                ),
            ),
        ),
    ),
)
