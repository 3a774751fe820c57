"""Cached values as 8-bit floats (e4m3: 4 exponent bits, 3 mantissa bits, largest value 448, no infinity)."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

# `kv_cache_dtype` of the configuration -> what pages hold; None: the type of the activations.
STORAGE_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8_e4m3": E4M3}


def quantise_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes `values / scale` rounded to nearest even; beyond the largest value it saturates.

    NaN stays NaN, and infinity becomes it, so that what overflowed before is still seen.
    """
    scaled = values.float().div(scale)
    return scaled.masked_fill_(scaled.isinf(), torch.nan).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantise_into(target: torch.Tensor, stored: torch.Tensor, key_scale: float, value_scale: float) -> None:
    """Writes `[..., 2 * num_kv_heads, head_dim]` e4m3 into a tensor of that shape and a wider type."""
    target.copy_(stored)
    half = target.shape[-2] // 2
    if key_scale != 1.0:
        target[..., :half, :].mul_(key_scale)
    if value_scale != 1.0:
        target[..., half:, :].mul_(value_scale)
