"""Values of random weights: drawn, encoded in a format, and routers as skewed as asked.

Random numbers of the types that checkpoints store, at a nanosecond each.

A value is looked up in a table of 65536 quantiles of the normal distribution, already rounded to the stored
type: 16 random bits choose the entry. That is several times faster than drawing normals and rounding them.

Routers whose experts are chosen as unequally as asked.

A router scores expert e with `gate[e] . x`. The models written here keep element 0 of the residual stream
constant: every embedding has the same value there and no layer writes to it. So `gate[e][0]` acts as a bias
that no token changes, while the other elements, drawn from a normal distribution, make the choice depend on
the token. The biases are fitted on simulated scores until the share of tokens that choose the expert of
rank r follows `r ** -exponent` (an expert that would have to be chosen by more than all tokens is chosen by
all, and the rest of its share goes to the next ones). Which expert has which rank is drawn per layer.

Scores inside a model are correlated between tokens and not quite normal, so the law holds approximately;
`moebius bench engine` prints how many different experts were really touched.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.errors import UserError

Array = NDArray[Any]

_ENTRIES = 65536
# Of the codes that `int4_words` draws, minus 8: the sum of two numbers 0..7 varies by 2 * (64 - 1) / 12.
INT4_STD = 10.5**0.5
# Ordinary e4m3 codes end at 448; quantiles reach 4.2 deviations, so one deviation may be 64.
FLOAT8_STD = 64.0
_LOW_BITS = np.uint64(0x7777777777777777)
_ONES = np.uint64(0x1111111111111111)


def generator(seed: int, *key: int) -> np.random.Generator:
    """A fast stream of its own for every (seed, key), whichever thread draws from it."""
    return np.random.Generator(np.random.SFC64([seed, *key]))


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((entry + 0.5) / _ENTRIES) for entry in range(_ENTRIES)], np.float32)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even; finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


@functools.cache
def _bfloat16_table(std: float) -> NDArray[np.uint16]:
    return bfloat16_bits(_quantiles() * np.float32(std))


@functools.cache
def _float8_table() -> NDArray[np.uint8]:
    codes = np.arange(0x7F, dtype=np.uint8)  # 0x7f is NaN
    exponents, mantissas = codes >> 3, (codes & 7) / 8.0
    values = np.where(
        exponents == 0, mantissas * 2.0**-6, (1 + mantissas) * 2.0 ** (exponents.astype(int) - 7)
    )
    middles = (values[1:] + values[:-1]) / 2
    wanted = _quantiles() * FLOAT8_STD
    nearest = np.searchsorted(middles, np.abs(wanted)).astype(np.uint8)
    codes_of: NDArray[np.uint8] = nearest | ((wanted < 0).astype(np.uint8) << 7)
    return codes_of


def _indices(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    words = rng.integers(0, 2**64, -(-count // 4), np.uint64)
    return words.view(np.uint16)[:count]


def bfloat16_normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> NDArray[np.uint16]:
    """Returns the bits of normal values of standard deviation `std`, `shape`."""
    return _bfloat16_table(std)[_indices(rng, int(np.prod(shape)))].reshape(shape)


def float8_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns e4m3 codes of normal values of standard deviation FLOAT8_STD, `shape`."""
    return _float8_table()[_indices(rng, int(np.prod(shape)))].reshape(shape)


