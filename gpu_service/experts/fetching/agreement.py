"""What tensor-parallel ranks that fetch agree on, on the device at the start of each decode step.

Every rank chooses for all of them, so all need the same prices and the same map at the same step, whatever
their hosts have seen so far: one rank may have opened the servers' segments, and another not yet. A step is
a captured graph that waits for no host. So each host writes a row of its own, the step gathers all rows, and
kernels of every rank conclude the same from them:

    row | prices of each layer | whether experts may be copied | which of them | changes of segments so far |

Prices are the first rank's, and 0 unless all may copy the same experts; when the sum of changes is another
one, slots are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from gpu_service.core.parallel import Collectives
from gpu_service.experts.fetching.slots import FetchState

# Columns from the end of a row.
_IS_OPEN, _EXPERTS, _CHANGES = -3, -2, -1
# float32 holds whole numbers below this.
_EXACT = 1 << 24


class FetchAgreement:
    """One rank's row, and what follows from all ranks'. All calls are made by the thread that launches."""

    def __init__(self, state: FetchState, group: Collectives, num_ranks: int) -> None:
        """`group`: over the ranks that have the same layers."""
        self._state, self._group, self._num_ranks = state, group, num_ranks
        self._changes = 0
        size = state.prices.numel() + 3
        # float32, as this rank's host last wrote it, and the sum of all changes that maps are of.
        self.row = torch.zeros(size, dtype=torch.float32, device=state.prices.device)
        self._seen = torch.zeros((), dtype=torch.float32, device=state.prices.device)

    def values(
        self, prices: Sequence[tuple[float, float]], addresses: torch.Tensor | None, is_changed: bool
    ) -> torch.Tensor:
        """Returns a row float32 for the host to upload to `row`.

        `addresses`: int64 `[layers, groups, E]` on the host, of what this rank may copy; None: nothing.
        `is_changed`: they are others than those of the row before.
        """
        self._changes = (self._changes + int(is_changed)) % (_EXACT // self._num_ranks)
        there = b"" if addresses is None else (addresses != 0).numpy().tobytes()
        tail = [float(addresses is not None), float(crc32(there) % _EXACT), float(self._changes)]
        return torch.tensor([value for layer in prices for value in layer] + tail, dtype=torch.float32)

    def agree(self) -> None:
        """Launches the exchange, which a graph may hold: prices and maps are those of all ranks then."""
        state = self._state
        rows = self._group.all_gather(self.row).view(self._num_ranks, -1)
        least, largest = rows.amin(0), rows.amax(0)
        is_agreed = least[_IS_OPEN] * (least[_EXPERTS] == largest[_EXPERTS])
        state.prices.copy_((rows[0, :_IS_OPEN] * is_agreed).view_as(state.prices))
        changes = rows[:, _CHANGES].sum()
        is_changed = changes != self._seen
        for held in (state.maps, state.places):
            held.masked_fill_(is_changed, -1)
        self._seen.copy_(changes)
