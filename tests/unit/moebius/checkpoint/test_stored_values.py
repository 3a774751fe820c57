"""Invariant: every NaN and infinity among stored weights is seen, and no finite number is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.stored_values import check_values

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_bit_pattern_is_judged(name: str) -> None:
    """Patterns of all types of at most 16 bits are judged, one value at a time among finite ones, contiguous
    and strided.
    """
    bits = 8 if name == "F8_E4M3" else 16
    patterns = np.arange(1 << bits, dtype=np.uint8 if bits == 8 else np.uint16)
    values = torch.from_numpy(patterns.view(f"i{bits // 8}")).view(DTYPES[name]).float()
    finite = values.isfinite().numpy()
    check_values(patterns[finite], name, "x")
    check_values(np.stack([patterns[finite]] * 3).T[::2], name, "x")
    for pattern in patterns[~finite]:
        spoilt = np.zeros((5, 4), patterns.dtype)
        spoilt[3, 2] = pattern
        for array in (spoilt, spoilt.T, spoilt[1::2, 1:3]):
            with pytest.raises(CheckpointError, match="'x' holds NaN or infinite"):
                check_values(array, name, "x")


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_float32_is_judged(value: float) -> None:
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, 0.0, -0.0, 1e-45], np.float32)
    check_values(values, "F32", "x")
    with pytest.raises(CheckpointError, match="'x'"):
        check_values(np.append(values, np.float32(value)), "F32", "x")


@pytest.mark.parametrize("sign", [1, -1])
def test_what_bfloat16_rounds_to_infinity_is_found(sign: int) -> None:
    """Values are found from half a step above its largest number on, where that is the type in use."""
    bits = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32) * np.float32(sign)
    below, first = bits[:1], bits[1:]
    assert torch.from_numpy(below).bfloat16().isfinite().all()
    assert not torch.from_numpy(first).bfloat16().isfinite().any()
    check_values(below, "F32", "x", "bfloat16")
    check_values(first, "F32", "x")
    with pytest.raises(CheckpointError, match=r"'x' holds values that bfloat16 has no finite number for$"):
        check_values(first, "F32", "x", "bfloat16")


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_what_float16_has_no_number_for_is_refused(stored: str) -> None:
    """All bit patterns of 16-bit types, and both sides of the border in float32; float16's own always fit."""
    if stored == "F32":
        border = np.array([65519.996, 65520.0, 1e38], np.float32)
        values = np.concatenate((border, -border))
        floats = torch.from_numpy(values)
    else:
        values = np.arange(1 << 16, dtype=np.uint16)
        floats = torch.from_numpy(values.view(np.int16)).view(DTYPES[stored]).float()
        kept = floats.isfinite().numpy()
        values, floats = values[kept], floats[kept]
    fits = floats.half().isfinite().numpy()
    check_values(values[fits], stored, "x", "float16")
    for value in values[~fits][:: 1 + len(values) // 500]:
        with pytest.raises(CheckpointError, match=r"'x' holds values that float16 .* --dtype bfloat16"):
            check_values(np.array([0, value], values.dtype), stored, "x", "float16")
    assert fits.all() == (stored == "F16")


def test_other_types_hold_no_such_values() -> None:
    """And nothing holds nothing."""
    check_values(np.full(3, -1, np.int32), "I32", "x")
    check_values(np.full(3, 0xFF, np.uint8), "U8", "x")
    check_values(np.empty((0, 4), np.float32), "F32", "x")
