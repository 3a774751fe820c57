"""Kimi-Linear: Kimi Delta Attention, and latent attention in a quarter of the layers, without positions.

Sources: Kimi Linear (arXiv:2510.26692), and the configuration class of transformers 5.23.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily, latent, linear_heads_of, linear_layers
from moebius.checkpoint.gguf.names import KDA_BOTTLENECK_RULES, KDA_RULES, gguf_layer
from moebius.models.common import (
    FULL,
    Common,
    listed_or_after_dense,
    read_biased_router,
    read_common,
    read_from_section,
    read_mtp_layers,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import FeedForward
from moebius.models.layers.latent import MLA
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import KDA
from moebius.models.mla import read_mla, read_moe
from moebius.models.names import ROTARY, TensorNames, rename

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

LINEAR = "linear_attention"
# Of rotary embedding, which no layer has; what follows from other keys; and of training.
_HARMLESS = ("head_dim", "pretraining_tp", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta")


def _attending_layers(hf: HfKeys, section: HfKeys | None, num_layers: int) -> frozenset[int]:
    """`full_attn_layers` and `kda_layers`, which count from 1, or `layer_types`; by default every fourth.

    Raises ModelConfigError unless each layer is of one type, and there are layers of both.
    """
    every = frozenset(range(num_layers))
    if section is not None and section.has("full_attn_layers"):
        full = frozenset(number - 1 for number in section.integers("full_attn_layers"))
        linear = frozenset(number - 1 for number in section.integers("kda_layers"))
        if full & linear or full | linear != every or not (full and linear):
            listed = section.value("kda_layers")
            raise section.error("kda_layers", listed, "all layers but full_attn_layers, and some of both")
        hf.skip("layer_types")
        return full
    default = tuple(FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers or set(kinds) != {FULL, LINEAR}:
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {FULL} and {LINEAR}, some of both")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)


def _read_mixers(hf: HfKeys, common: Common, attention: MLA) -> list[Mixer]:
    """Returns the mixer of each layer."""
    num_layers = common.num_layers
    section = hf.section("linear_attn_config")
    read = partial(read_from_section, hf, section)
    heads = read("num_heads", "linear_num_heads", 32)
    head_dim = read("head_dim", "linear_head_dim", 128)
    width = read("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2)
    attending = _attending_layers(hf, section, num_layers)
    linear = KDA(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=width,
        eps=common.eps,
        decay_has_axes=True,
    )
    if section is not None and section.unread:
        raise section.error(section.unread[0], "...", "keys of Kimi-Linear's linear attention")
    return [attention if layer in attending else linear for layer in range(num_layers)]


def _read_ffns(hf: HfKeys, common: Common) -> tuple[FeedForward, ...]:
    hf.refuse("moe_router_activation_func", "sigmoid")
    hf.refuse("topk_method", "noaux_tc")
    # Of Kimi-K3, whose experts work in a narrower space.
    hf.refuse("routed_expert_hidden_size")
    if not hf.boolean("use_grouped_topk", default=True):
        raise hf.error("use_grouped_topk", False, "true")
    moe = read_moe(hf, common, read_biased_router(hf))
    return common.ffns(moe, listed_or_after_dense(hf, common.num_layers, default=1))


def read_kimi_linear(hf: HfKeys) -> ModelConfig:
    """Reads Kimi-Linear: order is what linear attention and causality make of it, no layer rotates."""
    hf.skip(*_HARMLESS)
    for name in ("attn_res_block_size", "mla_use_output_gate"):  # of Kimi-K3
        hf.refuse(name)
    length = hf.integer("model_max_length", "max_position_embeddings")
    common = read_common(hf.with_values(max_position_embeddings=length))
    if common.num_kv_heads != common.num_heads:
        allowed = f"num_attention_heads ({common.num_heads})"
        raise hf.error("num_key_value_heads", common.num_kv_heads, allowed)
    if not hf.boolean("mla_use_nope", default=True):
        raise hf.error("mla_use_nope", False, "true")
    mixers = _read_mixers(hf, common, read_mla(hf, common, rope=None))
    return common.model(mixers, _read_ffns(hf, common), num_mtp_layers=read_mtp_layers(hf))


_GGUF_KEYS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _gguf(keys: MetadataKeys, config: Config) -> Config:
    """Layers with a decay have linear attention, of as many heads as their queries say."""
    own, count = linear_layers(keys), config["num_hidden_layers"]
    # What the file does not say, llama.cpp's code decides.
    norms = keys.get("expert_weights_norm")
    return latent(keys, config) | {
        "norm_topk_prob": True if norms is None else bool(norms),
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in range(count) if layer not in own],
            "kda_layers": [layer + 1 for layer in own],
            **linear_heads_of(keys, own),
        },
    }


_GGUF_RULES = (*KDA_RULES, *KDA_BOTTLENECK_RULES, gguf_layer("ssm_a", "self_attn.A_log", "axes_decay"))
# Transformers writes the dense layers' MLPs under this name as well.
_MLP = rename("model.layers.*.block_sparse_moe.**", "model.layers.*.mlp.**")

FAMILIES = (
    Family(
        "kimi_linear",
        read_kimi_linear,
        TensorNames((ROTARY, _MLP), ("per_expert_w123", "per_expert"), mtp_layers=True),
        gguf=(GgufFamily("kimi-linear", _GGUF_KEYS, 2, derive=_gguf, rules=_GGUF_RULES),),
    ),
)
