"""Memory of KV pages that comes and goes in groups of pages, at addresses that stay.

    pages          | 0 … G-1 | G … 2G-1 | 2G … |            a group has memory in every layer, or in none
    layer 0        | chunk   | chunk    |      |
    layer 1        | chunk | chunk | chunk |   |            a chunk is mapped while any group lies in it

Rows of layers differ, so groups need not begin where chunks do. Knows nothing of who uses a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.device.virtual_memory import PhysicalPool, VirtualRange


@dataclass(eq=False, slots=True)
class _Tensor:
    """One layer's pages; filled by `ElasticPages.allocate`."""

    range: VirtualRange
    row_bytes: int  # Of one page.
    pages: torch.Tensor  # uint8 [num_pages, row_bytes]
    groups_in: NDArray[np.int32]  # By place of the range: how many groups with memory lie in it.


class ElasticPages:
    """The elastic pages of one cache, whose tensors `allocate` makes. Driven by one thread."""

    def __init__(self, pool: PhysicalPool, num_pages: int, row_bytes: int) -> None:
        """`num_pages`: the most there may be; `row_bytes`: a page's in the layer with the largest rows."""
        self.pool, self.num_pages = pool, num_pages
        self.pages_per_group = max(1, round(pool.chunk_bytes / row_bytes))
        self.num_groups = -(-num_pages // self.pages_per_group)
        self.present: set[int] = set()  # Groups that have memory.
        self._tensors: list[_Tensor] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates as `kv_cache.Allocate`: no page has memory yet. One chunk of the pool has to be free."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if not row_bytes:
            return torch.zeros(tuple(shape), dtype=dtype, device=device)
        held = VirtualRange(self.pool, self.num_pages * row_bytes)
        memory = held.tensor()
        rows = memory.view(self.num_pages, row_bytes)
        self._tensors.append(_Tensor(held, row_bytes, rows, np.zeros(held.places, np.int32)))
        return memory.view(dtype).view(tuple(shape))

    def pages_of(self, group: int) -> range:
        """Returns the pages of a group."""
        first = group * self.pages_per_group
        return range(first, min(first + self.pages_per_group, self.num_pages))

    def chunks_for(self, groups: Sequence[int]) -> int:
        """Chunks of the pool that these groups, which ascend and have no memory, would take."""
        needed = 0
        for tensor in self._tensors:
            last = -1
            for group in groups:
                places = self._places(tensor, group)
                new = np.flatnonzero(tensor.groups_in[places.start : places.stop] == 0) + places.start
                needed += int((new > last).sum())
                last = max(last, places.stop - 1)
        return needed

    def add(self, groups: Iterable[int]) -> None:
        """Gives groups memory, zeros. Raises VirtualMemoryUnavailable where the pool has too little."""
        for group in groups:
            assert group not in self.present, f"group {group} has memory"
            pages = self.pages_of(group)
            for tensor in self._tensors:
                places = self._places(tensor, group)
                tensor.range.map(places)
                tensor.groups_in[places.start : places.stop] += 1
                tensor.pages[pages.start : pages.stop].zero_()
            self.present.add(group)

    def remove(self, groups: Iterable[int]) -> None:
        """Takes memory from groups, whose pages nothing reads or writes any more."""
        for group in groups:
            self.present.remove(group)
            for tensor in self._tensors:
                places = self._places(tensor, group)
                counts = tensor.groups_in[places.start : places.stop]
                counts -= 1
                tensor.range.unmap((np.flatnonzero(counts == 0) + places.start).tolist())

    @property
    def row_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return sum(tensor.row_bytes for tensor in self._tensors)

    @property
    def mapped(self) -> int:
        """Chunks that are mapped here."""
        return sum(int(np.count_nonzero(tensor.groups_in)) for tensor in self._tensors)

    @property
    def chunks_per_group(self) -> int:
        """Chunks that a group takes, about."""
        return sum(len(self._places(tensor, 0)) for tensor in self._tensors)

    def absent_pages(self) -> list[int]:
        """Returns pages without memory, ascending."""
        absent = (group for group in range(self.num_groups) if group not in self.present)
        return [page for group in absent for page in self.pages_of(group)]

    def holders(self) -> list[object]:
        """Returns all chunks that are mapped here, for checks."""
        return [handle for tensor in self._tensors for handle in tensor.range.holders()]

    def _places(self, tensor: _Tensor, group: int) -> range:
        pages, size = self.pages_of(group), self.pool.chunk_bytes
        first, end = pages.start * tensor.row_bytes, pages.stop * tensor.row_bytes
        return range(first // size, -(-end // size))
