"""The ways checkpoints store quantised matrices: which tensors, of which types, shaped how.

A scheme is data. Logical matrices are `[out, in]`; every stored array covers them with elements of
`out_step` x `in_step` weights, on its last two axes or, `transposed`, the other way round. From that follow
the expected shapes, what of an array a slice of the matrix needs, and where matrices may be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moebius.kernels.source import Code, ScaleType, SourceLayout

# "scales", "mins" (what code 0 means): arrays of `out_step` x `in_step`. "channel": a factor per row.
# "tensor": one factor for all; "tensor_reciprocal": one divisor.
Role = Literal["codes", "scales", "zeros", "mins", "channel", "tensor", "tensor_reciprocal", "group_index"]

E8M0 = ("U8", "F8_E8M0")
FLOATS = ("F32", "BF16", "F16")
FLOAT_CODES: Mapping[str, Code] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SCALE_TYPES: Mapping[str, ScaleType] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
    "F8_E4M3": "e4m3",
    # Of GGUF blocks alone, see `gguf.block_parts`.
    "I32": "products",
}
# Side tensors that say nothing about the weights: scales of activations, sizes, hints for other kernels.
IGNORED_SUFFIXES = (
    "weight_shape",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    # Of 8-bit caches, which are scaled otherwise here.
    "k_scale",
    "v_scale",
    "kv_scale",
    "q_scale",
    "prob_scale",
)


@dataclass(frozen=True, slots=True)
class StoredRole:
    """One tensor of a scheme."""

    role: Role
    # After the matrix's stem: `<stem>.<suffix>`, or `<stem>_<suffix>` for stems without ".weight".
    suffix: str
    dtypes: tuple[str, ...]  # As safetensors headers spell them.
    # Weights that one element stands for, along out and in.
    out_step: int = 1
    in_step: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One way of storing a matrix; made by `quantisation.read_schemes` from the builders below."""

    # For messages: what the configuration calls it.
    name: str
    roles: tuple[StoredRole, ...]
    layout: SourceLayout = "plain"
    # Type of uint8 codes of layout plain.
    code: Code | None = None
    group_size: int = 0
    zeros_offset: int = 0
    # Zero points are stored, but all of them are the middle of the codes: each word of them must be this.
    symmetric_zeros: int | None = None
    bytes_in_words: bool = False  # Codes are int8 + 128, four of them to a word along in.
    # Name of the packed format that holds it exactly; "{scale}" becomes "" for bfloat16 group scales and
    # "_f16" for float16 ones. Empty: there is none.
    packed_format: str = ""
    # GPTQ's "desc_act": a column's group is what `group_index` says, so groups are scattered over the row.
    reorders: bool = False
    # Groups that share a factor of their scales: they stay together.
    groups_together: int = 1
    targets: tuple[str, ...] = ()  # compressed-tensors: modules the scheme applies to; empty: all.

    @property
    def codes(self) -> StoredRole:
        """The tensor that every scheme has, and names first."""
        return self.roles[0]


PLAIN_CODES = StoredRole("codes", "weight", FLOATS)
PLAIN = WeightScheme("unquantised", (PLAIN_CODES,))


def fp8(name: str, strategy: str, scale_suffix: str, block: tuple[int, int] = (128, 128)) -> WeightScheme:
    """e4m3 with float scales: "block" (rows, columns), "channel" (a row), or "tensor".

    Columns of a block are a multiple of 16.
    """
    codes = StoredRole("codes", "weight", ("F8_E4M3",))
    if strategy == "block":
        scales = StoredRole("scales", scale_suffix, ("F32", "BF16", "F8_E8M0", "U8"), *block)
        rows, columns = block
        # What kernels know and divides the columns; scales are repeated for it.
        group_size = next(size for size in (128, 32, 16) if columns % size == 0)
        packed = {128: "fp8_g128" if rows % 16 else "fp8_block", 32: "fp8_g32", 16: ""}[group_size]
        return WeightScheme(name, (codes, scales), code="float8", group_size=group_size, packed_format=packed)
    role: Role = "channel" if strategy == "channel" else "tensor"
    scale = StoredRole(role, scale_suffix, FLOATS)
    return WeightScheme(name, (codes, scale), code="float8", packed_format="fp8_channel")


def mxfp8(name: str, scale_suffix: str) -> WeightScheme:
    """Describes OCP MXFP8: e4m3, an e8m0 scale per 32 of a row."""
    scales = StoredRole("scales", scale_suffix, E8M0, 1, 32)
    codes = StoredRole("codes", "weight", ("F8_E4M3",))
    return WeightScheme(name, (codes, scales), code="float8", group_size=32, packed_format="mxfp8")


def int8(name: str, strategy: str, quantised_rows: bool, group_size: int = 0) -> WeightScheme:
    """Returns symmetric int8 with a scale per row, one for all, or one per group of a row."""
    codes = StoredRole("codes", "weight", ("I8",))
    packed = "int8_w8a8" if quantised_rows else "int8"
    return _int8_scheme(name, codes, strategy, group_size, packed)


