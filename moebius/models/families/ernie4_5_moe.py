"""ERNIE 4.5: interleaved rotary pairs, softmax router whose choice a bias corrects, shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily, rotated
from moebius.checkpoint.gguf.names import gguf_layer
from moebius.models.common import read_common, read_mtp_layers, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_MTP = drop("model.mtp_**")
_BIAS = rename(
    "model.layers.*.mlp.moe_statics.e_score_correction_bias",
    "model.layers.*.mlp.gate.e_score_correction_bias",
)


def read_ernie4_5_moe(hf: HfKeys) -> ModelConfig:
    """ERNIE 4.5 text models; MoE layers are every n-th of a range."""
    common = read_common(hf, tied=True)
    refuse_bias(hf, common)
    hf.refuse("use_bias")
    hf.refuse("sliding_window")
    if not hf.boolean("moe_use_aux_free", default=True):
        raise hf.error("moe_use_aux_free", False, "true")
    hf.skip("moe_capacity", "moe_gate")  # of training; the router is always the same
    last = common.num_layers - 1
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
    rope = read_rope(hf, common.head_dim, default_theta=500000.0, interleaved=True)
    return common.model(
        common.gqa(rope),
        common.ffns(common.moe(router, moe_size, shared), {i for i in layers if (i + 1) % step == 0}),
        num_mtp_layers=read_mtp_layers(hf, "num_nextn_predict_layers"),
    )


def _ernie(keys: MetadataKeys, config: Config) -> Config:
    keys.skip("expert_shared_feed_forward_length")
    moe = keys.layers_with("ffn_gate_inp.weight")
    return rotated(keys, config) | {"moe_layer_end_index": moe[-1] if moe else -1}


FAMILIES = (
    Family(
        "ernie4_5_moe",
        read_ernie4_5_moe,
        TensorNames((ROTARY, _MTP, _BIAS)),
        gguf=(
            GgufFamily(
                "ernie4_5-moe",
                {
                    "expert_count": "moe_num_experts",
                    "expert_feed_forward_length": "moe_intermediate_size",
                    "expert_shared_count": "moe_num_shared_experts",
                    "interleave_moe_layer_step": "moe_layer_interval",
                    "leading_dense_block_count": "moe_layer_start_index",
                },
                1,
                derive=_ernie,
                rules=(gguf_layer("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "row"),),
            ),
        ),
    ),
)
