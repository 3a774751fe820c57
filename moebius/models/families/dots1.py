"""dots.llm1: attention of Qwen3, router and shared experts of DeepSeek-V3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import DEEPSEEK_KEYS, Config, GgufFamily, grouped, rotated
from moebius.models.common import read_biased_router, read_common, refuse_windows
from moebius.models.config import ModelConfig, MoeConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import ROTARY, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys


def read_dots1(hf: HfKeys) -> ModelConfig:
    """dots.llm1: attention of Qwen3, router and shared experts of DeepSeek-V3."""
    common = read_common(hf)
    refuse_windows(hf)
    if hf.has("sliding_window") and hf.integer("max_window_layers", default=62) < common["num_layers"]:
        raise hf.error("sliding_window", "...", "with max_window_layers of all layers, or absent")
    hf.refuse("moe_layer_freq", 1)
    hf.refuse("scoring_func", "sigmoid", "noaux_tc")
    hf.refuse("topk_method", "noaux_tc")
    router = read_biased_router(hf, renormalizes=False)
    first_moe = hf.integer("first_k_dense_replace", default=0, minimum=0)
    moe_size = hf.integer("moe_intermediate_size")
    return ModelConfig(
        **common,
        model_type="dots1",
        rope=read_rope(hf, common["head_dim"]),
        moe=MoeConfig(
            router,
            moe_size,
            hf.integer("n_shared_experts") * moe_size,
            frozenset(range(first_moe, common["num_layers"])),
        ),
        qk_norm=True,
        output_bias=common["attention_bias"],
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
