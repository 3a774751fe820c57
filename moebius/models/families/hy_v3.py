"""Hunyuan 3 (Hy3, 295B-A21B): norms of queries and keys, sigmoid router with a bias, a shared expert.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(HYV3Config).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily
from moebius.models.common import listed_or_after_dense, read_biased_router, read_common, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Precisions of sums here are float32 whatever they say; the rest is of training and of other engines.
_HARMLESS = (
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "enable_moe_fp32_combine",
    "eod_token_id",
    "expert_hidden_dim",
    "use_grouped_mm",
)
_ALWAYS = ("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm")


def read_hy_v3(hf: HfKeys) -> ModelConfig:
    """The first layer is dense unless `mlp_layer_types` or `first_k_dense_replace` say otherwise."""
    hf.skip(*_HARMLESS)
    hf.refuse("mlp_bias")
    for name in _ALWAYS:
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    common = read_common(hf)
    router = replace(read_biased_router(hf), scale=hf.number("router_scaling_factor", default=2.826))
    size = hf.integer("moe_intermediate_size")
    shared = hf.integer("num_shared_experts", default=1, minimum=0) * size
    attention = common.gqa(
        read_rope(hf, common.head_dim, default_theta=11_158_840.0),
        qk_norm=QkNorm(common.norm),
        output_bias=common.attention_bias,
    )
    return common.model(
        attention,
        common.ffns(common.moe(router, size, shared), listed_or_after_dense(hf, common.num_layers, 1)),
        num_mtp_layers=read_mtp_layers(hf),
    )


_GGUF_KEYS = SPARSE_KEYS | {"expert_weights_scale": "router_scaling_factor"}


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Dense layers are those without a router; shared experts are as wide as all of them together."""
    if not keys.get("expert_weights_norm"):
        raise keys.error("expert_weights_norm", False, "true")
    size, name = config["moe_intermediate_size"], "expert_shared_feed_forward_length"
    shared = keys.integer(name, size)
    if shared % size:
        raise keys.error(name, shared, f"a multiple of expert_feed_forward_length ({size})")
    sparse = keys.layers_with("ffn_gate_inp.weight")
    kinds = ["sparse" if layer in sparse else "dense" for layer in range(config["num_hidden_layers"])]
    return {"num_shared_experts": shared // size, "mlp_layer_types": kinds}


FAMILIES = (
    Family(
        "hy_v3",
        read_hy_v3,
        TensorNames(
            (
                ROTARY,
                rename("model.layers.*.mlp.router.gate.**", "model.layers.*.mlp.gate.**"),
                rename("model.layers.*.mlp.expert_bias", "model.layers.*.mlp.gate.e_score_correction_bias"),
                rename("model.layers.*.mlp.shared_mlp.**", "model.layers.*.mlp.shared_experts.**"),
            ),
            mtp_layers=True,
        ),
        gguf=(GgufFamily("hy_v3", _GGUF_KEYS, 2, derive=_gguf_config),),
    ),
)
