"""Every way a whole checkpoint may be quantised, dense layers and experts alike, with its configuration.

Those of `quantised_checkpoints`, and those that experts cannot keep packed or spell otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, compressed, gptq
from tests.helpers.quantised_sources import (
    ENCODERS,
    Array,
    Floats,
    bfloat16_bits,
    bfloat16_values,
    compressed_int4,
    e8m0_values,
    float8_bits,
    float8_values,
    fp8_block,
    fp8_channel,
    gptq_int4,
    int4_codes,
    mxfp4,
    mxfp8,
    pack_words,
    per_element,
)

# Tensors by the suffix after the module's name, and the weights they mean.
Encoded = tuple[Mapping[str, Array], Floats]


@dataclass(frozen=True)
class ModelFormat:
    """`config`: quantization_config; None for plain checkpoints."""

    encode: Callable[[Floats], Encoded]
    config: dict[str, Any] | None
    # safetensors dtypes that numpy's do not tell, by suffix.
    dtypes: Mapping[str, str] = field(default_factory=dict)


def _known(name: str) -> ModelFormat:
    def encode(weights: Floats) -> Encoded:
        found = ENCODERS[name](weights)
        return found.tensors, found.weights

    fp4 = {"weight": "U8", "weight_packed": "U8"} if "fp4" in name else {}
    powers = {"weight_scale": "U8"} if name == "mxfp8" else {}
    return ModelFormat(encode, QUANTIZATION_CONFIGS[name], fp4 | powers)


def _int8_codes(weights: Floats, group_size: int) -> tuple[Array, Array, Floats]:
    """int8 codes `[out, in]`, float16 scales `[out, groups]`, and what they mean."""
    groups = np.pad(weights, [(0, 0), (0, -weights.shape[1] % group_size)])
    largest = np.abs(groups.reshape(len(weights), -1, group_size)).max(2)
    scales = np.maximum(largest / 127, 1e-6).astype(np.float16)
    spread = per_element(scales.astype(np.float32), group_size, weights.shape[1])
    codes = np.clip(np.rint(weights / spread), -128, 127).astype(np.int8)
    return codes, scales, codes.astype(np.float32) * spread


def _words_of_bytes(codes: Array, axis: int) -> Array:
    """Returns the four of value + 128 to an int32 along `axis`, the first in the lowest bits."""
    moved = np.moveaxis(codes.astype(np.int32) + 128, axis, -1).astype(np.uint32)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % 4)]).reshape(len(moved), -1, 4)
    words = sum(moved[..., byte] << np.uint32(8 * byte) for byte in range(4))
    return np.ascontiguousarray(np.moveaxis(np.asarray(words), -1, axis)).astype(np.uint32).view(np.int32)


def _packed_int8(weights: Floats, group_size: int | None) -> Encoded:
    codes, scales, meant = _int8_codes(weights, group_size or weights.shape[1])
    return {"weight_packed": _words_of_bytes(codes, 1), "weight_scale": scales}, meant


def _int8_groups(weights: Floats) -> Encoded:
    codes, scales, meant = _int8_codes(weights, 64)
    return {"weight": codes, "weight_scale": scales}, meant


def _gptq_int8(weights: Floats, group_size: int) -> Encoded:
    """Returns version 1: zero points are 128 less one."""
    size = weights.shape[1] if group_size == -1 else group_size
    codes, scales, meant = _int8_codes(weights, size)
    tensors = {
        "qweight": _words_of_bytes(codes.T, 0),
        "qzeros": np.full((scales.shape[1], -(-len(weights) // 4)), 0x7F7F7F7F, np.int32),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": np.arange(weights.shape[1], dtype=np.int32) // size,
        "bias": np.zeros(len(weights), np.float16),
    }
    return tensors, meant


def _int4_rows(weights: Floats) -> Encoded:
    """compressed-tensors with one scale for a row."""
    width = weights.shape[1]
    int4 = int4_codes(weights, width, zeros=False, float16=False)
    return {"weight_packed": pack_words(int4.codes, 1), "weight_scale": int4.stored_scales}, int4.weights(
        width
    )


def _int4_float32_scales(weights: Floats) -> Encoded:
    """Returns the scales that neither bfloat16 nor float16 holds."""
    int4 = int4_codes(weights, 32, zeros=False, float16=False)
    scales = int4.scales * np.float32(1 + 2**-15)
    codes = int4.codes.astype(np.float32) - 8
    tensors = {"weight_packed": pack_words(int4.codes, 1), "weight_scale": scales}
    return tensors, codes * per_element(scales, 32, weights.shape[1])


def _gptq_bfloat16_scales(weights: Floats) -> Encoded:
    found = gptq_int4(weights, 32, zeros=False)
    int4 = int4_codes(weights, 32, zeros=False, float16=False)
    changed = {"qweight": pack_words(int4.codes.T, 0), "scales": np.ascontiguousarray(int4.stored_scales.T)}
    return {**found.tensors, **changed}, int4.weights(32)


def _fp8_block(weights: Floats, suffix: str, scale: str) -> Encoded:
    """128 x 128 with the scales rounded up to another type, and spelled otherwise."""
    rows, cols = weights.shape
    exact = fp8_block(weights).tensors["weight_scale_inv"]
    if scale == "e8m0":
        stored: Array = np.ceil(np.log2(exact) + 127).astype(np.uint8)
        values = e8m0_values(stored)
    else:
        stored = bfloat16_bits(exact * np.float32(1.01))
        values = bfloat16_values(stored)
    spread = np.repeat(np.repeat(values, 128, 0), 128, 1)[:rows, :cols]
    codes = float8_bits(weights / spread)
    return {"weight": codes, suffix: stored}, float8_values(codes) * spread


def _fbgemm(weights: Floats) -> Encoded:
    found = fp8_channel(weights)
    return found.tensors, found.weights


def _mxfp4(weights: Floats, codes: str) -> Encoded:
    found = mxfp4(weights)
    return {codes: found.tensors["blocks"], "weight_scale": found.tensors["scales"]}, found.weights


def _deepseek_fp4(weights: Floats, suffix: str = "scale") -> Encoded:
    found = mxfp4(weights)
    tensors = {"weight": found.tensors["blocks"].view(np.int8), suffix: found.tensors["scales"]}
    return tensors, found.weights


def _kimi_int4(weights: Floats) -> Encoded:
    """Returns the groups of 32 with `weight_shape` as int32."""
    found = compressed_int4(weights, 32)
    return {**found.tensors, "weight_shape": np.array(weights.shape, np.int32)}, found.weights


_INT8_PACKED = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_INT8_GROUPS = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
_FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
_QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    },
    "layer_quant_config": {},
}
_BYTES = {"weight": "U8", "weight_packed": "U8", "weight_scale": "U8"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_AUTO_ROUND = {"bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


def _act_order(weights: Floats, group_size: int, seed: int) -> tuple[Array, Floats, NDArray[np.int64]]:
    """Returns columns sorted into groups in an order of their own, and the place of each."""
    cols = weights.shape[1]
    order = np.random.default_rng([cols, seed]).permutation(cols)
    places = np.empty(cols, np.int64)
    places[order] = np.arange(cols)
    return (places // group_size).astype(np.int32), weights[:, order], places


def _gptq_act_order(weights: Floats, group_size: int, zeros: bool, seed: int) -> Encoded:
    """`desc_act`: words hold columns as they come, `g_idx` says each one's group."""
    groups, ordered, places = _act_order(weights, group_size, seed)
    int4 = int4_codes(ordered, group_size, zeros=zeros, float16=True)
    found = gptq_int4(ordered, group_size, zeros=zeros)
    tensors = {**found.tensors, "qweight": pack_words(int4.codes[:, places].T, 0), "g_idx": groups}
    return tensors, found.weights[:, places]


