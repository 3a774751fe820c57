"""OLMoE: queries and keys normed over all heads together, softmax router."""

from __future__ import annotations

import math

from moebius.checkpoint.gguf.family import ALL_SPARSE_KEYS, GgufFamily, rotated
from moebius.models.common import read_common, read_softmax_router
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import FullWidthQkNorm
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope


def read_olmoe(hf: HfKeys) -> ModelConfig:
    """OLMoE: every layer is MoE, `intermediate_size` is an expert's, queries and keys are normed."""
    common = read_common(hf)
    hf.refuse("sliding_window")
    router = read_softmax_router(hf)
    attention = common.gqa(
        read_rope(hf, common.head_dim),
        qk_norm=FullWidthQkNorm(common.eps),
        limit=hf.number("clip_qkv") if hf.has("clip_qkv") else math.inf,
        output_bias=common.attention_bias,
    )
    return common.model(attention, common.moe(router, common.intermediate_size))


FAMILIES = (
    Family(
        "olmoe",
        read_olmoe,
        TensorNames((ROTARY,)),
        gguf=(GgufFamily("olmoe", ALL_SPARSE_KEYS, 1, {"norm_topk_prob": False}, rotated),),
    ),
)
