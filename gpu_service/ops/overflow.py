"""Where a residual stream first left the numbers that its type holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from gpu_service.ops.registry import Op

# Of a row all of whose values have been finite; more than any layer's number.
NO_OVERFLOW = 2**31 - 1
# What comes before and after all layers.
EMBEDDING, FINAL_NORM = -1, 2**30
# Types with float32's range leave it where weights are damaged, hardly ever otherwise: every eighth layer is
# looked at, since each look is a kernel.
_WIDE_STRIDE = 8


def is_noted(layer: int, is_float16: bool) -> bool:
    """Returns whether a step that notes overflows looks at the residual stream after this layer."""
    return is_float16 or layer % _WIDE_STRIDE == _WIDE_STRIDE - 1


def suspects(noted: Collection[int], layers: Iterable[int], is_float16: bool) -> list[int]:
    """Returns those of `layers` after which the stream may have left its range, where `noted` says that it
    had.
    """

    def note_of(layer: int) -> int:
        return layer if is_float16 else layer - layer % _WIDE_STRIDE + _WIDE_STRIDE - 1

    known = sorted(layers)
    # The last layers' note is the norm's, where none of their own follows.
    unnoted = {layer for layer in known[-_WIDE_STRIDE:] if FINAL_NORM in noted}
    return [layer for layer in known if note_of(layer) in noted or layer in unnoted]


@Op
def note_overflow(first: torch.Tensor, total: torch.Tensor, update: torch.Tensor | None, layer: int) -> None:
    """`first[t] = min(first[t], layer)`, in place, where row t of `total + update` is not finite.

    first int32 `[T]`; total `[T, N]`, rows contiguous; update `[T, N]` of its dtype or float32 (None: zeros),
    rounded with the sum to total's dtype as `fused_add_rms_norm` does it. Asks nothing of the host.
    """
    values = total if update is None else (total + update).to(total.dtype)
    # NaN is the largest, so that one reading finds both.
    finite = torch.isfinite(values.abs().amax(dim=-1))
    first.copy_(torch.where(finite, first, first.clamp(max=layer)))
