"""Llama 4: chunks of the context in layers that rotate, all of it in those that do not; one routed expert.

Source: the configuration class of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moebius.checkpoint.gguf.family import ROPE_FACTORS_RULE, GgufFamily
from moebius.models.common import FULL, Common, read_common
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import FeedForward
from moebius.models.layers.gqa import Chunk
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_CHUNKED = "chunked_attention"
# Of training, what other engines need to know, and what begins and ends an image, which is read by name.
_HARMLESS = (
    "boi_token_index",
    "boi_token_id",
    "eoi_token_index",
    "eoi_token_id",
    "for_llm_compressor",
    "router_jitter_noise",
)


def _rotating(hf: HfKeys, num_layers: int) -> list[bool]:
    """`no_rope_layers` says 1 of layers that do rotate; without it, every fourth does not."""
    interval = hf.integer("no_rope_layer_interval", default=4)
    flags = list(hf.integers("no_rope_layers")) or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise hf.error("no_rope_layers", flags, f"{num_layers} of 0 and 1")
    return [bool(flag) for flag in flags]


def _chunks(hf: HfKeys, rotating: list[bool]) -> tuple[Chunk | None, ...]:
    """By `layer_types`; without it, layers that rotate see their own chunk."""
    kinds = hf.strings("layer_types") or tuple(_CHUNKED if rotates else FULL for rotates in rotating)
    if len(kinds) != len(rotating) or not set(kinds) <= {FULL, _CHUNKED}:
        raise hf.error("layer_types", list(kinds), f"{len(rotating)} of {FULL} and {_CHUNKED}")
    if _CHUNKED not in kinds or hf.is_null("attention_chunk_size"):
        hf.skip("attention_chunk_size")
        return (None,) * len(rotating)
    chunk = Chunk(hf.integer("attention_chunk_size", default=8192))
    return tuple(chunk if kind == _CHUNKED else None for kind in kinds)


def _read_ffns(hf: HfKeys, common: Common, size: int) -> tuple[FeedForward, ...]:
    num_layers = common.num_layers
    step = hf.integer("interleave_moe_layer_step", default=1)
    listed = hf.integers("moe_layers") or tuple(range(step - 1, num_layers, step))
    if any(not 0 <= layer < num_layers for layer in listed):
        raise hf.error("moe_layers", list(listed), f"layers from 0 to {num_layers - 1}")
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts", default=16),
        top_k=hf.integer("num_experts_per_tok", default=1),
        score="sigmoid",
        weighs_inputs=True,
    )
    return common.ffns(common.moe(router, size, size), listed)


def _read_growth(hf: HfKeys) -> tuple[float, float] | None:
    """Reads the growth of queries in layers that do not rotate; switched on by a number, too."""
    tuned: Any = hf.value("attn_temperature_tuning")
    if tuned is not None and tuned not in (0, 1, 4, False, True):
        raise hf.error("attn_temperature_tuning", tuned, "true or false")
    scale, length = hf.number("attn_scale", default=0.1), hf.number("floor_scale", default=8192)
    return (scale, length) if tuned is None or tuned else None


def read_llama4(hf: HfKeys) -> ModelConfig:
    """`intermediate_size` is that of experts, routed and shared; `intermediate_size_mlp` of dense layers."""
    hf.skip(*_HARMLESS)
    size = hf.integer("intermediate_size")
    dense = hf.integer("intermediate_size_mlp", default=16384)
    common = read_common(hf.with_values(attention_chunk_size=None), dense_size=dense)
    rotating = _rotating(hf, common.num_layers)
    rope = read_rope(hf, common.head_dim, default_theta=500000.0, interleaved=True)
    growth = _read_growth(hf)
    attention = common.gqa(
        rope, unit_norm=hf.boolean("use_qk_norm", default=True), output_bias=common.attention_bias
    )
    unrotated = replace(attention, rope=None, query_growth=growth)
    layers = zip(rotating, _chunks(hf, rotating), strict=True)
    mixers = [replace(attention if rotates else unrotated, sight=chunk) for rotates, chunk in layers]
    return common.model(
        [mixer.within(common.max_model_len) for mixer in mixers], _read_ffns(hf, common, size)
    )


def _read_llama4_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    ratio = vision.number("pixel_shuffle_ratio", default=0.5)
    if not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise vision.error("pixel_shuffle_ratio", ratio, "1, 1/2, 1/3 ...")
    return VisionConfig(
        image_token_id=hf.integer("image_token_index", "image_token_id", minimum=0),
        merge_size=round(1 / ratio),
        patch_size=vision.integer("patch_size", default=14),
        hidden_size=vision.integer("hidden_size", default=768),
        intermediate_size=vision.integer("intermediate_size", default=5632),
        tile_size=vision.integer("image_size", default=448),
    )


_PUBLISHED, _LAYER = "language_model.model.layers.*.feed_forward.", "model.layers.*.mlp."
_TEXT, _MODEL = "model.layers.*.feed_forward.", "model."
_LAYERS = tuple(
    rename(prefix + stored, _LAYER + canonical)
    for prefix in (_PUBLISHED, _TEXT)
    for stored, canonical in (
        ("router.**", "gate.**"),
        ("shared_expert.**", "shared_experts.**"),
        ("**", "**"),
    )
)
_NAMES = TensorNames(
    (
        ROTARY,
        drop("vision_model.**"),
        drop("multi_modal_projector.**"),
        *_LAYERS,
        rename("language_model.lm_head.**", "lm_head.**"),
        rename("language_model.model.**", "model.**"),
    ),
    ("fused_feed_forward", "per_expert_feed_forward"),
)

_VISION = VisionFamily(
    _read_llama4_vision,
    (
        rename("vision_model.**", "vision_model.**"),
        rename("multi_modal_projector.**", "multi_modal_projector.**"),
    ),
    tower="Llama4",
    processor="llama4",
    # A tile is as many `<|patch|>`; `<|image|>` stands before the one with all of the image.
    tokens={
        "placeholder": "<|image|>",
        "start": "<|image_start|>",
        "end": "<|image_end|>",
        "column": "<|tile_x_separator|>",
        "row": "<|tile_y_separator|>",
        "whole": "<|image|>",
    },
)
# What llama.cpp's code decides: chunks, and from where on queries grow; where Scout's rotation is scaled.
_CHUNK = _ORIGINAL = 8192
# Experts of the model whose queries and keys are not normed.
_MAVERICK = 128


def _scaling(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Files hold what each frequency is divided by: 1, and a factor for waves beyond the original context."""
    factors = keys.floats("rope_freqs.weight")
    if factors is None:
        return {}
    size = keys.integer("rope.dimension_count")
    frequencies = config["rope_theta"] ** -(np.arange(0, size, 2) / size)
    factor = float(factors[-1])
    expected = np.where(2 * np.pi / frequencies < _ORIGINAL, 1.0, factor)
    if len(factors) != len(expected) or not np.allclose(factors, expected):
        allowed = f"1 for waves of up to {_ORIGINAL} positions, one factor for longer ones"
        raise keys.error("rope_freqs.weight", factors.tolist(), allowed)
    rope = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": _ORIGINAL}
    return {"rope_scaling": rope | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}}


def _gguf_config(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    keys.skip("rope.dimension_count")
    if keys.get("attention.sliding_window") == 0:
        raise keys.error("attention.sliding_window", 0, "chunks of the context")
    return {"use_qk_norm": keys.integer("expert_count") != _MAVERICK} | _scaling(keys, config)


_GGUF = GgufFamily(
    "llama4",
    {
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
        "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    2,
    {
        "attention_chunk_size": _CHUNK,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
    },
    _gguf_config,
    # It is read as configuration.
    rules=(ROPE_FACTORS_RULE,),
)

FAMILIES = (
    Family("llama4", read_llama4, _NAMES, _VISION),
    Family("llama4_text", read_llama4, _NAMES, gguf=(_GGUF,)),
)