def _gptq_int8_act_order(weights: Floats, seed: int) -> Encoded:
    groups, ordered, places = _act_order(weights, 32, seed)
    codes, _, meant = _int8_codes(ordered, 32)
    tensors, _ = _gptq_int8(ordered, 32)
    changed = {"qweight": _words_of_bytes(codes[:, places].T, 0), "g_idx": groups}
    return {**tensors, **changed}, meant[:, places]


def _compressed_act_order(weights: Floats, zeros: bool, seed: int) -> Encoded:
    groups, ordered, places = _act_order(weights, 32, seed)
    int4 = int4_codes(ordered, 32, zeros=zeros, float16=False)
    found = compressed_int4(ordered, 32, zeros=zeros)
    changed = {"weight_packed": pack_words(int4.codes[:, places], 1), "weight_g_idx": groups}
    return {**found.tensors, **changed}, found.weights[:, places]


_GROUPS_BY_ACTIVATION = {**_INT4, "strategy": "group", "group_size": 32, "actorder": "group"}
# Encoders of weights and the seed of the order, and configurations.
_ACT_ORDERS: dict[str, tuple[Callable[[Floats, int], Encoded], dict[str, Any]]] = {
    "gptq_act_order": (lambda w, seed: _gptq_act_order(w, 32, False, seed), gptq(32, True, desc_act=True)),
    "gptq_act_order_zeros": (
        lambda w, seed: _gptq_act_order(w, 128, True, seed),
        gptq(128, False, desc_act=True),
    ),
    "gptq_int8_act_order": (_gptq_int8_act_order, gptq(32, True, bits=8, desc_act=True)),
    "compressed_act_order": (
        lambda w, seed: _compressed_act_order(w, False, seed),
        compressed(_GROUPS_BY_ACTIVATION, "pack-quantized"),
    ),
    "compressed_act_order_zeros": (
        lambda w, seed: _compressed_act_order(w, True, seed),
        compressed({**_GROUPS_BY_ACTIVATION, "symmetric": False}, "pack-quantized"),
    ),
}


