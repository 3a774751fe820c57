"""`triton.jit` for kernels whose whole numbers change from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: one compiled kernel for all values of these arguments.

    Left alone, Triton compiles again when a number becomes 1, or a multiple of 16: in the middle of a
    service, when the first batch of 16 requests comes.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=names)

    return decorate
