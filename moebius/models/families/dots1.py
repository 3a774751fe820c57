"""dots.llm1: attention of Qwen3, router and shared experts of DeepSeek-V3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import DEEPSEEK_KEYS, Config, GgufFamily, grouped, rotated
from moebius.models.common import FULL, SLIDING, read_biased_router, read_common, read_windows, sliding
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys


def read_dots1(hf: HfKeys) -> ModelConfig:
    """dots.llm1: attention of Qwen3, router and shared experts of DeepSeek-V3."""
    common = read_common(hf)
    num_layers = common.num_layers
    # Where no list says so, layers from `max_window_layers` on slide.
    first = hf.integer("max_window_layers", default=62, minimum=0) if hf.has("sliding_window") else num_layers
    kinds = list(hf.strings("layer_types")) or [FULL if i < first else SLIDING for i in range(num_layers)]
    hf.refuse("moe_layer_freq", 1)
    hf.refuse("scoring_func", "sigmoid", "noaux_tc")
    hf.refuse("topk_method", "noaux_tc")
    router = read_biased_router(hf, renormalizes=False)
    first_moe = hf.integer("first_k_dense_replace", default=0, minimum=0)
    moe_size = hf.integer("moe_intermediate_size")
    attention = common.gqa(
        read_rope(hf, common.head_dim), qk_norm=QkNorm(common.norm), output_bias=common.attention_bias
    )
    moe = common.moe(router, moe_size, hf.integer("n_shared_experts") * moe_size)
    return common.model(
        sliding(attention, read_windows(hf.with_values(layer_types=kinds), num_layers)),
        common.ffns(moe, range(first_moe, num_layers)),
    )


def _dots(keys: MetadataKeys, config: Config) -> Config:
    return rotated(keys, config) | grouped(keys)


FAMILIES = (
    Family(
        "dots1",
        read_dots1,
        TensorNames((ROTARY,)),
        gguf=(GgufFamily("dots1", DEEPSEEK_KEYS, 2, derive=_dots),),
    ),
)