def packed_int8(name: str, strategy: str, group_size: int) -> WeightScheme:
    """compressed-tensors "pack-quantized" of 8 bits: four along in per word."""
    codes = StoredRole("codes", "weight_packed", ("I32",), 1, 4)
    return replace(_int8_scheme(name, codes, strategy, group_size, "int8"), bytes_in_words=True)


def _int8_scheme(name: str, codes: StoredRole, strategy: str, group_size: int, packed: str) -> WeightScheme:
    if strategy == "group":
        scales = StoredRole("scales", "weight_scale", FLOATS, 1, group_size)
        return WeightScheme(
            name, (codes, scales), group_size=group_size, packed_format=_group_format("int8", group_size)
        )
    scale = StoredRole("channel" if strategy == "channel" else "tensor", "weight_scale", FLOATS)
    return WeightScheme(name, (codes, scale), packed_format=packed)


def _group_format(code: str, group_size: int, zeros: bool = False) -> str:
    # A scale for the whole row is one that all groups of 128 share.
    return f"{code}_g{group_size or 128}{'_zeros' if zeros else ''}{{scale}}"


def compressed_int4(name: str, group_size: int, symmetric: bool) -> WeightScheme:
    """compressed-tensors "pack-quantized": eight along in per word; zero points eight along out."""
    roles = [
        StoredRole("codes", "weight_packed", ("I32",), 1, 8),
        StoredRole("scales", "weight_scale", FLOATS, 1, group_size),
    ]
    if not symmetric:
        roles.append(StoredRole("zeros", "weight_zero_point", ("I32",), 8, group_size))
    return WeightScheme(
        name,
        tuple(roles),
        layout="compressed_int4",
        group_size=group_size,
        packed_format=_group_format("int4", group_size, not symmetric),
    )


def awq(group_size: int, zeros: bool) -> WeightScheme:
    """Describes AutoAWQ "gemm": words of eight along out, everything transposed."""
    roles = [
        StoredRole("codes", "qweight", ("I32",), 8, 1, True),
        StoredRole("scales", "scales", FLOATS, 1, group_size, True),
    ]
    if zeros:
        roles.append(StoredRole("zeros", "qzeros", ("I32",), 8, group_size, True))
    return WeightScheme(
        "awq",
        tuple(roles),
        layout="awq_int4",
        group_size=group_size,
        packed_format=_group_format("int4", group_size, zeros),
    )


def gptq(group_size: int, symmetric: bool, zeros_offset: int) -> WeightScheme:
    """Describes AutoGPTQ: words of eight along in, everything transposed; zeros are stored even when
    symmetric.
    """
    return WeightScheme(
        "gptq",
        _gptq_roles(group_size, per_word=8),
        layout="gptq_int4",
        group_size=group_size,
        zeros_offset=zeros_offset,
        symmetric_zeros=0x11111111 * (8 - zeros_offset) if symmetric else None,
        packed_format=_group_format("int4", group_size, not symmetric),
    )


def gptq_int8(group_size: int, zeros_offset: int) -> WeightScheme:
    """Describes AutoGPTQ of 8 bits, symmetric: words of four."""
    return WeightScheme(
        "gptq of 8 bits",
        _gptq_roles(group_size, per_word=4),
        group_size=group_size,
        symmetric_zeros=0x01010101 * (128 - zeros_offset),
        bytes_in_words=True,
        packed_format=_group_format("int8", group_size),
    )


def _gptq_roles(group_size: int, per_word: int) -> tuple[StoredRole, ...]:
    return (
        StoredRole("codes", "qweight", ("I32",), 1, per_word, True),
        StoredRole("scales", "scales", FLOATS, 1, group_size, True),
        StoredRole("zeros", "qzeros", ("I32",), per_word, group_size, True),
        StoredRole("group_index", "g_idx", ("I32",)),
    )


def mxfp4(name: str, codes: str, scales: str) -> WeightScheme:
    """Describes OCP MXFP4: two e2m1 a byte, an e8m0 scale per 32."""
    roles = (
        # DeepSeek-V4 calls its pairs signed.
        StoredRole("codes", codes, ("U8", "I8"), 1, 2),
        StoredRole("scales", scales, ("U8", "F8_E8M0"), 1, 32),
    )
    return WeightScheme(name, roles, layout="mxfp4", group_size=32, packed_format="mxfp4")


def nvfp4(name: str, codes: str, global_scale: StoredRole) -> WeightScheme:
    """Describes NVFP4: two e2m1 a byte, an e4m3 scale per 16, a global one."""
    roles = (
        StoredRole("codes", codes, ("U8",), 1, 2),
        StoredRole("scales", "weight_scale", ("F8_E4M3",), 1, 16),
        global_scale,
    )
    return WeightScheme(name, roles, layout="nvfp4", group_size=16, packed_format="nvfp4")


def reordered(scheme: WeightScheme, suffix: str = "g_idx") -> WeightScheme:
    """Returns the scheme with columns quantised in the order of activations; packed ones are sorted
    by group.
    """
    others = tuple(role for role in scheme.roles if role.role != "group_index")
    index = StoredRole("group_index", suffix, ("I32",))
    return replace(scheme, roles=(*others, index), reorders=True)


def for_targets(scheme: WeightScheme, targets: tuple[str, ...]) -> WeightScheme:
    """Returns the scheme, limited to modules."""
    return replace(scheme, targets=targets)
