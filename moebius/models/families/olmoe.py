"""OLMoE: queries and keys normed over all heads together, softmax router."""

from __future__ import annotations

import math

from moebius.checkpoint.gguf.family import ALL_SPARSE_KEYS, GgufFamily, rotated
from moebius.models.common import read_common, read_softmax_router
from moebius.models.config import ModelConfig, MoeConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope


def read_olmoe(hf: HfKeys) -> ModelConfig:
    """OLMoE: every layer is MoE, `intermediate_size` is an expert's, queries and keys are normed."""
    common = read_common(hf)
    hf.refuse("sliding_window")
    router = read_softmax_router(hf)
    return ModelConfig(
        **common,
        model_type="olmoe",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(router, common["intermediate_size"], 0, frozenset(range(common["num_layers"]))),
        qk_norm=True,
        qk_norm_full_width=True,
        qkv_limit=hf.number("clip_qkv") if hf.has("clip_qkv") else math.inf,
        output_bias=common["attention_bias"],
    )


FAMILIES = (
    Family(
        "olmoe",
        read_olmoe,
        TensorNames((ROTARY,)),
        gguf=(GgufFamily("olmoe", ALL_SPARSE_KEYS, 1, {"norm_topk_prob": False}, rotated),),
    ),
)
