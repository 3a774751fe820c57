"""K-EXAONE (236B-A23B): three of four layers slide and are rotated, the fourth sees all and has no positions.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(ExaoneMoeConfig).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, grouped, rotated
from moebius.models.common import (
    every_nth_full,
    listed_or_after_dense,
    read_biased_router,
    read_common,
    read_windows,
    refuse_bias,
    sliding_rotated,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import MTP, ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_BIAS = rename(
    "model.layers.*.mlp.e_score_correction_bias", "model.layers.*.mlp.gate.e_score_correction_bias"
)


def _moe_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Listed under either of two keys, or all after the first dense ones."""
    hf.skip("first_last_k_dense_replace")
    flags = hf.value("is_moe_layer")
    if flags is None or hf.has("mlp_layer_types"):
        return listed_or_after_dense(hf, num_layers, 1)
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise hf.error("is_moe_layer", flags, f"{num_layers} of true and false")
    hf.skip("first_k_dense_replace")
    return frozenset(layer for layer, flag in enumerate(flags) if flag)


def _layer_types(hf: HfKeys, num_layers: int) -> list[str]:
    """Returns `layer_types`; without it every n-th layer sees all, by default the fourth."""
    pattern = hf.value("sliding_window_pattern")
    listed = hf.strings("layer_types")
    if listed:
        return list(listed)
    if isinstance(pattern, str):
        raise hf.error("sliding_window_pattern", pattern, "a number, or any with layer_types")
    return every_nth_full(num_layers, hf.integer("sliding_window_pattern", default=4))


def read_exaone_moe(hf: HfKeys) -> ModelConfig:
    """Layers that see the whole context are not rotated."""
    common = read_common(hf)
    refuse_bias(hf, common)
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("topk_method", "noaux_tc")
    # Of multi-token prediction, which has tensors of its own.
    hf.skip("num_nextn_predict_layers", "mtp_loss_weight", "mtp_share_layers", "mtp_layer_types")
    num_layers = common.num_layers
    kinds = _layer_types(hf, num_layers)
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    rope = read_rope(hf, common.head_dim)
    size = hf.integer("moe_intermediate_size")
    shared = hf.integer("num_shared_experts", default=1, minimum=0) * size
    moe = common.moe(read_biased_router(hf), size, shared)
    return common.model(
        sliding_rotated(common.gqa(rope, qk_norm=QkNorm(common.norm)), windows, kinds),
        common.ffns(moe, _moe_layers(hf, num_layers)),
    )


def _exaone(keys: MetadataKeys, config: Config) -> Config:
    return rotated(keys, config) | grouped(keys)


_GGUF_KEYS = SPARSE_KEYS | {
    "expert_shared_count": "num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
FAMILIES = (
    Family(
        "exaone_moe",
        read_exaone_moe,
        TensorNames((ROTARY, MTP, _BIAS)),
        gguf=(GgufFamily("exaone-moe", _GGUF_KEYS, 2, derive=_exaone),),
    ),
)
