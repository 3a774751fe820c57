"""Memory for the results of splits."""

from __future__ import annotations

import torch

from gpu_service.attention.triton_kernels.shapes import MAX_PROGRAMS_PER_SM, streaming_multiprocessors

Partial = tuple[torch.Tensor, torch.Tensor]


class PartialResults:
    """One piece for all steps of a backend, captured or not: in stream order, no two use it at a time.

    `num_splits` bounds how many programs share keys, so the size is known before any step: 4 MiB for 8 heads
    of 128 elements on an H200.
    """

    def __init__(self, heads_per_program: int, width: int, device: torch.device) -> None:
        self._width = width
        capacity = MAX_PROGRAMS_PER_SM * streaming_multiprocessors(device) * heads_per_program
        self._results = torch.empty(capacity * width, dtype=torch.float32, device=device)
        self._lse = torch.empty(capacity, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._results.nbytes + self._lse.nbytes

    def take(self, num_rows: int, num_heads: int, splits: int) -> Partial | None:
        """float32 `[num_rows, num_heads, splits, width]` and `[num_rows, num_heads, splits]`; one: None."""
        if splits == 1:
            return None
        count = num_rows * num_heads * splits
        results = self._results[: count * self._width].view(num_rows, num_heads, splits, self._width)
        return results, self._lse[:count].view(num_rows, num_heads, splits)
