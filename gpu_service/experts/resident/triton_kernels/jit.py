"""`triton.jit` for kernels that take counts: one compiled kernel for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit_any_count(function: Callable[..., Any]) -> Any:
    """Like `jit`, but `count` and `num_slots` do not choose among compiled variants.

    Otherwise the first batch whose size is no multiple of 16 would wait for a compiler.
    """
    return triton.jit(function, do_not_specialize=("count", "num_slots"))
