"""8-bit floats (e4m3fn) as bytes: for GPUs before architecture 89, whose compiler has no such type."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.device.limits import device_limits
from gpu_service.ops.triton.jit import jit


@jit
def decode_e4m3(bits):  # type: ignore[no-untyped-def]
    """Returns float32 of e4m3fn, whose bits are the lowest eight of an int32.

    Set into place as a float32, whose bias of 127 takes the place of 7 by a factor of 2^120: exact, and of
    full rate.
    """
    placed = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    value = placed.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@jit
def encode_e4m3(values):  # type: ignore[no-untyped-def]
    """Returns uint8 bits of float32 values of at most 448 in magnitude, rounded to nearest even; NaN stays
    NaN.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # What is cut off rounds up from half on, a tie to the even neighbour; then the bias of 127 becomes 7.
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2^-6 the codes are multiples of 2^-9, which is the last bit of a float32 from 2^14 on.
    small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, rounded - (120 << 3))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def widened(stored, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns cached values in the type that they are multiplied in; bytes are e4m3."""
    if stored.dtype == tl.uint8:
        return decode_e4m3(stored.to(tl.int32)).to(dtype)
    return stored.to(dtype)


def as_loadable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory in a type that kernels of its device may name: bytes for 8-bit floats they
    lack.
    """
    if tensor.dtype == torch.float8_e4m3fn and not device_limits(tensor.device).has_fp8:
        return tensor.view(torch.uint8)
    return tensor
