"""Fetch slots of a GPU in simulated time: experts that a decode step lacks, copied within it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.fetching.fetcher import BESIDE_SERVERS
from gpu_service.experts.fetching.kernels import kept_after

# Half-life of the share of choices that slots hold, steps.
_SHARE_OVER = 128.0


class FetchSlots:
    """The rule of `gpu_service.experts.fetching.kernels`, for all layers at once."""

    def __init__(self, layers: int, num_experts: int, count: int, read_s: float, copy_s: float) -> None:
        """`count` slots of each layer; seconds in which servers read an expert, and the link copies one."""
        self._count, self._read_s, self._copy_s = count, read_s, BESIDE_SERVERS * copy_s
        self._held = np.zeros((layers, num_experts), np.bool_)
        self._scores = np.zeros((layers, num_experts))
        # Decayed sums of choices that were not resident, and of those that slots held.
        self._pairs = self._hits = 0.0

    @property
    def share(self) -> float:
        """The share in slots of the latest choices that were not resident."""
        return self._hits / self._pairs if self._pairs else 0.0

    def step(self, chosen: NDArray[np.integer], rows: int) -> tuple[int, float]:
        """Returns the experts copied, and the seconds of all layers for experts that are not resident.

        chosen: `[layers, num_experts]`, how many of `rows` token rows chose an expert; 0 of residents.
        """
        pairs = chosen.astype(np.float64)
        self._scores = self._scores * kept_after(rows) + pairs
        missing = (pairs > 0) & ~self._held
        left, copied = self._give_to_link(pairs, missing)
        kept = 0.5 ** (1 / _SHARE_OVER)
        self._pairs = kept * self._pairs + float(pairs.sum())
        self._hits = kept * self._hits + float(pairs[self._held].sum())
        seconds = np.maximum(left.sum(axis=1) * self._read_s, copied * self._copy_s)
        return int(copied.sum()), float(seconds.sum())

    def _give_to_link(
        self, pairs: NDArray[np.float64], missing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns the experts that servers read, `[layers, num_experts]`, and how many are copied,
        `[layers]`.
        """
        layers = np.arange(len(pairs))
        newcomers = np.where(missing, self._scores, -1.0)
        leavers = np.where(self._held & (pairs == 0), self._scores, np.inf)
        left, copied = (pairs * missing).sum(axis=1), np.zeros(len(pairs), np.int64)
        now, occupied = left * self._read_s, self._held.sum(axis=1)
        goes_on = left > 0
        while goes_on.any():
            best, leaver, has_room = newcomers.argmax(axis=1), leavers.argmin(axis=1), occupied < self._count
            own, most, least = pairs[layers, best], newcomers.max(axis=1), leavers.min(axis=1)
            then = np.maximum((left - own) * self._read_s, (copied + 1) * self._copy_s)
            goes_on &= (most > 0) & (has_room | np.isfinite(least))
            gained = np.maximum(most - own - np.where(has_room, 0.0, least), 0.0)
            goes_on &= then < now + gained * self._read_s
            taken, full = np.flatnonzero(goes_on), np.flatnonzero(goes_on & ~has_room)
            self._held[full, leaver[full]], leavers[full, leaver[full]] = False, np.inf
            self._held[taken, best[taken]], newcomers[taken, best[taken]] = True, -1.0
            left[taken] -= own[taken]
            now[taken], occupied = then[taken], occupied + (goes_on & has_room)
            copied[taken] += 1
        return missing & ~self._held, copied