def act_ordered(name: str, seed: int) -> ModelFormat:
    """Returns a format whose columns are in the order of activations: another order for each seed."""
    encode, config = _ACT_ORDERS[name]
    return ModelFormat(lambda weights: encode(weights, seed), config)


def _mxfp8(weights: Floats, suffix: str) -> Encoded:
    found = mxfp8(weights)
    return {"weight": found.tensors["weight"], suffix: found.tensors["weight_scale"]}, found.weights


def _fp8_blocks(weights: Floats, height: int, width: int, suffix: str = "weight_scale") -> Encoded:
    found = fp8_block(weights, height, width)
    return {"weight": found.tensors["weight"], suffix: found.tensors["weight_scale_inv"]}, found.weights


def _modelopt_blocks(weights: Floats) -> Encoded:
    """Returns scales with axes of 1 within blocks."""
    tensors, meant = _fp8_blocks(weights, 128, 128)
    return {**tensors, "weight_scale": tensors["weight_scale"][:, None, :, None]}, meant


_FP8_GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}
_MXFP8 = {**_FP8_GROUPS, "group_size": 32, "scale_dtype": "torch.uint8"}
_MXFP8_QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_MORE: dict[str, ModelFormat] = {
    "fp8_block_bfloat16_scales": ModelFormat(lambda w: _fp8_block(w, "weight_scale_inv", "bfloat16"), _FP8),
    "fp8_block_e8m0_scales": ModelFormat(
        lambda w: _fp8_block(w, "weight_scale_inv", "e8m0"), _FP8, {"weight_scale_inv": "F8_E8M0"}
    ),
    "fp8_block_deepseek_v4": ModelFormat(
        lambda w: _fp8_block(w, "scale", "e8m0"), _FP8, {"scale": "F8_E8M0"}
    ),
    "fp4_deepseek_v4": ModelFormat(
        _deepseek_fp4, {**_FP8, "expert_dtype": "fp4"}, {"weight": "I8", "scale": "F8_E8M0"}
    ),
    "fp4_ling": ModelFormat(
        lambda w: _deepseek_fp4(w, "weight_scale_inv"),
        {
            **_FP8,
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["b_proj", "5.attention.g_proj"],
            "routed_experts_quant_method": "mxfp4",
            "routed_experts_group_size": 32,
        },
        {"weight": "I8", "weight_scale_inv": "F8_E8M0"},
    ),
    "fp8_block_compressed": ModelFormat(
        lambda w: _fp8_block(w, "weight_scale", "bfloat16"), compressed(_FP8_BLOCK, "float-quantized")
    ),
    "fp8_block_odd_rows": ModelFormat(
        lambda w: _fp8_blocks(w, 24, 96, "weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 96]},
    ),
    "fp8_groups_compressed": ModelFormat(
        lambda w: _fp8_blocks(w, 1, 64), compressed(_FP8_GROUPS, "float-quantized")
    ),
    "fp8_block_quark": ModelFormat(
        lambda w: _fp8_blocks(w, 64, 128),
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [64, 128]}
            },
        },
    ),
    "fp8_block_modelopt": ModelFormat(
        _modelopt_blocks, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    ),
    "fp8_channel_modelopt": ModelFormat(
        _fbgemm, {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    ),
    # MiniMax-M3's.
    "mxfp8_blocks": ModelFormat(
        lambda w: _mxfp8(w, "weight_scale_inv"),
        {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [1, 32],
        },
        {"weight_scale_inv": "U8"},
    ),
    "mxfp8_e8m0": ModelFormat(
        lambda w: _mxfp8(w, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
        {"weight_scale_inv": "F8_E8M0"},
    ),
    "mxfp8_compressed": ModelFormat(
        lambda w: _mxfp8(w, "weight_scale"), compressed(_MXFP8, "mxfp8-quantized"), {"weight_scale": "U8"}
    ),
    "mxfp8_quark": ModelFormat(
        lambda w: _mxfp8(w, "weight_scale"),
        {"quant_method": "quark", "global_quant_config": {"weight": _MXFP8_QUARK}},
        {"weight_scale": "U8"},
    ),
    "fbgemm_fp8": ModelFormat(_fbgemm, {"quant_method": "fbgemm_fp8"}),
    "int8_words": ModelFormat(lambda w: _packed_int8(w, None), compressed(_INT8_PACKED, "pack-quantized")),
    "int8_words_g64": ModelFormat(lambda w: _packed_int8(w, 64), compressed(_INT8_GROUPS, "pack-quantized")),
    "int8_g64": ModelFormat(_int8_groups, compressed(_INT8_GROUPS, "int-quantized")),
    "gptq_int8_g32": ModelFormat(lambda w: _gptq_int8(w, 32), gptq(32, True, bits=8)),
    "gptq_int8_rows": ModelFormat(lambda w: _gptq_int8(w, -1), gptq(-1, True, bits=8)),
    **{name: act_ordered(name, 0) for name in _ACT_ORDERS},
    "int4_rows": ModelFormat(_int4_rows, compressed({**_INT4, "strategy": "channel"}, "pack-quantized")),
    "int4_float32_scales": ModelFormat(
        _int4_float32_scales,
        compressed({**_INT4, "strategy": "group", "group_size": 32}, "pack-quantized"),
    ),
    "kimi_int4": ModelFormat(
        _kimi_int4, compressed({**_INT4, "strategy": "group", "group_size": 32}, "pack-quantized")
    ),
    "gptq_bfloat16_scales": ModelFormat(_gptq_bfloat16_scales, gptq(32, True)),
    "auto_round": ModelFormat(
        lambda w: (lambda found: (found.tensors, found.weights))(gptq_int4(w, 32, zeros=False)),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", **_AUTO_ROUND},
    ),
    "mxfp4_compressed": ModelFormat(
        lambda w: _mxfp4(w, "weight_packed"), compressed(_MXFP4, "mxfp4-pack-quantized"), _BYTES
    ),
    "mxfp4_quark": ModelFormat(lambda w: _mxfp4(w, "weight"), _QUARK, _BYTES),
}
MODEL_FORMATS: Mapping[str, ModelFormat] = {name: _known(name) for name in QUANTIZATION_CONFIGS} | _MORE
