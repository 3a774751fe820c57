"""Encoders of the checkpoint formats in numpy and torch, with the weights that each one means.

Written from the formats' own definitions (see kernels/format/source_access.h), apart from the C++ code that
reads them: what they return is the reference for packing, dequantising and loading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moebius.kernels.source import ScaleType, SourceMatrix
from moebius.kernels.weight_formats import (
    CODE_MIDDLES,
    CODEBOOKS,
    GRID_UNITS,
    WEIGHT_FORMATS,
    grid,
    weight_format,
)
from tests.helpers.numpy_unpack import IQ1

Array = NDArray[Any]
Floats = NDArray[np.float32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, eq=False)
class Quantised:
    """One matrix [out, in] in a checkpoint's format; filled by the encoders below.

    format: the name of the packed format that holds it exactly. weights: what it means, float32. tensors:
    the checkpoint's tensors by the name that follows the module's ("weight_packed", "qweight", ...).
    """

    format: str
    source: SourceMatrix
    weights: Floats
    tensors: dict[str, Array]


def random_weights(rng: np.random.Generator, rows: int, cols: int) -> Floats:
    """Returns normal weights with rows of different size, as trained ones have."""
    return (
        rng.standard_normal((rows, cols), np.float32) * rng.uniform(0.2, 2, (rows, 1)).astype(np.float32) / 16  # type: ignore[return-value]
    )


def bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()


def bfloat16_values(bits: NDArray[np.uint16]) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float().numpy()


def float8_bits(values: Floats) -> NDArray[np.uint8]:
    """e4m3fn, rounded to nearest even; values beyond its range become +-448."""
    clipped = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448, 448)
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def float8_values(bits: NDArray[np.uint8]) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy()


def e8m0_values(bits: NDArray[np.uint8]) -> Floats:
    return np.ldexp(np.float32(1), bits.astype(np.int32) - 127).astype(np.float32)


def pack_words(codes: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int32]:
    """Eight 4-bit codes along `axis` to an int32: nibble i holds code order[i]; zeros fill the last word."""
    moved = np.moveaxis(codes, axis, -1).astype(np.uint32)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % 8)])
    groups = moved.reshape(*moved.shape[:-1], -1, 8)
    words = np.zeros(groups.shape[:-1], np.uint32)
    for nibble, code in enumerate(order):
        words |= groups[..., code] << np.uint32(4 * nibble)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def per_element(values: Array, group_size: int, cols: int) -> Array:
    """[rows, groups] -> [rows, cols]."""
    return np.repeat(values, group_size, axis=1)[:, :cols]


def in_groups(weights: Floats, group_size: int) -> Floats:
    """[rows, groups, group_size], padded with zeros."""
    padded = np.pad(weights, [(0, 0), (0, -weights.shape[1] % group_size)])
    return padded.reshape(weights.shape[0], -1, group_size)


def plain(weights: Floats, code: Literal["float32", "bfloat16", "float16"]) -> Quantised:
    stored: Array = weights
    meant = weights
    if code == "bfloat16":
        stored = bfloat16_bits(weights)
        meant = bfloat16_values(stored)
    elif code == "float16":
        stored = weights.astype(np.float16)
        meant = stored.astype(np.float32)
    return Quantised(code, SourceMatrix(stored), meant, {"weight": stored})


def fp8_block(weights: Floats, height: int = 128, width: int = 128) -> Quantised:
    """DeepSeek-V3: weight e4m3, weight_scale_inv float32 per 128 x 128, multiplied; or other blocks.

    Kernels know groups of 128 and of 32, of which blocks are made.
    """
    rows, cols = weights.shape
    padded = np.pad(weights, [(0, -rows % height), (0, -cols % width)])
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
    spread = np.repeat(np.repeat(scales, height, 0), width, 1)[:rows, :cols]
    codes = float8_bits(weights / spread)
    group = 32 if width % 128 else 128
    repeated = np.repeat(scales, width // group, 1)[:, : -(-cols // group)]
    source = SourceMatrix(codes, code="float8", scales=repeated, group_size=group, scale_rows=height)
    tensors = {"weight": codes, "weight_scale_inv": scales}
    name = "fp8_g32" if group == 32 else "fp8_g128" if height % 16 else "fp8_block"
    return Quantised(name, source, float8_values(codes) * spread, tensors)


def mxfp8(weights: Floats) -> Quantised:
    """OCP: e4m3, an e8m0 scale per 32 of a row."""
    largest = np.maximum(np.abs(in_groups(weights, 32)).max(2), 1e-6)
    scales = np.ceil(np.log2(largest / 448) + 127).astype(np.uint8)
    spread = per_element(e8m0_values(scales), 32, weights.shape[1])
    codes = float8_bits(weights / spread)
    source = SourceMatrix(codes, code="float8", scales=scales, scale_type="e8m0", group_size=32)
    tensors = {"weight": codes, "weight_scale": scales}
    return Quantised("mxfp8", source, float8_values(codes) * spread, tensors)


def fp8_channel(weights: Floats) -> Quantised:
    scales = (np.abs(weights).max(1) / 448).astype(np.float32)
    codes = float8_bits(weights / scales[:, None])
    source = SourceMatrix(codes, code="float8", column_scale=scales)
    meant = float8_values(codes) * scales[:, None]
    return Quantised("fp8_channel", source, meant, {"weight": codes, "weight_scale": scales[:, None]})


def fp8_tensor(weights: Floats) -> Quantised:
    scale = np.float32(np.abs(weights).max() / 448)
    codes = float8_bits(weights / scale)
    source = SourceMatrix(codes, code="float8", tensor_scale=float(scale))
    tensors = {"weight": codes, "weight_scale": np.array([scale], np.float32)}
    return Quantised("fp8_channel", source, float8_values(codes) * scale, tensors)


def int8_channel(weights: Floats, *, quantised_rows: bool = False) -> Quantised:
    scales = (np.abs(weights).max(1) / 127).astype(np.float32)
    codes = np.rint(weights / scales[:, None]).astype(np.int8)
    meant = codes.astype(np.float32) * scales[:, None]
    source = SourceMatrix(codes, column_scale=scales)
    name = "int8_w8a8" if quantised_rows else "int8"
    return Quantised(name, source, meant, {"weight": codes, "weight_scale": scales[:, None]})


def half_scales(spans: Floats, float16: bool) -> tuple[Array, Floats]:
    """Returns scales as stored, and in float32."""
    spans = np.maximum(spans, 1e-6).astype(np.float32)
    stored = spans.astype(np.float16) if float16 else bfloat16_bits(spans)
    return stored, stored.astype(np.float32) if float16 else bfloat16_values(stored)


def int8_group(weights: Floats, group_size: int, *, float16: bool = False) -> Quantised:
    """Returns symmetric int8 with a scale per group (compressed-tensors, GGUF's Q8_0 and Q6_K)."""
    rows, cols = weights.shape
    groups = in_groups(weights, group_size)
    stored, scales = half_scales(np.abs(groups).max(2) / 127, float16)
    codes = np.clip(np.rint(groups / scales[..., None]), -128, 127).astype(np.int8)
    codes = np.ascontiguousarray(codes.reshape(rows, -1)[:, :cols])
    source = SourceMatrix(codes, scales=stored, group_size=group_size)
    meant = codes.astype(np.float32) * per_element(scales, group_size, cols)
    name = f"int8_g{group_size}" + ("_f16" if float16 else "")
    return Quantised(name, source, meant, {"weight": codes, "weight_scale": stored})


def with_mins(weights: Floats, bits: int, group_size: int = 32) -> Quantised:
    """Returns the codes of 4 or 5 bits times a float16 scale plus a float16 minimum per group (GGUF's Q4_1,
    Q5_1).
    """
    rows, cols = weights.shape
    groups = in_groups(weights, group_size)
    mins = groups.min(2).astype(np.float16)
    low = mins.astype(np.float32)
    largest = 2**bits - 1
    stored, scales = half_scales((groups.max(2) - low) / largest, True)
    codes = np.clip(np.rint((groups - low[..., None]) / scales[..., None]), 0, largest).astype(np.uint8)
    codes = np.ascontiguousarray(codes.reshape(rows, -1)[:, :cols])
    meant = codes.astype(np.float32) * per_element(scales, group_size, cols)
    meant += per_element(low, group_size, cols)
    tensors: dict[str, Array] = {"scales": stored, "mins": mins}
    if bits == 4:
        tensors["codes"] = pack_words(codes, 1)
        source = SourceMatrix(tensors["codes"], "compressed_int4", cols=cols)
    else:
        tensors["codes"] = codes.view(np.int8)
        source = SourceMatrix(tensors["codes"])
    source = replace(source, scales=stored, group_size=group_size, mins=mins)
    name = f"int{4 if bits == 4 else 8}_g{group_size}_mins"
    return Quantised(name, source, meant, tensors)


def small_codes(name: str, weights: Floats) -> Quantised:
    """GGUF's types of fewer than 8 bits: integers or places in a table, times float16 scales or products."""
    rows, cols = weights.shape
    kind = weight_format(name)
    size, groups = kind.group_size, in_groups(weights, kind.group_size)
    integers = np.arange(2**kind.bits) - (0 if kind.mins else CODE_MIDDLES.get(kind.code, 0))
    table = np.array(CODEBOOKS.get(kind.code, integers), np.float32)
    low = np.minimum(groups.min(2), 0) if kind.mins else np.zeros(groups.shape[:2], np.float32)
    reach = (groups.max(2) - low if kind.mins else np.abs(groups).max(2)) / np.abs(table).max()
    if kind.scale == "products":
        shared = max(size, math.gcd(cols, 256)) // size
        stored: Array
        largest = 15 if kind.mins and kind.bits == 2 else 31 if kind.code == "int3" else 63
        stored, scales = _products(reach.astype(np.float32), 1 if kind.mins else -1, shared, largest)
        min_words, low = _products(low.astype(np.float32), 1, shared, -largest)
    else:
        stored, scales = half_scales(reach.astype(np.float32), True)
        min_words, low = half_scales(low.astype(np.float32), True)
    scaled = (groups - low[..., None]) / np.where(scales == 0, 1, scales)[..., None]
    codes = np.abs(scaled[..., None] - table).argmin(-1).reshape(rows, -1)[:, :cols].astype(np.uint8, "C")
    meant = table[codes] * per_element(scales, size, cols) + per_element(low * kind.mins, size, cols)
    scale_type: ScaleType | None = "products" if kind.scale == "products" else None
    source = SourceMatrix(codes, code=kind.code, scales=stored, scale_type=scale_type, group_size=size)
    source = replace(source, mins=min_words if kind.mins else None)
    return Quantised(name, source, meant.astype(np.float32), {"codes": codes, "scales": stored})


def digits(name: str, weights: Floats) -> Quantised:
    """GGUF's TQ1_0: digits -1, 0 and 1, times a factor for as many as divide 256 and a row."""
    rows, cols = weights.shape
    shared = max(32, math.gcd(cols, 256))
    blocks = in_groups(weights, shared)
    factors = np.maximum(np.abs(blocks).max(2), 1e-6).astype(np.float16)
    found = np.rint(blocks / factors.astype(np.float32)[..., None]).reshape(rows, -1)
    found = np.pad(found[:, :cols], [(0, 0), (0, -cols % 32)]).astype(np.int32).reshape(rows, -1, 32)
    powers = 3 ** np.arange(4, -1, -1)
    four, two = found[..., :20].reshape(rows, -1, 5, 4), found[..., 20:30].reshape(rows, -1, 5, 2)
    fields = [
        np.rint(np.einsum("rcpb,p->rcb", of, powers) * 256 / 243).astype(np.int64) & 255 for of in (four, two)
    ]
    word = (fields[0] << np.arange(0, 32, 8)).sum(-1)
    more = (fields[1] << np.array([0, 8])).sum(-1) | (found[..., 30] & 3) << 16 | (found[..., 31] & 3) << 18
    codes = np.stack([word, more], -1).astype(np.uint32).view(np.int32).reshape(rows, -1)
    factor = np.repeat(factors, shared // 32, 1)[:, : -(-cols // 32)]
    stored = factor.view(np.uint16).astype(np.int32) | 1 << 16
    meant = found.reshape(rows, -1)[:, :cols] * per_element(factor.astype(np.float32), 32, cols)
    source = SourceMatrix(codes, "grid_words", code="tq1", cols=cols, scales=stored, scale_type="products")
    source = replace(source, group_size=32)
    return Quantised(name, source, meant.astype(np.float32), {"codes": codes, "scales": stored})


def _products(values: Floats, sign: int, shared: int, most: int) -> tuple[NDArray[np.int32], Floats]:
    """Returns words and what they mean, both `[rows, groups]`, `shared` of which have one factor.

    Whole numbers are at most `most`, every second one with `sign`; factors are negative where `most` is.
    """
    rows, groups = values.shape
    blocks = np.pad(values, [(0, 0), (0, -groups % shared)]).reshape(rows, -1, shared)
    factors = (np.abs(blocks).max(2, keepdims=True) / most).astype(np.float16)
    signs = np.where(np.arange(shared) % 2, np.float32(sign), np.float32(1))
    divisors = np.where(factors == 0, 1, factors).astype(np.float32)
    whole = (np.rint(blocks / divisors) * signs).astype(np.int8)
    bits = np.broadcast_to(factors, blocks.shape).copy().view(np.uint16).astype(np.int32)
    words = bits | whole.view(np.uint8).astype(np.int32) << 16
    meant = factors.astype(np.float32) * whole
    found, means = (np.ascontiguousarray(each.reshape(rows, -1)[:, :groups]) for each in (words, meant))
    return found.astype(np.int32), means.astype(np.float32)


def grid_rows(name: str, weights: Floats) -> Quantised:
    """GGUF's IQ1 to IQ3: rows of a grid, signs, whose number of ones is even in some types, and products as
    scales.
    """
    rows, cols = weights.shape
    kind = weight_format(name)
    code, size = kind.code, kind.group_size
    is_iq1 = code in IQ1
    rows_of_grid = grid(code).view(np.int8) if is_iq1 else grid(code)
    magnitudes = rows_of_grid.astype(np.float32) * np.float32(GRID_UNITS[code])
    width, largest_s = magnitudes.shape[1], 7 if is_iq1 else 15
    groups = in_groups(in_groups(weights, 32).reshape(rows, -1), size)
    negative = groups.reshape(rows, -1, 8) < 0
    if is_iq1:
        # Eight, or 32 of iq1_s, are an eighth less where their sum is negative.
        less = groups.reshape(rows, -1, 32 if code == "iq1_s" else 8).sum(-1) < 0
        negative[...] = np.repeat(less, negative.shape[1] // less.shape[1], 1)[..., None]
    elif code not in ("iq3_s", "iq2_s"):
        # An odd number of them: the eighth gets another one.
        negative[..., 7] ^= negative.sum(-1) % 2 == 1
    reach = np.abs(groups).max(2)[:, : -(-cols // size)] / magnitudes.max()
    shared = max(size, math.gcd(cols, 256)) // size
    blocks = np.pad(reach, [(0, 0), (0, -reach.shape[1] % shared)]).reshape(rows, -1, shared)
    factors = np.maximum(blocks.max(2, keepdims=True) / (2 * largest_s + 1), 1e-6).astype(np.float16)
    s = np.clip(np.rint((blocks / factors - 1) / 2), 0, largest_s).astype(np.int32).reshape(rows, -1)
    s = s[:, : reach.shape[1]]
    factor = np.repeat(factors.reshape(rows, -1), shared, 1)[:, : reach.shape[1]]
    scales = factor.astype(np.float32) * (2 * s + 1)
    whole = np.pad(scales, [(0, 0), (0, groups.shape[1] - scales.shape[1])], constant_values=1)
    moved = np.where(negative.reshape(groups.shape), np.float32(-0.125), np.float32(0.125)) * is_iq1
    scaled = groups / whole[..., None]
    wanted = (scaled - moved if is_iq1 else np.abs(scaled)).reshape(rows, -1, width)
    # The nearest row, by the square of the distance less what all have in common.
    numbers = ((magnitudes**2).sum(1) - 2 * wanted @ magnitudes.T).argmin(-1).astype(np.uint32)
    signs = (negative.astype(np.uint32) << np.arange(8, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    in_words = np.zeros((rows, signs.shape[1] // 4), np.uint32)
    if code in ("iq3_xxs", "iq2_xxs", "iq1_s"):
        in_words = s.astype(np.uint32)
    codes = _grid_words(code, numbers.reshape(rows, -1, 32 // width), signs.reshape(rows, -1, 4), in_words)
    codes = codes.reshape(rows, -1).view(np.int32)
    products = factor.view(np.uint16).astype(np.int32) | (2 * s + 1) << 16
    found = magnitudes[numbers].reshape(rows, -1)
    signed = np.where(negative.reshape(rows, -1), -found, found)
    meant = found + moved.reshape(rows, -1) if is_iq1 else signed
    meant = meant[:, :cols] * per_element(scales, size, cols)
    source = SourceMatrix(codes, "grid_words", code=code, cols=cols, scales=products, scale_type="products")
    source = replace(source, group_size=size)
    return Quantised(name, source, meant.astype(np.float32), {"codes": codes, "scales": products})


def _grid_words(code: str, numbers: Array, signs: Array, s: Array) -> Array:
    """Returns a source's words `[rows, chunks, words]` of 32 weights each: numbers `[rows, chunks, 4 or 8]`,
    bytes of signs `[rows, chunks, 4]`, and s where words have it.
    """

    def joined(fields: Array, step: int) -> Array:
        places = np.arange(0, step * fields.shape[-1], step, dtype=np.uint32)
        return np.bitwise_or.reduce(fields.astype(np.uint32) << places, -1)

    nothing = np.zeros(signs.shape[:2], np.uint32)
    if code in ("iq3_xxs", "iq2_xxs"):
        last = joined(signs & 127, 7) | s << 28
        low = [joined(numbers[..., i : i + 4], 8) for i in range(0, numbers.shape[-1], 4)]
        words = [*low, last, nothing] if code == "iq3_xxs" else [*low, last]
    elif code == "iq2_xs":
        pairs = numbers | (signs & 127) << 9
        words = [joined(pairs[..., :2], 16), joined(pairs[..., 2:], 16)]
    elif code == "iq2_s":
        pairs = numbers | (signs & 63) << 10
        words = [joined(pairs[..., :2], 16), joined(pairs[..., 2:], 16), joined(signs >> 6, 2), nothing]
    elif code in IQ1:
        less = (signs & 1).astype(np.uint32)
        above = (less[..., ::2] | less[..., 1::2] << 1) << 6
        if code == "iq1_s":
            above = np.stack([s & 3, s >> 2 | less[..., 0] << 1], -1) << 6
        pairs = numbers[..., ::2] | (numbers[..., 1::2] & 31) << 11
        words = [joined(pairs, 16), joined(numbers[..., 1::2] >> 5 | above, 8)]
    else:
        halves = joined(signs[..., :2], 8), joined(signs[..., 2:], 8)
        own = [
            n[..., 0] | n[..., 1] << 10 | n[..., 2] << 23 | (of >> 11 & 15) << 19 | of >> 15 << 9
            for n, of in zip((numbers[..., :4], numbers[..., 4:]), halves, strict=True)
        ]
        shared = numbers[..., 3] | numbers[..., 7] << 23
        shared |= (halves[0] >> 4 & 127) << 9 | (halves[1] >> 4 & 127) << 16
        words = [own[0], shared, own[1], (halves[0] & 15) | (halves[1] & 15) << 4]
    return np.stack(words, -1)


# Formats of GGUF's types whose codes have fewer than 8 bits.
_SMALL = (*CODE_MIDDLES.keys() - {"int4"}, *CODEBOOKS)
SMALL_FORMATS = tuple(
    n for n, kind in WEIGHT_FORMATS.items() if kind.scale == "products" or kind.code in _SMALL
)


@dataclass(frozen=True, eq=False)
class Int4:
    """codes 0..15 [rows, cols]; zeros 0..15, scales as stored and in float32: [rows, groups]."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    stored_scales: Array
    scales: Floats

    def weights(self, group_size: int) -> Floats:
        cols = self.codes.shape[1]
        zeros = per_element(self.zeros, group_size, cols).astype(np.float32)
        return (self.codes.astype(np.float32) - zeros) * per_element(self.scales, group_size, cols)


def int4_codes(weights: Floats, group_size: int, *, zeros: bool, float16: bool) -> Int4:
    groups = in_groups(weights, group_size)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    spans = (high - low) / 15 if zeros else np.maximum(-low / 8, high / 7)
    stored, scales = half_scales(spans, float16)
    points = np.clip(np.rint(-low / scales), 0, 15) if zeros else np.full(spans.shape, 8.0, np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]) + points[..., None], 0, 15).astype(np.uint8)
    codes = codes.reshape(len(weights), -1)[:, : weights.shape[1]]
    return Int4(codes, points.astype(np.uint8), stored, scales)


def int4_name(group_size: int, zeros: bool, float16: bool) -> str:
    return f"int4_g{group_size}" + ("_zeros" if zeros else "") + ("_f16" if float16 else "")


def compressed_int4(
    weights: Floats, group_size: int, *, zeros: bool = False, float16: bool = False
) -> Quantised:
    """compressed-tensors pack-quantized: words along in, zero points packed along out."""
    rows, cols = weights.shape
    int4 = int4_codes(weights, group_size, zeros=zeros, float16=float16)
    tensors: dict[str, Array] = {
        "weight_packed": pack_words(int4.codes, 1),
        "weight_scale": int4.stored_scales,
        "weight_shape": np.array([rows, cols], np.int64),
    }
    if zeros:
        tensors["weight_zero_point"] = pack_words(int4.zeros, 0)
    source = SourceMatrix(
        tensors["weight_packed"],
        "compressed_int4",
        cols=cols,
        scales=int4.stored_scales,
        group_size=group_size,
        zeros=tensors.get("weight_zero_point"),
    )
    return Quantised(int4_name(group_size, zeros, float16), source, int4.weights(group_size), tensors)


def awq_int4(weights: Floats, group_size: int) -> Quantised:
    """AutoAWQ GEMM: words along out in the order 0 2 4 6 1 3 5 7, scales [groups, out]. out % 8 == 0."""
    int4 = int4_codes(weights, group_size, zeros=True, float16=True)
    tensors: dict[str, Array] = {
        "qweight": pack_words(int4.codes.T, 1, AWQ_ORDER),
        "qzeros": pack_words(int4.zeros.T, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(int4.stored_scales.T),
    }
    source = SourceMatrix(
        tensors["qweight"],
        "awq_int4",
        scales=tensors["scales"],
        group_size=group_size,
        zeros=tensors["qzeros"],
    )
    return Quantised(int4_name(group_size, True, True), source, int4.weights(group_size), tensors)


def gptq_int4(
    weights: Floats, group_size: int, *, version: Literal[1, 2] = 1, zeros: bool = True
) -> Quantised:
    """AutoGPTQ without reordering: words along in; version 1 stores zero - 1 modulo 16.

    out % 8 == in % 8 == 0.
    """
    int4 = int4_codes(weights, group_size, zeros=zeros, float16=True)
    offset = 1 if version == 1 else 0
    tensors: dict[str, Array] = {
        "qweight": pack_words(int4.codes.T, 0),
        "qzeros": pack_words((int4.zeros.T.astype(np.int32) - offset) & 15, 1),
        "scales": np.ascontiguousarray(int4.stored_scales.T),
        "g_idx": np.arange(weights.shape[1], dtype=np.int32) // group_size,
    }
    source = SourceMatrix(
        tensors["qweight"],
        "gptq_int4",
        scales=tensors["scales"],
        group_size=group_size,
        zeros=tensors["qzeros"] if zeros else None,
        zeros_offset=offset,
    )
    return Quantised(int4_name(group_size, zeros, True), source, int4.weights(group_size), tensors)


def float4_codes(scaled: Floats) -> NDArray[np.uint8]:
    """Returns the nearest of the sixteen values."""
    distance = np.abs(scaled[..., None] - FLOAT4_VALUES)
    distance[..., 8] = np.inf  # zero has no sign
    return distance.argmin(-1).astype(np.uint8)


def pack_bytes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    padded = np.pad(codes, [(0, 0), (0, codes.shape[1] % 2)])
    return padded[:, ::2] | padded[:, 1::2] << 4  # type: ignore[return-value]


def mxfp4(weights: Floats) -> Quantised:
    """OCP microscaling: blocks of 32 share 2^(scale - 127), which puts the largest element in [4, 8)."""
    rows, cols = weights.shape
    groups = in_groups(weights, 32)
    largest = np.maximum(np.abs(groups).max(2), 1e-30)
    scales = np.clip(np.floor(np.log2(largest)) - 2 + 127, 0, 254).astype(np.uint8)
    codes = float4_codes(groups / e8m0_values(scales)[..., None]).reshape(rows, -1)[:, :cols]
    blocks = pack_bytes(codes)
    source = SourceMatrix(blocks, "mxfp4", cols=cols, scales=scales, scale_type="e8m0", group_size=32)
    meant = FLOAT4_VALUES[codes] * per_element(e8m0_values(scales), 32, cols)
    return Quantised("mxfp4", source, meant, {"blocks": blocks, "scales": scales})


def nvfp4(weights: Floats, *, reciprocal: bool = False) -> Quantised:
    """ModelOpt: e4m3 scales of 16 times weight_scale_2.

    `reciprocal`: compressed-tensors' weight_global_scale, which divides.
    """
    rows, cols = weights.shape
    groups = in_groups(weights, 16)
    scale = np.float32(np.abs(weights).max() / (6 * 448))
    stored_scale = np.float32(1) / scale if reciprocal else scale
    factor = np.float32(1) / stored_scale if reciprocal else scale
    scales = float8_bits((np.abs(groups).max(2) / 6 / factor).astype(np.float32))
    decoded = float8_values(scales)
    safe = np.where(decoded == 0, np.float32(1), decoded) * factor
    codes = float4_codes(groups / safe[..., None]).reshape(rows, -1)[:, :cols]
    packed = pack_bytes(codes)
    source = SourceMatrix(
        packed,
        "nvfp4",
        cols=cols,
        scales=scales,
        scale_type="e4m3",
        group_size=16,
        tensor_scale=float(factor),
    )
    names = ("weight_packed", "weight_global_scale") if reciprocal else ("weight", "weight_scale_2")
    tensors: dict[str, Array] = {
        names[0]: packed,
        "weight_scale": scales,
        names[1]: np.array([stored_scale], np.float32),
    }
    meant = FLOAT4_VALUES[codes] * per_element(decoded, 16, cols) * factor
    return Quantised("nvfp4", source, meant, tensors)


# name -> encoder, for tests that go through all of them. Each takes any [out, in], both multiples of 8.
ENCODERS: dict[str, Callable[[Floats], Quantised]] = {
    "float32": lambda w: plain(w, "float32"),
    "bfloat16": lambda w: plain(w, "bfloat16"),
    "float16": lambda w: plain(w, "float16"),
    "fp8_block": fp8_block,
    "fp8_block_64": lambda w: fp8_block(w, 64, 64),
    "fp8_block_256": lambda w: fp8_block(w, 32, 256),
    "fp8_rows_128": lambda w: fp8_block(w, 1, 128),
    "mxfp8": mxfp8,
    "fp8_channel": fp8_channel,
    "fp8_tensor": fp8_tensor,
    "int8": int8_channel,
    "int8_w8a8": lambda w: int8_channel(w, quantised_rows=True),
    "compressed_int4_g32": lambda w: compressed_int4(w, 32),
    "compressed_int4_g64_f16": lambda w: compressed_int4(w, 64, float16=True),
    "compressed_int4_g128": lambda w: compressed_int4(w, 128),
    "compressed_int4_g32_zeros": lambda w: compressed_int4(w, 32, zeros=True),
    "compressed_int4_g64_zeros": lambda w: compressed_int4(w, 64, zeros=True),
    "awq_int4_g32": lambda w: awq_int4(w, 32),
    "awq_int4_g64": lambda w: awq_int4(w, 64),
    "awq_int4_g128": lambda w: awq_int4(w, 128),
    "gptq_int4_g32": lambda w: gptq_int4(w, 32),
    "gptq_int4_g128_v2": lambda w: gptq_int4(w, 128, version=2),
    "gptq_int4_g64_symmetric": lambda w: gptq_int4(w, 64, zeros=False),
    "int8_g16_f16": lambda w: int8_group(w, 16, float16=True),
    "int8_g32_f16": lambda w: int8_group(w, 32, float16=True),
    "int8_g128": lambda w: int8_group(w, 128),
    "int8_g32_mins": lambda w: with_mins(w, 5),
    "int4_g16_f16": lambda w: compressed_int4(w, 16, float16=True),
    "int4_g16_mins": lambda w: with_mins(w, 4, 16),
    "int4_g32_mins": lambda w: with_mins(w, 4),
    **{
        name: partial(
            digits
            if name == "tq1_products"
            else grid_rows
            if weight_format(name).code in GRID_UNITS
            else small_codes,
            name,
        )
        for name in SMALL_FORMATS
    },
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "nvfp4_reciprocal": lambda w: nvfp4(w, reciprocal=True),
}
