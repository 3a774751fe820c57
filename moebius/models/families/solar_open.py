"""Solar Open (100B): grouped-query attention in every layer, sigmoid router, a shared expert.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(SolarOpenConfig).
"""

from __future__ import annotations

from moebius.models.common import read_biased_router, read_common
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope


def read_solar_open(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE; `intermediate_size`, where it is named, means nothing."""
    hf.skip("intermediate_size", "moe_layer_freq", "pretraining_tp")
    # Of relatives whose code this family shares.
    hf.refuse("use_qk_norm")
    hf.refuse("first_k_dense_replace", 0)
    hf.refuse("sliding_window")
    size = hf.integer("moe_intermediate_size")
    common = read_common(hf, dense_size=size)
    shared = hf.integer("n_shared_experts", default=1, minimum=0) * size
    attention = common.gqa(read_rope(hf, common.head_dim, default_theta=1e6))
    return common.model(attention, common.moe(read_biased_router(hf), size, shared))


FAMILIES = (Family("solar_open", read_solar_open, TensorNames((ROTARY,))),)
