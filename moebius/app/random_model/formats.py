"""How one expert matrix `[out, in]` of given deviation is stored in each format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebius.app.random_model.draws import (
    FLOAT8_STD,
    INT4_STD,
    Array,
    bfloat16_bits,
    bfloat16_normal,
    float8_normal,
    int4_words,
)
from moebius.errors import UserError

INT4_GROUP = 32
FP8_BLOCK = 128
# An int4 word of eight codes that mean zero.
_ZERO_WORD = np.array([0x88888888], np.uint32).view(np.int32)[0]
# Scales differ by this much either way, so that a reader that mixes them up is seen.
_SCALE_SPREAD = 0.25

# Suffix behind the matrix's name, safetensors dtype, shape.
Part = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class ExpertFormat:
    """One way to store experts; the table `FORMATS` has them all."""

    parts: Callable[[int, int], list[Part]]
    # Arrays in the order of `parts`: (rng, out, in, deviation, whether row 0 is zero).
    draw: Callable[[np.random.Generator, int, int, float, bool], list[Array]]
    # quantization_config of config.json.
    config: dict[str, Any] | None


def _bfloat16_parts(rows: int, cols: int) -> list[Part]:
    return [("weight", "BF16", (rows, cols))]


def _bfloat16(rng: np.random.Generator, rows: int, cols: int, std: float, zero_row: bool) -> list[Array]:
    values = bfloat16_normal(rng, (rows, cols), std)
    if zero_row:
        values[0] = 0
    return [values]


def _int4_parts(rows: int, cols: int) -> list[Part]:
    groups = math.ceil(cols / INT4_GROUP)
    return [
        ("weight_packed", "I32", (rows, math.ceil(cols / 8))),
        ("weight_scale", "BF16", (rows, groups)),
        ("weight_shape", "I64", (2,)),
    ]


def _int4(rng: np.random.Generator, rows: int, cols: int, std: float, zero_row: bool) -> list[Array]:
    words = int4_words(rng, rows, cols)
    if zero_row:
        words[0] = _ZERO_WORD
    scales = _scales(rng, (rows, math.ceil(cols / INT4_GROUP)), std / INT4_STD)
    return [words, bfloat16_bits(scales), np.array([rows, cols], np.int64)]


def _fp8_parts(rows: int, cols: int) -> list[Part]:
    blocks = (math.ceil(rows / FP8_BLOCK), math.ceil(cols / FP8_BLOCK))
    return [("weight", "F8_E4M3", (rows, cols)), ("weight_scale_inv", "F32", blocks)]


def _fp8(rng: np.random.Generator, rows: int, cols: int, std: float, zero_row: bool) -> list[Array]:
    codes = float8_normal(rng, (rows, cols))
    if zero_row:
        codes[0] = 0
    return [codes, _scales(rng, _fp8_parts(rows, cols)[1][2], std / FLOAT8_STD)]


def _scales(rng: np.random.Generator, shape: tuple[int, ...], middle: float) -> Array:
    spread = rng.uniform(1 - _SCALE_SPREAD, 1 + _SCALE_SPREAD, shape)
    return (middle * spread).astype(np.float32)


_INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": INT4_GROUP,
    "symmetric": True,
}
FORMATS: Mapping[str, ExpertFormat] = {
    "bfloat16": ExpertFormat(_bfloat16_parts, _bfloat16, None),
    "int4_g32": ExpertFormat(
        _int4_parts,
        _int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        },
    ),
    "fp8_block": ExpertFormat(
        _fp8_parts,
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
        },
    ),
}


def expert_format(name: str) -> ExpertFormat:
    """A format by name. Raises UserError."""
    if name not in FORMATS:
        raise UserError(f"--format: {name!r} is not allowed; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]
