"""Token embedding and output head, divided over tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from gpu_service.layers.linear import CheckpointPart, Linear, empty_parameter
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import Span, padded_vocab, vocab_span


class Embedding(nn.Module):
    """Row look-up; a rank holds the rows of its part of the vocabulary, padded with zeros to equal parts."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, parallel: ParallelContext = SOLO
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(padded_vocab(vocab_size, parallel), hidden_size, dtype=dtype)
        self._span = vocab_span(vocab_size, parallel)
        self._hidden_size = hidden_size
        self._parallel = parallel

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` to `[T, hidden_size]`: each id's row from the rank that has it, zeros from others."""
        if self._parallel.tp_size == 1:
            return functional.embedding(input_ids, self.weight)
        rows = input_ids - self._span.begin
        elsewhere = (rows < 0) | (rows >= self._span.size)
        embedded = functional.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.tensor_group.all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """See `layers.linear.Divided`."""
        yield CheckpointPart("", "weight", self._span, Span.whole(self._hidden_size))


class Head(Linear):
    """The output projection; a rank computes the logits of its part of the vocabulary."""

    def __init__(
        self, hidden_size: int, vocab_size: int, *, dtype: torch.dtype, parallel: ParallelContext = SOLO
    ) -> None:
        super().__init__(hidden_size, padded_vocab(vocab_size, parallel), bias=False, dtype=dtype)
        self._span = vocab_span(vocab_size, parallel)
        self._hidden_size = hidden_size

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """See `layers.linear.Divided`."""
        yield CheckpointPart("", "weight", self._span, Span.whole(self._hidden_size))


def gather_logits(logits: torch.Tensor, vocab_size: int, parallel: ParallelContext) -> torch.Tensor:
    """Each rank's `[L, padded part]` to all ranks' `[L, vocab_size]`."""
    if parallel.tp_size == 1:
        return logits
    return parallel.tensor_group.all_gather(logits)[:, :vocab_size]
