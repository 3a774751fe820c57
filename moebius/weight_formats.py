"""The formats of weights at rest, by name: what `weight_format` of an engine may be.

kernels/format/weight_format.h says the same in C++ and lists what each name means.
"""

from __future__ import annotations

from dataclasses import dataclass

from moebius.kernels_source import Code, ScaleType

CODE_BITS: dict[Code, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8": 8,
    "int8": 8,
    "int4": 4,
    "float4": 4,
}
SCALE_BYTES: dict[ScaleType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored at rest; `weight_format` fills it from a name.

    weight[column, k] = value(code) * scale[column, k // group_size] * column_scale[column], an int4 code
    meaning code - 8, or code - zero[column, k // group_size]. With minimums, of the scales' type, it is
    code * scale + minimum[column, k // group_size].
    """

    code: Code
    scale: ScaleType | None = None
    group_size: int = 0
    panel_scale: bool = False
    zeros: bool = False
    minimums: bool = False
    column_scale: bool = False
    quantised_rows: bool = False

    @property
    def bits(self) -> int:
        """Of one code."""
        return CODE_BITS[self.code]


def _named_formats() -> dict[str, WeightFormat]:
    formats = {
        "float32": WeightFormat("float32"),
        "bfloat16": WeightFormat("bfloat16"),
        "float16": WeightFormat("float16"),
        "fp8_block": WeightFormat("float8", "float32", 128, panel_scale=True),
        "fp8_channel": WeightFormat("float8", column_scale=True),
        "int8": WeightFormat("int8", column_scale=True),
        "int8_w8a8": WeightFormat("int8", column_scale=True, quantised_rows=True),
    }
    for group_size in (32, 64, 128):
        formats[f"int8_g{group_size}"] = WeightFormat("int8", "bfloat16", group_size)
        formats[f"int8_g{group_size}_f16"] = WeightFormat("int8", "float16", group_size)
    formats["int8_g16_f16"] = WeightFormat("int8", "float16", 16)
    formats["int8_g32_minimums"] = WeightFormat("int8", "float16", 32, minimums=True)
    formats["int4_g16_f16"] = WeightFormat("int4", "float16", 16)
    formats["int4_g16_minimums"] = WeightFormat("int4", "float16", 16, minimums=True)
    formats["int4_g32_minimums"] = WeightFormat("int4", "float16", 32, minimums=True)
    for zeros in (False, True):
        for group_size in (32, 64, 128):
            name = f"int4_g{group_size}" + ("_zeros" if zeros else "")
            formats[name] = WeightFormat("int4", "bfloat16", group_size, zeros=zeros)
            formats[name + "_f16"] = WeightFormat("int4", "float16", group_size, zeros=zeros)
    formats["mxfp4"] = WeightFormat("float4", "e8m0", 32)
    formats["nvfp4"] = WeightFormat("float4", "e4m3", 16, column_scale=True)
    return formats


WEIGHT_FORMATS = _named_formats()


def weight_format(name: str) -> WeightFormat:
    """The format of a name. Raises ValueError listing the names."""
    if name not in WEIGHT_FORMATS:
        raise ValueError(f"weight format {name!r} is unknown; allowed: {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[name]
