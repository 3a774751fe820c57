"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpu_service.layers.linear import empty_parameter


class Embedding(nn.Module):
    """Row look-up; weight `[vocab_size, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` to `[T, hidden_size]`."""
        return functional.embedding(input_ids, self.weight)
