"""Where a residual stream first left the numbers that its type holds."""

from __future__ import annotations

import torch

from gpu_service.ops.registry import Op

# Of a row all of whose values have been finite; more than any layer's number.
NO_OVERFLOW = 2**31 - 1
# What comes before and after all layers.
EMBEDDING, FINAL_NORM = -1, 2**30


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
