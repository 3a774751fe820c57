"""`triton.jit` with a type, and sizes of launches.

Kernels annotate pointers as `tl.tensor`, because the compiler reads annotations too. Arithmetic is in
float32 whatever the tensors hold; values are rounded where the references round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """The compiled (or, under TRITON_INTERPRET, interpreted) kernel: `kernel[grid](*args)`."""
    return triton.jit(function)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not smaller; block sizes are these."""
    return 1 << max(0, size - 1).bit_length()


def num_warps(block: int) -> int:
    """Warps for a program that reduces a row of `block` elements: eight elements a thread."""
    return min(16, max(1, block // 256))
