"""Elements, scales and columns of packed panels in registers; `PANEL` is a `PanelFormat`.

Whole numbers become floats by setting them into the mantissa of a float whose exponent is known, and small
floats by shifting their bits into place and multiplying by a power of two: both exact, both of full rate.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.e4m3 import decode_e4m3
from gpu_service.ops.triton.jit import jit


@jit
def element_shift(i, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """First bit of element i of a word: nibbles alternate between the word's halves."""
    return (i % 2) * 16 + (i // 2) * 4 if PANEL.bits == 4 else i * PANEL.bits


# What int4 elements stand above their value when the zero point is 8.
INT4_OFFSET = tl.constexpr(8388616.0)
# The same without a zero point, or with minimums.
INT4_BASE = tl.constexpr(8388608.0)


@jit
def element(words, shift, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of the elements at bit `shift` of int32 words; int4 as 2^23 plus its code, 0 to 15."""
    if PANEL.code == "float32":
        value = words.to(tl.float32, bitcast=True)
    elif PANEL.code == "bfloat16":
        value = ((words >> shift) << 16).to(tl.float32, bitcast=True)
    elif PANEL.code == "float16":
        value = (words >> shift).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PANEL.code == "float8":
        value = decode_e4m3(words >> shift)
    elif PANEL.code == "int8":
        value = ((words << (24 - shift)) >> 24).to(tl.float32)
    elif PANEL.code == "int4":
        value = (((words >> shift) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
    else:
        # e2m1: bias 1 becomes 127 by a factor of 2^126.
        code = words >> shift
        placed = ((code & 7) << 22) | ((code & 8) << 28)
        value = placed.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return value


@jit
def load_scales(scales, index, mask, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of group scales or minimums; `scales` points to the scale type, or to its bits."""
    raw = tl.load(scales + index, mask=mask, other=0)
    if PANEL.scale == "e8m0":
        bits = raw.to(tl.int32)
        # 2^-127 is no normal float32.
        value = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
        value = tl.where(bits == 255, float("nan"), value)
    elif PANEL.scale == "e4m3":
        value = decode_e4m3(raw.to(tl.int32))
    else:
        value = raw.to(tl.float32)
    return value


@jit
def scale_index(section, group, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the scale (or minimum) of a group and column lies, in elements; `section`: their first byte."""
    if PANEL.scale == "float32":
        begin = section // 4
    elif PANEL.scale == "bfloat16" or PANEL.scale == "float16":
        begin = section // 2
    else:
        begin = section
    return begin + group if PANEL.panel_scale else begin + group * 16 + column


@jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `gpu_service.experts.local_client` says, in float32."""
    if ACTIVATION == "silu":
        value = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "silu_clamped":
        gate = tl.minimum(gate * tl.sigmoid(gate), limit)
        value = gate * tl.minimum(tl.maximum(up, -limit), limit)
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1) * gate * tl.sigmoid(alpha * gate)
    return value
