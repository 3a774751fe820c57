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


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: one compiled kernel for all values of these arguments.

    Left alone, Triton compiles again when a number becomes 1, or a multiple of 16: in the middle of a
    service, when the first batch of 16 requests comes.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=names)

    return decorate


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not smaller; block sizes are these."""
    return 1 << max(0, size - 1).bit_length()


def num_warps(block: int) -> int:
    """Warps for a program that reduces a row of `block` elements: eight elements a thread."""
    return min(16, max(1, block // 256))
