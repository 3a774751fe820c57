"""Rows of a step that kernels of a CPU attend with one by one, and what one call of several layers asks for.

Single tokens and chunks of a few (draft tokens) are such rows; those of longer chunks share what they read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from gpu_service.cache.kv_cache import PagedCache
from gpu_service.core.step import ForwardInputs
from moebius import _kernels

# Longer chunks gain more from sharing what they read than they lose by widening it.
_MOST_CHUNK_ROWS = 8


class AttendingRows(NamedTuple):
    """Rows of a step that one call computes, for one window or chunk of layers; int32 `[n]` each."""

    requests: torch.Tensor
    begins: torch.Tensor  # The first position that a row sees.
    ends: torch.Tensor  # After the last one.


class HostAttention(ABC):
    """An attention backend on a CPU whose kernels `_kernels.DecoderLayers` calls as well."""

    # Those of all dense layers of the process.
    threads: _kernels.DenseThreads

    @property
    @abstractmethod
    def paged_cache(self) -> PagedCache:
        """Returns what the layers store in and attend to, in the activations' type."""

    @abstractmethod
    def lone_rows(self, window: int | None, chunk: int | None) -> AttendingRows | None:
        """Returns what the planned step's rows see in layers of this window or chunk, where all of them are
        computed one by one; None: some are not.
        """


class LoneRow(NamedTuple):
    """One such row."""

    row: int  # Of the step.
    request: int
    position: int


def divide_rows(inputs: ForwardInputs) -> tuple[list[LoneRow], list[int]]:
    """Returns the rows that are computed one by one, and the requests whose rows are computed together.

    Rows of an image, which see one another, are computed together.
    """
    starts = inputs.query_start_loc
    rows: list[LoneRow] = []
    prompts: list[int] = []
    for request, kv_len in enumerate(inputs.seq_lens):
        begin, end = starts[request], starts[request + 1]
        is_masked = inputs.visible_ends is not None and end - begin > 1
        if end - begin > _MOST_CHUNK_ROWS or is_masked:
            prompts.append(request)
            continue
        first = kv_len - (end - begin)
        rows += [LoneRow(begin + i, request, first + i) for i in range(end - begin)]
    return rows, prompts
