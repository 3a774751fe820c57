"""Patches Triton 3.6's interpreter for numpy 2.4: importing this lets kernels loop over bounds they loaded.

The interpreter holds scalars as arrays of one element and turns them into integers with `int`, which numpy
now refuses.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