def int4_words(rng: np.random.Generator, rows: int, cols: int) -> NDArray[np.int32]:
    """Returns eight codes 1..15 a word, symmetric about 8 and denser there, `[rows, ceil(cols / 8)]`."""
    count = rows * -(-cols // 8)
    words = rng.integers(0, 2**64, (2, -(-count // 2)), np.uint64)
    # Sums of 0..7 and 0..7 and 1 stay within their four bits.
    summed = (words[0] & _LOW_BITS) + (words[1] & _LOW_BITS) + _ONES
    codes: NDArray[np.int32] = summed.view(np.int32)[:count].reshape(rows, -1)
    return codes


INT4_GROUP = 32
FP8_BLOCK = 128
# An int4 word of eight codes that mean zero.
_ZERO_WORD = np.array([0x88888888], np.uint32).view(np.int32)[0]
# Scales differ by this much either way, so that a reader that mixes them up is seen.
_SCALE_SPREAD = 0.25

# Suffix of the matrix's name, safetensors dtype, shape.
Part = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class ExpertFormat:
    """One way to store experts; the table `FORMATS` has them all."""

    parts: Callable[[int, int], list[Part]]
    # Arrays in the order of `parts`: (rng, out, in, deviation, how many of the first rows are zero).
    draw: Callable[[np.random.Generator, int, int, float, int], list[Array]]
    config: dict[str, Any] | None  # quantization_config of config.json.


def _bfloat16_parts(rows: int, cols: int) -> list[Part]:
    return [("weight", "BF16", (rows, cols))]


def _bfloat16(rng: np.random.Generator, rows: int, cols: int, std: float, zero_rows: int) -> list[Array]:
    values = bfloat16_normal(rng, (rows, cols), std)
    values[:zero_rows] = 0
    return [values]


def _int4_parts(rows: int, cols: int) -> list[Part]:
    groups = math.ceil(cols / INT4_GROUP)
    return [
        ("weight_packed", "I32", (rows, math.ceil(cols / 8))),
        ("weight_scale", "BF16", (rows, groups)),
        ("weight_shape", "I64", (2,)),
    ]


def _int4(rng: np.random.Generator, rows: int, cols: int, std: float, zero_rows: int) -> list[Array]:
    words = int4_words(rng, rows, cols)
    words[:zero_rows] = _ZERO_WORD
    scales = _scales(rng, (rows, math.ceil(cols / INT4_GROUP)), std / INT4_STD)
    return [words, bfloat16_bits(scales), np.array([rows, cols], np.int64)]


def _fp8_parts(rows: int, cols: int) -> list[Part]:
    blocks = (math.ceil(rows / FP8_BLOCK), math.ceil(cols / FP8_BLOCK))
    return [("weight", "F8_E4M3", (rows, cols)), ("weight_scale_inv", "F32", blocks)]


def _fp8(rng: np.random.Generator, rows: int, cols: int, std: float, zero_rows: int) -> list[Array]:
    codes = float8_normal(rng, (rows, cols))
    codes[:zero_rows] = 0
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
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*mlp.gate$",
                "re:.*shared_experts.*",
                "re:.*layers.\\d+.mlp.(gate|up|down)_proj$",
            ],
        },
    ),
    "fp8_block": ExpertFormat(
        _fp8_parts,
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": [
                "lm_head",
                "self_attn",
                "mlp.gate",
                "mlp.up_proj",
                "mlp.down_proj",
                "shared_experts",
            ],
        },
    ),
}


def expert_format(name: str, others: Sequence[str] = ()) -> ExpertFormat:
    """Returns a format by name. Raises UserError, which names `others` as allowed, too."""
    if name not in FORMATS:
        allowed = ", ".join((*FORMATS, *others))
        raise UserError(f"--format: {name!r} is not allowed; allowed: {allowed}")
    return FORMATS[name]


# Deviation of the part of the scores that depends on the token; trained routers have 1 to 2.
SCORE_STD = 1.5
_SAMPLES = 4096
_ROUNDS = 40
_STEP = 0.7


def parse_skew(text: str) -> float:
    """ "none" is 0, "zipf:1.2" the exponent. Raises UserError."""
    if text == "none":
        return 0.0
    found = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", text)
    if found is None or not 0 < float(found[1]) <= 4:
        raise UserError(f"--skew: {text!r} is not allowed; allowed: none, or zipf:S with S above 0, up to 4")
    return float(found[1])


def wanted_shares(num_experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Returns the share of tokens that choose the expert of each rank, `[num_experts]`, summing to `top_k`,
    at most 1.
    """
    law = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    shares = np.zeros(num_experts)
    full = 0
    while True:
        shares[:full] = 1.0
        shares[full:] = law[full:] * (top_k - full) / law[full:].sum()
        if full >= top_k or shares[full] <= 1.0:
            return np.minimum(shares, 1.0)
        full += 1


@functools.cache
def fitted_biases(num_experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Biases by rank, `[num_experts]`, mean 0, for scores of deviation SCORE_STD."""
    if exponent == 0.0 or top_k == num_experts:
        return np.zeros(num_experts)
    # No score gives a share of 1, or of 0 in `_SAMPLES` tokens; both ends are held a little inside.
    wanted = wanted_shares(num_experts, top_k, exponent).clip(1 / _SAMPLES, 0.98)
    noise = generator(0, num_experts, top_k).standard_normal((_SAMPLES, num_experts)) * SCORE_STD
    biases = SCORE_STD * 0.78 * np.log(wanted)
    for _ in range(_ROUNDS):
        chosen = np.argpartition(noise + biases, -top_k, axis=1)[:, -top_k:]
        found = np.bincount(chosen.ravel(), minlength=num_experts) / _SAMPLES
        found = found.clip(0.5 / _SAMPLES, 1 - 0.5 / _SAMPLES)
        error = np.log(wanted / (1 - wanted)) - np.log(found / (1 - found))
        biases += _STEP * error
    fitted: NDArray[np.float64] = biases - biases.mean()
    return fitted


def layer_biases(num_experts: int, top_k: int, exponent: float, layer: int, seed: int) -> NDArray[np.float64]:
    """Returns the biases by expert of one layer, `[num_experts]`: the fitted ones in an order of its own."""
    ranks = generator(seed, 1, layer).permutation(num_experts)
    return fitted_biases(num_experts, top_k, exponent)[ranks]
